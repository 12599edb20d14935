"""Records that any process may read and change: a JetStream key-value bucket, and an object store for those that are large.

A record is written whole, and read whole or in pieces; what is read is what was written, or an error. A writer may demand that
the record is as it was read. Records expire, and the buckets are bounded: what does not fit is refused.

A store that fails to take a write, as one does whose disk is full, takes its time for each. So after that no write is tried until
one has succeeded that `keep_ready` tries while no request waits for it.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import TypeVar

from nats.errors import Error as NatsError
from nats.js.api import ObjectInfo
from nats.js.errors import BucketNotFoundError, DigestMismatchError, ObjectNotFoundError, ServerError
from nats.js.errors import Error as JetStreamError
from nats.js.object_store import ObjectStore

from dynamo.common.errors import Unavailable
from dynamo.common.messaging.jetstream.key_values import DamagedRecord, Entry, KeyValues, open_key_values
from dynamo.common.messaging.jetstream.objects import object_pieces, read_object
from dynamo.common.messaging.jetstream.reasons import reason_of
from dynamo.common.messaging.jetstream.replicas import create_replicated
from dynamo.common.messaging.nats.connection import Connection
from dynamo.common.process.background import Tasks, outlasting, raise_if_cancelled, running

log = logging.getLogger(__name__)
T = TypeVar("T")

INLINE_BYTES = 256 * 1024
"""Larger records lie in the object store; nats-server takes messages of 1 MiB."""
_INLINE, _ELSEWHERE = b"=", b"@"
"""How values begin: with the record itself, or with the name of an object."""
_LIMIT_S = 5.0
"""For one operation."""
_LARGE_LIMIT_S = 60.0
"""For one with a large record, or many."""
_READS = 3
"""Attempts to read a large record that others replace meanwhile."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
_TRIAL_KEY = "%trial"
"""Key of what is written to find out whether writes succeed. Keys of records begin with a namespace, and none is spelled so."""


class WriteUnconfirmed(Unavailable):
    """A write got no response in time. It may have been made nevertheless, or be made later."""


@dataclass(frozen=True, slots=True)
class Record:
    value: bytes
    revision: int
    """For `put`, to replace no other one."""
    written_at: float = 0.0
    """By the clock of the store: for `RecordStore.age_s`."""


@dataclass(frozen=True, slots=True)
class RecordContent:
    """A record that is read piece by piece."""

    size_bytes: int
    pieces: AsyncGenerator[bytes, None]
    """Pieces of at most 256 KiB. Close it unless it was read to its end. Raises DamagedRecord, and Unavailable if the rest cannot
    be read."""


@dataclass(frozen=True, slots=True)
class Position:
    """How far changes were read, for `RecordStore.changes`."""

    bucket: object
    """Which one it was: one that is made anew under the same name is another."""
    revision: int


@dataclass(frozen=True, slots=True)
class Changes:
    """What was written and deleted under a pattern."""

    records: Mapping[str, Record | None]
    """By key; None: it is not there any more, or cannot be read."""
    position: Position
    is_whole: bool
    """Whether these are all records there are, rather than what has changed."""
    now: float
    """By the clock of the store."""


