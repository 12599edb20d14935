"""The KV memory of one simulated engine rank: blocks of equal size, shared by prefix.

A block is in one of these states:

    free        never used, or evicted
    private     belongs to one sequence, not computed to its end yet
    referenced  full, known by its sequence hash, used by one or more sequences
    idle        full and known, used by nobody: the next sequence with this prefix takes it, unless it is evicted before

Idle blocks are evicted least recently used first. A sequence gives its blocks back last block first, so what goes first is always
a leaf: no block is evicted while one that continues it is cached.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class BlockManager:
    """Accounts for `total` blocks. Never fails silently: asking for more than there is changes nothing and says so."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.private = 0
        """Blocks that belong to one sequence and are not full."""
        self._references: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        """In order of eviction. Taking the first one out of a dict gets slower with each one taken; here it does not."""
        self.stored: list[int] = []
        """Sequence hashes that became cached since the caller last emptied this list; parents before children."""
        self.removed: list[int] = []
        """Sequence hashes that were evicted, likewise."""

    @property
    def active(self) -> int:
        """Blocks that sequences use."""
        return self.private + len(self._references)

    @property
    def available(self) -> int:
        """Blocks that can be had, by eviction if need be."""
        return self.total - self.active

    @property
    def cached(self) -> set[int]:
        """The sequence hashes of all cached blocks."""
        return {*self._references, *self._idle}

    def cached_prefix(self, hashes: Sequence[int]) -> int:
        """How many leading blocks of a prompt are cached."""
        references, idle = self._references, self._idle
        for position, block in enumerate(hashes):
            if block not in references and block not in idle:
                return position
        return len(hashes)

    def take(self, prefix: Sequence[int], more: int, *, keep_free: int = 0) -> bool:
        """References the blocks of `prefix`, which are cached, and makes `more` private ones.

        False, and nothing changed, if that would leave less than `keep_free` blocks available.
        """
        woken = sum(1 for block in prefix if block in self._idle)
        if self.available - woken - more < keep_free:
            return False
        references, idle = self._references, self._idle
        for block in prefix:
            if block in references:
                references[block] += 1
            else:
                del idle[block]
                references[block] = 1
        self._grow(more)
        return True

    def grow(self, more: int) -> bool:
        """Makes `more` private blocks; False, and nothing changed, if there are not as many."""
        if self.available < more:
            return False
        self._grow(more)
        return True

    def commit(self, blocks: Sequence[int]) -> None:
        """Private blocks are full: from now on they are cached, and referenced by their sequence.

        What two sequences computed at the same time is kept once.
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
        """A sequence ends: it references the blocks `held`, first block first, and has `private` ones."""
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
        """Forgets every idle block. Referenced ones stay."""
        self.removed.extend(self._idle)
        self._idle.clear()

    def _grow(self, more: int) -> None:
        self.private += more
        excess = self.active + len(self._idle) - self.total
        if excess > 0:
            evict = self._idle.popitem
            self.removed.extend([evict(last=False)[0] for _ in range(excess)])
