"""How many blocks have to be computed again because others took their place.

An instance whose cache is full evicts a block for each one that it computes. Some of the evicted blocks are wanted again later
and have to be computed again, which evicts others. If `s` is the share of computed blocks that some instance had evicted before,
each computed block causes `s + s² + … = s / (1 − s)` further ones.

The share is estimated from KV events: of every fourth block, which are chosen by their hash, the evicted ones are remembered.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dynamo.common.discovery import Instance
from dynamo.common.kv.events import KvUpdate
from dynamo.common.names import InstanceId

_SAMPLED = 3
"""Blocks are looked at if these bits of their hash are 0."""
_REMEMBERED = 32_768
"""So many to twice as many evicted blocks are remembered."""
_BATCH = 32
"""The share is estimated anew after so many sampled blocks."""
_WEIGHT = 0.125
"""Of the newest batch."""
_MOST_FURTHER = 4.0


class Evictions:
    """What the instances of one model evict. It is a table: the row of an instance is how many further blocks a block causes
    that is computed there, 0 while the instance has evicted none. Not for several threads.
    """

    def __init__(self) -> None:
        self.epoch = 0
        """Changes whenever a row does."""
        self.share = 0.0
        """Of the blocks that full instances compute, how many had been evicted before."""
        self._full: set[InstanceId] = set()
        """Instances that have evicted blocks."""
        self._evicted: set[int] = set()
        self._evicted_before: set[int] = set()
        self._computed = 0
        """Sampled blocks that full instances have computed since the share was estimated."""
        self._computed_again = 0

    def __repr__(self) -> str:
        return f"<Evictions share={self.share:.3f} full={len(self._full)}>"

    @property
    def remembered(self) -> int:
        """How many evicted blocks are remembered."""
        return len(self._evicted) + len(self._evicted_before)

    def rows(self, instances: Sequence[Instance]) -> Sequence[float]:
        further = min(self.share / (1.0 - self.share), _MOST_FURTHER) if self.share < 1.0 else _MOST_FURTHER
        return [further if instance.id in self._full else 0.0 for instance in instances]

    def apply(self, instance: InstanceId, update: KvUpdate) -> None:
        """Take an update of what an instance caches into account."""
        if update.cleared:
            self.remove_instance(instance)
        elif update.removed:
            if instance not in self._full:
                self._full.add(instance)
                self.epoch += 1
            self._evict(update.removed_hashes)
        if update.stored and instance in self._full:
            self._compute(update.stored_hashes)

    def remove_instance(self, instance: InstanceId) -> None:
        """Forget that an instance was full: its cache is empty, or it is gone."""
        if instance in self._full:
            self._full.remove(instance)
            self.epoch += 1

    def _evict(self, blocks: Iterable[int]) -> None:
        self._evicted.update([block for block in blocks if not block & _SAMPLED])
        if len(self._evicted) >= _REMEMBERED:
            self._evicted_before = self._evicted
            self._evicted = set()

    def _compute(self, blocks: Iterable[int]) -> None:
        sampled = [block for block in blocks if not block & _SAMPLED]
        again = [block for block in sampled if block in self._evicted or block in self._evicted_before]
        self._evicted.difference_update(again)
        self._evicted_before.difference_update(again)
        self._computed += len(sampled)
        self._computed_again += len(again)
        if self._computed >= _BATCH:
            self.share += _WEIGHT * (self._computed_again / self._computed - self.share)
            self._computed = self._computed_again = 0
            self.epoch += 1
