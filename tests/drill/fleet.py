"""A fleet whose processes reach nats-server through a proxy each, and load that notes every failure and every wait."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast
from urllib.parse import urlsplit

import grpc

from tests.support.fleet import Client, Fleet, FleetFrontend, FleetWorker, connect, echo_request
from tests.support.processes import Process
from tests.support.proxy import Proxy, start_proxy
from tests.support.servers import EtcdServer, NatsServer

_RETRIED = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


@dataclass(frozen=True)
class _Address:
    """In the place of a NatsServer, for processes that go through a proxy."""

    url: str


class DrilledFleet(Fleet):
    """As Fleet, with a proxy between each process and nats-server."""

    def __init__(self, etcd: EtcdServer, nats: NatsServer, namespace: str, model: Sequence[str]) -> None:
        super().__init__(etcd, nats, namespace, model)
        self.real_nats = nats
        self._proxies: dict[int, Proxy] = {}
        self._proxy_stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        await self._proxy_stack.__aenter__()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await super().__aexit__(kind, error, trace)
        await self._proxy_stack.__aexit__(kind, error, trace)

    async def add_worker(self, *flags: str) -> FleetWorker:
        proxy = await self._next_proxy()
        worker = await super().add_worker(*flags)
        self._proxies[worker.pid] = proxy
        return worker

    async def add_frontend(self, *flags: str) -> FleetFrontend:
        proxy = await self._next_proxy()
        frontend = await super().add_frontend(*flags)
        self._proxies[frontend.process.process.pid] = proxy
        return frontend

    def proxy_of(self, process: Process) -> Proxy:
        return self._proxies[process.process.pid]

    async def replace_worker(self, number: int) -> None:
        """Start a worker in the place of one that ended; it is at the end of the list."""
        worker = await self.add_worker()
        self.workers[number] = worker
        self.workers.pop()
        await worker.serving()

    async def replace_frontend(self, number: int) -> None:
        frontend = await self.add_frontend()
        self.frontends[number] = frontend
        self.frontends.pop()
        await frontend.process.serves("echo")

    async def _next_proxy(self) -> Proxy:
        port = urlsplit(self.real_nats.url).port
        assert port is not None
        proxy = await self._proxy_stack.enter_async_context(start_proxy(port))
        self.nats = cast(Any, _Address(f"nats://127.0.0.1:{proxy.port}"))
        return proxy


@dataclass
class Load:
    """Paced requests to all frontends; a request that finds its frontend gone goes to another one, once a moment."""

    fleet: DrilledFleet
    per_s: float
    size: int = 4096
    """Bytes of a request."""
    count: int = 0
    failures: list[str] = field(default_factory=list)
    excused: int = 0
    """Requests whose connection broke, and that another frontend answered."""
    longest_s: float = 0.0
    durations: list[float] = field(default_factory=list)

    async def run(self, stop: asyncio.Event) -> None:
        """Send requests at a steady pace until `stop`, and wait for the last ones."""
        async with AsyncExitStack() as stack:  # the connections close when the last request is over
            clients: dict[str, Client] = {}
            async with asyncio.TaskGroup() as tasks:
                await self._pace(stop, clients, tasks, stack)

    async def _pace(
        self, stop: asyncio.Event, clients: dict[str, Client], tasks: asyncio.TaskGroup, stack: AsyncExitStack
    ) -> None:
        number = 0
        while not stop.is_set():
            frontend = self.fleet.frontends[number % len(self.fleet.frontends)]
            if frontend.target not in clients:
                clients[frontend.target] = await stack.enter_async_context(connect(frontend.target))
            tasks.create_task(self._request(number, clients[frontend.target], clients))
            number += 1
            await asyncio.sleep(1 / self.per_s)

    async def _request(self, number: int, client: Client, clients: dict[str, Client]) -> None:
        data = number.to_bytes(8, "little") * (self.size // 8)
        begun = time.monotonic()
        try:
            await self._until_answered(data, client, clients)
        except grpc.aio.AioRpcError as error:
            self.failures.append(f"{error.code().name}: {error.details()}")
        except AssertionError:
            self.failures.append("wrong response")
        self.count += 1
        took = time.monotonic() - begun
        self.durations.append(took)
        self.longest_s = max(self.longest_s, took)

    async def _until_answered(self, data: bytes, client: Client, clients: dict[str, Client]) -> None:
        request = echo_request(data)
        try:
            response = await client.infer(request, 60.0)
        except grpc.aio.AioRpcError as error:
            # A frontend that is gone, or on its way out, refuses; clients with a balancer in front go elsewhere.
            targets = [frontend.target for frontend in self.fleet.frontends if frontend.process.process.returncode is None]
            elsewhere = [clients[target] for target in targets if clients.get(target, client) is not client]
            if error.code() not in _RETRIED or not elsewhere or self._is_from_the_fleet(error):
                raise
            self.excused += 1
            response = await elsewhere[0].infer(request, 60.0)
        assert list(response.raw_output_contents) == [data]

    @staticmethod
    def _is_from_the_fleet(error: grpc.aio.AioRpcError) -> bool:
        """Whether a frontend said so, rather than the connection to it."""
        return "instance" in (error.details() or "") or "worker" in (error.details() or "")


def resources(pid: int) -> tuple[int, int]:
    """Return resident memory in KiB and the number of open files of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    rss = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))
    return rss, len(list(Path(f"/proc/{pid}/fd").iterdir()))
