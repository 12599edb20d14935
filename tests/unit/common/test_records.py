"""Records in JetStream: what becomes of the objects that hold large ones."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from nats.js.errors import KeyNotFoundError, KeyWrongLastSequenceError, ObjectNotFoundError

from dynamo.common.messaging.records import INLINE_BYTES, RecordStore

LARGE = b"x" * (INLINE_BYTES + 1)


@dataclass
class Entry:
    value: bytes
    revision: int


@dataclass
class FakeJetStream:
    """The client, and one bucket of each kind."""

    entries: dict[str, Entry] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    revision: int = 0
    before_reading_object: list[Callable[[], None]] = field(default_factory=list)

    @property
    def client(self) -> FakeJetStream:
        return self

    def jetstream(self) -> FakeJetStream:
        return self

    async def key_value(self, bucket: str) -> FakeValues:
        return FakeValues(self)

    async def object_store(self, bucket: str) -> FakeObjects:
        return FakeObjects(self)


@dataclass
class FakeValues:
    stream: FakeJetStream

    async def get(self, key: str, validate_keys: bool) -> Entry:
        if key not in self.stream.entries:
            raise KeyNotFoundError
        return self.stream.entries[key]

    async def put(self, key: str, value: bytes, validate_keys: bool) -> int:
        self.stream.revision += 1
        self.stream.entries[key] = Entry(value, self.stream.revision)
        return self.stream.revision

    async def update(self, key: str, value: bytes, last: int, validate_keys: bool) -> int:
        present = self.stream.entries.get(key)
        if last != (0 if present is None else present.revision):
            raise KeyWrongLastSequenceError
        return await self.put(key, value, validate_keys)

    async def create(self, key: str, value: bytes, validate_keys: bool) -> int:
        return await self.update(key, value, 0, validate_keys)

    async def delete(self, key: str, validate_keys: bool) -> None:
        self.stream.entries.pop(key, None)


@dataclass
class FakeObjects:
    stream: FakeJetStream

    async def put(self, name: str, value: bytes) -> None:
        self.stream.objects[name] = value

    async def get(self, name: str, writeinto: io.BytesIO) -> None:
        if self.stream.before_reading_object:
            self.stream.before_reading_object.pop()()
        if name not in self.stream.objects:
            raise ObjectNotFoundError
        writeinto.write(self.stream.objects[name])

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
    assert not stream.objects and not stream.entries


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
        stream.entries["a"] = Entry(b"@new", 7)

    stream.before_reading_object.append(replace)
    record = await records.get("a")
    assert record is not None and (record.value, record.revision) == (b"another", 7)
