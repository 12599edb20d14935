"""Records that any process may read and change: a JetStream key-value bucket, and an object store for those that are large.

A record is read and written whole. A writer may demand that the record is as it was read. Records expire, and the buckets are
bounded: what does not fit is refused.
"""

from __future__ import annotations

import asyncio
import io
import logging
import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass

from nats.errors import Error as NatsError
from nats.js import JetStreamContext
from nats.js.errors import BucketNotFoundError, KeyNotFoundError, KeyWrongLastSequenceError, ObjectNotFoundError
from nats.js.errors import Error as JetStreamError
from nats.js.kv import KeyValue
from nats.js.object_store import ObjectStore

from dynamo.common.background import running
from dynamo.common.errors import Unavailable
from dynamo.common.messaging.connection import Connection
from dynamo.common.messaging.replicas import create_replicated

log = logging.getLogger(__name__)

INLINE_BYTES = 256 * 1024
"""Larger records lie in the object store; nats-server takes messages of 1 MiB."""
_INLINE, _ELSEWHERE = b"=", b"@"
"""How values begin: with the record itself, or with the name of an object."""
_LIMIT_S = 5.0
"""For one operation."""
_LARGE_LIMIT_S = 60.0
"""For one with a large record, or many."""
_READS = 3
"""Of a large record that others replace meanwhile."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0


@dataclass(frozen=True, slots=True)
class Record:
    value: bytes
    revision: int
    """For `put`, to replace no other one."""


class RecordStore:
    """One kind of records. Keys consist of letters, digits and `. _ - %`. All methods raise Unavailable without JetStream."""

    def __init__(self, connection: Connection, bucket: str, *, ttl_s: float, max_bytes: int) -> None:
        self.is_ready = False
        """Whether the buckets were there when they were used last."""
        self._connection = connection
        self._bucket = bucket
        self._ttl_s = ttl_s
        self._max_bytes = max_bytes
        self._lost = asyncio.Event()
        self._opened: tuple[object, KeyValue] | None = None
        """The bucket, and the connection by which it was opened."""

    async def keep_ready(self) -> None:
        """Make the buckets, and look for them again after a failure, until cancelled."""
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                with self._plain_errors("made"):
                    async with asyncio.timeout(_LIMIT_S):
                        await self._values()
                        await self._objects()
                self.is_ready, pause_s = True, _FIRST_PAUSE_S
                self._lost.clear()
                await self._lost.wait()
            except Unavailable as error:
                if pause_s == _FIRST_PAUSE_S:
                    log.warning("%s; retrying", error)
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)

    async def get(self, key: str) -> Record | None:
        """Return a record; None if there is none."""
        with self._plain_errors("read"):
            for _ in range(_READS):
                async with asyncio.timeout(_LIMIT_S):
                    entry = await _entry(await self._values(), key)
                if entry is None:
                    return None
                name = _object_of(entry)
                if name is None:
                    return Record((entry.value or b"")[1:], entry.revision or 0)
                async with asyncio.timeout(_LARGE_LIMIT_S):
                    data = io.BytesIO()
                    with suppress(ObjectNotFoundError):  # then the record has been replaced
                        await (await self._objects()).get(name, writeinto=data)
                        return Record(data.getvalue(), entry.revision or 0)
            return None

    async def put(self, key: str, value: bytes, *, last: int | None = None) -> int | None:
        """Write a record; return its revision.

        With `last`, only if that is the revision of the present one, 0 if there is none yet; else return None.
        """
        is_large = len(value) > INLINE_BYTES
        with self._plain_errors("written"):
            async with asyncio.timeout(_LARGE_LIMIT_S if is_large else _LIMIT_S):
                values = await self._values()
                replaced = None if last == 0 else _object_of(await _entry(values, key))
                content, name = _INLINE + value, None
                if is_large:
                    name = f"{key}.{secrets.token_hex(8)}"
                    await (await self._objects()).put(name, value)
                    content = _ELSEWHERE + name.encode()
                revision = await _write(values, key, content, last)
            unused = name if revision is None else replaced
            if unused is not None:
                await self._discard(unused)
            return revision

    async def keys(self, pattern: str) -> list[str]:
        """Return the keys that a pattern of NATS subjects matches, in order."""
        return sorted([entry.key async for entry in self._matching(pattern, meta_only=True)])

    async def values(self, pattern: str) -> dict[str, bytes]:
        """Return the records that a pattern matches, by key in order; those that lie in the object store are left out."""
        entries = [entry async for entry in self._matching(pattern, meta_only=False)]
        values = {entry.key: entry.value[1:] for entry in entries if entry.value is not None and _object_of(entry) is None}
        return dict(sorted(values.items()))

    async def _matching(self, pattern: str, *, meta_only: bool) -> AsyncIterator[KeyValue.Entry]:
        with self._plain_errors("listed"):
            async with asyncio.timeout(_LARGE_LIMIT_S):
                # `KeyValue.keys` reads all keys of the bucket, and filters them afterwards.
                watcher = await (await self._values()).watch(pattern, ignore_deletes=True, meta_only=meta_only)
                try:
                    async for entry in watcher:
                        if entry is None:  # that was all
                            break
                        yield entry
                finally:
                    await watcher.stop()  # type: ignore[no-untyped-call]

    async def delete(self, key: str) -> None:
        """Delete a record, if it is there."""
        with self._plain_errors("written"):
            async with asyncio.timeout(_LIMIT_S):
                values = await self._values()
                entry = await _entry(values, key)
                if entry is None:
                    return
                await values.delete(key, validate_keys=False)
            if (name := _object_of(entry)) is not None:
                await self._discard(name)

    async def _discard(self, name: str) -> None:
        """Delete an object that no record names any more. If that fails, it is there until it expires."""
        try:
            async with asyncio.timeout(_LIMIT_S):
                await (await self._objects()).delete(name)
        except (NatsError, JetStreamError, TimeoutError) as error:
            log.debug("the object %s in the bucket %s is not deleted: %s", name, self._bucket, error)

    async def _values(self) -> KeyValue:
        client = self._connection.client
        if self._opened is None or self._opened[0] is not client:
            self._opened = client, await self._open_values(client.jetstream())
        return self._opened[1]

    async def _open_values(self, context: JetStreamContext) -> KeyValue:
        try:
            return await context.key_value(self._bucket)
        except BucketNotFoundError:
            return await create_replicated(
                lambda replicas: context.create_key_value(
                    bucket=self._bucket, ttl=self._ttl_s, max_bytes=self._max_bytes, replicas=replicas
                )
            )

    async def _objects(self) -> ObjectStore:
        context, bucket = self._connection.client.jetstream(), f"{self._bucket}-large"
        try:
            return await context.object_store(bucket)
        except BucketNotFoundError:
            return await create_replicated(
                lambda replicas: context.create_object_store(
                    bucket, ttl=self._ttl_s, max_bytes=self._max_bytes, replicas=replicas
                )
            )

    @contextmanager
    def _plain_errors(self, done: str) -> Iterator[None]:
        try:
            yield
        except (NatsError, JetStreamError, TimeoutError) as error:
            _raise_if_cancelled()
            self.is_ready, self._opened = False, None
            self._lost.set()
            why = str(error) or "no response in time"
            raise Unavailable(f"the bucket {self._bucket} in JetStream cannot be {done}: {why}") from error
        _raise_if_cancelled()


async def _entry(values: KeyValue, key: str) -> KeyValue.Entry | None:
    try:
        return await values.get(key, validate_keys=False)
    except KeyNotFoundError:
        return None


def _object_of(entry: KeyValue.Entry | None) -> str | None:
    """Return the name of the object that holds a large record."""
    value = b"" if entry is None else entry.value or b""
    return value[1:].decode() if value[:1] == _ELSEWHERE else None


async def _write(values: KeyValue, key: str, content: bytes, last: int | None) -> int | None:
    try:
        if last is None:
            return int(await values.put(key, content, validate_keys=False))
        if last == 0:
            return int(await values.create(key, content, validate_keys=False))
        return int(await values.update(key, content, last=last, validate_keys=False))
    except KeyWrongLastSequenceError:
        return None


def _raise_if_cancelled() -> None:
    """Cancel again: before Python 3.12, a cancellation that comes together with the response of nats-server gets lost."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


@asynccontextmanager
async def open_records(connection: Connection, bucket: str, *, ttl_s: float, max_bytes: int) -> AsyncIterator[RecordStore]:
    """Open a kind of records, whose buckets are made as soon as JetStream lets us. Does not wait for that."""
    store = RecordStore(connection, bucket, ttl_s=ttl_s, max_bytes=max_bytes)
    async with running(store.keep_ready(), f"bucket {bucket}"):
        yield store
