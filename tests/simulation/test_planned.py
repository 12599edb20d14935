"""`dynamo-local replay --planner`: a planner decides how many simulated workers there are, in virtual time."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.planner import plain
from dynamo.frontend.config import KvRouterOptions, QueueOptions, RouterOptions
from dynamo.local.replay.command import main
from dynamo.local.replay.config import PlanningOptions, ReplayConfig, ReplayMode
from dynamo.local.replay.fleet import Replay
from dynamo.local.replay.planned import Course, PlannedFleet, planner_of
from dynamo.local.replay.trace import Row, Workload
from dynamo.planner.pools import Decision, PoolView

SAMPLE = Path(__file__).parents[2] / "examples" / "trace.jsonl"
GOALS = RouterOptions(kv=KvRouterOptions(ttft_goal_s=3.0, itl_goal_s=0.1))
PLANNING = PlanningOptions(max_instances=12, startup_s=30.0, whatif_cpu=0.02)
CONFIG = ReplayConfig(workers=2, router=GOALS, planner=True, planning=PLANNING)


class Scripted:
    """Decides what a test says."""

    def __init__(self, number: Callable[[float], int]) -> None:
        self._number = number
        self.serving: list[tuple[float, int]] = []

    def decide(self, view: PoolView, ttft_s: Sequence[float]) -> Decision:
        self.serving.append((view.now, len(view.instances)))
        leave = tuple(instance.id for instance in view.instances)
        return Decision(pool=view.pool, instances=self._number(view.now), leave=leave, by="script")


def swinging(seconds: float) -> list[Row]:
    """Return prompts of 8,000 tokens at 0.5 to 5 requests per second and back within ten minutes."""
    return plain(lambda at: 2.75 - 2.25 * math.cos(2 * math.pi * at / 600), 5.0, seconds, 1, 16, lambda at: 100.0)


def steady(rate: float, seconds: float) -> list[Row]:
    return plain(lambda at: rate, rate, seconds, 1, 16, lambda at: 100.0)


@pytest.mark.slow  # a history of twenty minutes
def test_a_swinging_load_reaches_its_goals_with_fewer_instances_than_a_fixed_number_does() -> None:
    rows = swinging(1200.0)
    planned = PlannedFleet(CONFIG, planner_of(CONFIG, ReplayMode.KV)).run(rows, ReplayMode.KV)
    assert planned.good.total() / planned.requests > 0.9
    fewer = math.floor(planned.instance_s / planned.virtual_s)
    fixed = Replay(rows, ReplayMode.KV, replace(CONFIG, workers=fewer)).run()
    assert fixed.good.total() < planned.good.total()


@pytest.mark.slow  # two histories
def test_what_ifs_route_as_the_replay_does() -> None:
    """Prompts share long prefixes, which round-robin computes anew on each worker."""
    workload = Workload(groups=40, prefix_blocks=36, own_blocks=2, output_tokens=100, skew=0.0, arrivals_per_s=4.0)
    rows = workload.rows(1000, 1)
    costs = [
        PlannedFleet(CONFIG, planner_of(CONFIG, mode)).run(rows, ReplayMode.KV).instance_s
        for mode in (ReplayMode.KV, ReplayMode.ROUND_ROBIN)
    ]
    assert costs[0] < 0.9 * costs[1]


def test_a_new_worker_serves_after_its_start_up_time_and_costs_from_the_decision_on() -> None:
    scripted = Scripted(lambda now: 2 if now < 100.0 else 5)
    fleet = PlannedFleet(CONFIG, scripted)
    fleet.run(steady(1.0, 200.0), ReplayMode.KV)
    serving = dict(scripted.serving)
    assert (serving[125.0], serving[135.0]) == (2, 5)
    assert list(fleet.course.paid)[19:21] == [2, 5]


def test_a_worker_that_is_to_end_completes_its_requests() -> None:
    rows = steady(2.0, 120.0)
    fleet = PlannedFleet(CONFIG, Scripted(lambda now: 4 if now < 60.0 else 1))
    figures = fleet.run(rows, ReplayMode.ROUND_ROBIN)
    assert figures.rejected == 0
    assert len(figures.e2e_s) == len(rows)


def test_a_worker_that_is_not_wanted_any_more_never_serves() -> None:
    scripted = Scripted(lambda now: 5 if now == 50.0 else 2)
    PlannedFleet(CONFIG, scripted).run(steady(1.0, 150.0), ReplayMode.KV)
    assert {number for _, number in scripted.serving} == {2}


def test_requests_wait_while_there_is_no_worker() -> None:
    config = replace(
        CONFIG, router=RouterOptions(), queue=QueueOptions(size=100), planning=replace(CONFIG.planning, min_instances=0)
    )
    rows = [Row(20_000.0, 10, [1]), Row(60_000.0, 10, [1])]
    fleet = PlannedFleet(config, Scripted(lambda now: 0 if now < 30.0 else 1))
    figures = fleet.run(rows, ReplayMode.KV)
    assert len(figures.ttft_s) == 2
    assert 40.0 <= max(figures.ttft_s) < 41.0


def test_the_longest_loss_counts_windows_of_arrivals_in_a_row_whose_share_is_too_low() -> None:
    course = Course()
    for at, reached in [(1.0, 1), (12.0, 0), (25.0, 0), (26.0, 1), (47.0, 0), (52.0, 1), (61.0, 0), (33.0, 1)]:
        course.arrived_s.append(at)
        course.reached.append(reached)
    assert course.longest_loss_s(0.9) == 20.0, "from 10 to 30 s; then one window reaches it"
    assert course.longest_loss_s(0.5) == 10.0
    assert course.longest_loss_s(0.0) == 0.0


@pytest.mark.slow  # a history of ten minutes
def test_a_step_of_the_load_loses_the_goal_for_little_longer_than_a_start_up() -> None:
    fleet = PlannedFleet(CONFIG, planner_of(CONFIG, ReplayMode.KV))
    fleet.run(plain(lambda at: 5.0 if at > 240.0 else 0.5, 5.0, 600.0, 3, 16, lambda at: 100.0), ReplayMode.KV)
    assert 0.0 < fleet.course.longest_loss_s(0.9) <= CONFIG.planning.startup_s + 30.0


def test_the_command_prints_goodput_cost_and_changes(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--planner", "--modes", "kv", "--workers", "2", "--planner-max-instances", "6", "--ttft-goal", "3", "--json"]
    with pytest.raises(SystemExit) as ended:
        main([str(SAMPLE), *flags])
    assert ended.value.code == 0
    printed = json.loads(capsys.readouterr().out)["kv"]
    assert 0.0 < printed["goodput_share"] <= 1.0
    assert printed["instance_hours"] > 0.0
    assert printed["scaling_events"] >= 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--planner-min-instances", "9", "--planner-max-instances", "3"], "--planner-min-instances 9 is above"),
        (["--workers", "8", "--planner-max-instances", "3"], "--workers 8, the number at the start, is not between"),
    ],
)
def test_bounds_that_contradict_each_other_are_refused(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([str(SAMPLE), "--planner", *flags])
    assert ended.value.code not in (0, None)
    assert message in capsys.readouterr().err
