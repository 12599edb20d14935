"""What every engine for language models must do, whatever it runs. `make test-vllm` has `vllm` among them."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from dynamo.common.errors import DynamoError, InvalidRequest
from dynamo.common.generation import Delta, FinishReason, GenerateRequest, Sampling, Stop, Summary, pack_tokens
from dynamo.common.kv.hashes import sequence_hashes, space_hash
from dynamo.common.model_card import LlmInfo, ModelCard, ModelKind
from dynamo.worker.config import EngineKind
from dynamo.worker.engine.base import Context, Engine, EngineLoad, HasFiles, TracksKv
from dynamo.worker.engine.remote.options import RemoteOptions
from dynamo.worker.engine.sim.engine import SimEngine
from dynamo.worker.process.engine_factory import make_engine, make_remote
from tests.support.engine_server import EngineServer, serving
from tests.support.sglang_server import SglangServer
from tests.support.tensorrt_server import TensorRtServer
from tests.support.tiny_llama import make_tiny_llama
from tests.support.vllm_server import MAX_LOGPROBS, VllmServer
from tests.support.waiting import WAIT_S

pytestmark = [pytest.mark.real_model, pytest.mark.asyncio(loop_scope="module")]

CONTEXT, SEQUENCES = 256, 2
PACKAGES = Path(__file__).parents[3] / "support" / "packages"
"""Where `sglang` is, of tests."""
REMOTE: dict[str, type[EngineServer]] = {"remote": VllmServer, "sglang": SglangServer, "tensorrt": TensorRtServer}
"""Servers in front of a simulated engine."""
TRACK_KV = ["sim", "llama", *(["vllm"] if find_spec("vllm") else [])]
"""Engines that report what they have cached; servers and SGLang's engine, as used here, do not."""
ENGINES = [*TRACK_KV, "sglang-engine", *REMOTE]
GREEDY = Sampling(temperature=0.0)


@dataclass(frozen=True)
class Started:
    kind: str
    engine: Engine
    card: ModelCard

    def noise(self, seed: int, length: int) -> list[int]:
        """Tokens that are neither special nor, in the real model, parts of characters: llama.cpp does not report those."""
        chosen = random.Random(seed)
        vocabulary = range(5_000, 45_000) if self.kind == "llama" else range(100, 250)
        return chosen.choices(vocabulary, k=length)

    @property
    def llm(self) -> LlmInfo:
        assert self.card.llm is not None
        return self.card.llm

    @property
    def kv(self) -> TracksKv:
        assert isinstance(self.engine, TracksKv)
        return self.engine


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=ENGINES)
async def started(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Started]:
    async with made(request.param, tmp_path_factory.mktemp("model")) as engine:
        card = await engine.start()
        yield Started(request.param, engine, card)
        await engine.close()


@asynccontextmanager
async def made(kind: str, folder: Path) -> AsyncIterator[Engine]:
    """An engine, not started, with the server that it may need."""
    if kind not in REMOTE:
        with pytest.MonkeyPatch.context() as patched:
            patched.syspath_prepend(PACKAGES)
            yield make(kind, folder)
        return
    sim = make("sim", folder)
    assert isinstance(sim, SimEngine)
    async with serving(REMOTE[kind], sim, folder, CONTEXT) as server:
        options = RemoteOptions(tokenizer=folder) if kind == "tensorrt" else RemoteOptions()  # it names no folder
        yield make_remote(server.url, options, max_num_seqs=SEQUENCES, context_length=CONTEXT)


def make(kind: str, folder: Path) -> Engine:
    settings: dict[str, Any] = {"max_num_seqs": SEQUENCES, "context_length": CONTEXT}
    match kind:
        case "sim":
            engine = make_engine("sim:speedup=5,blocks=512", **settings)
        case "sglang-engine":
            engine = make_engine(str(make_tiny_llama(folder)), EngineKind.SGLANG, **settings)
        case "llama":
            engine = make_engine("smollm2", threads=1, **settings)
        case _:
            os.environ["VLLM_NO_USAGE_STATS"] = "1"
            arguments = "--enforce-eager --dtype float32 --block-size 32 --kv-cache-memory-bytes 64M"
            engine = make_engine(str(make_tiny_llama(folder)), EngineKind.VLLM, engine_args=arguments, **settings)
    assert isinstance(engine, Engine)
    return engine


