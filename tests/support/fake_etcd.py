"""Keys and values in memory, with revisions, and one watch at a time, as `common.etcd.Etcd` has them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from dynamo.common.etcd import Deleted, Events, KeyValue, Listing, Put, Reset


class FakeEtcd:
    def __init__(self) -> None:
        self.kvs: dict[str, KeyValue] = {}
        self.revision = 1
        self.changes: asyncio.Queue[Reset | Events] = asyncio.Queue()

    async def range(self, key: str, *, prefix: bool = False) -> Listing:
        kvs = [kv for name, kv in sorted(self.kvs.items()) if (name.startswith(key) if prefix else name == key)]
        return Listing(tuple(kvs), self.revision)

    async def put(self, key: str, value: bytes) -> int:
        self.revision += 1
        self.kvs[key] = KeyValue(key, value, self.revision)
        self.changes.put_nowait(Events((Put(self.kvs[key]),), self.revision))
        return self.revision

    async def delete(self, key: str) -> int:
        self.revision += 1
        del self.kvs[key]
        self.changes.put_nowait(Events((Deleted(key, self.revision),), self.revision))
        return 1

    async def replace(self, key: str, value: bytes, *, mod_revision: int) -> bool:
        if self._revision(key) != mod_revision:
            return False
        await self.put(key, value)
        return True

    async def remove(self, key: str, *, mod_revision: int) -> bool:
        if self._revision(key) != mod_revision:
            return key not in self.kvs
        await self.delete(key)
        return True

    def lose_everything(self) -> None:
        """Begin anew, as an etcd whose disk was replaced."""
        self.kvs.clear()
        self.revision = 1
        self.changes.put_nowait(Reset((), self.revision, history_lost=True))

    async def watch(self, prefix: str) -> AsyncGenerator[Reset | Events, None]:
        yield Reset(tuple(self.kvs.values()), self.revision)
        while True:
            yield await self.changes.get()

    def _revision(self, key: str) -> int:
        return self.kvs[key].mod_revision if key in self.kvs else 0
