"""The options of a planner, and which of them contradict each other."""

from __future__ import annotations

import pytest

from dynamo.common.config import ConfigError, load
from dynamo.planner.config import PlannerConfig


def read(*flags: str, **variables: str) -> PlannerConfig:
    return load(PlannerConfig, flags, variables, program="dynamo-planner")


def test_goals_are_given_in_milliseconds_and_used_in_seconds() -> None:
    goals = read("--ttft-ms", "3000", "--itl-ms", "40", "--goodput-share", "0.9").goals_of_requests
    assert (goals.ttft_s, goals.itl_s, goals.share) == (3.0, 0.04, 0.9)


def test_a_model_may_have_bounds_of_its_own() -> None:
    bounds = read("--min-instances", "1", "--max-instances", "4", "--instances", "chat=2:8").bounds
    assert [(bounds.bounds_of(model).least, bounds.bounds_of(model).most) for model in ("chat", "other")] == [(2, 8), (1, 4)]


def test_with_an_idle_timeout_the_least_instances_are_those_of_a_model_that_is_used() -> None:
    bounds = read("--min-instances", "2", "--idle-timeout", "600").bounds
    assert (bounds.bounds_of("chat").least, bounds.bounds_of("chat").idle_s, bounds.least_of("chat")) == (0, 600.0, 2)


def test_gpus_of_an_instance_are_those_of_its_model_or_of_all_others() -> None:
    bounds = read("--gpus-per-instance", "2", "--gpus-per-instance", "large=8").bounds
    assert [bounds.gpus_of(model) for model in ("large", "small")] == [8, 2]
    assert read().bounds.gpus_of("large") == 1


def test_schedules_may_be_given_several_times_and_in_one_variable() -> None:
    flags = read("--schedule", "mon 08:00-18:00 UTC 4", "--schedule", "chat=tue 08:00-18:00 UTC 2")
    variable = read(DYN_PLANNER_SCHEDULE="mon 08:00-18:00 UTC 4;chat=tue 08:00-18:00 UTC 2")
    assert list(map(str, flags.bounds.schedules)) == ["mon 08:00-18:00 UTC 4", "chat=tue 08:00-18:00 UTC 2"]
    assert variable.bounds == flags.bounds


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--min-instances", "9"], "--min-instances 9 is more than --max-instances 8"),
        (["--instances", "chat=5:2"], "asks for at least 5 and at most 2 instances"),
        (["--instances", "chat=5"], "is not of the form MODEL=LEAST:MOST"),
        (["--instances", "chat=1:2", "--instances", "chat=1:3"], "--instances is given twice for one model"),
        (["--schedule", "mon 08:00-18:00 UTC 9"], "asks for more than the most instances, 8"),
        (["--instances", "chat=1:2", "--schedule", "chat=mon 08:00-18:00 UTC 3"], "asks for more than the most instances, 2"),
        (["--gpu-budget", "7", "--gpus-per-instance", "4", "--instances", "chat=2:8"], "--gpu-budget 7 is less than"),
        (["--gpu-budget", "3", "--gpus-per-instance", "4"], "--gpu-budget 3 is less than"),
        (["--gpus-per-instance", "chat=0"], "--gpus-per-instance must be at least 1"),
        (["--gpus-per-instance", "chat=many"], "is neither a number nor of the form MODEL=NUMBER"),
        (["--model", "chat", "--instances", "chad=1:2"], "bounds are given for chad, which no --model names"),
        (["--ttft-ms", "0"], "--ttft-ms"),
        (["--goodput-share", "1.5"], "--goodput-share"),
        (["--interval", "0"], "--interval"),
    ],
)
def test_options_that_cannot_be_met_together_stop_the_start_with_a_sentence(flags: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        read(*flags)
