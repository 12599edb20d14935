"""Places for work of API keys: so much at once, and a request that waits has a turn in fairness between the keys."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import count

from dynamo.frontend.security.accounts import Account
from dynamo.frontend.serving.queue.fair_queue import FairQueue


class _Waiter:
    __slots__ = ("key", "number", "rank", "turn", "weight")

    def __init__(self, account: Account, number: int) -> None:
        self.key = account.name
        self.weight = account.weight
        self.number = number
        self.rank = 0.0
        self.turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def __lt__(self, other: object) -> bool:
        return isinstance(other, _Waiter) and self.number < other.number


class FairSlots:
    """The caller bounds how many wait."""

    def __init__(self, slots: int) -> None:
        self._free = slots
        self._waiting: FairQueue[_Waiter] = FairQueue()
        self._numbers = count()

    @asynccontextmanager
    async def slot(self, account: Account) -> AsyncIterator[None]:
        """Hold a slot while the body runs."""
        release = await self.take(account)
        try:
            yield
        finally:
            release()

    async def take(self, account: Account) -> Callable[[], None]:
        """Wait for a slot; return what gives it back, which does nothing the second time."""
        waiter = _Waiter(account, next(self._numbers))
        self._waiting.push(waiter)
        self._advance()
        is_held = True

        def release() -> None:
            nonlocal is_held
            if is_held:
                is_held = False
                self._free += 1
                self._advance()

        try:
            await waiter.turn
        except BaseException:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
            else:
                release()
            raise
        return release

    def _advance(self) -> None:
        while self._free and (first := self._waiting.next()) is not None:
            waiter = self._waiting.pop(first)
            self._waiting.charge(waiter.key, 1.0, waiter.weight)
            self._free -= 1
            if not waiter.turn.done():
                waiter.turn.set_result(None)
