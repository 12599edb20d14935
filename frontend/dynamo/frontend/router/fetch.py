"""What an instance fetches of a prompt from tiers slower than its GPU's memory, and what it found there."""

from __future__ import annotations

import msgspec

from dynamo.common.kv.tiers import Tier


class TierFetch(msgspec.Struct, frozen=True, gc=False):
    """What one instance has of a prompt on slow tiers, behind what its GPU has."""

    hits: tuple[tuple[Tier, int], ...]
    """The blocks on each tier that are on no faster one; the fastest first, without zeros."""
    fetched: int
    """Blocks that need not be computed: those for which fetching is cheaper."""
    seconds: float
    """To fetch these."""
    assumed_s: float
    """For what part of the prediction all `hits` stand: to fetch these, and compute the others."""


class TierCount(msgspec.Struct, frozen=True, gc=False):
    """How much of a prompt routing counted on, and the engine found, on one tier, in blocks."""

    tier: Tier
    counted: int
    found: int


NO_FETCH = TierFetch((), 0, 0.0, 0.0)
"""Nothing of the prompt is on slow tiers, although the model's instances have some."""
