"""Routers that use neither KV caches nor load."""

from __future__ import annotations

import random
from collections.abc import Sequence

from dynamo.common.discovery import Instance
from dynamo.common.errors import DynamoError, InvalidRequest, NoInstances
from dynamo.common.names import InstanceId
from dynamo.frontend.router.base import RouteRequest, RoutingDecision
from dynamo.frontend.router.cache.hashing import PromptHashes
from dynamo.frontend.router.fetch import TierCount


def position_of(instance: InstanceId, candidates: Sequence[Instance]) -> int | None:
    """Return the position of an instance among the candidates; None if it is none of them."""
    for index, candidate in enumerate(candidates):
        if candidate.id == instance:
            return index
    return None


def position_of_least(values: Sequence[float], rng: random.Random) -> int:
    """Return the position of the smallest value; ties are broken at random."""
    least = min(values)
    if values.count(least) == 1:
        return values.index(least)
    return rng.choice([index for index, value in enumerate(values) if value == least])


def pinned(request: RouteRequest, candidates: Sequence[Instance]) -> int | None:
    """Return the position of the pinned instance; None if the request pins none. Raises NoInstances if it is no candidate."""
    if request.pinned is None:
        return None
    index = position_of(request.pinned, candidates)
    if index is None:
        raise NoInstances(request.model)
    return index


def requested_decision(request: RouteRequest, candidates: Sequence[Instance]) -> RoutingDecision | None:
    """Return a decision for the pinned or preferred instance, for routers that ignore load; None if there is none.

    Raises NoInstances if the pinned instance is no candidate.
    """
    if request.pinned is not None and (index := pinned(request, candidates)) is not None:
        return RoutingDecision(candidates[index], "pinned")
    if request.preferred is not None:
        index = position_of(request.preferred, candidates)
        if index is not None:
            return RoutingDecision(candidates[index], "preferred")
    return None


class Unbooked:
    """Base of routers that keep no bookings and ignore prompts."""

    def prompt_hashes(self, request: RouteRequest, candidates: Sequence[Instance]) -> PromptHashes | None:
        return None

    def missing_tokens(self, request: RouteRequest, candidates: Sequence[Instance], *, with_room: bool = False) -> int | None:
        return None

    def first_token(self, booking_id: str) -> None: ...

    def found_cached(self, request: RouteRequest, decision: RoutingDecision, tokens: int) -> Sequence[TierCount]:
        return ()

    def finished(self, booking_id: str, error: DynamoError | None = None) -> None: ...

    def removed(self, instance: InstanceId) -> None: ...


class RandomChoice(Unbooked):
    """Chooses a candidate at random, all with the same probability."""

    def __init__(self, rng: random.Random | None = None) -> None:
        self._rng = rng or random.Random()

    def pick(self, request: RouteRequest, candidates: Sequence[Instance], *, explain: bool = False) -> RoutingDecision:
        return requested_decision(request, candidates) or RoutingDecision(
            candidates[int(self._rng.random() * len(candidates))], "random"
        )


class Direct(Unbooked):
    """Chooses the instance that the request pins, and refuses requests that pin none."""

    def pick(self, request: RouteRequest, candidates: Sequence[Instance], *, explain: bool = False) -> RoutingDecision:
        index = pinned(request, candidates)
        if index is None:
            raise InvalidRequest("requests must name their instance here: the router mode is 'direct'")
        return RoutingDecision(candidates[index], "pinned")


class RoundRobin(Unbooked):
    """Chooses the instances of each model in turn: always the one whose last turn is longest ago.

    A new instance comes next. An instance that leaves, or is excluded for one request, does not skip or double the turns of the
    others.
    """

    def __init__(self, rng: random.Random | None = None) -> None:
        self._rng = rng or random.Random()
        self._turns: dict[str, _Rotation] = {}

    def pick(self, request: RouteRequest, candidates: Sequence[Instance], *, explain: bool = False) -> RoutingDecision:
        turns = self._turns.get(request.model)
        if turns is None:
            turns = self._turns[request.model] = _Rotation(self._rng)
        decision = requested_decision(request, candidates)  # a pin is the client's decision; it costs that instance no turn
        return decision or RoutingDecision(turns.next(candidates), "round-robin")

    def removed(self, instance: InstanceId) -> None:
        for model, turns in list(self._turns.items()):
            turns.forget(instance)
            if not turns.last:
                del self._turns[model]


class _Rotation:
    """The turns of one model's instances.

    While the candidates are the same tuple, as they are between changes of the fleet, a turn is one step along the queue, however
    many instances there are. Other candidates (a changed fleet, a retry that excludes one) are put in order again.
    """

    __slots__ = ("_next", "_queue", "_rng", "_source", "last")

    def __init__(self, rng: random.Random) -> None:
        self.last: dict[InstanceId, None] = {}
        """The instances that have had a turn, in the order of their last turns."""
        self._rng = rng
        self._source: Sequence[Instance] = ()
        self._queue: list[Instance] = []
        self._next = 0

    def next(self, candidates: Sequence[Instance]) -> Instance:
        if candidates is not self._source:
            self._queue = self._in_order(candidates)
            self._next = 0
            self._source = candidates if isinstance(candidates, tuple) else ()
        instance = self._queue[self._next]
        self._next = (self._next + 1) % len(self._queue)
        self.last.pop(instance.id, None)
        self.last[instance.id] = None
        return instance

    def forget(self, instance: InstanceId) -> None:
        self.last.pop(instance, None)

    def _in_order(self, candidates: Sequence[Instance]) -> list[Instance]:
        """Return the candidates in the order of their next turns."""
        # New ones are shuffled: frontends that start together must not all begin with the same instance.
        new = [instance for instance in candidates if instance.id not in self.last]
        self._rng.shuffle(new)
        waiting = {instance.id: instance for instance in candidates}
        return new + [waiting[instance] for instance in self.last if instance in waiting]
