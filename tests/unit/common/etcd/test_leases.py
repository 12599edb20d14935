"""Work that one process does at a time, when etcd fails in the middle."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from dynamo.common.etcd import Deleted, EtcdUnavailable, Events, KeyValue, LeaseLost, Listing, Put, Reset
from dynamo.common.etcd.leases import Leases, open_leases
from tests.support.virtual_time import in_virtual_time


@dataclass
class FakeSession:
    lease: int = 7


@dataclass
class FakeEtcd:
    """Keys with their holders and leases. `loses`: the lease is lost while the next key is put. `is_away`: each call fails.

    `has_ended`: no key is put under a lease.
    """

    held: FakeSession
    keys: dict[str, KeyValue] = field(default_factory=dict)
    loses: bool = False
    is_away: bool = False
    has_ended: bool = False
    deletes: int = 0
    revision: int = 1
    watches: list[asyncio.Queue[Reset | Events]] = field(default_factory=list)

    @asynccontextmanager
    async def session(self, ttl_s: float, *, on_lost: object) -> AsyncIterator[FakeSession]:
        yield self.held

    async def watch(self, prefix: str) -> AsyncGenerator[Reset | Events, None]:
        changes: asyncio.Queue[Reset | Events] = asyncio.Queue()
        self.watches.append(changes)
        yield Reset(tuple(self.keys.values()), self.revision)
        while True:
            yield await changes.get()

    async def range(self, key: str) -> Listing:
        return Listing((self.keys[key],) if key in self.keys else (), self.revision)

    async def replace(self, key: str, value: bytes, *, mod_revision: int, lease: int) -> bool:
        self._check()
        if self.has_ended:
            raise LeaseLost("requested lease not found")
        if self.loses:
            self.held.lease = 0
        if key not in self.keys:
            self.put(key, value, lease)
        return (self.keys[key].value, self.keys[key].lease) == (value, lease)

    async def remove(self, key: str, *, mod_revision: int) -> bool:
        self.deletes += 1
        await asyncio.sleep(1.0)
        self._check()
        if self.keys[key].mod_revision == mod_revision:
            self.lose(key)
        return key not in self.keys

    def put(self, key: str, value: bytes, lease: int = 99) -> None:
        self.revision += 1
        self.keys[key] = KeyValue(key, value, self.revision, lease)
        self._publish(Events((Put(self.keys[key]),), self.revision))

    def lose(self, *keys: str) -> None:
        self.revision += 1
        for key in keys:
            del self.keys[key]
        self._publish(Events(tuple(Deleted(key, self.revision) for key in keys), self.revision))

    def come_back_without(self, key: str) -> None:
        """Be restored from a snapshot."""
        del self.keys[key]
        self._publish(Reset(tuple(self.keys.values()), self.revision, history_lost=True))

    def _publish(self, change: Reset | Events) -> None:
        for changes in self.watches:
            changes.put_nowait(change)

    def _check(self) -> None:
        if self.is_away:
            raise EtcdUnavailable("no endpoint responds")


def leases_of(etcd: FakeEtcd) -> Leases:
    fake: Any = etcd
    leases = Leases(fake, "/p/")
    session: Any = etcd.held
    leases.session = session
    return leases


@in_virtual_time
async def test_one_process_has_it_until_it_is_released() -> None:
    etcd = FakeEtcd(FakeSession())
    first, second = leases_of(etcd), leases_of(etcd)
    assert await first.take("a") and not await second.take("a")
    await first.release("a")
    assert await second.take("a")
    await first.release("a")
    assert "/p/a" in etcd.keys


@in_virtual_time
async def test_what_is_taken_while_the_lease_is_lost_is_not_ours() -> None:
    etcd = FakeEtcd(FakeSession(), loses=True)
    leases = leases_of(etcd)
    assert not await leases.take("a")
    await leases.release("a")
    etcd.loses, etcd.held.lease = False, 7  # it had only been in doubt
    assert await leases.take("a")


@in_virtual_time
async def test_what_could_not_be_released_is_released_when_etcd_is_back() -> None:
    etcd = FakeEtcd(FakeSession())
    fake: Any = etcd
    async with open_leases(fake, "/p/") as leases:
        for name in ("a", "b", "c"):
            assert await leases.take(name)
        etcd.is_away = True
        for name in ("a", "b"):
            with pytest.raises(EtcdUnavailable):
                await leases.release(name)
        await asyncio.sleep(100.0)
        assert {*etcd.keys} == {"/p/a", "/p/b", "/p/c"} and 10 < etcd.deletes < 30
        etcd.is_away = False
        assert await leases.take("b"), "it is still ours, and wanted again"
        await asyncio.sleep(20.0)
        assert {*etcd.keys} == {"/p/b", "/p/c"}
        await leases.release("b")
    assert {*etcd.keys} == {"/p/c"}


@in_virtual_time
async def test_a_name_is_not_taken_while_it_is_being_released() -> None:
    etcd = FakeEtcd(FakeSession())
    leases = leases_of(etcd)
    assert await leases.take("a")
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(leases.release("a"))
        await asyncio.sleep(0.5)
        assert await leases.take("a")
    assert "/p/a" in etcd.keys


@in_virtual_time
async def test_a_key_that_is_another_process_s_by_now_is_not_released() -> None:
    etcd = FakeEtcd(FakeSession())
    first, second = leases_of(etcd), leases_of(etcd)
    assert await first.take("a")
    etcd.lose("/p/a")
    assert await second.take("a")
    await first.release("a")
    assert "/p/a" in etcd.keys and not await first.take("a")


@in_virtual_time
async def test_a_key_that_another_process_puts_while_it_is_being_released_stays() -> None:
    etcd = FakeEtcd(FakeSession())
    leases = leases_of(etcd)
    assert await leases.take("a")
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(leases.release("a"))
        await asyncio.sleep(0.5)
        etcd.put("/p/a", b"another")
    assert etcd.keys["/p/a"].value == b"another"


@in_virtual_time
async def test_a_key_that_is_lost_while_its_lease_goes_on_is_put_back() -> None:
    etcd = FakeEtcd(FakeSession())
    fake: Any = etcd
    losses: list[None] = []
    async with open_leases(fake, "/p/") as leases, open_leases(fake, "/p/") as other:
        leases.on_lost(lambda: losses.append(None))
        await asyncio.sleep(1.0)
        assert await leases.take("a") and await leases.take("b") and await leases.take("c")
        before = dict(etcd.keys)
        etcd.lose("/p/a", "/p/b")
        await asyncio.sleep(1.0)
        etcd.come_back_without("/p/c")
        await asyncio.sleep(1.0)
        assert {key: kv.value for key, kv in etcd.keys.items()} == {key: kv.value for key, kv in before.items()}
        assert not await other.take("a")
        await leases.release("a")
        await asyncio.sleep(1.0)
        assert {*etcd.keys} == {"/p/b", "/p/c"}, "what was released is not put back"
    assert losses == []


@in_virtual_time
async def test_a_name_that_another_process_has_taken_meanwhile_is_lost_and_left_to_it() -> None:
    etcd = FakeEtcd(FakeSession())
    fake: Any = etcd
    losses: list[None] = []
    async with open_leases(fake, "/p/") as leases:
        leases.on_lost(lambda: losses.append(None))
        await asyncio.sleep(1.0)
        assert await leases.take("a") and await leases.take("b")
        etcd.lose("/p/a")
        etcd.put("/p/a", b"another")
        await asyncio.sleep(1.0)
        assert len(losses) == 1 and etcd.keys["/p/a"].value == b"another"
        await leases.release("a")
        assert etcd.keys["/p/a"].value == b"another" and etcd.deletes == 0
        etcd.lose("/p/a")
        await asyncio.sleep(1.0)
        assert {*etcd.keys} == {"/p/b"}
    assert len(losses) == 1


@in_virtual_time
async def test_a_key_that_ended_with_its_lease_is_not_put_back_under_it() -> None:
    etcd = FakeEtcd(FakeSession())
    fake: Any = etcd
    losses: list[None] = []
    async with open_leases(fake, "/p/") as leases:
        leases.on_lost(lambda: losses.append(None))
        await asyncio.sleep(1.0)
        assert await leases.take("a") and await leases.take("b")
        etcd.has_ended = True
        etcd.lose("/p/a")
        await asyncio.sleep(1.0)
        etcd.held.lease, etcd.has_ended = 0, False
        etcd.lose("/p/b")
        await asyncio.sleep(1.0)
    assert etcd.keys == {} and losses == [], "the session calls on_lost"
