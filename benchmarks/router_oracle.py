"""How far the KV router's mean latency is from the best possible one, in small cases that can be tried out completely.

    python -m benchmarks.router_oracle --cases 200

A case is a few requests of groups with common prefixes, at random times, and three simulated workers with empty caches. The
oracle knows all requests beforehand: it tries all ways of placing them. As workers do not influence each other, each set of
requests is simulated only once, on one worker.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from itertools import product

import numpy as np

from dynamo.local.replay.config import ReplayConfig, ReplayMode
from dynamo.local.replay.fleet import Replay
from dynamo.local.replay.trace import Row, Workload

WORKERS = 3


def random_case(rng: random.Random, requests: int) -> list[Row]:
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


def best_latency_s(rows: Sequence[Row]) -> float:
    """Return the total latency of the best placement."""
    count = len(rows)
    by_set = [
        total_latency_s([row for at, row in enumerate(rows) if members >> at & 1], ReplayMode.ROUND_ROBIN, 1)
        for members in range(1 << count)
    ]
    best = float("inf")
    # Workers are alike, so that the first request may be placed on the first one.
    for rest in product(range(WORKERS), repeat=count - 1):
        members = [0] * WORKERS
        for at, worker in enumerate((0, *rest)):
            members[worker] |= 1 << at
        best = min(best, sum(by_set[each] for each in members))
    return best


def excess(rows: Sequence[Row], mode: ReplayMode) -> float:
    """Return by which share the mean latency of a mode is above the best one."""
    return total_latency_s(rows, mode, WORKERS) / best_latency_s(rows) - 1.0


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--mode", type=ReplayMode, default=ReplayMode.KV)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    found = np.array([excess(random_case(rng, options.requests), options.mode) for _ in range(options.cases)])
    within = float((found <= 0.1).mean())
    print(f"{options.mode.value}: within 10% of the best in {within:.0%} of {options.cases} cases,", end=" ")
    print(f"above it by {np.median(found):.1%} in the median, {np.percentile(found, 95):.1%} at p95")


if __name__ == "__main__":
    main()
