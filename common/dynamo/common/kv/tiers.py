"""Where an instance keeps a cached block: in the memory of its GPU, or in something slower that it fetches blocks from."""

from __future__ import annotations

import math
from enum import StrEnum

import msgspec

from dynamo.common.kv.hashes import unpack_hashes


class Tier(StrEnum):
    """The kinds of memory, fastest first. Their values travel in KV updates: a reader ignores a tier that it does not know."""

    GPU = "gpu"
    """Memory of the device that computes: a block there is used as it is. All other tiers are slower."""
    CPU = "cpu"
    """Memory of the host."""
    DISK = "disk"
    """Storage of the instance's machine."""
    SHARED = "shared"
    """A store that all instances read."""


SLOW_TIERS = (Tier.CPU, Tier.DISK, Tier.SHARED)
"""The tiers from which blocks are fetched, fastest first."""
MAX_TIER_CHANGES = 8
"""An update or a snapshot with more tiers is refused."""


class TierChange(msgspec.Struct, frozen=True, array_like=True):
    """What changed in one slow tier of an instance, to be applied in the order `removed`, `stored`."""

    name: str
    """The value of a `Tier`, or of one that this process does not know."""
    stored: bytes = b""
    """Sequence hashes, see `pack_hashes`."""
    removed: bytes = b""

    @property
    def tier(self) -> Tier | None:
        """The tier; None: this process does not know it, and has to ignore the change."""
        return _BY_NAME.get(self.name)

    @property
    def stored_hashes(self) -> list[int]:
        return unpack_hashes(self.stored)

    @property
    def removed_hashes(self) -> list[int]:
        return unpack_hashes(self.removed)


_BY_NAME = {tier.value: tier for tier in SLOW_TIERS}


def parse_tier_price(text: str) -> tuple[Tier, float]:
    """Return a slow tier and the seconds to fetch a block from it, from text such as `cpu=0.0002`. Raises ValueError."""
    name, _, price = text.partition("=")
    try:
        seconds = float(price)
    except ValueError:
        seconds = math.nan
    if name.strip() not in _BY_NAME or not (math.isfinite(seconds) and seconds >= 0.0):
        raise ValueError(f"is not one of {', '.join(_BY_NAME)} with the seconds to fetch a block, such as cpu=0.0002")
    return _BY_NAME[name.strip()], seconds
