"""Session affinity: the requests of one session go to one instance while it is registered and the session is in use.

In *hard* mode this holds even when the instance is busy. In *soft* mode a busy instance is skipped, and the session moves to the
instance chosen instead. An instance that left, or that a retry excludes, is replaced by the wrapped router's decision. A pinned
instance takes precedence, and the session moves to it. Prefill and decode instances of a model have separate sessions.
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
from dynamo.frontend.router.base import Router, RouteRequest, RouterWrapper, RoutingDecision
from dynamo.frontend.router.simple import position_of

_EXPIRED_PER_TURN = 4
"""Upper bound on the idle sessions that one request evicts, so that no request has to evict them all after a pause."""


class SessionKey(msgspec.Struct, frozen=True, array_like=True):
    model: str
    role: str
    session: str
    owner: str = ""
    """The API key whose session it is; empty without one. Frontends of former versions leave it out."""


@dataclass(slots=True)
class _Session:
    instance: InstanceId
    used_at: float = -math.inf
    announced_at: float = -math.inf
    """When the session's instance was last published to other frontends."""
    open: int = 0
    """Requests of the session that run now."""


class SessionRouter(RouterWrapper):
    """Wraps a router and adds session affinity. Keeps at most `max_sessions`.

    Of the key that is to have fewer, the least recently used one is evicted.

    `on_placed` is called with a session and its instance, at most once per half `ttl_s` while the session is used; `placed`
    applies what other frontends published.
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
        self._by_owner: dict[str, OrderedDict[SessionKey, None]] = {}
        """The same by API key."""
        self._bookings: dict[str, SessionKey] = {}

    def __len__(self) -> int:
        """Return how many sessions are kept."""
        return len(self._sessions)

    def pick(self, request: RouteRequest, candidates: Sequence[Instance], *, explain: bool = False) -> RoutingDecision:
        if not request.session:
            return self.inner.pick(request, candidates, explain=explain)
        now = self._clock()
        self._expire(now)
        key = SessionKey(request.model, candidates[0].card.role.value, request.session, request.session_owner)
        current = self._sessions.get(key)
        if current is not None and current.open == 0 and current.used_at + self._ttl_s <= now:
            current = None
        decision = self._pick(request, candidates, current, explain)
        session = self._remember(key, decision.instance.id, now)
        session.open += 1
        if self._on_placed is not None and session.announced_at + self._ttl_s / 2 <= now:
            session.announced_at = now
            self._on_placed(key, session.instance)
        self._bookings[request.booking_id] = key
        return decision

    def placed(self, key: SessionKey, instance: InstanceId) -> None:
        """Record that another frontend sent a session to `instance`."""
        now = self._clock()
        self._remember(key, instance, now).announced_at = now

    def finished(self, booking_id: str, error: DynamoError | None = None) -> None:
        super().finished(booking_id, error)
        key = self._bookings.pop(booking_id, None) if self._bookings else None
        session = self._sessions.get(key) if key is not None else None
        if key is not None and session is not None and session.open:
            session.open -= 1
            session.used_at = self._clock()
            self._move_to_end(key)

    # Inside

    def _pick(
        self, request: RouteRequest, candidates: Sequence[Instance], current: _Session | None, explain: bool
    ) -> RoutingDecision:
        if current is None or request.pinned is not None or position_of(current.instance, candidates) is None:
            return self.inner.pick(request, candidates, explain=explain)
        if self._mode is AffinityMode.HARD:
            wish = msgspec.structs.replace(request, pinned=current.instance)
        else:
            wish = msgspec.structs.replace(request, preferred=current.instance)
        decision = self.inner.pick(wish, candidates, explain=explain)
        return msgspec.structs.replace(decision, reason="session") if decision.instance.id == current.instance else decision

    def _remember(self, key: SessionKey, instance: InstanceId, now: float) -> _Session:
        session = self._sessions.get(key)
        if session is None:
            while len(self._sessions) >= self._max_sessions:
                self._forget(self._evicted_for(key.owner))
            session = self._sessions[key] = _Session(instance)
            self._by_owner.setdefault(key.owner, OrderedDict())[key] = None
        if session.instance != instance:
            session.instance = instance
            session.announced_at = -math.inf
        session.used_at = now
        self._move_to_end(key)
        return session

    def _move_to_end(self, key: SessionKey) -> None:
        self._sessions.move_to_end(key)
        self._by_owner[key.owner].move_to_end(key)

    def _evicted_for(self, owner: str) -> SessionKey:
        """Return the session that makes room for a new one of `owner`."""
        own = self._by_owner.get(owner)
        if own is None or len(own) * len(self._by_owner) < self._max_sessions:  # then another key has more than its share
            own = max(self._by_owner.values(), key=len)
        return next(iter(own))

    def _forget(self, key: SessionKey) -> None:
        del self._sessions[key]
        own = self._by_owner[key.owner]
        del own[key]
        if not own:
            del self._by_owner[key.owner]

    def _expire(self, now: float) -> None:
        for _ in range(_EXPIRED_PER_TURN):
            if not self._sessions:
                return
            key, session = next(iter(self._sessions.items()))
            if session.used_at + self._ttl_s > now:
                return
            if session.open:  # still in use
                session.used_at = now
                self._move_to_end(key)
            else:
                self._forget(key)
