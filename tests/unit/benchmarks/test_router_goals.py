"""`benchmarks.router_goals`: goals where prompts take longer than the goal."""

from __future__ import annotations

import pytest

from benchmarks.router_goals import LOADS, MODES, Outcome, replayed
from dynamo.local.replay.config import ReplayMode

REQUESTS = 400


def outcomes(load: str, rate: float) -> tuple[float, Outcome]:
    """Return the goodput of the better of the modes that ignore caches, and the outcome of the mode `kv`."""
    *others, kv = (replayed((load, rate, mode, 0), REQUESTS, None) for mode in MODES)
    return max(other.goodput for other in others), kv


@pytest.mark.parametrize("load", LOADS)
def test_one_seed_makes_one_load_whose_requests_are_in_order(load: str) -> None:
    rows, again, others = (LOADS[load](6.0, 200, seed) for seed in (0, 0, 1))
    assert rows == again != others
    assert [row.timestamp for row in rows] == sorted(row.timestamp for row in rows)


@pytest.mark.parametrize("rate", [3.0, 12.0])
@pytest.mark.parametrize("load", ["cold", "cleared"])
def test_a_fleet_whose_caches_are_empty_warms_up_though_no_prompt_reaches_the_goal_then(load: str, rate: float) -> None:
    better, kv = outcomes(load, rate)
    assert kv.goodput > better
    assert kv.refused < 0.25


def test_prompts_that_never_reach_the_goal_are_served_and_cost_the_others_little() -> None:
    better, kv = outcomes("one long", 6.0)
    assert kv.long == REQUESTS / 100
    assert kv.goodput > better
    assert kv.goodput > 0.95 * replayed(("without it", 6.0, ReplayMode.KV, 0), REQUESTS, None).goodput
