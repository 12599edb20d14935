"""Caches of a simulated engine rank beyond its GPU: memory and a disk of the host, and a store that all instances read.

Blocks that the GPU evicts are written to the host's memory, what that evicts to the disk, and computed ones to the store, unless
they are there already; each evicts what was used least recently. Where the GPU's part of a prompt ends, the following blocks are
read from the fastest tier that has them, until one is nowhere. A read takes time beside the steps, and those of one tier follow
one another, as on a bus. So the sequence waits for its blocks, while others run; what was read stays in the tier. Where a read
fails, the rest of the prompt is computed.

vLLM's offloading connector and SGLang's hierarchical cache do the same; in two respects the simulation is simpler: writes take no
time and always succeed, and a read that fails is noticed at once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

from dynamo.common.errors import InvalidRequest
from dynamo.common.kv.events import KvChange
from dynamo.common.kv.tiers import Tier
from dynamo.worker.engine.base import TierTotals


@dataclass(frozen=True, slots=True, kw_only=True)
class TierConfig:
    """Sizes are in blocks; 0: there is no such tier. Speeds are in tokens whose KV is read in a second; 0: at once."""

    cpu_blocks: int = 0
    cpu_tokens_per_s: float = 200_000.0
    disk_blocks: int = 0
    disk_tokens_per_s: float = 30_000.0
    shared_blocks: int = 0
    shared_tokens_per_s: float = 20_000.0
    token_bytes: int = 131_072
    """KV of a token. The default is that of Llama 3 8B in 16 bits; with it, the speeds are those of PCIe 4, a disk of 4 GB/s,
    and a network of 25 Gbit/s.
    """
    failing_reads: float = 0.0
    """The share of reads that fail. One read is what a prompt gets from one tier."""

    def __post_init__(self) -> None:
        sizes = self.cpu_blocks, self.disk_blocks, self.shared_blocks, self.token_bytes
        if min(*sizes, self.cpu_tokens_per_s, self.disk_tokens_per_s, self.shared_tokens_per_s) < 0:
            raise InvalidRequest("sizes and speeds of the simulated engine's tiers must be at least 0")
        if not 0.0 <= self.failing_reads <= 1.0:
            raise InvalidRequest(f"failing_reads of the simulated engine must be from 0 to 1, got {self.failing_reads:g}")

    def __bool__(self) -> bool:
        """Whether there is a tier beside the GPU."""
        return bool(self.cpu_blocks or self.disk_blocks or self.shared_blocks)


class ChangedTier(NamedTuple):
    """A net change of one tier: blocks were removed, then others stored."""

    tier: Tier
    removed: Sequence[int]
    stored: Sequence[int]


class BlockCache:
    """Blocks of which the least recently used ones go when there are more than `total`."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._blocks: OrderedDict[int, None] = OrderedDict()
        """In order of eviction."""

    def __repr__(self) -> str:
        return f"<BlockCache, blocks={len(self._blocks)}, total={self.total}>"

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block: int) -> bool:
        return block in self._blocks

    @property
    def cached(self) -> set[int]:
        """The sequence hashes of all blocks."""
        return set(self._blocks)

    def touch(self, blocks: Sequence[int]) -> None:
        """Note that blocks, parents before children, were used. Those that are absent are skipped."""
        for block in reversed(blocks):  # no block goes before one that continues it
            if block in self._blocks:
                self._blocks.move_to_end(block)

    def add(self, blocks: Iterable[int]) -> tuple[list[int], list[int]]:
        """Add blocks in the order in which they are to be evicted. Return those that were absent, and those that had to go."""
        cached = self._blocks
        new: list[int] = []
        for block in blocks:
            if block in cached:
                cached.move_to_end(block)
            else:
                cached[block] = None
                new.append(block)
        return new, [cached.popitem(last=False)[0] for _ in range(len(cached) - self.total)]

    def clear(self) -> list[int]:
        """Drop all blocks and return them."""
        dropped = list(self._blocks)
        self._blocks.clear()
        return dropped


@dataclass(slots=True)
class _SimTier:
    name: Tier
    blocks: BlockCache
    block_s: float
    """Seconds in which one block is read."""
    free_at: float = 0.0
    """When the reads that have begun will be done."""
    totals: TierTotals = field(default_factory=TierTotals)
    change: KvChange = field(default_factory=KvChange)
    """What others have not been told yet."""


