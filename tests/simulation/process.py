"""A simulated frontend and a simulated worker: the real parts, on the simulated loop, network and etcd."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from random import Random

from prometheus_client import CollectorRegistry

from dynamo.common.discovery import Instance
from dynamo.common.errors import EngineError
from dynamo.common.etcd import connect_etcd
from dynamo.common.messaging.buffers import Body, Buffer
from dynamo.common.messaging.nats.connection import connect_nats
from dynamo.common.messaging.request_plane.client import RequestClient, open_client
from dynamo.common.messaging.request_plane.limits import KIB, PlaneLimits
from dynamo.common.names import Endpoint
from dynamo.common.options import EtcdOptions, LogOptions, NatsOptions, SharedMemoryOptions
from dynamo.common.process.background import running
from dynamo.common.shared_memory.sharing import SharedMemory, open_shared_memory
from dynamo.common.tensors.request import TensorRequest
from dynamo.frontend.config import KvRouterOptions, QueueOptions, RouterMode, RouterOptions, ServingOptions, Thresholds
from dynamo.frontend.fleet.directory import Directory, open_directory
from dynamo.frontend.fleet.event_bus import MESSAGES_PER_TURN, EventBus
from dynamo.frontend.fleet.kv.feed import open_kv_feed
from dynamo.frontend.fleet.peers.bookings import shared_bookings
from dynamo.frontend.fleet.peers.waiting_keys import shared_fairness
from dynamo.frontend.metrics import FrontendMetrics
from dynamo.frontend.router.kv import KvRouter
from dynamo.frontend.router.loads.table import LoadTable
from dynamo.frontend.router.select import follows_loads, make_router
from dynamo.frontend.serving.data_plane import DataPlane, open_data_plane
from dynamo.worker.app import Worker, open_worker
from dynamo.worker.config import WorkerConfig
from dynamo.worker.engine.base import Context, TensorResponse
from dynamo.worker.engine.echo import EchoTensors, echo_declaration
from dynamo.worker.engine.sim.engine import SimEngine
from dynamo.worker.process.engine_factory import sim_config
from tests.simulation.clock import Process
from tests.simulation.stores import Stores, open_stores
from tests.support.fakes import fake_texts

NAMESPACE = "simulated"
MAX_PAYLOAD = 64 * KIB
"""Largest message of the simulated nats-server."""
LIMITS = PlaneLimits(
    chunk_bytes=8 * KIB,
    first_flight_bytes=16 * KIB,
    unacknowledged_bytes=64 * KIB,
    first_unacknowledged_bytes=32 * KIB,
    budget_bytes=256 * KIB,
    window_bytes=2 * KIB,
    kept_credit_bytes=32 * KIB,
)
"""Small, so that small bodies meet every bound."""
NATS = NatsOptions(servers=("nats://127.0.0.1:4222",))
LANGUAGE_MODELS = {
    "sim": "blocks=200,block_size=4,speedup=50",
    "small": "blocks=48,block_size=4,speedup=4,cpu_blocks=64,disk_blocks=96,shared_blocks=256,failing_reads=0.05",
}
"""The simulated language models of each worker. The small one is slow, and evicts blocks all the time, also from its host."""
BUSY = Thresholds(active_decode_blocks=0.08)
"""Where requests may wait: two long ones make an instance busy."""
QUEUE_SIZE = 3
MODELS = ("echo", "repeater", "raising", *LANGUAGE_MODELS)


class _WorkerConfig(WorkerConfig):
    @property
    def limits(self) -> PlaneLimits:
        return LIMITS


class SleepyTensors(EchoTensors):
    """An echo model that can sleep: there is nothing that it would have to free."""

    def check_sleep(self) -> None:
        return

    async def sleep(self) -> None:
        return

    async def wake(self) -> None:
        return


class RaisingTensors(SleepyTensors):
    """A model whose every request fails, in more words than a NATS message may have."""

    async def infer(self, request: TensorRequest, context: Context) -> AsyncIterator[TensorResponse]:
        raise EngineError("no such key: " + "x" * 2 * MAX_PAYLOAD)
        yield


class SimulatedWorker:
    """A worker with the tensor models `echo`, `repeater`, which is decoupled, and `raising`, and the language models."""

    def __init__(self, name: str, memory: SharedMemoryOptions, drain_timeout_s: float = 5.0) -> None:
        self.process = Process(name)
        self.engines = {name: _sim_engine(name, settings) for name, settings in LANGUAGE_MODELS.items()}
        self.worker: Worker | None = None
        """None until it serves."""
        self._stop = asyncio.Event()
        self._config = _WorkerConfig(
            endpoint=Endpoint(namespace=NAMESPACE),
            drain_timeout_s=drain_timeout_s,
            log=LogOptions(),
            etcd=EtcdOptions(endpoints=("http://127.0.0.1:2379",)),
            nats=NATS,
            shared_memory=memory,
        )
        self.main = self.process.start(self._serve())

    def __repr__(self) -> str:
        return f"<SimulatedWorker {self.process!r}>"

    @property
    def memory(self) -> SharedMemory | None:
        return None if self.worker is None else self.worker.requests.memory

    def terminate(self) -> None:
        """As SIGTERM: drain and end."""
        self._stop.set()

    async def _serve(self) -> None:
        repeater = SleepyTensors(echo_declaration(name="repeater", decoupled=True))
        tensors = [SleepyTensors(), repeater, RaisingTensors(name="raising")]
        async with open_worker([*tensors, *self.engines.values()], self._config) as worker:
            self.worker = worker
            await self._stop.wait()


def _sim_engine(name: str, settings: str) -> SimEngine:
    return SimEngine(replace(sim_config(settings, name, None, None), tokenizer=b"", chat_template=b""))


class SimulatedFrontend:
    """A frontend without its HTTP and gRPC ports: what they call is called directly."""

    def __init__(
        self,
        name: str,
        mode: RouterMode,
        seed: int,
        memory: SharedMemoryOptions,
        *,
        has_queue: bool = False,
        has_stores: bool = False,
    ) -> None:
        self.process = Process(name)
        self._has_queue = has_queue
        self._has_stores = has_stores
        self.stores: Stores | None = None
        """None without them, and until it serves."""
        self._seed = seed
        self._was_ready = False
        self._memory = memory
        self.memory: SharedMemory | None = None
        self.mode = mode
        self.plane: DataPlane | None = None
        """None until it serves."""
        self.client: RequestClient
        self.directory: Directory
        self.loads: LoadTable
        self.events: EventBus
        self.kv: KvRouter | None = None
        self._stop = asyncio.Event()
        self.main = self.process.start(self._serve())

    def __repr__(self) -> str:
        return f"<SimulatedFrontend {self.process!r}>"

    @property
    def is_in_service(self) -> bool:
        """A load balancer sends requests here: the frontend has said at least once that it can serve each model."""
        plane = self.plane
        if not self._was_ready and plane is not None:
            self._was_ready = all(map(plane.model_ready, MODELS))
        return self._was_ready and plane is not None and not self.process.is_paused

    def terminate(self) -> None:
        """As SIGTERM, once a load balancer has seen the frontend off: leave, without a request open."""
        self._stop.set()

    async def _serve(self) -> None:
        async with self._open() as plane:
            self.plane = plane
            await self._stop.wait()
            self.plane = None

    @asynccontextmanager
    async def _open(self) -> AsyncIterator[DataPlane]:
        loop = asyncio.get_running_loop()
        async with AsyncExitStack() as stack:
            etcd = await stack.enter_async_context(connect_etcd(EtcdOptions(endpoints=("http://127.0.0.1:2379",))))
            self.directory = directory = await stack.enter_async_context(open_directory(etcd, NAMESPACE))
            nats = await stack.enter_async_context(connect_nats(NATS, self.process.name))
            self.memory = await stack.enter_async_context(open_shared_memory(self._memory))
            self.client = client = await stack.enter_async_context(open_client(nats, NAMESPACE, LIMITS, self.memory))
            events = await stack.enter_async_context(self._open_events())
            options = RouterOptions(
                mode=self.mode,
                replica_sync=self.mode is RouterMode.KV,
                kv=KvRouterOptions(speculative_ttl_s=0),
                thresholds=BUSY if self._has_queue else Thresholds(),
            )
            self.loads = loads = LoadTable(secrets.token_hex(8))
            router = make_router(options, loads, loop.time, rng=Random(self._seed))
            self.kv = router if isinstance(router, KvRouter) else None

            async def request(instance: Instance, verb: str, body: Body, deadline: float) -> Buffer:
                return await client.open(instance.id, instance.subject, verb, body, deadline=deadline).result()

            if follows_loads(options):
                feed = await stack.enter_async_context(open_kv_feed(events, directory, request, self.kv, loads, None))
                events.on_dropped(feed.suspend)
                events.on_resumed(feed.resume)
                if options.replica_sync:
                    endpoint = Endpoint(namespace=NAMESPACE)
                    await stack.enter_async_context(shared_bookings(events, endpoint, loads, feed.is_registered))
            settings = ServingOptions(queue=QueueOptions(size=QUEUE_SIZE if self._has_queue else 0))
            metrics = FrontendMetrics(CollectorRegistry())
            plane = await stack.enter_async_context(
                open_data_plane(directory, client, nats, router, fake_texts(), metrics, settings)
            )
            if plane.fair_shares is not None:
                await stack.enter_async_context(shared_fairness(nats, NAMESPACE, loads.origin, plane.fair_shares))
            await directory.ready.wait()
            if self._has_stores:
                self.stores = await stack.enter_async_context(open_stores(nats, etcd, NAMESPACE, plane, metrics))
            yield plane

    @asynccontextmanager
    async def _open_events(self) -> AsyncIterator[EventBus]:
        name = f"{self.process.name} events"
        async with connect_nats(NATS, name, messages_per_turn=MESSAGES_PER_TURN) as nats:
            self.events = EventBus(nats)
            async with running(self.events.watch(), "the lag of events"):
                yield self.events
