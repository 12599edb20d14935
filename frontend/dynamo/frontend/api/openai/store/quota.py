"""How much each key may store: files, batches, responses and conversations together."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field

from dynamo.common.errors import PayloadTooLarge

COUNTED_S = 10.0
"""A count is used for so long, with what this process adds to it. Others count for themselves."""

Count = Callable[[str], Awaitable[int]]
"""Returns the bytes that a key has stored in one place. Raises Unavailable."""


@dataclass(slots=True)
class _Count:
    bytes: int = 0
    counted_at: float = -math.inf
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while it is counted."""


class StoredBytes:
    """What keys with a limit have stored, in all places. Of others nothing is counted."""

    def __init__(
        self, limit: Callable[[str], int | None] = lambda owner: None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`limit` returns the limit of a key by its name."""
        self.limit = limit
        self._clock = clock
        self._places: list[Count] = []
        self._counts: dict[str, _Count] = {}
        self._writing: Counter[str] = Counter()
        """Bytes that are being written now, by key."""

    def count_by(self, count: Count) -> None:
        """Count one more place."""
        self._places.append(count)

    async def check(self, owner: str, size_bytes: int = 1) -> None:
        """Raise PayloadTooLarge if a key may not store so much more, Unavailable if that cannot be known."""
        limit = self.limit(owner)
        if limit is None:
            return
        stored = await self._stored(owner) + self._writing[owner]
        if stored + size_bytes > limit:
            raise PayloadTooLarge(
                f"the API key '{owner}' has stored {stored} of its {limit} bytes of files, batches, responses and conversations, "
                f"and this takes {size_bytes}; delete some"
            )

    @asynccontextmanager
    async def room(self, owner: str, size_bytes: int) -> AsyncIterator[Callable[[], None]]:
        """Keep room for what the body writes, so that of several at the same time each counts the others.

        The body calls `add` once that is written, and may then call what it gets, to give the room back before its end.
        Raises as `check` does.
        """
        with ExitStack() as kept:
            if size_bytes > 0 and self.limit(owner) is not None:
                await self.check(owner, size_bytes)
                self._writing[owner] += size_bytes  # without an await in between
                kept.callback(self._give_back, owner, size_bytes)
            yield kept.close

    def _give_back(self, owner: str, size_bytes: int) -> None:
        self._writing[owner] -= size_bytes
        if not self._writing[owner]:
            del self._writing[owner]

    def add(self, owner: str, size_bytes: int) -> None:
        """So much more was stored here, or less if negative."""
        if (count := self._counts.get(owner)) is not None:
            count.bytes = max(0, count.bytes + size_bytes)

    async def _stored(self, owner: str) -> int:
        count = self._counts.setdefault(owner, _Count())
        async with count.lock:
            if self._clock() - count.counted_at >= COUNTED_S:
                before = count.bytes
                stored = sum([await place(owner) for place in self._places])
                # What was added meanwhile may or may not be in it: rather twice than not at all.
                count.bytes = max(0, stored + count.bytes - before)
                count.counted_at = self._clock()
        return count.bytes