class Tiers:
    """The tiers of one rank beyond its GPU. Not for several threads."""

    def __init__(self, config: TierConfig, block_size: int, speedup: float, store: BlockCache | None = None) -> None:
        """`speedup` divides the time of reads; at 0 they take none. `store`: the one that instances share."""

        def block_s(tokens_per_s: float) -> float:
            return block_size / tokens_per_s / speedup if tokens_per_s and speedup else 0.0

        self._block_bytes = block_size * config.token_bytes
        self._cpu = _SimTier(Tier.CPU, BlockCache(config.cpu_blocks), block_s(config.cpu_tokens_per_s))
        disk = _SimTier(Tier.DISK, BlockCache(config.disk_blocks), block_s(config.disk_tokens_per_s))
        self._hosts = [tier for tier in (self._cpu, disk) if tier.blocks.total]
        """Each keeps what the one before it evicts."""
        shared = BlockCache(config.shared_blocks) if store is None else store
        self._shared = _SimTier(Tier.SHARED, shared, block_s(config.shared_tokens_per_s))
        self._announced = BlockCache(shared.total)
        """What this rank has written to the store, in so far as the store may have it yet."""
        self._tiers = [*self._hosts, *([self._shared] if shared.total else [])]
        """The fastest first."""
        self._failing_reads = config.failing_reads
        self._chance = Random(0)
        self._arriving: dict[int, float] = {}
        """Blocks that are being read → when they will be on the GPU."""

    def __repr__(self) -> str:
        return f"<Tiers, {', '.join(f'{tier.name}={len(tier.blocks)}' for tier in self._tiers)}>"

    @property
    def cached(self) -> dict[Tier, set[int]]:
        """The sequence hashes in each tier."""
        return {tier.name: tier.blocks.cached for tier in self._tiers}

    @property
    def totals(self) -> dict[Tier, TierTotals]:
        return {tier.name: tier.totals for tier in self._tiers}

    def find(self, blocks: Sequence[int]) -> Sequence[Sequence[int]]:
        """Return the leading ones of `blocks` that are in some tier, as a list for each tier."""
        found: list[list[int]] = [[] for _ in self._tiers]
        for block in blocks:
            for tier, hits in zip(self._tiers, found, strict=True):
                if block in tier.blocks:
                    hits.append(block)
                    break
            else:
                break
        return found

    def read(self, found: Sequence[Sequence[int]], wanted: int, now: float) -> tuple[int, float]:
        """Begin to read what `find` has found of a prompt, in which the GPU lacks `wanted` blocks.

        Return how many of them are read, up to the first read that fails, and when all of these are on the GPU.
        """
        ready_at, left, failed = now, wanted, False
        for tier, hits in zip(self._tiers, found, strict=True):
            totals = tier.totals
            if hits and not failed and self._chance.random() < self._failing_reads:
                failed = True
                totals.failed_reads += 1
            if failed:
                hits = ()
            left -= len(hits)
            totals.hits += len(hits)
            totals.misses += left
            if hits:
                totals.read_bytes += len(hits) * self._block_bytes
                tier.blocks.touch(hits)
                tier.free_at = max(tier.free_at, now) + len(hits) * tier.block_s
                ready_at = max(ready_at, tier.free_at)
                if tier.free_at > now:
                    self._arriving.update(dict.fromkeys(hits, tier.free_at))
        return wanted - left, ready_at

    def ready_at(self, blocks: Sequence[int], now: float) -> float:
        """Return when blocks that are on the GPU can be used: some of them may still be on their way."""
        if not self._arriving:
            return now
        self._arriving = {block: at for block, at in self._arriving.items() if at > now}
        return max([now, *(self._arriving[block] for block in blocks if block in self._arriving)])

    def evicted(self, blocks: Sequence[int]) -> None:
        """The GPU has evicted blocks, leaves first."""
        dropped: Iterable[int] = blocks
        for tier in self._hosts:
            dropped = self._write(tier, dropped)

    def computed(self, blocks: Sequence[int]) -> None:
        """The GPU has blocks that it did not have, parents before children."""
        if self._shared.blocks.total:
            self._write(self._shared, reversed(blocks))

    def _write(self, tier: _SimTier, blocks: Iterable[int]) -> Sequence[int]:
        """Write blocks, leaves first. Return those that others are told to be gone for them."""
        new, gone = tier.blocks.add(blocks)
        tier.totals.written_bytes += len(new) * self._block_bytes
        if tier is self._shared:
            new, gone = self._announced.add(new)
        tier.change.store(reversed(new))
        tier.change.remove(gone)
        return gone

    def clear(self) -> None:
        """Drop the host's memory."""
        self._cpu.change.remove(self._cpu.blocks.clear())

    def take_changes(self) -> list[ChangedTier]:
        """Return what has changed since the last call, tier by tier.

        As with real ones, no rank is told what the store evicts; but none names more blocks than the store holds.
        """
        changes: list[ChangedTier] = []
        for tier in self._tiers:
            if tier.change:
                changes.append(ChangedTier(tier.name, list(tier.change.removed), list(tier.change.stored)))
                tier.change = KvChange()
        return changes


class SharedStores:
    """The stores of one process: its simulated engines of one model share one."""

    def __init__(self) -> None:
        self._stores: dict[str, BlockCache] = {}

    def __repr__(self) -> str:
        return f"<SharedStores, models={len(self._stores)}>"

    def of(self, model: str, blocks: int) -> BlockCache:
        """Return the store of a model. The first engine that comes decides how many blocks it holds."""
        return self._stores.setdefault(model, BlockCache(blocks))
