"""A frontend and workers in this process: the real ones, with their HTTP and gRPC servers, where all around them is simulated.

Time is virtual, every message takes equally long, and what is random comes from a seed, so that each run does the same.
"""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

from benchmarks.costs.counting import Count
from benchmarks.costs.edge import LATENCY_S, join
from benchmarks.costs.python_model import EchoSocket, Stubs
from dynamo.common.etcd import client as etcd_client
from dynamo.common.messaging.jetstream import store as file_store
from dynamo.common.names import Endpoint
from dynamo.common.options import EtcdOptions, LogOptions, NatsOptions, SharedMemoryOptions
from dynamo.frontend.app import Frontend, serve_frontend
from dynamo.frontend.config import FrontendConfig, GrpcOptions, HttpOptions, PickerOptions, RouterMode, RouterOptions
from dynamo.frontend.preprocess import offload
from dynamo.worker.app import open_worker
from dynamo.worker.config import WorkerConfig
from dynamo.worker.process.engine_factory import AnyEngine
from dynamo.worker.repository.python import python_backend
from tests.simulation.clock import Process, SimulatedLoop, current_process
from tests.simulation.etcd_server import SimulatedEtcd, SimulatedTransport
from tests.simulation.nats_server import Client, SimulatedNats
from tests.simulation.network import ClientTransport, Network

_NATS = NatsOptions(servers=("nats://127.0.0.1:4222",))
_ETCD = EtcdOptions(endpoints=("http://127.0.0.1:2379",))
_NAMESPACE = "costs"


class _AtOnce(Executor):
    """Takes the place of threads: what they do is counted, and is done at the same moment in each run."""

    def __init__(self, threads: int, name: str) -> None:
        """There are none."""

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(function(*args, **kwargs))
        except Exception as error:
            done.set_exception(error)
        return done


class _Listener:
    sockets = ()

    def close(self) -> None:
        """No client connects any more."""

    async def wait_closed(self) -> None:
        """It is closed at once."""


class Loop(SimulatedLoop):
    """Clients reach servers by `dial`; what reads the socket of a Python model is called when there is something."""

    def __init__(self, count: Count) -> None:
        super().__init__()
        self._count = count
        self._servers: dict[int, tuple[Callable[[], asyncio.BaseProtocol], Process]] = {}

    async def create_server(self, protocol_factory: Any, *_: Any, sock: Any = None, **__: Any) -> Any:
        process = current_process()
        assert process is not None
        self._servers[sock.getsockname()[1]] = protocol_factory, process
        return _Listener()

    def dial(self, port: int, client: asyncio.BaseProtocol) -> None:
        """Connect a client with the server at a port."""
        server, process = self._servers[port]
        join(client, server, process.context, self._count)

    def add_reader(self, fd: Any, callback: Any, *args: Any) -> None:  # type: ignore[override]
        if not isinstance(fd, EchoSocket):
            return super().add_reader(fd, callback, *args)
        fd.readable = lambda: self.call_soon(callback, *args)

    def remove_reader(self, fd: Any) -> bool:
        return isinstance(fd, EchoSocket) or super().remove_reader(fd)

    def remove_writer(self, fd: Any) -> bool:
        return isinstance(fd, EchoSocket) or super().remove_writer(fd)


class _Network(Network):
    def latency(self, size: int, process: Process | None) -> float:
        return LATENCY_S


class _Nats(SimulatedNats):
    """Counts the messages of each process."""

    def __init__(self, network: Network, rng: Random, count: Count) -> None:
        super().__init__(network, rng)
        self._counted = count

    def publish(self, sender: Client | None, subject: bytes, reply: bytes, header: int, payload: bytes) -> None:
        if sender is not None:
            self._counted.add_to(sender.process_name, "NATS messages")
        super().publish(sender, subject, reply, header, payload)


@dataclass(frozen=True, slots=True)
class Fleet:
    """What runs: a frontend, and workers of which the first is counted."""

    loop: Loop
    frontend: Frontend
    frontend_process: Process
    worker_process: Process


@dataclass(slots=True)
class Plan:
    """What a fleet is to consist of."""

    engines: Sequence[Callable[[], AnyEngine]]
    """What makes the engine of each worker."""
    ready: Sequence[str]
    """Models to wait for."""
    workers: int = 1
    mode: RouterMode = RouterMode.ROUND_ROBIN
    picker: bool = False
    """Whether the frontend serves an endpoint picker."""
    stop: asyncio.Event = field(default_factory=asyncio.Event)


