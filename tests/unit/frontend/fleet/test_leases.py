"""Work that one process does at a time, when etcd fails in the middle."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dynamo.frontend.fleet.leases import Leases


@dataclass
class FakeSession:
    lease: int = 7


@dataclass
class FakeEtcd:
    """Keys with their holders and leases. `session` loses its lease while the next key is put, if `loses` is set."""

    session: FakeSession
    keys: dict[str, tuple[bytes, int]] = field(default_factory=dict)
    loses: bool = False

    async def replace(self, key: str, value: bytes, *, mod_revision: int, lease: int) -> bool:
        if self.loses:
            self.session.lease = 0
        return self.keys.setdefault(key, (value, lease)) == (value, lease)

    async def delete(self, key: str) -> None:
        del self.keys[key]


def leases_of(etcd: FakeEtcd) -> Leases:
    fake: Any = etcd
    leases = Leases(fake, "/p/")
    session: Any = etcd.session
    leases.session = session
    return leases


async def test_one_process_has_it_until_it_is_released() -> None:
    etcd = FakeEtcd(FakeSession())
    first, second = leases_of(etcd), leases_of(etcd)
    assert await first.take("a") and not await second.take("a")
    await first.release("a")
    assert await second.take("a")
    await first.release("a")
    assert "/p/a" in etcd.keys


async def test_what_is_taken_while_the_lease_is_lost_is_not_ours() -> None:
    etcd = FakeEtcd(FakeSession(), loses=True)
    leases = leases_of(etcd)
    assert not await leases.take("a")
    await leases.release("a")
    etcd.loses, etcd.session.lease = False, 7  # it had only been in doubt
    assert await leases.take("a")
