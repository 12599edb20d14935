"""The load of an engine server, from its `/metrics`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from dynamo.common.errors import EngineError, Unavailable
from dynamo.common.http.client import HttpClient
from dynamo.worker.engine.base import EngineLoad
from dynamo.worker.engine.open_requests import OpenRequests
from dynamo.worker.engine.remote.samples import Sample, read_samples
from dynamo.worker.engine.remote.tiers import TIER_NAMES, ServerTiers

log = logging.getLogger(__name__)

_POLL_S = 0.5
_FETCH_S = 5.0
_RUNNING = frozenset({"vllm:num_requests_running", "sglang:num_running_reqs", "llamacpp:requests_processing"})
_WAITING = frozenset({"vllm:num_requests_waiting", "sglang:num_queue_reqs", "llamacpp:requests_deferred"})
_CACHE_USAGE = frozenset({"vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage"})
_CACHE_CONFIG = frozenset({"vllm:cache_config_info", "sglang:cache_config_info"})
"""With size and number of the blocks as labels; SGLang has gauges of their own for them since 0.5.11."""
_PAGE_SIZE, _PAGES = "sglang:page_size", "sglang:num_pages"
_NAMES = _RUNNING | _WAITING | _CACHE_USAGE | _CACHE_CONFIG | TIER_NAMES | {_PAGE_SIZE, _PAGES}
_MAX_PAGE_BYTES = 4 << 20
_LONG_CHARS = 64 << 10
"""A longer page is read in a thread."""
_MOST = 1 << 40
"""A larger number of requests, tokens or blocks is read as this one: load reports could not say it."""


@dataclass(frozen=True, slots=True)
class ServerLoad:
    """What a server says of itself, or of one of its data-parallel ranks; sums over its engines."""

    running: int = 0
    waiting: int = 0
    cache_usage: float = 0.0
    """Share of the KV cache that requests use, of the fullest engine."""
    block_size: int = 0
    total_blocks: int = 0


@dataclass(frozen=True, slots=True)
class Rank:
    """One of the data-parallel ranks of a vLLM server, each an engine with a cache of its own."""

    number: int
    count: int


def read_load(samples: Iterable[Sample], ranks: int = 1) -> ServerLoad | None:
    """Return what the samples of a page say, which are those of one of `ranks`; None if it is of no server that is known."""
    running, waiting, usage, block_size, total_blocks = 0.0, 0.0, 0.0, 0, 0
    is_known = False
    for sample in samples:
        name, value = sample.name, sample.value
        if name in _RUNNING:
            running += value
            is_known = True
        elif name in _WAITING:
            waiting += value
        elif name in _CACHE_USAGE:
            usage = max(usage, value)
        elif name in _CACHE_CONFIG:
            config = sample.labels
            block_size = _integer(config.get("block_size", config.get("page_size")))
            blocks = _integer(config.get("num_gpu_blocks", config.get("num_pages")))
            # vLLM says the blocks of all ranks with each of them.
            total_blocks = max(total_blocks, blocks) if name.startswith("vllm:") else total_blocks + blocks
        elif name == _PAGE_SIZE:
            block_size = _whole(value)
        elif name == _PAGES:
            total_blocks += _whole(value)
    total_blocks = min(total_blocks // ranks, _MOST)
    return ServerLoad(_whole(running), _whole(waiting), min(usage, 1.0), block_size, total_blocks) if is_known else None


def _whole(value: float) -> int:
    return round(min(value, _MOST))


def _integer(text: str | None) -> int:
    """Return the number that a label says; 0 if it says none, or an absurd one."""
    return int(text) if text is not None and text.isdecimal() and len(text) <= len(str(_MOST)) else 0


class LoadFollower:
    """Keeps the load of a server current: its requests at the last look, and those that came and went here since."""

    def __init__(self, client: HttpClient, requests: OpenRequests, max_num_seqs: int | None, rank: Rank | None = None) -> None:
        """`rank`: the one whose load it is; None: that of the whole server."""
        self._engine = None if rank is None else str(rank.number)
        self._ranks = 1 if rank is None else rank.count
        self.tiers = ServerTiers()
        """What the tiers of the server's cache did, up to the last look."""
        self._client = client
        self._requests = requests
        self._max_num_seqs = max_num_seqs
        self._polled = ServerLoad()
        self._others = 0
        """Requests of other clients, at the last look."""

    async def fetch(self) -> ServerLoad | None:
        """Look now. Returns None if the server has no metrics that are known. Raises Unavailable, EngineError."""
        try:
            async with asyncio.timeout(_FETCH_S):
                status, body = await self._client.fetch("GET", "/metrics", max_bytes=_MAX_PAGE_BYTES)
        except TimeoutError:
            raise Unavailable(f"the server at {self._client} sent no metrics in time") from None
        page = body.decode(errors="replace") if status == 200 else ""
        if len(page) > _LONG_CHARS:
            samples = await asyncio.to_thread(read_samples, page, self._engine, _NAMES)
        else:
            samples = read_samples(page, self._engine, _NAMES)
        load = read_load(samples, self._ranks)
        if load is not None:
            self.tiers.read(samples, load.block_size)
            self._polled = load
            self._others = max(0, load.running + load.waiting - self._requests.choices)
        return load

    async def follow(self, changed: Callable[[], None]) -> None:
        """Look again and again, and call `changed` when there is news."""
        while True:
            await asyncio.sleep(_POLL_S)
            before = self._polled, self._others
            try:
                load = await self.fetch()
            except (Unavailable, EngineError) as error:
                log.debug("no load of the engine server: %s", error)
                load = None
            if load is None:  # its other clients have probably lost it, too
                self._polled, self._others = ServerLoad(total_blocks=self._polled.total_blocks), 0
            if (self._polled, self._others) != before:
                changed()

    def load(self) -> EngineLoad:
        """Return the load of the server."""
        total = self._requests.choices + self._others
        at_most = total if self._max_num_seqs is None else min(total, self._max_num_seqs)
        running = max(0, min(at_most, total - self._polled.waiting))
        blocks = self._polled.total_blocks
        return EngineLoad(
            waiting=total - running,
            running=running,
            active_blocks=round(self._polled.cache_usage * blocks),
            total_blocks=blocks,
            queued_prefill_tokens=self._requests.prefilling_tokens,
        )
