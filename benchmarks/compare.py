"""`make compare BASE=<commit>`: another commit and this checkout side by side, in rates and CPU time per request.

    python -m benchmarks.compare 9184c5b
    python -m benchmarks.compare HEAD~3 --case stream --rounds 9

The commit is checked out into a temporary folder, and runs with the libraries of this environment; what it requires and is not
here is installed into that folder. Each has etcd, nats-server, a frontend and a worker of its own, and a second set with a paced
engine. Each round runs every case on both, one directly after the other and in turns first; a ratio is that of one such pair,
this checkout over the commit. The table gives medians, and the range of the ratios. On a machine that does other things, rates
are worth little, and CPU time per request more.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import uvloop

from benchmarks import http, kserve
from benchmarks.deployment import System, http_ready, make_model, ours, words_of
from benchmarks.measuring import Result, add_round_flags, chosen_cases, median, print_errors, table
from dynamo.common.process.interpreter import interpreter

ROOT = Path(__file__).parents[1]
_SOURCE_ROOTS = ("protos", "common", "frontend", "worker", "local")
_LIBRARIES = ".libraries"
_PROCESSES = ("frontend", "worker", "nats")
_CLIENTS = (1, 16, 64)
_CASE_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Case:
    """A case of one of the other benchmarks."""

    name: str
    load: http.Case | kserve.Case
    paced: bool = False
    """The simulated engine takes as long as a real one."""


def _cases() -> Iterator[Case]:
    for clients in _CLIENTS:
        yield Case(f"1 token c={clients}", http.Case("", clients, tokens=1))
    for name, paced in (("stream", False), ("paced stream", True)):
        for clients in _CLIENTS:
            yield Case(f"{name} c={clients}", http.Case("", clients), paced)
    for size, floats in (("64 B", 16), ("64 KiB", 16_384), ("1 MiB", 262_144)):
        for clients in _CLIENTS:
            yield Case(f"tensor {size} c={clients}", kserve.Case("", clients, (floats,)))


CASES = tuple(_cases())


Commit = Mapping[bool, System]
"""One of the two that are compared: its deployments, by whether their engine is paced."""


@contextmanager
def checked_out(commit: str) -> Iterator[Path]:
    """Check a commit out into a temporary folder during the body, with its stubs, and with the libraries that are not here."""
    git = ("git", "-C", str(ROOT), "worktree")
    with tempfile.TemporaryDirectory(prefix="compare-") as parent:
        folder = Path(parent) / "base"
        subprocess.run([*git, "add", "--detach", "--quiet", str(folder), commit], check=True)
        try:
            protos = folder / "protos"
            sources = [str(path.relative_to(protos)) for path in sorted(protos.glob("dynamo/protos/*.proto"))]
            flags = ("-I.", "--python_out=.", "--grpc_python_out=.")
            subprocess.run([sys.executable, "-m", "grpc_tools.protoc", *flags, *sources], cwd=protos, check=True)
            if missing := _missing_libraries(folder):
                pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-qq", "--no-deps")
                where = ("--target", str(folder / _LIBRARIES), "--constraint", str(folder / "constraints.txt"))
                subprocess.run([*pip, *where, *missing], check=True)
            yield folder
        finally:
            subprocess.run([*git, "remove", "--force", str(folder)], check=True)


def source_roots(root: Path) -> list[Path]:
    """Return the folders of a checked-out commit that are to be first on the path of its processes."""
    return [root / name for name in (*_SOURCE_ROOTS, _LIBRARIES)]


def _missing_libraries(root: Path) -> list[str]:
    """Return what a commit requires and this environment does not have."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    requirements = [*project["dependencies"], *project["optional-dependencies"]["fast"]]
    here = {_normal(distribution.name) for distribution in metadata.distributions()}
    return [each for each in requirements if _normal(re.split(r"[\[<>=!~; ]", each)[0]) not in here]


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@asynccontextmanager
async def running(root: Path, tokenizer: Path, paces: Sequence[bool]) -> AsyncIterator[Commit]:
    """Run the deployments of one commit."""
    roots = source_roots(root)
    async with AsyncExitStack() as stack:
        systems = {}
        for paced in paces:
            models = ("--model", f"sim:speedup={int(paced)},tokenizer={tokenizer}", "--model", kserve.ECHO_MODEL)
            command = ("-m", "dynamo.worker", *models)
            system = await stack.enter_async_context(ours(worker_command=command, source_roots=roots))
            await http_ready(system.http_port)
            systems[paced] = system
        yield systems


async def run(case: Case, commit: Commit, words: Sequence[str], seconds: float) -> Result:
    """Run one case on one commit."""
    system = commit[case.paced]
    async with asyncio.timeout(seconds + _CASE_TIMEOUT_S):
        if isinstance(case.load, http.Case):
            result = await http.run(case.load, system, words, seconds)
        else:
            result = await kserve.run(case.load, system, "", seconds)
    result.case = case.name
    return result


Pair = tuple[Result, Result]
"""The results of the base and of this checkout."""


def report(pairs: Mapping[str, Sequence[Pair]]) -> str:
    """Return a table with a row for each case."""
    rows = []
    for name, of_case in pairs.items():
        rates = [(base.rate, here.rate) for base, here in of_case]
        cells = [name, *_cells(rates, ",.0f")]
        for process in _PROCESSES:
            cells += _cells([(_cpu_ms(base, process), _cpu_ms(here, process)) for base, here in of_case], ".3f")
        rows.append(cells)
    head = ["case", "requests/s: base → here", "ratio"]
    for process in _PROCESSES:
        head += [f"{process} CPU ms/request", "ratio"]
    return table(head, rows)


def _cpu_ms(result: Result, process: str) -> float:
    return 1e3 * result.cpu_s[process] / max(1, result.done)


def _cells(pairs: Sequence[tuple[float, float]], form: str) -> list[str]:
    """Return the medians of both, and the median and range of the ratios."""
    ratios = [here / base for base, here in pairs if base]
    spread = f"{median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})" if ratios else "-"
    return [" → ".join(format(median(values), form) for values in zip(*pairs, strict=True)), spread]


async def main(arguments: argparse.Namespace) -> int:
    """Exit status: 1 if a request failed."""
    cases = chosen_cases(CASES, arguments)
    pairs: dict[str, list[Pair]] = {case.name: [] for case in cases}
    with checked_out(arguments.base) as base:
        async with AsyncExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-model-")))
            await make_model(sys.executable, folder)
            tokenizer = folder / "model" / "tokenizer.json"
            words = words_of(tokenizer)
            paces = sorted({case.paced for case in cases})
            commits = [await stack.enter_async_context(running(root, tokenizer, paces)) for root in (base, ROOT)]
            for number in range(arguments.rounds):
                for case in cases:
                    order = (0, 1) if number % 2 == 0 else (1, 0)
                    results = {which: await run(case, commits[which], words, arguments.seconds) for which in order}
                    pairs[case.name].append((results[0], results[1]))
                print(f"round {number + 1} of {arguments.rounds} done", file=sys.stderr)
    print(
        f"{arguments.rounds} rounds of {arguments.seconds:g} s, load average {os.getloadavg()[0]:.1f}, base: {arguments.base}, "
        f"{interpreter()}\n"
    )
    print(report(pairs))
    results_of_all = [result for of_case in pairs.values() for pair in of_case for result in pair]
    print_errors(results_of_all)
    return 1 if any(result.errors for result in results_of_all) else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("base", metavar="COMMIT", help="what this checkout is compared with")
    add_round_flags(parser, rounds=5)
    sys.exit(uvloop.run(main(parser.parse_args())))