class RecordStore:
    """One kind of records. Keys consist of letters, digits and `. _ - %`. All methods raise Unavailable without JetStream."""

    def __init__(self, connection: Connection, bucket: str, *, ttl_s: float, max_bytes: int) -> None:
        self.is_ready = False
        """Whether the buckets were there, and took what was written, when they were used last."""
        self.ttl_s = ttl_s
        """How long records are kept."""
        self._connection = connection
        self._bucket = bucket
        self._max_bytes = max_bytes
        self._takes_writes = True
        """False from a write that failed until a trial has succeeded."""
        self._ready_since = 0.0
        """Time of the loop from which on nothing failed, if it is ready."""
        self._next_ready = asyncio.Event()
        self._lost = asyncio.Event()
        self._reconnected = asyncio.Event()
        self._late = Tasks()
        self._opened: tuple[object, KeyValues] | None = None
        """The bucket, and the connection by which it was opened."""

    async def keep_ready(self) -> None:
        """Make the buckets, and look for them again after a failure, until cancelled.

        One failure soon after another is followed by a pause; each is twice as long as the one before.
        """
        clock = asyncio.get_running_loop().time
        pause_s = _FIRST_PAUSE_S
        is_failing = False
        while True:
            self._lost.clear()
            self._reconnected.clear()
            try:
                await self._make_ready()
                if is_failing:
                    log.info("the bucket %s in JetStream is ready again", self._bucket)
                ready_at, is_failing = clock(), False
                await self._lost.wait()
                if clock() - ready_at >= _LONGEST_PAUSE_S:
                    pause_s = _FIRST_PAUSE_S
                    continue
            except Unavailable as error:
                if not is_failing:
                    log.warning("%s; retrying", error)
                is_failing = True
            await self._pause(pause_s)
            pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)

    def look_again(self) -> None:
        """There is a new connection: `keep_ready` makes no pause before it tries that."""
        self._ready_since = asyncio.get_running_loop().time()  # an operation may not have noticed that there was none
        self._reconnected.set()

    def ready_for_s(self) -> float:
        """Return for how long the buckets have been in reach, and taken what was written, without a break that is known."""
        return asyncio.get_running_loop().time() - self._ready_since if self.is_ready else 0.0

    async def ready_again(self, timeout_s: float) -> None:
        """Return when the buckets are ready after a failure, or have become so once more, or after the timeout."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._next_ready.wait()

    async def _pause(self, pause_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self._reconnected.wait()

    async def _make_ready(self) -> None:
        with self._plain_errors("made" if self._takes_writes else "written"):
            async with asyncio.timeout(_LIMIT_S):
                values = await self._values()
                await self._objects()
                if not self._takes_writes:
                    await values.put(_TRIAL_KEY, b"", None)
                    self._takes_writes = True
        if self._takes_writes and not self.is_ready:
            self.is_ready, self._ready_since = True, asyncio.get_running_loop().time()
            self._next_ready.set()
            self._next_ready = asyncio.Event()

    async def get(self, key: str, hold: Callable[[int], None] | None = None) -> Record | None:
        """Return a record; None if there is none. Raises DamagedRecord.

        `hold` is called with the size of a record, of a large one before it is read; what it raises is raised here.
        """

        def small(entry: Entry) -> Record:
            value = entry.value[1:]
            if hold is not None:
                hold(len(value))
            return Record(value, entry.revision, entry.written_at)

        async def large(entry: Entry, name: str) -> Record:
            async with asyncio.timeout(_LARGE_LIMIT_S):
                info = await (await self._objects()).get_info(name)
                if hold is not None:
                    hold(info.size or 0)
                try:
                    value = await read_object(self._connection, info)
                except DigestMismatchError as error:
                    raise DamagedRecord(self._bucket, key) from error
                return Record(value, entry.revision, entry.written_at)

        return await self._read(key, small, large)

    async def open(self, key: str) -> RecordContent | None:
        """Return a record that is read while it is used, a piece at a time; None if there is none. Raises DamagedRecord."""

        def small(entry: Entry) -> RecordContent:
            value = entry.value[1:]
            return RecordContent(len(value), _only(value))

        async def large(entry: Entry, name: str) -> RecordContent:
            async with asyncio.timeout(_LIMIT_S):
                info = await (await self._objects()).get_info(name)
            return RecordContent(info.size or 0, self._pieces(key, info))

        return await self._read(key, small, large)

    async def _read(self, key: str, small: Callable[[Entry], T], large: Callable[[Entry, str], Awaitable[T]]) -> T | None:
        """Return what `small` makes of an entry, or `large` of one with the name of its object; None if there is no entry."""
        with self._plain_errors("read"):
            former: Entry | None = None
            for _ in range(_READS):
                async with asyncio.timeout(_LIMIT_S):
                    entry = await self._entry(key)
                if entry is None:
                    return None
                name = _object_of(entry)
                if name is None:
                    return small(entry)
                if former is not None and former.revision == entry.revision:
                    raise DamagedRecord(self._bucket, key)  # its object is gone, and the entry has not been replaced
                try:
                    return await large(entry, name)
                except ObjectNotFoundError:  # if it has been replaced meanwhile, the entry has, too
                    former = entry
            return None

    async def _pieces(self, key: str, info: ObjectInfo) -> AsyncGenerator[bytes, None]:
        """Yield the pieces of the object of a record."""
        async with aclosing(object_pieces(self._connection, info)) as pieces:
            while True:
                with self._plain_errors("read"):
                    async with asyncio.timeout(_LIMIT_S):
                        try:
                            piece = await anext(pieces, None)
                        except ObjectNotFoundError:
                            raise Unavailable("the record was deleted, or replaced, while it was read") from None
                        except DigestMismatchError as error:
                            raise DamagedRecord(self._bucket, key) from error
                if piece is None:
                    return
                yield piece

    async def age_s(self, written_at: float) -> float:
        """Return how long ago a record was written, by the clock of the store alone."""
        with self._plain_errors("read"):
            async with asyncio.timeout(_LIMIT_S):
                return await (await self._values()).now() - written_at

    async def put(self, key: str, value: bytes, *, last: int | None = None, inline_bytes: int | None = None) -> int | None:
        """Write a record; return its revision. One with more than `inline_bytes`, or `INLINE_BYTES`, lies in the object store.

        With `last`, only if that is the revision of the present one, 0 if there is none yet; else return None.
        Raises Unavailable at once after a write that failed, until one succeeds that no request waits for.
        """
        is_large = len(value) > (INLINE_BYTES if inline_bytes is None else min(inline_bytes, INLINE_BYTES))
        with self._writing():
            async with asyncio.timeout(_LARGE_LIMIT_S if is_large else _LIMIT_S):
                values = await self._values()
                replaced = None if last == 0 else _object_of(await values.peek(key))
                name = f"{key}.{secrets.token_hex(8)}" if is_large else None
                if name is not None:
                    await self._put_object(name, value)
                content = _INLINE + value if name is None else _ELSEWHERE + name.encode()
                revision = await values.put(key, content, last)
            unused = name if revision is None else replaced
            if unused is not None:
                await self._discard(unused)
            return revision

    async def renew(self, key: str, last: int) -> int | None:
        """Do what `put` does with a record that stays as it is, but write only what does not lie in the object store."""
        with self._writing():
            async with asyncio.timeout(_LIMIT_S):
                return await (await self._values()).renew(key, last)

    async def keys(self, pattern: str) -> list[str]:
        """Return the keys that a pattern of NATS subjects matches, in order."""
        return sorted([entry.key for entry in await self._matching(pattern, with_values=False)])

    async def values(self, pattern: str) -> dict[str, bytes]:
        """Return the records that a pattern matches, by key in order.

        Those that lie in the object store are left out, and those that are damaged, so that one does not hide all others.
        """
        entries = await self._matching(pattern, with_values=True)
        records = {entry.key: record for entry in entries if (record := self._listed(entry)) is not None}
        return {key: records[key].value for key in sorted(records)}

    async def changes(self, pattern: str, since: Position | None) -> Changes:
        """Return what has changed under a pattern since a position; None, or what is no position any more: all there is.

        Records are read as `values` does. Ones that have expired are no changes.
        """
        with self._plain_errors("listed"):
            async with asyncio.timeout(_LARGE_LIMIT_S):
                values = await self._values()
                newest = await values.newest(pattern)
                now, created = await values.now_and_created()
                bucket = values, created
                after = 0 if since is None or since.bucket != bucket or newest < since.revision else since.revision
                entries = [] if newest == after else await values.matching(pattern, with_values=True, after=after)
        revision = max((entry.revision for entry in entries), default=0)
        records = {entry.key: self._listed(entry) for entry in entries}
        return Changes(records, Position(bucket, max(newest, revision)), is_whole=not after, now=now)

    def _listed(self, entry: Entry) -> Record | None:
        """Return the record of an entry of a list; None, and a line in the log, if it is damaged."""
        if entry.is_deleted:
            return None
        if not entry.is_intact:
            log.error("%s", DamagedRecord(self._bucket, entry.key))
            return None
        return Record(entry.value[1:], entry.revision, entry.written_at) if _object_of(entry) is None else None

    async def _matching(self, pattern: str, *, with_values: bool) -> list[Entry]:
        with self._plain_errors("listed"):
            async with asyncio.timeout(_LARGE_LIMIT_S):
                entries = await (await self._values()).matching(pattern, with_values=with_values)
        return [entry for entry in entries if not entry.is_deleted]

    async def close(self) -> None:
        """End what is left of operations that were cancelled."""
        await self._late.close()

    async def delete(self, key: str) -> bool:
        """Delete a record, if it is there; return whether it was. Of several that delete it at once, one is told so."""
        with self._writing():
            async with asyncio.timeout(_LIMIT_S):
                values = await self._values()
                while (entry := await values.peek(key)) is not None and not entry.is_deleted:
                    if await values.delete(key, entry.revision):
                        break
                else:
                    return False
            if (name := _object_of(entry)) is not None:
                await self._discard(name)
            return True

    async def _put_object(self, name: str, value: bytes) -> None:
        """Write an object. If cancelled, it is written to its end and deleted: nats-py leaves the pieces that it wrote."""
        try:
            await outlasting((await self._objects()).put(name, value), _LARGE_LIMIT_S)
        except asyncio.CancelledError:
            await self._discard(name)
            raise

    async def _discard(self, name: str) -> None:
        """Delete an object that no record names any more. If that fails, it is there until it expires."""
        try:
            async with asyncio.timeout(_LIMIT_S):
                await (await self._objects()).delete(name)
        except (NatsError, JetStreamError, TimeoutError) as error:
            log.debug("the object %s in the bucket %s is not deleted: %s", name, self._bucket, error)

    async def _entry(self, key: str) -> Entry | None:
        """Return the entry of a record that is there. Raises DamagedRecord."""
        entry = await (await self._values()).get(key)
        return None if entry is None or entry.is_deleted else entry

    async def _values(self) -> KeyValues:
        client = self._connection.client
        if self._opened is None or self._opened[0] is not client:
            values = await open_key_values(client, self._bucket, self._late, ttl_s=self.ttl_s, max_bytes=self._max_bytes)
            self._opened = client, values
        return self._opened[1]

    async def _objects(self) -> ObjectStore:
        context, bucket = self._connection.client.jetstream(), f"{self._bucket}-large"
        try:
            return await context.object_store(bucket)
        except BucketNotFoundError:
            return await create_replicated(
                lambda replicas: context.create_object_store(bucket, ttl=self.ttl_s, max_bytes=self._max_bytes, replicas=replicas)
            )

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Refuse the body while writes fail, and let none begin after one that nats-server did not respond to, or failed at."""
        if not self._takes_writes:
            raise Unavailable(f"the bucket {self._bucket} in JetStream takes no writes now")
        with self._plain_errors("written"):
            try:
                yield
            except (TimeoutError, ServerError):
                self._takes_writes = False
                raise

    @contextmanager
    def _plain_errors(self, done: str) -> Iterator[None]:
        try:
            yield
        except (NatsError, JetStreamError, TimeoutError) as error:
            raise_if_cancelled()
            self.is_ready, self._opened = False, None
            self._lost.set()
            why = reason_of(error) if str(error) else "no response in time"
            kind = WriteUnconfirmed if done == "written" and isinstance(error, TimeoutError) else Unavailable
            raise kind(f"the bucket {self._bucket} in JetStream cannot be {done}: {why}") from error
        raise_if_cancelled()


def _object_of(entry: Entry | None) -> str | None:
    """Return the name of the object that holds a large record."""
    value = b"" if entry is None or not entry.is_intact else entry.value
    return value[1:].decode() if value[:1] == _ELSEWHERE else None


async def _only(value: bytes) -> AsyncGenerator[bytes, None]:
    yield value


@asynccontextmanager
async def open_records(connection: Connection, bucket: str, *, ttl_s: float, max_bytes: int) -> AsyncIterator[RecordStore]:
    """Open a kind of records, whose buckets are made as soon as JetStream lets us. Does not wait for that."""
    store = RecordStore(connection, bucket, ttl_s=ttl_s, max_bytes=max_bytes)
    connection.on_reconnect(store.look_again)
    async with running(store.keep_ready(), f"bucket {bucket}"):
        try:
            yield store
        finally:
            await store.close()
