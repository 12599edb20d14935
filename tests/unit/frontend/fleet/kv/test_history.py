"""What a frontend puts on record of the caches of a component, in the place of their events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

import msgspec

from dynamo.common.kv.events import KvSnapshot, KvUpdate, encode_message
from dynamo.common.kv.hashes import HASH_BYTES, pack_hashes
from dynamo.common.messaging.jetstream.kv_stream import KvStream
from dynamo.common.names import Endpoint, InstanceId
from dynamo.common.process.background import running
from dynamo.frontend.fleet.kv.archive import Archive
from dynamo.frontend.fleet.kv.history import KvHistory
from tests.support.waiting import until

ENDPOINT = Endpoint("space", "backend", "generate")
MOST = 10


class Record:
    """A record with an event of each instance, and what was saved."""

    def __init__(self, *updates: KvUpdate) -> None:
        self.saved: list[Archive] = []
        self._updates = updates

    @asynccontextmanager
    async def lock(self, name: str) -> AsyncIterator[bool]:
        yield True

    async def count(self, subject: str) -> int:
        return len(self._updates)

    async def load(self, name: str) -> bytes | None:
        return None

    async def since(self, subject: str, after: int) -> AsyncGenerator[list[tuple[int, str, bytes]], None]:
        for number, update in enumerate(self._updates, 1):
            yield [(number, ENDPOINT.kv_subject(InstanceId(number)), encode_message("m", update))]

    async def save(self, name: str, snapshot: bytes) -> None:
        self.saved.append(msgspec.msgpack.decode(snapshot, type=Archive))

    async def purge(self, subject: str, up_to: int | None = None) -> None: ...


class Reader:
    """Follows the instances 1 and 2. Each responds with a cache of a hundred blocks."""

    def followed(self, endpoint: Endpoint) -> set[tuple[InstanceId, str]]:
        return {(InstanceId(number), "m") for number in (1, 2)}

    def restore(self, instance: InstanceId, model: str, snapshot: KvSnapshot) -> None: ...

    def apply_update(self, instance: InstanceId, model: str, update: KvUpdate) -> None: ...

    async def fetch_snapshot(self, instance: InstanceId, model: str) -> KvSnapshot | None:
        return KvSnapshot(7, pack_hashes(range(100)))

    def most_blocks(self, instance: InstanceId, model: str) -> int:
        return MOST


async def test_no_more_blocks_of_an_instance_are_put_on_record_than_are_kept() -> None:
    many = pack_hashes(range(100))
    record = Record(KvUpdate(0, many), KvUpdate(3, many))  # of the second one, events are missing
    history = KvHistory(cast(KvStream, record), snapshot_threshold=2)
    async with running(history.keep_compact(ENDPOINT, Reader()), "compaction"):
        await asyncio.sleep(0)
        history.count_events(ENDPOINT.kv_subject(InstanceId(1)), 2)
        await until(lambda: record.saved)
    snapshots = [part.snapshot for part in record.saved[0].parts]
    assert [(snapshot.number, len(snapshot.blocks) // HASH_BYTES) for snapshot in snapshots] == [(0, MOST), (7, MOST)]
