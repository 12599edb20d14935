"""When a prefix is worth computing on one more instance.

One request alone never gains from computing a prefix that is cached elsewhere, unless it would wait there longer than that
takes. But later ones do: they have one more instance to choose from. How many will come is not known. So each prefix saves up:
whenever a request goes where its prefix is cached although another instance, if it had the prefix, would have cost less, a
share of the difference is credited to the prefix. The credit pays for what computing the prefix on another instance costs more.
Once it suffices, the next request goes there and uses it up. This is how one hires skis until the hire has cost as much as
a pair: whatever comes, the sum is a small multiple of what it would be if the future were known.
"""

from __future__ import annotations

from operator import sub

from dynamo.frontend.router.latency import Predictions

_SHARE = 0.25
"""Of the difference. Not all of it: other prefixes' requests would have taken the place on the cheaper instance."""
_MOST_PREFIXES = 10_000
"""Above that, the credit that was used least recently is forgotten."""


class PrefixCredits:
    """The credit of each prefix of one model, in seconds. A prefix is named by the sequence hash of its last block."""

    def __init__(self) -> None:
        self._credits: dict[int, float] = {}
        """Least recently used first."""

    def __len__(self) -> int:
        return len(self._credits)

    def discounted(self, prefix: int, predicted: Predictions) -> list[float]:
        """Return the costs, those of instances that would have to compute the prefix less its credit."""
        credit = self._credits.get(prefix)
        if credit is None:
            return predicted.costs
        return [cost - min(credit, premium) for cost, premium in zip(predicted.costs, predicted.premiums, strict=True)]

    def settle(self, prefix: int, predicted: Predictions, position: int) -> None:
        """Record where a request went."""
        costs, premiums = predicted.costs, predicted.premiums
        credit = self._credits.pop(prefix, 0.0)
        if premiums[position]:
            credit -= premiums[position]
        else:
            credit += _SHARE * (costs[position] - min(map(sub, costs, premiums)))
        if credit > 0.0:
            if len(self._credits) >= _MOST_PREFIXES:
                del self._credits[next(iter(self._credits))]
            self._credits[prefix] = credit