def make_request(prompt: list[int], max_tokens: int | None = 8, **settings: Any) -> GenerateRequest:
    stop = settings.pop("stop", Stop(max_tokens=max_tokens, ignore_eos=True))
    return GenerateRequest(model="m", prompt=pack_tokens(prompt), **{"sampling": GREEDY, "stop": stop, **settings})


@dataclass
class Generation:
    deltas: list[Delta]
    summary: Summary

    def tokens(self, index: int = 0) -> list[int]:
        return [token for delta in self.deltas if delta.index == index for token in delta.tokens]

    def ends(self) -> dict[int, Delta]:
        """The last delta of each choice."""
        return {delta.index: delta for delta in self.deltas}


async def generate(engine: Engine, request: GenerateRequest) -> Generation:
    deltas: list[Delta] = []
    summaries: list[Summary] = []
    async with asyncio.timeout(WAIT_S):
        async for item in engine.generate(request, Context("test")):
            assert not summaries, "the summary comes last"
            summaries.append(item) if isinstance(item, Summary) else deltas.append(item)
    [summary] = summaries
    return Generation(deltas, summary)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.001)


async def test_the_card_holds_what_frontends_and_routers_need(started: Started) -> None:
    llm = started.llm
    assert isinstance(started.engine, HasFiles)
    files = {sha256(file).hexdigest() for file in started.engine.files()}
    assert {llm.tokenizer, llm.chat_template} == files
    assert (started.card.kind, llm.context_length, llm.max_num_seqs) == (ModelKind.LLM, CONTEXT, SEQUENCES)
    if isinstance(started.engine, TracksKv) and started.kind not in REMOTE:
        assert llm.block_size > 0 and llm.total_blocks * llm.block_size >= CONTEXT


async def test_an_engine_shows_its_model_in_a_debugger(started: Started) -> None:
    assert started.card.name in repr(started.engine)


async def test_a_generation_is_deltas_and_then_a_summary(started: Started) -> None:
    result = await generate(started.engine, make_request(started.noise(1, 20), 12))
    assert len(result.tokens()) == 12
    assert [delta.finish_reason for delta in result.deltas[:-1]] == [None] * (len(result.deltas) - 1)
    assert result.deltas[-1].finish_reason is FinishReason.LENGTH
    assert (result.summary.prompt_tokens, result.summary.output_tokens) == (20, 12)
    assert result.summary.prefill_ms > 0


async def test_a_greedy_generation_repeats_and_its_prompt_is_cached(started: Started) -> None:
    request = make_request(started.noise(2, 5 * 32 + 3))
    first, second = await generate(started.engine, request), await generate(started.engine, request)
    assert first.tokens() == second.tokens()
    assert first.summary.cached_tokens == 0
    assert 4 * 32 <= second.summary.cached_tokens < 5 * 32 + 3


async def test_a_greedy_generation_continues_elsewhere_with_the_same_tokens(started: Started) -> None:
    prompt = started.noise(3, 40)
    whole = (await generate(started.engine, make_request(prompt, 20))).tokens()
    rest = await generate(started.engine, make_request(prompt + whole[:9], 11))
    assert rest.tokens() == whole[9:]


async def test_a_stop_token_ends_a_generation_and_is_not_part_of_it(started: Started) -> None:
    prompt = started.noise(4, 30)
    tokens = (await generate(started.engine, make_request(prompt, 16))).tokens()
    position = next((index for index in range(1, len(tokens)) if tokens[index] not in tokens[:index]), 0)
    stop = Stop(max_tokens=16, token_ids=(tokens[position],), ignore_eos=True)
    result = await generate(started.engine, make_request(prompt, stop=stop))
    end = result.deltas[-1]
    assert (result.tokens(), end.finish_reason, end.stop_token) == (tokens[:position], FinishReason.STOP, tokens[position])
    assert result.summary.output_tokens == position
    if started.kind != "tensorrt":  # which has no log probabilities
        result = await generate(started.engine, make_request(prompt, stop=stop, logprobs=0))
        chosen = [step[0][0] for delta in result.deltas for step in delta.logprobs or ()]
        assert (result.tokens(), chosen) == (tokens[:position], tokens[: position + 1]), "its log probability comes with the end"