@asynccontextmanager
async def open_fleet(loop: Loop, count: Count, plan: Plan) -> AsyncIterator[Fleet]:
    """Run a fleet during the body. Only one at a time."""
    with ExitStack() as stack:
        etcd = SimulatedEtcd(loop, Random(3))
        for target, name, value in (*_chance(), *_services(etcd, count)):
            stack.enter_context(mock.patch.object(target, name, value))
        network = _Network(loop, Random(1))
        network.servers["127.0.0.1", 4222] = _Nats(network, Random(2), count)
        memory = SharedMemoryOptions(dir=Path(stack.enter_context(tempfile.TemporaryDirectory())))
        opened: asyncio.Queue[Frontend] = asyncio.Queue(1)
        workers = [Process("worker" if number == 0 else "other") for number in range(plan.workers)]
        frontend = Process("frontend")
        tasks = [process.start(_work(plan, memory)) for process in workers]
        tasks.append(frontend.start(_front(plan, memory, opened)))
        served = await opened.get()
        while not (all(map(served.plane.model_ready, plan.ready)) and _members(served, plan) == plan.workers):
            await asyncio.sleep(0.1)
            _raise_failures(tasks)
        yield Fleet(loop, served, frontend, workers[0])
        plan.stop.set()
        await asyncio.gather(*tasks)


def _members(frontend: Frontend, plan: Plan) -> int:
    instances = frontend.plane.models.registered()
    return len({instance.id for instance in instances if instance.card.name == plan.ready[0]})


def _raise_failures(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        if task.done():
            task.result()


async def _work(plan: Plan, memory: SharedMemoryOptions) -> None:
    config = WorkerConfig(
        endpoint=Endpoint(namespace=_NAMESPACE), drain_timeout_s=0, log=LogOptions(), etcd=_ETCD, nats=_NATS, shared_memory=memory
    )
    async with open_worker([make() for make in plan.engines], config):
        await plan.stop.wait()


async def _front(plan: Plan, memory: SharedMemoryOptions, opened: asyncio.Queue[Frontend]) -> None:
    config = FrontendConfig(
        namespace=_NAMESPACE,
        settle_s=0,
        drain_timeout_s=0,
        etcd=_ETCD,
        nats=_NATS,
        shared_memory=memory,
        http=HttpOptions(port=0),
        grpc=GrpcOptions(enabled=True, port=0),
        endpoint_picker=PickerOptions(enabled=plan.picker, port=0),
        router=RouterOptions(mode=plan.mode),
    )
    async with serve_frontend(config) as frontend:
        opened.put_nowait(frontend)
        await plan.stop.wait()


Patches = Iterator[tuple[Any, str, Any]]


class _Seeded(Random):
    """A source of chance that begins alike where it is not seeded."""

    def __init__(self, seed: Any = 1) -> None:
        super().__init__(seed)


def _chance() -> Patches:
    random.seed(4)
    rng = Random(5)
    yield secrets, "token_hex", lambda size=16: rng.randbytes(size).hex()
    yield secrets, "token_bytes", rng.randbytes
    yield secrets, "randbits", rng.getrandbits
    yield os, "urandom", rng.randbytes
    yield os, "getpid", lambda: 4321
    yield random, "Random", _Seeded


def _services(etcd: SimulatedEtcd, count: Count) -> Patches:
    yield etcd_client, "Transport", lambda config: SimulatedTransport(config, etcd)
    yield python_backend, "open_stub", Stubs(count).open
    yield offload, "ThreadPoolExecutor", _AtOnce
    files: dict[str, bytes] = {}

    async def put(_: file_store.FileStore, data: bytes) -> str:
        key = file_store.file_key(data)
        files[key] = data
        return key

    async def get(_: file_store.FileStore, key: str) -> bytes:
        return files[key]

    async def fetch(_: file_store.FileStore, keys: object) -> None:
        """Everything is here already."""

    for name, function in (("put", put), ("get", get), ("fetch", fetch)):
        yield file_store.FileStore, name, function
    write, received = ClientTransport.write, ClientTransport.received

    def counted_write(transport: ClientTransport, data: Any) -> None:
        count.add("sends")
        count.add("NATS bytes", len(data))
        write(transport, data)

    def counted_received(transport: ClientTransport, data: bytes) -> None:
        count.add("receives")
        received(transport, data)

    yield ClientTransport, "write", counted_write
    yield ClientTransport, "received", counted_received
