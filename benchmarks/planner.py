"""What a planner reaches and costs under loads that change, beside other ways to choose the number of instances; in virtual time.

    python -m benchmarks.planner
    python -m benchmarks.planner --loads sinus step --ways planner fixed --hours 0.5
    python -m benchmarks.planner --loads sinus --plot docs/pictures/planner.png

Instances compute 8,000 prompt tokens per second and start in 60 s; there are at most 48. The goals are 3 s to the first token and
0.1 s between tokens, and the router is `kv` with these goals.

- `sinus`: 1 to 24 requests/s and back in 20 minutes, prompts of 8,000 tokens, answers of 150.
- `step`: 2 to 20 requests/s after a quarter of an hour, and back after another one.
- `bursts`: 4 requests/s, and 16 for a minute of each quarter of an hour.
- `longer`: 10 requests/s of 1,000 tokens; half way, answers of 300 tokens become twice as long.
- `conversation`, `synthetic`: Mooncake's traces (`--traces FOLDER`), as a day of `--hours` with a peak of eight times its night.

Ways: `planner`; `formula`, the planner without what-ifs; `fixed`, the least number of instances of those tried that reaches a
goodput of 0.9, or the best; `keda`, the rule of `deploy/keda/workers.yaml`; `averages`, the peer's formula: demand as completed
requests per 180 s, by the mean lengths of prompts and answers.

Shown are the share of requests within the goals, the share refused, instance hours, how often the number changed, the longest
time in which no ten seconds of arrivals had a goodput of 0.9, and the median of the measured time to first token as a multiple of
the router's prediction.
"""

from __future__ import annotations

import argparse
import math
import random
from bisect import bisect
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import accumulate, product
from pathlib import Path

import msgspec

from benchmarks.measuring import table
from dynamo.frontend.config import KvRouterOptions, RouterOptions
from dynamo.local.replay.config import PlanningOptions, ReplayConfig, ReplayMode
from dynamo.local.replay.figures import Figures, summary
from dynamo.local.replay.fleet import Replay
from dynamo.local.replay.planned import PlannedFleet, Scaler, planner_of
from dynamo.local.replay.plot import draw_courses
from dynamo.local.replay.trace import Row, read_trace
from dynamo.planner.pools import Decision, PoolView

TTFT_GOAL_S, ITL_GOAL_S = 3.0, 0.1
MOST = 48
TRACES = {"conversation": "mooncake_conversation_trace.jsonl", "synthetic": "mooncake_synthetic_trace.jsonl"}
WAYS = ("planner", "formula", "fixed", "keda", "averages")
_FIXED = (1, 2, 3, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30, 34, 38, 42, 48)
_ENOUGH = 0.9


class Result(msgspec.Struct, frozen=True):
    way: str
    goodput_share: float
    refused_share: float
    instance_hours: float
    events_per_h: float
    lost_s: float | None
    """None: not measured, since nothing decides how many instances there are."""
    ttft_ratio: float


def arrivals(rate: Callable[[float], float], most: float, seconds: float, rng: random.Random) -> Iterator[float]:
    """Yield the times of requests that arrive at random, at a rate that changes and is never above `most`."""
    at = rng.expovariate(most)
    while at < seconds:
        if rng.random() * most < rate(at):
            yield at
        at += rng.expovariate(most)


def plain(
    rate: Callable[[float], float], most: float, seconds: float, seed: int, blocks: int, output: Callable[[float], float]
) -> list[Row]:
    """Return requests whose prompts have nothing in common."""
    rng = random.Random(seed)
    rows: list[Row] = []
    for number, at in enumerate(arrivals(rate, most, seconds, rng)):
        ids = range(number * blocks, (number + 1) * blocks)
        rows.append(Row(at * 1e3, 1 + int(rng.expovariate(1.0 / output(at))), list(ids)))
    return rows


def of_a_day(trace: Sequence[Row], seconds: float, seed: int) -> list[Row]:
    """Return the requests of a trace, twice as many, in their order, at the rate of a day."""
    rng = random.Random(seed)
    shift = 1 + max(block for row in trace for block in row.hash_ids)
    again = [Row(row.timestamp, row.output_length, [block + shift for block in row.hash_ids]) for row in trace]
    rows = [*trace, *again]
    weights = [1.0 - 0.78 * math.cos(2 * math.pi * (number + 0.5) / 1000) for number in range(1000)]
    reached = list(accumulate(weights))
    times = sorted(seconds * (bisect(reached, rng.random() * reached[-1]) + rng.random()) / 1000 for _ in rows)
    return [Row(at * 1e3, row.output_length, row.hash_ids) for at, row in zip(times, rows, strict=True)]


