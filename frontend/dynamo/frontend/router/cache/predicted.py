"""Prefixes that instances will hold soon, predicted from the router's own decisions.

Short-lived predictions cover the time between a decision and the events it causes, so that a burst of requests with one prefix
goes to one instance. Long-lived ones replace events of engines that publish none.

A prediction need not be exact to the block: see `thinning.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush

from dynamo.common.names import InstanceId
from dynamo.frontend.router.cache.index import Match, PrefixIndex
from dynamo.frontend.router.cache.prefixes import PrefixCounts
from dynamo.frontend.router.cache.thinning import REGULAR, Thinning

_MAX_LISTED = 8
"""How many decisions may list a prediction, on average, before decisions are evicted early."""
_SPARE = 64
"""How many entries of forgotten decisions are kept at least."""
_BLOCKS_PER_TURN = 256
"""About how many expired predictions one call drops, so that no request waits for all of them after a pause."""


class PredictedIndex:
    """Predicted prefixes, each kept until `ttl_s` after its instance is expected to have computed it.

    Keeps at most `max_blocks` (block, instance) pairs; above that, those that expire first are evicted until `prune_ratio` of the
    maximum is left.
    """

    def __init__(self, ttl_s: float, max_blocks: int = 1 << 20, prune_ratio: float = 0.8, thinning: Thinning = REGULAR) -> None:
        self.ttl_s = ttl_s
        self._thinning = thinning
        self._max_blocks = max_blocks
        self._prune_to = int(max_blocks * prune_ratio)
        self._pruning = False
        self.index = PrefixIndex()
        self._decisions: dict[int, tuple[InstanceId, PrefixCounts, Sequence[int]]] = {}
        """(instance, its counts, kept blocks) by number."""
        self._expiring: list[tuple[float, int]] = []
        """A heap of (expires at, number). Some of these decisions may have been forgotten."""
        self._decided = 0
        """How many decisions there have been."""
        self._counts: dict[InstanceId, PrefixCounts] = {}
        self._size = 0
        self._listed = 0
        """Blocks in all decisions together."""

    def __len__(self) -> int:
        """Return how many (block, instance) pairs are kept."""
        return self._size

    def __repr__(self) -> str:
        return f"<PredictedIndex pairs={self._size} decisions={len(self._decisions)} ttl_s={self.ttl_s:g}>"

    def add(self, instance: InstanceId, blocks: Sequence[int], computed_at: float) -> int:
        """Record that `instance` was chosen for a prompt of these blocks. Return the number of this decision.

        `computed_at`: when it is expected to have computed them, in seconds of a monotonic clock.
        """
        return self.add_kept(instance, self._thinning.kept(blocks), computed_at)

    def add_kept(self, instance: InstanceId, blocks: Sequence[int], computed_at: float) -> int:
        """Do the same as `add` for a prompt that is thinned out already."""
        self._decided += 1
        if not blocks:
            return self._decided
        counts = self._counts.get(instance)
        if counts is None:
            counts = self._counts[instance] = PrefixCounts()
        before = len(counts)
        held = counts.take(blocks)
        self._size += len(counts) - before  # prompts of peer frontends may contradict one another: only counting is exact
        if held < len(blocks):
            self.index.store(instance, blocks[held:])
        self._decisions[self._decided] = (instance, counts, blocks)
        heappush(self._expiring, (computed_at + self.ttl_s, self._decided))
        self._listed += len(blocks)
        self._prune()
        return self._decided

    def forget(self, number: int) -> None:
        """Drop the prediction of a decision, because the instance will not compute the prompt."""
        decision = self._decisions.pop(number, None)
        if decision is not None:
            self._release(*decision)
            if not self._decisions:
                self._clear()
            elif len(self._expiring) > 2 * len(self._decisions) + _SPARE:
                self._expiring = [each for each in self._expiring if each[1] in self._decisions]
                heapify(self._expiring)

    def match(self, blocks: Sequence[int], now: float) -> Match:
        self.expire(now)
        covered = self._thinning.covered
        match = self.index.match(self._thinning.kept(blocks))
        return Match([(covered(count), mask) for count, mask in match.groups]) if match.groups else match

    def expire(self, now: float) -> None:
        """Drop expired predictions, only some of them if there are many."""
        stop = self._listed - _BLOCKS_PER_TURN
        while self._expiring and self._expiring[0][0] <= now and self._listed > stop:
            self._drop_first()
        self.index.sweep(1)

    def remove_instance(self, instance: InstanceId) -> None:
        self._size -= len(self._counts.pop(instance, ()))
        self.index.remove_instance(instance)

    def _prune(self) -> None:
        if self._size > self._max_blocks:
            self._pruning = True
            while self._size > self._max_blocks:
                self._drop_first()
        stop = self._listed - _BLOCKS_PER_TURN
        while self._pruning and self._listed > stop:
            self._pruning = self._size > self._prune_to
            if self._pruning:
                self._drop_first()
        while self._listed > _MAX_LISTED * self._max_blocks:  # the same prefixes over and over
            self._drop_first()

    def _drop_first(self) -> None:
        """Drop the prediction that expires first."""
        self.forget(heappop(self._expiring)[1])

    def _release(self, instance: InstanceId, counts: PrefixCounts, blocks: Sequence[int]) -> None:
        """Drop the blocks of a decision, except those that another one used as well."""
        self._listed -= len(blocks)
        if self._counts.get(instance) is not counts:  # the instance left since
            return
        before = len(counts)
        left = counts.give_back(blocks)
        self._size += len(counts) - before
        if left < len(blocks):
            self.index.remove(instance, blocks[left:])

    def _clear(self) -> None:
        """Drop what is left without a decision: prompts of peer frontends that contradict one another leave such blocks."""
        for each in list(self._counts):
            self.remove_instance(each)
        self._expiring.clear()
