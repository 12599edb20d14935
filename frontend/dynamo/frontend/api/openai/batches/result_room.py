"""What the results of a batch may take."""

from __future__ import annotations

from contextlib import AsyncExitStack

from dynamo.common.errors import PayloadTooLarge, Unavailable
from dynamo.common.process.work import Hold
from dynamo.frontend.api.openai.batches.batch import Batches


class ResultRoom:
    """The room that the results of a batch may still take, in memory and of what its key may store."""

    def __init__(self, batches: Batches, owner: str, left: int, hold: Hold, counted: AsyncExitStack) -> None:
        """`left`: how many bytes they may still take; `hold` counts them. While `counted` is open, the key has stored them."""
        self._batches = batches
        self._owner = owner
        self._left = left
        self._hold = hold
        self._counted = counted
        self._is_full = False
        """Whether a result did not fit; no further one is made then."""

    async def is_left(self) -> bool:
        """Return whether a further result may fit."""
        if not self._is_full:
            self._is_full = not await self._batches.may_store(self._owner)
        return not self._is_full

    async def take(self, size: int, stored_bytes: int) -> bool:
        """Return whether a result fits, which takes so much where it is stored, and count it if it does. Raises Overloaded."""
        if size > self._left:
            self._is_full = True
            return False
        self._left -= size
        self._hold(size)
        try:
            await self._counted.enter_async_context(self._batches.room(self._owner, stored_bytes))
        except PayloadTooLarge:
            self._is_full = True
            return False
        except Unavailable:  # what the key has stored cannot be read; the result counts when it is kept itself
            pass
        return True