async def test_min_tokens_outlast_a_stop_token(started: Started) -> None:
    prompt = started.noise(5, 30)
    [first, *_] = (await generate(started.engine, make_request(prompt, 2))).tokens()
    stop = Stop(max_tokens=12, min_tokens=6, token_ids=(first,))
    assert 6 <= len((await generate(started.engine, make_request(prompt, stop=stop))).tokens()) <= 12


async def test_each_choice_ends_once_and_a_seed_repeats_them_all(started: Started) -> None:
    request = make_request(started.noise(6, 20), 10, n=3, sampling=Sampling(temperature=1.5, seed=7))
    first, second = await generate(started.engine, request), await generate(started.engine, request)
    choices = [first.tokens(index) for index in range(3)]
    assert choices == [second.tokens(index) for index in range(3)]
    assert len({tuple(choice) for choice in choices}) == 3, "they differ"
    assert sorted(delta.index for delta in first.deltas if delta.finish_reason) == [0, 1, 2]
    assert first.summary.output_tokens == 30


@pytest.mark.parametrize("alternatives", [0, 3, 20])
async def test_logprobs_name_the_chosen_token_and_then_the_requested_number_of_alternatives(
    started: Started, alternatives: int
) -> None:
    if started.kind == "tensorrt":  # it names tokens by their text, which several may share
        with pytest.raises(InvalidRequest, match="log probabilities are not supported"):
            await generate(started.engine, make_request(started.noise(7, 20), 6, logprobs=alternatives))
        return
    # A server gives no more than its limit, which counts the chosen token if it is one of the likeliest.
    expected = min(alternatives + 1, MAX_LOGPROBS) if started.kind == "remote" else alternatives + 1
    result = await generate(started.engine, make_request(started.noise(7, 20), 6, logprobs=alternatives))
    for delta in result.deltas:
        assert delta.logprobs is not None
        assert [step[0][0] for step in delta.logprobs] == list(delta.tokens)
        for step in delta.logprobs:
            values = [value for _, value in step]
            assert len({token for token, _ in step}) == len(step) == expected
            assert values[0] <= 0 and values == sorted(values, reverse=True), "greedy: the chosen one is the likeliest"
    assert all(delta.logprobs is None for delta in (await generate(started.engine, make_request(started.noise(7, 20), 6))).deltas)


async def test_the_context_length_ends_a_generation_without_max_tokens(started: Started) -> None:
    result = await generate(started.engine, make_request(started.noise(8, CONTEXT - 9), None))
    assert result.deltas[-1].finish_reason is FinishReason.LENGTH
    assert result.summary.prompt_tokens + result.summary.output_tokens == CONTEXT


@pytest.mark.parametrize(
    "request_",
    [
        make_request([]),
        make_request([120] * CONTEXT),
        make_request([120], n=0),
        make_request([120], n=100_000),
        make_request([120], -1),
        make_request([120], logprobs=100_000),
        make_request([120], data_parallel_rank=7),
    ],
    ids=["no prompt", "long prompt", "n=0", "n=100000", "max_tokens=-1", "logprobs=100000", "rank=7"],
)
async def test_invalid_requests_are_refused_and_leave_nothing_behind(started: Started, request_: GenerateRequest) -> None:
    with pytest.raises(InvalidRequest):
        await generate(started.engine, request_)
    assert (started.engine.load().running, started.engine.load().waiting) == (0, 0)


