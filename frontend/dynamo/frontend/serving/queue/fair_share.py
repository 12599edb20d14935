"""The fair share of API keys that wait at several frontends: which requests are held back here for requests of another frontend.

Each frontend is fair between the keys that wait in its own queues (`fair_queue`). But the frontend whose request ends is the
first to notice that an instance has capacity. So one with many requests would take all of it, and a key that waits at another
would starve. Therefore frontends publish which keys wait in each queue, and what they have served of each key lately
(`fleet.peers.waiting_keys`). If its next request is of a key that the fleet has served more than a key that waits elsewhere, a
frontend holds the request back, and leaves the capacity to the other frontend. Every `HOLD_S` it tries all the same; if the
other one has not used the capacity by then, it holds nothing back for `IGNORE_S`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from dynamo.common.model_card import Role
from dynamo.common.process.decaying import DecayingCounter
from dynamo.frontend.fleet.peers.waiting_keys import MAX_KEYS, KeyShare, QueueShares

HOLD_S = 0.2
"""For so long a request leaves the room that there may be to others, then it tries: those may be unable to use it."""
IGNORE_S = 1.0
"""For so long others that did not use the room are not waited for."""
FRESH_S = 0.2
"""What others published is forgotten after this; while requests wait, they publish four times as often."""
_MEMORY_S = 2.0
"""What was served so long ago counts for 1/e: a key that comes back is first for about so long."""
_CLOSE = 0.9
"""A key goes first if what it was served is less than this share of what another one was served."""


Heads = Callable[[], Iterable[tuple[str, float]]]
"""Yields each key that waits, with the rank of its first request."""


class QueueShare:
    """The fair share of each key in one queue."""

    def __init__(self, clock: Callable[[], float], waits: Callable[[], None]) -> None:
        self._heads: Heads = tuple
        self._clock = clock
        self._waits = waits
        self._own: dict[str, DecayingCounter] = {}
        self._elsewhere: dict[str, tuple[float, Sequence[KeyShare]]] = {}
        """By process: when it was published, and what."""
        self._held_since: float | None = None
        self._ignored_until = -math.inf

    def on_asked(self, heads: Heads) -> None:
        """Call `heads` for the keys of the requests that wait in this process."""
        self._heads = heads

    def waits(self) -> None:
        """A request waits."""
        self._waits()

    def served(self, key: str, cost: float) -> None:
        """A request of a key was sent to an instance; `cost` is its tokens over the weight of the key."""
        now = self._clock()
        if self._held_since is not None and now - self._held_since >= HOLD_S:
            self._ignored_until = now + IGNORE_S
        self._held_since = None
        if self._waits_elsewhere():
            self._own.setdefault(key, DecayingCounter(_MEMORY_S)).add(cost, now)
        else:
            self._own.clear()

    def failed(self) -> None:
        """A request tried, and there was no room."""
        self._held_since = None

    def holds_back(self, key: str, rank: float) -> bool:
        """Return whether a request leaves the room that there may be to another process."""
        now = self._clock()
        if now < self._ignored_until or not self._elsewhere or not self._is_behind(key, rank):
            self._held_since = None
            return False
        if self._held_since is None:
            self._held_since = now
        return now - self._held_since < HOLD_S

    def apply(self, origin: str, keys: Sequence[KeyShare]) -> None:
        """Another process has published this."""
        now = self._clock()
        _, before = self._elsewhere.get(origin, (now, ()))
        served_before = {each.key: each.served for each in before}
        if self._held_since is not None and any(each.served > served_before.get(each.key, 0.0) for each in keys):
            self._held_since = now  # the room is used
        self._elsewhere[origin] = now, keys

    def published(self) -> list[KeyShare]:
        """Return what other processes have to know; [] while no request waits."""
        waiting = dict(self._heads())
        if not waiting and not self._waits_elsewhere():
            return []
        served = self._served_here()
        first = sorted(waiting, key=lambda key: (waiting[key], served.get(key, 0.0)))
        keys = [*first, *(key for key in served if key not in waiting)]
        return [KeyShare(key, waiting.get(key), served.get(key, 0.0)) for key in keys[:MAX_KEYS]]

    def _waits_elsewhere(self) -> bool:
        return any(key.rank is not None for keys in self._fresh() for key in keys)

    def served_in_all(self) -> dict[str, float]:
        """Return what all processes have served of each key lately; {} while no request waits elsewhere."""
        if not self._elsewhere:
            return {}
        total = self._served_here()
        for keys in self._fresh():
            for other in keys:
                total[other.key] = total.get(other.key, 0.0) + other.served
        return total

    def _served_here(self) -> dict[str, float]:
        now = self._clock()
        return {key: recent.at(now) for key, recent in self._own.items()}

    def _is_behind(self, key: str, rank: float) -> bool:
        """Return whether a request that waits at another process is before one of `key` here."""
        here, total = self._served_here(), self.served_in_all()
        for keys in self._fresh():
            for other in keys:
                if other.rank is None or other.rank > rank:
                    continue
                if other.rank < rank:
                    return True
                # Requests of one key are shared out evenly between the processes where they wait.
                ours, theirs = (here, other.served) if other.key == key else (total, total[other.key])
                if theirs < _CLOSE * ours.get(key, 0.0):
                    return True
        return False

    def _fresh(self) -> list[Sequence[KeyShare]]:
        """Return what other processes published lately, and forget the rest."""
        now = self._clock()
        self._elsewhere = {origin: entry for origin, entry in self._elsewhere.items() if now - entry[0] <= FRESH_S}
        return [keys for _, keys in self._elsewhere.values()]


class FairShares:
    """The fair shares in all queues of a process."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._queues: dict[tuple[str, Role | None], QueueShare] = {}
        self._on_wait: Callable[[], None] = _ignore

    def on_wait(self, callback: Callable[[], None]) -> None:
        """Call `callback` when a request waits."""
        self._on_wait = callback

    def of(self, model: str, role: Role | None) -> QueueShare:
        queue = self._queues.get((model, role))
        if queue is None:
            queue = self._queues[model, role] = QueueShare(self._clock, lambda: self._on_wait())
        return queue

    def published(self) -> list[QueueShares]:
        """Return what other processes have to know; [] while no request waits."""
        queues = ((model, role, queue.published()) for (model, role), queue in self._queues.items())
        return [QueueShares(model, role, keys) for model, role, keys in queues if keys]

    def apply(self, origin: str, queues: Iterable[QueueShares]) -> None:
        """Another process has published this."""
        for each in queues:
            self.of(each.model, each.role).apply(origin, each.keys)


def _ignore() -> None:
    """There are no other processes."""
