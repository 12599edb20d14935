"""Searches for the least number of instances that holds the goals."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
from msgspec.structs import replace

from dynamo.common.errors import DynamoError
from dynamo.common.model_card import Role
from dynamo.common.scaling.demand import ArrivalSample
from dynamo.common.scaling.pool import Pool
from dynamo.frontend.config import RouterMode, RouterOptions
from dynamo.frontend.router.cost.step_model import StepTimes
from dynamo.planner.capacity import Size
from dynamo.planner.decide import WhatIfResult
from dynamo.planner.pools import Arrivals, Engine, Goals, PoolView
from dynamo.planner.whatif.advisor import Advisor, levelled

TIMES = StepTimes(base=6e-3, token=0.125e-3, sequence=0.35e-3, block=0.0, output_tokens=50.0)
ENGINE = Engine(times=TIMES, observations=9, block_size=16, total_blocks=20_000, max_num_seqs=256, max_batched_tokens=8192)
GOALS = Goals(ttft_s=3.0, itl_s=0.1)


def view(now: float, rate: float, *, weight: float = 1.0, seconds: float = 60.0, endless: float = 0.0) -> PoolView:
    """Return a view with the samples of so many seconds, prompts of 4,000 tokens that take half a second each.

    A share of `endless` has prompts that take longer than the goal.
    """
    rng = random.Random(1)
    samples = [
        ArrivalSample(age_s=rng.uniform(0.0, seconds), weight=weight, prompt_tokens=28_000 if rng.random() < endless else 4000)
        for _ in range(int(rate * seconds / weight))
    ]
    return PoolView(pool=Pool("m"), now=now, arrivals=Arrivals(seconds=seconds), engine=ENGINE, samples=samples)


def advise(
    advisor: Advisor, seen: PoolView, rate: float, instances: int, *, engine: Engine = ENGINE, goals: Goals = GOALS
) -> WhatIfResult | None:
    size = Size(instances=instances, engine_seconds=rate * 0.5175, bound="work")
    advisor.observe(seen)
    return advisor.advise(seen, engine, goals, rate, size)


LONG_OUTPUTS = replace(ENGINE, times=replace(TIMES, output_tokens=500.0))


def test_prefill_instances_are_tried_with_prompts_alone() -> None:
    """Outputs of 500 tokens and a goal between tokens that a batch with prompts cannot hold are for other instances to reach."""
    results = {
        role: advise(Advisor(role=role), view(60.0, 5.0), 5.0, 3, engine=LONG_OUTPUTS, goals=Goals(ttft_s=3.0, itl_s=0.007))
        for role in (Role.PREFILL, Role.AGGREGATED)
    }
    prefill, aggregated = results[Role.PREFILL], results[Role.AGGREGATED]
    assert prefill is not None and aggregated is not None
    assert (prefill.reachable_share, prefill.goodput_share >= GOALS.share) == (1.0, True)
    assert prefill.ratio <= 5 / 3
    assert aggregated.reachable_share < 0.5


def test_decode_instances_are_tried_with_prompts_that_are_computed() -> None:
    """About `5 · 500 · 10 ms` = 25 requests run. With 6 ms + 0.35 ms for each, 11 of them on an instance get a token in 10 ms."""
    decode = Advisor(role=Role.DECODE)
    goals = Goals(ttft_s=0.2, itl_s=0.01)  # prompts take half a second
    for number in range(6):
        result = advise(decode, view(60.0 + 60.0 * number, 5.0), 5.0, 6, engine=LONG_OUTPUTS, goals=goals)
        assert result is not None
        assert result.goodput_share >= GOALS.share
    assert 3 / 6 <= result.ratio <= 5 / 6


@pytest.mark.parametrize(("sharers", "searches"), [(1, 2), (100, 1)])
def test_the_share_of_the_cpu_is_divided_among_those_that_use_it(sharers: int, searches: int) -> None:
    seconds = iter(range(100))
    advisor = Advisor(cpu_share=0.1, sharers=lambda: sharers, cpu_clock=lambda: float(next(seconds)))  # a search takes a second
    for now in (60.0, 90.0):
        advise(advisor, view(now, 5.0), 5.0, 4)
    assert advisor.searches == searches


def test_too_few_instances_by_the_formula_are_raised_until_the_goals_are_held() -> None:
    result = advise(Advisor(), view(60.0, 5.0), 5.0, 3)
    assert result is not None
    assert result.goodput_share >= GOALS.share
    assert 1.0 < result.ratio <= 5 / 3


def test_requests_that_reach_the_goals_with_no_number_of_instances_ask_for_no_more_of_them() -> None:
    advisor = Advisor()
    ratios: list[float] = []
    for number in range(8):
        result = advise(advisor, view(60.0 + 60.0 * number, 5.0, endless=0.12), 5.0, 8)
        assert result is not None
        ratios.append(result.ratio)
    assert result.reachable_share < GOALS.share
    assert result.goodput_share >= GOALS.share * result.reachable_share - 0.03
    assert ratios[-1] < 2.0, "and not the most that a search may ask for"


def test_too_many_instances_by_the_formula_are_lowered() -> None:
    result = advise(Advisor(), view(60.0, 5.0), 5.0, 8)
    assert result is not None
    assert result.goodput_share >= GOALS.share
    assert result.ratio <= 5 / 8


def test_the_arrivals_are_played_at_the_rate_that_is_forecast() -> None:
    advisor = Advisor()
    result = advise(advisor, view(60.0, 5.0), 10.0, 6)
    assert result is not None
    assert result.ratio > 1.0


def test_samples_that_stand_for_several_requests_are_played_on_a_smaller_fleet() -> None:
    result = advise(Advisor(), view(60.0, 20.0, weight=4.0), 20.0, 16)
    assert result is not None
    assert 0.6 < result.ratio < 1.3


@pytest.mark.parametrize(("rate", "forecast"), [(0.5, 0.5), (5.0, 100.0)], ids=["few requests", "too short a time"])
def test_too_little_to_judge_by_gives_no_advice(rate: float, forecast: float) -> None:
    assert advise(Advisor(), view(60.0, rate), forecast, 8) is None


def test_the_next_search_waits_until_the_last_one_is_paid_for() -> None:
    ticks: Iterator[float] = iter([0.0, 6.0, 6.0, 12.0])
    advisor = Advisor(cpu_share=0.1, cpu_clock=lambda: next(ticks))
    for now in (60.0, 90.0, 119.0):
        advise(advisor, view(now, 5.0), 5.0, 4)
    assert advisor.searches == 1
    advise(advisor, view(120.0, 5.0), 5.0, 4)
    assert advisor.searches == 2
    assert advisor.cpu_s == 12.0


def test_old_advice_is_none() -> None:
    advisor = Advisor()
    assert advise(advisor, view(60.0, 5.0), 5.0, 4) is not None
    assert advise(advisor, view(1000.0, 0.0), 5.0, 4) is None


def test_without_a_share_of_cpu_nothing_is_tried() -> None:
    assert advise(Advisor(cpu_share=0.0), view(60.0, 5.0), 5.0, 4) is None


def test_prompts_longer_than_any_context_are_played_as_long_ones() -> None:
    seen = view(60.0, 1.0)
    endless = PoolView(
        pool=seen.pool,
        now=seen.now,
        arrivals=seen.arrivals,
        engine=ENGINE,
        samples=[ArrivalSample(age_s=float(age), weight=1.0, prompt_tokens=1 << 60) for age in range(60)],
    )
    result = advise(Advisor(), endless, 1.0, 3)
    assert result is not None
    assert result.goodput_share == 0.0


def test_a_rise_within_the_history_is_made_even_and_short_bunches_are_kept() -> None:
    rng = random.Random(1)
    rise = sorted(100.0 * rng.random() ** 0.5 for _ in range(1000))
    even = levelled(rise, 50.0)
    firsts = sum(at < 25.0 for at in even)
    assert even == sorted(even)
    assert 430 < firsts < 570
    bunches = [20.0 * number + (0.0 if each < 9 else 19.9) for number in range(5) for each in range(10)]
    assert max(levelled(bunches, 100.0)[:9]) < 1.0


def test_decisions_go_on_with_the_last_advice_while_a_search_runs() -> None:
    started: list[Callable[[], None]] = []
    advisor = Advisor(start=started.append)
    assert advise(advisor, view(60.0, 5.0), 5.0, 3) is None
    assert advise(advisor, view(90.0, 5.0), 5.0, 3) is None
    [search] = started
    search()
    assert advise(advisor, view(95.0, 5.0), 5.0, 3) is not None
    assert advisor.searches == 1


def test_after_a_search_that_failed_there_is_another_one() -> None:
    started: list[Callable[[], None]] = []
    advisor = Advisor(RouterOptions(mode=RouterMode.DIRECT), start=started.append)
    advise(advisor, view(60.0, 5.0), 5.0, 3)
    with pytest.raises(DynamoError):
        started.pop()()
    advise(advisor, view(100.0, 5.0), 5.0, 3)
    assert len(started) == 1
