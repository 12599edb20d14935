"""Work that one process does at a time, when etcd fails in the middle."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from dynamo.common.etcd import EtcdUnavailable
from dynamo.frontend.fleet.leases import Leases, open_leases
from tests.support.virtual_time import in_virtual_time


@dataclass
class FakeSession:
    lease: int = 7


@dataclass
class FakeEtcd:
    """Keys with their holders and leases. `loses`: the lease is lost while the next key is put. `is_away`: each call fails."""

    held: FakeSession
    keys: dict[str, tuple[bytes, int]] = field(default_factory=dict)
    loses: bool = False
    is_away: bool = False
    deletes: int = 0

    @asynccontextmanager
    async def session(self, ttl_s: float, *, on_lost: object) -> AsyncIterator[FakeSession]:
        yield self.held

    async def replace(self, key: str, value: bytes, *, mod_revision: int, lease: int) -> bool:
        self._check()
        if self.loses:
            self.held.lease = 0
        return self.keys.setdefault(key, (value, lease)) == (value, lease)

    async def delete(self, key: str) -> None:
        self.deletes += 1
        await asyncio.sleep(1.0)
        self._check()
        del self.keys[key]

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
