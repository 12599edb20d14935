"""A router that reports the time and the outcome of its decisions, and explains those that are to be explained."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from dynamo.common.discovery import Instance
from dynamo.common.errors import DynamoError, Overloaded
from dynamo.frontend.router.base import Router, RouteRequest, RouterWrapper, RoutingDecision
from dynamo.frontend.router.explain import DecisionLog


class Observer(Protocol):
    """Receives measurements: a registry of metrics, or a benchmark's lists."""

    def picked(self, request: RouteRequest, decision: RoutingDecision, seconds: float) -> None:
        """Record a decision and how long it took, hashing included unless it was done before."""
        ...

    def refused(self, request: RouteRequest) -> None:
        """Record that all instances were busy."""
        ...

    def predicted(self, model: str, predicted_s: float, seconds: float) -> None:
        """Record the time from a decision to the first token, which the router had predicted."""
        ...


class MeasuredRouter(RouterWrapper):
    """Wraps a router, reports every decision to an observer, and has some explained in a log."""

    def __init__(
        self,
        router: Router,
        observer: Observer,
        decisions: DecisionLog | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(router)
        self._observer = observer
        self._decisions = decisions or DecisionLog()
        self._clock = clock
        self._predictions: dict[str, tuple[str, float, float]] = {}
        """Bookings without a first token: the model, the predicted TTFT, and when the decision was made."""

    def pick(self, request: RouteRequest, candidates: Sequence[Instance], *, explain: bool = False) -> RoutingDecision:
        decisions = self._decisions
        explain = explain or request.explanation is not None or (decisions.is_watched and decisions.wants_next())
        start = self._clock()
        try:
            decision = self.inner.pick(request, candidates, explain=explain)
        except Overloaded:
            self._observer.refused(request)
            raise
        end = self._clock()
        self._observer.picked(request, decision, end - start)
        if explain:
            decisions.add(request, decision, len(candidates))
        if decision.ttft_s is not None:
            self._predictions[request.booking_id] = (request.model, decision.ttft_s, end)
        return decision

    def first_token(self, booking_id: str) -> None:
        prediction = self._predictions.pop(booking_id, None)
        if prediction is not None:
            model, predicted_s, decided_at = prediction
            self._observer.predicted(model, predicted_s, self._clock() - decided_at)
        self.inner.first_token(booking_id)

    def finished(self, booking_id: str, error: DynamoError | None = None) -> None:
        self._predictions.pop(booking_id, None)
        self.inner.finished(booking_id, error)
