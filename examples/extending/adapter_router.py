"""A router policy: requests for one LoRA adapter go to one instance, so that each instance keeps few adapters loaded.

Rendezvous hashing chooses the instance: each pair of adapter and instance has a weight, and the largest weight wins. When an
instance leaves, only its own adapters move.
"""

from __future__ import annotations

from collections.abc import Sequence

from xxhash import xxh3_64_intdigest

from dynamo.common.discovery import Instance
from dynamo.common.names import InstanceId
from dynamo.frontend.router.base import RouteRequest, RoutingDecision
from dynamo.frontend.router.simple import RoundRobin, Unbooked, requested_decision


class AdapterRouter(Unbooked):
    """By LoRA adapter; requests without one take turns."""

    def __init__(self) -> None:
        self._without = RoundRobin()

    def pick(self, request: RouteRequest, candidates: Sequence[Instance], *, explain: bool = False) -> RoutingDecision:
        if not request.adapter:
            return self._without.pick(request, candidates, explain=explain)
        decision = requested_decision(request, candidates)  # the instance that the client named, or the session's
        if decision is not None:
            return decision
        chosen = max(candidates, key=lambda instance: weight(request.adapter, instance.id))
        return RoutingDecision(chosen, "adapter")

    def removed(self, instance: InstanceId) -> None:
        self._without.removed(instance)


def weight(adapter: str, instance: InstanceId) -> int:
    """Return a number that is the same in every frontend, for one adapter on one instance."""
    return xxh3_64_intdigest(adapter.encode(), seed=instance)
