"""A mirror of llama.cpp's prefix cache, as far as it can be derived from outside.

Each slot keeps the tokens of its last sequence. A sequence that is evicted from its slot moves to a memory beside them, from
which the oldest one is dropped: a tier of its own, since it is copied back into a slot before it is continued. A new request
continues the kept sequence with which it shares most tokens: the rest of that is overwritten, unless it is most of the sequence;
then the sequence is moved to the memory before.

llama.cpp reports none of this, only how many tokens of each prompt were cached. So the mirror follows these rules and corrects
itself by the reported number: a wrong entry lasts until the next request for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from dynamo.common.generation import pack_tokens
from dynamo.common.kv.events import KvState
from dynamo.common.kv.hashes import sequence_hashes
from dynamo.common.kv.tiers import Tier
from dynamo.worker.engine.base import TierTotals


@dataclass(slots=True, eq=False)
class _Kept:
    hashes: list[int]
    """Sequence hashes of the full blocks of prompt and output."""
    tier: Tier = Tier.GPU
    """The CPU's once it has left its slot."""

    def shared(self, hashes: Sequence[int]) -> int:
        """Return how many leading blocks equal those of `hashes`."""
        for position, (own, other) in enumerate(zip(self.hashes, hashes, strict=False)):
            if own != other:
                return position
        return min(len(self.hashes), len(hashes))


class PrefixCacheMirror:
    """Mirrors the prefix cache of one llama.cpp server and publishes its blocks in `kv`. Plain computation."""

    def __init__(self, kv: KvState, block_size: int, *, slots: int, aside_tokens: int, token_bytes: int = 0) -> None:
        """`slots` sequences are kept whatever their length; further ones as long as they have `aside_tokens` together.

        `token_bytes` is the size of one token's KV.
        """
        self._kv = kv
        self._block_bytes = block_size * token_bytes
        self.totals = {tier: TierTotals() for tier in (Tier.GPU, Tier.CPU)}
        """What slots and the memory beside them did."""
        self._block_size = block_size
        self._slots = slots
        self._aside_blocks = aside_tokens // block_size
        self._kept: deque[_Kept] = deque()
        """The latest one is last."""
        self._references: dict[Tier, dict[int, int]] = {Tier.GPU: {}, Tier.CPU: {}}
        """How many kept sequences have a block, in slots and beside them."""

    def __repr__(self) -> str:
        return f"<PrefixCacheMirror, sequences={len(self._kept)}, aside={len(self._in(Tier.CPU))}>"

    def blocks(self, tier: Tier) -> set[int]:
        """Return the sequence hashes of all blocks that are kept in slots, or in the memory beside them."""
        return {block for kept in self._in(tier) for block in kept.hashes}

    def add(self, prompt: bytes, output: Sequence[int], cached_tokens: int) -> None:
        """A slot generated `output`, at least one token, from `prompt`, of which `cached_tokens` were in the cache."""
        # The last token was chosen, but not computed with.
        hashes = sequence_hashes(prompt + pack_tokens(output[:-1]), self._block_size)
        self._count(hashes, cached_tokens // self._block_size, len(prompt) // 4)
        self._correct(hashes, cached_tokens // self._block_size, len(prompt) // 4)
        if not hashes:
            return
        base = max(self._kept, key=lambda kept: kept.shared(hashes), default=None)
        overwritten = [kept for kept in self._kept if kept.shared(hashes) == len(kept.hashes)]
        if base is not None and base not in overwritten and 2 * base.shared(hashes) >= len(base.hashes):
            overwritten.append(base)
        self._keep(_Kept(hashes))
        for kept in overwritten:
            self._drop(kept)
        in_slots, aside = self._in(Tier.GPU), self._in(Tier.CPU)
        for kept in in_slots[: -self._slots]:
            self._put_aside(kept)
            aside.append(kept)
        too_many = sum(len(kept.hashes) for kept in aside) - self._aside_blocks
        for kept in aside:
            if too_many > 0:
                too_many -= len(kept.hashes)
                self._drop(kept)

    def _count(self, hashes: Sequence[int], cached_blocks: int, prompt_tokens: int) -> None:
        """Count what a prompt found in the tiers, before it is kept."""
        base = max(self._kept, key=lambda kept: kept.shared(hashes), default=None)
        missing = max(0, prompt_tokens - 1) // self._block_size  # the last token of a prompt is computed in any case
        for tier, totals in self.totals.items():
            hits = min(cached_blocks, missing) if base is not None and base.tier is tier else 0
            missing -= hits
            totals.hits += hits
            totals.misses += missing
            if base is not None and hits and tier is Tier.CPU:
                totals.read_bytes += len(base.hashes) * self._block_bytes

    def _correct(self, hashes: Sequence[int], cached_blocks: int, prompt_tokens: int) -> None:
        """Drop the blocks after the first `cached_blocks` that should have been a cache hit but were not."""
        # The last token of a prompt is computed in any case.
        wanted = hashes[: (prompt_tokens - 1) // self._block_size]
        for kept in [kept for kept in self._kept if kept.shared(wanted) > cached_blocks]:
            self._release(kept.tier, kept.hashes[cached_blocks:])
            del kept.hashes[cached_blocks:]
            if not cached_blocks:
                self._kept.remove(kept)

    def _in(self, tier: Tier) -> list[_Kept]:
        """Return the sequences in slots, or beside them, the oldest first."""
        return [kept for kept in self._kept if kept.tier is tier]

    def _keep(self, kept: _Kept) -> None:
        self._kept.append(kept)
        self._refer(kept)

    def _put_aside(self, kept: _Kept) -> None:
        self._release(kept.tier, kept.hashes)
        kept.tier = Tier.CPU
        self._refer(kept)
        self.totals[Tier.CPU].written_bytes += len(kept.hashes) * self._block_bytes

    def _drop(self, kept: _Kept) -> None:
        self._kept.remove(kept)
        self._release(kept.tier, kept.hashes)

    def _refer(self, kept: _Kept) -> None:
        references = self._references[kept.tier]
        for block in kept.hashes:
            references[block] = references.get(block, 0) + 1
        self._kv.store(kept.hashes, tier=kept.tier)

    def _release(self, tier: Tier, blocks: Sequence[int]) -> None:
        references, unused = self._references[tier], []
        for block in reversed(blocks):  # no block goes before one that continues it
            references[block] -= 1
            if not references[block]:
                del references[block]
                unused.append(block)
        self._kv.remove(unused, tier=tier)
