"""Events that come faster than a frontend can handle them, over a real nats-server: requests do not notice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from random import Random

import pytest

from dynamo.common.discovery import Instance
from dynamo.common.kv.events import KvUpdate
from dynamo.common.messaging.buffers import Body, Buffer
from dynamo.common.messaging.nats.connection import Connection, connect_nats
from dynamo.common.messaging.request_plane.client import RequestClient, open_client
from dynamo.common.messaging.request_plane.incoming import Incoming
from dynamo.common.messaging.request_plane.server import serve_requests
from dynamo.common.model_card import LlmInfo, ModelCard, ModelKind
from dynamo.common.names import Endpoint, InstanceId, new_instance_id
from dynamo.common.options import NatsOptions
from dynamo.common.process.background import running
from dynamo.frontend.fleet.event_bus import MESSAGES_PER_TURN, EventBus
from dynamo.frontend.fleet.kv.feed import open_kv_feed
from dynamo.frontend.router.kv import KvRouter
from dynamo.worker.process.publisher import publishing
from tests.support.bad_bus import CachingEngine
from tests.support.fakes import FakeDirectory
from tests.support.servers import start_nats

pytestmark = pytest.mark.slow

CARD = ModelCard(name="m", kind=ModelKind.LLM, llm=LlmInfo(context_length=4096, tokenizer="t", block_size=16))
CONFIG = "max_pending: 2MB\n"
"""Less than the flood, so that nats-server closes a connection that is not read."""
SMALL, STREAMED = 64, 20


class SlowRouter(KvRouter):
    """Takes so long for an update that a burst of a few thousand is more than it can follow."""

    def apply(self, model: str, instance: InstanceId, update: KvUpdate) -> None:
        for _ in range(20_000):
            pass
        super().apply(model, instance, update)


class Fleet:
    """A worker that publishes as much as a test decides, and a frontend's connections and router."""

    def __init__(self, stack: AsyncExitStack, url: str, endpoint: Endpoint) -> None:
        self.engine = CachingEngine(Random(1), log_bytes=1 << 20)
        self.router = SlowRouter()
        id_ = new_instance_id()
        self.instance = Instance(id=id_, endpoint=endpoint, subject=endpoint.rpc_subject(id_), card=CARD, started_at=0.0)
        self.worker: Connection
        self.nats: Connection
        self.events: EventBus
        self.client: RequestClient
        self._stack = stack
        self._options = NatsOptions(servers=(url,))

    async def open(self) -> None:
        enter, endpoint, id_ = self._stack.enter_async_context, self.instance.endpoint, self.instance.id
        self.worker = await enter(connect_nats(self._options, "worker"))
        publishers = await enter(publishing(self.worker, endpoint, id_, [("m", self.engine)]))
        await enter(serve_requests(self.worker, endpoint, id_, {**publishers.handlers, "echo": echo, "stream": stream}))
        self.nats = await enter(connect_nats(self._options, "frontend"))
        events = await enter(connect_nats(self._options, "frontend events", messages_per_turn=MESSAGES_PER_TURN))
        self.events = EventBus(events, behind_s=0.5)
        await enter(running(self.events.watch(), "the lag of events"))
        self.client = await enter(open_client(self.nats, endpoint.namespace))
        directory = FakeDirectory(self.instance)
        feed = await enter(open_kv_feed(self.events, directory, self.query, self.router, self.router.loads))
        self.events.on_dropped(feed.suspend)
        self.events.on_resumed(feed.resume)

    async def query(self, instance: Instance, verb: str, body: Body, deadline: float) -> Buffer:
        return await self.client.open(instance.id, instance.subject, verb, body, deadline=deadline).result()

    async def request(self) -> None:
        assert await self.query(self.instance, "echo", bytes(SMALL), self.client.loop.time() + 30) == bytes(SMALL)

    async def read_stream(self) -> None:
        """Read a stream to its end. Raises as it fails."""
        opened = self.client.open(self.instance.id, self.instance.subject, "stream", b"")
        received = 0
        while responses := await opened.read():
            received += len(responses)
        assert received == STREAMED

    async def flood(self) -> None:
        """Publish updates faster than the router applies them, until cancelled."""
        while True:
            for _ in range(1000):
                self.engine.step(blocks=20)
            await self.worker.ping()  # nats-server has taken them

    @property
    def is_exact(self) -> bool:
        return self.router.uses_index and self.engine.is_mirrored(self.router.index("m"), self.instance.id)


async def echo(incoming: Incoming) -> None:
    incoming.end(incoming.body)


async def stream(incoming: Incoming) -> None:
    for _ in range(STREAMED):
        incoming.send_nowait(b"part")
        await asyncio.sleep(0.1)
    incoming.end()


@asynccontextmanager
async def flooded_fleet(folder: Path, namespace: str) -> AsyncIterator[Fleet]:
    async with start_nats(folder, config=CONFIG) as server, AsyncExitStack() as stack:
        fleet = Fleet(stack, server.url, Endpoint(namespace=namespace))
        await fleet.open()
        yield fleet


async def test_a_flood_of_events_fails_no_request_and_closes_no_stream(tmp_path: Path, namespace: str) -> None:
    async with flooded_fleet(tmp_path, namespace) as f, asyncio.timeout(120):
        f.engine.step(blocks=50)
        while not f.is_exact:
            await asyncio.sleep(0.01)
        async with running(f.flood(), "flood"), asyncio.TaskGroup() as streams:
            for _ in range(5):
                streams.create_task(f.read_stream())
            while not f.events.is_dropped:
                await f.request()
            assert not f.router.uses_index
            for _ in range(20):
                await f.request()
        assert f.nats.reconnected_at == float("-inf"), "the connection of requests was never lost"
        f.engine.step(blocks=50)
        while not f.is_exact:
            await f.request()
