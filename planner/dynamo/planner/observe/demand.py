"""What arrived since the last look, from the totals of all frontends.

Totals count from the start of a frontend, so the difference of two reports is what arrived between them, also where reports
between them were lost. The first report of a frontend only shows where its totals are: what it counted before may be from long
ago.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from types import MappingProxyType

import msgspec
from msgspec.structs import astuple, replace

from dynamo.common.names import InstanceId
from dynamo.common.scaling.demand import (
    MAX_SAMPLES,
    MAX_SAVED,
    REPORT_EVERY_S,
    ArrivalSample,
    ArrivalTotals,
    DemandReport,
    PoolDemand,
)
from dynamo.common.scaling.pool import Pool
from dynamo.planner.pools import Arrivals

NEW_S = 1.5 * REPORT_EVERY_S
"""A frontend is new for so long: its pools may be in several reports of the same second."""
VANISHED_S = 5 * REPORT_EVERY_S
"""A frontend that has not reported for so long has no requests waiting."""
FORGOTTEN_S = 600.0
"""And after so long, its totals are forgotten: if it comes back, it counts as new."""
MAX_ORIGINS = 256
MAX_ORIGIN_CHARS = 128
MAX_POOLS = 2048
"""Frontends report also pools that are not scaled, such as those of tensor models."""
MAX_INSTANCES = 16 * MAX_SAVED
"""Instances of one pool of which it is counted what their caches saved."""
MAX_KEPT_SAMPLES = 64 * MAX_SAMPLES
"""Samples of one pool between two looks; further ones are dropped."""


@dataclass(slots=True, eq=False)
class _Origin:
    """One frontend."""

    first_at: float
    seen_at: float
    demands: dict[Pool, tuple[PoolDemand, float]] = field(default_factory=dict)
    """What its last report about each pool says, and when it came."""


@dataclass(slots=True)
class _Gathered:
    """What arrived for one pool since the last look."""

    requests: float = 0.0
    prompt_tokens: float = 0.0
    computed_tokens: float = 0.0
    refused: float = 0.0
    samples: list[tuple[float, ArrivalSample]] = field(default_factory=list)
    """When each came, and what it says."""
    saved: dict[InstanceId, int] = field(default_factory=dict)
    """Prompt tokens that were cached, by instance."""


class PoolArrivals(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of the demand for one pool."""

    arrivals: Arrivals
    waiting: int = 0
    waiting_tokens: int = 0
    ttft_ratio: float = 0.0
    """The median over all frontends that know one; 0: none does."""
    samples: Sequence[ArrivalSample] = ()
    saved: Mapping[InstanceId, int] = MappingProxyType({})
    """Prompt tokens that instances had cached of what arrived."""


