"""The views of all pools."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from dynamo.common.model_card import ModelKind, Role
from dynamo.common.names import Endpoint, InstanceId
from dynamo.common.scaling.pool import Pool
from dynamo.common.scaling.standby import Standby
from dynamo.planner.observe.demand import PoolArrivals
from dynamo.planner.observe.fleet import MAX_POOLS, REQUESTED_S, PoolWatch
from dynamo.planner.pools import Arrivals
from tests.support.pools import CHAT, LLM, instance, load
from tests.support.virtual_time import in_virtual_time


def pools(watch: PoolWatch) -> Sequence[Pool]:
    return list(watch.views({}, 5.0))


@in_virtual_time
async def test_a_pool_is_the_instances_of_one_model_in_one_role() -> None:
    watch = PoolWatch()
    watch.registrations([instance(1), instance(2), instance(3, role=Role.PREFILL)], [])
    views = watch.views({}, 5.0)
    assert {pool: [each.id for each in view.instances] for pool, view in views.items()} == {
        CHAT: [1, 2],
        Pool("chat", Role.PREFILL): [3],
    }


@in_virtual_time
async def test_models_that_are_no_language_models_are_not_scaled_and_others_only_if_they_are_named() -> None:
    everything, chat = PoolWatch(), PoolWatch(["chat"])
    for watch in (everything, chat):
        watch.registrations([instance(1), instance(2, "other"), instance(3, "tensors", kind=ModelKind.TENSOR)], [])
    assert pools(everything) == [CHAT, Pool("other")]
    assert pools(chat) == [CHAT]


@in_virtual_time
async def test_the_view_says_what_the_engine_can_do_and_how_busy_instances_are() -> None:
    watch = PoolWatch()
    watch.registrations([instance(1)], [])
    for number in range(1, 40):
        watch.load(InstanceId(1), load(steps=10 * number, running=3, waiting=2, queued_tokens=700))
        await asyncio.sleep(0.05)
    view = watch.views({}, 5.0)[CHAT]
    assert (view.instances[0].requests, view.instances[0].queued_tokens) == (5, 700)
    assert (view.engine.block_size, view.engine.total_blocks, view.engine.max_num_seqs, view.engine.max_batched_tokens) == (
        *(16, 500, 64),
        2048,
    )
    assert view.engine.observations == 38  # the first report only shows where its totals are
    assert view.engine.times.window_s(1, 50, 4, 0) == pytest.approx(0.02, rel=0.1)


@in_virtual_time
async def test_demand_is_that_of_the_pool_and_without_any_there_are_no_arrivals() -> None:
    watch = PoolWatch()
    watch.registrations([instance(1), instance(2, "other")], [])
    views = watch.views({CHAT: PoolArrivals(arrivals=Arrivals(seconds=5.0, requests=9.0), waiting=2, ttft_ratio=1.2)}, 5.0)
    assert (views[CHAT].arrivals.requests, views[CHAT].waiting, views[CHAT].ttft_ratio) == (9.0, 2, 1.2)
    assert views[Pool("other")].arrivals == Arrivals(seconds=5.0)


@in_virtual_time
async def test_a_cache_is_worth_the_time_that_it_saves_each_second() -> None:
    watch = PoolWatch()
    watch.registrations([instance(1), instance(2)], [])
    demand = PoolArrivals(arrivals=Arrivals(seconds=5.0, requests=9.0), saved={InstanceId(1): 30_000, InstanceId(9): 5})
    view = watch.views({CHAT: demand}, 5.0)[CHAT]
    assert [each.cache_worth_s for each in view.instances] == pytest.approx([30_000 / 300 * view.engine.times.token, 0.0])
    later = watch.views({}, 300.0)[CHAT]
    assert later.instances[0].cache_worth_s == pytest.approx(view.instances[0].cache_worth_s / math.e)


@in_virtual_time
async def test_what_was_learned_of_a_pool_stays_when_its_last_instance_has_left() -> None:
    watch = PoolWatch()
    watch.registrations([instance(1)], [])
    watch.load(InstanceId(1), load(steps=10))
    watch.load(InstanceId(1), load(steps=20, running=3))
    watch.registrations([], [instance(1)])
    view = watch.views({}, 5.0)[CHAT]
    assert (view.instances, view.engine.observations, view.engine.block_size) == ((), 1, 16)
    watch.load(InstanceId(1), load(steps=30))
    assert watch.views({}, 5.0)[CHAT].engine.observations == 1


@in_virtual_time
async def test_a_card_that_changes_is_no_new_instance() -> None:
    watch = PoolWatch()
    watch.registrations([instance(1)], [])
    watch.load(InstanceId(1), load(running=3))
    watch.want(CHAT, 2)
    await asyncio.sleep(30)
    changed = instance(1)
    changed = replace(changed, card=replace(changed.card, llm=replace(LLM, total_blocks=900)))
    watch.registrations([changed], [instance(1)])
    view = watch.views({}, 5.0)[CHAT]
    assert (view.engine.total_blocks, view.instances[0].requests, view.startup_s) == (900, 3, 0.0)


@in_virtual_time
async def test_startup_is_seen_from_the_decision_until_the_instance_registers() -> None:
    watch = PoolWatch()
    watch.registrations([instance(1)], [])
    watch.want(CHAT, 2)
    await asyncio.sleep(40)
    watch.registrations([instance(2)], [])
    assert watch.views({}, 5.0)[CHAT].startup_s == 40.0


@in_virtual_time
async def test_a_pool_that_is_remembered_has_a_view_without_an_instance() -> None:
    watch = PoolWatch(["chat"])
    watch.remember(CHAT, Standby(card=instance(1).card, endpoint=Endpoint(), start_s=33.0))
    watch.remember(Pool("unnamed"))
    view = watch.views({}, 5.0)[CHAT]
    assert (view.instances, view.engine.observations, view.engine.total_blocks, view.startup_s) == ((), 0, 500, 33.0)
    assert pools(watch) == [CHAT]


@in_virtual_time
async def test_of_too_many_pools_those_with_requests_are_scaled() -> None:
    watch = PoolWatch()
    invented = [instance(number, f"invented-{number}") for number in range(1, MAX_POOLS + 1)]
    watch.registrations([*invented, instance(1000)], [])
    assert len(pools(watch)) == MAX_POOLS
    assert CHAT not in pools(watch)
    asked = {CHAT: PoolArrivals(arrivals=Arrivals(seconds=5.0, requests=1.0))}
    assert watch.views(asked, 5.0)[CHAT].arrivals.requests == 1.0
    await asyncio.sleep(0.9 * REQUESTED_S)
    assert CHAT in pools(watch)
    assert len(pools(watch)) == MAX_POOLS
    await asyncio.sleep(0.2 * REQUESTED_S)
    assert CHAT not in pools(watch)


@in_virtual_time
async def test_pools_that_never_had_a_request_are_forgotten_with_their_instances_where_there_are_too_many() -> None:
    watch = PoolWatch()
    invented = [instance(number, f"invented-{number}") for number in range(1, 2 * MAX_POOLS)]
    watch.registrations(invented, [])
    watch.registrations([], invented)
    assert len(pools(watch)) == MAX_POOLS
    assert sum(watch.follows(Pool(f"invented-{number}")) for number in range(1, 2 * MAX_POOLS)) == MAX_POOLS
