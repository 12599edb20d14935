"""KV events on record: a JetStream stream of what instances publish on their KV subjects, and snapshots in an object store.

The stream takes what is published anyway: subscribers of the subjects get it from the bus as before. A publication with
a reply subject is acknowledged once it is on record.

There is one stream for all namespaces, so that permissions can name it: as soon as one worker asks for it, the events of all are
recorded. It is bounded; past its bound the oldest go, and readers query the instances instead.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

import msgspec
from nats.errors import Error as NatsError
from nats.js import JetStreamContext
from nats.js.api import (
    AckPolicy,
    ConsumerConfig,
    DeliverPolicy,
    DiscardPolicy,
    PersistMode,
    StorageType,
    StreamConfig,
)
from nats.js.errors import (
    BadRequestError,
    BucketNotFoundError,
    KeyWrongLastSequenceError,
    NotFoundError,
    ObjectNotFoundError,
)
from nats.js.errors import Error as JetStreamError
from nats.js.kv import KeyValue
from nats.js.object_store import ObjectStore

from dynamo.common.errors import Unavailable
from dynamo.common.messaging.jetstream.objects import read_object
from dynamo.common.messaging.jetstream.replicas import create_replicated
from dynamo.common.messaging.nats.connection import Connection
from dynamo.common.process.background import raise_if_cancelled, start

STREAM = "dynamo-kv"
SNAPSHOTS = "dynamo-kv-snapshots"
LOCKS = "dynamo-kv-locks"
LOCK_S = 60.0
"""A lock whose holder died is free again after so long."""
LOAD_S = 5.0
"""Time limit for one attempt to read a snapshot."""
_READS = 2
"""Attempts to read a snapshot that is replaced meanwhile."""
_SUBJECTS = "dynamo.*.*.kv.*"
_MAX_BYTES = 256 << 20
_KEPT_S = 86_400
"""Older events say nothing about caches; and what no process takes care of any more goes by itself."""
_BATCH = 256
_FETCH_S = 2.0
_NAME_IN_USE = 10058


class _Ack(msgspec.Struct):
    stream: str = ""
    error: msgspec.Raw = msgspec.Raw()


_ack_decoder = msgspec.json.Decoder(_Ack)


def is_recorded(ack: memoryview) -> bool:
    """Whether the acknowledgement of a publication says that it is on record."""
    try:
        response = _ack_decoder.decode(ack)
    except msgspec.MsgspecError:
        return False
    return bool(response.stream) and not response.error


class KvStream:
    """All methods raise Unavailable when JetStream is away, or refuses."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def ensure(self) -> str:
        """Create the stream unless it exists; return its creation time. One with other bounds is left as it is."""
        config = StreamConfig(
            name=STREAM,
            subjects=[_SUBJECTS],
            storage=StorageType.FILE,
            max_bytes=_MAX_BYTES,
            max_age=_KEPT_S,
            discard=DiscardPolicy.OLD,
        )
        context = self._context()
        async with self._while_connected("made"):
            try:  # first of all, since not every login may create it
                info = await context.stream_info(STREAM)
            except NotFoundError:
                try:
                    info = await create_replicated(
                        lambda replicas: context.add_stream(config, num_replicas=replicas, persist_mode=_persist_mode(replicas))
                    )
                except BadRequestError as error:
                    if error.err_code != _NAME_IN_USE:
                        raise
                    info = await context.stream_info(STREAM)
        return str(info.created)

    @asynccontextmanager
    async def receipts(self, on_recorded: Callable[[str], None]) -> AsyncIterator[str]:
        """A subject for the body: what is published with a reply to `subject.X` and is on record then calls `on_recorded(X)`."""
        prefix = self._connection.client.new_inbox()

        def on_message(subject: str, reply: str, payload: memoryview, no_responders: bool) -> None:
            if not no_responders and is_recorded(payload):
                on_recorded(subject[len(prefix) + 1 :])

        with _plain_errors("followed"):
            subscription = await self._connection.subscribe(f"{prefix}.>", on_message)
        try:
            yield prefix
        finally:
            await subscription.close()

    async def count(self, subject: str) -> int:
        """How many events are on record for a subject, which may be a pattern."""
        async with self._while_connected("read"):
            try:
                info = await self._context().stream_info(STREAM, subjects_filter=subject)
            except NotFoundError:
                return 0
        return sum((info.state.subjects or {}).values())

    async def since(self, subject: str, after: int) -> AsyncGenerator[list[tuple[int, str, bytes]], None]:
        """Events past number `after` of the record, up to the last one there is now: (number, subject, payload), in batches.

        If the record has not come so far, it was lost and begun anew: then all there are.
        """
        with _plain_errors("read"):
            context = self._context()
            try:
                last = (await context.stream_info(STREAM)).state.last_seq
                config = ConsumerConfig(
                    deliver_policy=DeliverPolicy.BY_START_SEQUENCE,
                    opt_start_seq=after + 1 if after <= last else 1,
                    ack_policy=AckPolicy.NONE,
                    filter_subject=subject,
                    inactive_threshold=30.0,
                    mem_storage=True,
                )
                consumer = await context.add_consumer(STREAM, config)
            except NotFoundError:
                return
            left = consumer.num_pending or 0
            if not left:
                return
            events = await context.pull_subscribe_bind(consumer=consumer.name, stream=STREAM)
            try:
                while left > 0:
                    try:
                        messages = await events.fetch(min(left, _BATCH), timeout=_FETCH_S)
                    except TimeoutError:
                        return  # what was counted has been purged meanwhile
                    left -= len(messages)
                    yield [(message.metadata.sequence.stream, message.subject, message.data) for message in messages]
            finally:
                with suppress(NatsError, JetStreamError, TimeoutError):  # it expires by itself
                    await events.unsubscribe()

    async def purge(self, subject: str, up_to: int | None = None) -> None:
        """Forgets the events of a subject up to number `up_to` of the record; None: all."""
        async with self._while_connected("purged"):
            with suppress(NotFoundError):
                await self._context().purge_stream(STREAM, seq=None if up_to is None else up_to + 1, subject=subject)

    # Snapshots

    async def load(self, name: str) -> bytes | None:
        """The snapshot of this name, if there is one."""
        async with self._while_connected("read"):
            with suppress(BucketNotFoundError):
                store = await self._context().object_store(SNAPSHOTS)
                for _ in range(_READS):
                    with suppress(ObjectNotFoundError):
                        async with asyncio.timeout(LOAD_S):
                            return await read_object(self._connection, await store.get_info(name))
        return None

    async def save(self, name: str, snapshot: bytes) -> None:
        """Replaces the snapshot of this name."""
        async with self._while_connected("written"):
            await (await self._snapshots()).put(name, snapshot)

    async def forget(self, name: str) -> None:
        """There is no snapshot of this name any more."""
        async with self._while_connected("written"):
            with suppress(BucketNotFoundError, ObjectNotFoundError):
                await (await self._context().object_store(SNAPSHOTS)).delete(name)

    @asynccontextmanager
    async def lock(self, name: str) -> AsyncIterator[bool]:
        """Whether the lock of this name is ours for the body, at most `LOCK_S` long. Does not wait."""
        async with self._while_connected("locked"):
            locks = await self._locks()
            try:
                revision = await locks.create(name, self._connection.name.encode(), validate_keys=False)
            except KeyWrongLastSequenceError:
                revision = None
        try:
            yield revision is not None
        finally:
            if revision is not None and self._connection.is_connected:
                with suppress(NatsError, JetStreamError, TimeoutError):  # it expires by itself
                    await locks.delete(name, last=revision, validate_keys=False)
                raise_if_cancelled()

    @asynccontextmanager
    async def _while_connected(self, done: str) -> AsyncIterator[None]:
        """Raise Unavailable for errors of nats-py in the body, and end it when the connection is lost.

        nats-py waits out its time limit, 5 s a request, for responses that cannot come any more.
        """
        lost = asyncio.timeout(None)
        with _plain_errors(done):
            try:
                async with lost:
                    watching = start(_expire(lost, self._connection), "connection of a JetStream request")
                    try:
                        yield
                    finally:
                        watching.cancel()
            except TimeoutError:
                if lost.expired():
                    raise TimeoutError("the connection to NATS is lost") from None
                raise

    def _context(self) -> JetStreamContext:
        return self._connection.client.jetstream()

    async def _snapshots(self) -> ObjectStore:
        context = self._context()
        try:
            return await context.object_store(SNAPSHOTS)
        except BucketNotFoundError:
            return await create_replicated(
                lambda replicas: context.create_object_store(SNAPSHOTS, ttl=_KEPT_S, replicas=replicas)
            )

    async def _locks(self) -> KeyValue:
        context = self._context()
        try:
            return await context.key_value(LOCKS)
        except BucketNotFoundError:
            return await create_replicated(lambda replicas: context.create_key_value(bucket=LOCKS, ttl=LOCK_S, replicas=replicas))


def _persist_mode(replicas: int) -> PersistMode | None:
    """Return how a stream with so many replicas is written: not to disk at once, whatever nats-server does with other streams.

    Events are many, and one that is lost is a hole, which readers query. nats-server has no such mode for several replicas.
    """
    return PersistMode.ASYNC if replicas == 1 else None


async def _expire(bound: asyncio.Timeout, connection: Connection) -> None:
    await connection.lost()
    bound.reschedule(asyncio.get_running_loop().time())


@contextmanager
def _plain_errors(done: str) -> Iterator[None]:
    try:
        yield
    except (NatsError, JetStreamError, TimeoutError) as error:
        raise_if_cancelled()
        raise Unavailable(f"the record of KV events cannot be {done}: {str(error) or type(error).__name__}") from error
    raise_if_cancelled()
