"""Following one instance's KV updates over a bus that may lose, repeat, reorder or delay them.

`Follower` decides what to apply and when to ask; asking and applying are the caller's. Cases for an update's number `n`, where
`next` is the number that has to come next:

    1. n < next              seen already: dropped
    2. n == next             applied, and with it everything kept that follows it without a hole
    3. n > next              something is missing: kept; asking for it is due
    4. n > next, cleared     needs nothing that came before it: applied
    5. not synced            nothing is known yet: n == 0 and cleared updates are applied, others kept; a snapshot is due
"""

from __future__ import annotations

from collections.abc import Iterable

from dynamo.common.kv.events import KvSnapshot, KvUpdate


class Follower:
    """The place of one reader in one instance's stream of updates."""

    __slots__ = ("_announced", "_kept", "_max_kept", "_next")

    def __init__(self, max_kept: int = 1024) -> None:
        self._next: int | None = None
        self._kept: dict[int, KvUpdate] = {}
        self._max_kept = max_kept
        self._announced = -1
        """Highest number that anything spoke of since `ask_from` was called."""

    @property
    def number(self) -> int | None:
        """Number of the last update applied, -1 for none; None: not synced."""
        return None if self._next is None else self._next - 1

    @property
    def behind(self) -> bool:
        """Something is missing: the instance should be asked."""
        return self._next is None or self._announced >= self._next

    def ask_from(self) -> int | None:
        """To be called when a question is sent: the number to ask updates from, or None if only a snapshot helps.

        What was announced before is forgotten, for the answer holds it. So a number that the instance never made, from whoever
        it came, causes one question and not one after the other.
        """
        self._announced = -1
        return self._next

    def update(self, update: KvUpdate) -> list[KvUpdate]:
        """What may be applied now, in order."""
        self.announced(update.number)
        if update.number == self._next and not self._kept:  # as nearly always
            self._next += 1
            return [update]
        return self._take([update])

    def recovered(self, updates: Iterable[KvUpdate]) -> list[KvUpdate]:
        """Takes an answer to a question for updates; returns what may be applied now."""
        return self._take(updates) + self._settled()

    def snapshot(self, snapshot: KvSnapshot) -> list[KvUpdate] | None:
        """Takes a snapshot. None: it is older than what was applied, leave it. Otherwise replace all blocks of the instance by
        it, then apply the returned updates."""
        if self._next is not None and snapshot.number < self._next - 1:
            return None
        self._next = snapshot.number + 1
        return self._settled()

    def announced(self, last: int) -> None:
        """The instance says (in a load report) that it has made updates up to `last`: shows a lost tail of the stream."""
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
            self._kept[update.number] = update
            if len(self._kept) > self._max_kept:
                # The oldest goes: the snapshot that is due anyway covers it, or else the hole it leaves asks for another one.
                del self._kept[min(self._kept)]
        return ready + self._drain()

    def _settled(self) -> list[KvUpdate]:
        """After an answer: what follows it. Kept updates from further on than anything still announced were never made."""
        ready = self._drain()
        if self._next is not None:
            last = max(self._next - 1, self._announced)
            for number in [number for number in self._kept if number > last]:
                del self._kept[number]
        return ready

    def _drain(self) -> list[KvUpdate]:
        ready: list[KvUpdate] = []
        if self._next is None or not self._kept:
            return ready
        while (update := self._kept.pop(self._next, None)) is not None:
            ready.append(update)
            self._next += 1
        for number in [number for number in self._kept if number < self._next]:
            del self._kept[number]
        return ready
