"""Conversations: items under an id of their own, to which responses add what they responded to and what they said.

A conversation is one record, which is written only as it was read; so of responses that end at once each adds its items. Changes
that one process makes wait for each other, and only those of several are tried again.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any
from weakref import WeakValueDictionary

import msgspec
from msgspec import Raw, Struct

from dynamo.common.errors import NotFound, Overloaded
from dynamo.common.messaging.jetstream.records import WriteUnconfirmed
from dynamo.common.process.work import Hold, hold_nothing
from dynamo.frontend.api.openai.store.items import Item, bounded, check_size, encode_items, parse_items, split_items
from dynamo.frontend.api.openai.store.owned import OwnedRecords, SizeRecords, Storage
from dynamo.frontend.metrics import FrontendMetrics

_ATTEMPTS = 10
"""Each process makes one at a time, and each time that one fails another one has succeeded."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 0.2
"""Between two attempts, at most; twice as long after each."""


class ConversationObject(Struct, frozen=True, kw_only=True):
    """What clients see of a conversation; its items are listed apart."""

    id: str
    object: str = "conversation"
    created_at: int
    metadata: dict[str, str]


class _StoredConversation(Struct, frozen=True):
    owner: str
    """The name of the API key; empty without one."""
    shown: ConversationObject
    items: Raw
    """A JSON array, which is parsed only by those who look into it."""


class _Identified(Struct, frozen=True):
    """What is parsed of an item to find it."""

    id: str | None = None


_decoder = msgspec.json.Decoder(_StoredConversation)
_identified_decoder = msgspec.json.Decoder(_Identified)


