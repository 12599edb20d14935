"""Which units of an arena are free: a buddy allocator that returns what a request does not need of its block.

A run of any length comes out of the smallest free block that is long enough; the rest of that block becomes free again, as
blocks of its own. Blocks are aligned to their length, which is a power of two, and merge with their neighbours when both are
free. Bodies tend to have the same sizes, so a run that is returned is kept whole for the next of its length, and becomes blocks
only when one is needed: when everything has been returned there can be one block again, however long that took.
"""

from __future__ import annotations

from collections import defaultdict

_MOST_KEPT = 256
"""More returned runs than these all become blocks."""


class Units:
    """The units of one arena, numbered from 0."""

    __slots__ = ("_blocks", "_kept", "_kept_count", "_runs", "count", "free")

    def __init__(self, count: int) -> None:
        self.count = count
        self.free = count
        """Units that no run holds."""
        self._blocks: list[dict[int, None]] = [{} for _ in range(count.bit_length())]
        """By level: the starts of free blocks of `2 ** level` units. The one that became free last is used first, since its
        pages are the most likely to be in a cache."""
        self._runs: dict[int, int] = {}
        """Lengths of the runs in use, by start."""
        self._kept: defaultdict[int, list[int]] = defaultdict(list)
        """The starts of returned runs that are kept whole, by length. As with blocks, the last is used first."""
        self._kept_count = 0
        self._put(0, count)

    def __repr__(self) -> str:
        return f"<Units {self.count - self.free} of {self.count} in use, by {len(self._runs)} runs>"

    def allocate(self, count: int) -> int | None:
        """Return the start of a run of `count` adjacent units, at least one; None if no free block is that long."""
        start: int | None
        if kept := self._kept.get(count):
            start = kept.pop()
            self._kept_count -= 1
        else:
            start = self._cut(count)
            if start is None and self._kept_count:
                self._merge()
                start = self._cut(count)
            if start is None:
                return None
        self.free -= count
        self._runs[start] = count
        return start

    def release(self, start: int) -> None:
        """Return the run that begins at `start`. Raises KeyError if there is none."""
        count = self._runs.pop(start)
        self.free += count
        self._kept[count].append(start)
        self._kept_count += 1
        if self._kept_count > _MOST_KEPT:
            self._merge()

    def shorten(self, start: int, count: int) -> None:
        """Keep the first `count` units, at least one, of the run that begins at `start`, and return the others."""
        spare = self._runs[start] - count
        self.free += spare
        self._put(start + count, spare)
        self._runs[start] = count

    def _cut(self, count: int) -> int | None:
        """Return the start of a run out of the smallest free block that is long enough; None if there is none."""
        blocks = self._blocks
        for level in range((count - 1).bit_length(), len(blocks)):
            if blocks[level]:
                break
        else:
            return None
        start, _ = blocks[level].popitem()
        if spare := (1 << level) - count:
            self._put(start + count, spare)
        return start

    def _merge(self) -> None:
        """Make blocks of the runs that are kept whole."""
        for count, starts in self._kept.items():
            for start in starts:
                self._put(start, count)
        self._kept.clear()
        self._kept_count = 0

    def _put(self, start: int, count: int) -> None:
        """Make blocks of a run, as few as are aligned."""
        while count:
            level = count.bit_length() - 1
            if start:
                level = min(level, (start & -start).bit_length() - 1)
            self._put_block(start, level)
            start += 1 << level
            count -= 1 << level

    def _put_block(self, start: int, level: int) -> None:
        blocks = self._blocks
        while level < len(blocks) - 1 and (other := start ^ (1 << level)) in blocks[level]:
            del blocks[level][other]
            start &= other
            level += 1
        blocks[level][start] = None
