"""Records in JetStream: what becomes of the objects that hold large ones, and of records whose bytes change."""

from __future__ import annotations

import asyncio
from base64 import urlsafe_b64encode
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import pytest
from nats.js.api import ObjectInfo, PubAck, RawStreamMsg, StreamConfig, StreamInfo, StreamState
from nats.js.errors import APIError, NotFoundError, ObjectNotFoundError

from dynamo.common.errors import Overloaded, Unavailable
from dynamo.common.messaging.jetstream.key_values import DamagedRecord
from dynamo.common.messaging.jetstream.records import INLINE_BYTES, RecordStore, WriteUnconfirmed
from dynamo.common.process.background import running
from tests.support.virtual_time import in_virtual_time
from tests.support.waiting import until

LARGE = b"x" * (INLINE_BYTES + 1)
PREFIX = "$KV.records."
CHUNK_BYTES = 128 * 1024


@dataclass
class FakeJetStream:
    """The client, and one bucket of each kind."""

    entries: dict[str, RawStreamMsg] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    damaged_objects: set[str] = field(default_factory=set)
    unreadable: set[str] = field(default_factory=set)
    revision: int = 0
    before_reading_object: list[Callable[[], None]] = field(default_factory=list)
    is_full: bool = False
    """It takes no writes: nats-server does not respond to them, as after a disk was full."""
    refused_at: list[float] = field(default_factory=list)

    @property
    def client(self) -> FakeJetStream:
        return self

    def jetstream(self) -> FakeJetStream:
        return self

    async def stream_info(self, name: str, subjects_filter: str = "") -> StreamInfo:
        subjects = {subjects_filter: 1} if subjects_filter in self.entries else None
        state = StreamState(0, 0, 0, 0, 0, subjects=subjects)
        return StreamInfo(config=StreamConfig(name=name, allow_direct=True), state=state)

    async def get_msg(
        self, stream: str, seq: int | None = None, subject: str = "", *, direct: bool = False, next: bool = False
    ) -> RawStreamMsg:
        """Return an entry, or the chunk of an object with at least this number; the name of an object is its id."""
        if next:
            assert (stream, direct) == ("OBJ_records-large", False) and seq is not None
            if self.before_reading_object:
                self.before_reading_object.pop()()
            start, name = (seq - 1) * CHUNK_BYTES, subject.removeprefix("$O.records-large.C.")
            data = self.objects.get(name, b"")[start : start + CHUNK_BYTES]
            if not data:
                raise NotFoundError
            return RawStreamMsg(seq=seq, data=b"damaged" if name in self.damaged_objects else data)
        if subject not in self.entries or subject in self.unreadable:
            raise NotFoundError
        return self.entries[subject]

    async def publish(self, subject: str, value: bytes = b"", headers: Mapping[str, str] | None = None) -> PubAck:
        if self.is_full:
            self.refused_at.append(asyncio.get_running_loop().time())
            await asyncio.sleep(5)
            raise TimeoutError
        headers = headers or {}
        present = self.entries.get(subject)
        last = headers.get("Nats-Expected-Last-Subject-Sequence")
        if last is not None and int(last) != (0 if present is None else present.seq):
            raise APIError(code=400, err_code=10071)
        self.revision += 1
        self.entries[subject] = RawStreamMsg(subject=subject, seq=self.revision, data=value, headers=dict(headers))
        return PubAck("KV_records", self.revision)

    async def object_store(self, bucket: str) -> FakeObjects:
        return FakeObjects(self)


