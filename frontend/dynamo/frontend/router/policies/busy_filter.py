"""A filter that hides busy instances from routers that ignore load."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from dynamo.common.discovery import Instance
from dynamo.common.errors import DynamoError
from dynamo.common.kv.hashes import TOKEN_BYTES
from dynamo.common.names import InstanceId
from dynamo.frontend.router.base import Router, RouteRequest, RouterWrapper, RoutingDecision
from dynamo.frontend.router.loads.busy import all_busy, busy, is_busy, pinned_busy
from dynamo.frontend.router.loads.instance_load import Load
from dynamo.frontend.router.loads.rows import RowCache
from dynamo.frontend.router.loads.table import LoadTable
from dynamo.frontend.router.loads.thresholds import NEVER_BUSY, Thresholds, ThresholdTable

_MAX_DRAWS = 8
"""So many choices of the router are tried before all candidates are looked at."""


class BusyFilterRouter(RouterWrapper):
    """Wraps a router and shows it only the candidates that are not busy. A pinned request that
    needs no room is not filtered."""

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
        thresholds = self.thresholds.of(request.model)
        if thresholds == NEVER_BUSY or (request.pinned is not None and not request.needs_room):
            decision = self.inner.pick(request, candidates, explain=explain)
        elif request.pinned is not None:
            if is_busy(self.loads.load_of(request.pinned, now), thresholds):
                raise pinned_busy(request.pinned, request.model)
            decision = self.inner.pick(request, candidates, explain=explain)
        else:
            decision = self._pick_free(request, candidates, thresholds, now, explain=explain)
        tokens = 0 if request.is_prefilled else len(request.prompt) // TOKEN_BYTES
        self.loads.book(request.booking_id, decision.instance.id, now, prefill_tokens=tokens)
        return decision

    def first_token(self, booking_id: str) -> None:
        super().first_token(booking_id)
        self.loads.first_token(booking_id, self._clock())

    def finished(self, booking_id: str, error: DynamoError | None = None) -> None:
        super().finished(booking_id, error)
        self.loads.finished(booking_id)

    def removed(self, instance: InstanceId) -> None:
        super().removed(instance)
        self.loads.remove_instance(instance)

    def _pick_free(
        self, request: RouteRequest, candidates: Sequence[Instance], thresholds: Thresholds, now: float, *, explain: bool
    ) -> RoutingDecision:
        """Let the router choose until its choice is not busy; after a few times, only among those that are not busy.

        Thus a decision takes the same time in a fleet of any size, unless much of it is busy. Raises Overloaded if all are busy.
        """
        rows = self._rows.rows(candidates)  # first: from their cards it knows how many blocks instances have
        if len(candidates) > _MAX_DRAWS:
            for _ in range(_MAX_DRAWS):
                decision = self.inner.pick(request, candidates, explain=explain)
                if not is_busy(self.loads.load_of(decision.instance.id, now), thresholds):
                    return decision
        free = self._free(request.model, candidates, self.loads.read(rows, now), thresholds)
        return self.inner.pick(request, free, explain=explain)

    @staticmethod
    def _free(model: str, candidates: Sequence[Instance], loads: Sequence[Load], thresholds: Thresholds) -> Sequence[Instance]:
        """Return the candidates that are not busy; the same sequence if none is. Raises Overloaded if all are busy."""
        busy_ones = busy(loads, thresholds)
        if busy_ones is None or not any(busy_ones):
            return candidates
        if all(busy_ones):
            raise all_busy(model)
        return [instance for instance, is_busy in zip(candidates, busy_ones, strict=True) if not is_busy]
