"""A real Triton, out of a virtual environment with the package nvidia-pytriton, which carries tritonserver."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.deployment import logs_on_timeout, process, ready
from dynamo.common.process.ports import free_ports


@dataclass(frozen=True, slots=True)
class TritonServer:
    """A running Triton, and its ports."""

    grpc: int
    http: int
    metrics: int
    process: asyncio.subprocess.Process


def add_triton_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--triton", metavar="PATH", type=Path, required=True, help="virtual environment with nvidia-pytriton")


def packages_of(parser: argparse.ArgumentParser, environment: Path) -> Path:
    """Return the folder of Python packages in a virtual environment. Ends the program if Triton is not among them."""
    package = next(environment.absolute().glob("lib/python3*/site-packages/pytriton"), None)
    if package is None:
        parser.error(f"--triton: {environment} is no virtual environment with the package nvidia-pytriton")
    return package.parent


@asynccontextmanager
async def tritonserver(packages: Path, repository: Path, models: Sequence[str], *flags: str) -> AsyncIterator[TritonServer]:
    """Run the tritonserver among the Python packages in the folder `packages`, until `models` of the repository are ready."""
    server, environment = packages / "pytriton" / "tritonserver", packages.parents[2]
    http, grpc, metrics = free_ports(3)
    with tempfile.TemporaryDirectory(prefix="triton-") as folder:
        command = [
            *(str(server / "bin" / "tritonserver"), "--model-repository", str(repository)),
            *("--backend-directory", str(server / "backends")),
            *flags,
            *("--http-port", str(http), "--grpc-port", str(grpc), "--metrics-port", str(metrics)),
            *(f"--{port}-address=127.0.0.1" for port in ("http", "grpc", "metrics")),
        ]
        env = {
            **os.environ,
            "PATH": f"{environment / 'bin'}:{os.environ['PATH']}",
            "LD_LIBRARY_PATH": str(packages / "nvidia_pytriton.libs"),
            "PYTHONPATH": str(packages),
        }
        with _cancelled_by_sigterm():
            async with process(command, env, Path(folder) / "triton.log", own_group=True) as child:
                with logs_on_timeout(Path(folder)):
                    await asyncio.gather(*(ready(grpc, model) for model in models))
                yield TritonServer(grpc, http, metrics, child)


@contextmanager
def _cancelled_by_sigterm() -> Iterator[None]:
    """Have SIGTERM cancel this task: a server in a group of its own does not get the signals that end a run."""
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
