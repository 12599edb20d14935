"""When a prefix is computed on a further instance."""

from __future__ import annotations

from dynamo.frontend.router.cost.spreading import PrefixCredits, cheapest_without

PREFIX = 7


def placements(
    credits: PrefixCredits, count: int, *, wait_s: float, premium_s: float, prefix: int = PREFIX, idle: float = 1.0
) -> list[int]:
    """Place requests whose prefix the first instance has; the second one, which has not, is idle."""
    positions = []
    for _ in range(count):
        costs = [1.0 + wait_s, 1.0 + premium_s]
        credits.discount(prefix, costs, 1, premium_s)
        position = costs.index(min(costs))
        if position == 1:
            credits.buy(prefix, premium_s)
        else:
            credits.rent(prefix, wait_s, idle)
        positions.append(position)
    return positions


def test_a_prefix_that_is_used_again_and_again_is_computed_on_another_instance() -> None:
    """A quarter of 0.4 s is credited per request; from 0.6 s on, computing costs less than waiting."""
    assert placements(PrefixCredits(), 9, wait_s=0.4, premium_s=1.0) == [0] * 7 + [1, 0]


def test_a_prefix_spreads_later_while_instances_compute_prompts_for_much_of_their_time() -> None:
    assert placements(PrefixCredits(), 15, wait_s=0.4, premium_s=1.0, idle=0.5) == [0] * 13 + [1, 0]


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


def test_a_prefix_spreads_to_the_cheapest_instance_that_has_less_of_it() -> None:
    costs = [1.0, 2.0, 3.0, 4.0]
    assert cheapest_without(costs, {0: 8, 1: 8}, 8) == 2
    assert cheapest_without(costs, {0: 8, 1: 3}, 8) == 1
    assert cheapest_without(costs, dict.fromkeys(range(4), 8), 8) is None
