"""How much an object keeps in memory, as a number of objects: to show that something is bounded, or that nothing is left."""

from __future__ import annotations

import gc
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType

_SHARED = (type, ModuleType, FunctionType, BuiltinFunctionType, CodeType)
"""Not kept by one object alone."""


def kept_objects(root: object) -> int:
    """Return how many objects can be reached from `root`, itself included."""
    seen: set[int] = set()
    waiting = [root]
    while waiting:
        item = waiting.pop()
        if id(item) in seen or isinstance(item, _SHARED):
            continue
        seen.add(id(item))
        waiting += gc.get_referents(item)
    return len(seen)
