"""The project's own processes for tests: started with free ports, awaited until they serve, ended at the end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import httpx2

from dynamo.common.process.ports import free_ports
from tests.support.servers import NatsServer


@dataclass
class Process:
    """A running `python -m …`, whose log is kept."""

    process: asyncio.subprocess.Process
    lines: list[str] = field(default_factory=list)
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    def log(self) -> str:
        return "\n".join(self.lines[-100:])

    async def logged(self, text: str, timeout_s: float = 120, *, times: int = 1) -> None:
        """Returns when `text` stands in so many lines of the log."""
        async with asyncio.timeout(timeout_s):
            while sum(text in line for line in self.lines) < times:
                assert self.process.returncode is None, f"it ended with status {self.process.returncode}:\n{self.log()}"
                self._news.clear()
                await self._news.wait()

    async def read_log(self) -> None:
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            self.lines.append(line.decode(errors="replace").rstrip())
            self._news.set()
        self._news.set()

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    async def ended(self, timeout_s: float = 120) -> int:
        """Its exit status."""
        async with asyncio.timeout(timeout_s):
            return await self.process.wait()


@dataclass
class FrontendProcess(Process):
    http_port: int = 0
    grpc_port: int = 0

    @property
    def grpc_target(self) -> str:
        return f"127.0.0.1:{self.grpc_port}"

    async def health(self) -> tuple[int, dict[str, Any]]:
        async with httpx2.AsyncClient(verify=False) as client:  # reading the system's certificates takes 22 ms
            response = await client.get(f"http://127.0.0.1:{self.http_port}/health?instances=true")
            return response.status_code, response.json()

    async def serves(self, *models: str, timeout_s: float = 120, key: str = "") -> None:
        """Return when it lists these models as ready, to the holder of `key` if keys are required."""
        headers = {"x-api-key": key} if key else {}
        url = f"http://127.0.0.1:{self.http_port}"
        async with asyncio.timeout(timeout_s), httpx2.AsyncClient(base_url=url, headers=headers) as client:
            missing = set(models)
            while missing:
                assert self.process.returncode is None, f"it ended with status {self.process.returncode}:\n{self.log()}"
                with contextlib.suppress(httpx2.TransportError):
                    response = await client.get("/v1/models")
                    if response.status_code == 200:
                        missing = set(models) - {model["id"] for model in response.json()["data"] if model["ready"]}
                await asyncio.sleep(0.05)


_WITHOUT = () if find_spec("vllm") else (str(Path(__file__).parent / "without"),)
"""The folder of modules that tests need and the processes that they start do not, except for vLLM."""


def _environment() -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("DYN_", "DYNAMO_"))}
    paths = (*_WITHOUT, environment.get("PYTHONPATH", ""))
    return {**environment, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


async def _start(module: str, *flags: str, variables: Mapping[str, str] | None = None) -> asyncio.subprocess.Process:
    environment = {**_environment(), **(variables or {})}
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", module, *flags, stderr=asyncio.subprocess.PIPE, env=environment
    )


@asynccontextmanager
async def _following(process: Process) -> AsyncIterator[None]:
    reading = asyncio.create_task(process.read_log())
    try:
        yield
    except BaseException as error:
        error.add_note(f"--- log of process {process.process.pid} ---\n{process.log()}")
        raise
    finally:
        if process.process.returncode is None:
            process.terminate()
            try:
                await process.ended()
            except TimeoutError:
                process.process.kill()
        await reading
        await process.process.wait()


class Reachable(Protocol):
    """A server, or several, as a process is to reach it."""

    @property
    def endpoint(self) -> str: ...


@dataclass(frozen=True)
class At:
    """An etcd at other addresses than a server's own: several members, or through a proxy."""

    endpoint: str


@asynccontextmanager
async def worker(
    etcd: Reachable, nats: NatsServer, namespace: str, *flags: str, sources: Sequence[Path] = ()
) -> AsyncIterator[Process]:
    """A worker process; `flags` name its models. With `sources` its code is there."""
    started = await _start("dynamo.worker", *_where(etcd.endpoint, nats.url, namespace), *flags, variables=_code_in(sources))
    process = Process(started)
    async with _following(process):
        yield process


@asynccontextmanager
async def script(path: str, *arguments: str, runner: str, **variables: str) -> AsyncIterator[Process]:
    """A script that the module `runner` runs with these environment variables."""
    started = await _start(runner, path, *arguments, variables=variables)
    process = Process(started)
    async with _following(process):
        yield process


@asynccontextmanager
async def frontend(
    etcd_url: str, nats_url: str, namespace: str, *flags: str, sources: Sequence[Path] = ()
) -> AsyncIterator[FrontendProcess]:
    """A frontend process with gRPC; not awaited: see `serves`. With `sources` its code is there."""
    http_port, grpc_port = free_ports(2)
    ports = ("--grpc", "--http-port", str(http_port), "--grpc-port", str(grpc_port))
    where = _where(etcd_url, nats_url, namespace)
    started = await _start("dynamo.frontend", *where, *ports, *flags, variables=_code_in(sources))
    process = FrontendProcess(started, http_port=http_port, grpc_port=grpc_port)
    async with _following(process):
        yield process


@dataclass
class PlannerProcess(Process):
    """A planner with a status port."""

    status_port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.status_port}"

    async def explain(self) -> dict[str, Any]:
        """What it shows of itself; empty while the port does not respond."""
        async with httpx2.AsyncClient(verify=False) as client:
            with contextlib.suppress(httpx2.TransportError):
                shown: dict[str, Any] = (await client.get(f"{self.url}/explain")).json()
                return shown
        return {}

    async def shows(self, condition: Callable[[dict[str, Any]], object], timeout_s: float = 120) -> dict[str, Any]:
        """Return what it shows once that fulfils `condition`."""
        async with asyncio.timeout(timeout_s):
            while not (shown := await self.explain()) or not condition(shown):
                assert self.process.returncode is None, f"it ended with status {self.process.returncode}:\n{self.log()}"
                await asyncio.sleep(0.05)
        return shown


@asynccontextmanager
async def planner(etcd_url: str, nats_url: str, namespace: str, *flags: str) -> AsyncIterator[PlannerProcess]:
    """A planner process with a status port; not awaited: see `shows`."""
    [port] = free_ports(1)
    started = await _start("dynamo.planner", *_where(etcd_url, nats_url, namespace), "--status-port", str(port), *flags)
    process = PlannerProcess(started, status_port=port)
    async with _following(process):
        yield process


def _code_in(sources: Sequence[Path]) -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join((*_WITHOUT, *map(str, sources)))} if sources else {}


def _where(etcd_url: str, nats_url: str, namespace: str) -> tuple[str, ...]:
    return ("--namespace", namespace, "--etcd-endpoints", etcd_url, "--nats-servers", nats_url)
