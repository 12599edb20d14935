"""The names of tiers, as they travel."""

from __future__ import annotations

import pytest

from dynamo.common.kv.hashes import pack_hashes
from dynamo.common.kv.tiers import SLOW_TIERS, Tier, TierChange, parse_tier_price


@pytest.mark.parametrize("tier", SLOW_TIERS)
def test_a_change_names_its_tier(tier: Tier) -> None:
    change = TierChange(tier.value, pack_hashes([1, 2]), pack_hashes([3]))
    assert (change.tier, change.stored_hashes, change.removed_hashes) == (tier, [1, 2], [3])


@pytest.mark.parametrize("name", ["gpu", "tape", "", "CPU"])
def test_a_change_of_another_name_is_of_no_tier(name: str) -> None:
    assert TierChange(name, pack_hashes([1])).tier is None


def test_a_price_is_read_with_its_tier() -> None:
    assert parse_tier_price("cpu=0.0002") == (Tier.CPU, 0.0002)
    assert parse_tier_price("shared=0") == (Tier.SHARED, 0.0)


@pytest.mark.parametrize("text", ["", "cpu", "cpu=", "cpu=x", "gpu=1", "tape=1", "cpu=-1", "cpu=nan", "cpu=inf", "0.1"])
def test_anything_else_is_no_price(text: str) -> None:
    with pytest.raises(ValueError, match="is not one of cpu, disk, shared with the seconds to fetch a block"):
        parse_tier_price(text)
