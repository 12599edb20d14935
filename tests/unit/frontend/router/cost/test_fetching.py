"""Learning how long fetching takes."""

from __future__ import annotations

from random import Random

import pytest

from dynamo.common.kv.tiers import Tier
from dynamo.frontend.router.cost.fetching import FetchModel
from dynamo.frontend.router.fetch import NO_FETCH, TierFetch

BLOCK_S = 2e-3
"""To compute a block of 16 tokens on a mid-sized model."""


def taught(prices: dict[Tier, float], *, noise: float = 0.0, bias_s: float = 0.0, observations: int = 200) -> FetchModel:
    """A model that has seen first tokens of prompts with some blocks on each of these tiers, or none."""
    model, rng = FetchModel(), Random(1)
    for _ in range(observations):
        hits = [(tier, rng.randrange(1, 200)) for tier in prices if rng.random() < 0.6]
        fetch = model.fetch(hits, BLOCK_S)
        computed_s = rng.uniform(0.01, 0.2)
        fetching_s = sum(prices[tier] * blocks for tier, blocks in hits)
        seconds = (computed_s + bias_s + fetching_s) * rng.lognormvariate(0.0, noise)
        model.learn(fetch, computed_s + fetch.assumed_s, seconds, BLOCK_S)
    return model


@pytest.mark.parametrize("price", [1e-5, 1e-4, 1e-3, 1.9e-3])
def test_a_price_is_learned_from_times_to_first_token(price: float) -> None:
    assert taught({Tier.CPU: price}).price_s(Tier.CPU, BLOCK_S) == pytest.approx(price, rel=0.05, abs=2e-6)


def test_prices_of_several_tiers_are_told_apart() -> None:
    model = taught({Tier.CPU: 1e-4, Tier.DISK: 1e-3, Tier.SHARED: 4e-4}, noise=0.1)
    prices = [model.price_s(tier, BLOCK_S) for tier in (Tier.CPU, Tier.DISK, Tier.SHARED)]
    assert prices == pytest.approx([1e-4, 1e-3, 4e-4], rel=0.3)


def test_predictions_that_are_off_anyway_make_no_price() -> None:
    assert taught({Tier.CPU: 1e-4}, bias_s=0.02).price_s(Tier.CPU, BLOCK_S) == pytest.approx(1e-4, rel=0.2)


@pytest.mark.parametrize("price", [1e-4, 1e-3, 3e-3])
def test_waits_that_are_predicted_wrongly_in_overload_hardly_change_a_price(price: float) -> None:
    right = in_overload(price, 1.0)
    assert all(right / 3 < in_overload(price, share) < right * 3 for share in (0.5, 0.7, 1.5))


def in_overload(price: float, share: float) -> float:
    """The price that is learned where waits are `share` of what is predicted; prompts that have more on the tier wait longer."""
    model, rng = FetchModel(), Random(2)
    for _ in range(1000):
        blocks = rng.randrange(200)
        fetch = model.fetch([(Tier.CPU, blocks)] if blocks else [], BLOCK_S)
        waited_s = 1.0 + 0.005 * blocks + rng.random()
        model.learn(fetch, waited_s + fetch.assumed_s, share * waited_s + price * blocks, BLOCK_S)
    return model.price_s(Tier.CPU, BLOCK_S)


def test_a_tier_that_is_dearer_than_computing_is_learned_and_worth_nothing() -> None:
    model = taught({Tier.DISK: 5e-3})
    assert model.price_s(Tier.DISK, BLOCK_S) == pytest.approx(5e-3, rel=0.1)
    fetch = model.fetch([(Tier.CPU, 3), (Tier.DISK, 10)], BLOCK_S)
    assert (fetch.hits, fetch.fetched) == (((Tier.CPU, 3), (Tier.DISK, 10)), 3)
    assert fetch.assumed_s == pytest.approx(fetch.seconds + 10 * BLOCK_S), "the dear ones count as computed"


def test_a_tier_that_becomes_cheap_again_is_used_again() -> None:
    model = taught({Tier.DISK: 5e-3})
    assert model.fetch([(Tier.DISK, 10)], BLOCK_S).fetched == 0
    for _ in range(300):
        fetch = model.fetch([(Tier.DISK, 100)], BLOCK_S)
        model.learn(fetch, 0.1 + fetch.assumed_s, 0.1 + 100 * 1e-4, BLOCK_S)
    assert model.fetch([(Tier.DISK, 10)], BLOCK_S).fetched == 10


def test_before_anything_is_learned_a_tier_costs_a_share_of_computing() -> None:
    model = FetchModel()
    prices = [model.price_s(tier, BLOCK_S) / BLOCK_S for tier in (Tier.CPU, Tier.DISK, Tier.SHARED)]
    assert prices == sorted(prices)
    assert all(0.0 < price < 1.0 for price in prices)
    model.learn(NO_FETCH, 0.1, 0.1, BLOCK_S)
    assert model.price_s(Tier.CPU, BLOCK_S) == pytest.approx(prices[0] * BLOCK_S)


def test_a_price_that_is_set_is_not_learned() -> None:
    model = FetchModel({Tier.CPU: 3e-4})
    fetch = model.fetch([(Tier.CPU, 10)], BLOCK_S)
    for _ in range(50):
        model.learn(fetch, 0.1, 0.5, BLOCK_S)
    assert model.price_s(Tier.CPU, BLOCK_S) == 3e-4
    assert fetch.seconds == pytest.approx(3e-3)


@pytest.mark.parametrize("seconds", [0.0, 1e9, 1e-9])
def test_odd_times_leave_prices_within_bounds(seconds: float) -> None:
    model = FetchModel()
    for _ in range(20):
        model.learn(TierFetch(((Tier.CPU, 10),), 10, 0.001, 0.001), 0.1, seconds, BLOCK_S)
    assert 0.0 <= model.price_s(Tier.CPU, BLOCK_S) <= 20.0 * BLOCK_S
    model.learn(NO_FETCH, 0.0, 0.0, BLOCK_S)
