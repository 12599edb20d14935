"""`dynamo-local replay [TRACE] [FLAGS]`: how a trace of requests would fare with several router modes.

dynamo-local replay trace.jsonl --modes round-robin,kv --workers 8 --plot replay.png
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

import msgspec

from dynamo.common.config import ConfigError, exit_with, load
from dynamo.common.errors import InvalidRequest
from dynamo.local.replay.config import ReplayConfig
from dynamo.local.replay.figures import Figures, Summary, summary, table
from dynamo.local.replay.fleet import Replay
from dynamo.local.replay.planned import Course, PlannedFleet, planner_of
from dynamo.local.replay.trace import Row, Workload, read_trace, synthesise

PROGRAM = "dynamo-local replay"
_DESCRIPTION = (
    "dynamo-local replay [TRACE] [FLAGS]: replays a trace in Mooncake's format, or a made-up one of the same shape, against "
    "simulated workers in virtual time, and compares router modes. All options of a frontend's router may be given, too."
)
_MADE_UP_REQUESTS = 1000


def replay(
    trace: Path | None, config: ReplayConfig, courses: dict[str, Course] | None = None
) -> dict[str, tuple[Figures, Summary]]:
    """Return what each mode did. With a planner, `courses` gets what happened as time went on, by mode.

    Raises InvalidRequest for a file that cannot be used.
    """
    rows = _made_up(config) if trace is None else read_trace(trace, config.requests)
    results: dict[str, tuple[Figures, Summary]] = {}
    for mode in config.modes:
        if config.planner:
            fleet = PlannedFleet(config, planner_of(config, mode))
            figures = fleet.run(rows, mode)
            if courses is not None:
                courses[mode.value] = fleet.course
        else:
            figures = Replay(rows, mode, config).run()
        results[mode.value] = (figures, summary(figures))
    return results


def _made_up(config: ReplayConfig) -> list[Row]:
    requests, options = config.requests or _MADE_UP_REQUESTS, config.workload
    if not options.groups:
        return synthesise(requests, config.seed)
    workload = Workload(
        groups=options.groups,
        prefix_blocks=options.prefix_blocks,
        own_blocks=options.own_blocks,
        output_tokens=options.output_tokens,
        skew=options.skew,
        arrivals_per_s=options.arrivals,
    )
    return workload.rows(requests, config.seed)


def _replay_once(trace: Path | None, config: ReplayConfig) -> None:
    courses: dict[str, Course] = {}
    results = replay(trace, config, courses)
    summaries = {mode: each for mode, (_, each) in results.items()}
    if config.json:
        print(msgspec.json.encode(summaries).decode())
    else:
        print("\n".join(table(summaries)))
    if config.plot is not None:
        from dynamo.local.replay.plot import draw, draw_courses  # matplotlib is not always there

        if courses:
            draw_courses(courses, config, config.plot)
        else:
            draw(results, config.plot)


def _replay_at_rates(trace: Path | None, config: ReplayConfig) -> None:
    by_rate: dict[float, dict[str, Summary]] = {}
    for rate in config.rates:
        results = replay(trace, dataclasses.replace(config, rate=rate))
        by_rate[rate] = {mode: each for mode, (_, each) in results.items()}
    if config.json:
        print(msgspec.json.encode({f"{rate:g}": summaries for rate, summaries in by_rate.items()}).decode())
    else:
        rows = {f"{mode}, rate {rate:g}": each for rate, summaries in by_rate.items() for mode, each in summaries.items()}
        print("\n".join(table(rows)))
    if config.plot is not None:
        from dynamo.local.replay.plot import draw_rates  # matplotlib is not always there

        draw_rates(list(by_rate.values()), config.plot)


def _check_planning(config: ReplayConfig) -> None:
    """Raise ConfigError for options that contradict each other."""
    planning = config.planning
    if planning.min_instances > planning.max_instances:
        raise ConfigError(
            f"--planner-min-instances {planning.min_instances} is above --planner-max-instances {planning.max_instances}"
        )
    if not planning.min_instances <= config.workers <= planning.max_instances:
        raise ConfigError(
            f"--workers {config.workers}, the number at the start, is not between --planner-min-instances "
            f"{planning.min_instances} and --planner-max-instances {planning.max_instances}"
        )


def main(arguments: Sequence[str]) -> NoReturn:
    trace = Path(arguments[0]) if arguments and not arguments[0].startswith("-") else None
    flags = arguments if trace is None else arguments[1:]
    try:
        config = load(ReplayConfig, flags, os.environ, program=PROGRAM, description=_DESCRIPTION)
        if config.plot is not None and find_spec("matplotlib") is None:
            raise ConfigError("--plot needs matplotlib: pip install 'dynamo-serving[plot]'")
        if config.planner:
            _check_planning(config)
        if config.rates:
            _replay_at_rates(trace, config)
        else:
            _replay_once(trace, config)
    except (ConfigError, InvalidRequest, OSError, ValueError) as error:
        exit_with(PROGRAM, error)
    sys.exit(0)
