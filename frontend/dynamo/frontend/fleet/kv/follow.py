"""Following one instance's KV updates over a bus that may lose, repeat, reorder or delay them.

`Follower` decides which updates to apply and when to request missing ones; the caller applies and requests. Cases for an update's
number `n`, where `next` is the number expected next:

    1. n < next              a duplicate: dropped
    2. n == next             applied, with all kept updates that follow it without a gap
    3. n > next              an update is missing: kept; a request for the missing ones is due
    4. n > next, cleared     does not depend on earlier updates: applied
    5. not synced            no state yet: n == 0 and cleared updates are applied, others kept; a snapshot is due
"""

from __future__ import annotations

from collections.abc import Iterable

from dynamo.common.kv.events import KvSnapshot, KvUpdate

_MAX_KEPT_BYTES = 8 << 20
"""Hashes of kept updates: more than what an instance keeps for a reader that missed some."""


class Follower:
    """The position of one subscriber in one instance's stream of updates."""

    __slots__ = ("_announced", "_kept", "_kept_bytes", "_max_kept", "_next")

    def __init__(self, max_kept: int = 1024) -> None:
        self._next: int | None = None
        self._kept: dict[int, KvUpdate] = {}
        self._kept_bytes = 0
        self._max_kept = max_kept
        self._announced = -1
        """Highest number announced since `request_from` was called."""

    @property
    def number(self) -> int | None:
        """The number of the last update applied, -1 for none; None: not synced."""
        return None if self._next is None else self._next - 1

    @property
    def is_behind(self) -> bool:
        """Whether an update is missing, so that it should be requested from the instance."""
        return self._next is None or self._announced >= self._next

    def request_from(self) -> int | None:
        """Return the first number to request updates from, or None if a snapshot is needed. Call it when sending a request.

        Earlier announcements are dropped, since the response covers them. So an announced number that the instance never made
        causes a single request, not an endless series.
        """
        self._announced = -1
        return self._next

    def update(self, update: KvUpdate) -> list[KvUpdate]:
        """Return the updates that can be applied now, in order."""
        self.announced(update.number)
        if update.number == self._next and not self._kept:  # as nearly always
            self._next += 1
            return [update]
        return self._take([update])

    def recovered(self, updates: Iterable[KvUpdate]) -> list[KvUpdate]:
        """Take the response to a request for updates, and return the updates that can be applied now."""
        return self._take(updates) + self._drain_after_recovery()

    def snapshot(self, snapshot: KvSnapshot) -> list[KvUpdate] | None:
        """Take a snapshot. None: it is older than the applied state and must be ignored. Otherwise, replace all blocks of the
        instance by it, then apply the returned updates."""
        if self._next is not None and snapshot.number < self._next - 1:
            return None
        self._next = snapshot.number + 1
        return self._drain_after_recovery()

    def announced(self, last: int) -> None:
        """Note that the instance has made updates up to `last`, as its load report says: this shows a lost tail of the stream."""
        self._announced = max(self._announced, last)

    def _take(self, updates: Iterable[KvUpdate]) -> list[KvUpdate]:
        ready: list[KvUpdate] = []
        for update in updates:
            if self._next is not None and update.number < self._next:
                continue
            if update.number == self._next or update.cleared or update.number == 0:
                ready.append(update)
                self._next = update.number + 1
                continue
            self._forget(update.number)
            self._kept[update.number] = update
            self._kept_bytes += update.hash_bytes
            while len(self._kept) > self._max_kept or (self._kept_bytes > _MAX_KEPT_BYTES and len(self._kept) > 1):
                # The oldest is evicted: the snapshot that is due covers it, or else the gap it leaves requests another one.
                self._forget(min(self._kept))
        return ready + self._drain()

    def _drain_after_recovery(self) -> list[KvUpdate]:
        """Return the kept updates that follow a response, and drop those above any announced number: they were never made."""
        ready = self._drain()
        if self._next is not None:
            last = max(self._next - 1, self._announced)
            for number in [number for number in self._kept if number > last]:
                self._forget(number)
        return ready

    def _drain(self) -> list[KvUpdate]:
        ready: list[KvUpdate] = []
        if self._next is None or not self._kept:
            return ready
        while (update := self._forget(self._next)) is not None:
            ready.append(update)
            self._next += 1
        for number in [number for number in self._kept if number < self._next]:
            self._forget(number)
        return ready

    def _forget(self, number: int) -> KvUpdate | None:
        """Return a kept update, which is kept no longer."""
        update = self._kept.pop(number, None)
        if update is not None:
            self._kept_bytes -= update.hash_bytes
        return update
