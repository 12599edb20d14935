"""KV-aware routing over a real etcd and nats-server: simulated engines, their publishers, and a frontend that follows them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from dynamo.common.generation import Sampling, Stop, Summary
from dynamo.common.kv.events import KvMessage, KvUpdate, message_encoder
from dynamo.common.names import Endpoint, InstanceId
from dynamo.common.options import EtcdOptions, LogOptions, NatsOptions
from dynamo.frontend.app import Frontend, serve_frontend
from dynamo.frontend.config import FrontendConfig, HttpOptions, RouterMode, RouterOptions
from dynamo.frontend.data_plane import Call
from dynamo.frontend.preprocess.text import TextRequest
from dynamo.frontend.router.explain import ExplainingRouter
from dynamo.frontend.router.kv import KvRouter
from dynamo.worker.app import Worker, open_worker
from dynamo.worker.config import WorkerConfig
from dynamo.worker.engine.select import sim_config
from dynamo.worker.engine.sim.engine import SimEngine
from tests.support.servers import EtcdServer, NatsServer

SIM = "blocks=200,block_size=16,speedup=0"


@dataclass(frozen=True, slots=True)
class Fleet:
    frontends: list[Frontend]
    workers: list[Worker]
    engines: dict[InstanceId, SimEngine]

    def router(self, frontend: int = 0) -> KvRouter:
        router = self.frontends[frontend].plane._dispatcher._router
        assert isinstance(router, ExplainingRouter)
        router = router.inner
        assert isinstance(router, KvRouter)
        return router

    async def ask(self, prompt: str, frontend: int = 0, tokens: int = 4) -> tuple[InstanceId, int, Summary]:
        """Where the request went, how many blocks of it the router thought to be there, and what it took."""
        request = TextRequest(
            model="sim", prompt=prompt, stop=Stop(max_tokens=tokens, ignore_eos=True), sampling=Sampling(seed=1)
        )
        async with self.frontends[frontend].plane.generate(request, Call(request_id="test")) as generation:
            while await generation.read():
                pass
            assert generation.choice is not None
            return generation.choice.instance.id, generation.choice.overlap_blocks, generation.summary

    def is_exact(self, frontend: int = 0) -> bool:
        """Whether the frontend's index holds just what every engine holds."""
        index = self.router(frontend).index("sim")
        return all(index.held(instance) == set(engine.kv._held) for instance, engine in self.engines.items())


@asynccontextmanager
async def fleet(
    etcd: EtcdServer, nats: NatsServer, namespace: str, *, workers: int = 2, frontends: int = 1, replica_sync: bool = False
) -> AsyncIterator[Fleet]:
    links = {"etcd": EtcdOptions(endpoints=(etcd.endpoint,)), "nats": NatsOptions(servers=(nats.url,)), "log": LogOptions()}
    async with AsyncExitStack() as stack:
        engines: dict[InstanceId, SimEngine] = {}
        opened: list[Worker] = []
        for _ in range(workers):
            engine = SimEngine(sim_config(SIM, "sim", None, None))
            config = WorkerConfig(endpoint=Endpoint(namespace=namespace), drain_timeout_s=5, **links)
            opened.append(await stack.enter_async_context(open_worker(engine, config)))
            engines[opened[-1].instance] = engine
        options = RouterOptions(mode=RouterMode.KV, replica_sync=replica_sync, speculative_ttl_s=0)
        settings = FrontendConfig(namespace=namespace, router=options, http=HttpOptions(port=0), settle_s=0, **links)
        fronts = [await stack.enter_async_context(serve_frontend(settings)) for _ in range(frontends)]
        found = Fleet(fronts, opened, engines)
        for frontend in fronts:
            await until(lambda frontend=frontend: frontend.plane.model_ready("sim"))  # type: ignore[misc]
            await until(lambda frontend=frontend: len(frontend.plane.models.instances("sim")) == workers)  # type: ignore[misc]
        yield found


async def until(condition: object, within_s: float = 10.0) -> None:
    """Returns once `condition()` holds; fails after `within_s`."""
    assert callable(condition)
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.005)


