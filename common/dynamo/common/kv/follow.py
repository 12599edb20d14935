"""Following one instance's KV updates over a bus that may lose, repeat, reorder or delay them.

`Follower` decides what to apply and when to ask; asking and applying are the caller's. Cases for an update's number `n`, where
`next` is the number that has to come next:

    1. n < next      seen already: dropped
    2. n == next     applied, and with it everything kept that follows it without a hole
    3. n > next      something is missing: kept, and a recovery is wanted
    4. not synced    nothing is known of the instance yet: kept, and a snapshot is wanted
"""

from __future__ import annotations

from collections.abc import Iterable

from dynamo.common.kv.events import KvSnapshot, KvUpdate


class Follower:
    """The place of one reader in one instance's stream of updates."""

    def __init__(self, max_kept: int = 1024) -> None:
        self._next: int | None = None
        self._kept: dict[int, KvUpdate] = {}
        self._max_kept = max_kept
        self._known_last = -1
        """Highest number that the instance is known to have made."""

    @property
    def wants_snapshot(self) -> bool:
        """Nothing is known of the instance: only a snapshot helps."""
        return self._next is None

    @property
    def missing_from(self) -> int | None:
        """The first missing number, if it is known that something is missing; None when up to date or not synced."""
        if self._next is None or self._known_last < self._next:
            return None
        return self._next

    def update(self, update: KvUpdate) -> list[KvUpdate]:
        """What may be applied now, in order."""
        self.announced(update.number)
        if self._next is not None and update.number < self._next:
            return []
        self._kept[update.number] = update
        if len(self._kept) > self._max_kept:
            # The oldest goes: the snapshot that is due anyway covers it, or else the hole it leaves asks for another one.
            del self._kept[min(self._kept)]
        return self._drain()

    def recovered(self, updates: Iterable[KvUpdate]) -> list[KvUpdate]:
        """Takes an answer to "updates from `missing_from` on"; returns what may be applied now."""
        for update in updates:
            self.announced(update.number)
            if self._next is not None and update.number >= self._next:
                self._kept[update.number] = update
        return self._drain()

    def snapshot(self, snapshot: KvSnapshot) -> list[KvUpdate] | None:
        """Takes a snapshot. None: it is older than what was applied, leave it. Otherwise replace all blocks of the instance by
        it, then apply the returned updates."""
        if self._next is not None and snapshot.number < self._next - 1:
            return None
        self._next = snapshot.number + 1
        self.announced(snapshot.number)
        for number in [number for number in self._kept if number <= snapshot.number]:
            del self._kept[number]
        return self._drain()

    def announced(self, last: int) -> None:
        """The instance says (in a load report) that it has made updates up to `last`: shows a lost tail of the stream."""
        self._known_last = max(self._known_last, last)

    def _drain(self) -> list[KvUpdate]:
        ready: list[KvUpdate] = []
        if self._next is None:
            return ready
        while (update := self._kept.pop(self._next, None)) is not None:
            ready.append(update)
            self._next += 1
        return ready