async def test_requests_beyond_the_batch_size_wait(started: Started) -> None:
    engine = started.engine
    loads: list[EngineLoad] = []

    async def watched(seed: int) -> int:
        tokens = 0
        async for item in engine.generate(make_request(started.noise(seed, 20), 24), Context("test")):
            loads.append(engine.load())
            tokens += 0 if isinstance(item, Summary) else len(item.tokens)
        return tokens

    async with asyncio.timeout(WAIT_S):
        assert await asyncio.gather(*(watched(seed) for seed in range(SEQUENCES + 2))) == [24] * (SEQUENCES + 2)
    assert max(load.running for load in loads) == SEQUENCES
    [full, *_] = [load for load in loads if load.running == SEQUENCES]
    assert full.waiting == 2
    if isinstance(engine, TracksKv) and started.kind not in REMOTE:
        assert 0 < full.active_blocks <= full.total_blocks
    assert full.queued_prefill_tokens >= 40
    await until(lambda: (engine.load().running, engine.load().waiting) == (0, 0))


async def test_an_abandoned_generation_frees_its_slot(started: Started) -> None:
    engine = started.engine
    for seed in range(SEQUENCES + 1):  # the last one would find no slot
        async with (
            asyncio.timeout(WAIT_S),
            aclosing(engine.generate(make_request(started.noise(seed, 20), 200), Context("test"))) as items,
        ):  # type: ignore[type-var]
            await anext(items)
    result = await generate(engine, make_request(started.noise(9, 20), 2))
    assert len(result.tokens()) == 2
    await until(lambda: (engine.load().running, engine.load().waiting) == (0, 0))


async def test_cancelling_a_waiting_request_does_not_disturb_others(started: Started) -> None:
    engine = started.engine
    long = [asyncio.create_task(generate(engine, make_request(started.noise(seed, 20), 100))) for seed in range(SEQUENCES)]
    await until(lambda: engine.load().running == SEQUENCES)
    waiting = asyncio.create_task(generate(engine, make_request(started.noise(10, 150), 100)))
    await until(lambda: engine.load().waiting == 1)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert [len(result.tokens()) for result in await asyncio.gather(*long)] == [100] * SEQUENCES
    await until(lambda: (engine.load().running, engine.load().waiting) == (0, 0))


@pytest.mark.parametrize("started", TRACK_KV, indirect=True, scope="module")
async def test_the_engine_reports_what_it_has_cached(started: Started) -> None:
    engine, kv = started.engine, started.kv.kv
    steps = 0

    def stepped() -> None:
        nonlocal steps
        steps += 1

    started.kv.on_step(stepped)
    size = started.llm.block_size
    prompt = started.noise(11, 3 * size + 1)
    blocks = sequence_hashes(pack_tokens(prompt), size)
    assert len(blocks) == 3 and not any(block in kv for block in blocks)
    result = await generate(engine, make_request(prompt, size))
    await until(lambda: all(block in kv for block in blocks))
    assert steps
    whole = sequence_hashes(pack_tokens(prompt + result.tokens()), size)
    await until(lambda: whole[3] in kv or started.kind == "llama")  # what was made is cached, too


async def test_a_salt_keeps_prompts_apart(started: Started) -> None:
    prompt = started.noise(12, 3 * 32 + 1)
    await generate(started.engine, make_request(prompt))
    salted = make_request(prompt, cache_salt="tenant")
    try:
        assert (await generate(started.engine, salted)).summary.cached_tokens == 0
    except DynamoError as error:
        assert not started.llm.takes_cache_salt, error  # refused: it could not keep them apart
        assert started.kind in ("llama", "sglang", "tensorrt"), error
        return
    assert started.llm.takes_cache_salt
    assert (await generate(started.engine, salted)).summary.cached_tokens >= 2 * 32
    if started.kind in TRACK_KV:
        kv = started.kv.kv
        block = sequence_hashes(pack_tokens(prompt), started.llm.block_size, space_hash("", "tenant"))[0]
        await until(lambda: block in kv)


@pytest.mark.parametrize("kind", [kind for kind in ENGINES if kind != "vllm"])  # test_vllm_engine closes its own
async def test_a_closed_engine_takes_nothing(tmp_path: Path, kind: str) -> None:
    async with made(kind, tmp_path) as engine:
        await engine.start()
        await engine.close()
        with pytest.raises(DynamoError):
            await generate(engine, make_request([120]))