def prompt(number: int) -> str:
    return f"{number:04d} " + "the same words in each of them, many times over, to fill some blocks; " * 4


async def test_a_prompt_goes_where_its_prefix_lies(etcd_server: EtcdServer, nats_server: NatsServer, namespace: str) -> None:
    async with fleet(etcd_server, nats_server, namespace) as f:
        first = [await f.ask(prompt(number)) for number in range(6)]
        assert all(overlap == 0 for _, overlap, _ in first)
        await until(f.is_exact)
        for number, (instance, _, _) in enumerate(first):
            again, overlap, summary = await f.ask(prompt(number))
            assert again == instance
            assert overlap > 10
            assert summary.cached_tokens >= 16 * overlap


async def test_lost_repeated_and_stale_updates_are_made_up_for(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str
) -> None:
    async with fleet(etcd_server, nats_server, namespace, workers=1) as f:
        (instance,) = f.engines
        await f.ask(prompt(1))
        await until(f.is_exact)
        # Updates that nobody hears of, until the next one shows the hole.
        f.engines[instance].kv.store([1, 2, 3])
        assert f.engines[instance].kv.take_update() is not None
        await f.ask(prompt(2))
        await until(f.is_exact)
        # A repeated one changes nothing; one from far ahead makes the frontend ask.
        subject = Endpoint(namespace=namespace).kv_subject(instance)
        connection = f.workers[0].requests._connection
        for number in (0, 0, 900):
            connection.publish_nowait(subject, message_encoder.encode(KvMessage("sim", KvUpdate(number))))
        connection.publish_nowait(subject, b"\xc1 not a message")
        await f.ask(prompt(3))
        f.engines[instance].kv.store([4])  # the last one is lost: the load report tells that there was one
        f.engines[instance].kv.take_update()
        await until(f.is_exact)


async def test_a_frontend_that_starts_late_learns_everything(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str
) -> None:
    async with fleet(etcd_server, nats_server, namespace, frontends=2) as f:
        instance, _, _ = await f.ask(prompt(1), frontend=0)
        await until(lambda: f.is_exact(0) and f.is_exact(1))
        again, overlap, _ = await f.ask(prompt(1), frontend=1)
        assert again == instance
        assert overlap > 10


async def test_an_instance_that_left_is_forgotten(etcd_server: EtcdServer, nats_server: NatsServer, namespace: str) -> None:
    async with AsyncExitStack() as leaving, fleet(etcd_server, nats_server, namespace, workers=1) as f:
        engine = SimEngine(sim_config(SIM, "sim", None, None))
        links = {"etcd": EtcdOptions(endpoints=(etcd_server.endpoint,)), "nats": NatsOptions(servers=(nats_server.url,))}
        config = WorkerConfig(endpoint=Endpoint(namespace=namespace), drain_timeout_s=5, log=LogOptions(), **links)
        worker = await leaving.enter_async_context(open_worker(engine, config))
        await until(lambda: len(f.frontends[0].plane.models.instances("sim")) == 2)
        placed = [(await f.ask(prompt(number)))[0] for number in range(8)]
        assert worker.instance in placed
        index = f.router().index("sim")
        await until(lambda: bool(index.held(worker.instance)))
        await leaving.aclose()
        await until(lambda: not index.held(worker.instance))
        assert {(await f.ask(prompt(number)))[0] for number in range(8)} == {f.workers[0].instance}


async def test_bookings_are_shared_between_frontends(etcd_server: EtcdServer, nats_server: NatsServer, namespace: str) -> None:
    async with fleet(etcd_server, nats_server, namespace, frontends=2, replica_sync=True) as f:
        other = f.router(1).loads
        request = TextRequest(model="sim", prompt=prompt(1), stop=Stop(max_tokens=20_000, ignore_eos=True))
        async with f.frontends[0].plane.generate(request, Call(request_id="long")) as generation:
            await generation.read()
            await until(lambda: len(other) == 1)
        await until(lambda: len(other) == 0)