def load_of(name: str, seconds: float, traces: Path, seed: int) -> list[Row]:
    match name:
        case "sinus":
            return plain(lambda at: 12.5 - 11.5 * math.cos(2 * math.pi * at / 1200), 24.0, seconds, seed, 16, lambda at: 150.0)
        case "step":
            return plain(lambda at: 20.0 if at % 1800 > 900 else 2.0, 20.0, seconds, seed, 16, lambda at: 150.0)
        case "bursts":
            return plain(lambda at: 16.0 if 600 < at % 900 < 660 else 4.0, 16.0, seconds, seed, 16, lambda at: 150.0)
        case "longer":
            return plain(lambda at: 10.0, 10.0, seconds, seed, 2, lambda at: 300.0 if at < seconds / 2 else 600.0)
        case _:
            return of_a_day(read_trace(traces / TRACES[name]), seconds, seed)


class KedaRule:
    """What KEDA and the autoscaler behind it make of `deploy/keda/workers.yaml`."""

    def __init__(self, least: int, most: int) -> None:
        self._least, self._most = least, most
        self._ttft: list[tuple[float, float]] = []
        self._wanted: list[tuple[float, int]] = []
        self._target = least
        self._polled_at = -math.inf
        self._raised: list[tuple[float, int]] = []
        self._lowered_at = -math.inf

    def decide(self, view: PoolView, ttft_s: Sequence[float]) -> Decision:
        now = view.now
        self._ttft = [each for each in self._ttft if each[0] > now - 120.0] + [(now, each) for each in ttft_s]
        if now - self._polled_at >= 15.0:
            self._polled_at = now
            self._poll(view, now)
        leave = tuple(instance.id for instance in view.instances)
        return Decision(pool=view.pool, instances=self._target, leave=leave, by="keda")

    def _poll(self, view: PoolView, now: float) -> None:
        queued = sum(each.queued_tokens for each in view.instances) + view.waiting_tokens
        times = sorted(each for _, each in self._ttft)
        p95 = times[int(0.95 * (len(times) - 1))] if times else 0.0
        wanted = max(math.ceil(queued / 4000), math.ceil(len(view.instances) * p95 / TTFT_GOAL_S))
        wanted = min(max(wanted, self._least), self._most)
        self._wanted = [each for each in self._wanted if each[0] > now - 600.0] + [(now, wanted)]
        before = next((number for at, number in self._raised if at >= now - 60.0), self._target)
        if wanted > self._target:
            self._raised.append((now, self._target))
            self._target = min(wanted, max(2 * before, self._target))
        elif (most := max(number for _, number in self._wanted)) < self._target and now - self._lowered_at >= 120.0:
            self._lowered_at = now
            self._target = max(most, self._target - 1)
        self._raised = [each for each in self._raised if each[0] >= now - 60.0]


class AveragesRule:
    """The peer's formula: the rate of an engine for the mean request, at the largest batch that holds the goals."""

    def __init__(self, least: int, most: int) -> None:
        self._least, self._most = least, most
        self._target = least
        self._since = 0.0
        self._requests = self._prompt = 0.0
        self._in_flight = 0

    def decide(self, view: PoolView, ttft_s: Sequence[float]) -> Decision:
        self._requests += view.arrivals.requests - view.arrivals.refused
        self._prompt += view.arrivals.computed_tokens
        if view.now - self._since >= 180.0:
            self._size(view)
        leave = tuple(instance.id for instance in view.instances)
        return Decision(pool=view.pool, instances=self._target, leave=leave, by="averages")

    def _size(self, view: PoolView) -> None:
        in_flight = view.waiting + sum(each.requests for each in view.instances)
        completed = max(0.0, self._requests + self._in_flight - in_flight)  # demand is measured where responses leave
        demand = completed / (view.now - self._since)
        prompt = self._prompt / self._requests if self._requests else 0.0
        self._since, self._requests, self._prompt, self._in_flight = view.now, 0.0, 0.0, in_flight
        output, times = view.engine.times.output_tokens, view.engine.times
        best = 0.0
        for batch in range(1, view.engine.max_num_seqs + 1):
            step_s = times.window_s(1, math.ceil(batch * prompt / output), batch, 0)
            if batch > 1 and step_s > ITL_GOAL_S:
                break
            best = max(best, batch / (output * step_s))
        self._target = min(max(math.ceil(demand / best), self._least), self._most)


