"""Routing by load only: how many requests an instance has, of all frontends."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence

from dynamo.common.discovery import Instance
from dynamo.common.errors import DynamoError
from dynamo.common.kv.hashes import TOKEN_BYTES
from dynamo.common.names import InstanceId
from dynamo.frontend.router.base import RouteRequest, RoutingDecision
from dynamo.frontend.router.explanation import shown
from dynamo.frontend.router.hashing import PromptHashes
from dynamo.frontend.router.load import Load, LoadTable, all_busy, busy
from dynamo.frontend.router.rows import RowCache
from dynamo.frontend.router.simple import pinned, position_of, position_of_least
from dynamo.frontend.router.thresholds import ThresholdTable

Strategy = Callable[[Sequence[int], random.Random], int]
"""From the number of requests of each instance to the position of the one to take."""


def least_loaded(requests: Sequence[int], rng: random.Random) -> int:
    """Return the position with the fewest requests; ties are broken at random."""
    return position_of_least(requests, rng)


def power_of_two(requests: Sequence[int], rng: random.Random) -> int:
    """Return the less loaded of two positions drawn at random: nearly as even as least-loaded, without a stampede on one."""
    if len(requests) == 1:
        return 0
    one, other = rng.sample(range(len(requests)), 2)
    return one if requests[one] <= requests[other] else other


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
        now = self._clock()
        loads = self.loads.read(self._rows.rows(candidates), now)
        position = pinned(request, candidates)
        reason = "pinned"
        if position is None:
            position, reason = self._choose(request, candidates, loads)
        explanation: Sequence[Mapping[str, float | int | str]] = ()
        if explain:
            explanation = _explain(candidates, loads, position, busy(loads, self.thresholds.of(request.model)))
        decision = RoutingDecision(candidates[position], reason, cost=float(loads[position].requests), candidates=explanation)
        tokens = 0 if request.is_prefilled else len(request.prompt) // TOKEN_BYTES
        self.loads.book(request.booking_id, decision.instance.id, now, prefill_tokens=tokens)
        return decision

    def prompt_hashes(self, request: RouteRequest, candidates: Sequence[Instance]) -> PromptHashes | None:
        return None

    def missing_tokens(self, request: RouteRequest, candidates: Sequence[Instance]) -> int | None:
        return None

    def first_token(self, booking_id: str) -> None:
        self.loads.first_token(booking_id)

    def finished(self, booking_id: str, error: DynamoError | None = None) -> None:
        self.loads.finished(booking_id)

    def removed(self, instance: InstanceId) -> None:
        self.loads.remove_instance(instance)

    def _choose(self, request: RouteRequest, candidates: Sequence[Instance], loads: Sequence[Load]) -> tuple[int, str]:
        """Return the position of the chosen candidate, and the reason. Raises Overloaded if all are busy."""
        busy_ones = busy(loads, self.thresholds.of(request.model))
        free = list(
            range(len(loads)) if busy_ones is None else (position for position, is_busy in enumerate(busy_ones) if not is_busy)
        )
        if not free:
            raise all_busy(request.model)
        if request.preferred is not None:
            position = position_of(request.preferred, candidates)
            if position is not None and position in free:
                return position, "preferred"
        return free[self._strategy([loads[position].requests for position in free], self._rng)], self._name


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
