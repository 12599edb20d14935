"""Why requests went where they went.

    router = ExplainingRouter(router, DecisionLog())

Nothing is explained unless somebody asks: a request for itself, or a reader of the log for all requests of the next seconds.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from dynamo.common.discovery import Instance
from dynamo.frontend.router.base import Router, RouterAround, RouteRequest, RoutingDecision
from dynamo.frontend.router.explanation import DecisionRecord

log = logging.getLogger(__name__)

_WATCHED_S = 15.0
_PAUSE_S = 0.01


class DecisionLog:
    """The last decisions that were explained.

    Requests that ask for it are always in here. While somebody reads, so are all others, up to a hundred per second; with
    `everything`, each of them at all times.
    """

    def __init__(self, size: int = 256, *, everything: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        self._decisions: deque[DecisionRecord] = deque(maxlen=size)
        self._everything = everything
        self._clock = clock
        self._until = 0.0
        self._next = 0.0
        self.is_watched = everything
        """Whether decisions that nobody asked about may be wanted, too."""

    def read(self, limit: int) -> list[DecisionRecord]:
        """The last ones, newest first. For some seconds from now all decisions are logged."""
        self._until = self._clock() + _WATCHED_S
        self.is_watched = True
        return [decision for decision, _ in zip(reversed(self._decisions), range(limit), strict=False)]

    def wants_next(self) -> bool:
        """Whether a decision that nobody asked about should be logged now."""
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


class ExplainingRouter(RouterAround):
    """Another router, whose decisions are logged and told to those who ask."""

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
            cost=round(decision.cost, 3),
            instances=len(candidates),
            candidates=decision.candidates,
        )
        decisions.add(record)
        if request.explanation is not None:
            request.explanation.add(record)
        return decision
