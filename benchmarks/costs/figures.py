"""The figures that the repository holds, and whether what was counted has grown beyond them.

There is a file for each version of Python, `python3.11.json`: the same code takes different calls and instructions on another.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

GROWTH = 0.01
"""A figure may grow by so much, which is less than one more call for each token of a stream; more needs a new file, and a commit
that says why."""
GAIN = 0.02
"""A figure may fall by so much. What is gained beyond it has to be written, so that nothing grows into it again unseen."""
_SLACK = {"calls": 0.5, "C calls": 0.5, "allocations": 0.5, "instructions": 20.0, "NATS bytes": 2.0}
_LEAST_SLACK = 0.02
"""Slack of what is counted in ones, such as system calls."""

Figures = Mapping[str, float]
"""By "path | process | figure"."""


def file_of_interpreter(folder: Path) -> Path:
    """Return where the figures of this Python are, or would be."""
    return folder / f"python{sys.version_info.major}.{sys.version_info.minor}.json"


def read(file: Path) -> Figures:
    """Return the figures of `file`. Raises FileNotFoundError."""
    figures: dict[str, float] = json.loads(file.read_text())
    return figures


def write(file: Path, figures: Figures) -> None:
    """Write a line for each figure, in order."""
    file.write_text(json.dumps(figures, indent=0, sort_keys=True) + "\n")


@dataclass(frozen=True, slots=True)
class Comparison:
    """What differs from the file; each difference is a failure."""

    grew: Mapping[str, tuple[float, float]]
    """Figures beyond what is allowed: as in the file, and now."""
    fell: Mapping[str, tuple[float, float]]
    """Figures so far below the file's that a new file has to keep it."""
    unwritten: tuple[str, ...]
    """Counted, and not in the file."""
    uncounted: tuple[str, ...]
    """In the file, and not counted any more."""
    passed: int

    @property
    def failed(self) -> int:
        return len(self.grew) + len(self.fell) + len(self.unwritten) + len(self.uncounted)


def compare(before: Figures, now: Figures) -> Comparison:
    """Compare what was counted now with the file's figures."""
    both = {name: (before[name], now[name]) for name in sorted(before.keys() & now.keys())}
    grew = {name: (old, new) for name, (old, new) in both.items() if new > old * (1 + GROWTH) + _slack(name)}
    fell = {name: (old, new) for name, (old, new) in both.items() if new < old * (1 - GAIN) - _slack(name)}
    unwritten, uncounted = (tuple(sorted(names)) for names in (now.keys() - before.keys(), before.keys() - now.keys()))
    return Comparison(grew, fell, unwritten, uncounted, len(both) - len(grew) - len(fell))


def _slack(name: str) -> float:
    return _SLACK.get(name.rpartition(" | ")[2], _LEAST_SLACK)
