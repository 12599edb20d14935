"""What several pools get of GPUs that are fewer than they want.

First each pool gets its least instances, then each the same share of what it wants, so that all lose the same share. An instance
that is to leave has its GPUs until it has left: others grow into them then, so that there are never more than the budget.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from heapq import heapify, heappop, heappush

from msgspec.structs import replace

from dynamo.common.scaling.pool import Pool
from dynamo.planner.pools import Decision, PoolView

_Turn = tuple[bool, float, float, int]
"""Whether a pool has its least, the share that it has of what it wants, its requests per second below 0, its position."""


def share_gpus(
    decisions: Sequence[Decision],
    views: Mapping[Pool, PoolView],
    budget: int,
    *,
    gpus_of: Callable[[str], int],
    least_of: Callable[[str], int],
) -> list[Decision]:
    """Return the decisions with no more instances than the budget has GPUs for.

    `gpus_of` and `least_of` return the GPUs of an instance of a model, and the least instances of its pools.
    """
    wanted = [decision.instances for decision in decisions]
    gpus = [gpus_of(decision.pool.model) for decision in decisions]
    there = [len(views[decision.pool].instances) for decision in decisions]
    turns = [_turn(position, decision, least_of(decision.pool.model)) for position, decision in enumerate(decisions)]
    shares = _dealt([0] * len(wanted), wanted, gpus, budget, turns)
    staying = [min(share, count) for share, count in zip(shares, there, strict=True)]
    occupied = sum(count * each for count, each in zip(there, gpus, strict=True))
    granted = _dealt(staying, shares, gpus, budget - occupied, turns)
    return [_bounded(decision, number, budget) for decision, number in zip(decisions, granted, strict=True)]


def _turn(position: int, decision: Decision, least: int) -> Callable[[int], _Turn]:
    """Return what says when a pool that has so many instances gets the next one."""

    def turn(instances: int) -> _Turn:
        return instances >= least, instances / max(1, decision.instances), -decision.forecast_per_s, position

    return turn


def _dealt(
    begin: Sequence[int], most: Sequence[int], gpus: Sequence[int], budget: int, turns: Sequence[Callable[[int], _Turn]]
) -> list[int]:
    """Return instances from `begin` up to `most`, given one by one to the pool whose turn it is, while the budget has GPUs."""
    dealt, left = list(begin), budget
    queue = [turn(dealt[position]) for position, turn in enumerate(turns)]
    heapify(queue)
    while queue:
        position = heappop(queue)[-1]
        if dealt[position] < most[position] and gpus[position] <= left:
            dealt[position] += 1
            left -= gpus[position]
            heappush(queue, turns[position](dealt[position]))
    return dealt


def _bounded(decision: Decision, instances: int, budget: int) -> Decision:
    if instances == decision.instances:
        return decision
    reason = f"{decision.reason}; {instances} instead of {decision.instances} by the budget of {budget} GPUs"
    return replace(decision, instances=instances, by="budget", reason=reason)
