"""What the tiers of a vLLM server's cache did, from its `/metrics`."""

from __future__ import annotations

from collections.abc import Iterable

from dynamo.common.kv.tiers import Tier
from dynamo.worker.engine.base import TierTotals
from dynamo.worker.engine.remote.samples import Sample

_SOURCES = {"host": Tier.CPU, "disk": Tier.DISK, "p2p": Tier.SHARED, "external_unspecified": Tier.SHARED}
"""vLLM's names of where cached tokens came from."""
_GPU_QUERIES, _GPU_HITS = "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"
_QUERIES = "vllm:external_prefix_cache_queries_total"
_BY_SOURCE = "vllm:prompt_tokens_cached_by_source_total"
_READ, _WRITTEN = "vllm:kv_offload_load_bytes_total", "vllm:kv_offload_store_bytes_total"
_FAILED = "vllm:kv_offload_allocation_failure_total"
_NAMES = frozenset({_GPU_QUERIES, _GPU_HITS, _QUERIES, _READ, _WRITTEN, _FAILED})
TIER_NAMES = _NAMES | {_BY_SOURCE}
"""Names of the samples that say something of tiers."""


class ServerTiers:
    """Adds up what a server counts. It counts in tokens, and from 0 again after a restart."""

    def __init__(self) -> None:
        self._block_size = 0
        self._last: dict[tuple[str, str], float] = {}
        """The samples of the last page that count, by name and labels."""
        self._tokens: dict[str, float] = {}
        """The sum by name, or by source of cached tokens, over restarts of the server."""

    def __repr__(self) -> str:
        return f"<ServerTiers, samples={len(self._last)}>"

    def read(self, samples: Iterable[Sample], block_size: int) -> None:
        """Take the next page of metrics, of a server whose blocks have so many tokens."""
        self._block_size = block_size or self._block_size
        before, self._last = self._last, {}
        for sample in samples:
            name = sample.labels.get("source", "") if sample.name == _BY_SOURCE else sample.name
            if name not in _NAMES and name not in _SOURCES:
                continue
            key, value = (sample.name, sample.label_text), sample.value
            last = before.get(key, 0.0)
            self._last[key] = value
            self._tokens[name] = self._tokens.get(name, 0.0) + (value - last if value >= last else value)

    def totals(self) -> dict[Tier, TierTotals]:
        """Return what each tier did; nothing of a server that does not count that."""
        block_size = self._block_size
        if _QUERIES not in self._tokens or not block_size:
            return {}

        def blocks(name: str) -> int:
            return int(self._tokens.get(name, 0.0)) // block_size

        hits = blocks(_GPU_HITS)
        totals = {Tier.GPU: TierTotals(hits=hits, misses=max(0, blocks(_GPU_QUERIES) - hits))}
        missing = blocks(_QUERIES)
        for tier in (Tier.CPU, Tier.DISK, Tier.SHARED):
            hits = sum(blocks(source) for source, each in _SOURCES.items() if each is tier)
            missing = max(0, missing - hits)
            totals[tier] = TierTotals(hits=hits, misses=missing)
        cpu = totals[Tier.CPU]  # all that is moved goes through the host's memory
        cpu.read_bytes, cpu.written_bytes = int(self._tokens.get(_READ, 0)), int(self._tokens.get(_WRITTEN, 0))
        cpu.failed_writes = int(self._tokens.get(_FAILED, 0))
        return totals
