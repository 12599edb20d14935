"""A router that reports the time and the outcome of its decisions."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from dynamo.common.discovery import Instance
from dynamo.common.errors import Overloaded
from dynamo.frontend.router.base import Router, RouteRequest, RouterWrapper, RoutingDecision


class Observer(Protocol):
    """Receives measurements: a registry of metrics, or a benchmark's lists."""

    def picked(self, request: RouteRequest, decision: RoutingDecision, seconds: float) -> None:
        """Record a decision and how long it took, hashing included unless it was done before."""
        ...

    def refused(self, request: RouteRequest) -> None:
        """Record that all instances were busy."""
        ...


class MeasuredRouter(RouterWrapper):
    """Wraps a router and reports every decision to an observer."""

    def __init__(self, router: Router, observer: Observer, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__(router)
        self._observer = observer
        self._clock = clock

    def pick(self, request: RouteRequest, candidates: Sequence[Instance], *, explain: bool = False) -> RoutingDecision:
        start = self._clock()
        try:
            decision = self.inner.pick(request, candidates, explain=explain)
        except Overloaded:
            self._observer.refused(request)
            raise
        self._observer.picked(request, decision, self._clock() - start)
        return decision
