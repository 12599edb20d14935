"""Requests of one session go to one instance, as long as it is there and the session is in use.

*hard*: also when the instance is busy. *soft*: a busy instance is passed over, and the session moves to the one chosen instead.
An instance that left, or that a retry leaves out, is replaced by the wrapped router's decision. A pin goes before the session,
which follows it. Prefill and decode instances of a model are remembered apart.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from dynamo.common.discovery import Instance
from dynamo.common.errors import DynamoError
from dynamo.common.names import InstanceId
from dynamo.frontend.config import AffinityMode
from dynamo.frontend.router.base import Router, RouterAround, RouteRequest, RoutingDecision
from dynamo.frontend.router.simple import position

_EXPIRED_PER_TURN = 4
"""How many idle sessions one request drops at most, so that none waits for all of them after a pause."""


class SessionKey(msgspec.Struct, frozen=True, array_like=True):
    model: str
    role: str
    session: str


@dataclass(slots=True)
class _Session:
    instance: InstanceId
    used_at: float = -math.inf
    told_at: float = -math.inf
    """When other frontends heard last where it is."""
    open: int = 0
    """Requests that run now."""


class SessionRouter(RouterAround):
    """Another router, for sessions. Keeps at most `max_sessions`; the one that was used least recently is forgotten first.

    `on_placed` is told where sessions are, once per half `ttl_s` while they are used; `placed` takes what other frontends tell.
    """

    def __init__(
        self,
        router: Router,
        ttl_s: float,
        mode: AffinityMode = AffinityMode.HARD,
        max_sessions: int = 65_536,
        *,
        on_placed: Callable[[SessionKey, InstanceId], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(router)
        self._ttl_s = ttl_s
        self._mode = mode
        self._max_sessions = max_sessions
        self._on_placed = on_placed
        self._clock = clock
        self._sessions: OrderedDict[SessionKey, _Session] = OrderedDict()
        """Least recently used first."""
        self._bookings: dict[str, SessionKey] = {}

    def __len__(self) -> int:
        """How many sessions are remembered."""
        return len(self._sessions)

    def pick(self, request: RouteRequest, candidates: Sequence[Instance], *, explain: bool = False) -> RoutingDecision:
        if not request.session:
            return self.inner.pick(request, candidates, explain=explain)
        now = self._clock()
        self._expire(now)
        key = SessionKey(request.model, candidates[0].card.role.value, request.session)
        known = self._sessions.get(key)
        if known is not None and known.open == 0 and known.used_at + self._ttl_s <= now:
            known = None
        decision = self._pick(request, candidates, known, explain)
        session = self._remember(key, decision.instance.id, now)
        session.open += 1
        if self._on_placed is not None and session.told_at + self._ttl_s / 2 <= now:
            session.told_at = now
            self._on_placed(key, session.instance)
        self._bookings[request.booking_id] = key
        return decision

    def placed(self, key: SessionKey, instance: InstanceId) -> None:
        """Another frontend sent a session there."""
        now = self._clock()
        self._remember(key, instance, now).told_at = now

    def finished(self, booking_id: str, error: DynamoError | None = None) -> None:
        super().finished(booking_id, error)
        key = self._bookings.pop(booking_id, None) if self._bookings else None
        session = self._sessions.get(key) if key is not None else None
        if key is not None and session is not None and session.open:
            session.open -= 1
            session.used_at = self._clock()
            self._sessions.move_to_end(key)

    # Inside

    def _pick(
        self, request: RouteRequest, candidates: Sequence[Instance], known: _Session | None, explain: bool
    ) -> RoutingDecision:
        if known is None or request.pinned is not None or position(known.instance, candidates) is None:
            return self.inner.pick(request, candidates, explain=explain)
        if self._mode is AffinityMode.HARD:
            wish = msgspec.structs.replace(request, pinned=known.instance)
        else:
            wish = msgspec.structs.replace(request, preferred=known.instance)
        decision = self.inner.pick(wish, candidates, explain=explain)
        return msgspec.structs.replace(decision, reason="session") if decision.instance.id == known.instance else decision

    def _remember(self, key: SessionKey, instance: InstanceId, now: float) -> _Session:
        session = self._sessions.get(key)
        if session is None:
            while len(self._sessions) >= self._max_sessions:
                self._sessions.popitem(last=False)
            session = self._sessions[key] = _Session(instance)
        if session.instance != instance:
            session.instance = instance
            session.told_at = -math.inf
        session.used_at = now
        self._sessions.move_to_end(key)
        return session

    def _expire(self, now: float) -> None:
        for _ in range(_EXPIRED_PER_TURN):
            if not self._sessions:
                return
            key, session = next(iter(self._sessions.items()))
            if session.used_at + self._ttl_s > now:
                return
            if session.open:  # in use for all that time
                session.used_at = now
                self._sessions.move_to_end(key)
            else:
                del self._sessions[key]