def config_of(way: str, seed: int) -> ReplayConfig:
    goals = KvRouterOptions(ttft_goal_s=TTFT_GOAL_S, itl_goal_s=ITL_GOAL_S)
    planning = PlanningOptions(max_instances=MOST, whatif_cpu=0.0 if way == "formula" else 0.1)
    return ReplayConfig(workers=2, blocks=5000, seed=seed, router=RouterOptions(kv=goals), planning=planning, planner=True)


def draw(load: str, hours: float, traces: Path, seed: int, path: Path) -> None:
    """Draw what the planner did. Raises as `draw_courses`."""
    config = config_of("planner", seed)
    fleet = PlannedFleet(config, planner_of(config, ReplayMode.KV))
    fleet.run(load_of(load, hours * 3600, traces, seed), ReplayMode.KV)
    draw_courses({"planner": fleet.course}, config, path)


def run(load: str, way: str, hours: float, traces: Path, seed: int) -> Result:
    rows, config = load_of(load, hours * 3600, traces, seed), config_of(way, seed)
    if way == "fixed":
        return _best_fixed(rows, config)
    scalers: dict[str, Callable[[], Scaler]] = {
        "keda": lambda: KedaRule(2, MOST),
        "averages": lambda: AveragesRule(1, MOST),
    }
    scaler = scalers[way]() if way in scalers else planner_of(config, ReplayMode.KV)
    fleet = PlannedFleet(config, scaler)
    return _result(way, fleet.run(rows, ReplayMode.KV), fleet.course.longest_loss_s(_ENOUGH))


def _best_fixed(rows: Sequence[Row], config: ReplayConfig) -> Result:
    """Return the least number that reaches the goodput, found by halving, or the largest."""
    low, high, best = 0, len(_FIXED) - 1, None
    while low <= high:
        middle = (low + high) // 2
        number = _FIXED[middle]
        result = _result(f"fixed: {number}", Replay(rows, ReplayMode.KV, replace(config, workers=number)).run())
        if result.goodput_share >= _ENOUGH:
            high, best = middle - 1, result
        else:
            low = middle + 1
    return best or result


def _result(way: str, figures: Figures, lost_s: float | None = None) -> Result:
    return Result(
        way,
        figures.good.total() / figures.requests,
        figures.rejected / figures.requests,
        figures.instance_s / 3600,
        figures.scaling_events / figures.virtual_s * 3600,
        lost_s,
        summary(figures).ttft_ratio_p50,
    )


def main() -> None:
    loads = ["sinus", "step", "bursts", "longer", *TRACES]
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--loads", nargs="+", choices=loads, default=loads[:4])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--hours", type=float, default=1.0)
    parser.add_argument("--traces", type=Path, default=Path("traces"), help="the folder of Mooncake's traces")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, help="processes")
    parser.add_argument("--plot", type=Path, help="draw what the planner does under the first load, in place of the table")
    options = parser.parse_args()
    if options.plot is not None:
        draw(options.loads[0], options.hours, options.traces, options.seed, options.plot)
        return
    cells = list(product(options.loads, options.ways))
    lines: list[list[str]] = []
    with ProcessPoolExecutor(options.jobs) as pool:
        pending = [pool.submit(run, load, way, options.hours, options.traces, options.seed) for load, way in cells]
        for (load, _), future in zip(cells, pending, strict=True):
            each = future.result()
            lines.append(
                [
                    load,
                    each.way,
                    f"{each.goodput_share:.3f}",
                    f"{each.refused_share:.1%}",
                    f"{each.instance_hours:.1f}",
                    f"{each.events_per_h:.0f}",
                    "" if each.lost_s is None else f"{each.lost_s:.0f}",
                    f"{each.ttft_ratio:.2f}",
                ]
            )
    print(table(["load", "way", "goodput", "refused", "instance hours", "changes/h", "goal lost, s", "TTFT ratio"], lines))


if __name__ == "__main__":
    main()
