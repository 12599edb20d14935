"""How much each key may store: files, responses and conversations together."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from dynamo.common.errors import PayloadTooLarge

COUNTED_S = 10.0
"""A count is used for so long, with what this process adds to it. Others count for themselves."""

Count = Callable[[str], Awaitable[int]]
"""Returns the bytes that a key has stored in one place. Raises Unavailable."""


@dataclass(slots=True)
class _Count:
    bytes: int
    counted_at: float


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

    def count_by(self, count: Count) -> None:
        """Count one more place."""
        self._places.append(count)

    async def check(self, owner: str, size_bytes: int = 1) -> None:
        """Raise PayloadTooLarge if a key may not store so much more, Unavailable if that cannot be known."""
        limit = self.limit(owner)
        if limit is None:
            return
        stored = await self._stored(owner)
        if stored + size_bytes > limit:
            raise PayloadTooLarge(
                f"the API key '{owner}' has stored {stored} of its {limit} bytes of files, responses and conversations, and this "
                f"takes {size_bytes}; delete some"
            )

    def add(self, owner: str, size_bytes: int) -> None:
        """So much more was stored here, or less if negative."""
        if (count := self._counts.get(owner)) is not None:
            count.bytes = max(0, count.bytes + size_bytes)

    async def _stored(self, owner: str) -> int:
        count = self._counts.get(owner)
        if count is None or self._clock() - count.counted_at >= COUNTED_S:
            stored = [await place(owner) for place in self._places]
            count = self._counts[owner] = _Count(sum(stored), self._clock())
        return count.bytes
