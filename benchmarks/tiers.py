"""What it gains that the router counts caches beyond the GPU, at their learned prices: traces in virtual time.

    python -m benchmarks.tiers --traces conversation.jsonl,synthetic.jsonl
    python -m benchmarks.tiers --tiers "slow cpu" --rates 1,2

Eight workers, whose GPUs together hold a tenth of the blocks of the trace. The rest is in one of these:

- `cpu`: the hosts' memories, which hold all blocks together, and read 200,000 tokens per second. Computing makes 8,000.
- `shared`: a store of all blocks, from which each worker reads 20,000 tokens per second.
- `disk`: half of it in the hosts' memories, as above, and all of it on their disks, which read 16,000 tokens per second.
- `slow cpu`: the hosts' memories, read at 4,000 tokens per second, so that computing is faster. Engines read such blocks
  nevertheless.

Each is replayed three times: with a router that knows nothing of it (`ignored`), with one that takes a block there for as large a
part of a block on the GPU as NVIDIA Dynamo does (`constants`: 0.75 on a host, 0.25 on a disk, 0.5 in a store), and with one that
learns the price of a block in seconds (`learned`). Shown are the blocks of prompts that were found cached, TTFT p50 and p90, and
goodput (within 10 s, and 100 ms between tokens). The last line of each has the highest goodput of all rates. Without `--traces`,
one is made up.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

from benchmarks.measuring import table
from dynamo.common.kv.tiers import Tier
from dynamo.frontend.config import KvRouterOptions, RouterOptions
from dynamo.local.replay.config import ReplayConfig, ReplayMode
from dynamo.local.replay.figures import Summary, summary
from dynamo.local.replay.fleet import Replay
from dynamo.local.replay.trace import BLOCK_TOKENS, Row, read_trace, synthesise
from dynamo.worker.engine.sim.timing import TimingModel

WORKERS = 8
GPU_SHARE = 0.1
"""Share of the blocks of a trace that all GPUs hold together."""
RATES = (1.0, 1.5, 2.0, 3.0)
TIERS = ("cpu", "shared", "disk", "slow cpu")
POLICIES = ("ignored", "constants", "learned")
_MADE_UP_REQUESTS = 2000
_LONGEST_PROMPTS = 1.2
"""Prompts like the longest one of the trace that the cache of a GPU holds at least."""
_DYNAMO_WEIGHTS = {Tier.CPU: 0.75, Tier.DISK: 0.25, Tier.SHARED: 0.5}
"""What a block there is worth, where one on the GPU is worth 1: its defaults for hosts, disks and shared caches."""


class Case(NamedTuple):
    trace: str
    """Path; empty: a trace is made up."""
    tier: str
    rate: float
    """How much faster than in the trace requests arrive."""
    policy: str
    seed: int = 0
    """The order of ties follows from it."""


def read_rows(trace: str, requests: int) -> list[Row]:
    return read_trace(Path(trace), requests) if trace else synthesise(requests or _MADE_UP_REQUESTS, 0)


def make_config(rows: Sequence[Row], case: Case) -> ReplayConfig:
    """Return the fleet of a case: caches are as large as the working set of the trace demands."""
    working_set = len({block for row in rows for block in row.hash_ids})
    longest = max(len(row.hash_ids) for row in rows)
    blocks = max(int(working_set * GPU_SHARE) // WORKERS, int(longest * _LONGEST_PROMPTS))
    config = ReplayConfig(workers=WORKERS, blocks=blocks, rate=case.rate, seed=case.seed, tier_events=case.policy != "ignored")
    match case.tier:
        case "cpu":
            config = dataclasses.replace(config, cpu_blocks=working_set // WORKERS, cpu_fetch=200_000.0)
        case "shared":
            config = dataclasses.replace(config, shared_blocks=working_set, shared_fetch=20_000.0)
        case "disk":
            half, whole = working_set // (2 * WORKERS), working_set // WORKERS
            config = dataclasses.replace(config, cpu_blocks=half, cpu_fetch=200_000.0, disk_blocks=whole, disk_fetch=16_000.0)
        case "slow cpu":
            config = dataclasses.replace(config, cpu_blocks=working_set // WORKERS, cpu_fetch=4_000.0)
    if case.policy != "constants":
        return config
    # As large a part of the time to compute a block as by Dynamo's weights.
    computed_s = TimingModel().ms_per_prefill_token * BLOCK_TOKENS / 1e3
    prices = tuple((tier, (1.0 - weight) * computed_s) for tier, weight in _DYNAMO_WEIGHTS.items())
    return dataclasses.replace(config, router=RouterOptions(kv=KvRouterOptions(tier_price=prices)))


def replayed(case: Case, requests: int) -> Summary:
    rows = read_rows(case.trace, requests)
    result = summary(Replay(rows, ReplayMode.KV, make_config(rows, case)).run())
    print(*case, *figures(result), file=sys.stderr, flush=True)
    return result


def figures(result: Summary) -> tuple[str, str, str]:
    """Return hits, TTFT p50 and p90 in seconds, and goodput per second."""
    return (
        f"{result.block_hit_rate:.0%}",
        f"{result.ttft_p50_ms / 1e3:.2f}, {result.ttft_p90_ms / 1e3:.2f}",
        f"{result.goodput_rps:.2f}",
    )


def shown(results: Mapping[Case, Summary], trace: str, tier: str, rates: Sequence[float], seed: int) -> Iterator[tuple[str, ...]]:
    """Yield the lines of one trace and tier."""
    name = Path(trace).stem or "made up"
    by_policy = [[results[Case(trace, tier, rate, policy, seed)] for rate in rates] for policy in POLICIES]
    for rate, *of_rate in zip(rates, *by_policy, strict=True):
        cells = zip(*map(figures, of_rate), strict=True)
        yield (name, tier, f"{rate:g}", *(cell for same in cells for cell in same))
    best = [max(result.goodput_rps for result in of_policy) for of_policy in by_policy]
    yield (name, tier, "best", *[""] * 2 * len(POLICIES), *(f"{each:.2f}" for each in best))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--traces", default="", help="files in Mooncake's format, with commas")
    parser.add_argument("--tiers", default=",".join(TIERS), help=f"of {', '.join(TIERS)}")
    parser.add_argument("--rates", default=",".join(f"{rate:g}" for rate in RATES), help="times the rate of the trace")
    parser.add_argument("--seed", type=int, default=0, help="of the order of ties")
    parser.add_argument("--processes", type=int, default=2, help="at once")
    parser.add_argument("--requests", type=int, default=0, help="only so many from the start of each trace; 0: all")
    options = parser.parse_args()
    traces, tiers = options.traces.split(","), options.tiers.split(",")
    rates = [float(rate) for rate in options.rates.split(",")]
    cases = [Case(*case) for case in product(traces, tiers, rates, POLICIES, [options.seed])]
    with ProcessPoolExecutor(options.processes) as pool:
        results = dict(zip(cases, pool.map(partial(replayed, requests=options.requests), cases), strict=True))
    head = ("trace", "tier", "rate", *(f"{each}: {policy}" for each in ("hits", "TTFT s", "goodput") for policy in POLICIES))
    lines = [line for trace, tier in product(traces, tiers) for line in shown(results, trace, tier, rates, options.seed)]
    print(table(head, lines))


if __name__ == "__main__":
    main()
