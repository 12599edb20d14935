"""A store of records in memory, with the protocol of `common.messaging.jetstream.records.RecordStore`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase

from dynamo.common.errors import Unavailable
from dynamo.common.messaging.jetstream.key_values import DamagedRecord
from dynamo.common.messaging.jetstream.records import INLINE_BYTES, Changes, Position, Record, RecordContent
from dynamo.common.process.background import raise_if_cancelled

PIECE_BYTES = 128 * 1024


class FakeRecords:
    """Records by key. While it is `away`, each operation fails."""

    def __init__(self, clock: Callable[[], float] = lambda: 0.0) -> None:
        self.clock = clock
        """Clock of the store."""
        self._is_away = False
        self._ready_since = -1e9
        """When it was in reach again, by the clock of the store."""
        self._next_ready = asyncio.Event()
        self.damaged: set[str] = set()
        """Keys of records that are not what was written."""
        self.records: dict[str, Record] = {}
        self.reads = 0
        self.fails_at_piece: int | None = None
        self.pieces_read = 0
        """Pieces read of records that were opened."""
        self.listed = 0
        """Records and deletions that `values` and `changes` have returned."""
        self.ttl_s = 30 * 86_400.0
        self.written_bytes = 0
        """What was written, apart from deletions."""
        self.renewed = 0
        """How often a record was renewed."""
        self._deleted: dict[str, int] = {}
        self._revision = 0
        self._inline_bytes: dict[str, int] = {}
        """What `renew` writes of each record."""

    @property
    def is_away(self) -> bool:
        return self._is_away

    @is_away.setter
    def is_away(self, is_away: bool) -> None:
        if self._is_away and not is_away:
            self._ready_since = self.clock()
            self._next_ready.set()
            self._next_ready = asyncio.Event()
        self._is_away = is_away

    @property
    def is_ready(self) -> bool:
        return not self.is_away

    def ready_for_s(self) -> float:
        return 0.0 if self.is_away else self.clock() - self._ready_since

    async def ready_again(self, timeout_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._next_ready.wait()

    async def get(self, key: str, hold: Callable[[int], None] | None = None) -> Record | None:
        with self._operation():
            self.reads += 1
            if key in self.damaged:
                raise DamagedRecord("test", key)
            record = self.records.get(key)
            if record is not None and hold is not None:
                hold(len(record.value))
            return record

    async def open(self, key: str) -> RecordContent | None:
        record = await self.get(key)
        return None if record is None else RecordContent(len(record.value), self._pieces(record.value))

    async def _pieces(self, value: bytes) -> AsyncGenerator[bytes, None]:
        for number, start in enumerate(range(0, len(value), PIECE_BYTES)):
            self._check()
            if number == self.fails_at_piece:
                raise Unavailable("the bucket test in JetStream cannot be read")
            self.pieces_read += 1
            yield value[start : start + PIECE_BYTES]

    async def put(self, key: str, value: bytes, *, last: int | None = None, inline_bytes: int | None = None) -> int | None:
        with self._operation():
            present = self.records.get(key)
            if last is not None and last != (0 if present is None else present.revision):
                return None
            self._revision += 1
            self.records[key] = Record(value, self._revision, self.clock())
            self._inline_bytes[key] = len(value) if len(value) <= (inline_bytes or INLINE_BYTES) else 100
            self.written_bytes += len(value)
            return self._revision

    async def renew(self, key: str, last: int) -> int | None:
        with self._operation():
            present = self.records.get(key)
            if present is None or present.revision != last:
                return None
            self._revision += 1
            self.records[key] = Record(present.value, self._revision, self.clock())
            self.written_bytes += self._inline_bytes[key]
            self.renewed += 1
            return self._revision

    async def age_s(self, written_at: float) -> float:
        with self._operation():
            return self.clock() - written_at

    async def keys(self, pattern: str) -> list[str]:
        with self._operation():
            return sorted(key for key in self.records if _matches(key, pattern))

    async def values(self, pattern: str) -> dict[str, bytes]:
        values = {key: self.records[key].value for key in await self.keys(pattern)}
        self.listed += len(values)
        return values

    async def changes(self, pattern: str, since: Position | None) -> Changes:
        after = 0 if since is None or since.bucket is not self else since.revision
        present = await self.keys(pattern)
        deleted = [key for key, revision in self._deleted.items() if revision > after and _matches(key, pattern)] if after else []
        records = {key: self.records[key] for key in present if self.records[key].revision > after}
        self.listed += len(records) + len(deleted)
        return Changes(
            {**dict.fromkeys(deleted), **records}, Position(self, self._revision), is_whole=not after, now=self.clock()
        )

    async def delete(self, key: str) -> bool:
        with self._operation():
            if self.records.pop(key, None) is None:
                return False
            self._revision += 1
            self._deleted[key] = self._revision
            return True

    @contextmanager
    def _operation(self) -> Iterator[None]:
        """Raise as the store does, which also does so at the end for a task that is cancelled."""
        self._check()
        yield
        raise_if_cancelled()

    def _check(self) -> None:
        raise_if_cancelled()
        if self.is_away:
            raise Unavailable("the bucket test in JetStream cannot be read: it is away")


def _matches(key: str, pattern: str) -> bool:
    return fnmatchcase(key, pattern.replace(">", "*"))
