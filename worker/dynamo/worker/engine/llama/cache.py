"""A mirror of llama.cpp's prefix cache, as far as it can be derived from outside.

Each slot keeps the tokens of its last sequence. A sequence that is evicted from its slot moves to a memory beside them, from
which the oldest one is dropped. A new request continues the kept sequence with which it shares most tokens: the rest of that is
overwritten, unless it is most of the sequence; then the sequence is moved to the memory before.

llama.cpp reports none of this, only how many tokens of each prompt were cached. So the mirror follows these rules and corrects
itself by the reported number: a wrong entry lasts until the next request for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from dynamo.common.generation import pack_tokens
from dynamo.common.kv.events import KvState
from dynamo.common.kv.hashes import sequence_hashes


@dataclass(slots=True, eq=False)
class _Kept:
    hashes: list[int]
    """Sequence hashes of the full blocks of prompt and output."""

    def shared(self, hashes: Sequence[int]) -> int:
        """Return how many leading blocks equal those of `hashes`."""
        for position, (own, other) in enumerate(zip(self.hashes, hashes, strict=False)):
            if own != other:
                return position
        return min(len(self.hashes), len(hashes))


class PrefixCacheMirror:
    """Mirrors the prefix cache of one llama.cpp server and publishes its blocks in `kv`. Plain computation."""

    def __init__(self, kv: KvState, block_size: int, *, slots: int, aside_tokens: int) -> None:
        """`slots` sequences are kept whatever their length; further ones as long as they have `aside_tokens` together."""
        self._kv = kv
        self._block_size = block_size
        self._slots = slots
        self._aside_blocks = aside_tokens // block_size
        self._kept: deque[_Kept] = deque()
        """The latest one is last."""
        self._references: dict[int, int] = {}
        """How many kept sequences have a block."""

    def __repr__(self) -> str:
        return f"<PrefixCacheMirror, sequences={len(self._kept)}, blocks={len(self._references)}>"

    @property
    def blocks(self) -> set[int]:
        """The sequence hashes of all blocks that are kept."""
        return {block for kept in self._kept for block in kept.hashes}

    def add(self, prompt: bytes, output: Sequence[int], cached_tokens: int) -> None:
        """A slot generated `output`, at least one token, from `prompt`, of which `cached_tokens` were in the cache."""
        # The last token was chosen, but not computed with.
        hashes = sequence_hashes(prompt + pack_tokens(output[:-1]), self._block_size)
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
        while len(self._kept) > self._slots and self._blocks_aside() > self._aside_blocks:
            self._drop(self._kept[0])

    def _correct(self, hashes: Sequence[int], cached_blocks: int, prompt_tokens: int) -> None:
        """Drop the blocks after the first `cached_blocks` that should have been a cache hit but were not."""
        # The last token of a prompt is computed in any case.
        wanted = hashes[: (prompt_tokens - 1) // self._block_size]
        for kept in [kept for kept in self._kept if kept.shared(wanted) > cached_blocks]:
            self._release(kept.hashes[cached_blocks:])
            del kept.hashes[cached_blocks:]
            if not cached_blocks:
                self._kept.remove(kept)

    def _blocks_aside(self) -> int:
        return sum(len(kept.hashes) for kept in islice(self._kept, len(self._kept) - self._slots))

    def _keep(self, kept: _Kept) -> None:
        self._kept.append(kept)
        for block in kept.hashes:
            self._references[block] = self._references.get(block, 0) + 1
        self._kv.store(kept.hashes)

    def _drop(self, kept: _Kept) -> None:
        self._kept.remove(kept)
        self._release(kept.hashes)

    def _release(self, blocks: Sequence[int]) -> None:
        unused = []
        for block in reversed(blocks):  # no block goes before one that continues it
            self._references[block] -= 1
            if not self._references[block]:
                del self._references[block]
                unused.append(block)
        self._kv.remove(unused)
