"""Counts one thing after the other.

Each is done some times before it is counted, so that caches are filled and connections open. The figure is the median of several
rounds: what happens every few rounds only, such as a beat, belongs to the idle second.
"""

from __future__ import annotations

import asyncio
import re
import statistics
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from benchmarks.costs.counting import ALL, Count

_WARM_UP = 3
_ROUNDS = 3
_PAUSE_S = 0.5


@dataclass(frozen=True, slots=True)
class Counted:
    """What one path takes."""

    figures: dict[str, float]
    """By "path | process | figure"."""
    functions: Mapping[tuple[str, str], float]
    """Calls by process and function."""


@dataclass(slots=True)
class Recorder:
    """Counts paths, and keeps what they take."""

    count: Count
    wanted: re.Pattern[str]
    paths: dict[str, Counted] = field(default_factory=dict)

    def wants(self, path: str) -> bool:
        return bool(self.wanted.search(path))

    async def record(self, path: str, once: Callable[[], Awaitable[None]], *, times: int, warm_up: int = _WARM_UP) -> None:
        """Count `once`, which does something so many times."""
        for _ in range(warm_up):
            await once()
        rounds = []
        self.count.functions.clear()
        for _ in range(_ROUNDS):
            await asyncio.sleep(_PAUSE_S)
            self.count.figures.clear()
            with self.count.window():
                await once()
            rounds.append(Counter(self.count.figures))
        named = set().union(*rounds)
        figures = {
            f"{path} | {process} | {figure}": round(statistics.median(each[process, figure] for each in rounds) / times, 3)
            for process, figure in named
            if process in ("frontend", "worker", ALL)
        }
        functions = {name: calls / times / _ROUNDS for name, calls in self.count.functions.items()}
        self.paths[path] = Counted(figures, functions)
