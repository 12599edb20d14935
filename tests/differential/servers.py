"""The two servers: a real Triton, and a deployment of this project, with the same repository."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.deployment import ours
from benchmarks.tritonserver import tritonserver
from dynamo.common.process.ports import free_ports
from tests.support.waiting import expiring


@dataclass(frozen=True, slots=True)
class Server:
    """The ports of a running server."""

    grpc: int
    http: int
    metrics: int
    process: asyncio.subprocess.Process | None = None
    """Its process, if a request may end it."""

    async def has_ended(self, within_s: float = expiring(10)) -> bool:
        """Return whether the server has ended, after a connection to it broke."""
        if self.process is None:
            return False
        try:
            await asyncio.wait_for(self.process.wait(), within_s)
        except TimeoutError:
            return False
        return True


@asynccontextmanager
async def triton(packages: Path, repository: Path, models: Sequence[str]) -> AsyncIterator[Server]:
    """Run the tritonserver among the Python packages in the folder `packages`."""
    flags = ("--model-control-mode", "explicit", *(f"--load-model={model}" for model in models))
    flags += ("--trace-config", f"triton,file={_trace_file(repository)}")
    async with tritonserver(packages, repository, models, *flags) as server:
        yield Server(server.grpc, server.http, server.metrics, server.process)


@asynccontextmanager
async def here(repository: Path, models: Sequence[str]) -> AsyncIterator[Server]:
    """Run a frontend and a worker of this project."""
    flags = ["--model-repository", str(repository), "--model-control-mode", "explicit"]
    flags += [f"--load-model={model}" for model in models]
    [metrics] = free_ports(1)
    flags += ["--status-port", str(metrics)]
    traced = [f"--trace-file={_trace_file(repository)}"]
    frontend_flags = ["--server-name", "triton", *traced]
    async with ours(models=(), worker_flags=flags + traced, wait_for=models, frontend_flags=frontend_flags) as system:
        yield Server(system.grpc_port, system.http_port, metrics)


def _trace_file(repository: Path) -> Path:
    """The same for both servers, as it is shown in their settings; there, ours adds its instance to the name."""
    return repository.with_name("trace.json")
