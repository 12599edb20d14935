"""A log of explained routing decisions.

    router = ExplainingRouter(router, DecisionLog())

A decision is explained only on demand: if its request wants an explanation, or if the log was read within the last seconds.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from dynamo.common.discovery import Instance
from dynamo.frontend.router.base import Router, RouteRequest, RouterWrapper, RoutingDecision
from dynamo.frontend.router.explanation import DecisionRecord

log = logging.getLogger(__name__)

_WATCHED_S = 15.0
_PAUSE_S = 0.01


class DecisionLog:
    """The last decisions that were explained.

    Decisions of requests that want an explanation are always logged. For some seconds after each `read`, up to a hundred others
    per second are logged as well; with `everything`, all of them at all times.
    """

    def __init__(self, size: int = 256, *, everything: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        self._decisions: deque[DecisionRecord] = deque(maxlen=size)
        self._everything = everything
        self._clock = clock
        self._until = 0.0
        self._next = 0.0
        self.is_watched = everything
        """Whether decisions without a requested explanation may be logged now. Cheap to test; `wants_next` decides."""

    def read(self, limit: int) -> list[DecisionRecord]:
        """Return the last decisions, newest first, and log all decisions for some seconds from now."""
        self._until = self._clock() + _WATCHED_S
        self.is_watched = True
        return [decision for decision, _ in zip(reversed(self._decisions), range(limit), strict=False)]

    def wants_next(self) -> bool:
        """Return whether the next decision should be logged although its request wants no explanation."""
        if self._everything:
            return True
        now = self._clock()
        if now >= self._until:
            self.is_watched = False
            return False
        if now < self._next:
            return False
        self._next = now + _PAUSE_S
        return True

    def add(self, decision: DecisionRecord) -> None:
        self._decisions.append(decision)
        if log.isEnabledFor(logging.DEBUG):
            log.debug("routed: %s", msgspec.json.encode(decision).decode())


class ExplainingRouter(RouterWrapper):
    """Wraps a router: logs its decisions, and adds them to the explanations that requests want."""

    def __init__(self, router: Router, decisions: DecisionLog, unix_time: Callable[[], float] = time.time) -> None:
        super().__init__(router)
        self.decisions = decisions
        self._unix_time = unix_time

    def pick(self, request: RouteRequest, candidates: Sequence[Instance], *, explain: bool = False) -> RoutingDecision:
        decisions = self.decisions
        wanted = explain or request.explanation is not None
        if not wanted and not (decisions.is_watched and decisions.wants_next()):
            return self.inner.pick(request, candidates)
        decision = self.inner.pick(request, candidates, explain=True)
        record = DecisionRecord(
            request_id=request.request_id,
            model=request.model,
            at=round(self._unix_time(), 3),
            instance=f"{decision.instance.id:x}",
            reason=decision.reason,
            overlap_blocks=decision.overlap_blocks,
            cost=round(decision.cost, 6),
            ttft_ms=None if decision.ttft_s is None else round(decision.ttft_s * 1e3, 1),
            instances=len(candidates),
            candidates=decision.candidates,
        )
        decisions.add(record)
        if request.explanation is not None:
            request.explanation.add(record)
        return decision
