"""Decisions for one pool."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from dynamo.common.model_card import Role
from dynamo.common.names import InstanceId
from dynamo.common.scaling.demand import ArrivalSample
from dynamo.common.scaling.pool import Pool
from dynamo.frontend.router.cost.step_model import StepTimes
from dynamo.planner.budget import share_gpus
from dynamo.planner.capacity import Size
from dynamo.planner.decide import PoolPlanner, WhatIfResult
from dynamo.planner.pools import Arrivals, Bounds, Decision, Engine, Goals, InstanceView, PoolView

TIMES = StepTimes(base=6e-3, token=0.125e-3, sequence=0.35e-3, block=0.0, output_tokens=150.0)
KNOWN = Engine(times=TIMES, observations=100, block_size=16, total_blocks=50_000, max_num_seqs=256, max_batched_tokens=8192)
UNKNOWN = Engine(times=TIMES, max_num_seqs=16)
GOALS = Goals(ttft_s=3.0, itl_s=0.1)


class Fleet:
    """Shows a planner one view after the other, five seconds apart."""

    def __init__(self, bounds: Bounds, engine: Engine = KNOWN, pool: Pool | None = None, target: int | None = None) -> None:
        self.planner = PoolPlanner(pool or Pool("m"), GOALS, bounds, interval_s=5.0, tells_misses=True)
        if target is not None:
            self.planner.begin(target)
        self.engine = engine
        self.now = 0.0
        self.startup_s = 0.0

    def decide(
        self,
        rate: float,
        instances: int | Sequence[InstanceView],
        *,
        waiting: int = 0,
        waiting_tokens: int = 0,
        tokens: int = 8000,
        ttft_ratio: float = 0.0,
        least: int = 0,
    ) -> Decision:
        view = self.view(rate, instances, waiting=waiting, waiting_tokens=waiting_tokens, tokens=tokens, ttft_ratio=ttft_ratio)
        return self.planner.decide(view, least=least)

    def observe(self, rate: float) -> None:
        self.planner.observe(self.view(rate, 0))

    def view(
        self,
        rate: float,
        instances: int | Sequence[InstanceView],
        *,
        waiting: int = 0,
        waiting_tokens: int = 0,
        tokens: int = 8000,
        ttft_ratio: float = 0.0,
        samples: Sequence[ArrivalSample] = (),
    ) -> PoolView:
        self.now += 5.0
        if isinstance(instances, int):
            instances = [InstanceView(id=InstanceId(number)) for number in range(instances)]
        requests = rate * 5.0
        arrivals = Arrivals(seconds=5.0, requests=requests, prompt_tokens=requests * tokens, computed_tokens=requests * tokens)
        return PoolView(
            pool=self.planner.pool,
            now=self.now,
            arrivals=arrivals,
            engine=self.engine,
            instances=instances,
            waiting=waiting,
            waiting_tokens=waiting_tokens,
            ttft_ratio=ttft_ratio,
            startup_s=self.startup_s,
            samples=samples,
        )

    def decide_often(self, times: int, rate: float, instances: int) -> Decision:
        for _ in range(times - 1):
            self.decide(rate, instances)
        return self.decide(rate, instances)


def test_outputs_are_those_that_frontends_expect_of_what_arrives() -> None:
    """Such as of an API key with long outputs that begins now, of which no engine has completed any."""
    needed = []
    for expected in (0, 150, 1500):
        fleet = Fleet(Bounds(most=90))
        samples = [ArrivalSample(age_s=1.0, weight=5.0, prompt_tokens=8000, expected_output=expected) for _ in range(10)]
        decisions = [fleet.planner.decide(fleet.view(10.0, 13, samples=samples)) for _ in range(12)]
        needed.append(decisions[-1].needed)
    assert needed[0] == needed[1] < 0.8 * needed[2]


def test_a_load_gets_the_instances_that_it_needs() -> None:
    decision = Fleet(Bounds(most=40)).decide_often(12, 10.0, 13)
    assert 12 <= decision.instances <= 14
    assert decision.by == "formula"
    assert decision.arrivals_per_s == pytest.approx(10.0)
    assert "10/s arrive" in decision.reason


def test_a_need_far_above_the_target_is_met_at_once() -> None:
    fleet = Fleet(Bounds(most=40))
    fleet.decide_often(6, 1.0, 2)
    assert fleet.decide_often(2, 20.0, 2).instances > 8


def test_a_lower_load_takes_instances_away_after_the_cooling_time_only() -> None:
    fleet = Fleet(Bounds(most=40, cool_down_s=60.0))
    before = fleet.decide_often(24, 10.0, 13).instances
    assert fleet.decide(2.0, 13).instances == before
    assert fleet.decide_often(60, 2.0, 13).instances < 6


def test_instances_that_hold_the_least_leave_first() -> None:
    instances = [
        InstanceView(id=InstanceId(1), cache_worth_s=0.5),
        InstanceView(id=InstanceId(2), cache_worth_s=0.1, requests=3),
        InstanceView(id=InstanceId(3), cache_worth_s=0.1),
    ]
    assert Fleet(Bounds()).decide(1.0, instances).leave == (3, 2, 1)


def test_no_more_instances_than_the_bounds_allow() -> None:
    decision = Fleet(Bounds(most=3)).decide_often(12, 20.0, 3)
    assert decision.instances == 3
    assert decision.by == "bounds"
    assert decision.needed > 3


def test_a_schedule_raises_the_least() -> None:
    assert Fleet(Bounds(most=10)).decide(0.1, 1, least=5).instances == 5


def test_requests_that_wait_for_a_model_without_instances_start_one_at_once() -> None:
    assert Fleet(Bounds(least=0), target=0).decide(0.0, 0, waiting=1).instances == 1


def test_without_requests_a_model_without_instances_stays_without() -> None:
    assert Fleet(Bounds(least=0, idle_s=60.0), target=0).decide_often(20, 0.0, 0).instances == 0


def test_the_last_instance_ends_when_there_was_no_request_for_so_long() -> None:
    fleet = Fleet(Bounds(least=0, idle_s=300.0, cool_down_s=30.0))
    fleet.decide_often(6, 1.0, 1)
    assert fleet.decide_often(50, 0.0, 1).instances == 1
    assert fleet.decide_often(40, 0.0, 1).instances == 0


def test_before_its_steps_are_known_a_fleet_is_scaled_by_requests_in_flight() -> None:
    instances = [InstanceView(id=InstanceId(1), requests=30)]
    decision = Fleet(Bounds(most=10), UNKNOWN).decide(1.0, instances, waiting=10)
    assert decision.by == "load"
    assert decision.instances == 5


def test_observed_times_above_the_predicted_ones_take_more_instances() -> None:
    exact, slow = Fleet(Bounds(most=60)), Fleet(Bounds(most=60))
    for _ in range(12):
        last = exact.decide(10.0, 13), slow.decide(10.0, 13, ttft_ratio=1.5)
    assert last[1].needed >= 1.4 * last[0].needed


def test_prompts_that_wait_take_instances_beyond_the_steady_need() -> None:
    steady, behind = Fleet(Bounds(most=60)), Fleet(Bounds(most=60))
    for _ in range(12):
        last = steady.decide(10.0, 13), behind.decide(10.0, 13, waiting=100, waiting_tokens=2_000_000)
    assert last[1].needed > last[0].needed + 2


def test_a_decode_pool_needs_nothing_for_prompts() -> None:
    together, decode = Fleet(Bounds(most=60)), Fleet(Bounds(most=60), pool=Pool("m", Role.DECODE))
    assert decode.decide_often(12, 20.0, 5).needed < together.decide_often(12, 20.0, 5).needed / 4


def test_a_new_planner_goes_on_from_the_target_that_was_decided() -> None:
    assert Fleet(Bounds(most=20), target=9).decide(1.0, 3).instances == 9


def test_instances_that_do_not_come_are_counted_as_missing() -> None:
    fleet = Fleet(Bounds(most=40, startup_s=20.0))
    fleet.decide_often(4, 10.0, 2)
    assert fleet.decide(10.0, 2).missing == 0
    assert fleet.decide_often(20, 10.0, 2).missing > 5


def test_how_long_instances_were_seen_to_take_counts_before_what_was_configured() -> None:
    fleet = Fleet(Bounds(most=40, startup_s=20.0))
    fleet.startup_s = 200.0
    assert fleet.decide_often(24, 10.0, 2).missing == 0
    fleet.startup_s = 0.0
    assert fleet.decide(10.0, 2).missing > 5


def test_what_was_observed_before_counts_from_the_first_decision_on() -> None:
    seen, new = Fleet(Bounds(most=60)), Fleet(Bounds(most=60))
    for rate in range(1, 25):
        seen.observe(rate / 2.0)
    seen.planner.begin(13)
    new.planner.begin(13)
    after, without = seen.decide(12.5, 13), new.decide(12.5, 13)
    assert after.forecast_per_s > 13.0 > without.forecast_per_s, "it knows that the load rises"


def test_a_what_if_corrects_the_formula() -> None:
    class OneInFiveMore:
        def observe(self, view: PoolView) -> None: ...

        def advise(self, view: PoolView, engine: Engine, goals: Goals, forecast_per_s: float, size: Size) -> WhatIfResult:
            return WhatIfResult(ratio=1.2, goodput_share=0.97)

    planner = PoolPlanner(Pool("m"), GOALS, Bounds(most=60), interval_s=5.0, what_if=OneInFiveMore())
    fleet = Fleet(Bounds(most=60))
    plain = fleet.decide_often(12, 10.0, 13)
    fleet.planner, fleet.now = planner, 0.0
    corrected = fleet.decide_often(12, 10.0, 13)
    assert corrected.by == "what-if"
    assert corrected.goodput_share == 0.97
    assert plain.needed < corrected.needed <= 1.25 * plain.needed + 1


class Corrected:
    """Says that the goals take so many times as many instances as the formula says."""

    def __init__(self, ratio: float) -> None:
        self._ratio = ratio

    def observe(self, view: PoolView) -> None: ...

    def advise(self, view: PoolView, engine: Engine, goals: Goals, forecast_per_s: float, size: Size) -> WhatIfResult:
        return WhatIfResult(ratio=self._ratio, goodput_share=0.96)


def test_a_decision_says_how_many_requests_miss_the_goals_with_fewer_instances() -> None:
    decision = Fleet(Bounds(most=40)).decide_often(12, 10.0, 13)
    missed = decision.misses_per_s
    assert len(missed) == decision.needed + 1
    assert missed[0] == pytest.approx(decision.forecast_per_s)
    assert missed[-1] <= 0.05 * decision.forecast_per_s < missed[decision.needed // 2]


def test_where_a_what_if_has_corrected_the_formula_so_many_more_instances_miss_as_much() -> None:
    fleet = Fleet(Bounds(most=40))
    fleet.planner = PoolPlanner(Pool("m"), GOALS, Bounds(most=40), interval_s=5.0, what_if=Corrected(2.0), tells_misses=True)
    corrected, plain = (each.decide_often(12, 10.0, 13) for each in (fleet, Fleet(Bounds(most=40))))
    assert len(corrected.misses_per_s) == corrected.needed + 1 == 2 * plain.needed + 1
    assert corrected.misses_per_s[::2] == pytest.approx(plain.misses_per_s)


def test_before_steps_are_known_each_instance_that_is_missing_loses_as_much() -> None:
    decision = Fleet(Bounds(most=40), UNKNOWN).decide(10.0, [InstanceView(id=InstanceId(1), requests=30)])
    assert decision.by == "load"
    assert decision.misses_per_s == pytest.approx([decision.forecast_per_s * part for part in (1.0, 0.75, 0.5, 0.25, 0.0)])


def test_models_out_of_reach_get_their_least_and_of_the_others_the_one_that_loses_most_gets_the_gpus() -> None:
    tokens = {"long": 8000, "short": 3000, "lost": 60_000}
    fleets = {name: Fleet(Bounds(most=40), pool=Pool(name)) for name in tokens}
    for _ in range(12):
        decisions = {name: fleet.decide(4.0, 1, tokens=tokens[name]) for name, fleet in fleets.items()}
    views = {Pool(name): fleet.view(0.0, 0) for name, fleet in fleets.items()}

    def share(budget: int) -> dict[str, int]:
        shared = share_gpus([*decisions.values()], views, budget, gpus_of=lambda model: 1, least_of=lambda model: 1)
        return {each.pool.model: each.instances for each in shared}

    long, short = decisions["long"].instances, decisions["short"].instances
    assert long > short > 1 and decisions["lost"].instances > long
    assert share(long + short + 1) == {"long": long, "short": short, "lost": 1}
    for budget in range(3, long + short):
        shared = share(budget)
        lost = [
            decisions["long"].misses_per_s[number] + decisions["short"].misses_per_s[budget - 1 - number]
            for number in range(max(1, budget - 1 - short), min(long, budget - 2) + 1)
        ]
        assert decisions["long"].misses_per_s[shared["long"]] + decisions["short"].misses_per_s[shared["short"]] == min(lost)
