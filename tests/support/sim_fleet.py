"""Simulated engines, their publishers, and frontends that follow them, all in this process, over a real etcd and nats-server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from dynamo.common.generation import Sampling, Stop, Summary
from dynamo.common.kv.tiers import Tier
from dynamo.common.names import Endpoint, InstanceId
from dynamo.common.options import EtcdOptions, LogOptions, NatsOptions
from dynamo.frontend.app import Frontend, serve_frontend
from dynamo.frontend.config import FrontendConfig, HttpOptions, KvRouterOptions, RouterMode, RouterOptions
from dynamo.frontend.preprocess.text import TextRequest
from dynamo.frontend.router.base import RouterWrapper
from dynamo.frontend.router.kv import KvRouter
from dynamo.frontend.security.accounts import ANONYMOUS, Account
from dynamo.frontend.serving.call import Call
from dynamo.worker.app import Worker, open_worker
from dynamo.worker.config import StatusOptions, WorkerConfig
from dynamo.worker.engine.sim.engine import SimEngine
from dynamo.worker.process.engine_factory import sim_config
from tests.support.plane import generate
from tests.support.servers import EtcdServer, NatsServer
from tests.support.waiting import until

if TYPE_CHECKING:  # its package is not everywhere
    from dynamo.worker.engine.llama.engine import LlamaEngine

KV = RouterOptions(mode=RouterMode.KV, kv=KvRouterOptions(speculative_ttl_s=0))
"""Choose by KV caches, and by nothing but what workers have said of them."""
SIM = "blocks=200,block_size=16,speedup=0"
TIERED_SIM = "blocks=50,block_size=16,speedup=0,cpu_blocks=60,disk_blocks=80,shared_blocks=400"
"""Its GPU holds two of the prompts, the memory of its host three, its disk four."""


@dataclass
class SimFleet:
    """Frontends and workers with production's defaults, but for what the fields and arguments say.

    `durable`: workers record their KV events, and frontends begin with the record.

    `make` makes each worker's engine, which calls its model `model`.
    """

    etcd: EtcdServer
    nats: NatsServer
    namespace: str
    durable: bool = False
    status: StatusOptions = field(default_factory=StatusOptions)
    worker_options: Mapping[str, Any] = field(default_factory=dict)
    routing: RouterOptions = field(default_factory=RouterOptions)
    logins: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: {"frontend": {}, "worker": {}})
    """Options of each role for its connection to NATS."""
    model: str = "sim"
    make: Callable[[], SimEngine | LlamaEngine] = lambda: SimEngine(sim_config(SIM, "sim", None, None))
    frontends: list[Frontend] = field(default_factory=list)
    workers: list[Worker] = field(default_factory=list)
    engines: dict[InstanceId, SimEngine | LlamaEngine] = field(default_factory=dict)

    @asynccontextmanager
    async def worker(self) -> AsyncIterator[Worker]:
        """One more worker for the body."""
        engine = self.make()
        config = WorkerConfig(
            endpoint=Endpoint(namespace=self.namespace),
            **self.worker_options,
            durable_kv_events=self.durable,
            status=self.status,
            log=LogOptions(),
            etcd=EtcdOptions(endpoints=(self.etcd.endpoint,)),
            nats=NatsOptions(servers=(self.nats.url,), **self.logins["worker"]),
        )
        async with open_worker(engine, config) as worker:
            self.workers.append(worker)
            self.engines[worker.instance] = engine
            try:
                yield worker
            finally:
                self.workers.remove(worker)
                del self.engines[worker.instance]

    @asynccontextmanager
    async def frontend(self, **router: Any) -> AsyncIterator[int]:
        """One more frontend for the body, with these changes to the options of its router; its position."""
        config = FrontendConfig(
            namespace=self.namespace,
            router=replace(self.routing, durable_kv_events=self.durable, **router),
            http=HttpOptions(port=0),
            log=LogOptions(),
            etcd=EtcdOptions(endpoints=(self.etcd.endpoint,)),
            nats=NatsOptions(servers=(self.nats.url,), **self.logins["frontend"]),
        )
        async with serve_frontend(config) as frontend:
            await until(lambda: len(frontend.plane.models.instances(self.model)) == len(self.workers))
            self.frontends.append(frontend)
            try:
                yield self.frontends.index(frontend)
            finally:
                self.frontends.remove(frontend)

    def router(self, frontend: int = 0) -> KvRouter:
        """The router that chooses, out of those that watch it."""
        router = self.frontends[frontend].plane.router
        while isinstance(router, RouterWrapper):
            router = router.inner
        assert isinstance(router, KvRouter)
        return router

    async def generate(
        self, prompt: str, frontend: int = 0, tokens: int = 4, account: Account = ANONYMOUS
    ) -> tuple[InstanceId, int, Summary]:
        """Where the request went, how many blocks of it the router thought to be there, and what it took."""
        request = TextRequest(
            model=self.model, prompt=prompt, stop=Stop(max_tokens=tokens, ignore_eos=True), sampling=Sampling(seed=1)
        )
        async with generate(self.frontends[frontend].plane, request, Call(account=account, request_id="test")) as generation:
            while await generation.read():
                pass
            assert generation.decision is not None
            return generation.decision.instance.id, generation.decision.overlap_blocks, generation.summary

    def refuse_recovery(self) -> None:
        """From now on no worker tells what it holds, if asked."""
        for worker in self.workers:
            del worker.requests.handlers["snapshot"], worker.requests.handlers["events_since"]

    def is_exact(self, frontend: int = 0) -> bool:
        """Whether the frontend's index holds just what every engine holds, on every tier."""
        index = self.router(frontend).index(self.model)
        return all(
            index.held(instance, tier) == set(engine.kv.held(tier)) for instance, engine in self.engines.items() for tier in Tier
        )


@asynccontextmanager
async def sim_fleet(
    etcd: EtcdServer,
    nats: NatsServer,
    namespace: str,
    *,
    workers: int = 2,
    frontends: int = 1,
    routing: RouterOptions | None = None,
) -> AsyncIterator[SimFleet]:
    """A fleet that is ready."""
    fleet = SimFleet(etcd, nats, namespace, routing=routing or RouterOptions())
    async with AsyncExitStack() as stack:
        for _ in range(workers):
            await stack.enter_async_context(fleet.worker())
        for _ in range(frontends):
            await stack.enter_async_context(fleet.frontend())
        yield fleet


def prompt(number: int) -> str:
    """A prompt of some 20 blocks that shares none with those of other numbers."""
    return f"{number:04d} " + "the same words in each of them, many times over, to fill some blocks; " * 4
