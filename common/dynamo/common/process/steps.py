"""Long work on the event loop, in steps of a few milliseconds: a turn of the loop takes one, however many requests have some.

Owners have turns, and the requests of each among themselves.

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

from dynamo.common.process.fair_line import FairLine
from dynamo.common.process.work import Work, hold_nothing

T = TypeVar("T")

_STEP_S = 0.004
"""A step ends when so much time has passed; what is done between two yields comes on top."""


class Steps:
    """One per process, or the steps of different requests share no turns."""

    def __init__(self, clock: Callable[[], float] = perf_counter, owner: Callable[[], str] = str) -> None:
        """`owner` returns whose the work is that the running task has; by default, all work is of one owner."""
        self._clock = clock
        self._owner = owner
        self._is_taken = False
        self._waiting = FairLine[asyncio.Future[None]]()
        """Requests that wait for a turn."""

    async def run(self, work: Work[T], hold: Callable[[int], None] = hold_nothing) -> T:
        """Return the result of `work`, and call `hold` with the bytes that it takes. To cancel it takes one step."""
        owner = self._owner()
        try:
            while True:
                await self._turn(owner)
                try:
                    ends_at = self._clock() + _STEP_S
                    while self._clock() < ends_at:
                        if size_bytes := next(work):
                            hold(size_bytes)
                    await asyncio.sleep(0)
                finally:
                    self._pass_on()
        except StopIteration as end:
            result: T = end.value
            return result
        finally:
            work.close()

    async def _turn(self, owner: str) -> None:
        """Return when it is the turn of the running task."""
        if not self._is_taken:
            self._is_taken = True
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(owner, turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        """Give the turn to the next owner, if its request still waits."""
        while self._waiting:
            turn = self._waiting.take()
            if not turn.done():
                turn.set_result(None)
                return
        self._is_taken = False
