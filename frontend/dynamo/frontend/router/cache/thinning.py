"""Thins out the blocks of long prompts, where exactness to the block is not needed.

The first 16 blocks are kept, then every sixteenth, always at the same positions so that prompts stay comparable. The shared
prefix of two prompts is then exact to within 15 blocks, for a tenth of the time and memory.

Prompts that other frontends publish are thinned out further, to one block for each time that the length doubles: a shared prefix
is then exact to within half, and a prompt of any length is cheap.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import NamedTuple

DENSE = 16
STRIDE = 16
_SPARSE_LENGTHS = [1 << power for power in range(24)]


def kept(blocks: Sequence[int]) -> Sequence[int]:
    """Return the sequence hashes of a prompt that are kept."""
    if len(blocks) <= DENSE:
        return blocks
    return [*blocks[:DENSE], *blocks[DENSE + STRIDE - 1 :: STRIDE]]


def covered(count: int) -> int:
    """Return how many leading blocks the first `count` kept ones represent."""
    return count if count <= DENSE else DENSE + (count - DENSE) * STRIDE


def kept_sparsely(blocks: Sequence[int]) -> Sequence[int]:
    """Return the sequence hashes of a prompt that are kept for other frontends."""
    return [blocks[length - 1] for length in _SPARSE_LENGTHS[: bisect_right(_SPARSE_LENGTHS, len(blocks))]]


def covered_sparsely(count: int) -> int:
    """Return how many leading blocks the first `count` of these represent."""
    return _SPARSE_LENGTHS[count - 1] if count else 0


class Thinning(NamedTuple):
    """Which blocks are kept, and how many leading blocks a number of kept ones represents."""

    kept: Callable[[Sequence[int]], Sequence[int]]
    covered: Callable[[int], int]


REGULAR = Thinning(kept, covered)
SPARSE = Thinning(kept_sparsely, covered_sparsely)
