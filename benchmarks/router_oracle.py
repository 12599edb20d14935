"""How far the KV router's mean latency is from the best possible one, in small cases that can be tried out completely.

    python -m benchmarks.router_oracle --cases 200

A case is a few requests of groups with common prefixes, at random times, and three simulated workers with empty caches. Half of
the cases are of the workloads of `router_grid`; the other half, which is harder, has short outputs and short pauses, so that
hardly anything but prompts counts.

The oracle knows all requests beforehand: it tries all ways of placing them. As workers do not influence each other, each set of
requests is simulated only once, on one worker. How much of the distance to it is due to not knowing the future is shown by a
second policy, which knows exactly what each placement does to the requests that have come, and nothing of those to come.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product

import numpy as np

from benchmarks import router_grid
from dynamo.local.replay.config import ReplayConfig, ReplayMode
from dynamo.local.replay.fleet import Replay
from dynamo.local.replay.trace import Row, Workload

WORKERS = 3


def grid_case(rng: random.Random, requests: int) -> list[Row]:
    """Return requests of a workload of the grid, at one of its rates for each worker."""
    name, rate = rng.choice(list(router_grid.WORKLOADS)), rng.choice(router_grid.RATES) * WORKERS / router_grid.WORKERS
    return router_grid.workload(name, rate).rows(requests, rng.randrange(1 << 30))


def short_case(rng: random.Random, requests: int) -> list[Row]:
    """Return requests with short outputs that come fast."""
    workload = Workload(
        groups=rng.randint(1, 4),
        prefix_blocks=rng.randint(1, 16),
        own_blocks=rng.randint(1, 4),
        output_tokens=rng.choice([20, 50, 100, 200]),
        skew=rng.choice([0.0, 1.0]),
        arrivals_per_s=rng.choice([2.0, 4.0, 8.0, 16.0]),
    )
    return workload.rows(requests, rng.randrange(1 << 30))


def total_latency_s(rows: Sequence[Row], mode: ReplayMode, workers: int) -> float:
    return sum(Replay(rows, mode, ReplayConfig(workers=workers, blocks=600)).run().e2e_s) if rows else 0.0


def latencies_by_set(rows: Sequence[Row]) -> list[float]:
    """Return the total latency of each set of requests on one worker; bit n of the index stands for request n."""
    return [
        total_latency_s([row for at, row in enumerate(rows) if members >> at & 1], ReplayMode.ROUND_ROBIN, 1)
        for members in range(1 << len(rows))
    ]


def best_latency_s(by_set: Sequence[float], count: int) -> float:
    """Return the total latency of the best placement."""
    best = float("inf")
    # Workers are alike, so that the first request may be placed on the first one.
    for rest in product(range(WORKERS), repeat=count - 1):
        members = [0] * WORKERS
        for at, worker in enumerate((0, *rest)):
            members[worker] |= 1 << at
        best = min(best, sum(by_set[each] for each in members))
    return best


def past_only_latency_s(by_set: Sequence[float], count: int, rng: random.Random) -> float:
    """Return the total latency if each request is placed where it adds least to it, as if none came after it.

    That is the best that predicting the effects of a placement exactly can do.
    """
    members = [0] * WORKERS
    for at in range(count):
        added = [by_set[each | 1 << at] - by_set[each] for each in members]
        worker = rng.choice([worker for worker in range(WORKERS) if added[worker] <= min(added) + 1e-9])
        members[worker] |= 1 << at
    return sum(by_set[each] for each in members)


def shown(name: str, excesses: Sequence[float]) -> str:
    values = np.array(excesses)
    median, late = np.percentile(values, [50, 95])
    within = float((values <= 0.1).mean())
    where = f"above it by {median:.1%} in the median, {late:.1%} at p95"
    return f"{name}: within 10% of the best in {within:.1%} of {len(values)} cases, {where}"


def excesses(case: tuple[Sequence[Row], ReplayMode, int]) -> tuple[float, float]:
    """Return by which share the mean latency of a mode, and that of exact predictions without the future, is above the best."""
    rows, mode, seed = case
    by_set = latencies_by_set(rows)
    best_s = best_latency_s(by_set, len(rows))
    past_only_s = past_only_latency_s(by_set, len(rows), random.Random(seed))
    return total_latency_s(rows, mode, WORKERS) / best_s - 1.0, past_only_s / best_s - 1.0


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=200, help="of each kind")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--mode", type=ReplayMode, default=ReplayMode.KV)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for title, make in (("workloads of the grid", grid_case), ("short outputs", short_case)):
        rng = random.Random(options.seed)
        cases = [(make(rng, options.requests), options.mode, options.seed) for _ in range(options.cases)]
        with ProcessPoolExecutor() as pool:
            routed, past_only = zip(*pool.map(excesses, cases), strict=True)
        print(title)
        print(" ", shown(options.mode.value, routed))
        print(" ", shown("exact predictions without the future", past_only), flush=True)


if __name__ == "__main__":
    main()
