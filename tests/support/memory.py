"""How much this process and an object in it keep in memory: to show that something is bounded, or that nothing is left."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import TypeVar

T = TypeVar("T")

_SHARED = (type, ModuleType, FunctionType, BuiltinFunctionType, CodeType)
"""Not kept by one object alone."""


def resident_bytes() -> int:
    """Return the physical memory that this process occupies."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak_bytes() -> int:
    """Return the most physical memory that this process has occupied so far."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def kept_objects(root: object) -> int:
    """Return how many objects can be reached from `root`, itself included."""
    return len(_reachable(root))


def kept_bytes(root: object) -> int:
    """Return how much the objects take that can be reached from `root`, itself included."""
    return sum(map(sys.getsizeof, _reachable(root)))


def _reachable(root: object) -> list[object]:
    seen: set[int] = set()
    objects: list[object] = []
    waiting = [root]
    while waiting:
        item = waiting.pop()
        if id(item) in seen or isinstance(item, _SHARED):
            continue
        seen.add(id(item))
        objects.append(item)
        waiting += gc.get_referents(item)
        if isinstance(item, dict):
            waiting += item  # CPython leaves keys out that are all text
    return objects


def instances_of(kind: type[T]) -> list[T]:
    """Return the objects of a class that the garbage collector tracks, without asking any other object for its class.

    A proxy of an object that is gone, which other tests may leave, raises ReferenceError for that.
    """
    return [each for each in gc.get_objects() if issubclass(type(each), kind)]
