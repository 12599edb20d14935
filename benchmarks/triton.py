"""KServe v2 over gRPC: this project beside a real Triton on the same machine, in the same run.

    python -m benchmarks.triton --triton PATH            PATH: a virtual environment with the package nvidia-pytriton

The package carries tritonserver and its Python backend. Both serve the same repository of Python models; this project also
serves its own echo engine. Rounds are interleaved as in `benchmarks.kserve`. The table gives medians over rounds, ratios to
Triton, and the CPU time of a request in each process: `server` is the worker or tritonserver, `model` the process of the model.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import uvloop

from benchmarks.deployment import System, ours
from benchmarks.kserve import ECHO_MODEL, Case, run
from benchmarks.measuring import Result, add_round_flags, children, chosen_cases, median, percentile, print_errors, table
from benchmarks.tritonserver import add_triton_flag, packages_of, tritonserver

REPOSITORY = Path(__file__).parent / "repository"
TRITON, ECHO, PYTHON = "triton", "ours, echo", "ours, python"
IMAGE = (1, 3, 224, 224)
SIZES = {"64 B": (16,), "64 KiB": (16_384,), "1 MiB": (262_144,)}
CASES = (
    *(Case(f"{size} c={clients}", clients, shape) for size, shape in SIZES.items() for clients in (1, 16, 64)),
    Case("image c=16", 16, IMAGE, model="classifier"),
)


@dataclass(frozen=True, slots=True)
class Aim:
    """The least ratios to Triton's rate. At one client, where requests wait for nothing, a rate is the inverse of the latency."""

    echo: float | None
    python: float | None


AIMS = {
    "64 B c=1": Aim(0.5, None),
    "64 B c=16": Aim(1.0, 0.6),
    "64 B c=64": Aim(1.4, None),
    "64 KiB c=16": Aim(0.9, 0.7),
    "64 KiB c=64": Aim(1.0, None),
    "1 MiB c=1": Aim(0.8, 0.8),
    "1 MiB c=16": Aim(1.0, 1.0),
    "image c=16": Aim(None, 0.9),
}


@asynccontextmanager
async def triton(packages: Path) -> AsyncIterator[System]:
    """Run Triton with a copy of the models of `REPOSITORY`, where Python may write its caches."""
    with tempfile.TemporaryDirectory(prefix="bench-triton-") as folder:
        repository = Path(folder) / "models"
        shutil.copytree(REPOSITORY, repository)
        async with tritonserver(packages, repository, ("echo", "classifier")) as server:
            pid = server.process.pid
            yield System(TRITON, server.grpc, server.http, {"server": pid, **_models(pid)})


@asynccontextmanager
async def our_systems(*, nats_batch: bool) -> AsyncIterator[list[System]]:
    async with (
        ours(grpc_server="http2", models=[ECHO_MODEL], name=ECHO, nats_batch=nats_batch) as echo,
        ours(
            grpc_server="http2", models=[str(REPOSITORY)], wait_for=("echo", "classifier"), name=PYTHON, nats_batch=nats_batch
        ) as python,
    ):
        for system in (echo, python):
            system.pids["server"] = worker = system.pids.pop("worker")
            system.pids |= _models(worker)
        yield [echo, python]


def _models(pid: int) -> dict[str, int]:
    return {f"model{number}": child for number, child in enumerate(children(pid))}


def report(results: Sequence[Result], cases: Sequence[Case]) -> str:
    rows = []
    for case in cases:
        rate_of_triton = 0.0
        for system in (TRITON, ECHO, PYTHON):
            runs = [run for run in results if run.case == case.name and run.system == system]
            if not runs:
                continue
            rate = median([run.rate for run in runs])
            if system == TRITON:
                rate_of_triton = rate
            aims = AIMS.get(case.name)
            aim = None if aims is None else {TRITON: None, ECHO: aims.echo, PYTHON: aims.python}[system]
            latency = median([percentile(run.latencies_s, 0.5) for run in runs]) * 1e3
            ratio = f"{rate / rate_of_triton:.2f}" if rate_of_triton else "-"
            cpu = [_cpu_ms(runs, name) for name in ("frontend", "server", "model", "nats")]
            errors = sum(sum(run.errors.values()) for run in runs)
            rows.append([case.name, system, f"{rate:,.0f}", ratio, f"{aim or ''}", f"{latency:.2f}", *cpu, str(errors)])
    head = ["case", "system", "rps", "× Triton", "aim", "p50 ms"]
    return table([*head, *(f"{name} CPU ms" for name in ("frontend", "server", "model", "nats")), "errors"], rows)


def _cpu_ms(runs: Sequence[Result], process: str) -> str:
    """CPU time per request of the processes whose names begin with `process`."""
    used = [sum(s for name, s in run.cpu_s.items() if name.startswith(process)) * 1e3 / max(1, run.done) for run in runs]
    return f"{median(used):.3f}"


async def main(arguments: argparse.Namespace) -> None:
    cases = chosen_cases(CASES, arguments)
    results: list[Result] = []
    async with AsyncExitStack() as stack:
        systems = [await stack.enter_async_context(triton(arguments.packages))]
        systems += await stack.enter_async_context(our_systems(nats_batch=arguments.nats_batch))
        for number in range(arguments.rounds):
            for case in cases:
                able = [system for system in systems if case.model == "echo" or system.name != ECHO]
                results += [await run(case, system, "", arguments.seconds) for system in able]
            print(f"round {number + 1} of {arguments.rounds} done", file=sys.stderr)
    print(report(results, cases))
    print_errors(results)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.triton", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_triton_flag(parser)
    parser.add_argument(
        "--nats-batch", action=argparse.BooleanOptionalAction, default=True, help="as for dynamo-local; the default is the same"
    )
    add_round_flags(parser, rounds=5)
    parsed = parser.parse_args()
    parsed.packages = packages_of(parser, parsed.triton)
    uvloop.run(main(parsed))
