"""A real Triton, out of a virtual environment with the package nvidia-pytriton, which carries tritonserver."""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.deployment import logs_on_timeout, process, ready
from dynamo.local.servers import free_ports


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
        async with process(command, env, Path(folder) / "triton.log") as child:
            with logs_on_timeout(Path(folder)):
                await asyncio.gather(*(ready(grpc, model) for model in models))
            yield TritonServer(grpc, http, metrics, child)
