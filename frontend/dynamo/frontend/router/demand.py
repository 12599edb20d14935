"""The demand for each pool, counted where requests get an instance or are refused one.

`MeasuredRouter` counts those that get one, which is where every request passes; the dispatcher counts those that do not.
`fleet.peers.demand` reports the counts.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

import msgspec

from dynamo.common.discovery import Instance
from dynamo.common.model_card import Role
from dynamo.common.names import InstanceId
from dynamo.common.scaling.demand import MAX_SAMPLES, MAX_SAVED
from dynamo.common.scaling.pool import Pool
from dynamo.frontend.router.base import RouteRequest

MAX_POOLS = 1000
"""Above it, the counts of the pool that had its first request first are forgotten: models come and go."""
RATIOS = 64
"""So many times to first token are compared with their predictions."""
MULTIPLIER, INCREMENT, MODULUS = 6364136223846793005, 1442695040888963407, 1 << 64
"""A random number from the one before. The upper half of its bits is good enough to draw samples."""

Arrived: TypeAlias = tuple[float, bytes, int, int, str, str, int, Sequence[int], float]
"""A request: when it arrived, its prompt, limit of the output, priority, adapter, cache salt, block size, hashes and expected
output, if known."""


class WaitingRequests(msgspec.Struct, frozen=True):
    """Requests that wait for an instance."""

    requests: int
    missing_tokens: int = 0
    """The tokens of their prompts that no instance has cached."""

    def __add__(self, other: WaitingRequests) -> WaitingRequests:
        return WaitingRequests(self.requests + other.requests, self.missing_tokens + other.missing_tokens)


class PoolCounts:
    """What arrived for one pool. Totals are those of `common.scaling.demand.ArrivalTotals`."""

    __slots__ = (
        "arrived",
        "compared",
        "computed_tokens",
        "output_tokens",
        "placed",
        "placed_tokens",
        "pool",
        "ratios",
        "refused",
        "refused_tokens",
        "samples",
        "saved",
        "seed",
    )

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.placed = self.placed_tokens = self.computed_tokens = self.output_tokens = self.refused = self.refused_tokens = 0
        self.arrived = 0
        """Requests with a prompt since `take_samples`."""
        self.samples: list[Arrived | None] = [None] * MAX_SAMPLES
        """Some of these, each with the same probability: the first ones, then each in the place of a random one."""
        self.saved: dict[InstanceId, int] = {}
        """How many prompt tokens each instance had cached of what it got since `take_saved`."""
        self.seed = 1
        """The last random number."""
        self.ratios = [0.0] * RATIOS
        """The last observed times to first token over the predicted ones."""
        self.compared = 0
        """How many there were."""

    def take_samples(self) -> tuple[int, list[Arrived]]:
        """Return how many requests arrived since the last call, and a sample of them."""
        arrived, samples = self.arrived, [sample for sample in self.samples if sample is not None]
        self.arrived, self.samples = 0, [None] * MAX_SAMPLES
        return arrived, samples

    def take_saved(self) -> tuple[tuple[InstanceId, int], ...]:
        """Return what the caches of instances saved since the last call, in tokens; of too many, those that saved most."""
        saved, self.saved = self.saved, {}
        return tuple(heapq.nlargest(MAX_SAVED, saved.items(), key=_tokens))

    def refuse(self, request: RouteRequest, missing_tokens: int, block_size: int, now: float) -> None:
        """Count a request that got no instance."""
        self.refused += 1
        self.refused_tokens += missing_tokens
        if not request.prompt:
            return
        position = self.arrived
        self.arrived += 1
        if position >= MAX_SAMPLES:
            self.seed = (self.seed * MULTIPLIER + INCREMENT) % MODULUS
            position = (self.seed >> 32) % self.arrived
        if position < MAX_SAMPLES:
            self.samples[position] = arrival(request, block_size, now)

    def ttft_ratio(self) -> float:
        """Return the median of the ratios; 0 if there is none."""
        ratios = sorted(self.ratios[: self.compared])
        return ratios[len(ratios) // 2] if ratios else 0.0


def _tokens(saved: tuple[InstanceId, int]) -> int:
    return saved[1]


def arrival(request: RouteRequest, block_size: int, now: float) -> Arrived:
    """Describe a request whose wait has ended now."""
    at = now - request.waited_s
    limit, salt = request.expected_output_tokens, request.cache_salt
    known = request.block_hashes, request.learned_output
    return at, request.prompt, limit, request.priority, request.adapter, salt, block_size, *known


class DemandTable:
    """The counts of all pools of one process."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """`clock`: that of the `MeasuredRouter` which counts here."""
        self.clock = clock
        self.pools: dict[tuple[str, Role], PoolCounts] = {}
        """By model and role."""

    def of(self, model: str, role: Role) -> PoolCounts:
        """Return the counts of a pool, which begin at 0 if there are none."""
        counts = self.pools.get((model, role))
        if counts is None:
            if len(self.pools) >= MAX_POOLS:
                del self.pools[next(iter(self.pools))]
            counts = self.pools[model, role] = PoolCounts(Pool(model, role))
        return counts

    def refuse(self, request: RouteRequest, role: Role, missing_tokens: int, candidates: Sequence[Instance]) -> None:
        """Count a request that got none of `candidates`, and of whose prompt these tokens are cached nowhere."""
        request.is_counted = True
        llm = candidates[0].card.llm if candidates else None
        self.of(request.model, role).refuse(request, missing_tokens, 0 if llm is None else llm.block_size, self.clock())
