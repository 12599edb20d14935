"""Blocks that a store announced and that were not there: stores need not announce what they drop.

When a response shows that an engine found less of a prompt than its disk or the shared store should have had, the first block
that was missing is doubted: it, and what continues it, count as absent for ten minutes, or until it is announced anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from dynamo.common.kv.tiers import Tier
from dynamo.common.names import InstanceId

DOUBTED_S = 600.0
_MOST = 65_536
"""More doubts than these drop the oldest."""

DOUBTFUL = frozenset({Tier.DISK, Tier.SHARED})
"""The tiers that may lose blocks without a word."""


class Doubts:
    """Not for several threads."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._until: dict[tuple[InstanceId | None, int], float] = {}
        """When each doubt ends, by instance (None: of the store that all share) and block, the first to end first."""

    def __len__(self) -> int:
        return len(self._until)

    def add(self, instance: InstanceId, tier: Tier, block: int) -> None:
        """Doubt that an instance finds a block on a tier."""
        key = _key(instance, tier, block)
        self._until.pop(key, None)
        if len(self._until) >= _MOST:
            del self._until[next(iter(self._until))]
        self._until[key] = self._clock() + DOUBTED_S

    def settle(self, instance: InstanceId, tier: Tier, blocks: Iterable[int]) -> None:
        """Drop the doubts about blocks that were announced now."""
        for block in blocks:
            self._until.pop(_key(instance, tier, block), None)

    def remove_instance(self, instance: InstanceId) -> None:
        self._until = {key: until for key, until in self._until.items() if key[0] != instance}

    def believed(self, instance: InstanceId, tier: Tier, blocks: Sequence[int], first: int, end: int) -> int:
        """Return where the blocks from `first` to `end` that are said to be on a tier of an instance end without a doubt."""
        now = self._clock()
        for position in range(first, end):
            until = self._until.get(_key(instance, tier, blocks[position]))
            if until is not None and until > now:
                return position
        return end


def _key(instance: InstanceId, tier: Tier, block: int) -> tuple[InstanceId | None, int]:
    return (None if tier is Tier.SHARED else instance, block)
