"""A fleet whose processes reach etcd and nats-server through a proxy each, and what its processes hold."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

import httpx2

from dynamo.common.errors import DynamoError
from dynamo.common.process.ports import free_ports
from tests.drill import caches
from tests.drill.backends import Backends, Links, open_links
from tests.drill.caches import Caches, ObservedCaches, observed_caches
from tests.support.fleet import Fleet, FleetFrontend, FleetWorker
from tests.support.processes import Process
from tests.support.waiting import WAIT_S

_POLL_S = 0.5
MODELS = ("echo", "sim", "faulty", "stream", caches.MODEL)
_OWN = Path(__file__).with_name("model.py")
_ENGINES = ("echo", "sim:blocks=4000,speedup=2,seed=3", f"{_OWN}:Faulty", f"{_OWN}:Stream", caches.SETTINGS)
_FLAGS = [part for engine, name in zip(_ENGINES, MODELS, strict=True) for part in ("--model", engine, "--model-name", name)]


@dataclass(frozen=True)
class Held:
    """What the processes of a fleet hold together."""

    memory_mib: int
    files: int
    open_requests: int
    """Streams and requests that are open in frontends and workers."""
    credit_mib: int
    """What peers may yet send at once, of all processes."""

    def exceeds(self, before: Held) -> bool:
        """Whether more files are open, or less credit is free. Memory is returned to the system later, if at all."""
        return self.files > before.files or self.credit_mib < before.credit_mib


class DrilledFleet(Fleet):
    """As Fleet, with proxies between each process and the servers."""

    def __init__(self, backends: Backends, namespace: str, worker_flags: Sequence[str] = ()) -> None:
        super().__init__(backends.etcd[0], backends.nats[0], namespace, [*_FLAGS, *worker_flags])
        self.backends = backends
        self._links: dict[int, Links] = {}
        self._status_ports: dict[int, int] = {}
        self._proxy_stack = AsyncExitStack()
        self._caches: ObservedCaches | None = None
        self.observing: Links | None = None
        """The links of the frontend that is observed."""

    async def __aenter__(self) -> Self:
        await self._proxy_stack.__aenter__()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await super().__aexit__(kind, error, trace)
        await self._proxy_stack.__aexit__(kind, error, trace)

    async def start(self, *, workers: int = 1, frontends: int = 1, frontend_flags: Sequence[str] = ()) -> None:
        await super().start(workers=workers, frontends=frontends, frontend_flags=frontend_flags)
        for front in self.frontends:
            await front.process.serves(*MODELS)
        self.observing = await open_links(self.backends, self._proxy_stack)
        self._caches = await self._stack.enter_async_context(observed_caches(self.backends, self.observing, self.namespace))

    async def add_worker(self, *flags: str, sources: Sequence[Path] = ()) -> FleetWorker:
        links = await self._next_links()
        [port] = free_ports(1)
        worker = await super().add_worker("--status-port", str(port), *flags, sources=sources)
        self._links[worker.pid] = links
        self._status_ports[worker.pid] = port
        return worker

    async def add_frontend(self, *flags: str, sources: Sequence[Path] = ()) -> FleetFrontend:
        links = await self._next_links()
        frontend = await super().add_frontend(*flags, sources=sources)
        self._links[frontend.process.process.pid] = links
        return frontend

    def links_of(self, process: Process) -> Links:
        return self._links[process.process.pid]

    async def replace_worker(self, number: int) -> None:
        """Start a worker in the place of one that ended."""
        worker = await self.add_worker()
        self.workers[number] = self.workers.pop()
        await worker.serving()

    async def replace_frontend(self, number: int) -> None:
        """Start a frontend in the place of one that ended; until it serves, callers do not use it."""
        frontend = await self.add_frontend()
        self.frontends.remove(frontend)
        await frontend.process.serves(*MODELS)
        self.frontends[number] = frontend

    async def held(self) -> Held:
        """Return what the live processes hold. Raises httpx2.TransportError while one of them does not respond."""
        pids = [process.process.pid for process in self.processes]
        urls = [f"http://127.0.0.1:{front.process.http_port}/metrics" for front in self.frontends]
        urls += [f"http://127.0.0.1:{self._status_ports[worker.pid]}/metrics" for worker in self.workers]
        async with httpx2.AsyncClient(timeout=WAIT_S) as client:
            texts = [(await client.get(url)).text for url in urls]
        return Held(
            memory_mib=sum(map(_resident_kib, pids)) // 1024,
            files=sum(len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in pids),
            open_requests=int(sum(_metric(text, "_open_streams", "_inflight_requests") for text in texts)),
            credit_mib=int(sum(_metric(text, "_free_credit_bytes") for text in texts)) // 2**20,
        )

    async def idle(self, within_s: float, before: Held | None = None) -> Held:
        """Return what is held once no request is open and no more is held than `before`, or when the time is over."""
        gc.collect()  # the connections of callers that left end with the last reference to their calls
        held = await self.held()
        with suppress(TimeoutError):  # the caller compares
            async with asyncio.timeout(within_s):
                while held.open_requests or (before and held.exceeds(before)):
                    await asyncio.sleep(_POLL_S)
                    held = await self.held()
        return held

    async def compared(self, within_s: float) -> Caches:
        """Return the caches once a frontend knows them exactly, or when the time is over."""
        assert self._caches is not None
        result = Caches(differences=["no worker said what it has"])
        with suppress(TimeoutError):  # the caller says what is wrong
            async with asyncio.timeout(within_s):
                while result.differences:
                    with suppress(DynamoError):  # a worker does not respond yet
                        result = await self._caches.compare(len(self.workers))
                    await asyncio.sleep(_POLL_S if result.differences else 0.0)
        return result

    async def _next_links(self) -> Links:
        links = await open_links(self.backends, self._proxy_stack)
        self.etcd = self.nats = cast(Any, links)  # which the process that starts next is given
        return links


def _resident_kib(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))


def _metric(text: str, *endings: str) -> float:
    """Return the sum of the metrics whose names end so, over all their labels."""
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.partition("{")[0].partition(" ")[0].endswith(endings))
