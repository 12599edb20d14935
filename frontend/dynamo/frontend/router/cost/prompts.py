"""The part of a prompt that the cost of an instance depends on."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class Prompt(msgspec.Struct, frozen=True, gc=False):
    tokens: int
    block_size: int
    """0: the instances have no KV blocks."""
    hashes: Sequence[int]
    """Sequence hashes of the full blocks."""
    blocks: float
    """Blocks that the prompt fills, the last one counted as a fraction."""
    shared: int
    """How many leading `hashes` an earlier prompt probably had as well."""
