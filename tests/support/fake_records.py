"""A store of records in memory, with the protocol of `common.messaging.records.RecordStore`."""

from __future__ import annotations

from fnmatch import fnmatchcase

from dynamo.common.errors import Unavailable
from dynamo.common.messaging.records import Record


class FakeRecords:
    """Records by key. While it is `away`, each operation fails."""

    def __init__(self) -> None:
        self.is_away = False
        self.records: dict[str, Record] = {}
        self._revision = 0

    @property
    def is_ready(self) -> bool:
        return not self.is_away

    async def get(self, key: str) -> Record | None:
        self._check()
        return self.records.get(key)

    async def put(self, key: str, value: bytes, *, last: int | None = None) -> int | None:
        self._check()
        present = self.records.get(key)
        if last is not None and last != (0 if present is None else present.revision):
            return None
        self._revision += 1
        self.records[key] = Record(value, self._revision)
        return self._revision

    async def keys(self, pattern: str) -> list[str]:
        self._check()
        return sorted(key for key in self.records if fnmatchcase(key, pattern.replace(">", "*")))

    async def values(self, pattern: str) -> dict[str, bytes]:
        return {key: self.records[key].value for key in await self.keys(pattern)}

    async def delete(self, key: str) -> None:
        self._check()
        self.records.pop(key, None)

    def _check(self) -> None:
        if self.is_away:
            raise Unavailable("the bucket test in JetStream cannot be read: it is away")
