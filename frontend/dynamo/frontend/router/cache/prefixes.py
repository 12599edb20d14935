"""Which blocks are in use, by how many prompts, at a price that does not grow with what prompts share."""

from __future__ import annotations

from collections.abc import Sequence


class PrefixCounts:
    """The blocks of some prompts, each prompt given as the sequence hashes of its blocks, or of the same part of them.

    A block's count is its children plus the prompts that end in it. So taking in a prompt, or giving it back, touches only the
    blocks that no other prompt shares, and the last one that is shared.
    """

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}

    def __len__(self) -> int:
        """Return the number of different blocks."""
        return len(self._counts)

    def take(self, blocks: Sequence[int]) -> int:
        """Add a prompt, and return how many of its leading blocks were in use before."""
        counts = self._counts
        low, high = 0, len(blocks)  # blocks before `low` are there, those from `high` on are not
        if not blocks or blocks[0] not in counts:  # none or all of them in use are the most frequent cases
            high = low
        elif blocks[-1] in counts:
            low = high
        while low < high:
            middle = (low + high) // 2
            if blocks[middle] in counts:
                low = middle + 1
            else:
                high = middle
        if low:
            counts[blocks[low - 1]] += 1
        if low < len(blocks):
            counts.update(dict.fromkeys(blocks[low:], 1))
        return low

    def give_back(self, blocks: Sequence[int]) -> int:
        """Remove a prompt that was added, and return how many of its leading blocks are still in use."""
        counts = self._counts
        left = len(blocks)
        for block in reversed(blocks):
            count = counts.pop(block, 1)  # absent where prompts of other processes contradict one another
            if count > 1:
                counts[block] = count - 1
                break
            left -= 1
        return left
