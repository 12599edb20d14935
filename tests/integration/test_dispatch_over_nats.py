"""The dispatcher over a real nats-server: instances that vanish, and a bus that goes away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import CollectorRegistry

from dynamo.common.discovery import Instance
from dynamo.common.messaging.nats.connection import Connection, connect_nats
from dynamo.common.messaging.request_plane.client import open_client
from dynamo.common.messaging.request_plane.incoming import Incoming
from dynamo.common.messaging.request_plane.server import serve_requests
from dynamo.common.names import Endpoint, InstanceId, new_instance_id
from dynamo.common.options import NatsOptions
from dynamo.frontend.metrics import FrontendMetrics
from dynamo.frontend.router.simple import RoundRobin
from dynamo.frontend.security.accounts import ANONYMOUS
from dynamo.frontend.serving.call import Call, Work
from dynamo.frontend.serving.dispatch.dispatcher import Dispatcher
from tests.support.fakes import FakeDirectory, tensor_card
from tests.support.servers import NatsServer, start_nats
from tests.support.waiting import WAIT_S


@dataclass
class Worker:
    """Holds requests until it is let go, then answers with its own id."""

    id: InstanceId
    connection: Connection
    holding: asyncio.Event
    go: asyncio.Event

    async def infer(self, request: Incoming) -> None:
        self.holding.set()
        await self.go.wait()
        request.end(f"{self.id:x}".encode())


@dataclass
class Fleet:
    dispatcher: Dispatcher
    workers: list[Worker]
    registry: CollectorRegistry
    metrics: FrontendMetrics

    async def call(self, body: bytes = b"?") -> int:
        work = Work(model="adder", verb="infer", body=body, metrics=self.metrics.for_model("adder"))
        deadline = asyncio.get_running_loop().time() + WAIT_S
        response = await self.dispatcher.stream(work, Call(account=ANONYMOUS, request_id="r", deadline=deadline)).result()
        return int(bytes(response), 16)


@asynccontextmanager
async def fleet(url: str, size: int) -> AsyncIterator[Fleet]:
    endpoint = Endpoint(namespace=f"t{new_instance_id():x}")
    config = NatsOptions(servers=(url,), reconnect_wait_s=0.05)
    workers: list[Worker] = []
    async with AsyncExitStack() as stack:
        ours = await stack.enter_async_context(connect_nats(config, "frontend"))
        client = await stack.enter_async_context(open_client(ours, endpoint.namespace))
        for _ in range(size):
            theirs = await stack.enter_async_context(connect_nats(config, "worker"))
            worker = Worker(new_instance_id(), theirs, asyncio.Event(), asyncio.Event())
            await stack.enter_async_context(serve_requests(theirs, endpoint, worker.id, {"infer": worker.infer}))
            workers.append(worker)
        registered = (
            Instance(
                id=worker.id,
                endpoint=endpoint,
                subject=endpoint.rpc_subject(worker.id),
                card=tensor_card(),
                started_at=0.0,
            )
            for worker in workers
        )
        dispatcher = Dispatcher(FakeDirectory(*registered), client, ours, RoundRobin())
        registry = CollectorRegistry()
        yield Fleet(dispatcher, workers, registry, FrontendMetrics(registry))


async def test_requests_held_by_an_instance_that_vanishes_are_answered_by_another(nats_server: NatsServer) -> None:
    async with fleet(nats_server.url, 2) as f, asyncio.timeout(120):
        victim, survivor = f.workers
        survivor.go.set()
        calls = [asyncio.create_task(f.call()) for _ in range(20)]
        await victim.holding.wait()
        await victim.connection.close()
        assert set(await asyncio.gather(*calls)) == {survivor.id}
        retries = f.registry.get_sample_value("dynamo_frontend_retries_total", {"model": "adder"})
        assert retries == 10, "half of the requests were on the victim, and nothing goes there any more"
        assert await f.call() == survivor.id


async def test_requests_outlive_a_bus_that_goes_away(tmp_path: Path) -> None:
    async with start_nats(tmp_path / "nats") as server, fleet(server.url, 2) as f, asyncio.timeout(120):
        for worker in f.workers:
            worker.go.set()
        assert await f.call() in {worker.id for worker in f.workers}
        server.kill()
        calls = [asyncio.create_task(f.call()) for _ in range(20)]
        await server.restart()
        assert set(await asyncio.gather(*calls)) <= {worker.id for worker in f.workers}
        assert await f.call() in {worker.id for worker in f.workers}


async def test_a_large_request_that_was_on_its_way_when_the_bus_went_away_is_sent_again(tmp_path: Path) -> None:
    async with start_nats(tmp_path / "nats") as server, fleet(server.url, 1) as f, asyncio.timeout(120):
        (worker,) = f.workers
        call = asyncio.create_task(f.call(bytes(2**20)))
        await worker.holding.wait()
        server.kill()
        await server.restart()
        worker.go.set()
        assert await call == worker.id
