"""Profile one process of a deployment while a benchmark loads it, and write a flame graph.

    python -m benchmarks.profile frontend
    python -m benchmarks.profile worker --benchmark http --case "chat c=64" --seconds 20 --output worker.svg

py-spy reads the stacks of the process from outside, a hundred times a second, so the process runs nearly at its usual speed and
needs no change. It may read another process as root or with CAP_SYS_PTRACE. The deployment, its load and the names of the cases
are those of `benchmarks.kserve` and `benchmarks.http`. Open the SVG in a browser: width is time, and a click zooms.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import uvloop

from benchmarks import http, kserve
from benchmarks.deployment import System, http_ready, make_model, ours, words_of
from benchmarks.measuring import Result

DEFAULT_CASE = {"kserve": "64 B c=16", "http": "chat c=64"}
_ATTACH_S = 0.5
"""Until py-spy has found its way about the process."""

Load = Callable[[float], Awaitable[Result]]


async def start_kserve(stack: AsyncExitStack, name: str, folder: Path) -> tuple[System, Load]:
    """Start what `benchmarks.kserve` measures. Return it with a function that loads it for some seconds."""
    case = next(case for case in kserve.CASES if case.name == name)
    models, wait_for = [kserve.ECHO_MODEL], ["echo"]
    if case.is_text:
        models.append(f"echo:llm:{folder}/model/tokenizer.json")
        wait_for.append("echo-llm")
    system = await stack.enter_async_context(ours(models=models, wait_for=wait_for))
    return system, lambda seconds: kserve.run(case, system, "echo-llm", seconds)


async def start_http(stack: AsyncExitStack, name: str, folder: Path) -> tuple[System, Load]:
    """Start what `benchmarks.http` measures. Return it with a function that loads it for some seconds."""
    case = next(case for case in http.CASES if case.name == name)
    tokenizer = folder / "model" / "tokenizer.json"
    words = words_of(tokenizer)
    system = await stack.enter_async_context(
        ours(worker_command=http.worker_command(tokenizer, case.paced), wait_for=(), name="ours")
    )
    await http_ready(system.http_port)
    return system, lambda seconds: http.run(case, system, words, seconds)


START = {"kserve": start_kserve, "http": start_http}
CASES = {"kserve": [case.name for case in kserve.CASES], "http": [case.name for case in http.CASES]}


def record_command(pid: int, output: Path, seconds: float, rate: int, flags: list[str]) -> list[str]:
    """Return the command line of py-spy beside this interpreter."""
    py_spy = Path(sys.executable).with_name("py-spy")
    return [
        *(str(py_spy), "record", "--pid", str(pid), "--output", str(output)),
        *("--duration", str(max(1, round(seconds))), "--rate", str(rate), "--format", "flamegraph", *flags),
    ]


async def profile(arguments: argparse.Namespace) -> int:
    """Return the exit status of py-spy."""
    case = arguments.case or DEFAULT_CASE[arguments.benchmark]
    output = Path(arguments.output or f".dynamo/profile-{arguments.process}.svg")
    output.parent.mkdir(parents=True, exist_ok=True)
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="profile-model-")))
        await make_model(sys.executable, folder)
        system, load = await START[arguments.benchmark](stack, case, folder)
        await load(1.0)
        flags = [f"--{name}" for name in ("native", "gil", "threads") if getattr(arguments, name)]
        command = record_command(system.pids[arguments.process], output, arguments.seconds, arguments.rate, flags)
        recorder = await asyncio.create_subprocess_exec(*command)
        try:
            await asyncio.sleep(_ATTACH_S)
            result = await load(arguments.seconds)
            status = await recorder.wait()
        finally:
            if recorder.returncode is None:
                recorder.kill()
    print(f"{arguments.process} during {arguments.benchmark}, {case}: {result.rate:,.0f} requests/s while profiled")
    if status:
        print("py-spy failed; it needs root or CAP_SYS_PTRACE to read another process", file=sys.stderr)
    else:
        print(f"flame graph: {output}")
    return status


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.profile", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("process", choices=("frontend", "worker"))
    parser.add_argument("--benchmark", choices=tuple(START), default="kserve")
    parser.add_argument("--case", help="of the benchmark, by its whole name; see --list")
    parser.add_argument("--seconds", type=float, default=10.0, help="of load, and of samples")
    parser.add_argument("--rate", type=int, default=100, help="samples per second")
    parser.add_argument("--output", metavar="FILE", help="default: .dynamo/profile-PROCESS.svg")
    parser.add_argument("--native", action="store_true", help="also show stacks of compiled extensions")
    parser.add_argument("--gil", action="store_true", help="only samples that hold the interpreter's lock")
    parser.add_argument("--threads", action="store_true", help="one tower per thread")
    parser.add_argument("--list", action="store_true", help="list the cases and stop")
    arguments = parser.parse_args()
    if arguments.list:
        print("\n".join(CASES[arguments.benchmark]))
        return 0
    if arguments.case and arguments.case not in CASES[arguments.benchmark]:
        parser.error(f"unknown case {arguments.case!r}; expected one of: {', '.join(CASES[arguments.benchmark])}")
    return uvloop.run(profile(arguments))


if __name__ == "__main__":
    sys.exit(main())
