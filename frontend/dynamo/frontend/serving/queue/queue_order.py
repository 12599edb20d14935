"""Which request of a queue is next.

Requests are ordered by priority and arrival, or by priority per token. With policy `prefix`, an instance that has room again
takes, of those that have waited longest, the one of which it has most cached. First come, first served would send each request to
whichever instance has room, whatever is cached there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from dynamo.frontend.config import QueuePolicy

MOST_PASSES = 32
"""So many requests that came later may be served before one of equal rank."""


class Queued(Protocol):
    """A request that waits. Of two with the same rank, the one with the lower number came first."""

    @property
    def number(self) -> int: ...

    @property
    def rank(self) -> float: ...

    def missing_tokens(self) -> int | None:
        """Return how many tokens of its prompt have to be computed where there is room; None: unknown, or there is no room."""
        ...


T = TypeVar("T", bound=Queued)


def rank_and_order(policy: QueuePolicy, priority: int, tokens: int, number: int) -> tuple[float, tuple[float, int]]:
    """Return what a request is compared by with those of other keys, and with those of its own. Lower is earlier."""
    rank = rank_of(policy, priority)
    if policy is QueuePolicy.WSPT:
        return rank, (-(1 + max(priority, 0)) / max(tokens, 1), number)
    return rank, (rank, number)


def rank_of(policy: QueuePolicy, priority: int) -> float:
    """Return what a request is compared by with those of other keys. Lower is earlier."""
    return 0.0 if policy is QueuePolicy.WSPT else -float(priority)


def nearest_to_caches(waiting: Sequence[T]) -> T:
    """Return the request that has the fewest tokens to compute, among those that may be next; of equal ones, the first."""
    first = min(waiting, key=_order)
    if first.missing_tokens() is None:
        return first
    last = first.number + MOST_PASSES
    return min((each for each in waiting if each.rank == first.rank and each.number <= last), key=_distance)


def _order(each: Queued) -> tuple[float, int]:
    return each.rank, each.number


def _distance(each: Queued) -> tuple[int, int]:
    return each.missing_tokens() or 0, each.number
