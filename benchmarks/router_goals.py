"""What latency goals gain and cost where prompts take longer than the goal: router modes on made-up workloads, in virtual time.

    python -m benchmarks.router_goals
    python -m benchmarks.router_goals --loads cold --rates 12 --modes kv --seeds 3

Eight workers of 5,000 blocks of 512 tokens, which compute 8,000 prompt tokens per second, and a goal of 2 s to the first token:

- `cold`: 12 prefixes of 40 blocks, and 2 blocks of each prompt's own. An empty cache takes 2.7 s, one that has the prefix 0.13 s.
- `cleared`: the same, and half way all prefixes are others, as if all caches had been cleared.
- `one long`: 100 prefixes of 12 blocks, 0.9 s; but one in a hundred prompts has 60 blocks of its own, 3.8 s.
- `without it`: the same without that one, to compare.
- `tenth long`: the same, but one in ten.

Shown are the requests that were completed within the goals, per second, the shares of those that were completed, but not within
the goals, and of those that were refused, and how many had a first token no earlier than the long prompts can: for `kv`, these.
Means over the seeds.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product

import msgspec

from benchmarks.measuring import table
from dynamo.frontend.config import KvRouterOptions, RouterOptions
from dynamo.local.replay.config import ReplayConfig, ReplayMode
from dynamo.local.replay.fleet import Replay
from dynamo.local.replay.trace import Row, Workload

TTFT_GOAL_S = 2.0
RATES = (3.0, 6.0, 12.0)
MODES = (ReplayMode.ROUND_ROBIN, ReplayMode.LEAST_LOADED, ReplayMode.KV)
LONG_BLOCKS = 60
"""The length of a long prompt. One of 31 blocks takes as long as the goal."""
_OTHERS = 1 << 40
"""Added to the ids of blocks: others than those of the workload."""


def cold(rate: float, requests: int, seed: int) -> Sequence[Row]:
    workload = Workload(groups=12, prefix_blocks=40, own_blocks=2, output_tokens=300, skew=0.0, arrivals_per_s=rate)
    return workload.rows(requests, seed)


def cleared(rate: float, requests: int, seed: int) -> Sequence[Row]:
    rows, half = cold(rate, requests, seed), requests // 2
    return [*rows[:half], *(_with_blocks(row, (_OTHERS + block for block in row.hash_ids)) for row in rows[half:])]


def long_ones(every: int, rate: float, requests: int, seed: int) -> Sequence[Row]:
    """One in `every` requests is long."""
    return [
        _with_blocks(row, range(_OTHERS + number * LONG_BLOCKS, _OTHERS + (number + 1) * LONG_BLOCKS))
        if number % every == every // 2
        else row
        for number, row in enumerate(_short(rate, requests, seed))
    ]


def without(every: int, rate: float, requests: int, seed: int) -> Sequence[Row]:
    return [row for number, row in enumerate(_short(rate, requests, seed)) if number % every != every // 2]


def _short(rate: float, requests: int, seed: int) -> Sequence[Row]:
    workload = Workload(groups=100, prefix_blocks=12, own_blocks=2, output_tokens=300, skew=0.0, arrivals_per_s=rate)
    return workload.rows(requests, seed)


def _with_blocks(row: Row, blocks: Iterable[int]) -> Row:
    return msgspec.structs.replace(row, hash_ids=list(blocks))


LOADS: Mapping[str, Callable[[float, int, int], Sequence[Row]]] = {
    "cold": cold,
    "cleared": cleared,
    "one long": partial(long_ones, 100),
    "without it": partial(without, 100),
    "tenth long": partial(long_ones, 10),
}

Run = tuple[str, float, ReplayMode, int]


class Outcome(msgspec.Struct, frozen=True):
    goodput: float
    """Per second."""
    missed: float
    """The share of requests that were completed, but not within the goals."""
    refused: float
    """The share of requests that were refused."""
    long: int
    """Requests whose first token came no earlier than a prompt of `LONG_BLOCKS` can be computed."""


def replayed(run: Run, requests: int, itl_goal_s: float | None) -> Outcome:
    load, rate, mode, seed = run
    rows = LOADS[load](rate, requests, seed)
    goals = KvRouterOptions(ttft_goal_s=TTFT_GOAL_S, itl_goal_s=itl_goal_s)
    figures = Replay(rows, mode, ReplayConfig(workers=8, router=RouterOptions(kv=goals), seed=seed)).run()
    good, alone_s = figures.good.total(), LONG_BLOCKS * 512 * 0.000125
    return Outcome(
        good / figures.virtual_s,
        (len(rows) - figures.rejected - good) / len(rows),
        figures.rejected / len(rows),
        sum(ttft_s >= alone_s for ttft_s in figures.ttft_s),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS))
    parser.add_argument("--rates", nargs="+", type=float, default=list(RATES), help="requests per second")
    parser.add_argument("--modes", nargs="+", choices=[mode.value for mode in ReplayMode], default=[mode.value for mode in MODES])
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--itl-goal", type=float, help="seconds between tokens; without it, goodput counts up to 0.1")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--jobs", type=int, help="processes")
    options = parser.parse_args()
    cells = list(product(options.loads, options.rates, map(ReplayMode, options.modes)))
    runs = [(*cell, seed) for cell in cells for seed in range(options.seeds)]
    with ProcessPoolExecutor(options.jobs) as pool:
        pending = {run: pool.submit(replayed, run, options.requests, options.itl_goal) for run in runs}
        outcomes = {run: future.result() for run, future in pending.items()}
    lines: list[list[str]] = []
    for load, rate, mode in cells:
        each = [outcomes[load, rate, mode, seed] for seed in range(options.seeds)]
        goodput, missed, refused, long = (
            sum(getattr(outcome, name) for outcome in each) / len(each) for name in ("goodput", "missed", "refused", "long")
        )
        lines.append([load, f"{rate:g}", mode.value, f"{goodput:.2f}", f"{missed:.1%}", f"{refused:.1%}", f"{long:.1f}"])
    print(table(["load", "requests/s", "mode", "goodput/s", "missed", "refused", "long"], lines))


if __name__ == "__main__":
    main()
