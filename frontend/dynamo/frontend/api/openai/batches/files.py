"""Files in JetStream, each with a record that describes it and one with its content. A key has only the files that it made."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Literal

import msgspec
from msgspec import Struct

from dynamo.common.errors import DynamoError, InvalidRequest, PayloadTooLarge
from dynamo.common.messaging.jetstream.records import RecordContent
from dynamo.common.process.background import awaited
from dynamo.common.process.work import Hold
from dynamo.frontend.api.declaration import MAX_FILE_BYTES
from dynamo.frontend.api.openai.batches.index import Index
from dynamo.frontend.api.openai.store.owned import OwnedRecords, Storage

MAX_FILES = 10_000
"""Files of one API key, at most."""
_MAX_LEFT = 1000
"""Contents without a record that are counted at most. Each takes an upload that failed while JetStream took no writes."""


class FileObject(Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    filename: str
    purpose: str
    status: Literal["processed"] = "processed"


_decoder = msgspec.json.Decoder(FileObject)


class Files:
    """The files of a namespace. All methods raise Unavailable without JetStream."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._records = storage.records
        self._quota = storage.quota
        self._quota.count_by(self._bytes_of)
        self._files = OwnedRecords(storage, "file", "file-", _decoder.decode, folder="file")
        self._contents = OwnedRecords(storage, "file", "file-", bytes, folder="content")
        self._index = Index(storage.records, self._files)
        self._left: dict[tuple[str, str], int] = {}
        """Bytes that uploads which failed may have left, by key and file, until they are deleted. Only of keys with a limit."""

    async def create(self, owner: str, filename: str, purpose: str, content: bytes) -> FileObject:
        """Make a file. Raises PayloadTooLarge, InvalidRequest."""
        if len(content) > MAX_FILE_BYTES:
            raise PayloadTooLarge(f"the file has {len(content)} bytes; at most {MAX_FILE_BYTES} are allowed")
        if len(await self._index.of(owner)) >= MAX_FILES:
            raise InvalidRequest(f"there are {MAX_FILES} files already; delete some")
        id = self._files.new_id()
        async with self._quota.room(owner, len(content)):
            try:
                return await self.put(owner, id, filename, purpose, content)
            except BaseException:  # in a task of its own: this one may have been cancelled
                await asyncio.shield(awaited(self._drop(owner, id, len(content))))
                raise

    async def put(
        self, owner: str, id: str, filename: str, purpose: str, content: bytes, *, counted_bytes: int = 0
    ) -> FileObject:
        """Make a file of any size, whatever the key has stored, or replace the one that has the `id`.

        `counted_bytes` of it count already as stored by the key.
        """
        file = FileObject(id=id, bytes=len(content), created_at=int(self._storage.clock()), filename=filename, purpose=purpose)
        record = msgspec.json.encode(file)  # before anything is written
        await self._records.put(self._contents.key(owner, id), content)
        await self._records.put(self._files.key(owner, id), record)
        self._quota.add(owner, file.bytes - counted_bytes)
        return file

    async def read(self, owner: str, id: str) -> FileObject:
        """Raises RecordNotFound."""
        return (await self._files.load(owner, id)).value

    async def content(self, owner: str, id: str, hold: Hold) -> bytes:
        """Return the whole content, whose size `hold` is called with before it is read. Raises RecordNotFound."""
        return (await self._contents.load(owner, id, hold)).value

    async def open(self, owner: str, id: str) -> RecordContent:
        """Return the content, to be read in pieces. Raises RecordNotFound."""
        content = await self._records.open(self._contents.key(owner, id))
        if content is None:
            raise self._contents.not_found(id)
        return content

    async def delete(self, owner: str, id: str) -> None:
        """Raises RecordNotFound."""
        file = await self.read(owner, id)
        if await self._delete_records(owner, id):  # else another request has, and counted that
            self._quota.add(owner, -file.bytes)

    async def owned_by(self, owner: str) -> Sequence[FileObject]:
        """Return all files of a key, the newest first."""
        return [owned.value for owned in await self._index.of(owner)]

    async def _bytes_of(self, owner: str) -> int:
        left = [(id, size_bytes) for (name, id), size_bytes in self._left.items() if name == owner]
        for id, size_bytes in left:
            await self._drop(owner, id, size_bytes)
        listed = sum(owned.value.bytes for owned in await self._index.of(owner))
        return listed + sum(size_bytes for id, size_bytes in left if (owner, id) in self._left)

    async def _drop(self, owner: str, id: str, size_bytes: int) -> None:
        """Delete what an upload that failed has written; what cannot be deleted now counts as stored."""
        try:
            await self._delete_records(owner, id)
        except DynamoError:
            if self._quota.limit(owner) is None or (owner, id) in self._left:
                return
            self._left[owner, id] = size_bytes
            self._quota.add(owner, size_bytes)
            if len(self._left) > _MAX_LEFT:
                del self._left[next(iter(self._left))]
        else:
            self._left.pop((owner, id), None)

    async def _delete_records(self, owner: str, id: str) -> bool:
        """Delete a file; return whether it was there."""
        was_there = await self._records.delete(self._files.key(owner, id))
        await self._records.delete(self._contents.key(owner, id))
        return was_there
