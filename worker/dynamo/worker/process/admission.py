"""Whether the frontends that are alive have admitted this instance: until then a worker is not ready, and a rollout waits for it.

    asks, every 0.2 to 1 s → each process of each frontend responds yes or no → all yes: admitted

A worker asks from before it registers, so that it knows which processes there are. One that is silent for `SILENT_S` counts as
dead. Without any, nats-server says so at once. Whatever frontends say, the instance counts as admitted after `--ready-timeout`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import TypeAlias

import msgspec

from dynamo.common.admission import AdmissionQuery, AdmissionReport
from dynamo.common.messaging.nats.connection import Connection
from dynamo.common.messaging.unreadable import Unreadable
from dynamo.common.names import Endpoint, InstanceId
from dynamo.common.process.background import running

log = logging.getLogger(__name__)

LISTEN_S = 1.0
"""For so long after the first query, processes may respond that are not known yet."""
SILENT_S = 5.0
"""A process that has not responded for so long is dead: loading a tokenizer holds a process for less."""
MAX_PROCESSES = 1024
"""Further ones are not waited for."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 1.0


Registered: TypeAlias = Callable[[], Sequence[str] | None]
"""Returns the names of the models that are registered now; None: they are still to be."""


class AdmissionCount:
    """What processes of frontends have said. Plain computation; times are in seconds of any clock."""

    def __init__(self) -> None:
        self._asked = 0
        self._asked_at: float | None = None
        """When the first query was sent."""
        self._are_none = 0
        """The last query without a subscriber."""
        self._heard_at: dict[str, float] = {}
        self._admitted: dict[str, int] = {}
        """The last query to which each process said yes."""

    def ask(self, now: float) -> int:
        """Return the number of the next query."""
        self._asked += 1
        self._asked_at = now if self._asked_at is None else self._asked_at
        return self._asked

    def none_subscribed(self) -> None:
        """There is no process that takes queries."""
        self._are_none = self._asked
        self._heard_at.clear()

    def take(self, report: AdmissionReport, now: float) -> None:
        """Take a response. One to a query that was never sent is invented, and is ignored."""
        if report.number > self._asked or (report.origin not in self._heard_at and len(self._heard_at) >= MAX_PROCESSES):
            return
        self._heard_at[report.origin] = now
        if report.is_admitted:
            self._admitted[report.origin] = max(report.number, self._admitted.get(report.origin, 0))

    def missing(self, since: int, now: float) -> list[str] | None:
        """Return the processes that have not admitted the instance by query `since` or later; None: others may yet respond."""
        if self._are_none >= since:
            return []
        self._heard_at = {origin: at for origin, at in self._heard_at.items() if now - at < SILENT_S}
        if self._asked_at is None or self._asked < since or now - self._asked_at < LISTEN_S:
            return None
        return [origin for origin in self._heard_at if self._admitted.get(origin, 0) < since]


class Admission:
    """Asks the frontends. Use `asked_frontends`."""

    def __init__(
        self,
        bus: Connection,
        endpoint: Endpoint,
        instance: InstanceId,
        models: Registered,
        timeout_s: float,
    ) -> None:
        self.admitted = asyncio.Event()
        """Set once the frontends that are alive have admitted the instance, or `--ready-timeout` has passed."""
        self._bus = bus
        self._subject = endpoint.admission_subject(instance)
        self._reply = endpoint.admitted_subject(instance)
        self._models = models
        self._timeout_s = timeout_s
        self._count = AdmissionCount()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(AdmissionReport)
        self._unreadable = Unreadable("a response about the admission")
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()

    def received(self, subject: str, reply: str, payload: memoryview, no_responders: bool) -> None:
        """Take a response."""
        if no_responders:
            self._count.none_subscribed()
        elif (report := self._unreadable.read(self._decoder, subject, payload)) is not None:
            self._count.take(report, self._loop.time())
        self._news.set()

    async def run(self) -> None:
        """Ask until the instance is admitted."""
        since: int | None = None
        until, pause_s = 0.0, _FIRST_PAUSE_S
        while True:
            await self._bus.connected()
            now, models = self._loop.time(), self._models()
            number = self._count.ask(now)
            if models is None:
                since = None
            elif since is None:
                since, until, pause_s = number, now + self._timeout_s, _FIRST_PAUSE_S
            self._bus.publish_nowait(
                self._subject, self._encoder.encode(AdmissionQuery(number, tuple(models or ()))), self._reply
            )
            if since is not None and await self._is_admitted(since, min(until, now + pause_s)):
                break
            if since is not None and self._loop.time() >= until:
                missing = self._count.missing(since, self._loop.time()) or []
                log.warning("%d processes of frontends have not admitted this instance after %g s", len(missing), self._timeout_s)
                break
            if since is None:
                await asyncio.sleep(_FIRST_PAUSE_S)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        self.admitted.set()

    async def _is_admitted(self, since: int, until: float) -> bool:
        """Return True as soon as no process is missing, False at `until`."""
        with suppress(TimeoutError):
            async with asyncio.timeout_at(until):
                while self._count.missing(since, self._loop.time()) != []:
                    self._news.clear()
                    await self._news.wait()
                return True
        return self._count.missing(since, self._loop.time()) == []


@asynccontextmanager
async def asked_frontends(
    bus: Connection, endpoint: Endpoint, instance: InstanceId, models: Registered, timeout_s: float
) -> AsyncIterator[Admission]:
    """Ask the frontends while the body runs, until they have admitted the instance.

    `timeout_s` begins when the models are registered; 0: nothing is asked.
    """
    admission = Admission(bus, endpoint, instance, models, timeout_s)
    if not timeout_s:
        admission.admitted.set()
        yield admission
        return
    async with bus.subscribed(endpoint.admitted_subject(instance), admission.received), running(admission.run(), "admission"):
        yield admission
