"""Records that belong to API keys: files, batches, responses and conversations.

Each has an id of its kind, and is there only for the key that made it. Of kinds that keys list, the name of a record in the store
has its owner in it; of others, the record itself says whose it is.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from msgspec import Struct

from dynamo.common.errors import NotFound
from dynamo.common.messaging.jetstream.records import Record, RecordStore
from dynamo.common.names import encode
from dynamo.common.process.work import Hold
from dynamo.frontend.api.openai.store.quota import StoredBytes

T = TypeVar("T")


class RecordNotFound(NotFound):
    """There is no such record, or it is another key's."""

    def __init__(self, kind: str, id: str) -> None:
        super().__init__(f"{kind} '{id[:80]}' is not found")


class OwnedRecord(Struct, Generic[T], frozen=True):
    """A record as it was read."""

    value: T
    size_bytes: int
    revision: int
    """For `RecordStore.put`, to replace no other one."""
    written_at: float
    """For `RecordStore.age_s`."""


class Storage:
    """Where the records of a namespace are, and what they count against."""

    def __init__(
        self, records: RecordStore, namespace: str, clock: Callable[[], float] = time.time, quota: StoredBytes | None = None
    ) -> None:
        self.records = records
        self.clock = clock
        """Unix time, seconds."""
        self.quota = quota or StoredBytes()
        self._prefix = encode(namespace, "namespace")

    def key(self, name: str) -> str:
        """Return the key in the store of the record with a name."""
        return f"{self._prefix}.{name}"


class OwnedRecords(Generic[T]):
    """The records of one kind: their ids, their keys in the store, and those of an owner."""

    def __init__(
        self,
        storage: Storage,
        kind: str,
        id_prefix: str,
        decode: Callable[[bytes], T],
        *,
        folder: str = "",
        owner_of: Callable[[T], str] | None = None,
    ) -> None:
        """`kind` is for errors. Either keys have the owner in them, after `folder`, or `owner_of` returns whose a record is."""
        assert bool(folder) != (owner_of is not None), "else a key could read the records of others"
        self._records = storage.records
        self._kind = kind
        self._id_prefix = id_prefix
        self._id = re.compile(rf"{id_prefix}[0-9a-f]{{32}}")
        self._decode = decode
        self._folder = folder
        self._prefix = storage.key(f"{folder}." if folder else "")
        self._owner_of = owner_of

    def new_id(self) -> str:
        return f"{self._id_prefix}{secrets.token_hex(16)}"

    def key(self, owner: str, id: str) -> str:
        """Return the key of a record in the store. Raises RecordNotFound for what is no id of the kind."""
        if not self._id.fullmatch(id):
            raise self.not_found(id)
        return f"{self._prefix}{owner_token(owner)}.{id}" if self._folder else f"{self._prefix}{id}"

    def pattern(self, owner: str) -> str:
        """Return the pattern of all keys of an owner, of a kind that has these in a folder."""
        return f"{self._prefix}{owner_token(owner)}.*"

    def not_found(self, id: str) -> RecordNotFound:
        return RecordNotFound(self._kind, id)

    async def load(self, owner: str, id: str, hold: Hold | None = None) -> OwnedRecord[T]:
        """Return a record as it is now; `hold` as for `RecordStore.get`. Raises RecordNotFound, DamagedRecord, Unavailable."""
        record = await self._records.get(self.key(owner, id), hold)
        if record is not None:
            owned = self.decoded(record)
            if self._owner_of is None or self._owner_of(owned.value) == owner:
                return owned
        raise self.not_found(id)

    def decoded(self, record: Record) -> OwnedRecord[T]:
        return OwnedRecord(self._decode(record.value), len(record.value), record.revision, record.written_at)


class SizeRecords:
    """What is stored of kinds that keys do not list: the size of each object, in a record of its own."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        storage.quota.count_by(self._bytes_of)

    async def written(self, owner: str, id: str, size_bytes: int, *, before: int = 0) -> None:
        """Keep what an object of a key takes up now, and took up `before`, if the key has a limit for that."""
        quota = self._storage.quota
        if quota.limit(owner) is not None:
            await self._storage.records.put(self._key(owner, id), b"%d" % size_bytes)
            quota.add(owner, size_bytes - before)

    async def deleted(self, owner: str, id: str) -> None:
        """Forget what an object takes up."""
        records, quota, key = self._storage.records, self._storage.quota, self._key(owner, id)
        if quota.limit(owner) is None or (size := await records.get(key)) is None:
            return
        if await records.delete(key):  # else another request has, and counted that
            quota.add(owner, -int(size.value))

    async def _bytes_of(self, owner: str) -> int:
        return sum(map(int, (await self._storage.records.values(self._key(owner, "*"))).values()))

    def _key(self, owner: str, id: str) -> str:
        return self._storage.key(f"size.{owner_token(owner)}.{id}")


def owner_token(owner: str) -> str:
    """Return what stands for the name of a key in the keys of its records."""
    return hashlib.sha256(owner.encode()).hexdigest()[:32]
