"""The rounds: look at all pools, decide for each, write the targets, have them carried out."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from dynamo.common.config import load as load_config
from dynamo.common.etcd import EtcdUnavailable, Listing
from dynamo.common.model_card import Role
from dynamo.common.names import InstanceId
from dynamo.common.process.background import running
from dynamo.common.scaling.demand import ArrivalTotals, DemandReport, PoolDemand
from dynamo.common.scaling.pool import Pool
from dynamo.common.scaling.targets import MAX_INSTANCES, PoolTarget, Targets, decode_targets, encode_targets, targets_key
from dynamo.planner.config import PlannerConfig
from dynamo.planner.executors.base import ExecutorFailed
from dynamo.planner.observe.bus import FleetBus
from dynamo.planner.observe.demand import DemandLedger
from dynamo.planner.observe.fleet import PoolWatch
from dynamo.planner.pools import Bounds, Decision, PoolView
from dynamo.planner.process.leader import Leadership
from dynamo.planner.process.planning import Planning
from dynamo.planner.process.standby import StandbyRecords
from dynamo.planner.process.state import MAX_DECISIONS
from dynamo.planner.process.targets_key import TargetsKey
from tests.support.fake_etcd import FakeEtcd
from tests.support.pools import CHAT, instance, load
from tests.support.virtual_time import in_virtual_time
from tests.unit.planner.observe.test_bus import FakeLink

INTERVAL_S = 5.0


class StoppableEtcd(FakeEtcd):
    is_away = False

    async def range(self, key: str, *, prefix: bool = False) -> Listing:
        if self.is_away:
            raise EtcdUnavailable("no endpoint responds")
        return await super().range(key, prefix=prefix)


class NoLeases:
    async def take(self, name: str) -> bool:
        return False


@dataclass
class FakeExecutor:
    """A platform that remembers what it was told."""

    told: dict[Pool, int] = field(default_factory=dict)
    rounds: int = 0
    fails: bool = False

    async def carry_out(self, decisions: Sequence[Decision]) -> None:
        self.rounds += 1
        if self.fails:
            raise ExecutorFailed("the API server is away")
        self.told.update({decision.pool: decision.instances for decision in decisions})

    async def current(self, pools: Collection[Pool]) -> Mapping[Pool, int] | None:
        if self.fails:
            raise ExecutorFailed("the API server is away")
        return self.told

    async def close(self) -> None: ...


@dataclass
class FakeDecider:
    """Wants what the test says."""

    pool: Pool
    wanted: dict[Pool, int]
    bounds: Bounds
    before: int = 0
    views: list[PoolView] = field(default_factory=list)
    observed: list[PoolView] = field(default_factory=list)
    """What it saw while another one decided."""

    def begin(self, target: int) -> None:
        self.before = target

    def observe(self, view: PoolView) -> None:
        self.observed.append(view)

    def decide(self, view: PoolView, *, least: int = 0) -> Decision:
        self.views.append(view)
        number = min(max(self.wanted.get(self.pool, self.before), least), self.bounds.most)
        leave = tuple(each.id for each in view.instances)
        return Decision(pool=self.pool, instances=number, leave=leave, by="formula", reason="the test says so")


@dataclass
class Fleet:
    """A planner with everything around it played by the test."""

    config: PlannerConfig
    etcd: StoppableEtcd
    executor: FakeExecutor
    wanted: dict[Pool, int]
    watch: PoolWatch = field(default_factory=PoolWatch)
    link: FakeLink = field(default_factory=FakeLink)
    deciders: list[FakeDecider] = field(default_factory=list)
    warning: str = ""
    budget: int = 1000
    """The most instances of each pool that there are GPUs for."""
    unix_time: float = 1_700_000_000.0
    placed: int = 0
    """Requests for chat so far."""

    def __post_init__(self) -> None:
        self.bus = FleetBus(self.link, DemandLedger(INTERVAL_S), self.watch, INTERVAL_S)
        self.leadership = Leadership(NoLeases())
        self.planning = self.make("one")

    def make(self, name: str) -> Planning:
        """Return one more planner of the same fleet."""

        def make_decider(pool: Pool, bounds: Bounds) -> FakeDecider:
            self.deciders.append(FakeDecider(pool, self.wanted, bounds))
            return self.deciders[-1]

        return Planning(
            self.config,
            name,
            watch=self.watch,
            bus=self.bus,
            leadership=self.leadership,
            key=TargetsKey(self.etcd, "dynamo"),
            standby=StandbyRecords(self.etcd, "dynamo", self.watch),
            executor=self.executor,
            executor_name="fake",
            make_decider=make_decider,
            within_budget=self.within_budget,
            unreachable=lambda view: self.warning,
            unix_time=lambda: self.unix_time + asyncio.get_running_loop().time(),
        )

    def within_budget(self, decisions: Sequence[Decision], views: Mapping[Pool, PoolView]) -> Sequence[Decision]:
        return [
            each if each.instances <= self.budget else replace(each, instances=self.budget, by="budget") for each in decisions
        ]

    def lead(self) -> None:
        self.leadership.is_leader = True
        self.leadership.term += 1

    async def rounds(self, count: int = 1, *, requests: int = 0, waiting: int = 0, silent: bool = False) -> None:
        """Let time pass with a report of a frontend each second, and a round at each interval."""
        for _ in range(count):
            for _ in range(int(INTERVAL_S)):
                await asyncio.sleep(1)
                self.placed += requests
                if not silent:
                    demand = PoolDemand(CHAT, ArrivalTotals(self.placed, 100 * self.placed), waiting)
                    self.bus.demand.report(DemandReport("f1", (demand,)), asyncio.get_running_loop().time())
            await self.planning.round()

    def written(self) -> dict[Pool, int]:
        """What is in etcd."""
        kv = self.etcd.kvs.get(targets_key("dynamo"))
        return {} if kv is None else {target.pool: target.instances for target in decode_targets(kv.value).targets}


def fleet(*flags: str, wanted: int | None = None, there: int = 1) -> Fleet:
    """A fleet with so many instances of chat, of which the planner wants so many."""
    config = load_config(PlannerConfig, flags, {}, program="dynamo-planner")
    made = Fleet(config, StoppableEtcd(), FakeExecutor(), {} if wanted is None else {CHAT: wanted})
    made.watch.registrations([instance(number) for number in range(1, there + 1)], [])
    return made


async def begun(*flags: str, wanted: int | None = None, there: int = 1) -> Fleet:
    """One whose planner is the leader and has followed demand for long enough to decide."""
    made = fleet(*flags, wanted=wanted, there=there)
    await made.rounds()
    made.lead()
    return made


@in_virtual_time
async def test_the_leader_writes_what_it_decides_and_has_it_carried_out() -> None:
    made = await begun(wanted=4)
    await made.rounds(requests=3)
    assert made.written() == made.executor.told == {CHAT: 4}
    assert made.deciders[0].views[-1].arrivals.requests == 15
    [pool] = made.planning.state.pools
    assert (pool.target, pool.instances, pool.by) == (4, 1, "formula")


@in_virtual_time
async def test_one_that_is_not_the_leader_decides_nothing_and_shows_what_it_sees() -> None:
    made = fleet(wanted=4)
    await made.rounds(3)
    assert (made.written(), made.executor.rounds, made.planning.state.is_leader) == ({}, 0, False)
    assert [(pool.instances, pool.by) for pool in made.planning.state.pools] == [(1, "standby")]


@in_virtual_time
async def test_a_new_leader_goes_on_from_the_targets_of_the_last_one() -> None:
    made = await begun(wanted=5)
    await made.rounds()
    made.wanted.clear()
    made.planning = made.make("two")
    made.lead()
    await made.rounds()
    assert made.written() == {CHAT: 5}
    assert made.deciders[-1].before == 5
    assert decode_targets(made.etcd.kvs[targets_key("dynamo")].value).planner == "two"


@in_virtual_time
async def test_one_that_stood_by_decides_with_what_it_saw_meanwhile() -> None:
    made = fleet(wanted=4)
    await made.rounds(3, requests=10)
    [decider] = made.deciders
    assert [view.arrivals.requests > 0.0 for view in decider.observed] == [True, True, True]
    made.lead()
    await made.rounds()
    assert made.deciders == [decider]
    assert (decider.before, len(decider.views), made.written()) == (1, 1, {CHAT: 4})


@in_virtual_time
async def test_a_new_leader_begins_with_what_the_platform_is_told_where_that_is_more() -> None:
    made = await begun()
    made.executor.told[CHAT] = 6
    await made.rounds()
    assert made.written() == {CHAT: 6}


@pytest.mark.parametrize("there", [1, 20])
@in_virtual_time
async def test_a_leader_starts_no_fleet_because_the_key_says_so(there: int) -> None:
    made = await begun("--max-instances", "8", there=there)
    absurd = Targets(planner="another", targets=(PoolTarget(pool=CHAT, instances=MAX_INSTANCES),))
    for _ in range(2):  # one that begins, and one that leads already
        await made.etcd.put(targets_key("dynamo"), encode_targets(absurd))
        await made.rounds(2)
        assert made.written() == made.executor.told == {CHAT: max(8, there)}


@in_virtual_time
async def test_a_new_leader_lowers_nothing_before_it_has_seen_demand_for_the_cooling_time() -> None:
    made = await begun("--cool-down", "60", wanted=2, there=4)
    await made.rounds(11)
    assert made.written() == {CHAT: 4}
    assert made.planning.state.pools[0].by == "takeover"
    await made.rounds(3)
    assert made.written() == {CHAT: 2}


@in_virtual_time
async def test_a_fleet_that_is_larger_than_it_may_be_is_not_cut_before_the_cooling_time_and_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    made = await begun("--cool-down", "60", there=20)
    made.link.is_connected = False
    await made.rounds(2, silent=True)
    assert made.written() == {CHAT: 20}
    assert "chat has 20 instances, and may have 8: the others are taken away in 60 s" in caplog.messages
    made.link.is_connected = True
    await made.rounds(9)
    assert made.written() == {CHAT: 20}
    await made.rounds(3)
    assert made.written() == {CHAT: 8}


@in_virtual_time
async def test_a_pool_that_appears_keeps_its_instances_for_the_cooling_time() -> None:
    made = await begun("--cool-down", "60")
    await made.rounds(20)
    other = Pool("other")
    made.wanted[other] = 1
    made.watch.registrations([instance(number, "other") for number in range(10, 15)], [])
    await made.rounds(11)
    assert made.written()[other] == 5
    await made.rounds(3)
    assert made.written()[other] == 1


@in_virtual_time
async def test_a_budget_bounds_what_is_wanted_and_takes_nothing_away_before_the_cooling_time() -> None:
    made = await begun("--cool-down", "60", wanted=7, there=4)
    made.budget = 3
    await made.rounds(11)
    assert made.written() == {CHAT: 4}
    await made.rounds(3)
    assert made.written() == {CHAT: 3}


@in_virtual_time
async def test_without_nats_targets_stay_as_they_are_and_are_decided_again_when_it_is_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    made = await begun(wanted=3)
    await made.rounds()
    made.wanted[CHAT] = 1
    made.link.is_connected = False
    with caplog.at_level(logging.INFO):
        await made.rounds(60, silent=True)
    assert (made.written(), made.planning.state.holding) == ({CHAT: 3}, "NATS cannot be reached")
    assert len([line for line in caplog.messages if "left as they are" in line]) == 1
    made.link.is_connected, made.link.reconnected_at = True, asyncio.get_running_loop().time()
    await made.rounds(2)
    assert (made.written(), made.planning.state.holding) == ({CHAT: 1}, "")


@in_virtual_time
async def test_a_schedule_counts_also_while_nothing_is_known_of_demand() -> None:
    made = await begun("--schedule", "mon-sun 00:00-24:00 UTC 3")
    made.link.is_connected = False
    await made.rounds(silent=True)
    assert made.written() == {CHAT: 3}
    assert made.planning.state.pools[0].by == "schedule"


@in_virtual_time
async def test_without_etcd_nothing_is_carried_out_and_the_last_view_is_shown() -> None:
    made = await begun(wanted=3)
    await made.rounds()
    made.wanted[CHAT], made.etcd.is_away = 5, True
    await made.rounds(3)
    assert made.executor.told == {CHAT: 3}
    assert "no endpoint responds" in made.planning.state.holding
    assert [pool.target for pool in made.planning.state.pools] == [3]
    made.etcd.is_away = False
    await made.rounds()
    assert made.executor.told == made.written() == {CHAT: 5}


@in_virtual_time
async def test_a_leader_that_loses_its_lease_stops_at_once() -> None:
    made = await begun(wanted=3)
    await made.rounds()
    made.wanted[CHAT] = 7
    made.leadership.lost()
    await made.rounds(3)
    assert made.written() == made.executor.told == {CHAT: 3}


@in_virtual_time
async def test_one_that_loses_it_while_it_writes_carries_nothing_out() -> None:
    made = await begun(wanted=3)

    class LosesIt(TargetsKey):
        async def write(self, targets: Targets) -> bool:
            made.leadership.lost()
            return await super().write(targets)

    made.planning = Planning(
        **{**_parts(made), "key": LosesIt(made.etcd, "dynamo")},
    )
    await made.rounds()
    assert made.executor.rounds == 0


@in_virtual_time
async def test_one_that_loses_it_while_it_decides_writes_nothing() -> None:
    made = await begun()

    class LosesIt(FakeDecider):
        def decide(self, view: PoolView, *, least: int = 0) -> Decision:
            made.leadership.lost()
            return Decision(pool=self.pool, instances=5)

    make = {
        "make_decider": lambda pool, bounds: LosesIt(pool, {}, bounds),
        "key": TargetsKey(made.etcd, "dynamo"),
    }
    made.planning = Planning(**{**_parts(made), **make})
    await made.rounds()
    assert (made.written(), made.executor.rounds) == ({}, 0)


def _parts(made: Fleet) -> dict[str, Any]:
    return {
        "config": made.config,
        "name": "one",
        "watch": made.watch,
        "bus": made.bus,
        "leadership": made.leadership,
        "key": TargetsKey(made.etcd, "dynamo"),
        "standby": StandbyRecords(made.etcd, "dynamo", made.watch),
        "executor": made.executor,
        "executor_name": "fake",
        "make_decider": lambda pool, bounds: FakeDecider(pool, made.wanted, bounds),
        "within_budget": lambda decisions, views: decisions,
        "unreachable": lambda view: "",
    }


@in_virtual_time
async def test_a_platform_that_fails_is_told_again_and_the_failure_is_shown(caplog: pytest.LogCaptureFixture) -> None:
    made = await begun(wanted=3)
    made.executor.fails = True
    await made.rounds(3)
    assert (made.executor.rounds, made.written()) == (3, {CHAT: 3})
    assert made.planning.state.executor_error == "the API server is away"
    assert len([line for line in caplog.messages if "not carried out" in line]) == 1
    made.executor.fails = False
    await made.rounds()
    assert (made.executor.told, made.planning.state.executor_error) == ({CHAT: 3}, "")


@in_virtual_time
async def test_a_dry_run_decides_and_only_says_so(caplog: pytest.LogCaptureFixture) -> None:
    made = await begun("--dry-run", wanted=4)
    with caplog.at_level(logging.INFO):
        await made.rounds(2)
    assert (made.written(), made.executor.rounds) == ({}, 0)
    assert [pool.target for pool in made.planning.state.pools] == [4]
    assert [line for line in caplog.messages if "would be scaled" in line] == [
        "chat would be scaled from 1 to 4 by formula: the test says so"
    ]


@in_virtual_time
async def test_targets_of_pools_that_are_not_scaled_here_stay_in_the_key() -> None:
    made = await begun("--model", "chat", wanted=2)
    made.watch = PoolWatch(["chat"])
    other = PoolTarget(pool=Pool("other", Role.PREFILL), instances=7, reason="by hand")
    await made.etcd.put(targets_key("dynamo"), encode_targets(Targets(planner="zero", targets=(other,))))
    await made.rounds()
    assert made.written() == {CHAT: 2, other.pool: 7}


@in_virtual_time
async def test_a_pool_that_only_the_last_leader_knew_is_scaled_on() -> None:
    made = await begun()
    gone = PoolTarget(pool=Pool("gone"), instances=2)
    await made.etcd.put(targets_key("dynamo"), encode_targets(Targets(planner="zero", targets=(gone,))))
    await made.rounds()
    assert {pool.pool: (pool.target, pool.instances) for pool in made.planning.state.pools} == {CHAT: (1, 1), gone.pool: (2, 0)}


@in_virtual_time
async def test_who_is_to_leave_is_written_when_there_are_fewer() -> None:
    made = await begun("--cool-down", "0", wanted=3, there=3)
    await made.rounds()
    key = targets_key("dynamo")
    assert decode_targets(made.etcd.kvs[key].value).targets[0].leave == ()
    made.wanted[CHAT] = 2
    await made.rounds()
    assert decode_targets(made.etcd.kvs[key].value).targets[0].leave == (1, 2, 3)


@in_virtual_time
async def test_a_pool_without_requests_for_the_idle_timeout_gets_no_instance_until_one_waits() -> None:
    made = await begun("--idle-timeout", "60", "--cool-down", "0", wanted=0)
    await made.rounds(requests=1)
    await made.rounds(11)
    assert made.written() == {CHAT: 1}
    await made.rounds(2)
    assert made.written() == {CHAT: 0}
    assert made.planning.state.pools[0].by == "idle"
    made.watch.registrations([], [instance(1)])
    await made.rounds(20)
    assert made.written() == {CHAT: 0}
    await made.rounds(waiting=1)
    assert made.written() == {CHAT: 1}
    assert made.planning.state.pools[0].by == "waiting"


@in_virtual_time
async def test_a_request_that_waits_for_a_pool_without_instances_is_not_kept_waiting_for_the_next_round() -> None:
    made = await begun("--idle-timeout", "60", "--interval", "60", there=0, wanted=0)
    made.watch.remember(CHAT)
    await made.rounds(2)
    assert made.written() == {CHAT: 0}
    async with running(made.planning.run(), "rounds"):
        for waiting in (0, 0, 2):
            await asyncio.sleep(1)
            assert made.written() == {CHAT: 0}
            report = DemandReport("f1", (PoolDemand(CHAT, ArrivalTotals(made.placed), waiting),))
            made.bus.demand_came("", "", memoryview(msgspec.msgpack.encode(report)), False)
        await asyncio.sleep(0.1)
        assert made.written() == {CHAT: 1}


@in_virtual_time
async def test_prefill_and_decode_instances_are_started_together() -> None:
    made = await begun("--min-instances", "0", wanted=0, there=0)
    pools = {Pool("chat", Role.PREFILL): 0, Pool("chat", Role.DECODE): 0}
    made.wanted |= pools
    for pool in (CHAT, *pools):
        made.watch.remember(pool)
    await made.rounds(2)
    assert made.written() == {CHAT: 0, **pools}
    await made.rounds(waiting=1)
    assert made.written() == {CHAT: 1, **dict.fromkeys(pools, 1)}


@in_virtual_time
async def test_a_planner_that_starts_before_idle_models_leaves_them_at_nothing() -> None:
    made = await begun("--idle-timeout", "60", there=0)
    await made.etcd.put(targets_key("dynamo"), encode_targets(Targets(targets=(PoolTarget(pool=CHAT, instances=0),))))
    await made.rounds(3)
    assert made.written() == {CHAT: 0}


@in_virtual_time
async def test_goals_out_of_reach_are_logged_once_and_shown(caplog: pytest.LogCaptureFixture) -> None:
    made = await begun()
    for steps in (10, 20):
        made.watch.load(InstanceId(1), load(steps=steps))
    made.warning = "a single request gets a token every 20 ms: set a longer goal"
    await made.rounds(3, requests=1)
    assert made.planning.state.pools[0].warning == made.warning
    assert len([line for line in caplog.messages if "cannot reach its goals" in line]) == 1


@in_virtual_time
async def test_the_last_changes_are_kept() -> None:
    made = await begun("--cool-down", "0")
    for number in range(MAX_DECISIONS + 10):
        made.wanted[CHAT] = 2 + number % 2
        await made.rounds()
    decisions = made.planning.state.decisions
    assert len(decisions) == MAX_DECISIONS
    assert [(made.before, made.instances) for made in decisions[:2]] == [(2, 3), (3, 2)]
    assert decisions[0].at > decisions[1].at


@in_virtual_time
async def test_another_process_that_changes_the_targets_is_noticed_and_gone_on_from() -> None:
    made = await begun(wanted=3)
    await made.rounds()
    made.wanted[CHAT] = 2
    key = targets_key("dynamo")
    await made.etcd.put(key, encode_targets(Targets(planner="by hand", targets=(PoolTarget(pool=CHAT, instances=6),))))
    await made.rounds()
    assert made.planning.state.executor_error == "another process has changed the targets"
    made.wanted.clear()
    await made.rounds()
    assert made.written() == made.executor.told == {CHAT: 6}