@dataclass
class FakeObjects:
    stream: FakeJetStream

    async def put(self, name: str, value: bytes) -> None:
        self.stream.objects[name] = value

    async def get_info(self, name: str) -> ObjectInfo:
        if name not in self.stream.objects:
            raise ObjectNotFoundError
        data = self.stream.objects[name]
        digest = f"SHA-256={urlsafe_b64encode(sha256(data).digest()).decode()}"
        chunks = -(-len(data) // CHUNK_BYTES)
        return ObjectInfo(name, "records-large", nuid=name, size=len(data), chunks=chunks, digest=digest)

    async def delete(self, name: str) -> None:
        if self.stream.objects.pop(name, None) is None:
            raise ObjectNotFoundError


def store(stream: FakeJetStream) -> RecordStore:
    connection: Any = stream
    return RecordStore(connection, "records", ttl_s=60, max_bytes=1 << 30)


async def test_a_large_record_that_is_replaced_or_deleted_leaves_nothing() -> None:
    stream = FakeJetStream()
    records = store(stream)
    revision = await records.put("a", LARGE, last=0)
    for value in (LARGE + b"1", LARGE + b"2"):
        revision = await records.put("a", value, last=revision)
        assert list(stream.objects.values()) == [value]
    await records.put("a", LARGE)
    assert list(stream.objects.values()) == [LARGE]
    await records.put("a", b"small")
    assert not stream.objects
    await records.put("a", LARGE)
    await records.delete("a")
    assert not stream.objects and await records.get("a") is None
    assert await records.put("a", b"again", last=0) is not None


async def test_a_large_record_that_was_written_too_late_leaves_nothing() -> None:
    stream = FakeJetStream()
    records = store(stream)
    await records.put("a", LARGE, last=0)
    assert await records.put("a", LARGE + b"late", last=0) is None
    assert await records.put("a", LARGE + b"late", last=99) is None
    assert list(stream.objects.values()) == [LARGE]
    record = await records.get("a")
    assert record is not None and record.value == LARGE


async def test_a_record_that_is_replaced_while_it_is_read_is_read_again() -> None:
    stream = FakeJetStream()
    records = store(stream)
    await records.put("a", LARGE)

    def replace() -> None:
        stream.objects.clear()
        stream.objects["new"] = b"another"
        stream.entries[PREFIX + "a"] = RawStreamMsg(subject=PREFIX + "a", seq=7, data=b"@new")

    stream.before_reading_object.append(replace)
    record = await records.get("a")
    assert record is not None and (record.value, record.revision) == (b"another", 7)


@pytest.mark.parametrize("changed", [b"=another record", b"=a recorc", b"=", b"", b"@a record"])
async def test_a_record_whose_bytes_have_changed_is_an_error(changed: bytes) -> None:
    stream = FakeJetStream()
    records = store(stream)
    await records.put("a", b"a record")
    stream.entries[PREFIX + "a"].data = changed
    with pytest.raises(DamagedRecord, match="the record a in the bucket records is damaged"):
        await records.get("a")
    await records.put("a", b"a record")  # it can be replaced
    assert await records.get("a") is not None


async def test_a_record_that_comes_out_under_another_key_is_an_error() -> None:
    stream = FakeJetStream()
    records = store(stream)
    await records.put("a", b"a record")
    message = stream.entries[PREFIX + "a"]
    stream.entries[PREFIX + "b"] = RawStreamMsg(subject=PREFIX + "b", seq=9, data=message.data, headers=message.headers)
    with pytest.raises(DamagedRecord):
        await records.get("b")


async def test_a_large_record_whose_object_has_changed_or_is_gone_is_an_error() -> None:
    stream = FakeJetStream()
    records = store(stream)
    await records.put("a", LARGE)
    stream.damaged_objects |= set(stream.objects)
    with pytest.raises(DamagedRecord):
        await records.get("a")
    stream.objects.clear()
    with pytest.raises(DamagedRecord):
        await records.get("a")
    with pytest.raises(DamagedRecord):
        await records.open("a")


async def test_a_record_that_nats_server_lists_and_cannot_read_is_an_error_and_no_missing_one() -> None:
    stream = FakeJetStream()
    records = store(stream)
    await records.put("a", b"a record")
    stream.unreadable.add(PREFIX + "a")
    with pytest.raises(DamagedRecord):
        await records.get("a")
    assert await records.get("b") is None
    stream.unreadable.clear()  # it was written between two looks
    assert await records.get("a") is not None


async def test_records_of_versions_without_digests_are_read() -> None:
    stream = FakeJetStream()
    stream.entries[PREFIX + "a"] = RawStreamMsg(subject=PREFIX + "a", seq=1, data=b"=as before")
    record = await store(stream).get("a")
    assert record is not None and record.value == b"as before"


@in_virtual_time
async def test_after_a_write_that_was_not_taken_no_other_one_waits_and_reads_go_on() -> None:
    stream = FakeJetStream()
    records = store(stream)
    await records.put("a", b"a record")
    stream.is_full = True
    with pytest.raises(Unavailable, match="no response in time"):
        await records.put("b", b"a record")
    for write in (records.put("b", b""), records.put("c", LARGE), records.put("a", b"", last=1), records.delete("a")):
        with pytest.raises(Unavailable, match="the bucket records in JetStream takes no writes now"):
            await write
    assert stream.refused_at == [0.0]
    assert await records.get("a") is not None


@in_virtual_time
async def test_a_store_that_takes_no_writes_is_tried_one_write_at_a_time_and_ever_more_rarely() -> None:
    stream = FakeJetStream()
    records = store(stream)
    async with running(records.keep_ready(), "records"):
        await until(lambda: records.is_ready)
        stream.is_full = True
        with pytest.raises(Unavailable):
            await records.put("a", b"a record")
        await asyncio.sleep(300)
        pauses = [later - earlier for earlier, later in zip(stream.refused_at, stream.refused_at[1:], strict=False)]
        assert min(pauses) >= 5 and max(pauses) <= 36 and len(pauses) < 20, pauses
        assert not records.is_ready
        stream.is_full = False
        await until(lambda: records.is_ready)
        assert await records.put("a", b"a record", last=0) is not None


@in_virtual_time
async def test_a_store_that_takes_small_writes_only_is_not_used_anew_each_time_one_succeeds() -> None:
    stream = FakeJetStream()
    records = store(stream)
    async with running(records.keep_ready(), "records"):
        await until(lambda: records.is_ready)
        failed = 0
        for _ in range(3000):
            stream.is_full = True
            if records.is_ready:
                with pytest.raises(Unavailable):
                    await records.put("a", b"a record")
                failed += 1
            stream.is_full = False  # the trial succeeds
            await asyncio.sleep(0.1)
    assert 8 <= failed <= 20


@pytest.mark.parametrize("into_s", [2, 6])
@in_virtual_time
async def test_after_a_reconnect_the_store_is_tried_without_a_pause(into_s: int) -> None:
    """Both while a trial waits for its response, and in the pause after it."""
    stream = FakeJetStream()
    records = store(stream)
    async with running(records.keep_ready(), "records"):
        await until(lambda: records.is_ready)
        stream.is_full = True
        with pytest.raises(Unavailable):
            await records.put("a", b"a record")
        await asyncio.sleep(300)
        trials = len(stream.refused_at)
        await until(lambda: len(stream.refused_at) > trials)
        began = stream.refused_at[-1]
        await asyncio.sleep(into_s)
        stream.is_full = False
        records.look_again()
        await until(lambda: records.is_ready)
        assert asyncio.get_running_loop().time() < began + 7


@in_virtual_time
async def test_who_waits_for_the_store_goes_on_when_it_is_ready_again_and_knows_since_when_it_is() -> None:
    stream = FakeJetStream()
    records = store(stream)
    clock = asyncio.get_running_loop().time
    assert records.ready_for_s() == 0
    async with running(records.keep_ready(), "records"):
        await until(lambda: records.is_ready)
        await asyncio.sleep(100)
        assert records.ready_for_s() == pytest.approx(100, abs=1)
        await records.ready_again(10)
        assert records.ready_for_s() == pytest.approx(110, abs=1), "nothing had failed, so only the timeout ended that"
        stream.is_full = True
        with pytest.raises(WriteUnconfirmed):
            await records.put("a", b"a record")
        assert records.ready_for_s() == 0
        stream.is_full = False
        before = clock()
        await records.ready_again(1000)
        assert records.is_ready and clock() - before < 30
        await asyncio.sleep(100)
        records.look_again()  # a connection that was lost unnoticed
        assert records.ready_for_s() == 0


@pytest.mark.parametrize("size", [0, 1, INLINE_BYTES, INLINE_BYTES + 1, 3 * CHUNK_BYTES, 3 * CHUNK_BYTES + 7])
async def test_a_record_is_read_in_pieces(size: int) -> None:
    stream = FakeJetStream()
    records = store(stream)
    value = bytes(number % 251 for number in range(size))
    await records.put("a", value)
    content = await records.open("a")
    assert content is not None and content.size_bytes == size
    pieces = [piece async for piece in content.pieces]
    assert b"".join(pieces) == value
    assert max(map(len, pieces)) <= INLINE_BYTES
    assert await records.open("b") is None


@pytest.mark.parametrize("damage", ["deleted", "changed"])
async def test_a_record_that_is_not_what_was_written_is_never_read_to_its_end(damage: str) -> None:
    stream = FakeJetStream()
    records = store(stream)
    await records.put("a", LARGE)
    content = await records.open("a")
    assert content is not None
    (name,) = stream.objects
    stream.objects[name] = b"" if damage == "deleted" else LARGE[:-1] + b"y"
    size = 0

    async def read() -> None:
        nonlocal size
        async for piece in content.pieces:
            size += len(piece)

    with pytest.raises((Unavailable, DamagedRecord), match="was deleted" if damage == "deleted" else "not what was written"):
        await read()
    assert size < len(LARGE)


async def test_the_size_of_a_large_record_is_held_before_it_is_read() -> None:
    stream = FakeJetStream()
    records = store(stream)
    await records.put("a", LARGE)
    await records.put("b", b"small")
    held: list[int] = []

    def refuse(size_bytes: int) -> None:
        raise Overloaded("no room")

    def read() -> None:
        raise AssertionError("it is read")

    stream.before_reading_object.append(read)
    with pytest.raises(Overloaded):
        await records.get("a", refuse)
    stream.before_reading_object.clear()
    for key in ("a", "b", "c"):
        await records.get(key, held.append)
    assert held == [len(LARGE), 5]
