"""An HTTP edge that stores responses in memory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry

from dynamo.frontend.api.openai.store.background import BackgroundResponses
from dynamo.frontend.api.openai.store.owned import Storage
from dynamo.frontend.api.openai.store.quota import StoredBytes
from dynamo.frontend.api.openai.store.stored import StoredResponses
from dynamo.frontend.config import CapacityOptions
from dynamo.frontend.fleet.peers.response_changes import ResponseChanges
from dynamo.frontend.metrics import FrontendMetrics
from dynamo.frontend.preprocess.parsers import OutputParsers
from tests.support.fake_bus import FakeBus, FakeConnection
from tests.support.fake_records import FakeRecords
from tests.support.fakes import FakeStream
from tests.support.http_edge import HttpEdge, open_http_edge

PATH = "/v1/responses"
HELLO: dict[str, Any] = {"model": "talker", "input": "Hi"}


@dataclass
class Storing:
    """An edge that stores responses in memory."""

    edge: HttpEdge
    records: FakeRecords
    nats: FakeConnection
    now: list[float] = field(default_factory=lambda: [1000.0])
    """The clock of the store, and of this process."""

    async def create(self, **fields: Any) -> dict[str, Any]:
        response = await self.edge.post(PATH, HELLO | fields)
        assert response.status_code == 200, response.text
        created: dict[str, Any] = response.json()
        return created

    async def read(self, id: str) -> dict[str, Any]:
        response = await self.edge.http.get(f"{PATH}/{id}")
        assert response.status_code == 200, response.text
        read: dict[str, Any] = response.json()
        return read

    async def reached(self, id: str, *statuses: str) -> dict[str, Any]:
        """Return a response once it has one of the statuses."""
        async with asyncio.timeout(120):
            while (response := await self.read(id))["status"] not in statuses:
                await asyncio.sleep(0)
        return response


def storage_of(records: Any, clock: Callable[[], float] = time.time, quota: StoredBytes | None = None) -> Storage:
    """Return the namespace `ns` of records in memory."""
    return Storage(records, "ns", clock, quota)


def stored_responses(
    records: FakeRecords,
    metrics: FrontendMetrics | None = None,
    *,
    nats: FakeConnection | None = None,
    look_s: float = 60.0,
    by_default: bool = True,
    **options: Any,
) -> StoredResponses:
    """Return responses that are stored in memory, with the options of `storage_of`; call it in an event loop."""
    changes = ResponseChanges(nats or FakeConnection(FakeBus()), "ns", look_s=look_s)
    metrics = metrics or FrontendMetrics(CollectorRegistry())
    return StoredResponses(storage_of(records, **options), changes, metrics, by_default=by_default)


@asynccontextmanager
async def storing(
    respond: Callable[[FakeStream], None],
    *,
    by_default: bool = True,
    beat_s: float = 60.0,
    capacity: CapacityOptions | None = None,
    records: FakeRecords | None = None,
    bus: FakeBus | None = None,
    look_s: float = 60.0,
    parsers: OutputParsers | None = None,
    quota: StoredBytes | None = None,
) -> AsyncIterator[Storing]:
    """`look_s`: how often those that follow a response look into the store without an announcement."""
    records, now = records or FakeRecords(), [1000.0]
    records.clock = lambda: now[0]
    nats = FakeConnection(bus or FakeBus())
    made: list[BackgroundResponses] = []

    def background(metrics: FrontendMetrics) -> BackgroundResponses:
        options: dict[str, Any] = {"by_default": by_default, "clock": lambda: now[0], "quota": quota}
        stored = stored_responses(records, metrics, nats=nats, look_s=look_s, **options)
        made.append(BackgroundResponses(stored, beat_s=beat_s))
        return made[0]

    async with open_http_edge(respond=respond, background=background, capacity=capacity, parsers=parsers) as edge:
        try:
            yield Storing(edge, records, nats, now)
        finally:
            await made[0].drain(0.0)
