"""The names of tiers, as they travel."""

from __future__ import annotations

import pytest

from dynamo.common.kv.hashes import pack_hashes
from dynamo.common.kv.tiers import SLOW_TIERS, Tier, TierChange


@pytest.mark.parametrize("tier", SLOW_TIERS)
def test_a_change_names_its_tier(tier: Tier) -> None:
    change = TierChange(tier.value, pack_hashes([1, 2]), pack_hashes([3]))
    assert (change.tier, change.stored_hashes, change.removed_hashes) == (tier, [1, 2], [3])


@pytest.mark.parametrize("name", ["gpu", "tape", "", "CPU"])
def test_a_change_of_another_name_is_of_no_tier(name: str) -> None:
    assert TierChange(name, pack_hashes([1])).tier is None
