"""What the tiers of a vLLM server's cache did, from its `/metrics`."""

from __future__ import annotations

import re
from collections.abc import Iterator

from dynamo.common.kv.tiers import Tier
from dynamo.worker.engine.base import TierTotals

_SAMPLE = re.compile(r"^vllm:(\w+)\{([^}]*)\} ([0-9]{1,18}(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{1,2})?)$")
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_SOURCES = {"host": Tier.CPU, "disk": Tier.DISK, "p2p": Tier.SHARED, "external_unspecified": Tier.SHARED}
"""vLLM's names of where cached tokens came from."""
_GPU_QUERIES, _GPU_HITS = "prefix_cache_queries_total", "prefix_cache_hits_total"
_QUERIES = "external_prefix_cache_queries_total"
_BY_SOURCE = "prompt_tokens_cached_by_source_total"
_READ, _WRITTEN, _FAILED = "kv_offload_load_bytes_total", "kv_offload_store_bytes_total", "kv_offload_allocation_failure_total"
_NAMES = frozenset({_GPU_QUERIES, _GPU_HITS, _QUERIES, _BY_SOURCE, _READ, _WRITTEN, _FAILED})


class ServerTiers:
    """Adds up what a server counts. It counts in tokens, and from 0 again after a restart."""

    def __init__(self, engine: str | None = None) -> None:
        """`engine`: the data-parallel rank whose samples count; None: all."""
        self._engine = engine
        self._block_size = 0
        self._seen: dict[str, float] = {}
        """The last value of each sample."""
        self._tokens: dict[str, float] = {}
        """The sum by name, or by source of cached tokens, over restarts of the server."""

    def __repr__(self) -> str:
        return f"<ServerTiers, samples={len(self._seen)}>"

    def read(self, page: str, block_size: int) -> None:
        """Take the next page of metrics, of a server whose blocks have so many tokens."""
        self._block_size = block_size or self._block_size
        for sample, name, value in self._samples(page):
            before = self._seen.get(sample, 0.0)
            self._seen[sample] = value
            self._tokens[name] = self._tokens.get(name, 0.0) + (value - before if value >= before else value)

    def _samples(self, page: str) -> Iterator[tuple[str, str, float]]:
        """Yield (sample, name or source, value) of what is counted."""
        for line in page.splitlines():
            match = _SAMPLE.match(line)
            if match is None or match[1] not in _NAMES:
                continue
            labels = dict(_LABEL.findall(match[2]))
            if self._engine is not None and labels.get("engine") != self._engine:
                continue
            if match[1] != _BY_SOURCE:
                yield line.rpartition(" ")[0], match[1], float(match[3])
            elif (source := labels.get("source")) in _SOURCES:
                yield line.rpartition(" ")[0], source, float(match[3])

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
