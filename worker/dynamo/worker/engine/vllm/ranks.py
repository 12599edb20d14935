"""What the data-parallel ranks of one vLLM share. Each is an engine, and an instance, of its own; all of them are one AsyncLLM.

So it starts once, sleeps as a whole, and loads each LoRA adapter once, whichever rank is the first to want it.
This module knows vLLM by the methods that it calls, and does not import it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Generic, TypeVar

from dynamo.common.kv.events import NO_STEPS, StepTotals
from dynamo.common.kv.tiers import Tier
from dynamo.worker.engine.base import TierTotals

T = TypeVar("T")

_NUMBER = "#"
"""Between an adapter's name and a number, in names at vLLM. Names have no such character."""


class Shared(Generic[T]):
    """A resource of several users: the first one opens it, the last one closes it."""

    def __init__(self, open_resource: Callable[[], AbstractAsyncContextManager[T]]) -> None:
        self._open = open_resource
        self._turn = asyncio.Lock()
        self._users = 0
        self._stack = AsyncExitStack()
        self._resource: T
        self._failure: Exception | None = None

    def __repr__(self) -> str:
        return f"<Shared by {self._users}>"

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[T]:
        """Use the resource while the body runs. A failure to open it is that of all users: it is not tried again."""
        async with self._turn:
            if self._failure is not None:
                raise self._failure
            if not self._users:
                try:
                    self._resource = await self._stack.enter_async_context(self._open())
                except Exception as error:
                    self._failure = error
                    raise
            self._users += 1
        try:
            yield self._resource
        finally:
            self._users -= 1
            if not self._users:
                await self._stack.aclose()


_SOURCES = {Tier.CPU: ("host",), Tier.DISK: ("disk",), Tier.SHARED: ("p2p", "external_unspecified")}
"""vLLM's names of where cached tokens came from."""


def _sum(values: Mapping[str, Mapping[Any, float]], name: str) -> int:
    return int(sum(values.get(name, {}).values()))


class RankStats:
    """vLLM's statistics of one rank, which its engine process reports after each step: a stat logger, which vLLM calls."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.running = 0
        self.waiting = 0
        self.kv_usage = 0.0
        self.total_blocks = 0
        self.step_ms = 0.0
        self.totals = NO_STEPS
        self.callbacks: list[Callable[[], None]] = []
        """Called after each step."""
        self.tiers: dict[Tier, TierTotals] = {}
        """What each tier of the cache did; empty unless vLLM offloads blocks."""
        self._block_size = 0
        self._stepped_at: float | None = None
        """When the current step began; None while the rank has nothing to do."""
        self._clock = clock

    def offloads(self, block_size: int) -> None:
        """Count what tiers do, in blocks of so many tokens: vLLM keeps blocks beside the GPU."""
        self._block_size = block_size
        self.tiers = {tier: TierTotals() for tier in (Tier.GPU, Tier.CPU, Tier.DISK, Tier.SHARED)}

    def stepped(self) -> None:
        for callback in self.callbacks:
            callback()

    def request_sent(self) -> None:
        """A request is on its way to the rank. If that has nothing to do, its next step begins now: most often, with a prompt."""
        if not self.running:
            self._stepped_at = self._clock()

    def record(self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0) -> None:
        if scheduler_stats is None:
            return
        self.running = scheduler_stats.num_running_reqs
        self.waiting = scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs
        self.kv_usage = scheduler_stats.kv_cache_usage
        if self.tiers:
            self._count_tiers(scheduler_stats)
        now = self._clock()
        if self._stepped_at is not None:
            self.step_ms = (now - self._stepped_at) * 1e3
            if iteration_stats is not None:
                self._count(now - self._stepped_at, scheduler_stats, iteration_stats)
        self._stepped_at = now if self.running else None
        self.stepped()

    def _count(self, seconds: float, scheduler_stats: Any, iteration_stats: Any) -> None:
        caches = (scheduler_stats.prefix_cache_stats, getattr(scheduler_stats, "connector_prefix_cache_stats", None))
        self.totals += StepTotals(
            steps=1,
            seconds=seconds,
            # vLLM counts cached tokens when a prompt is scheduled, and the prompt when all of it is computed.
            prefill_tokens=iteration_stats.num_prompt_tokens - sum(cached.hits for cached in caches if cached is not None),
            sequences=iteration_stats.num_generation_tokens,
            blocks=round(self.kv_usage * self.total_blocks),
            finished=len(iteration_stats.finished_requests),
            generated=sum(request.num_generation_tokens for request in iteration_stats.finished_requests),
        )

    def _count_tiers(self, scheduler_stats: Any) -> None:
        """Add what one step says: tokens that were looked for and found, and bytes that were moved."""
        cached, offloaded = scheduler_stats.prefix_cache_stats, scheduler_stats.connector_prefix_cache_stats
        if cached is not None:
            self._add_hits(Tier.GPU, cached.hits, cached.queries - cached.hits)
        if offloaded is not None:
            missing = offloaded.queries
            sources = {source.value: tokens for source, tokens in offloaded.hits_by_source.items()}
            for tier, names in _SOURCES.items():
                hits = sum(sources.get(name, 0) for name in names)
                missing -= hits
                self._add_hits(tier, hits, missing)
        values = (scheduler_stats.kv_connector_stats or {}).get("data", {})
        # All that is moved goes through the host's memory.
        cpu = self.tiers[Tier.CPU]
        cpu.read_bytes += _sum(values, "vllm:kv_offload_load_bytes")
        cpu.written_bytes += _sum(values, "vllm:kv_offload_store_bytes")
        cpu.failed_writes += _sum(values, "vllm:kv_offload_allocation_failure")

    def _add_hits(self, tier: Tier, hits: int, misses: int) -> None:
        totals = self.tiers[tier]
        totals.hits += hits // self._block_size
        totals.misses += misses // self._block_size

    def log_engine_initialized(self) -> None:
        """Does nothing: load reports say it."""

    def log(self) -> None:
        """Does nothing: load reports say it."""

    def record_sleep_state(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing: the requests are aborted, which reports it."""

    def record_admission_rejection(self, reason: str) -> None:
        """Does nothing: the requests are refused, which reports it."""


