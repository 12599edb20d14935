"""When a prefix is worth computing on one more instance.

One request alone never gains from computing a prefix that is cached elsewhere, unless it would wait there longer than that
takes. But later ones do: they have one more instance to choose from. How many will come is not known. So each prefix saves
up: whenever a request goes where its prefix is cached although another instance, if it had the prefix, would have cost less,
a share of the difference is credited to the prefix. The credit pays the premium, which is what computing the prefix on that
instance costs more. Once it suffices, the next request goes there and uses it up. This is how one hires skis until the hire
has cost as much as a pair: whatever comes, the sum is a small multiple of what it would be if the future were known.

Where caches are scarce, one more copy of a prefix evicts other prefixes, which have to be computed again. Then instances compute
prompts for much of their time, and what that delays lasts until their queues are empty. So the share is the smaller, the less of
their time instances compute no prompts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from dynamo.frontend.router.cost_terms import COST_TERMS, CostTerms

_MOST_PREFIXES = 10_000
"""Above that, the credit that was used least recently is forgotten."""


class PrefixCredits:
    """The credit of each prefix of one model, in seconds. A prefix is named by the sequence hash of its last block."""

    def __init__(self, terms: CostTerms = COST_TERMS) -> None:
        self._share = terms.spread_share
        self._credits: dict[int, float] = {}
        """Least recently used first."""

    def __len__(self) -> int:
        return len(self._credits)

    def discount(self, prefix: int, costs: list[float], position: int, premium_s: float) -> None:
        """Lower the cost of an instance that would have to compute the prefix by the credit, at most by the premium."""
        costs[position] -= min(self._credits.get(prefix, 0.0), premium_s)

    def rent(self, prefix: int, difference_s: float, idle: float) -> None:
        """Record that a request went where the prefix is cached, and by how much less it would have cost elsewhere.

        `idle`: the share of their time that instances compute no prompts.
        """
        self._set(prefix, self._credits.pop(prefix, 0.0) + self._share * idle * difference_s)

    def buy(self, prefix: int, premium_s: float) -> None:
        """Record that an instance computes the prefix."""
        self._set(prefix, self._credits.pop(prefix, 0.0) - premium_s)

    def _set(self, prefix: int, credit_s: float) -> None:
        if credit_s > 0.0:
            if len(self._credits) >= _MOST_PREFIXES:
                del self._credits[next(iter(self._credits))]
            self._credits[prefix] = credit_s


def cheapest_without(costs: Sequence[float], overlaps: Mapping[int, int], most: int) -> int | None:
    """Return the position of the lowest cost among the instances whose overlap is less than `most`; None if there is none."""
    if len(overlaps) == len(costs) and min(overlaps.values()) == most:
        return None
    others = list(costs)
    for position, blocks in overlaps.items():
        if blocks == most:
            others[position] = math.inf
    return others.index(min(others))
