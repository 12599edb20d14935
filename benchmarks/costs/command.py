"""`make costs`: count what requests take, and fail if one takes more than the repository says, or much less.

    python -m benchmarks.costs                     compare with the figures of this version of Python
    python -m benchmarks.costs --write             write them
    python -m benchmarks.costs --only 'c64' --top 10
    python -m benchmarks.costs --functions FILE    name the functions that changed since another commit's run with the same FILE

Exit status 1 if a figure grew by more than 1%, if it fell by more than 2% and the file does not keep that, if it is not in the
file or was not counted any more; 2 if there is no file for this version of Python, or nothing was counted. Every run with the
same Python and libraries counts the same, to the last digit.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import re
import threading
from collections.abc import Mapping
from pathlib import Path

from benchmarks.costs.counting import Count
from benchmarks.costs.deployment import Loop
from benchmarks.costs.events import count_decisions, count_idle, count_kv_events
from benchmarks.costs.figures import Comparison, Figures, compare, file_of_interpreter, read, write
from benchmarks.costs.picks import count_picks
from benchmarks.costs.recording import Counted, Recorder
from benchmarks.costs.requests import request_parts
from benchmarks.measuring import table

_PARTS = (count_decisions, *request_parts(), count_picks, count_kv_events, count_idle)
_COLUMNS = ("calls", "C calls", "instructions", "allocations", "sends", "receives", "NATS messages", "NATS bytes")
_CONTRIBUTORS = 12


def main() -> int:
    arguments = _arguments()
    logging.disable(logging.WARNING)
    gc.disable()
    paths = _counted(arguments.only)
    print(_report(paths))
    if arguments.top:
        _print_functions(paths, arguments.top)
    if arguments.functions:
        print_changed(arguments.functions, paths)
    file = file_of_interpreter(arguments.figures)
    if arguments.write:
        now = _figures(paths)
        write(file, now)
        print(f"{len(now)} figures of {len(paths)} paths written to {file.name}")
        return 0
    return verdict(file, paths, is_part=bool(arguments.only))


def verdict(file: Path, paths: Mapping[str, Counted], *, is_part: bool) -> int:
    """Print how what was counted differs from the file's figures; return the exit status."""
    now = _figures(paths)
    if not file.exists() or not now:
        others = ", ".join(sorted(each.stem for each in file.parent.glob("python*.json")))
        print(
            f"NO FIGURES of this version of Python: {file.name} does not exist, the repository has those of {others or 'none'}; "
            "make costs FLAGS=--write writes them"
            if now
            else "NO FIGURES: nothing was counted"
        )
        print("0 passed, 1 failed")
        return 2
    before = read(file)
    if is_part:
        before = {name: value for name, value in before.items() if name.partition(" | ")[0] in paths}
    comparison = compare(before, now)
    _print_comparison(comparison, paths)
    return 1 if comparison.failed else 0


def _figures(paths: Mapping[str, Counted]) -> Figures:
    return {name: value for counted in paths.values() for name, value in counted.figures.items()}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.costs", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="write the figures instead of comparing with them")
    parser.add_argument("--only", default="", metavar="REGEX", help="only paths whose name it matches")
    parser.add_argument("--top", type=int, default=0, help="show so many functions of each path, those called most")
    parser.add_argument(
        "--functions", type=Path, metavar="FILE", help="write the calls of each function, or show those that differ from FILE's"
    )
    parser.add_argument("--figures", type=Path, default=Path(__file__).parent, help="the folder with the figures")
    arguments = parser.parse_args()
    if arguments.write and arguments.only:
        parser.error("--write needs all paths: the file would lack the others")
    return arguments


def _counted(only: str) -> Mapping[str, Counted]:
    count = Count()
    recorder = Recorder(count, re.compile(only))
    for part in _PARTS:  # each on a loop of its own
        loop = Loop(count)
        asyncio.set_event_loop(loop)
        loop.run_until_complete(part(loop, recorder))
    if threading.active_count() > 1:
        raise RuntimeError(f"counted beside threads, which no two runs do alike: {threading.enumerate()}")
    return recorder.paths


def _report(paths: Mapping[str, Counted]) -> str:
    rows = []
    for path, counted in paths.items():
        cells = [path]
        for figure in _COLUMNS:
            values = [counted.figures.get(f"{path} | {process} | {figure}", 0.0) for process in ("frontend", "worker")]
            cells.append(" / ".join(f"{value:,.4g}" if value < 1000 else f"{value:,.0f}" for value in values))
        cells.append(f"{counted.figures.get(f'{path} | all | garbage', 0.0):,.4g}")
        rows.append(cells)
    return table(["frontend / worker, each time", *_COLUMNS, "garbage"], rows)


def _print_functions(paths: Mapping[str, Counted], top: int) -> None:
    for path, counted in paths.items():
        print(f"\n{path}: calls")
        for (process, name), calls in _most(counted, "", top):
            print(f"  {process:8} {calls:10.2f}  {name}")


def print_changed(file: Path, paths: Mapping[str, Counted]) -> None:
    """Print which functions are called more or less often than FILE says, or write it if there is none."""
    now = {
        f"{path} | {process} | {name}": round(calls, 3)
        for path, counted in paths.items()
        for (process, name), calls in counted.functions.items()
    }
    if not file.exists():
        return write(file, now)
    before = read(file)
    grown = {name: now.get(name, 0.0) - before.get(name, 0.0) for name in now.keys() | before.keys()}
    for name, more in sorted(grown.items(), key=lambda each: (-abs(each[1]), each[0])):
        if more and name.partition(" | ")[0] in paths:
            print(f"  {more:+10.2f} calls of {name}")


def _most(counted: Counted, process: str, top: int) -> list[tuple[tuple[str, str], float]]:
    """Return the functions called most, of one process if it is named."""
    functions = [each for each in counted.functions.items() if each[0][0] in ((process,) if process else ("frontend", "worker"))]
    return sorted(functions, key=lambda each: -each[1])[:top]


def _print_comparison(comparison: Comparison, paths: Mapping[str, Counted]) -> None:
    shown = set()
    for name, (before, now) in comparison.grew.items():
        print(f"GREW: {name}: {_change(before, now)}")
        path, process, _ = name.split(" | ")
        if (path, process) not in shown and process != "all":
            shown.add((path, process))
            for (_, function), calls in _most(paths[path], process, _CONTRIBUTORS):
                print(f"      {calls:10.2f} calls of {function}")
    for name, (before, now) in comparison.fell.items():
        print(f"NOT KEPT: {name}: {_change(before, now)}")
    for name in comparison.unwritten:
        print(f"NOT IN THE FILE: {name}")
    for name in comparison.uncounted:
        print(f"NOT COUNTED ANY MORE: {name}")
    if comparison.fell:
        print("gains that the file does not keep: python -m benchmarks.costs --write")
    if comparison.failed > len(comparison.fell):
        print("a change that is worth it: make costs FLAGS=--write, and the commit says why")
    print(f"{comparison.passed} passed, {comparison.failed} failed")


def _change(before: float, now: float) -> str:
    return f"{before:g} → {now:g}" + (f" ({now / before - 1:+.1%})" if before else "")
