"""A router's index over a real nats-server, with workers whose events are lost, repeated, delayed and reordered."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from random import Random

import pytest

from dynamo.common.discovery import Instance
from dynamo.common.messaging.buffers import Body, Buffer
from dynamo.common.messaging.nats.connection import connect_nats
from dynamo.common.messaging.request_plane.client import open_client
from dynamo.common.messaging.request_plane.server import serve_requests
from dynamo.common.model_card import LlmInfo, ModelCard, ModelKind
from dynamo.common.names import Endpoint, InstanceId
from dynamo.common.options import NatsOptions
from dynamo.frontend.fleet.kv.feed import open_kv_feed
from dynamo.frontend.router.kv import KvRouter
from dynamo.worker.process.publisher import publishing
from tests.support.bad_bus import BadBus, CachingEngine
from tests.support.fakes import FakeDirectory
from tests.support.servers import NatsServer

CARD = ModelCard(name="m", kind=ModelKind.LLM, llm=LlmInfo(context_length=4096, tokenizer="t", block_size=16))


class Directory(FakeDirectory):
    def mark_up(self, instance: InstanceId) -> None:
        pass


@pytest.mark.parametrize("seed", range(3))
async def test_after_a_while_of_quiet_the_index_equals_the_workers_own_copies(
    nats_server: NatsServer, namespace: str, seed: int
) -> None:
    rng, endpoint, config = Random(seed), Endpoint(namespace=namespace), NatsOptions(servers=(nats_server.url,))
    engines: dict[InstanceId, CachingEngine] = {}
    buses: list[BadBus] = []
    registered: list[Instance] = []
    router = KvRouter()
    async with AsyncExitStack() as stack:
        for number in range(4):
            connection = await stack.enter_async_context(connect_nats(config, f"worker {number}"))
            instance = InstanceId(rng.randrange(2**63))
            engine = engines[instance] = CachingEngine(rng, log_bytes=rng.choice([1000, 1 << 20]))
            buses.append(BadBus(connection.publish_nowait, rng))
            publishers = await stack.enter_async_context(publishing(buses[-1], endpoint, instance, [("m", engine)]))
            await stack.enter_async_context(serve_requests(connection, endpoint, instance, publishers.handlers))
            subject = endpoint.rpc_subject(instance)
            registered.append(Instance(id=instance, endpoint=endpoint, subject=subject, card=CARD, started_at=0.0))
        nats = await stack.enter_async_context(connect_nats(config, "frontend"))
        client = await stack.enter_async_context(open_client(nats, namespace))

        async def request(instance: Instance, verb: str, body: Body, deadline: float) -> Buffer:
            return await client.open(instance.id, instance.subject, verb, body, deadline=deadline).result()

        directory = Directory(*registered)
        await stack.enter_async_context(open_kv_feed(nats, directory, request, router, router.loads))
        for _ in range(300):
            rng.choice(list(engines.values())).step(blocks=200)
            await asyncio.sleep(0)
        for bus in buses:
            bus.be_good()
        async with asyncio.timeout(120):
            while any(not engine.is_mirrored(router.index("m"), instance) for instance, engine in engines.items()):
                await asyncio.sleep(0.01)
