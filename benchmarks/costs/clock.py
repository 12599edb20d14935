"""The functions of `time` in virtual time.

Many modules keep such a function when they are imported, by `from time import monotonic` or in a default argument. So `install`
precedes the import of whatever is counted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

_EPOCH_S = 1_800_000_000.0
_DURATIONS = ("monotonic", "perf_counter", "process_time", "thread_time")


def install() -> None:
    """Let the clocks of this process show the time of the loop that runs, to everything imported from now on."""
    for name in _DURATIONS:
        _replace(name, _now)
    _replace("time", lambda: _EPOCH_S + _now())


def _replace(name: str, clock: Callable[[], float]) -> None:
    setattr(time, name, clock)
    setattr(time, f"{name}_ns", lambda: int(clock() * 1e9))


def _now() -> float:
    try:
        return asyncio.get_running_loop().time()
    except RuntimeError:  # during imports
        return 0.0
