"""The configuration of `dynamo-local replay`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from dynamo.common.config import group, option
from dynamo.frontend.config import QueueOptions, RouterOptions

_TTFT_GOAL_S = 10.0
_ITL_GOAL_S = 0.1


class ReplayMode(StrEnum):
    ROUND_ROBIN = "round-robin"
    RANDOM = "random"
    LEAST_LOADED = "least-loaded"
    POWER_OF_TWO = "power-of-two"
    KV = "kv"
    KV_APPROXIMATE = "kv-approximate"
    """kv without events: caches are guessed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadOptions:
    """A made-up workload in place of a trace: groups of requests whose prompts begin with the same blocks."""

    groups: int = option(0, env=(), file_key=(), minimum=0, help="Groups; 0: conversations of several turns instead.")
    prefix_blocks: int = option(8, env=(), file_key=(), minimum=0, help="Blocks that all prompts of a group begin with.")
    own_blocks: int = option(2, env=(), file_key=(), minimum=1, help="Blocks of each prompt after these.")
    output_tokens: int = option(300, env=(), file_key=(), minimum=1, help="Mean length of outputs.")
    skew: float = option(
        0.0, env=(), file_key=(), minimum=0, maximum=10, help="Zipf's exponent: above 0, some groups get more requests."
    )
    arrivals: float = option(8.0, env=(), file_key=(), minimum=0.001, help="Requests per second.")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningOptions:
    """A planner that decides how many workers there are, see `--planner`. `--workers` is their number at the start."""

    min_instances: int = option(1, env=(), file_key=(), minimum=0, maximum=10_000, help="The least workers.")
    max_instances: int = option(48, env=(), file_key=(), minimum=1, maximum=10_000, help="The most workers.")
    startup_s: float = option(
        60.0, env=(), file_key=(), minimum=0, maximum=86_400, metavar="SECONDS", help="From the decision until a worker serves."
    )
    interval_s: float = option(
        5.0, env=(), file_key=(), minimum=0.5, maximum=3600, metavar="SECONDS", help="How often it decides."
    )
    goodput_share: float = option(
        0.95, env=(), file_key=(), minimum=0.01, maximum=0.9999, help="The share of requests that are to reach the goals."
    )
    whatif_cpu: float = option(
        0.1,
        env=(),
        file_key=(),
        minimum=0,
        maximum=1,
        help="The share of a core that trying other numbers takes; 0: none.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayConfig:
    """A simulated fleet, how fast requests reach it, and the options of its routers, which are those of a frontend."""

    modes: tuple[ReplayMode, ...] = option(
        (ReplayMode.ROUND_ROBIN, ReplayMode.LEAST_LOADED, ReplayMode.KV),
        env=(),
        file_key=(),
        repeatable=True,
        help="Router modes to compare, in place of --router-mode.",
    )
    requests: int = option(0, env=(), file_key=(), minimum=0, help="Only so many requests from the start of the trace; 0: all.")
    rate: float = option(1.0, env=(), file_key=(), minimum=0.001, help="How much faster than in the trace requests arrive.")
    rates: tuple[float, ...] = option(
        (),
        env=(),
        file_key=(),
        repeatable=True,
        minimum=0.001,
        help="Several of these: replay once for each, and plot goodput over the rate of requests.",
    )
    frontends: int = option(
        1,
        env=(),
        file_key=(),
        minimum=1,
        maximum=64,
        help="Frontends that requests are dealt to in turn, see --router-replica-sync.",
    )
    workers: int = option(8, env=(), file_key=(), minimum=1, maximum=10_000, help="Simulated workers.")
    blocks: int = option(5000, env=(), file_key=(), minimum=1, help="KV blocks of each.")
    cpu_blocks: int = option(0, env=(), file_key=(), minimum=0, help="Blocks that each keeps in the memory of its host.")
    cpu_fetch: float = option(
        200_000.0, env=(), file_key=(), minimum=0, help="Tokens whose KV it reads from there in a second; 0: at once."
    )
    disk_blocks: int = option(0, env=(), file_key=(), minimum=0, help="Blocks that each keeps on a disk.")
    disk_fetch: float = option(
        30_000.0, env=(), file_key=(), minimum=0, help="Tokens whose KV it reads from there in a second; 0: at once."
    )
    shared_blocks: int = option(0, env=(), file_key=(), minimum=0, help="Blocks in a store that all of them read and write.")
    shared_fetch: float = option(
        20_000.0, env=(), file_key=(), minimum=0, help="Tokens whose KV a worker reads from there in a second; 0: at once."
    )
    tier_events: bool = option(
        True,
        env=(),
        file_key=(),
        help="Routers are told of blocks in memory, on disks and in the store, not only of those on GPUs.",
    )
    block_size: int = option(512, env=(), file_key=(), minimum=1, help="Tokens of a block.")
    max_num_seqs: int = option(256, env=(), file_key=(), minimum=1, help="Sequences that a worker runs at once.")
    max_batched_tokens: int = option(8192, env=(), file_key=(), minimum=1, help="Tokens that a worker computes in one step.")
    speedup: float = option(1.0, env=(), file_key=(), minimum=0, help="How much faster than its timing a worker is; 0: no time.")
    timing: Path | None = option(
        None, env=(), file_key=(), metavar="FILE", help="CSV table of measured steps that the timing of workers is fitted to."
    )
    seed: int = option(0, env=(), file_key=(), minimum=0, help="Of all that is random; one seed, one result.")
    plot: Path | None = option(
        None,
        env=(),
        file_key=(),
        metavar="FILE",
        help="Draw the comparison, in the format that the name ends with; needs matplotlib.",
    )
    json: bool = option(False, env=(), file_key=(), help="Print one JSON object instead of a table.")

    planner: bool = option(
        False, env=(), file_key=(), help="Have a planner decide how many workers there are, by --ttft-goal and --itl-goal."
    )

    @property
    def ttft_goal_s(self) -> float:
        """Goodput counts requests with a TTFT up to this …"""
        goal_s = self.router.kv.ttft_goal_s
        return _TTFT_GOAL_S if goal_s is None else goal_s

    @property
    def itl_goal_s(self) -> float:
        """… and a mean time between tokens up to this."""
        goal_s = self.router.kv.itl_goal_s
        return _ITL_GOAL_S if goal_s is None else goal_s

    workload: WorkloadOptions = group("Made-up workload", default=WorkloadOptions)
    planning: PlanningOptions = group("Planner", prefix="planner", default=PlanningOptions)
    router: RouterOptions = group("Routing", prefix="router", default=RouterOptions)
    queue: QueueOptions = group("Queue", prefix="queue", default=QueueOptions)
