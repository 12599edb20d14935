"""Keeps a router that does not look at loads away from busy instances."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from dynamo.common.discovery import Instance
from dynamo.common.errors import DynamoError
from dynamo.common.kv.hashes import TOKEN_BYTES
from dynamo.common.names import InstanceId
from dynamo.frontend.router.base import Router, RouterAround, RouteRequest, RoutingDecision
from dynamo.frontend.router.load import LoadTable, all_busy, busy
from dynamo.frontend.router.rows import RowCache
from dynamo.frontend.router.thresholds import ThresholdTable


class SparingRouter(RouterAround):
    """Another router, which sees only the instances that are not busy. A pinned request is let through."""

    def __init__(
        self, router: Router, thresholds: ThresholdTable, loads: LoadTable, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(router)
        self.thresholds = thresholds
        self.loads = loads
        self._rows = RowCache(loads)
        self._clock = clock

    def pick(self, request: RouteRequest, candidates: Sequence[Instance], *, explain: bool = False) -> RoutingDecision:
        now = self._clock()
        if request.pinned is None:
            candidates = self._free(request.model, candidates, now)
        decision = self.inner.pick(request, candidates, explain=explain)
        tokens = 0 if request.is_prefilled else len(request.prompt) // TOKEN_BYTES
        self.loads.book(request.booking_id, decision.instance.id, now, prefill_tokens=tokens)
        return decision

    def first_token(self, booking_id: str) -> None:
        super().first_token(booking_id)
        self.loads.first_token(booking_id)

    def finished(self, booking_id: str, error: DynamoError | None = None) -> None:
        super().finished(booking_id, error)
        self.loads.finished(booking_id)

    def removed(self, instance: InstanceId) -> None:
        super().removed(instance)
        self.loads.remove_instance(instance)

    def _free(self, model: str, candidates: Sequence[Instance], now: float) -> Sequence[Instance]:
        """Those that are not busy; the same sequence if all are free. Raises Overloaded if none is."""
        busy_ones = busy(self.loads.read(self._rows.rows(candidates), now), self.thresholds.of(model))
        if busy_ones is None or not any(busy_ones):
            return candidates
        if all(busy_ones):
            raise all_busy(model)
        return [instance for instance, is_busy in zip(candidates, busy_ones, strict=True) if not is_busy]
