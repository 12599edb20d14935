"""Routers that look at neither caches nor load."""

from __future__ import annotations

import random
from collections.abc import Sequence

from dynamo.common.discovery import Instance
from dynamo.common.errors import DynamoError, InvalidRequest, NoInstances
from dynamo.common.names import InstanceId
from dynamo.frontend.router.base import RouteRequest, RoutingDecision
from dynamo.frontend.router.hashing import PromptHashes


def position(instance: InstanceId, candidates: Sequence[Instance]) -> int | None:
    """Where an instance stands among the candidates; None if it does not."""
    for at, candidate in enumerate(candidates):
        if candidate.id == instance:
            return at
    return None


def position_of_least(values: Sequence[float], rng: random.Random) -> int:
    """Where the smallest value stands; of equal ones, any."""
    least = min(values)
    if values.count(least) == 1:
        return values.index(least)
    return rng.choice([at for at, value in enumerate(values) if value == least])


def pinned(request: RouteRequest, candidates: Sequence[Instance]) -> int | None:
    """Position of the instance that the client named itself; None if it named none. Raises NoInstances if that one is absent."""
    if request.pinned is None:
        return None
    at = position(request.pinned, candidates)
    if at is None:
        raise NoInstances(request.model)
    return at


def wished(request: RouteRequest, candidates: Sequence[Instance]) -> RoutingDecision | None:
    """The instance that the request names, for routers that do not know who is busy. Raises NoInstances if a pin is absent."""
    at = pinned(request, candidates)
    if at is not None:
        return RoutingDecision(candidates[at], "pinned")
    if request.preferred is not None:
        at = position(request.preferred, candidates)
        if at is not None:
            return RoutingDecision(candidates[at], "preferred")
    return None


class Unbooked:
    """The part of a router that keeps no bookings and looks at no prompts."""

    def prompt_hashes(self, request: RouteRequest, candidates: Sequence[Instance]) -> PromptHashes | None:
        return None

    def missing_tokens(self, request: RouteRequest, candidates: Sequence[Instance]) -> int | None:
        return None

    def first_token(self, booking_id: str) -> None: ...

    def finished(self, booking_id: str, error: DynamoError | None = None) -> None: ...

    def removed(self, instance: InstanceId) -> None: ...


class RandomChoice(Unbooked):
    """Any candidate, each as likely as the others."""

    def __init__(self, rng: random.Random | None = None) -> None:
        self._rng = rng or random.Random()

    def pick(self, request: RouteRequest, candidates: Sequence[Instance], *, explain: bool = False) -> RoutingDecision:
        return wished(request, candidates) or RoutingDecision(candidates[int(self._rng.random() * len(candidates))], "random")


class Direct(Unbooked):
    """Only the instance that the request names."""

    def pick(self, request: RouteRequest, candidates: Sequence[Instance], *, explain: bool = False) -> RoutingDecision:
        at = pinned(request, candidates)
        if at is None:
            raise InvalidRequest("requests must name their instance here: the router mode is 'direct'")
        return RoutingDecision(candidates[at], "pinned")


class RoundRobin(Unbooked):
    """Each model's instances in turn: always the one whose last turn is longest ago.

    Who joins comes next, who leaves is left out, who was left out for a moment keeps its place: nobody else's turn is skipped
    or doubled.
    """

    def __init__(self, rng: random.Random | None = None) -> None:
        self._rng = rng or random.Random()
        self._turns: dict[str, _Turns] = {}

    def pick(self, request: RouteRequest, candidates: Sequence[Instance], *, explain: bool = False) -> RoutingDecision:
        turns = self._turns.get(request.model)
        if turns is None:
            turns = self._turns[request.model] = _Turns(self._rng)
        decision = wished(request, candidates)  # a pin is the client's decision; it costs that instance no turn
        return decision or RoutingDecision(turns.next(candidates), "round-robin")

    def removed(self, instance: InstanceId) -> None:
        for model, turns in list(self._turns.items()):
            turns.forget(instance)
            if not turns.last:
                del self._turns[model]


class _Turns:
    """Whose turn it is in one model.

    While the candidates stay the same tuple, as they do between changes of the fleet, a turn is one step along `queue`, however
    many instances there are. Any other candidates (a changed fleet, a retry that leaves one out) are put in order anew.
    """

    __slots__ = ("_at", "_clock", "_queue", "_rng", "_source", "last")

    def __init__(self, rng: random.Random) -> None:
        self.last: dict[InstanceId, int] = {}
        """When each instance had its last turn, counted in turns."""
        self._clock = 0
        self._rng = rng
        self._source: Sequence[Instance] = ()
        self._queue: list[Instance] = []
        self._at = 0

    def next(self, candidates: Sequence[Instance]) -> Instance:
        if candidates is not self._source:
            # Frontends that start together must not all begin with the same instance: equal ones are shuffled.
            order = [(self.last.get(instance.id, -1), self._rng.random(), at) for at, instance in enumerate(candidates)]
            self._queue = [candidates[at] for _, _, at in sorted(order)]
            self._at = 0
            self._source = candidates if isinstance(candidates, tuple) else ()
        instance = self._queue[self._at]
        self._at = (self._at + 1) % len(self._queue)
        self._clock += 1
        self.last[instance.id] = self._clock
        return instance

    def forget(self, instance: InstanceId) -> None:
        self.last.pop(instance, None)
