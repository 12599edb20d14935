"""Which loads miss a term of the KV router's cost when it is taken away, and how much each tuned constant matters.

    python -m benchmarks.router_ablation                                   every term
    python -m benchmarks.router_ablation --constants                       every constant, halved and doubled
    python -m benchmarks.router_ablation --only queue levelling --loads bursts sessions --seeds 10

Each load is replayed in virtual time, with the cost as it is and without one term. Shown is for each load the mean latency
without the term divided by that with it, a mean over the seeds: above 1, the load is worse without the term. (For loads with
latency goals it is the goodput with the term divided by that without.) A `*` marks what is worse beyond chance, by this figure,
the TTFT p90, the time between tokens p99 or the median error of the predicted TTFT: by at least 2%, and by three standard
errors over the seeds. The list below the table names these figures. The first row shows what chance does: there, only ties are
decided otherwise.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean, stdev

from benchmarks.measuring import table
from benchmarks.router_grid import UnknownGoals, workload
from dynamo.frontend.config import KvRouterOptions, RouterOptions
from dynamo.frontend.router.cost_terms import COST_TERMS, CostTerms
from dynamo.local.replay.config import ReplayConfig, ReplayMode
from dynamo.local.replay.figures import Summary, summary
from dynamo.local.replay.fleet import Replay
from dynamo.local.replay.trace import Row, read_trace

LEAST_LOSS = 0.02
_ERRORS = 3.0
"""A loss counts if it is so many standard errors long."""
_OTHER_TIES = 1000
"""What is added to the seed of the router to decide ties otherwise."""


@dataclass(frozen=True, slots=True)
class Load:
    rows: Callable[[int], Sequence[Row]]
    """By seed."""
    fleet: ReplayConfig
    has_goals: bool = False


def grid(name: str, rate: float, requests: int, seed: int) -> Sequence[Row]:
    return workload(name, rate).rows(requests, seed)


def bursts(seed: int) -> Sequence[Row]:
    """Every three seconds, 24 requests with a new common prefix within a fifth of a second, and others in between."""
    rng, rows, names = random.Random(seed), list[Row](), _Names()
    for burst in range(10):
        prefix = names.blocks(rng.randint(4, 30))
        for _ in range(24):
            at_ms = 3000.0 * burst + rng.uniform(0.0, 200.0)
            rows.append(Row(at_ms, _length(rng, 150), [*prefix, *names.blocks(rng.randint(1, 4))]))
    rows += (Row(rng.uniform(0.0, 30_000.0), _length(rng, 250), names.blocks(rng.randint(1, 8))) for _ in range(120))
    return _in_order(rows)


def sessions(seed: int) -> Sequence[Row]:
    """Conversations of six turns on average, over one system prompt; each turn repeats the ones before."""
    rng, rows, names = random.Random(seed), list[Row](), _Names()
    system = names.blocks(4)
    for _ in range(45):
        at_ms, history = rng.uniform(0.0, 30_000.0), [*system]
        for _ in range(1 + int(rng.expovariate(1 / 5.5))):
            history += names.blocks(1 + int(rng.paretovariate(1.3)) % 30)
            rows.append(Row(at_ms, _length(rng, 200), [*history]))
            history += names.blocks(1)  # the response
            at_ms += 3000.0 + rng.expovariate(1 / 8000.0)
    return _in_order(rows)


def long_decodes(seed: int) -> Sequence[Row]:
    """Short prompts; a fifth of the responses has 1,500 tokens on average, the others 60."""
    rng, names = random.Random(seed), _Names()
    prefixes = [names.blocks(3) for _ in range(12)]
    return [
        Row(at_ms, _length(rng, 1500 if rng.random() < 0.2 else 60), [*rng.choice(prefixes), *names.blocks(1)])
        for at_ms in _arrivals(rng, 12.0, 240)
    ]


def hot_prefixes(seed: int) -> Sequence[Row]:
    """Sixty percent of the requests share one prefix, which is another one every ten seconds."""
    rng, names = random.Random(seed), _Names()
    hot = [names.blocks(16) for _ in range(8)]
    others = [names.blocks(8) for _ in range(60)]
    return [
        Row(
            at_ms,
            _length(rng, 150),
            [*(hot[int(at_ms / 10_000) % 8] if rng.random() < 0.6 else rng.choice(others)), *names.blocks(1)],
        )
        for at_ms in _arrivals(rng, 14.0, 400)
    ]


def long_contexts(seed: int) -> Sequence[Row]:
    """Prompts of 30 to 150 blocks without a common prefix, so that running requests fill the caches."""
    rng, names = random.Random(seed), _Names()
    return [
        Row(at_ms, _length(rng, 600), names.blocks(rng.randint(30, 150) if rng.random() < 0.4 else rng.randint(1, 10)))
        for at_ms in _arrivals(rng, 2.0, 160)
    ]


def strangers(seed: int) -> Sequence[Row]:
    """Prompts of all lengths, of which no two have anything in common."""
    rng, names = random.Random(seed), _Names()
    return [
        Row(at_ms, _length(rng, 200), names.blocks(min(120, int(rng.paretovariate(0.9))))) for at_ms in _arrivals(rng, 12.0, 400)
    ]


def flushing(seed: int) -> Sequence[Row]:
    """Prefixes that are used again and again, and long prompts in between that come only once."""
    rng, names = random.Random(seed), _Names()
    prefixes = [names.blocks(12) for _ in range(60)]
    return [
        Row(at_ms, _length(rng, 200), names.blocks(60) if rng.random() < 0.06 else [*rng.choice(prefixes), *names.blocks(2)])
        for at_ms in _arrivals(rng, 10.0, 500)
    ]


def scarce_caches(seed: int) -> Sequence[Row]:
    """24 prefixes, of which the caches of four workers hold each once and not much more; requests come at an even pace."""
    rng, names = random.Random(seed), _Names()
    prefixes = [names.blocks(15) for _ in range(24)]
    return [Row(42.0 * (number + rng.random()), 32, [*rng.choice(prefixes), *names.blocks(1)]) for number in range(600)]


def part_of_trace(path: Path, requests: int, seed: int) -> Sequence[Row]:
    """The part of a trace that belongs to a seed."""
    rows = read_trace(path)
    first = seed * requests % max(1, len(rows) - requests)
    return [_at(row, row.timestamp - rows[first].timestamp) for row in rows[first : first + requests]]


def _at(row: Row, timestamp_ms: float) -> Row:
    return Row(timestamp_ms, row.output_length, row.hash_ids, row.priority)


class _Names:
    """Ids of blocks that were not used before."""

    def __init__(self) -> None:
        self._next = 0

    def blocks(self, count: int) -> list[int]:
        self._next += count
        return list(range(self._next - count, self._next))


def _length(rng: random.Random, mean: float) -> int:
    return max(1, int(rng.expovariate(1.0 / mean)))


def _arrivals(rng: random.Random, per_s: float, count: int) -> Iterator[float]:
    """Yield times in milliseconds."""
    now_ms = 0.0
    for _ in range(count):
        now_ms += rng.expovariate(per_s) * 1e3
        yield now_ms


def _in_order(rows: Iterable[Row]) -> Sequence[Row]:
    return sorted(rows, key=lambda row: row.timestamp)


_FLEET = UnknownGoals(workers=8, blocks=600)
_SMALL_CACHES = replace(_FLEET, blocks=250)
_GOALS = ReplayConfig(workers=8, blocks=600, router=RouterOptions(kv=KvRouterOptions(ttft_goal_s=2.0, itl_goal_s=0.03)))
_HOT_GOALS = replace(_GOALS, router=RouterOptions(kv=KvRouterOptions(ttft_goal_s=1.5, itl_goal_s=0.05)))
_COSTLY_SEQUENCES = replace(_FLEET, workers=4, blocks=128, timing=Path(__file__).with_name("costly_sequences.csv"))
"""Step times of `router_peer`: 4 ms for each sequence that decodes, and for a block not much more than that."""
_THREE = replace(_FLEET, frontends=3, router=RouterOptions(replica_sync=True))

LOADS: Mapping[str, Load] = {
    "hot24, 24/s": Load(partial(grid, "hot24", 24.0, 500), _FLEET),
    "decode24, 8/s": Load(partial(grid, "decode24", 8.0, 160), _FLEET),
    "few4, 24/s": Load(partial(grid, "few4", 24.0, 300), _FLEET),
    "one, 4/s": Load(partial(grid, "one", 4.0, 150), _FLEET),
    "tenants150, 8/s": Load(partial(grid, "tenants150", 8.0, 800), _SMALL_CACHES),
    "many500, 24/s": Load(partial(grid, "many500", 24.0, 500), _FLEET),
    "bursts": Load(bursts, _FLEET),
    "sessions": Load(sessions, _FLEET),
    "long decodes": Load(long_decodes, _FLEET),
    "hot prefixes": Load(hot_prefixes, _FLEET),
    "long contexts": Load(long_contexts, replace(_FLEET, blocks=200)),
    "strangers": Load(strangers, _FLEET),
    "scarce caches": Load(scarce_caches, _COSTLY_SEQUENCES),
    "flushing": Load(flushing, _SMALL_CACHES),
    "three frontends": Load(partial(grid, "hot24", 16.0, 400), _THREE),
    "goals": Load(partial(grid, "tenants150", 24.0, 500), _GOALS, has_goals=True),
    "goals, hot prefixes": Load(hot_prefixes, _HOT_GOALS, has_goals=True),
}

WITHOUT: Mapping[str, CostTerms] = {
    "first_token": replace(COST_TERMS, first_token=0.0),
    "queue": replace(COST_TERMS, queue=0.0),
    "prefill_step": replace(COST_TERMS, prefill_step=0.0),
    "decoding": replace(COST_TERMS, decoding=0.0),
    "delayed": replace(COST_TERMS, delayed=0.0),
    "arriving": replace(COST_TERMS, arriving=0.0),
    "evicted": replace(COST_TERMS, evicted=0.0),
    "running_step": replace(COST_TERMS, running_step=0.0),
    "shared_steps": replace(COST_TERMS, shared_steps=0.0),
    "time since a report": replace(COST_TERMS, batch_tokens=0),
    "levelling": replace(COST_TERMS, levelled=1e-9),
    "crowding": replace(COST_TERMS, crowding_weight=0.0),
    "passing queues": replace(COST_TERMS, passes_queues=False),
    "spreading": replace(COST_TERMS, spread_share=0.0),
    "misses": replace(COST_TERMS, miss_weight=0.0),
}
CONSTANTS = (
    "running_step",
    "shared_steps",
    "batch_tokens",
    "levelled",
    "quiet_steps",
    "quiet_prefilling",
    "crowding_weight",
    "crowding_tokens",
    "spread_share",
    "most_further",
    "miss_weight",
)


def changed(constant: str, factor: float) -> CostTerms:
    value = getattr(COST_TERMS, constant)
    return replace(COST_TERMS, **{constant: type(value)(value * factor)})


@dataclass(frozen=True, slots=True)
class Run:
    load: str
    seed: int
    terms: CostTerms = COST_TERMS
    other_ties: bool = False


def replayed(loads: Mapping[str, Load], run: Run) -> Mapping[str, float]:
    """Return figures of a run, of which lower ones are better."""
    load = loads[run.load]
    fleet = replace(load.fleet, seed=run.seed + (_OTHER_TIES if run.other_ties else 0))
    result = summary(Replay(load.rows(run.seed), ReplayMode.KV, fleet, run.terms).run())
    return _figures(result, load.has_goals)


def _figures(result: Summary, has_goals: bool) -> Mapping[str, float]:
    if has_goals:
        return {"requests within the goals": 1.0 / max(result.goodput_rps, 1e-9)}
    return {
        "mean latency": result.e2e_mean_ms,
        "TTFT p90": result.ttft_p90_ms,
        "time between tokens p99": result.itl_p99_ms,
        "error of the predicted TTFT": max(1.0, result.ttft_error_p50_ms),
    }


@dataclass(frozen=True, slots=True)
class Ratio:
    """A figure without a term divided by the one with it, over the seeds."""

    mean: float
    error: float
    """The standard error of the mean."""

    @classmethod
    def of(cls, before: Sequence[float], after: Sequence[float]) -> Ratio:
        ratios = [new / old for old, new in zip(before, after, strict=True)]
        return cls(fmean(ratios), stdev(ratios) / len(ratios) ** 0.5)

    def is_worse(self, chance: Ratio) -> bool:
        loss = self.mean - 1.0
        return loss >= LEAST_LOSS and loss >= _ERRORS * max(self.error, chance.error)


def compared(
    figures: Mapping[Run, Mapping[str, float]], load: str, seeds: Sequence[int], terms: CostTerms, *, other_ties: bool = False
) -> Mapping[str, Ratio]:
    """Return for each figure of a load how it changes with other terms, or with other ties."""
    before = [figures[Run(load, seed)] for seed in seeds]
    after = [figures[Run(load, seed, terms, other_ties)] for seed in seeds]
    return {name: Ratio.of([each[name] for each in before], [each[name] for each in after]) for name in before[0]}


def report(
    figures: Mapping[Run, Mapping[str, float]], loads: Sequence[str], seeds: Sequence[int], variants: Mapping[str, CostTerms]
) -> str:
    chance = {load: compared(figures, load, seeds, COST_TERMS, other_ties=True) for load in loads}
    rows = [["other ties", *(f"{next(iter(chance[load].values())).mean:.2f}" for load in loads)]]
    lost: list[list[str]] = []
    for name, terms in variants.items():
        cells: list[str] = []
        for load in loads:
            ratios = compared(figures, load, seeds, terms)
            worse = [(figure, ratio) for figure, ratio in ratios.items() if ratio.is_worse(chance[load][figure])]
            cells.append(f"{next(iter(ratios.values())).mean:.2f}" + (" *" if worse else ""))
            lost += ([name, load, figure, f"{ratio.mean:.3f} ± {ratio.error:.3f}"] for figure, ratio in worse)
        rows.append([name, *cells])
    return table(["changed", *loads], rows) + "\n\n" + table(["changed", "load", "figure", "ratio"], lost)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--constants", action="store_true", help="halve and double constants, instead of removing terms")
    parser.add_argument("--only", nargs="+", help="only these terms or constants")
    parser.add_argument("--loads", nargs="+", choices=LOADS)
    parser.add_argument("--trace", type=Path, nargs="+", default=[], help="traces in Mooncake's format, as further loads")
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    options = parser.parse_args()
    if options.seeds < 2:
        parser.error("the spread needs two seeds at least")
    traces = {path.stem: Load(partial(part_of_trace, path, 300), replace(_FLEET, blocks=1500)) for path in options.trace}
    loads = {**LOADS, **traces}
    names = (options.loads or [*LOADS]) + [*traces]
    if options.constants:
        chosen = [name for name in CONSTANTS if not options.only or name in options.only]
        variants = {f"{name} × {factor:g}": changed(name, factor) for name in chosen for factor in (0.5, 2.0)}
    else:
        variants = {name: terms for name, terms in WITHOUT.items() if not options.only or name in options.only}
    seeds = range(options.seeds)
    every = [COST_TERMS, *variants.values()]
    runs = [Run(load, seed, terms) for load in names for seed in seeds for terms in every]
    runs += [Run(load, seed, other_ties=True) for load in names for seed in seeds]
    with ProcessPoolExecutor(options.jobs) as pool:
        figures = dict(zip(runs, pool.map(partial(replayed, loads), runs, chunksize=8), strict=True))
    print(report(figures, names, seeds, variants))


if __name__ == "__main__":
    main()