class Conversations:
    """The conversations of a namespace. All methods raise Unavailable without JetStream."""

    def __init__(self, storage: Storage, sizes: SizeRecords, metrics: FrontendMetrics) -> None:
        self._storage = storage
        self._sizes = sizes
        self._metrics = metrics
        self._conversations = OwnedRecords(
            storage, "conversation", "conv_", _decoder.decode, owner_of=lambda stored: stored.owner
        )
        self._turns: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()
        """By owner and id, for those that are being changed here."""

    async def create(self, owner: str, items: Sequence[Item], metadata: Mapping[str, str]) -> ConversationObject:
        storage = self._storage
        with self._metrics.stored_operation("create_conversation"):
            id = self._conversations.new_id()
            shown = ConversationObject(id=id, created_at=int(storage.clock()), metadata=dict(metadata))
            stored = _StoredConversation(owner, shown, await encode_items(items))
            data = bounded(msgspec.json.encode(stored))
            async with storage.quota.room(owner, len(data)):
                await storage.records.put(self._conversations.key(owner, id), data, last=0)
                await self._sizes.written(owner, id, len(data))
            return shown

    async def read(self, owner: str, id: str, hold: Hold = hold_nothing) -> ConversationObject:
        """Raises RecordNotFound."""
        with self._metrics.stored_operation("read_conversation"):
            return (await self._conversations.load(owner, id, hold)).value.shown

    async def items(self, owner: str, id: str, hold: Hold = hold_nothing) -> list[dict[str, Any]]:
        """Return all items, oldest first. Raises RecordNotFound."""
        with self._metrics.stored_operation("read_conversation"):
            return await parse_items((await self._conversations.load(owner, id, hold)).value.items, hold)

    async def add(
        self, owner: str, id: str, items: Sequence[Item], hold: Hold = hold_nothing, *, is_bounded: bool = True
    ) -> None:
        """Add items at the end, if `is_bounded` within what the key may store.

        Raises RecordNotFound, PayloadTooLarge; Overloaded if others write all the time.
        """
        added = bytes(await encode_items(items))

        def change(stored: _StoredConversation) -> _StoredConversation:
            return msgspec.structs.replace(stored, items=_joined(stored.items, added))

        await self._change("add_items", owner, id, change, hold, is_bounded=is_bounded)

    @asynccontextmanager
    async def room(self, owner: str, items: Sequence[Item]) -> AsyncIterator[Callable[[], None]]:
        """Keep room for items that the body adds later with others, which are kept in any case; see `StoredBytes.room`."""
        quota = self._storage.quota
        size_bytes = 0 if quota.limit(owner) is None else len(memoryview(await encode_items(items)))
        async with quota.room(owner, size_bytes) as give_back:
            yield give_back

    async def delete_item(self, owner: str, id: str, item_id: str, hold: Hold = hold_nothing) -> ConversationObject:
        """Delete an item. Raises RecordNotFound; NotFound if there is no such item."""

        def change(stored: _StoredConversation) -> _StoredConversation:
            items = split_items(stored.items)
            rest = [item for item in items if _identified_decoder.decode(item).id != item_id]
            if len(rest) == len(items):
                raise NotFound(f"item '{item_id[:80]}' is not found in conversation '{id}'")
            return msgspec.structs.replace(stored, items=Raw(msgspec.json.encode(rest)))

        return await self._change("delete_item", owner, id, change, hold)

    async def update(self, owner: str, id: str, metadata: Mapping[str, str], hold: Hold = hold_nothing) -> ConversationObject:
        """Replace the metadata. Raises RecordNotFound."""

        def change(stored: _StoredConversation) -> _StoredConversation:
            return msgspec.structs.replace(stored, shown=msgspec.structs.replace(stored.shown, metadata=dict(metadata)))

        return await self._change("update_conversation", owner, id, change, hold)

    async def delete(self, owner: str, id: str, hold: Hold = hold_nothing) -> None:
        """Delete a conversation with its items. Raises RecordNotFound."""
        with self._metrics.stored_operation("delete_conversation"):
            await self._conversations.load(owner, id, hold)
            await self._storage.records.delete(self._conversations.key(owner, id))
            await self._sizes.deleted(owner, id)

    async def _change(
        self,
        operation: str,
        owner: str,
        id: str,
        change: Callable[[_StoredConversation], _StoredConversation],
        hold: Hold = hold_nothing,
        *,
        is_bounded: bool = True,
    ) -> ConversationObject:
        with self._metrics.stored_operation(operation):
            async with self._turns.setdefault((owner, id), asyncio.Lock()):
                return await self._changed(owner, id, change, hold, is_bounded=is_bounded)

    async def _changed(
        self, owner: str, id: str, change: Callable[[_StoredConversation], _StoredConversation], hold: Hold, *, is_bounded: bool
    ) -> ConversationObject:
        pause_s = _FIRST_PAUSE_S
        for _ in range(_ATTEMPTS):
            stored = await self._conversations.load(owner, id, hold)
            await asyncio.sleep(0)  # both take a while if the conversation is large
            changed = change(stored.value)
            data = bounded(msgspec.json.encode(changed))
            async with self._storage.quota.room(owner, len(data) - stored.size_bytes if is_bounded else 0):
                if await self._put(self._conversations.key(owner, id), data, stored.revision):
                    await self._sizes.written(owner, id, len(data), before=stored.size_bytes)
                    return changed.shown
            await asyncio.sleep(random.uniform(0, pause_s))  # another process may try again, too
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        raise Overloaded(f"conversation '{id}' changes too fast; try again")

    async def _put(self, key: str, data: bytes, revision: int) -> bool:
        """Write a conversation; return False if it is not as it was read any more."""
        try:
            return await self._storage.records.put(key, data, last=revision) is not None
        except WriteUnconfirmed:  # if it was made, a client that tries again would do it twice
            record = await self._storage.records.get(key)
            if record is None or record.revision == revision or record.value != data:
                raise
            return True


def _joined(items: Raw, added: bytes) -> Raw:
    """Return one JSON array of two. Raises PayloadTooLarge."""
    first = memoryview(items)
    check_size(len(first) + len(added))
    if len(first) == len(b"[]"):
        return Raw(added)
    if added == b"[]":
        return items
    joined = Raw(b"".join((first[:-1], b",", memoryview(added)[1:])))
    split_items(joined)
    return joined
