"""Small files that workers hand to frontends: tokenizers and chat templates, by the sha256 of their content."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import re
import tempfile
from base64 import urlsafe_b64encode
from collections.abc import Collection
from contextlib import aclosing, suppress
from pathlib import Path

from nats.errors import Error as NatsError
from nats.js.api import DiscardPolicy, ObjectInfo, StreamConfig
from nats.js.errors import BucketNotFoundError, DigestMismatchError, NotFoundError, ObjectNotFoundError
from nats.js.errors import Error as JetStreamError

from dynamo.common.errors import InvalidRequest, Unavailable
from dynamo.common.messaging.jetstream.objects import ObjectWrite, descriptions, meta_subject, read_object
from dynamo.common.messaging.jetstream.reasons import reason_of
from dynamo.common.messaging.jetstream.replicas import create_replicated
from dynamo.common.messaging.nats.connection import Connection

log = logging.getLogger(__name__)

BUCKET = "dynamo-models"
_STREAM = f"OBJ_{BUCKET}"
_KEY = re.compile(r"[0-9a-f]{64}")
_MAX_BYTES = 256 << 20
"""Bytes of a file, at most: the largest tokenizers have some 40 MB."""
_BUCKET_BYTES = 2 << 30
"""Bytes of all files: a login of a worker that fills this leaves room for what else is stored."""
_LEAST_PIECE_BYTES = 64 << 10
"""Bytes of each piece of a file but the last one, at least; nats-py and we store 128 KiB in a piece."""


def file_key(data: bytes) -> str:
    """The key under which `data` is kept."""
    return hashlib.sha256(data).hexdigest()


class FileStore:
    """The NATS object store `dynamo-models`, with a cache of it on disk."""

    def __init__(self, connection: Connection, cache: Path) -> None:
        self._connection = connection
        self._cache = cache
        self._writes: dict[str, ObjectWrite] = {}
        """Files that were not stored to their end, by key."""

    async def ensure(self) -> None:
        """Make the object store unless it exists. Raises Unavailable."""
        try:
            await self._make_bucket()
        except (NatsError, JetStreamError, TimeoutError) as error:
            raise Unavailable(f"the model file store cannot be made: {reason_of(error)}") from error

    async def put(self, data: bytes) -> str:
        """Keeps `data`, unless it is kept already; returns its key. Raises Unavailable, and InvalidRequest for a file too long.

        Nothing is ever replaced or deleted, so a login that may write files needs no permission to purge the store. That there
        is something under the key is not believed: another login may have written it.
        """
        if len(data) > _MAX_BYTES:
            raise InvalidRequest(f"a file of a model has {len(data)} bytes; at most {_MAX_BYTES} are kept")
        key = file_key(data)
        try:
            await self._make_bucket()
            if await self._stored(key) is None:
                # A write that failed is continued: what it has stored cannot be deleted, and would be stored again each time.
                await self._writes.setdefault(key, ObjectWrite(BUCKET, key)).run(self._connection, data)
        except (NatsError, JetStreamError, TimeoutError) as error:
            raise Unavailable(f"the model file store cannot be written: {reason_of(error)}") from error
        self._writes.pop(key, None)
        return key

    async def missing(self, keys: Collection[str]) -> set[str]:
        """Return the keys of the files that are not in the store, by one request. Raises Unavailable."""
        stream = self._connection.client.jetstream()
        try:
            info = await stream.stream_info(_STREAM, subjects_filter=f"$O.{BUCKET}.M.*")
        except NotFoundError:
            return set(keys)
        except (NatsError, JetStreamError, TimeoutError) as error:
            raise Unavailable(f"the model file store cannot be read: {reason_of(error)}") from error
        stored = info.state.subjects or {}
        return {key for key in keys if meta_subject(BUCKET, key) not in stored}

    async def fetch(self, key: str) -> None:
        """Have a file on disk. Raises Unavailable if it cannot be had."""
        if not _KEY.fullmatch(key) or not await asyncio.to_thread((self._cache / key).exists):
            await self.get(key)

    async def get(self, key: str) -> bytes:
        """The content of a file, from disk if it was fetched before. Raises Unavailable if it cannot be had."""
        if not _KEY.fullmatch(key):
            raise Unavailable(f"{key[:80]!r} is not the key of a model file")
        cached = await asyncio.to_thread(self._read_cached, key)
        if cached is not None:
            return cached
        try:
            await self._make_bucket()
            data = await self._stored(key)
        except (NatsError, JetStreamError, TimeoutError) as error:
            raise Unavailable(f"the model file store cannot be read: {reason_of(error)}") from error
        if data is None:
            raise Unavailable(f"the model file {key[:12]}… is not in the store")
        await asyncio.to_thread(self._write_cached, key, data)
        return data

    async def _stored(self, key: str) -> bytes | None:
        """Return a file as the store has it; None if it is not there, or nowhere as it should be."""
        async with aclosing(descriptions(self._connection, BUCKET, key)) as infos:
            async for info in infos:
                if not _may_be(key, info):
                    continue
                try:
                    data = await read_object(self._connection, info)
                    if file_key(data) == key:
                        return data
                except (ObjectNotFoundError, DigestMismatchError):
                    pass
                log.warning("the model file %s… is described wrongly, or damaged, in the store", key[:12])
        return None

    async def _make_bucket(self) -> None:
        stream = self._connection.client.jetstream()
        try:
            await stream.object_store(BUCKET)
        except BucketNotFoundError:
            await create_replicated(lambda replicas: stream.add_stream(_configuration(replicas)))

    def _read_cached(self, key: str) -> bytes | None:
        try:
            data = (self._cache / key).read_bytes()
        except OSError:
            return None
        return data if file_key(data) == key else None

    def _write_cached(self, key: str, data: bytes) -> None:
        """Keep a file on disk. If that fails, as on a full disk, the file is fetched again the next time."""
        name = ""
        try:
            self._cache.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self._cache)
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            Path(name).replace(self._cache / key)  # several processes share the cache
        except OSError as error:
            log.warning("the model file %s… cannot be cached in %s: %s", key[:12], self._cache, error)
            if name:
                with suppress(OSError):
                    os.unlink(name)


def _may_be(key: str, info: ObjectInfo) -> bool:
    """Return whether what is said about a file is worth reading that: other logins may say anything."""
    size, pieces = info.size, info.chunks
    if info.deleted or not isinstance(size, int) or not isinstance(pieces, int):
        return False
    digest = f"SHA-256={urlsafe_b64encode(bytes.fromhex(key)).decode()}"
    is_bounded = 0 <= size <= _MAX_BYTES and 0 <= pieces <= size // _LEAST_PIECE_BYTES + 1
    return is_bounded and info.digest == digest and info.bucket == BUCKET and str(info.nuid).isalnum()


def _configuration(replicas: int) -> StreamConfig:
    """Return the bucket as nats-py makes buckets, except that no message may delete others: a roll-up of all is a purge."""
    return StreamConfig(
        name=_STREAM,
        subjects=[f"$O.{BUCKET}.C.>", f"$O.{BUCKET}.M.>"],
        discard=DiscardPolicy.NEW,
        max_bytes=_BUCKET_BYTES,
        num_replicas=replicas,
        max_consumers=0,
        allow_direct=True,
        allow_rollup_hdrs=False,
    )
