"""What candidates have of a prompt on tiers slower than their GPU's memory, and what became of it.

Only for models whose instances have such tiers: others have no `TierFetch`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import repeat

import msgspec

from dynamo.common.discovery import Instance
from dynamo.common.kv.events import KvUpdate
from dynamo.common.kv.tiers import Tier
from dynamo.common.names import InstanceId
from dynamo.frontend.router.cache.doubts import DOUBTFUL, Doubts
from dynamo.frontend.router.cache.index import Positions, PrefixIndex
from dynamo.frontend.router.cost.fetching import FetchModel
from dynamo.frontend.router.cost.prompts import Prompt
from dynamo.frontend.router.fetch import TierCount, TierFetch


class SlowTiers:
    """The slow tiers of the instances of one model. Not for several threads."""

    def __init__(self, index: PrefixIndex, clock: Callable[[], float]) -> None:
        self._index = index
        self._doubts = Doubts(clock)
        self._counting: set[InstanceId] = set()
        """Instances that have reported cached tokens: from others, a report of none says nothing."""

    def fetches(
        self,
        prompt: Prompt,
        candidates: Sequence[Instance],
        positions: Positions,
        overlaps: Mapping[int, int],
        model: FetchModel,
        block_s: float,
    ) -> dict[int, TierFetch]:
        """Return what each candidate would fetch of a prompt, by position; those that have nothing of it are left out.

        `overlaps`: the blocks that its GPU has, by position; `block_s`: the time to compute one.
        """
        count = len(candidates)
        every_position = range(count)
        reaches = [(tier, match.by_position(positions, count)) for tier, match in self._index.match_slow(prompt.hashes)]
        columns = [list(map(found.get, every_position, repeat(0))) for found in (overlaps, *(found for _, found in reaches))]
        fetches: dict[int, TierFetch] = {}
        known: dict[tuple[int, ...], TierFetch] = {}
        for position, key in enumerate(zip(*columns, strict=True)):  # many instances have as much as others
            fetch = known.get(key)
            if fetch is None:
                hits = self._hits(candidates[position].id, prompt.hashes, [tier for tier, _ in reaches], key)
                fetch = model.fetch(hits, block_s)
                if not self._doubts:
                    known[key] = fetch
            if fetch.hits:
                fetches[position] = fetch
        return fetches

    def _hits(
        self, instance: InstanceId, hashes: Sequence[int], tiers: Sequence[Tier], reaches: Sequence[int]
    ) -> list[tuple[Tier, int]]:
        """Return the blocks on each of `tiers`.

        `reaches`: how many leading blocks of the prompt the GPU has, and each tier together with all faster ones.
        """
        hits: list[tuple[Tier, int]] = []
        begin = reaches[0]
        for tier, reach in zip(tiers, reaches[1:], strict=True):
            end = max(begin, reach)
            believed = self._doubts.believed(instance, tier, hashes, begin, end) if self._doubts and tier in DOUBTFUL else end
            if believed > begin:
                hits.append((tier, believed - begin))
            if believed < end:
                break
            begin = end
        return hits

    def apply(self, instance: InstanceId, update: KvUpdate) -> None:
        """Take what an instance announces into account."""
        if self._doubts:
            for change in update.tiers:
                if change.tier in DOUBTFUL and change.tier is not None:
                    self._doubts.settle(instance, change.tier, change.stored_hashes)

    def remove_instance(self, instance: InstanceId) -> None:
        self._doubts.remove_instance(instance)
        self._counting.discard(instance)

    def verify(self, instance: InstanceId, hashes: Sequence[int], overlap: int, fetch: TierFetch, found: int) -> list[TierCount]:
        """Compare what routing counted on with the `found` leading blocks of the prompt that the engine had. Doubt the rest.

        `overlap`: the blocks that the GPU was to have. Return nothing if the instance does not report what it finds.
        """
        if found:
            self._counting.add(instance)
        elif instance not in self._counting:
            return []
        counts = [TierCount(Tier.GPU, overlap, min(found, overlap))]
        end = overlap
        for tier, blocks in fetch.hits:
            here = min(max(found - end, 0), blocks)
            counts.append(TierCount(tier, blocks, here))
            if here < blocks and found >= end and tier in DOUBTFUL and end + here < len(hashes):
                self._doubts.add(instance, tier, hashes[end + here])
            end += blocks
        return counts


def with_fetched(overlaps: Mapping[int, int], fetches: Mapping[int, TierFetch]) -> Mapping[int, int]:
    """Return the blocks that need not be computed, by position: those on the GPU, and those that are cheaper to fetch."""
    if not fetches:
        return overlaps
    return {**overlaps, **{at: overlaps.get(at, 0) + fetch.fetched for at, fetch in fetches.items() if fetch.fetched}}


def described(fetch: TierFetch, model: FetchModel, block_s: float) -> dict[str, float]:
    """Return what an explanation shows of slow tiers: the blocks on each, and the price of one in milliseconds."""
    shown: dict[str, float] = {}
    for tier, blocks in fetch.hits:
        shown[f"{tier.value}_blocks"] = blocks
        shown[f"{tier.value}_block_ms"] = round(model.price_s(tier, block_s) * 1e3, 4)
    return shown


class Awaited(msgspec.Struct, frozen=True, gc=False):
    """A booking whose first token shows how long fetching takes."""

    model: FetchModel
    fetch: TierFetch
    predicted_s: float
    at: float
    block_s: float

    def arrived(self, now: float) -> None:
        self.model.learn(self.fetch, self.predicted_s, now - self.at, self.block_s)
