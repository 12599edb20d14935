"""A log of explained routing decisions.

    router = MeasuredRouter(router, observer, DecisionLog())

A decision is explained only on demand: if its request wants an explanation, or if the log was read within the last seconds.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable

import msgspec

from dynamo.frontend.router.base import RouteRequest, RoutingDecision
from dynamo.frontend.router.explanation import DecisionRecord

log = logging.getLogger(__name__)

_WATCHED_S = 15.0
_PAUSE_S = 0.01


class DecisionLog:
    """The last decisions that were explained.

    Decisions of requests that want an explanation are always logged. For some seconds after each `read`, up to a hundred others
    per second are logged as well; with `everything`, all of them at all times.
    """

    def __init__(
        self,
        size: int = 256,
        *,
        everything: bool = False,
        clock: Callable[[], float] = time.monotonic,
        unix_time: Callable[[], float] = time.time,
    ) -> None:
        self._decisions: deque[DecisionRecord] = deque(maxlen=size)
        self._everything = everything
        self._clock = clock
        self._unix_time = unix_time
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

    def add(self, request: RouteRequest, decision: RoutingDecision, instances: int) -> None:
        """Log a decision among so many instances, and add it to the explanation that the request wants, if it does."""
        record = DecisionRecord(
            request_id=request.request_id,
            model=request.model,
            at=round(self._unix_time(), 3),
            instance=f"{decision.instance.id:x}",
            reason=decision.reason,
            overlap_blocks=decision.overlap_blocks,
            cost=round(decision.cost, 6),
            tiers={} if decision.fetch is None else {tier.value: blocks for tier, blocks in decision.fetch.hits},
            ttft_ms=None if decision.ttft_s is None else round(decision.ttft_s * 1e3, 1),
            instances=instances,
            candidates=decision.candidates,
            open_circuits=request.open_circuits,
        )
        self._decisions.append(record)
        if log.isEnabledFor(logging.DEBUG):
            log.debug("routed: %s", msgspec.json.encode(record).decode())
        if request.explanation is not None:
            request.explanation.add(record)
