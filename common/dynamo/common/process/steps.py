"""Long work on the event loop, in steps of a few milliseconds: a turn of the loop takes one, however many requests have some.

A thread would not let the loop run meanwhile: decoders keep the interpreter to themselves, and the loop has to get it back after
each of its calls to the system. A step that is over, though, lets all go on that is ready. Work that leaves the interpreter, such
as compression, belongs in a thread (`offload`).

    def work() -> Work[list[float]]:
        yield 8 * 10**6                 # bytes that are taken next; zero where another request may go on
        ...
        return numbers

    numbers = await steps.run(work(), hold)
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import perf_counter
from typing import TypeVar

from dynamo.common.process.work import Work, hold_nothing

T = TypeVar("T")

_STEP_S = 0.004
"""A step ends when so much time has passed; what is done between two yields comes on top."""


class Steps:
    """One per process, or the steps of different requests share no turns."""

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self._turn = asyncio.Lock()
        self._clock = clock

    async def run(self, work: Work[T], hold: Callable[[int], None] = hold_nothing) -> T:
        """Return the result of `work`, and call `hold` with the bytes that it takes. To cancel it takes one step."""
        try:
            while True:
                async with self._turn:  # fair: requests with long work take turns
                    ends_at = self._clock() + _STEP_S
                    while self._clock() < ends_at:
                        if size_bytes := next(work):
                            hold(size_bytes)
                    await asyncio.sleep(0)
        except StopIteration as end:
            result: T = end.value
            return result
        finally:
            work.close()
