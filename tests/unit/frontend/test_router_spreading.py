"""When a prefix is computed on a further instance."""

from __future__ import annotations

from dynamo.frontend.router.latency import Predictions
from dynamo.frontend.router.spreading import PrefixCredits

PREFIX = 7


def placements(credits: PrefixCredits, count: int, *, wait_s: float, premium_s: float, prefix: int = PREFIX) -> list[int]:
    """Place requests whose prefix the first instance has; the second one, which has not, is idle."""
    positions = []
    for _ in range(count):
        predicted = Predictions([1.0 + wait_s, 1.0 + premium_s], [0.0, 0.0], [0.0, premium_s])
        costs = credits.discounted(prefix, predicted)
        position = costs.index(min(costs))
        credits.settle(prefix, predicted, position)
        positions.append(position)
    return positions


def test_a_prefix_that_is_used_again_and_again_is_computed_on_another_instance() -> None:
    """A quarter of 0.4 s is credited per request; from 0.6 s on, computing costs less than waiting."""
    assert placements(PrefixCredits(), 9, wait_s=0.4, premium_s=1.0) == [0] * 7 + [1, 0]


def test_a_prefix_stays_where_it_is_while_no_request_would_have_been_better_off() -> None:
    credits = PrefixCredits()
    assert placements(credits, 100, wait_s=0.0, premium_s=1.0) == [0] * 100
    assert len(credits) == 0


def test_credit_is_for_one_prefix_only() -> None:
    credits = PrefixCredits()
    placements(credits, 7, wait_s=0.4, premium_s=1.0)
    assert placements(credits, 1, wait_s=0.4, premium_s=1.0, prefix=8) == [0]
    assert placements(credits, 1, wait_s=0.4, premium_s=1.0) == [1]


def test_credits_of_the_prefixes_used_longest_ago_are_forgotten() -> None:
    credits = PrefixCredits()
    for prefix in range(20_000):
        placements(credits, 1, wait_s=0.4, premium_s=1.0, prefix=prefix)
    assert len(credits) == 10_000
    assert placements(credits, 6, wait_s=0.4, premium_s=1.0, prefix=0) == [0] * 6
