"""How many blocks have to be computed again because others took their place.

An instance whose cache is full evicts a block for each one that it computes. Some of the evicted blocks are wanted again later
and have to be computed again, which evicts others. If `s` is the share of the blocks an instance computes that some instance had
evicted before, each of them causes `s + s² + … = s / (1 − s)` further ones.

The share is estimated for each instance from KV events, of a sample of blocks that is chosen by their hashes. Evicted blocks of
the sample are remembered for at least as long as it takes the fleet to evict all that it caches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from dynamo.common.discovery import Instance
from dynamo.common.kv.events import KvUpdate
from dynamo.common.kv.hashes import HASH_BYTES, unpack_hashes
from dynamo.common.names import InstanceId
from dynamo.frontend.router.cost_terms import COST_TERMS, CostTerms

_REMEMBERED = 32_768
"""So many to twice as many evicted blocks of the sample are remembered, of all instances."""
_DENSEST = 0b11
"""A block is sampled if these bits of its hash are 0: every fourth; in large fleets more bits have to be 0."""
_BATCH = 8
"""The share is estimated anew after so many blocks of the sample."""
_WEIGHT = 0.125
"""Weight of the newest batch in the estimated share."""
_MANY_BYTES = 64 * HASH_BYTES
"""The sample of more blocks is taken by numpy."""


class InstanceEvictions:
    """What one instance evicts."""

    __slots__ = ("_computed", "_computed_again", "further", "is_full", "share")

    def __init__(self) -> None:
        self.further = 0.0
        """How many blocks have to be computed again for each that the instance computes."""
        self.is_full = False
        """Whether it has evicted blocks."""
        self.share = 0.0
        """Share of the blocks computed by the instance that had been evicted before."""
        self._computed = 0
        """Blocks of the sample since the share was estimated."""
        self._computed_again = 0

    def compute(self, blocks: int, again: int, most_further: float) -> None:
        """Count computed blocks of the sample, `again` of which had been evicted."""
        self._computed += blocks
        self._computed_again += again
        if self._computed >= _BATCH:
            self.share += _WEIGHT * (self._computed_again / self._computed - self.share)
            self._computed = self._computed_again = 0
            self.further = min(self.share / max(1.0 - self.share, 1e-9), most_further)


class Evictions:
    """What the instances of one model and role evict: a table with a row per instance. Not for several threads."""

    def __init__(self, cached: Callable[[], int], terms: CostTerms = COST_TERMS) -> None:
        """`cached` returns how many blocks the fleet caches."""
        self.epoch = 0
        """Changes whenever an instance gets another row."""
        self._cached = cached
        self._most_further = terms.most_further
        self._instances: dict[InstanceId, InstanceEvictions] = {}
        self._unsampled = _DENSEST
        """Bits of hashes, all 0 for blocks of the sample."""
        self._evicted: set[int] = set()
        self._evicted_before: set[int] = set()

    def __repr__(self) -> str:
        return f"<Evictions instances={len(self._instances)} remembered={self.remembered}>"

    @property
    def remembered(self) -> int:
        """How many evicted blocks are remembered."""
        return len(self._evicted) + len(self._evicted_before)

    def rows(self, instances: Sequence[Instance]) -> list[InstanceEvictions]:
        return [self._row(instance.id) for instance in instances]

    def apply(self, instance: InstanceId, update: KvUpdate, is_kept: Callable[[int], bool] | None = None) -> None:
        """Take an update of what an instance caches into account. `is_kept`: whether it has a block on another tier."""
        if update.cleared:  # its cache is not full: what it stores now counts for nothing, and it may be gone
            return self.remove_instance(instance)
        row = self._row(instance)
        if update.removed:
            row.is_full = True
            self._evict(update.removed, is_kept)
        if update.stored and row.is_full:
            sample = self._sampled(update.stored)
            again = [block for block in sample if block in self._evicted or block in self._evicted_before]
            self._evicted.difference_update(again)
            self._evicted_before.difference_update(again)
            row.compute(len(sample), len(again), self._most_further)

    def remove_instance(self, instance: InstanceId) -> None:
        """Forget what an instance evicted: its cache is empty, or it is gone."""
        if self._instances.pop(instance, None) is not None:
            self.epoch += 1
        if not self._instances:
            self._evicted, self._evicted_before = set(), set()

    def _row(self, instance: InstanceId) -> InstanceEvictions:
        row = self._instances.get(instance)
        if row is None:
            row = self._instances[instance] = InstanceEvictions()
        return row

    def _sampled(self, packed: bytes) -> list[int]:
        """Return the blocks of the sample among packed ones."""
        if not packed[_MANY_BYTES : _MANY_BYTES + 1]:  # no call for each update
            unsampled = self._unsampled
            return [block for block in unpack_hashes(packed) if not block & unsampled]
        blocks = np.frombuffer(packed, "<u8")
        sample: list[int] = blocks[blocks & np.uint64(self._unsampled) == 0].tolist()
        return sample

    def _evict(self, packed: bytes, is_kept: Callable[[int], bool] | None) -> None:
        sample = self._sampled(packed)
        self._evicted.update(sample if is_kept is None else [block for block in sample if not is_kept(block)])
        if len(self._evicted) >= _REMEMBERED:
            unsampled, cached = _DENSEST, self._cached()
            while cached > _REMEMBERED * (unsampled + 1):
                unsampled = unsampled << 1 | 1
            is_sparser = bool(unsampled & ~self._unsampled)
            self._unsampled = unsampled
            evicted = self._evicted
            self._evicted_before = {block for block in evicted if not block & unsampled} if is_sparser else evicted
            self._evicted = set()
