"""What the data-parallel ranks of one vLLM share: its start, its sleep and its LoRA adapters; and statistics by rank."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from enum import Enum
from types import SimpleNamespace

import pytest

from dynamo.common.errors import EngineError
from dynamo.common.kv.tiers import Tier
from dynamo.worker.app import split_ranks
from dynamo.worker.engine.echo import EchoTokens
from dynamo.worker.engine.vllm.ranks import LoadedAdapter, RankStats, Shared, SharedAdapters, SharedSleep, adapter_name


async def test_the_first_rank_opens_what_the_last_one_closes() -> None:
    calls: list[str] = []

    @asynccontextmanager
    async def open_llm() -> AsyncIterator[str]:
        calls.append("open")
        await asyncio.sleep(0)
        yield "llm"
        calls.append("close")

    shared = Shared(open_llm)
    async with AsyncExitStack() as first, AsyncExitStack() as second:
        ranks = (first.enter_async_context(shared.opened()), second.enter_async_context(shared.opened()))
        assert await asyncio.gather(*ranks) == ["llm", "llm"]
        await first.aclose()
        assert calls == ["open"]
    assert calls == ["open", "close"]


async def test_a_start_that_failed_is_not_tried_again_by_the_other_ranks() -> None:
    tries: list[int] = []

    @asynccontextmanager
    async def open_llm() -> AsyncIterator[None]:
        tries.append(1)
        raise EngineError("no memory")
        yield

    shared = Shared(open_llm)
    for _ in range(2):
        with pytest.raises(EngineError, match="no memory"):
            async with shared.opened():
                pass
    assert len(tries) == 1


async def test_vllm_sleeps_once_all_ranks_are_to_sleep_and_wakes_with_the_first() -> None:
    calls: list[str] = []

    async def call(name: str) -> None:
        calls.append(name)

    sleeping = SharedSleep(2, lambda: call("sleep"), lambda: call("wake"))
    await sleeping.sleep(0)
    await sleeping.wake(0)
    assert calls == []
    await sleeping.sleep(0)
    await sleeping.sleep(1)
    assert calls == ["sleep"]
    await sleeping.wake(1)
    await sleeping.wake(0)
    assert calls == ["sleep", "wake"]


class FakeVllm:
    """Adapters as vLLM has them, by number."""

    def __init__(self) -> None:
        self.held: dict[int, tuple[str, str]] = {}

    async def load(self, adapter: LoadedAdapter) -> None:
        if adapter.path == "/broken":
            raise EngineError("broken")
        self.held[adapter.number] = adapter.name, adapter.path

    async def unload(self, adapter: LoadedAdapter) -> None:
        del self.held[adapter.number]


@pytest.fixture
def vllm() -> FakeVllm:
    return FakeVllm()


@pytest.fixture
def adapters(vllm: FakeVllm) -> SharedAdapters:
    return SharedAdapters({}, 2, vllm.load, vllm.unload)


async def test_all_ranks_use_one_load_of_an_adapter_until_the_last_has_unloaded_it(
    vllm: FakeVllm, adapters: SharedAdapters
) -> None:
    await asyncio.gather(*(adapters.load(rank, "sql", "/sql") for rank in (0, 1)))
    assert list(vllm.held.values()) == [("sql", "/sql")]
    await adapters.unload(0, "sql")
    assert adapters.used(0, "sql") is None and adapters.used(1, "sql") is not None and vllm.held
    await adapters.unload(1, "sql")
    assert not vllm.held


async def test_an_adapter_that_is_loaded_anew_is_another_one_to_caches(vllm: FakeVllm, adapters: SharedAdapters) -> None:
    for rank in (0, 1):
        await adapters.load(rank, "sql", "/sql")
    await adapters.load(0, "sql", "/sql")
    assert len(vllm.held) == 2, "rank 1 uses the former one still"
    await adapters.load(1, "sql", "/sql")
    [(name, _)] = vllm.held.values()
    assert name != "sql" and adapter_name(name) == "sql"
    assert adapters.used(0, "sql") == adapters.used(1, "sql")


async def test_a_load_that_fails_changes_nothing(vllm: FakeVllm, adapters: SharedAdapters) -> None:
    await adapters.load(0, "sql", "/sql")
    with pytest.raises(EngineError):
        await adapters.load(0, "sql", "/broken")
    assert adapters.paths(0) == {"sql": "/sql"} and len(vllm.held) == 1
    with pytest.raises(EngineError):
        await adapters.load(1, "late", "/broken")
    assert adapters.paths(1) == {}


async def test_adapters_from_the_start_are_those_of_all_ranks(vllm: FakeVllm) -> None:
    adapters = SharedAdapters({"sql": "/sql"}, 2, vllm.load, vllm.unload)
    assert adapters.paths(0) == adapters.paths(1) == {"sql": "/sql"}
    adapter = adapters.used(0, "sql")
    assert adapter is not None and adapter.number == 1


class Source(Enum):
    """Sources of cached tokens, as vLLM names them."""

    HOST = "host"
    DISK = "disk"
    ELSEWHERE = "external_unspecified"


def step(running: int, blocks: float = 0.0) -> SimpleNamespace:
    return SimpleNamespace(
        num_running_reqs=running,
        num_waiting_reqs=2,
        num_skipped_waiting_reqs=1,
        kv_cache_usage=blocks,
        prefix_cache_stats=SimpleNamespace(hits=4),
    )


def test_statistics_count_the_steps_of_a_rank() -> None:
    stats, calls = RankStats(), list[int]()
    stats.total_blocks = 8
    stats.callbacks.append(lambda: calls.append(1))
    stats.record(step(1), None)
    ended = SimpleNamespace(
        num_prompt_tokens=10, num_generation_tokens=3, finished_requests=[SimpleNamespace(num_generation_tokens=7)]
    )
    stats.record(step(0, 0.5), ended)
    stats.record(None, None)
    assert (stats.running, stats.waiting, len(calls)) == (0, 3, 2)
    totals = stats.totals
    assert (totals.steps, totals.prefill_tokens, totals.sequences, totals.blocks) == (1, 6, 3, 4)
    assert (totals.finished, totals.generated) == (1, 7)
    stats.record(step(1), ended)
    assert stats.totals.steps == 1, "a pause is no step"
    stats.record(step(0), ended)
    stats.request_sent()
    stats.record(step(1), ended)
    assert (stats.totals.steps, stats.totals.prefill_tokens) == (3, 18), "the first step after a pause computes a prompt"


def test_what_the_connector_found_was_not_computed_and_is_counted_by_tier() -> None:
    stats = RankStats()
    stats.offloads(4)
    sources = {Source.HOST: 8, Source.DISK: 4, Source.ELSEWHERE: 12}
    moved = {"data": {"vllm:kv_offload_load_bytes": {(): 300, ("x",): 20}, "vllm:kv_offload_store_bytes": {(): 7}}}
    offloading = step(1)
    offloading.prefix_cache_stats.queries = 44
    offloading.connector_prefix_cache_stats = SimpleNamespace(queries=40, hits=24, hits_by_source=sources)
    offloading.kv_connector_stats = moved
    ended = SimpleNamespace(num_prompt_tokens=44, num_generation_tokens=0, finished_requests=[])
    stats.request_sent()
    stats.record(offloading, ended)
    assert stats.totals.prefill_tokens == 44 - 4 - 24
    assert {tier: (each.hits, each.misses) for tier, each in stats.tiers.items()} == {
        Tier.GPU: (1, 10),
        Tier.CPU: (2, 8),
        Tier.DISK: (1, 7),
        Tier.SHARED: (3, 4),
    }
    assert (stats.tiers[Tier.CPU].read_bytes, stats.tiers[Tier.CPU].written_bytes) == (320, 7)


def test_without_offloading_there_are_no_tiers() -> None:
    stats = RankStats()
    stats.record(step(1), None)
    assert stats.tiers == {}


def test_a_request_that_is_gone_before_its_first_step_begins_none() -> None:
    now = 0.0
    stats = RankStats(lambda: now)
    stats.request_sent()
    now = 10.0
    stats.request_sent()
    now = 10.5
    stats.record(step(1), SimpleNamespace(num_prompt_tokens=10, num_generation_tokens=3, finished_requests=[]))
    assert stats.totals.seconds == 0.5


class Ranked(EchoTokens):
    def ranks(self) -> Sequence[EchoTokens]:
        return [self, EchoTokens("second")]


def test_each_rank_gets_an_instance_and_the_first_one_the_engines_without_ranks() -> None:
    ranked, other = Ranked("ranked"), EchoTokens("other")
    [first, second] = split_ranks([ranked, other])
    assert first == [ranked, other]
    assert len(second) == 1 and second[0] is not ranked
