"""Routing by load only: how many requests an instance has, of all frontends."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

from dynamo.common.discovery import Instance
from dynamo.common.errors import DynamoError
from dynamo.common.kv.hashes import TOKEN_BYTES
from dynamo.common.names import InstanceId
from dynamo.frontend.router.base import RouteRequest, RoutingDecision
from dynamo.frontend.router.cache.hashing import PromptHashes
from dynamo.frontend.router.explanation import shown
from dynamo.frontend.router.fetch import TierCount
from dynamo.frontend.router.loads.busy import all_busy, busy, is_busy, pinned_busy
from dynamo.frontend.router.loads.instance_load import InstanceLoad, Load
from dynamo.frontend.router.loads.rows import RowCache
from dynamo.frontend.router.loads.table import LoadTable
from dynamo.frontend.router.loads.thresholds import NEVER_BUSY, Thresholds, ThresholdTable
from dynamo.frontend.router.simple import pinned, position_of, position_of_least

_FEW = 8
"""Among at most so many instances, all loads are read."""
_MAX_DRAWS = 16
"""After so many draws, most instances must be busy: then all loads are read."""


class CandidateLoads:
    """The loads of the candidates of one request, by position, each read when it is needed."""

    def __init__(self, table: LoadTable, rows: Sequence[InstanceLoad], now: float, thresholds: Thresholds) -> None:
        self._table = table
        self._rows = rows
        self._now = now
        self._thresholds = thresholds

    def __len__(self) -> int:
        return len(self._rows)

    def of(self, position: int) -> Load:
        return self._table.read_one(self._rows[position], self._now)

    @cached_property
    def all(self) -> Sequence[Load]:
        """The loads of all candidates, read once: none changes while an instance is chosen."""
        return self._table.read(self._rows, self._now)

    def is_busy(self, position: int) -> bool:
        return self._thresholds != NEVER_BUSY and is_busy(self.of(position), self._thresholds)

    def free(self) -> Sequence[int]:
        """Return the positions that are not busy."""
        busy_ones = busy(self.all, self._thresholds)
        return range(len(self)) if busy_ones is None else [at for at, is_busy in enumerate(busy_ones) if not is_busy]


Strategy = Callable[[CandidateLoads, random.Random], int | None]
"""Returns the position of the instance to take, which is not busy; None if all are busy."""


def least_loaded(loads: CandidateLoads, rng: random.Random) -> int | None:
    """Return the position with the fewest requests; ties are broken at random."""
    all_loads, free = loads.all, loads.free()
    return free[position_of_least([all_loads[position].requests for position in free], rng)] if free else None


def power_of_two(loads: CandidateLoads, rng: random.Random) -> int | None:
    """Return the less loaded of two positions drawn at random: nearly as even as least-loaded, without a stampede on one.

    Takes the same time in a fleet of any size, unless most of it is busy.
    """
    pair = _draw_two(loads, rng) if len(loads) > _FEW else None
    if pair is None:
        free = loads.free()
        if len(free) < 2:
            return free[0] if free else None
        pair = rng.sample(free, 2)
    one, other = pair
    return one if loads.of(one).requests <= loads.of(other).requests else other


def _draw_two(loads: CandidateLoads, rng: random.Random) -> list[int] | None:
    """Draw two positions that are not busy; None if that takes too long."""
    drawn: list[int] = []
    for _ in range(_MAX_DRAWS):
        position = int(rng.random() * len(loads))
        if position not in drawn and not loads.is_busy(position):
            drawn.append(position)
            if len(drawn) == 2:
                return drawn
    return None


class LoadRouter:
    """Chooses among the instances that are not busy by a strategy. `name` is the `reason` of its decisions."""

    def __init__(
        self,
        name: str,
        strategy: Strategy,
        thresholds: ThresholdTable | None = None,
        loads: LoadTable | None = None,
        *,
        rng: random.Random | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.thresholds = ThresholdTable() if thresholds is None else thresholds
        self.loads = LoadTable() if loads is None else loads
        self._name = name
        self._strategy = strategy
        self._rows = RowCache(self.loads)
        self._rng = rng or random.Random()
        self._clock = clock

    def pick(self, request: RouteRequest, candidates: Sequence[Instance], *, explain: bool = False) -> RoutingDecision:
        now, thresholds = self._clock(), self.thresholds.of(request.model)
        loads = CandidateLoads(self.loads, self._rows.rows(candidates), now, thresholds)
        position = pinned(request, candidates)
        reason = "pinned"
        if position is None:
            position, reason = self._choose(request, candidates, loads)
        elif request.needs_room and loads.is_busy(position):
            raise pinned_busy(candidates[position].id, request.model)
        explanation: Sequence[Mapping[str, float | int | str]] = ()
        if explain:
            explanation = _explain(candidates, loads.all, position, busy(loads.all, thresholds))
        cost = float(loads.of(position).requests)
        decision = RoutingDecision(candidates[position], reason, cost=cost, candidates=explanation)
        tokens = 0 if request.is_prefilled else len(request.prompt) // TOKEN_BYTES
        self.loads.book(request.booking_id, decision.instance.id, now, prefill_tokens=tokens)
        return decision

    def prompt_hashes(self, request: RouteRequest, candidates: Sequence[Instance]) -> PromptHashes | None:
        return None

    def missing_tokens(self, request: RouteRequest, candidates: Sequence[Instance], *, with_room: bool = False) -> int | None:
        return None

    def first_token(self, booking_id: str) -> None:
        self.loads.first_token(booking_id, self._clock())

    def found_cached(self, request: RouteRequest, decision: RoutingDecision, tokens: int) -> Sequence[TierCount]:
        return ()

    def finished(self, booking_id: str, error: DynamoError | None = None) -> None:
        self.loads.finished(booking_id)

    def removed(self, instance: InstanceId) -> None:
        self.loads.remove_instance(instance)

    def _choose(self, request: RouteRequest, candidates: Sequence[Instance], loads: CandidateLoads) -> tuple[int, str]:
        """Return the position of the chosen candidate, and the reason. Raises Overloaded if all are busy."""
        if request.preferred is not None:
            position = position_of(request.preferred, candidates)
            if position is not None and not loads.is_busy(position):
                return position, "preferred"
        position = self._strategy(loads, self._rng)
        if position is None:
            raise all_busy(request.model)
        return position, self._name


def _explain(
    candidates: Sequence[Instance], loads: Sequence[Load], chosen: int, busy_ones: Sequence[bool] | None
) -> list[Mapping[str, float | int | str]]:
    return [
        {
            "instance": f"{candidates[position].id:x}",
            "cost": float(loads[position].requests),
            "requests": loads[position].requests,
            "prefill_tokens": loads[position].prefill_tokens,
            "kv_usage": round(loads[position].usage, 4),
            **({"busy": True} if busy_ones is not None and busy_ones[position] else {}),
        }
        for position in shown([load.requests for load in loads], chosen)
    ]