class SharedSleep:
    """Sleep of all ranks together: from when the last of them is to sleep until the first is to wake."""

    def __init__(self, ranks: int, fall_asleep: Callable[[], Awaitable[None]], wake_up: Callable[[], Awaitable[None]]) -> None:
        self._awake = set(range(ranks))
        self._fall_asleep = fall_asleep
        self._wake_up = wake_up
        self._turn = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<SharedSleep, awake={sorted(self._awake)}>"

    async def sleep(self, rank: int) -> None:
        async with self._turn:
            self._awake.discard(rank)
            if not self._awake:
                await self._fall_asleep()

    async def wake(self, rank: int) -> None:
        async with self._turn:
            if not self._awake:
                await self._wake_up()
            self._awake.add(rank)


@dataclass(slots=True)
class LoadedAdapter:
    """One load of a LoRA adapter, as vLLM knows it."""

    name: str
    """vLLM keys cached blocks by this name, and other weights must not share them: it is another one for each load."""
    number: int
    path: str
    takers: set[int] = field(default_factory=set)
    """Ranks that have taken this load, now or before."""
    users: set[int] = field(default_factory=set)
    """Ranks that use it now."""


class SharedAdapters:
    """The LoRA adapters of all ranks. What one rank loads, the others take over when they are to load it.

    A rank that has taken a load already wants a new one: the weights in the folder may be others.
    """

    def __init__(
        self,
        paths: Mapping[str, str],
        ranks: int,
        load: Callable[[LoadedAdapter], Awaitable[None]],
        unload: Callable[[LoadedAdapter], Awaitable[None]],
    ) -> None:
        """`paths`: of the adapters that vLLM has had from its start, by name. `load` raises if it cannot be loaded."""
        self._numbers = count(1)
        self._load = load
        self._unload = unload
        self._turn = asyncio.Lock()
        all_ranks = range(ranks)
        self._latest = {
            name: LoadedAdapter(name, next(self._numbers), path, set(all_ranks), set(all_ranks)) for name, path in paths.items()
        }
        self._names = set(paths)
        """Every name that an adapter has had."""
        self._used = [dict(self._latest) for _ in all_ranks]
        """By rank and name."""

    def __repr__(self) -> str:
        return f"<SharedAdapters {sorted(self._latest)}>"

    def used(self, rank: int, name: str) -> LoadedAdapter | None:
        return self._used[rank].get(name)

    def paths(self, rank: int) -> dict[str, str]:
        """Return the paths of the adapters that a rank uses, by name."""
        return {name: adapter.path for name, adapter in self._used[rank].items()}

    async def load(self, rank: int, name: str, path: str) -> None:
        """Have a rank use the adapter, in the place of the one of its name. Nothing changes on failure."""
        async with self._turn:
            adapter = self._latest.get(name)
            if adapter is None or adapter.path != path or rank in adapter.takers:
                number = next(self._numbers)
                adapter = LoadedAdapter(f"{name}{_NUMBER}{number}" if name in self._names else name, number, path)
                await self._load(adapter)
                self._latest[name] = adapter
                self._names.add(name)
            adapter.takers.add(rank)
            adapter.users.add(rank)
            former = self._used[rank].get(name)
            self._used[rank][name] = adapter
            if former is not None:
                await self._release(rank, name, former)

    async def unload(self, rank: int, name: str) -> None:
        async with self._turn:
            await self._release(rank, name, self._used[rank].pop(name))

    async def _release(self, rank: int, name: str, adapter: LoadedAdapter) -> None:
        adapter.users.discard(rank)
        if adapter.users:
            return
        if self._latest.get(name) is adapter:
            del self._latest[name]
        await self._unload(adapter)


def adapter_name(lora_name: str) -> str:
    """Return the name of an adapter from its name at vLLM."""
    return lora_name.partition(_NUMBER)[0]
