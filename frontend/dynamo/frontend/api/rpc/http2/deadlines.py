"""Deadlines of all calls of a process, with one timer among them."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from itertools import count
from time import monotonic
from typing import Protocol
from weakref import ref

_FEW = 64


class Ending(Protocol):
    """What has a deadline."""

    @property
    def is_over(self) -> bool:
        """Whether it has ended before its deadline."""
        ...


class Deadlines:
    """Calls a function with each call whose deadline passes. Calls that are gone before that are kept alive by nothing here."""

    def __init__(self, loop: asyncio.AbstractEventLoop, expired: Callable[[Ending], None]) -> None:
        self._loop = loop
        self._expired = expired
        self._heap: list[tuple[float, int, ref[Ending]]] = []
        self._numbers = count()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = float("inf")
        self._next_cleaning = _FEW

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, call: Ending, deadline: float) -> None:
        """Have a call expire at a moment on the clock of `time.monotonic`."""
        heapq.heappush(self._heap, (deadline, next(self._numbers), ref(call)))
        if len(self._heap) >= self._next_cleaning:
            self._clean()
        if deadline < self._timer_at:
            self._set_timer(deadline)

    def _clean(self) -> None:
        """Forget calls that are gone. Their number is at most that of the others, so this costs little for each."""
        self._heap = [entry for entry in self._heap if (call := entry[2]()) is not None and not call.is_over]
        heapq.heapify(self._heap)
        self._next_cleaning = max(_FEW, 2 * len(self._heap))

    def _set_timer(self, deadline: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = deadline
        self._timer = self._loop.call_later(max(0.0, deadline - monotonic()), self._expire)

    def _expire(self) -> None:
        self._timer, self._timer_at = None, float("inf")
        now, heap = monotonic(), self._heap
        while heap and heap[0][0] <= now:
            call = heapq.heappop(heap)[2]()
            if call is not None and not call.is_over:
                self._expired(call)
        if heap:
            self._set_timer(heap[0][0])

    def close(self) -> None:
        self._heap.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
