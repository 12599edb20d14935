"""What benchmarks share: CPU time and memory of processes, flags, percentiles, and tables."""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def cpu_s(pid: int) -> float:
    """CPU seconds, user and system, that the threads of a process have used, without those that have ended."""
    nanoseconds = 0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            nanoseconds += int((thread / "schedstat").read_text().split()[0])
    return nanoseconds / 1e9


def children(pid: int) -> list[int]:
    """The processes that `pid` has started, and that run."""
    started = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
        except OSError:  # it has just ended
            continue
        if parent == pid:
            started.append(int(folder.name))
    return sorted(started)


def rss_mib(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES / 2**20


class Meter:
    """Wall time and the CPU time of named processes, over a `with` block."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        self._pids = dict(pids)
        self.wall_s = 0.0
        self.cpu_s: dict[str, float] = {}

    def __enter__(self) -> Meter:
        self._before = {name: cpu_s(pid) for name, pid in self._pids.items()}
        self._own = time.process_time()
        self._start = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.wall_s = time.perf_counter() - self._start
        self.cpu_s = {name: cpu_s(pid) - self._before[name] for name, pid in self._pids.items()}
        self.cpu_s["client"] = time.process_time() - self._own


@dataclass(slots=True)
class Result:
    """One run of one case on one system."""

    case: str
    system: str
    done: int
    wall_s: float
    latencies_s: list[float] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    cpu_s: dict[str, float] = field(default_factory=dict)
    errors: dict[str, int] = field(default_factory=dict)
    pieces: int = 0
    """The number of pieces in which all streamed responses arrived."""

    @property
    def rate(self) -> float:
        """Requests per second."""
        return self.done / self.wall_s if self.wall_s else 0.0


class Named(Protocol):
    """A case of a benchmark."""

    @property
    def name(self) -> str: ...


C = TypeVar("C", bound=Named)


def add_round_flags(parser: argparse.ArgumentParser, rounds: int) -> None:
    """Add the flags of a benchmark that runs its cases in rounds."""
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--seconds", type=float, default=2.0, help="per case, system and round")
    parser.add_argument("--case", action="append", help="only cases whose name contains this")


def chosen_cases(cases: Iterable[C], arguments: argparse.Namespace) -> list[C]:
    """Return the cases that `--case` names, by default all."""
    return [case for case in cases if not arguments.case or any(part in case.name for part in arguments.case)]


def print_errors(results: Iterable[Result]) -> None:
    """Print a line for each run in which a request failed."""
    for result in results:
        if result.errors:
            print(f"{result.case}, {result.system}: {result.errors}")


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of the values lie; nan without any."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else float("nan")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])
