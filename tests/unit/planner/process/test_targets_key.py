"""The key in etcd that holds the targets, written by the leader alone."""

from __future__ import annotations

from dynamo.common.scaling.pool import Pool
from dynamo.common.scaling.targets import PoolTarget, Targets, decode_targets, targets_key
from dynamo.planner.process.targets_key import TargetsKey
from tests.support.fake_etcd import FakeEtcd

KEY = targets_key("dynamo")


def targets(instances: int, planner: str = "one") -> Targets:
    return Targets(planner=planner, targets=(PoolTarget(pool=Pool("chat"), instances=instances),))


async def test_what_the_leader_writes_is_in_etcd() -> None:
    etcd = FakeEtcd()
    key = TargetsKey(etcd, "dynamo")
    assert await key.read() == Targets()
    assert await key.write(targets(3))
    assert await key.write(targets(4))
    assert decode_targets(etcd.kvs[KEY].value) == targets(4)


async def test_the_same_targets_are_written_once() -> None:
    etcd = FakeEtcd()
    key = TargetsKey(etcd, "dynamo")
    await key.read()
    assert await key.write(targets(3))
    revision = etcd.revision
    assert await key.write(targets(3))
    assert etcd.revision == revision


async def test_a_former_leader_that_does_not_know_it_yet_changes_nothing() -> None:
    etcd = FakeEtcd()
    former, new = TargetsKey(etcd, "dynamo"), TargetsKey(etcd, "dynamo")
    await former.read()
    assert await former.write(targets(3))
    assert (await new.read()).planner == "one"
    assert await new.write(targets(3, "two"))
    assert not await former.write(targets(9))
    assert not await former.write(targets(3))
    assert decode_targets(etcd.kvs[KEY].value) == targets(3, "two")


async def test_targets_that_etcd_has_lost_are_put_back() -> None:
    etcd = FakeEtcd()
    key = TargetsKey(etcd, "dynamo")
    await key.read()
    assert await key.write(targets(3))
    etcd.lose_everything()
    assert await key.write(targets(3))
    assert decode_targets(etcd.kvs[KEY].value) == targets(3)


async def test_a_write_whose_response_was_lost_is_gone_on_from() -> None:
    etcd = FakeEtcd()
    key, lost = TargetsKey(etcd, "dynamo"), TargetsKey(etcd, "dynamo")
    for each in (key, lost):
        await each.read()
    assert await lost.write(targets(3))  # by the same planner
    assert await key.write(targets(4))
    assert decode_targets(etcd.kvs[KEY].value) == targets(4)


async def test_a_value_that_cannot_be_read_is_replaced() -> None:
    etcd = FakeEtcd()
    await etcd.put(KEY, b'{"targets": [{"pool": ["chat"], "instances": -1}]}')
    key = TargetsKey(etcd, "dynamo")
    assert await key.read() == Targets()
    assert await key.write(targets(2))
