"""A key-value bucket of JetStream whose entries carry a digest, which is checked when they are read.

The entries are those of nats-py's `KeyValue`, which has no headers; the digest is one that readers without it overlook. It covers
the key, too: an entry that comes out under another key is as damaged as one whose bytes have changed.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeAlias

import msgspec
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.js import JetStreamContext
from nats.js.api import ConsumerConfig, DeliverPolicy, Header
from nats.js.errors import APIError, NotFoundError
from nats.js.errors import Error as JetStreamError

from dynamo.common.errors import EngineError
from dynamo.common.messaging.jetstream.replicas import create_replicated
from dynamo.common.process.background import Tasks, awaited

_Subscription: TypeAlias = JetStreamContext.PushSubscription
_DIGEST = "Dynamo-Digest"
_OPERATION, _DELETED = "KV-Operation", "DEL"
_WRONG_REVISION = (10071, 10164)
_LIMIT_S = 60.0
CLOCK_S = 60.0
"""The clock of nats-server, and which bucket has the name, is read again after so long."""


class _StreamInfo(msgspec.Struct):
    """The part of nats-server's response that nats-py leaves out."""

    ts: datetime
    created: str


_info_decoder = msgspec.json.Decoder(_StreamInfo)


class DamagedRecord(EngineError):
    """What is stored is not what was written."""

    def __init__(self, bucket: str, key: str) -> None:
        super().__init__(f"the record {key[:200]} in the bucket {bucket} is damaged: it is not what was written")


@dataclass(frozen=True, slots=True)
class Entry:
    key: str
    value: bytes
    revision: int
    written_at: float
    """Unix time of nats-server."""
    is_deleted: bool
    is_intact: bool
    """Whether the digest is that of the key and the value; also true of entries without one, which older versions wrote."""


