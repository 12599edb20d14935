"""The simulated engine on the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any, cast

import pytest

from dynamo.common.errors import EngineError, InvalidRequest
from dynamo.common.generation import Delta, FinishReason, GenerateRequest, Sampling, Stop, Summary, pack_tokens
from dynamo.common.kv.hashes import sequence_hashes, space_hash
from dynamo.common.kv.tiers import Tier
from dynamo.common.model_card import ModelKind
from dynamo.worker.engine.base import Context, Engine, HasFiles, HasTiers, Sleeps
from dynamo.worker.engine.sim.engine import SimConfig, SimEngine
from dynamo.worker.engine.sim.scheduler import SchedulerConfig
from dynamo.worker.engine.sim.tiers import BlockCache, TierConfig
from dynamo.worker.engine.sim.timing import TimingModel

FAST = TimingModel(speedup=0)
SIZE = 4


@asynccontextmanager
async def started(scheduler: dict[str, Any] | None = None, **fields: Any) -> AsyncIterator[SimEngine]:
    settings = {"block_size": SIZE, "total_blocks": 200, "timing": FAST, **(scheduler or {})}
    engine = SimEngine(SimConfig(scheduler=SchedulerConfig(**settings), **fields))
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


def make_request(tokens: int = 10, max_tokens: int | None = 8, first: int = 0, **fields: Any) -> GenerateRequest:
    prompt = pack_tokens(range(first, first + tokens))
    return GenerateRequest(model="sim", prompt=prompt, stop=fields.pop("stop", Stop(max_tokens=max_tokens)), **fields)


def generate(engine: SimEngine, request: GenerateRequest) -> AsyncGenerator[Delta | Summary]:
    return cast("AsyncGenerator[Delta | Summary]", engine.generate(request, Context("r")))


async def collect(engine: SimEngine, request: GenerateRequest) -> tuple[list[Delta], Summary]:
    *deltas, summary = [step async for step in generate(engine, request)]
    assert isinstance(summary, Summary)
    return cast("list[Delta]", deltas), summary


def tokens_of(deltas: list[Delta], index: int = 0) -> list[int]:
    return [token for delta in deltas if delta.index == index for token in delta.tokens]


async def test_a_generation_is_deltas_and_a_summary() -> None:
    async with started() as engine:
        deltas, summary = await collect(engine, make_request())
        assert len(deltas) == len(tokens_of(deltas)) == 8
        assert [delta.finish_reason for delta in deltas] == [None] * 7 + [FinishReason.LENGTH]
        assert (summary.prompt_tokens, summary.output_tokens, summary.cached_tokens) == (10, 8, 0)
        assert (await collect(engine, make_request()))[1].cached_tokens == 8


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"sampling": Sampling(logit_bias={1: 5.0})}, "logit_bias is not supported by the sim engine"),
        ({"sampling": Sampling(allowed_token_ids=(1,))}, "allowed_token_ids is not supported by the sim engine"),
        ({"sampling": Sampling(bad_words_token_ids=((1,),))}, "bad_words is not supported by the sim engine"),
        ({"prompt_logprobs": 1}, "prompt_logprobs is not supported by the sim engine"),
    ],
)
async def test_what_invented_tokens_cannot_obey_is_refused(fields: dict[str, Any], sentence: str) -> None:
    async with started() as engine:
        with pytest.raises(InvalidRequest, match=sentence):
            await collect(engine, make_request(**fields))


async def test_the_tokens_that_a_request_lists_are_reported_beside_each_token() -> None:
    async with started() as engine:
        deltas, _ = await collect(engine, make_request(logprobs=0, logprob_token_ids=(5, 6)))
    for delta in deltas:
        assert [[token for token, _ in position] for position in delta.logprobs or ()] == [[delta.tokens[0], 5, 6]]


async def test_the_card_holds_what_routers_need() -> None:
    engine = SimEngine(SimConfig(name="m", data_parallel_size=2, tokenizer=b"{}", chat_template=b"x", adapters=("lora",)))
    assert isinstance(engine, Engine)
    assert isinstance(engine, HasFiles)
    card = await engine.start()
    await engine.close()
    assert card.kind is ModelKind.LLM
    assert card.llm is not None
    assert (card.llm.block_size, card.llm.total_blocks, card.llm.data_parallel_size) == (16, 2 * 16_384, 2)
    assert len(card.llm.tokenizer) == len(card.llm.chat_template) == 64
    assert list(engine.files()) == [b"{}", b"x"]


async def test_a_generation_continues_exactly_in_another_engine() -> None:
    async with started() as other_engine, started({"total_blocks": 50, "max_batched_tokens": 5}) as engine:
        sampling = Sampling(seed=7)
        whole = tokens_of((await collect(other_engine, make_request(max_tokens=20, sampling=sampling)))[0])
        prompt = pack_tokens([*range(10), *whole[:9]])
        rest = GenerateRequest(model="sim", prompt=prompt, stop=Stop(max_tokens=11), sampling=sampling)
        assert tokens_of((await collect(engine, rest))[0]) == whole[9:]
        other = tokens_of((await collect(other_engine, make_request(max_tokens=20, sampling=Sampling(seed=8))))[0])
        assert other != whole


async def test_choices_differ_and_each_ends_once() -> None:
    async with started() as engine:
        deltas, summary = await collect(engine, make_request(n=3))
        assert len({tuple(tokens_of(deltas, index)) for index in range(3)}) == 3
        assert sorted(delta.index for delta in deltas if delta.finish_reason) == [0, 1, 2]
        assert summary.output_tokens == 24


async def test_one_choice_of_several_continues_exactly_in_another_engine() -> None:
    async with started() as other_engine, started({"total_blocks": 50}) as engine:
        deltas, _ = await collect(other_engine, make_request(n=3, max_tokens=20))
        for index in range(3):
            whole = tokens_of(deltas, index)
            prompt = pack_tokens([*range(10), *whole[:9]])
            rest = GenerateRequest(model="sim", prompt=prompt, stop=Stop(max_tokens=11), first_choice=index)
            assert tokens_of((await collect(engine, rest))[0]) == whole[9:]


async def test_a_stop_token_ends_the_choice_and_is_no_part_of_it() -> None:
    async with started() as engine:
        tokens = tokens_of((await collect(engine, make_request()))[0])
        deltas, summary = await collect(engine, make_request(stop=Stop(max_tokens=8, token_ids=(tokens[3],))))
        assert tokens_of(deltas) == tokens[:3]
        assert (deltas[-1].finish_reason, deltas[-1].stop_token) == (FinishReason.STOP, tokens[3])
        assert summary.output_tokens == 3


async def test_output_is_limited_by_the_context() -> None:
    async with started(context_length=20, default_max_tokens=500) as engine:
        assert (await collect(engine, make_request(max_tokens=None)))[1].output_tokens == 10
        assert (await collect(engine, make_request(max_tokens=1000)))[1].output_tokens == 10


async def test_logprobs_come_with_every_token() -> None:
    async with started() as engine:
        deltas, _ = await collect(engine, make_request(logprobs=2))
        for delta in deltas:
            assert delta.logprobs is not None
            assert [entry[0][0] for entry in delta.logprobs] == list(delta.tokens)
            assert all(len(entry) == 3 for entry in delta.logprobs)


async def test_no_token_is_made_for_a_request_that_wants_none() -> None:
    async with started() as engine:
        deltas, summary = await collect(engine, make_request(max_tokens=0, n=2))
    assert [(delta.index, delta.finish_reason, len(delta.tokens)) for delta in deltas] == [(0, "length", 0), (1, "length", 0)]
    assert (summary.prompt_tokens, summary.output_tokens) == (10, 0)


@pytest.mark.parametrize(
    "request_",
    [
        make_request(tokens=0),
        make_request(tokens=64),
        make_request(n=0),
        make_request(n=1000),
        make_request(max_tokens=-1),
        make_request(logprobs=50),
        make_request(data_parallel_rank=1),
    ],
)
async def test_invalid_requests_are_refused(request_: GenerateRequest) -> None:
    async with started(context_length=64) as engine:
        with pytest.raises(InvalidRequest):
            await collect(engine, request_)
        assert (engine.load().running, engine.load().waiting) == (0, 0)


async def test_closing_the_iterator_frees_everything() -> None:
    async with started({"max_num_seqs": 1}) as engine:
        async with aclosing(generate(engine, make_request(max_tokens=500))) as running:
            await anext(running)
            waiting = asyncio.ensure_future(anext(generate(engine, make_request(first=50))))
            await asyncio.sleep(0)
            assert engine.load().running == 1
            assert engine.load().active_blocks > 0
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        await collect(engine, make_request())  # a step later
        load = engine.load()
        assert (load.running, load.waiting, load.active_blocks, load.queued_prefill_tokens) == (0, 0, 0, 0)


async def test_load_describes_the_present_moment() -> None:
    async with started({"max_num_seqs": 1, "timing": TimingModel(base_ms=1e6)}) as engine:
        first = asyncio.ensure_future(anext(generate(engine, make_request())))
        second = asyncio.ensure_future(anext(generate(engine, make_request(tokens=20))))
        while not engine.load().running:
            await asyncio.sleep(0)
        load = engine.load()
        assert (load.running, load.waiting, load.active_blocks, load.total_blocks) == (1, 1, 3, 200)
        assert load.queued_prefill_tokens == 10 + 20  # those of the present step are computed when it ends
        first.cancel()
        second.cancel()
        await asyncio.gather(first, second, return_exceptions=True)


async def test_events_describe_the_cache() -> None:
    async with started({"total_blocks": 8}) as engine:
        steps = 0

        def step() -> None:
            nonlocal steps
            steps += 1

        engine.on_step(step)
        await collect(engine, make_request(tokens=9, max_tokens=1))
        assert steps == 1
        change = engine.kv.take_update()
        assert change is not None
        assert change.stored_hashes == sequence_hashes(pack_tokens(range(9)), SIZE)
        assert not change.removed
        await collect(engine, make_request(tokens=30, max_tokens=1, first=100, adapter="lora", cache_salt="tenant"))
        change = engine.kv.take_update()
        assert change is not None
        space = space_hash("lora", "tenant")
        assert change.stored_hashes == sequence_hashes(pack_tokens(range(100, 130)), SIZE, space)
        assert change.removed_hashes == sequence_hashes(pack_tokens(range(9)), SIZE)[::-1]  # the end of the prefix first


async def test_ranks_have_caches_of_their_own() -> None:
    async with started(data_parallel_size=2) as engine:
        await collect(engine, make_request(data_parallel_rank=0))
        assert (await collect(engine, make_request(data_parallel_rank=1)))[1].cached_tokens == 0
        # A block that both ranks cache is published once.
        change = engine.kv.take_update()
        assert change is not None
        stored = change.stored_hashes
        assert stored[:2] == sequence_hashes(pack_tokens(range(10)), SIZE)
        assert len(stored) == len(set(stored)) == 4
        await collect(engine, make_request(first=50, data_parallel_rank=1))
        assert (await collect(engine, make_request(first=50)))[1].cached_tokens == 8  # goes where the prefix is


async def test_sleeping_clears_the_cache_and_waits_for_closing_requests() -> None:
    steps: list[int] = []
    async with started(data_parallel_size=2) as engine:
        engine.on_step(lambda: steps.append(len(engine.kv)))
        for rank in range(2):
            await collect(engine, make_request(20, 1, data_parallel_rank=rank))
        closing = generate(engine, make_request(40, 1000, first=100, data_parallel_rank=0))
        await anext(closing)
        assert len(engine.kv) > 5 and engine.load().active_blocks
        assert isinstance(engine, Sleeps)
        engine.check_sleep()
        await closing.aclose()
        await engine.sleep()
        assert (len(engine.kv), steps[-1], engine.load().active_blocks) == (0, 0, 0)
        await engine.wake()
        for cached in (0, 16):
            _, summary = await collect(engine, make_request(20, 1, data_parallel_rank=0))
            assert summary.cached_tokens == cached
        assert len(engine.kv) == 5


async def test_prefill_hands_over_and_decode_takes_up() -> None:
    async with started() as engine, started() as decode:
        plain, _ = await collect(engine, make_request(first=70))
        deltas, summary = await collect(engine, make_request(first=70, kv_transfer={"do_remote_decode": True}))
        assert tokens_of(deltas) == tokens_of(plain)[:1]
        assert summary.kv_transfer == {"do_remote_prefill": True, "do_remote_decode": False, "remote_tokens": 10}
        deltas, _ = await collect(decode, make_request(first=70, kv_transfer=summary.kv_transfer))
        assert tokens_of(deltas) == tokens_of(plain)


async def test_fetching_the_prompts_kv_takes_its_time() -> None:
    timing = TimingModel(base_ms=1.0, ms_per_prefill_token=0.0, ms_per_decoding=0.0)
    async with started({"timing": timing, "kv_transfer_tokens_per_s": 100.0}) as engine:
        start = asyncio.get_running_loop().time()
        await collect(engine, make_request(max_tokens=2, kv_transfer={"do_remote_prefill": True}))
        assert asyncio.get_running_loop().time() - start >= 0.1 - 0.001, "10 tokens at 100 a second"


async def test_several_steps_a_turn_bring_several_deltas_at_once() -> None:
    async with started() as engine:
        one_by_one, _ = await collect(engine, make_request(max_tokens=16))
    async with started(steps_per_turn=4) as engine:
        turns = 0

        async def count_turns() -> None:
            nonlocal turns
            while True:
                await asyncio.sleep(0)
                turns += 1

        counting = asyncio.create_task(count_turns())
        came: list[int] = []
        deltas: list[Delta | Summary] = []
        async for delta in generate(engine, make_request(max_tokens=16)):
            deltas.append(delta)
            came.append(turns)
        counting.cancel()
        assert deltas[:-1] == one_by_one, "a delta for each step"
        assert [came.count(turn) for turn in sorted(set(came[:-1]))][:3] == [4, 4, 4]


async def test_steps_take_their_time() -> None:
    timing = TimingModel(base_ms=5.0, ms_per_prefill_token=1.0, ms_per_decoding=0.0)
    async with started({"timing": timing}) as engine:
        start = asyncio.get_running_loop().time()
        _, summary = await collect(engine, make_request(max_tokens=5))
        assert asyncio.get_running_loop().time() - start >= 0.035 - 0.001
        assert summary.prefill_ms == pytest.approx(15.0)
        assert engine.load().step_ms == pytest.approx(5.0)


async def test_a_closed_engine_fails_waiting_requests_and_refuses_new_ones() -> None:
    async with started({"timing": TimingModel(base_ms=1e6)}) as engine:
        waiting = asyncio.ensure_future(anext(generate(engine, make_request())))
        while not engine.load().running:
            await asyncio.sleep(0)
        await engine.close()
        with pytest.raises(EngineError):
            await waiting
        with pytest.raises(EngineError):
            await collect(engine, make_request())


async def test_many_streams_at_once_get_all_their_tokens() -> None:
    async with started({"total_blocks": 300, "max_num_seqs": 40, "max_batched_tokens": 100}) as engine:
        results = await asyncio.gather(*(collect(engine, make_request(first=7 * number, max_tokens=30)) for number in range(60)))
        assert [len(tokens_of(deltas)) for deltas, _ in results] == [30] * 60
        assert engine.load().active_blocks == 0


TIERED = {"total_blocks": 12, "watermark": 0.0, "tiers": TierConfig(cpu_blocks=20, shared_blocks=100)}
"""The settings of an engine whose GPU holds one prompt of ten blocks."""


async def test_blocks_of_each_tier_are_published_and_counted() -> None:
    async with started(TIERED) as engine:
        for first in (0, 100, 0):
            await collect(engine, make_request(40, first=first))
        kv = engine.kv
        assert kv.held(Tier.GPU) and kv.held(Tier.CPU)
        assert set(sequence_hashes(pack_tokens(range(40)), SIZE)) <= {*kv.held(Tier.GPU), *kv.held(Tier.CPU)}
        assert len(kv.held(Tier.SHARED)) >= 20, "all that was computed"
        assert isinstance(engine, HasTiers)
        totals = engine.tiers()
        assert [*totals] == [Tier.GPU, Tier.CPU, Tier.SHARED]
        assert totals[Tier.CPU].hits > 0
        assert totals[Tier.CPU].read_bytes == totals[Tier.CPU].hits * SIZE * 131_072


async def test_sleep_drops_gpu_and_host_and_leaves_the_store() -> None:
    async with started(TIERED) as engine:
        for first in (0, 100):
            await collect(engine, make_request(40, first=first))
        stored = set(engine.kv.held(Tier.SHARED))
        await engine.sleep()
        assert not engine.kv.held(Tier.GPU)
        assert not engine.kv.held(Tier.CPU)
        assert set(engine.kv.held(Tier.SHARED)) == stored
        await engine.wake()
        _, summary = await collect(engine, make_request(40))
        assert summary.cached_tokens > 0, "from the store"


async def test_engines_with_one_store_read_what_the_other_has_written() -> None:
    store = BlockCache(100)
    config = SimConfig(
        scheduler=SchedulerConfig(block_size=SIZE, timing=FAST, tiers=TierConfig(shared_blocks=100)), data_parallel_size=2
    )
    writer, reader = SimEngine(config, store), SimEngine(config, store)
    for engine in (writer, reader):
        await engine.start()
    await collect(writer, make_request(40))
    _, summary = await collect(reader, make_request(40))
    assert summary.cached_tokens == 36
    assert reader.tiers()[Tier.SHARED].hits == 9
    for engine in (writer, reader):
        await engine.close()
