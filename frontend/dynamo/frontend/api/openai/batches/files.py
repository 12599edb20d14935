"""Files in JetStream, each with a record that describes it and one with its content. A key has only the files that it made."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec
from msgspec import Struct

from dynamo.common.errors import InvalidRequest, NotFound, PayloadTooLarge
from dynamo.common.messaging.jetstream.records import RecordContent, RecordStore
from dynamo.common.names import encode
from dynamo.frontend.api.declaration import MAX_FILE_BYTES
from dynamo.frontend.api.openai.batches.index import Index
from dynamo.frontend.api.openai.store.owners import owner_token
from dynamo.frontend.api.openai.store.quota import StoredBytes

MAX_FILES = 10_000
"""Files of one API key, at most."""
_ID = re.compile(r"file-[0-9a-f]{32}")


class FileObject(Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    filename: str
    purpose: str
    status: Literal["processed"] = "processed"


class FileNotFound(NotFound):
    """There is no such file, or it is another key's."""

    def __init__(self, id: str) -> None:
        super().__init__(f"file '{id[:80]}' is not found")


_decoder = msgspec.json.Decoder(FileObject)


class Files:
    """The files of a namespace. All methods raise Unavailable without JetStream."""

    def __init__(
        self,
        records: Callable[[], RecordStore],
        namespace: str,
        clock: Callable[[], float] = time.time,
        quota: StoredBytes | None = None,
    ) -> None:
        """`records` raises Unavailable until there is a connection."""
        self._quota = quota or StoredBytes()
        self._quota.count_by(self._bytes_of)
        self._records = records
        self._index = Index(records, _decoder.decode)
        self._prefix = encode(namespace, "namespace")
        self._clock = clock

    async def create(self, owner: str, filename: str, purpose: str, content: bytes) -> FileObject:
        """Make a file. Raises PayloadTooLarge, InvalidRequest."""
        if len(content) > MAX_FILE_BYTES:
            raise PayloadTooLarge(f"the file has {len(content)} bytes; at most {MAX_FILE_BYTES} are allowed")
        if len(await self.owned_by(owner)) >= MAX_FILES:
            raise InvalidRequest(f"there are {MAX_FILES} files already; delete some")
        async with self._quota.room(owner, len(content)):
            return await self.put(owner, f"file-{secrets.token_hex(16)}", filename, purpose, content)

    async def put(
        self, owner: str, id: str, filename: str, purpose: str, content: bytes, *, counted_bytes: int = 0
    ) -> FileObject:
        """Make a file of any size, whatever the key has stored, or replace the one that has the `id`.

        `counted_bytes` of it count already as stored by the key.
        """
        file = FileObject(id=id, bytes=len(content), created_at=int(self._clock()), filename=filename, purpose=purpose)
        await self._records().put(self._content_key(owner, file.id), content)
        await self._records().put(self._key(owner, file.id), msgspec.json.encode(file))
        self._quota.add(owner, file.bytes - counted_bytes)
        return file

    async def read(self, owner: str, id: str) -> FileObject:
        """Raises FileNotFound."""
        record = await self._records().get(self._key(owner, id)) if _ID.fullmatch(id) else None
        if record is None:
            raise FileNotFound(id)
        return _decoder.decode(record.value)

    async def content(self, owner: str, id: str, hold: Callable[[int], None]) -> bytes:
        """Return the whole content, whose size `hold` is called with before it is read. Raises FileNotFound."""
        record = await self._records().get(self._content_key(owner, id), hold) if _ID.fullmatch(id) else None
        if record is None:
            raise FileNotFound(id)
        return record.value

    async def open(self, owner: str, id: str) -> RecordContent:
        """Return the content, to be read in pieces. Raises FileNotFound."""
        content = await self._records().open(self._content_key(owner, id)) if _ID.fullmatch(id) else None
        if content is None:
            raise FileNotFound(id)
        return content

    async def delete(self, owner: str, id: str) -> None:
        """Raises FileNotFound."""
        file = await self.read(owner, id)
        await self._records().delete(self._key(owner, id))
        await self._records().delete(self._content_key(owner, id))
        self._quota.add(owner, -file.bytes)

    async def owned_by(self, owner: str) -> Sequence[FileObject]:
        """Return all files of a key, the newest first."""
        return await self._index.of(self._key(owner, "*"))

    async def _bytes_of(self, owner: str) -> int:
        return sum(file.bytes for file in await self.owned_by(owner))

    def _key(self, owner: str, id: str) -> str:
        return f"{self._prefix}.file.{owner_token(owner)}.{id}"

    def _content_key(self, owner: str, id: str) -> str:
        return f"{self._prefix}.content.{owner_token(owner)}.{id}"
