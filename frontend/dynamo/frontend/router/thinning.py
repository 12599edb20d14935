"""Thins out the blocks of long prompts, where exactness to the block is not needed.

The first 16 blocks are kept, then every sixteenth, always at the same positions so that prompts stay comparable. The shared
prefix of two prompts is then exact to within 15 blocks, for a tenth of the time and memory.
"""

from __future__ import annotations

from collections.abc import Sequence

DENSE = 16
STRIDE = 16


def kept(blocks: Sequence[int]) -> Sequence[int]:
    """Return the sequence hashes of a prompt that are kept."""
    if len(blocks) <= DENSE:
        return blocks
    return [*blocks[:DENSE], *blocks[DENSE + STRIDE - 1 :: STRIDE]]


def covered(count: int) -> int:
    """Return how many leading blocks the first `count` kept ones represent."""
    return count if count <= DENSE else DENSE + (count - DENSE) * STRIDE
