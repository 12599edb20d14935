"""Freed memory: kept for the next large message, and given back to the system after a while.

A tensor of a few hundred KiB is otherwise a fresh mapping, whose pages the kernel zeroes, for each copy of a request. By itself
glibc gives back what is free at the end of a heap only; `malloc_trim` gives back every free page.
"""

from __future__ import annotations

import asyncio
import ctypes
import platform
import time
from collections.abc import Callable
from functools import cache

MIB = 2**20
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
_MMAP_THRESHOLD_BYTES = 32 * MIB  # glibc's upper limit for this setting on 64-bit machines
_TRIM_THRESHOLD_BYTES = 256 * MIB
_PERIOD_S = 10.0
_WORK_S = 0.05


def keep_freed_memory() -> bool:
    """Make glibc keep freed blocks of up to 32 MiB instead of giving them back to the system; False elsewhere.

    All threads share one arena: `malloc_trim` does not cut the ends of others, which had 90 MiB after eight tensors of 20 MiB.
    To be called before there are threads.
    """
    library = _glibc()
    if library is None:
        return False
    library.mallopt.argtypes, library.mallopt.restype = (ctypes.c_int, ctypes.c_int), ctypes.c_int
    kept = library.mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES)
    shared = library.mallopt(_M_ARENA_MAX, 1)
    return bool(library.mallopt(_M_TRIM_THRESHOLD, _TRIM_THRESHOLD_BYTES) and kept and shared)


def give_back() -> None:
    """Return all pages to the system that hold no live block. Takes milliseconds, without the interpreter's lock."""
    if (library := _glibc()) is not None:
        library.malloc_trim(0)


class Trimmer:
    """Gives freed memory back once in a while, unless the process has done nothing since the last time."""

    def __init__(self, cpu_s: Callable[[], float] = time.process_time, trim: Callable[[], None] = give_back) -> None:
        self._cpu_s = cpu_s
        self._trim = trim
        self._trimmed_at_cpu_s = 0.0

    async def run(self) -> None:
        """Look every ten seconds, until cancelled."""
        while True:
            await asyncio.sleep(_PERIOD_S)
            await self.look()

    async def look(self) -> None:
        """Give memory back if the process has worked since the last time."""
        if self._cpu_s() - self._trimmed_at_cpu_s >= _WORK_S:
            await asyncio.to_thread(self._trim)
            self._trimmed_at_cpu_s = self._cpu_s()


@cache
def _glibc() -> ctypes.CDLL | None:
    return ctypes.CDLL(None) if platform.libc_ver()[0] == "glibc" else None
