"""Where routing by caches gains and where it loses: router modes on made-up workloads, in virtual time.

    python -m benchmarks.router_grid --seeds 3
    python -m benchmarks.router_grid --workloads few4 decode24 --rates 24

Eight workers of 600 blocks of 512 tokens get 90 s of requests, at most 2,500. Shown is how many times better `kv` is than the
better of `round-robin` and `least-loaded` in goodput (TTFT up to 2 s and a mean of 30 ms between tokens; the router knows nothing
of these goals), TTFT p90, time between tokens p99 and mean latency, each a mean over the seeds. What is below 0.98 is marked.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product

from benchmarks.measuring import table
from dynamo.local.replay.config import ReplayConfig, ReplayMode
from dynamo.local.replay.figures import Summary, summary
from dynamo.local.replay.fleet import Replay
from dynamo.local.replay.trace import Workload

WORKLOADS = {  # groups, blocks of their prefix, blocks of each prompt's own, mean output tokens, skew
    "hot24": (24, 12, 2, 200, 1.2),
    "tenants150": (150, 12, 2, 300, 0.0),
    "few4": (4, 8, 1, 400, 0.0),
    "decode24": (24, 4, 1, 800, 0.8),
    "many500": (500, 6, 4, 200, 0.6),
    "mixed40": (40, 10, 3, 250, 0.9),
    "long8": (8, 16, 1, 600, 0.0),
    "many300": (300, 8, 1, 150, 0.3),
    "one": (1, 20, 2, 300, 0.0),
    "decode60": (60, 2, 1, 500, 0.5),
    "prompts12": (12, 24, 4, 100, 1.0),
    "two": (2, 6, 3, 200, 0.0),
    "mixed16": (16, 8, 2, 400, 0.5),
    "skewed100": (100, 4, 2, 250, 1.0),
    "short30": (30, 20, 1, 80, 0.0),
    "decode6": (6, 4, 1, 900, 0.0),
    "own80": (80, 3, 6, 150, 0.7),
}
RATES = (4.0, 8.0, 16.0, 24.0)
WORKERS = 8
MODES = (ReplayMode.ROUND_ROBIN, ReplayMode.LEAST_LOADED, ReplayMode.KV)
FIGURES = ("goodput_rps", "ttft_p90_ms", "itl_p99_ms", "e2e_mean_ms")
LEAST = 0.98
_MOST_REQUESTS = 2500
_SECONDS = 90

Cell = tuple[str, float]


class UnknownGoals(ReplayConfig):
    """Goodput is counted within goals that the router does not have."""

    @property
    def ttft_goal_s(self) -> float:
        return 2.0

    @property
    def itl_goal_s(self) -> float:
        return 0.03


def workload(name: str, rate: float) -> Workload:
    groups, prefix, own, output, skew = WORKLOADS[name]
    return Workload(groups=groups, prefix_blocks=prefix, own_blocks=own, output_tokens=output, skew=skew, arrivals_per_s=rate)


def replayed(run: tuple[Cell, int, ReplayMode]) -> Summary:
    (name, rate), seed, mode = run
    rows = workload(name, rate).rows(min(_MOST_REQUESTS, int(rate * _SECONDS)), seed)
    return summary(Replay(rows, mode, UnknownGoals(workers=WORKERS, blocks=600, seed=seed)).run())


def ratios(means: Mapping[tuple[ReplayMode, str], float]) -> Iterator[float]:
    """Yield for each figure how many times better `kv` is than the better of the other modes."""
    for figure in FIGURES:
        *others, kv = (means[mode, figure] for mode in MODES)
        if figure == "goodput_rps":
            yield kv / max(others) if max(others) > 0.0 else float("inf")
        else:
            yield min(others) / kv


def shown(ratio: float) -> str:
    return "> 100" if ratio > 100.0 else f"{ratio:.2f}" + (" *" if ratio < LEAST else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--rates", nargs="+", type=float, default=list(RATES))
    parser.add_argument("--seeds", type=int, default=1)
    options = parser.parse_args()
    if min(options.rates) <= 0.0 or options.seeds < 1:
        parser.error("rates and seeds must be above 0")
    cells = list(product(options.workloads, options.rates))
    runs = [(cell, seed, mode) for cell in cells for seed in range(options.seeds) for mode in MODES]
    with ProcessPoolExecutor() as pool:
        results = dict(zip(runs, pool.map(replayed, runs), strict=True))

    def mean(cell: Cell, mode: ReplayMode, figure: str) -> float:
        values: Sequence[float] = [getattr(results[cell, seed, mode], figure) for seed in range(options.seeds)]
        return sum(values) / len(values)

    lines: list[list[str]] = []
    compared: list[float] = []
    for cell in cells:
        better = list(ratios({(mode, figure): mean(cell, mode, figure) for mode in MODES for figure in FIGURES}))
        compared += better
        name, rate = cell
        lines.append([name, f"{rate:g}", *map(shown, better), f"{mean(cell, ReplayMode.KV, 'imbalance'):.2f}"])
    print(table(["workload", "requests/s", "goodput", "TTFT p90", "time between tokens p99", "mean latency", "imbalance"], lines))
    print(f"{sum(ratio >= LEAST for ratio in compared)} of {len(compared)} at least {LEAST}")


if __name__ == "__main__":
    main()