class KeyValues:
    """An open bucket. All methods raise what nats-py raises."""

    def __init__(self, client: Client, bucket: str, late: Tasks, *, is_direct: bool) -> None:
        """`late`: owns what is left of operations that were cancelled. `is_direct`: whether any replica may be read."""
        self._client = client
        self._context = client.jetstream()
        self._bucket = bucket
        self._stream = f"KV_{bucket}"
        self._prefix = f"$KV.{bucket}."
        self._late = late
        self._is_direct = is_direct
        self._loop = asyncio.get_running_loop()
        self._clock: tuple[float, float] | None = None
        """By how much nats-server's Unix time is ahead of the loop's, and when that was found."""
        self._created = ""

    async def get(self, key: str) -> Entry | None:
        """Return what is there, which may be the mark of a deletion. Raises DamagedRecord.

        Of a message whose own checksum is wrong nats-server says that there is none, and lists it nevertheless.
        """
        for is_direct in (self._is_direct, False):  # the second time for one that was written meanwhile, or just now
            entry = await self._read(key, is_direct=is_direct)
            if entry is not None and not entry.is_intact:
                break
            if entry is not None or not await self._is_listed(key):
                return entry
        raise DamagedRecord(self._bucket, key)

    async def peek(self, key: str) -> Entry | None:
        """Return what is there in whatever state; None also for what nats-server cannot read."""
        return await self._read(key, is_direct=self._is_direct)

    async def _read(self, key: str, *, is_direct: bool) -> Entry | None:
        subject = self._prefix + key
        try:
            message = await self._context.get_msg(self._stream, subject=subject, direct=is_direct)
        except NotFoundError:
            return None
        time = message.time or datetime.fromtimestamp(0, UTC)
        return self._entry(message.subject or "", message.data or b"", message.headers or {}, message.seq or 0, time)

    async def _is_listed(self, key: str) -> bool:
        info = await self._context.stream_info(self._stream, subjects_filter=self._prefix + key)
        return bool(info.state.subjects)

    async def put(self, key: str, value: bytes, last: int | None) -> int | None:
        """Write an entry; return its revision. With `last`, only if that is the present one, 0 if there is none; else None."""
        revision = await self._put(key, value, last)
        if revision is None and last == 0:
            deleted = await self.peek(key)
            if deleted is not None and deleted.is_deleted:
                return await self._put(key, value, deleted.revision)
        return revision

    async def _put(self, key: str, value: bytes, last: int | None) -> int | None:
        headers = {_DIGEST: _digest(key, value)}
        if last is not None:
            headers[Header.EXPECTED_LAST_SUBJECT_SEQUENCE] = str(last)
        return await self._publish(key, value, headers)

    async def _publish(self, key: str, value: bytes, headers: dict[str, str]) -> int | None:
        """Return the revision of what was written; None if the headers require another one before it."""
        try:
            return (await self._context.publish(self._prefix + key, value, headers=headers)).seq
        except APIError as error:
            if error.err_code in _WRONG_REVISION:
                return None
            raise

    async def renew(self, key: str, last: int) -> int | None:
        """Write an entry again as it is; return its revision, or None if `last` is not the present one."""
        entry = await self._read(key, is_direct=False)
        if entry is None or entry.revision != last or not entry.is_intact:
            return None
        return await self._put(key, entry.value, last)

    async def delete(self, key: str, last: int) -> bool:
        """Delete an entry if its revision is `last`; return whether it was."""
        return await self._publish(key, b"", {_OPERATION: _DELETED, Header.EXPECTED_LAST_SUBJECT_SEQUENCE: str(last)}) is not None

    async def newest(self, pattern: str) -> int:
        """Return the revision of what was written or deleted last under a pattern of NATS subjects; 0: nothing is there."""
        try:
            return (await self._context.get_msg(self._stream, subject=self._prefix + pattern)).seq or 0
        except NotFoundError:
            return 0

    async def matching(self, pattern: str, *, with_values: bool, after: int = 0) -> list[Entry]:
        """Return the entries, with marks of deletions, whose keys match a pattern of NATS subjects.

        `after`: only those with larger revisions.
        """
        entries: list[Entry] = []
        are_all_there = asyncio.Event()

        async def received(message: Msg) -> None:
            metadata = message.metadata
            revision, written_at = metadata.sequence.stream, metadata.timestamp
            entry = self._entry(message.subject, message.data, message.headers or {}, revision, written_at)
            entries.append(entry)
            if not metadata.num_pending:
                are_all_there.set()

        subscription = await self._opened(
            self._context.subscribe(
                self._prefix + pattern,
                stream=self._stream,
                cb=received,
                ordered_consumer=True,
                config=ConsumerConfig(opt_start_seq=after + 1 if after else None),
                deliver_policy=DeliverPolicy.BY_START_SEQUENCE if after else DeliverPolicy.LAST_PER_SUBJECT,
                headers_only=not with_values,
            )
        )
        try:
            consumer = await subscription.consumer_info()
            if consumer.num_pending or (consumer.delivered and consumer.delivered.consumer_seq):  # else nothing will ever come
                await are_all_there.wait()
        finally:
            await subscription.unsubscribe()
        return entries

    async def _opened(self, subscribing: Coroutine[Any, Any, _Subscription]) -> _Subscription:
        """Return the subscription.

        nats-py leaves it and its tasks behind if it is cancelled meanwhile. So it goes on, for as long as its own timeouts
        allow, and the subscription ends then.
        """
        opening = awaited(subscribing)
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            self._late.start(_end(opening), f"late subscription to bucket {self._bucket}")
            raise

    async def now(self) -> float:
        """Return the Unix time of nats-server, whose clock stamps entries."""
        return (await self.now_and_created())[0]

    async def now_and_created(self) -> tuple[float, str]:
        """Return the Unix time of nats-server, and when the bucket was made, as of `CLOCK_S` ago at most.

        The latter tells one bucket from another of the same name, whose revisions begin anew.
        """
        if self._clock is None or self._loop.time() - self._clock[1] > CLOCK_S:
            info = await self._client.request(f"$JS.API.STREAM.INFO.{self._stream}", timeout=_LIMIT_S)
            now = self._loop.time()
            stream = _info_decoder.decode(info.data)
            self._clock, self._created = (stream.ts.timestamp() - now, now), stream.created
        return self._loop.time() + self._clock[0], self._created

    def _entry(self, subject: str, value: bytes, headers: dict[str, str], revision: int, time: datetime) -> Entry:
        key = subject.removeprefix(self._prefix)
        digest = headers.get(_DIGEST)
        return Entry(
            key=key,
            value=value,
            revision=revision,
            written_at=time.timestamp(),
            is_deleted=_OPERATION in headers,
            is_intact=digest is None or digest == _digest(key, value),
        )


async def _end(opening: asyncio.Task[_Subscription]) -> None:
    with suppress(NatsError, JetStreamError, TimeoutError):
        await (await opening).unsubscribe()


async def open_key_values(client: Client, bucket: str, late: Tasks, *, ttl_s: float, max_bytes: int) -> KeyValues:
    """Return a bucket, made with these bounds if there is none."""
    context = client.jetstream()
    try:
        info = await context.stream_info(f"KV_{bucket}")
    except NotFoundError:
        await create_replicated(
            lambda replicas: context.create_key_value(bucket=bucket, ttl=ttl_s, max_bytes=max_bytes, replicas=replicas)
        )
        info = await context.stream_info(f"KV_{bucket}")
    return KeyValues(client, bucket, late, is_direct=bool(info.config.allow_direct))


def _digest(key: str, value: bytes) -> str:
    digest = hashlib.sha256(key.encode())
    digest.update(b"\0")
    digest.update(value)
    return digest.hexdigest()[:32]
