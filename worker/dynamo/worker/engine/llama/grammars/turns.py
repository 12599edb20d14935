"""One piece of work at a time, in turns between API keys."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from dynamo.common.errors import Overloaded

_HALF_LIFE_S = 30.0
_LEAST_S = 0.001
"""What a turn counts at least, so that a key with many short ones takes turns, too."""


class Turns:
    """Next is the key that had the least of the process lately, in seconds; of its work, what has waited longest.

    So a key that wants little waits for what has begun, however much other keys want. If `most` wait, the key with the most of
    them loses its last one.
    """

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._clock = clock
        self._is_free = True
        self._waiting: defaultdict[str, deque[asyncio.Future[None]]] = defaultdict(deque)
        """By key; no key has an empty queue."""
        self._used_s: dict[str, float] = {}
        """The seconds of each key as of `_as_of`; half of them are forgotten each `_HALF_LIFE_S`."""
        self._as_of = clock()

    @asynccontextmanager
    async def turn(self, key: str) -> AsyncIterator[None]:
        """Have the turn while the body runs. Raises Overloaded if `most` wait before that, and `key` has the most of them."""
        if not self._is_free:
            await self._wait(key)
        self._is_free = False
        began = self._clock()
        try:
            yield
        finally:
            self._charge(key, began)
            self._is_free = True
            self._pass_on()

    async def _wait(self, key: str) -> None:
        if sum(map(len, self._waiting.values())) >= self._most:
            self._make_room(key)
        turn = asyncio.get_running_loop().create_future()
        self._waiting[key].append(turn)
        try:
            await turn
        except BaseException:
            if turn.done() and not turn.cancelled() and turn.exception() is None:  # cancelled as its turn came
                self._pass_on()
            else:
                self._leave(key, turn)
            raise

    def _make_room(self, key: str) -> None:
        """Refuse the last of the key with the most that wait. Raises Overloaded if that is `key`, with its next one."""
        longest = max(self._waiting, key=lambda other: len(self._waiting[other]))
        error = Overloaded(f"{self._most} grammars are waiting to be compiled already")
        if len(self._waiting[longest]) <= len(self._waiting.get(key, ())) + 1:
            raise error
        turn = self._waiting[longest][-1]
        self._leave(longest, turn)
        turn.set_exception(error)

    def _leave(self, key: str, turn: asyncio.Future[None]) -> None:
        queue = self._waiting.get(key)
        if queue is not None and turn in queue:
            queue.remove(turn)
            if not queue:
                del self._waiting[key]

    def _pass_on(self) -> None:
        """Give the turn to the next one. It is not free before that one has had it, so that none comes between."""
        while self._waiting:
            key = min(self._waiting, key=lambda key: self._used_s.get(key, 0.0))  # of equal ones, the first to wait
            turn = self._waiting[key][0]
            self._leave(key, turn)
            if not turn.done():
                self._is_free = False
                turn.set_result(None)
                return
        self._is_free = True

    def _charge(self, key: str, began: float) -> None:
        now = self._clock()
        kept = 0.5 ** ((now - self._as_of) / _HALF_LIFE_S)
        self._as_of = now
        used_s = {other: seconds * kept for other, seconds in self._used_s.items()}
        used_s[key] = used_s.get(key, 0.0) + max(now - began, _LEAST_S)
        self._used_s = {other: seconds for other, seconds in used_s.items() if seconds > _LEAST_S / 8}
