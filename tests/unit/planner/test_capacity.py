"""The formula for the number of instances."""

from __future__ import annotations

import math

import pytest

from dynamo.frontend.router.cost.step_model import StepTimes
from dynamo.planner.capacity import Demand, engine_seconds, missed_share, size, waiting_share
from dynamo.planner.pools import Engine, Goals

TYPICAL = StepTimes(base=6e-3, token=0.125e-3, sequence=0.35e-3, block=0.0, output_tokens=150.0)
ENGINE = Engine(times=TYPICAL, observations=100, block_size=16, total_blocks=100_000, max_num_seqs=256, max_batched_tokens=8192)
LONG = Demand(requests_per_s=24.0, computed_tokens=8000.0, prompt_tokens=8000.0, output_tokens=150.0, variation=0.0)


def test_a_request_takes_the_time_of_its_prompt_and_of_its_output() -> None:
    assert engine_seconds(LONG, ENGINE) == pytest.approx(8000 * 0.125e-3 + 150 * 0.35e-3)


def test_blocks_that_a_request_holds_cost_time_for_each_token() -> None:
    times = StepTimes(base=6e-3, token=0.0, sequence=0.0, block=1e-6, output_tokens=100.0)
    engine = Engine(times=times, observations=1, block_size=16)
    demand = Demand(requests_per_s=1.0, prompt_tokens=1550.0, output_tokens=100.0)
    assert engine_seconds(demand, engine) == pytest.approx(100 * 1e-6 * 100)


def test_without_requests_none_is_needed() -> None:
    assert size(Demand(requests_per_s=0.0), ENGINE, Goals(ttft_s=3.0), 8).instances == 0


def test_instances_are_at_least_the_work_and_leave_room() -> None:
    sized = size(LONG, ENGINE, Goals(), 100)
    assert sized.engine_seconds == pytest.approx(24 * 1.0525)
    assert sized.instances == math.ceil(24 * 1.0525 / 0.85)
    assert sized.bound == "work"


def test_a_shorter_goal_for_the_first_token_takes_more_instances() -> None:
    loose, tight = (size(LONG, ENGINE, Goals(ttft_s=goal_s, share=0.99), 200) for goal_s in (5.0, 1.1))
    assert tight.instances > loose.instances
    assert tight.bound == "ttft"


def test_a_goal_between_tokens_bounds_the_share_of_time_that_work_takes() -> None:
    demand = Demand(requests_per_s=100.0, computed_tokens=100.0, prompt_tokens=100.0, output_tokens=100.0)
    sized = size(demand, ENGINE, Goals(itl_s=0.01), 200)
    taken = 100.0 * engine_seconds(demand, ENGINE)
    assert sized.bound == "itl"
    assert sized.instances == math.ceil(taken / (1 - 6e-3 / 0.01))


def test_requests_that_run_fit_into_the_cache() -> None:
    engine = Engine(times=TYPICAL, observations=1, block_size=16, total_blocks=1000, max_num_seqs=256, max_batched_tokens=8192)
    assert size(LONG, engine, Goals(), 200).bound == "blocks"


def test_no_more_requests_run_than_the_engine_takes() -> None:
    demand = Demand(requests_per_s=100.0, prompt_tokens=10.0, computed_tokens=10.0, output_tokens=200.0)
    engine = Engine(times=TYPICAL, observations=1, max_num_seqs=2)
    sized = size(demand, engine, Goals(), 1000)
    assert sized.bound == "sequences"
    assert sized.instances > size(demand, ENGINE, Goals(), 1000).instances


def test_head_room_makes_every_time_longer() -> None:
    assert size(LONG, ENGINE, Goals(), 100, headroom=1.5).instances == math.ceil(1.5 * 24 * 1.0525 / 0.85)


def test_prompts_that_wait_already_take_instances_of_their_own() -> None:
    waiting = Demand(
        requests_per_s=24.0,
        computed_tokens=8000.0,
        prompt_tokens=8000.0,
        output_tokens=150.0,
        variation=0.0,
        backlog_tokens=80_000.0,
    )
    assert size(waiting, ENGINE, Goals(), 100).instances == math.ceil((24 * 1.0525 + 10.0) / 0.85)


def test_a_need_beyond_the_most_is_one_more_than_it() -> None:
    assert size(LONG, ENGINE, Goals(), 5).instances >= 6


def test_a_goal_that_no_instance_can_meet_is_named_with_what_one_can_do() -> None:
    first = size(LONG, ENGINE, Goals(ttft_s=0.5), 200).reachable
    between = size(LONG, ENGINE, Goals(itl_s=0.001), 200).reachable
    assert "8000 tokens" in first and "set a longer goal" in first
    assert "a token every" in between and "faster engines" in between


def test_a_goal_that_no_instance_can_meet_does_not_ask_for_all_instances() -> None:
    assert size(LONG, ENGINE, Goals(ttft_s=0.5), 1000).instances < 60


@pytest.mark.parametrize(("servers", "offered", "share"), [(1, 0.5, 0.5), (2, 1.0, 1 / 3), (10, 8.0, 0.4092)])
def test_the_share_that_waits_is_erlangs(servers: int, offered: float, share: float) -> None:
    assert waiting_share(servers, offered) == pytest.approx(share, abs=1e-4)


def test_the_share_that_misses_the_goals_falls_with_each_instance_to_what_may_miss_them() -> None:
    goals = Goals(ttft_s=3.0, itl_s=0.1)
    enough = size(LONG, ENGINE, goals, 100).instances
    shares = [missed_share(number, LONG, ENGINE, goals) for number in range(enough + 1)]
    assert shares[0] == 1.0
    assert shares == sorted(shares, reverse=True)
    assert shares[enough // 2] == pytest.approx(0.5, abs=0.15)
    assert shares[enough] <= 1.0 - goals.share < shares[enough - 2]


def test_goals_that_no_instance_reaches_are_missed_with_any_number() -> None:
    assert missed_share(100, LONG, ENGINE, Goals(ttft_s=0.5)) == 1.0


def test_without_goals_what_is_too_much_work_is_missed() -> None:
    sized = size(LONG, ENGINE, Goals(), 100)
    assert missed_share(sized.instances, LONG, ENGINE, Goals()) == 0.0
    assert missed_share(sized.instances // 2, LONG, ENGINE, Goals()) == pytest.approx(0.5, abs=0.06)
