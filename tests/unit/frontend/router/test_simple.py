from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Collection, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.common.discovery import Instance
from dynamo.common.errors import InvalidRequest, NoInstances, Overloaded
from dynamo.common.kv.events import LoadReport
from dynamo.common.names import InstanceId
from dynamo.frontend.config import RouterMode, RouterOptions, Thresholds
from dynamo.frontend.router.base import RouteRequest
from dynamo.frontend.router.loads.instance_load import InstanceLoad, Load
from dynamo.frontend.router.loads.table import LoadTable
from dynamo.frontend.router.select import make_router
from dynamo.frontend.router.simple import Direct, RandomChoice, RoundRobin
from tests.support.fakes import instance
from tests.support.memory import kept_objects

REQUEST = RouteRequest("adder")


def fleet(*ids: int) -> tuple[Instance, ...]:
    return tuple(instance(id_) for id_ in ids)


def test_round_robin_gives_every_instance_the_same_number_of_turns() -> None:
    router, three = RoundRobin(), fleet(1, 2, 3)
    turns = [router.pick(REQUEST, three).instance.id for _ in range(9)]
    assert Counter(turns) == {1: 3, 2: 3, 3: 3}
    assert turns[:3] == turns[3:6] == turns[6:]


def test_round_robin_counts_each_model_apart() -> None:
    router, two = RoundRobin(), fleet(1, 2)
    turns = {model: [router.pick(RouteRequest(model), two).instance.id for _ in range(2)] for model in ("a", "b")}
    assert set(turns["a"]) == set(turns["b"]) == {1, 2}


def test_an_instance_that_joins_comes_next_without_skipping_another() -> None:
    router, two = RoundRobin(), fleet(1, 2)
    first, second = (router.pick(REQUEST, two).instance.id for _ in range(2))
    three = fleet(1, 2, 3)
    assert [router.pick(REQUEST, three).instance.id for _ in range(3)] == [3, first, second]


def test_a_retry_that_leaves_one_out_counts_as_a_turn_of_the_one_it_takes() -> None:
    router, three = RoundRobin(), fleet(1, 2, 3)
    first, second = (router.pick(REQUEST, three).instance for _ in range(2))
    third = router.pick(REQUEST, [i for i in three if i is not second]).instance
    assert third.id not in (first.id, second.id)
    assert router.pick(REQUEST, three).instance is first


class CountedReads(LoadTable):
    """Counts how often the loads of all candidates are read."""

    reads = 0

    def read(self, rows: Sequence[InstanceLoad], now: float) -> list[Load]:
        self.reads += 1
        return super().read(rows, now)


@pytest.mark.parametrize("mode", [RouterMode.ROUND_ROBIN, RouterMode.RANDOM])
@pytest.mark.parametrize("busy", [range(1, 31), range(1, 100), range(1, 101)])
def test_busy_instances_of_a_large_fleet_get_nothing(mode: RouterMode, busy: Collection[int]) -> None:
    loads, hundred = CountedReads(), fleet(*range(1, 101))
    router = make_router(RouterOptions(mode=mode, thresholds=Thresholds(active_prefill_tokens=10)), loads, lambda: 0.0)
    for number in busy:
        loads.report(InstanceId(number), LoadReport(queued_prefill_tokens=11), 0.0)
    free = set(range(1, 101)) - set(busy)
    if not free:
        with pytest.raises(Overloaded):
            router.pick(REQUEST, hundred)
        return
    turns = Counter(router.pick(RouteRequest("adder", str(number)), hundred).instance.id for number in range(1000))
    assert set(turns) == free
    if len(free) == 70:
        assert loads.reads <= 20, "most decisions look at few instances only"


def test_a_pin_is_obeyed_and_costs_no_turn() -> None:
    router, two = RoundRobin(), fleet(1, 2)
    first = router.pick(REQUEST, two).instance.id
    other = InstanceId(3 - first)
    assert router.pick(RouteRequest("adder", pinned=other), two).instance.id == other
    assert router.pick(REQUEST, two).instance.id == other


def test_frontends_that_start_together_do_not_all_begin_with_the_same_instance() -> None:
    ten = fleet(*range(10))
    firsts = {RoundRobin(random.Random(seed)).pick(REQUEST, ten).instance.id for seed in range(40)}
    assert len(firsts) > 5


@given(st.lists(st.sets(st.integers(1, 6), min_size=1), min_size=1, max_size=60), st.booleans())
def test_no_instance_is_picked_twice_while_another_candidate_waits(memberships: list[set[int]], as_tuples: bool) -> None:
    """Under any joins and leaves: between two turns of one instance, all that were there throughout had theirs."""
    router = RoundRobin()
    fleets: dict[frozenset[int], tuple[Instance, ...]] = {}
    history: list[tuple[set[int], int]] = []
    for present in memberships:
        candidates = fleets.setdefault(frozenset(present), fleet(*present))
        picked = int(router.pick(REQUEST, candidates if as_tuples else list(candidates)).instance.id)
        assert picked in present
        history.append((present, picked))
    for end, (_, picked) in enumerate(history):
        before = [at for at in range(end) if history[at][1] == picked]
        if before:
            between = history[before[-1] : end + 1]
            always = set.intersection(*(present for present, _ in between))
            assert always <= {turn for _, turn in between}


def test_round_robin_keeps_nothing_of_instances_that_are_gone() -> None:
    router = RoundRobin()
    for id_ in range(100):
        router.pick(REQUEST, fleet(id_))
        router.removed(InstanceId(id_))
    assert kept_objects(router) == kept_objects(RoundRobin())


def test_random_takes_every_instance_about_as_often() -> None:
    router, four = RandomChoice(random.Random(1)), fleet(1, 2, 3, 4)
    turns = Counter(router.pick(REQUEST, four).instance.id for _ in range(4000))
    assert all(900 < count < 1100 for count in turns.values())


def test_direct_mode_requires_a_pinned_instance() -> None:
    with pytest.raises(InvalidRequest, match="must name their instance"):
        Direct().pick(REQUEST, fleet(1))


@pytest.mark.parametrize("mode", list(RouterMode))
def test_every_mode_obeys_a_pin(mode: RouterMode) -> None:
    router = make_router(RouterOptions(mode=mode), LoadTable(), time.monotonic)
    assert router.pick(RouteRequest("adder", pinned=InstanceId(2)), fleet(1, 2)).instance.id == 2
    with pytest.raises(NoInstances):
        router.pick(RouteRequest("adder", pinned=InstanceId(9)), fleet(1, 2))
