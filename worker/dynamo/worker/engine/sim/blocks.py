"""The KV memory of one simulated engine rank: blocks of equal size, shared by prefix.

A block is in one of these states:

    free        never used, or evicted
    private     belongs to one sequence, not computed to its end yet
    referenced  full, cached under its sequence hash, used by one or more sequences
    idle        full and cached, not in use: the next sequence with this prefix takes it, unless it is evicted before

Idle blocks are evicted least recently used first. A sequence gives its blocks back last block first, so what goes first is always
a leaf: no block is evicted while one that continues it is cached.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence


class BlockManager:
    """Accounts for `total` blocks. A request for more blocks than are available changes nothing and returns False."""

    def __init__(self, total: int, evicted: Callable[[Sequence[int]], None] | None = None) -> None:
        """`evicted` is called with blocks as they are evicted, leaves first."""
        self.total = total
        self._evicted = evicted
        self.private = 0
        """Blocks that belong to one sequence and are not full."""
        self._references: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        """In order of eviction. An OrderedDict, since removing the first item of a dict becomes slower with each removal."""
        self.stored: list[int] = []
        """Sequence hashes that became cached since the caller last emptied this list; parents before children."""
        self.removed: list[int] = []
        """Sequence hashes that were evicted since the caller last emptied this list."""

    def __repr__(self) -> str:
        return f"<BlockManager, active={self.active}, idle={len(self._idle)}, total={self.total}>"

    @property
    def active(self) -> int:
        """Blocks that sequences use."""
        return self.private + len(self._references)

    @property
    def cached(self) -> set[int]:
        """The sequence hashes of all cached blocks."""
        return {*self._references, *self._idle}

    def cached_prefix(self, hashes: Sequence[int]) -> int:
        """Return how many leading blocks of a prompt are cached."""
        references, idle = self._references, self._idle
        for position, block in enumerate(hashes):
            if block not in references and block not in idle:
                return position
        return len(hashes)

    def take(self, prefix: Sequence[int], more: int, *, keep_free: int = 0) -> bool:
        """Reference the blocks of `prefix`, which are cached, and add `more` private ones.

        Returns False, changing nothing, if that would leave less than `keep_free` blocks available.
        """
        references, idle = self._references, self._idle
        available = self.total - self.private - len(references)  # free, or can be evicted
        woken = sum(map(idle.__contains__, prefix))
        if available - woken - more < keep_free:
            return False
        for block in prefix:
            if block in references:
                references[block] += 1
            else:
                del idle[block]
                references[block] = 1
        self.private += more
        excess = self.private + len(references) + len(idle) - self.total
        if excess > 0:
            evict = idle.popitem
            gone = [evict(last=False)[0] for _ in range(excess)]
            self.removed.extend(gone)
            if self._evicted is not None:
                self._evicted(gone)
        return True

    def grow(self, more: int) -> bool:
        """Add `more` private blocks. Returns False, changing nothing, if there are not as many."""
        return self.take((), more)

    def commit(self, blocks: Sequence[int]) -> None:
        """Turn private blocks that are full into cached ones, referenced by their sequence.

        Blocks that two sequences computed at the same time are kept once.
        """
        references, idle = self._references, self._idle
        for block in blocks:
            if block in references:
                references[block] += 1
            else:
                references[block] = 1
                if block in idle:
                    del idle[block]
                else:
                    self.stored.append(block)
        self.private -= len(blocks)

    def give_back(self, held: Sequence[int], private: int) -> None:
        """Release the blocks of a sequence that ends: `held` are cached ones, first block first, `private` is a count."""
        references = self._references
        for block in reversed(held):
            count = references[block]
            if count > 1:
                references[block] = count - 1
            else:
                del references[block]
                self._idle[block] = None
        self.private -= private

    def clear(self) -> None:
        """Forget every idle block. Referenced ones stay."""
        self.removed.extend(self._idle)
        self._idle.clear()
