"""Responses that are stored: in JetStream, for every frontend of the namespace, bound to the API key that made them.

A response has two records: the response itself, and the items that it responded to, those of earlier responses included, so
that a conversation goes on with one read. A response that is generated in the background is stored at its beginning, and its
frontend renews the record every few seconds, without what is large in it: one that is silent for longer, by the clock of the
store, has died. Each write is made only if the record is as the writer left it; so a response that was cancelled or deleted
elsewhere stays so, and its frontend learns of it.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Any

import msgspec
from msgspec import Raw, Struct

from dynamo.common.errors import InvalidRequest, NotFound, PayloadTooLarge, Unavailable
from dynamo.common.process.background import Tasks
from dynamo.common.process.work import Hold, hold_nothing
from dynamo.frontend.api.openai.store.conversations import Conversations
from dynamo.frontend.api.openai.store.events import ResponseObject
from dynamo.frontend.api.openai.store.items import (
    Item,
    ItemIds,
    bounded,
    check_size,
    encode_items,
    parse_items,
    parse_output,
    response_of,
)
from dynamo.frontend.api.openai.store.owned import OwnedRecord, OwnedRecords, RecordNotFound, SizeRecords, Storage
from dynamo.frontend.fleet.peers.response_changes import ResponseChanges, Watch
from dynamo.frontend.metrics import FrontendMetrics

log = logging.getLogger(__name__)

BEAT_S = 5.0
LOST_S = 30.0
"""A response in the background that was not renewed for so long belongs to a frontend that died."""
_LOST = {"code": "server_error", "message": "the frontend that generated the response has ended"}
RUNNING = frozenset({"queued", "in_progress"})
_RENEWED_BYTES = 16 * 1024
"""Bytes of a response that is being generated, above which its record is kept where renewing it does not write it again."""
_ATTEMPTS = 5
_DISCARD_S = 3_600.0
"""For so long it is tried to delete what is left of a response that could not be stored whole."""
_MAX_DISCARDED = 1024
"""Responses that are deleted so at the same time; of more the rest is kept until it expires."""

_ITEMS_PER_STEP = 4096
"""Items of a request that are looked at before other requests have their turn."""
_MAX_REFERENCED = 64
"""Responses to whose items one request refers."""


class _StoredResponse(Struct, frozen=True):
    owner: str
    """The name of the API key; empty without one."""
    response: dict[str, Raw]
    written_at: float
    """Unix time of the writer. Nothing is compared with it: frontends of former versions need the field."""


_decoder = msgspec.json.Decoder(_StoredResponse)
_field_decoder = msgspec.json.Decoder()


class StoredResponses:
    """The stored responses of a namespace. All methods raise Unavailable without JetStream."""

    def __init__(self, storage: Storage, changes: ResponseChanges, metrics: FrontendMetrics, *, by_default: bool = True) -> None:
        """`by_default`: for requests that do not say `store`."""
        self._changes = changes
        self._generated_here: set[str] = set()
        self._clock = asyncio.get_running_loop().time
        self._tasks = Tasks()
        self._storage = storage
        self._records = storage.records
        self._metrics = metrics
        self._sizes = SizeRecords(storage)
        self._responses = OwnedRecords(storage, "response", "resp_", _decoder.decode, owner_of=lambda stored: stored.owner)
        self._by_default = by_default
        self.conversations = Conversations(storage, self._sizes, metrics)

    def wants(self, store: bool | None) -> bool:
        """Return whether a response is stored, which by default depends on whether it can be. Raises Unavailable if it cannot."""
        if store is None:
            return self._by_default and self._records.is_ready
        if store and not self._records.is_ready:
            raise Unavailable("responses cannot be stored now: JetStream is away, or takes no writes")
        return store

    async def may_store(self, owner: str, store: bool | None) -> bool:
        """Return whether a response is stored: as `wants`, and not by default if the key has stored all that it may.

        Raises Unavailable, and PayloadTooLarge if the request wants it stored.
        """
        if not self.wants(store):
            return False
        try:
            await self._storage.quota.check(owner)
        except (PayloadTooLarge, Unavailable):
            if store:
                raise
            return False
        return True

    async def save(
        self, owner: str, response: ResponseObject, items: Sequence[Item] | None, *, last: int | None = None
    ) -> int | None:
        """Write a response and, unless None, what it responded to; return its revision. With `last`: see `RecordStore.put`.

        Raises PayloadTooLarge, for a new response (one with `items`) also if the key may not store so much more.
        """
        with self._metrics.stored_operation("save"):
            shown = msgspec.structs.replace(response, output=await encode_items(response.output))
            data = bounded(msgspec.json.encode({"owner": owner, "response": shown, "written_at": self._storage.clock()}))
            await asyncio.sleep(0)
            if items is None:
                key, inline_bytes = self._storage.key(response.id), _inline_bytes(response)
                revision = await self._records.put(key, data, last=last, inline_bytes=inline_bytes)
                if revision is not None and response.status not in RUNNING:
                    await self._sizes.written(owner, response.id, len(data))
            else:
                revision = await self._save_new(owner, response, data, bytes(await encode_items(items)), last)
            if revision is not None and response.background and response.status not in RUNNING:
                self._changes.announce(response.id)
            return revision

    async def _save_new(self, owner: str, response: ResponseObject, data: bytes, items: bytes, last: int | None) -> int | None:
        id = response.id
        async with self._storage.quota.room(owner, len(data) + len(items)):
            try:
                await self._records.put(self._items_key(id), items, last=0)
                await self._sizes.written(owner, f"{id}-items", len(items))
                inline_bytes = _inline_bytes(response)
                revision = await self._records.put(self._storage.key(id), data, last=last, inline_bytes=inline_bytes)
                await self._sizes.written(owner, id, len(data))
            except BaseException:
                # The client learns that it is not stored; what is there of it would neither be shown nor counted.
                if len(self._tasks) < _MAX_DISCARDED:
                    self._tasks.start(self._discard(owner, id), f"what is left of {id}")
                raise
            return revision

    async def _discard(self, owner: str, id: str) -> None:
        """Delete a response that was not stored whole. If the store is away, that is done when it is back."""
        give_up_at = self._clock() + _DISCARD_S
        while self._clock() < give_up_at:
            try:
                await self._delete(owner, id)
                return
            except Unavailable:
                await self.ready_again(LOST_S)
        log.warning("response %s was not stored whole, and what there is of it is kept until it expires", id)

    async def close(self) -> None:
        """End what is left to be deleted."""
        await self._tasks.close()

    async def renew(self, id: str, last: int) -> int | None:
        """Say that a response is still generated; return its revision, or None if `last` is not the present one."""
        return await self._records.renew(self._storage.key(id), last)

    async def running_revision(self, owner: str, id: str) -> int | None:
        """Return the revision of a response that is being generated; None if it was cancelled or deleted."""
        try:
            response, record = await self._load(owner, id)
        except RecordNotFound:
            return None
        return record.revision if response["status"] in RUNNING else None

    async def read(self, owner: str, id: str, hold: Hold = hold_nothing) -> dict[str, Any]:
        """Return a response. Raises RecordNotFound."""
        with self._metrics.stored_operation("read"):
            return await self.current(owner, id, hold)

    async def current(self, owner: str, id: str, hold: Hold = hold_nothing) -> dict[str, Any]:
        """Return a response, without counting that as an operation. Raises RecordNotFound."""
        response, record = await self._load(owner, id, hold)
        while response["status"] in RUNNING and await self._is_lost(id, record):
            ended = {**response, "status": "failed", "error": _LOST}
            try:
                if await self._end(ended, record):
                    return ended
            except Unavailable:  # nor could its frontend write
                break
            response, record = await self._load(owner, id, hold)
        return response

    async def _is_lost(self, id: str, record: OwnedRecord[_StoredResponse]) -> bool:
        """Return whether the frontend of a response that is being generated has died.

        That it is silent says nothing if the store may have been away from it, as it was from this one.
        """
        if id in self._generated_here or self._records.ready_for_s() <= LOST_S:
            return False
        return await self._records.age_s(record.written_at) > LOST_S

    async def _end(self, ended: dict[str, Any], record: OwnedRecord[_StoredResponse]) -> bool:
        """Write a response that another frontend generates as one that has ended; return False if that has written meanwhile."""
        id, stored = ended["id"], record.value
        data = msgspec.json.encode({"owner": stored.owner, "response": ended, "written_at": stored.written_at})
        if await self._records.put(self._storage.key(id), data, last=record.revision) is None:
            return False
        self._changes.announce(id)
        return True

    @contextmanager
    def generating(self, id: str) -> Iterator[None]:
        """During the body this process generates a response in the background, and knows that it goes on."""
        self._generated_here.add(id)
        try:
            yield
        finally:
            self._generated_here.discard(id)

    async def ready_again(self, timeout_s: float) -> None:
        """Return when the store is in reach again after a failure, or after the timeout."""
        await self._records.ready_again(timeout_s)

    async def add_events(self, id: str, first: int, events: bytes, count: int) -> None:
        """Write a chunk of the events of a response; `first` is the number of the first of these `count`."""
        await self._records.put(self._events_key(id, first), bounded(events))
        self._changes.announce(id, first + count)

    async def count_events(self, owner: str, id: str, size_bytes: int, before: int) -> None:
        """Count what the events of a response take up now, and took up `before`, for the limit of its key."""
        await self._sizes.written(owner, f"{id}-events", size_bytes, before=before)

    def watching(self, id: str) -> AbstractAsyncContextManager[Watch]:
        """Return a watch of a response that is there. Entering it raises Unavailable."""
        return self._changes.watching(id)

    async def events(self, id: str, first: int) -> bytes | None:
        """Return the chunk that begins with the event `first`."""
        record = await self._records.get(self._events_key(id, first))
        return None if record is None else record.value

    async def chunks_of_events(self, id: str) -> list[int]:
        """Return the numbers with which chunks begin."""
        keys = await self._records.keys(self._storage.key(f"{id}.events.*"))
        return [int(key.rpartition(".")[2]) for key in keys]

    async def discard_events_of_deleted(self, owner: str, id: str) -> None:
        """Delete the events of a response if it has been deleted: what its frontend wrote until it learned of that."""
        if await self._records.get(self._storage.key(id)) is None:
            await self._delete_events(owner, id)

    async def items(self, owner: str, id: str, hold: Hold = hold_nothing) -> list[dict[str, Any]]:
        """Return what a response responded to, from the beginning of the conversation. Raises RecordNotFound."""
        with self._metrics.stored_operation("read"):
            await self._load(owner, id, hold)
            record = await self._records.get(self._items_key(id), hold)
            if record is None:
                raise self._responses.not_found(id)
            return await parse_items(record.value, hold)

    async def history(self, owner: str, id: str, hold: Hold = hold_nothing) -> list[dict[str, Any]]:
        """Return all items up to the end of a response. Raises RecordNotFound; InvalidRequest if it has not ended well."""
        response = await self.read(owner, id, hold)
        if response["status"] not in ("completed", "incomplete"):
            raise InvalidRequest(f"response '{id}' is {response['status']}; only one that ended can be continued")
        return [*await self.items(owner, id, hold), *await parse_output(response["output"])]

    async def resolved(
        self, owner: str, items: Sequence[Item], history: Sequence[Item], ids: ItemIds, hold: Hold = hold_nothing
    ) -> list[Item]:
        """Return items with each reference replaced by the item that it names, in `history` or in a stored response.

        Those that are there already become copies with ids of their own, since lists are paged by ids. Raises NotFound,
        PayloadTooLarge, and InvalidRequest for references to too many responses.
        """
        named: dict[Any, Item] = {item.get("id"): item for item in history}
        taken = set(named)
        looked_into: set[str] = set()
        sizes: dict[str, int] = {}
        referenced_bytes = 0
        resolved: list[Item] = []
        for number, item in enumerate(items):
            if number % _ITEMS_PER_STEP == 0:
                await asyncio.sleep(0)
            if item["type"] == "item_reference":
                id, response_id = item["id"], response_of(item["id"])
                if id not in named and response_id is not None and response_id not in looked_into:
                    if len(looked_into) == _MAX_REFERENCED:
                        raise InvalidRequest(f"a request may refer to items of {_MAX_REFERENCED} responses", param="input")
                    looked_into.add(response_id)
                    for stored in await self._all_items(owner, response_id, hold):
                        named.setdefault(stored.get("id"), stored)
                if id not in named:
                    raise NotFound(f"item '{id[:80]}' is not found; items are kept as long as their response is stored")
                item = named[id]
                # A reference takes a hundred bytes, and each use of an item as many as the item.
                if id not in sizes:
                    sizes[id] = len(msgspec.json.encode(item))
                referenced_bytes += sizes[id]
                check_size(referenced_bytes)
                hold(sizes[id])
            resolved.append({**item, "id": ids.new(item["type"])} if item["id"] in taken else item)
            taken.add(item["id"])
        return resolved

    async def _all_items(self, owner: str, id: str, hold: Hold) -> list[dict[str, Any]]:
        try:
            response = await self.read(owner, id, hold)
            return [*await self.items(owner, id, hold), *await parse_output(response["output"])]
        except RecordNotFound:
            return []

    async def delete(self, owner: str, id: str, hold: Hold = hold_nothing) -> None:
        """Delete a response. Raises RecordNotFound."""
        with self._metrics.stored_operation("delete"):
            await self._load(owner, id, hold)
            await self._delete(owner, id)
            await self._delete_events(owner, id)
            self._changes.announce(id)

    async def cancel(self, owner: str, id: str, hold: Hold = hold_nothing) -> dict[str, Any]:
        """End a response in the background, and return it as it is then. Raises RecordNotFound, InvalidRequest.

        One whose frontend seems to have died is ended as well: it may only be slow.
        """
        with self._metrics.stored_operation("cancel"):
            for _ in range(_ATTEMPTS):
                response, record = await self._load(owner, id, hold)
                if not response["background"]:
                    raise InvalidRequest("Cannot cancel a synchronous response.")
                if response["status"] not in RUNNING:
                    return response
                response["status"] = "cancelled"
                if await self._end(response, record):
                    return response
            raise InvalidRequest(f"response '{id}' changes too fast to be cancelled; try again")

    async def _delete(self, owner: str, id: str) -> None:
        await self._records.delete(self._storage.key(id))
        await self._records.delete(self._items_key(id))
        for of_it in (id, f"{id}-items"):
            await self._sizes.deleted(owner, of_it)

    async def _delete_events(self, owner: str, id: str) -> None:
        for first in await self.chunks_of_events(id):
            await self._records.delete(self._events_key(id, first))
        await self._sizes.deleted(owner, f"{id}-events")

    async def _load(self, owner: str, id: str, hold: Hold = hold_nothing) -> tuple[dict[str, Any], OwnedRecord[_StoredResponse]]:
        """Return a response, whose `output` is a JSON array that is parsed only by those who look into it, and its record."""
        record = await self._responses.load(owner, id, hold)
        fields = record.value.response.items()
        return {name: value if name == "output" else _field_decoder.decode(value) for name, value in fields}, record

    def _items_key(self, id: str) -> str:
        return self._storage.key(f"{id}.items")

    def _events_key(self, id: str, first: int) -> str:
        return self._storage.key(f"{id}.events.{first}")


def _inline_bytes(response: ResponseObject) -> int | None:
    return _RENEWED_BYTES if response.background and response.status in RUNNING else None


def new_response_id() -> str:
    return f"resp_{secrets.token_hex(16)}"
