"""What each key has of one kind of records, decoded and in order: a page of a list costs no more for a key that has many.

The records of a key are read once, and then only what has changed since. Those of keys that have not asked for the longest time
are forgotten when there are many.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from dynamo.common.messaging.jetstream.records import Changes, Position, RecordStore
from dynamo.frontend.api.openai.store.owned import OwnedRecord, OwnedRecords

MAX_ITEMS = 50_000
"""Items kept in memory, of all API keys together, or of the key that asked last if that has more."""

_RECORDS_PER_STEP = 500


class IndexedItem(Protocol):
    @property
    def id(self) -> str: ...

    @property
    def created_at(self) -> int: ...


ItemType = TypeVar("ItemType", bound=IndexedItem)


@dataclass(slots=True)
class _Items(Generic[ItemType]):
    """The items of one key."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    position: Position | None = None
    by_key: dict[str, OwnedRecord[ItemType]] = field(default_factory=dict)
    newest_first: Sequence[OwnedRecord[ItemType]] = ()
    oldest_at: float = 0.0

    async def apply(self, changes: Changes, owned: OwnedRecords[ItemType], ttl_s: float) -> None:
        """Make the changes, in steps between which other requests have their turns."""
        expired_at = changes.now - ttl_s
        if not changes.is_whole and not changes.records and self.oldest_at > expired_at:
            self.position = changes.position
            return
        if changes.is_whole:
            self.by_key.clear()
        for number, (key, record) in enumerate(changes.records.items()):
            if number % _RECORDS_PER_STEP == 0:
                await asyncio.sleep(0)
            if record is None:
                self.by_key.pop(key, None)
            else:
                self.by_key[key] = owned.decoded(record)
        self.by_key = {key: item for key, item in self.by_key.items() if item.written_at > expired_at}
        await asyncio.sleep(0)
        self.newest_first = sorted(self.by_key.values(), key=_order)
        await asyncio.sleep(0)
        self.oldest_at = min((item.written_at for item in self.by_key.values()), default=changes.now)
        self.position = changes.position  # at last: if this is cancelled before, it is all read again


class Index(Generic[ItemType]):
    """The items of all keys."""

    def __init__(self, records: RecordStore, owned: OwnedRecords[ItemType]) -> None:
        self._records = records
        self._owned = owned
        self._items: OrderedDict[str, _Items[ItemType]] = OrderedDict()

    async def of(self, owner: str) -> Sequence[OwnedRecord[ItemType]]:
        """Return what a key has, the newest first. Raises Unavailable."""
        items = self._items.setdefault(owner, _Items())
        self._items.move_to_end(owner)
        async with items.lock:  # so that each change is read once
            changes = await self._records.changes(self._owned.pattern(owner), items.position)
            await items.apply(changes, self._owned, self._records.ttl_s)
        self._forget()
        return items.newest_first

    def _forget(self) -> None:
        count = sum(len(items.by_key) for items in self._items.values())
        while count > MAX_ITEMS and len(self._items) > 1:
            _, items = self._items.popitem(last=False)
            count -= len(items.by_key)


def _order(item: OwnedRecord[ItemType]) -> tuple[int, str]:
    return -item.value.created_at, item.value.id