class DemandLedger:
    """The demand of all frontends. `interval_s`: between two looks."""

    def __init__(self, interval_s: float) -> None:
        self.dropped = 0
        """Reports, or parts of them, that were ignored, since there are too many frontends or pools."""
        self._interval_s = interval_s
        self._origins: dict[str, _Origin] = {}
        self._frontends: dict[Pool, int] = {}
        """How many frontends have named each pool."""
        self._gathered: dict[Pool, _Gathered] = {}
        self._taken_at: float | None = None

    def __repr__(self) -> str:
        return f"<DemandLedger of {len(self._origins)} frontends>"

    def report(self, report: DemandReport, now: float) -> None:
        """Count what arrived at a frontend since its last report."""
        if report.origin not in self._origins and not self._make_space(report.origin, now):
            self.dropped += 1
            return
        origin = self._origins.setdefault(report.origin, _Origin(now, now))
        origin.seen_at = now
        for demand in report.pools[:MAX_POOLS]:
            if demand.pool in origin.demands or self._name(demand.pool):
                self._count(demand, origin, now)
            else:
                self.dropped += 1
        self.dropped += max(0, len(report.pools) - MAX_POOLS)

    def take(self, now: float) -> dict[Pool, PoolArrivals]:
        """Return what arrived since this was last called, for each pool that any frontend has named lately."""
        seconds = now - self._taken_at if self._taken_at is not None else self._interval_s
        self._taken_at = now
        gathered, self._gathered = self._gathered, {}
        self._forget(now)
        demands: dict[Pool, list[PoolDemand]] = {pool: [] for pool in gathered}
        for origin in self._origins.values():
            for pool, (demand, came_at) in origin.demands.items():
                if now - came_at <= VANISHED_S:
                    demands.setdefault(pool, []).append(demand)
        return {pool: _summed(gathered.get(pool, _Gathered()), reports, seconds, now) for pool, reports in demands.items()}

    def reporting(self, now: float) -> int:
        """Return how many frontends have reported lately."""
        return sum(now - origin.seen_at <= VANISHED_S for origin in self._origins.values())

    def _make_space(self, name: str, now: float) -> bool:
        """Forget the frontend that has been silent for longest, if there are too many; return whether one more is followed."""
        if len(name) > MAX_ORIGIN_CHARS:
            return False
        if len(self._origins) >= MAX_ORIGINS:
            oldest = min(self._origins, key=lambda other: self._origins[other].seen_at)
            if now - self._origins[oldest].seen_at <= VANISHED_S:
                return False
            self._remove(oldest)
        return True

    def _name(self, pool: Pool) -> bool:
        """Count one more frontend that has named a pool; return False if there are too many pools."""
        if pool not in self._frontends and len(self._frontends) >= MAX_POOLS:
            return False
        self._frontends[pool] = self._frontends.get(pool, 0) + 1
        return True

    def _count(self, demand: PoolDemand, origin: _Origin, now: float) -> None:
        """Count what arrived for one pool since the last report about it."""
        before, came_at = origin.demands.get(demand.pool, (None, origin.first_at))
        origin.demands[demand.pool] = demand, now
        if before is None and now - origin.first_at < NEW_S:
            return
        # What arrived in a long silence is not of this interval: the rate is kept, not the sum.
        gap_s = now - came_at if before is not None else 0.0
        share = min(1.0, max(self._interval_s, 2 * REPORT_EVERY_S) / gap_s) if gap_s > 0.0 else 1.0
        self._gather(demand, ArrivalTotals() if before is None else before.totals, share, now)

    def _gather(self, demand: PoolDemand, before: ArrivalTotals, share: float, now: float) -> None:
        totals = demand.totals
        if any(new < old for new, old in zip(astuple(totals), astuple(before), strict=True)):
            before = ArrivalTotals()  # the frontend began anew under its old name
        gathered = self._gathered.setdefault(demand.pool, _Gathered())
        refused = share * (totals.refused - before.refused)
        gathered.requests += share * (totals.placed - before.placed) + refused
        refused_tokens = share * (totals.refused_tokens - before.refused_tokens)
        gathered.prompt_tokens += share * (totals.placed_tokens - before.placed_tokens) + refused_tokens
        gathered.computed_tokens += share * (totals.computed_tokens - before.computed_tokens) + refused_tokens
        gathered.refused += refused
        for instance, tokens in demand.saved[:MAX_SAVED]:
            if instance in gathered.saved or len(gathered.saved) < MAX_INSTANCES:
                gathered.saved[instance] = gathered.saved.get(instance, 0) + tokens
        kept = max(0, MAX_KEPT_SAMPLES - len(gathered.samples))
        gathered.samples += [(now, sample) for sample in demand.samples[:kept]]

    def _forget(self, now: float) -> None:
        for name in [name for name, origin in self._origins.items() if now - origin.seen_at > FORGOTTEN_S]:
            self._remove(name)

    def _remove(self, name: str) -> None:
        for pool in self._origins.pop(name).demands:
            self._frontends[pool] -= 1
            if not self._frontends[pool]:
                del self._frontends[pool]


def _summed(gathered: _Gathered, demands: Sequence[PoolDemand], seconds: float, now: float) -> PoolArrivals:
    return PoolArrivals(
        arrivals=Arrivals(
            seconds=seconds,
            requests=gathered.requests,
            prompt_tokens=gathered.prompt_tokens,
            computed_tokens=gathered.computed_tokens,
            refused=gathered.refused,
        ),
        waiting=sum(demand.waiting for demand in demands),
        waiting_tokens=sum(demand.waiting_tokens for demand in demands),
        ttft_ratio=median([demand.ttft_ratio for demand in demands if demand.ttft_ratio] or [0.0]),
        samples=tuple(replace(sample, age_s=now - came_at + sample.age_s) for came_at, sample in gathered.samples),
        saved=gathered.saved,
    )
