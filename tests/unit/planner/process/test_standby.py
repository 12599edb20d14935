"""Records of the models that can be started."""

from __future__ import annotations

import asyncio

from msgspec.structs import replace

from dynamo.common.model_card import Role
from dynamo.common.names import Endpoint
from dynamo.common.scaling.pool import Pool
from dynamo.common.scaling.standby import Standby, decode_standby, encode_standby, pool_standby_key
from dynamo.planner.observe.fleet import PoolWatch
from dynamo.planner.process.standby import LIST_EVERY_S, StandbyRecords
from tests.support.fake_etcd import FakeEtcd
from tests.support.pools import CHAT, LLM, instance
from tests.support.virtual_time import in_virtual_time

KEY = pool_standby_key("dynamo", CHAT)


def record(etcd: FakeEtcd, pool: Pool = CHAT) -> Standby | None:
    kv = etcd.kvs.get(pool_standby_key("dynamo", pool))
    return None if kv is None else decode_standby(kv.key, kv.value)


@in_virtual_time
async def test_each_pool_has_a_record_with_the_card_of_its_last_instance() -> None:
    etcd, watch = FakeEtcd(), PoolWatch()
    records = StandbyRecords(etcd, "dynamo", watch)
    await records.take_over()
    watch.registrations([instance(1), instance(2, role=Role.PREFILL)], [])
    await records.keep()
    assert record(etcd) == Standby(card=instance(1).card, endpoint=Endpoint())
    assert record(etcd, Pool("chat", Role.PREFILL)) is not None
    changed = replace(instance(3).card, llm=replace(LLM, total_blocks=900))
    watch.registrations([replace(instance(3), card=changed)], [])
    await records.keep()
    assert record(etcd) == Standby(card=changed, endpoint=Endpoint())


@in_virtual_time
async def test_a_record_stays_when_the_last_instance_has_left_and_is_not_written_again_for_nothing() -> None:
    etcd, watch = FakeEtcd(), PoolWatch()
    records = StandbyRecords(etcd, "dynamo", watch)
    watch.registrations([instance(1)], [])
    await records.keep()
    revision = etcd.revision
    watch.registrations([], [instance(1)])
    await asyncio.sleep(LIST_EVERY_S)
    assert await records.keep() == []
    assert (etcd.revision, record(etcd) is not None) == (revision, True)


@in_virtual_time
async def test_startup_times_are_in_it_unless_they_differ_by_little() -> None:
    etcd, watch = FakeEtcd(), PoolWatch()
    records = StandbyRecords(etcd, "dynamo", watch)
    watch.registrations([instance(1)], [])
    for number, (took_s, shown_s) in enumerate(((40.0, 40.0), (44.0, 40.0), (100.0, 40.0), (100.0, 72.0)), 2):
        watch.want(CHAT, number)
        await asyncio.sleep(took_s)
        watch.registrations([instance(number)], [])
        await records.keep()
        found = record(etcd)
        assert found is not None
        assert found.start_s == shown_s


@in_virtual_time
async def test_a_new_leader_follows_the_pools_that_have_a_record() -> None:
    etcd, watch = FakeEtcd(), PoolWatch()
    await etcd.put(KEY, encode_standby(Standby(card=instance(1).card, endpoint=Endpoint(), start_s=25.0)))
    await etcd.put(KEY + "-broken", b"{")
    await StandbyRecords(etcd, "dynamo", watch).take_over()
    view = watch.views({}, 5.0)[CHAT]
    assert (view.engine.total_blocks, view.startup_s, view.instances) == (500, 25.0, ())


@in_virtual_time
async def test_one_that_scales_other_models_deletes_the_record_of_a_model_that_is_scaled_no_more() -> None:
    etcd, watch = FakeEtcd(), PoolWatch(["other"])
    await etcd.put(KEY, encode_standby(Standby(card=instance(1).card, endpoint=Endpoint())))
    await StandbyRecords(etcd, "dynamo", watch).take_over()
    assert record(etcd) is None


@in_virtual_time
async def test_a_pool_without_instances_whose_record_was_deleted_is_given_up() -> None:
    etcd, watch = FakeEtcd(), PoolWatch()
    records = StandbyRecords(etcd, "dynamo", watch)
    watch.registrations([instance(1)], [])
    await records.keep()
    await etcd.delete(KEY)
    await asyncio.sleep(LIST_EVERY_S)
    assert await records.keep() == []  # it has an instance
    assert record(etcd) is not None
    watch.registrations([], [instance(1)])
    await etcd.delete(KEY)
    await asyncio.sleep(LIST_EVERY_S)
    assert await records.keep() == [CHAT]
    assert (watch.pools(), record(etcd)) == ([], None)


@in_virtual_time
async def test_records_that_etcd_has_lost_are_put_back() -> None:
    etcd, watch = FakeEtcd(), PoolWatch()
    records = StandbyRecords(etcd, "dynamo", watch)
    watch.registrations([instance(1)], [])
    await records.keep()
    watch.registrations([], [instance(1)])
    await asyncio.sleep(LIST_EVERY_S)
    await records.keep()
    etcd.lose_everything()
    await asyncio.sleep(LIST_EVERY_S)
    assert await records.keep() == []
    assert record(etcd) is not None


@in_virtual_time
async def test_a_card_that_etcd_cannot_hold_is_logged_once_and_does_no_harm() -> None:
    etcd, watch = FakeEtcd(), PoolWatch()
    records = StandbyRecords(etcd, "dynamo", watch)
    large = replace(instance(1), card=replace(instance(1).card, labels={"x": "y" * 2_000_000}))
    watch.registrations([large, instance(2, "other")], [])
    for _ in range(3):
        await records.keep()
    assert (record(etcd), record(etcd, Pool("other")) is not None) == (None, True)
