"""Small files that workers hand to frontends: tokenizers and chat templates, by the sha256 of their content."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import re
import tempfile
from contextlib import suppress
from pathlib import Path

from nats.errors import Error as NatsError
from nats.js.errors import BucketNotFoundError, ObjectNotFoundError
from nats.js.errors import Error as JetStreamError
from nats.js.object_store import ObjectStore

from dynamo.common.errors import Unavailable
from dynamo.common.messaging.connection import Connection
from dynamo.common.messaging.objects import read_object
from dynamo.common.messaging.replicas import create_replicated

log = logging.getLogger(__name__)

BUCKET = "dynamo-models"
_KEY = re.compile(r"[0-9a-f]{64}")


def file_key(data: bytes) -> str:
    """The key under which `data` is kept."""
    return hashlib.sha256(data).hexdigest()


class FileStore:
    """The NATS object store `dynamo-models`, with a cache of it on disk."""

    def __init__(self, connection: Connection, cache: Path) -> None:
        self._connection = connection
        self._cache = cache

    async def ensure(self) -> None:
        """Make the object store unless it exists. Raises Unavailable."""
        try:
            await self._bucket()
        except (NatsError, JetStreamError, TimeoutError) as error:
            raise Unavailable(f"the model file store cannot be made: {error or type(error).__name__}") from error

    async def put(self, data: bytes) -> str:
        """Keeps `data`, unless it is kept already; returns its key. Raises Unavailable."""
        key = file_key(data)
        try:
            store = await self._bucket()
            try:
                await store.get_info(key)
            except ObjectNotFoundError:
                await store.put(key, data)
        except (NatsError, JetStreamError, TimeoutError) as error:
            raise Unavailable(f"the model file store cannot be written: {error or type(error).__name__}") from error
        return key

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
            store = await self._bucket()
            data = await read_object(self._connection, await store.get_info(key))
        except ObjectNotFoundError:
            raise Unavailable(f"the model file {key[:12]}… is not in the store") from None
        except (NatsError, JetStreamError, TimeoutError) as error:
            raise Unavailable(f"the model file store cannot be read: {error or type(error).__name__}") from error
        if file_key(data) != key:
            raise Unavailable(f"the model file {key[:12]}… came damaged out of the store")
        await asyncio.to_thread(self._write_cached, key, data)
        return data

    async def _bucket(self) -> ObjectStore:
        stream = self._connection.client.jetstream()
        try:
            return await stream.object_store(BUCKET)
        except BucketNotFoundError:
            return await create_replicated(lambda replicas: stream.create_object_store(BUCKET, replicas=replicas))

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
