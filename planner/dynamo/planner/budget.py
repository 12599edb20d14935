"""What several pools get of GPUs that are fewer than they want.

First each pool gets its least instances. The other GPUs go, instance by instance, to where each saves most requests per second
from missing their goals; of those that lose the same, as where nothing is known, to the one that has the least share of what it
wants. A pool that misses as many with more instances, since its goals are out of reach, gets what others leave.

An instance that is to leave has its GPUs until it has left: others grow into them then, so that there are never more than the
budget.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from heapq import heapify, heappop, heappush
from typing import TypeAlias

from msgspec.structs import replace

from dynamo.common.scaling.pool import Pool
from dynamo.planner.pools import Decision, PoolView

_FURTHER = 32
"""Instances that one more may need beside it, before fewer requests miss the goals."""
_SAME = 9
"""Differences behind so many digits are none."""

_Turn: TypeAlias = tuple[bool, float, float, float, int]
"""Whether a pool has its least, the requests per second that a GPU more saves, below 0, the share that it has of what it wants,
its requests per second below 0, its position."""


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
    wishes = [
        _Wish(position, decision, gpus_of(decision.pool.model), least_of(decision.pool.model))
        for position, decision in enumerate(decisions)
    ]
    there = [len(views[decision.pool].instances) for decision in decisions]
    shares = _dealt([0] * len(wishes), [decision.instances for decision in decisions], budget, wishes)
    staying = [min(share, count) for share, count in zip(shares, there, strict=True)]
    occupied = sum(count * wish.gpus for count, wish in zip(there, wishes, strict=True))
    granted = _dealt(staying, shares, budget - occupied, wishes)
    return [_bounded(decision, number, budget) for decision, number in zip(decisions, granted, strict=True)]


class _Wish:
    """What one pool wants, and what it loses without."""

    def __init__(self, position: int, decision: Decision, gpus: int, least: int) -> None:
        self.gpus = gpus
        self._position = position
        self._decision = decision
        self._least = least

    def turn(self, instances: int, room: int) -> tuple[_Turn, int]:
        """Return when a pool that has so many instances gets more, of at most `room`, and how many more at once."""
        decision = self._decision
        saved, more = 0.0, 1
        if instances >= self._least:
            for further in range(1, min(room, _FURTHER) + 1):
                each = (self._missed(instances) - self._missed(instances + further)) / (further * self.gpus)
                if round(each - saved, _SAME) > 0.0:
                    saved, more = each, further
        share = instances / max(1, decision.instances)
        return (instances >= self._least, -round(saved, _SAME), share, -decision.forecast_per_s, self._position), more

    def _missed(self, instances: int) -> float:
        missed = self._decision.misses_per_s
        return missed[min(instances, len(missed) - 1)] if missed else 0.0


def _dealt(begin: Sequence[int], most: Sequence[int], budget: int, wishes: Sequence[_Wish]) -> list[int]:
    """Return instances from `begin` up to `most`, given to the pool whose turn it is, while the budget has GPUs."""
    dealt, left = list(begin), budget

    def next_of(position: int) -> tuple[_Turn, int]:
        room = min(most[position] - dealt[position], max(0, left) // wishes[position].gpus)
        turn, more = wishes[position].turn(dealt[position], room)
        return turn, more if room else 0

    queue = [next_of(position)[0] for position in range(len(wishes))]
    heapify(queue)
    while queue:
        queued = heappop(queue)
        position = queued[-1]
        turn, more = next_of(position)
        if more and turn > queued:
            heappush(queue, turn)  # as many as were worth that do not fit any more
        elif more:
            dealt[position] += more
            left -= more * wishes[position].gpus
            heappush(queue, next_of(position)[0])
    return dealt


def _bounded(decision: Decision, instances: int, budget: int) -> Decision:
    if instances == decision.instances:
        return decision
    reason = f"{decision.reason}; {instances} instead of {decision.instances} by the budget of {budget} GPUs"
    return replace(decision, instances=instances, by="budget", reason=reason)
