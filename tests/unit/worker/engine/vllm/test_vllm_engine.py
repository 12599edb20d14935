"""What is vLLM's own in the vLLM engine, with a model of two layers: `make test-vllm`. The rest is in test_engine_contract."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import struct
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio
from tokenizers import Tokenizer

from dynamo.common.errors import DynamoError, EngineError, InvalidRequest, NotFound, Unavailable, Unsupported
from dynamo.common.generation import Delta, FinishReason, GenerateRequest, Sampling, Stop, Summary, pack_tokens
from dynamo.common.kv.hashes import sequence_hashes, space_hash
from dynamo.common.model_card import LlmInfo, ModelCard, Role
from dynamo.common.tensors.protobuf_wire import delimited
from dynamo.worker.config import EngineKind
from dynamo.worker.engine.base import Context, MayFail, Sleeps
from dynamo.worker.engine.echo import byte_tokenizer
from dynamo.worker.process.engine_factory import choose_engine, make_engine
from dynamo.worker.tokenizers.sentencepiece import CONTROL, NORMAL, UNKNOWN
from tests.support.tiny_llama import BOS, CONTEXT, EOS, make_tiny_adapter, make_tiny_llama
from tests.support.waiting import until

pytestmark = [pytest.mark.real_model, pytest.mark.asyncio(loop_scope="module")]

CPU = "--enforce-eager --dtype float32 --block-size 32 --kv-cache-memory-bytes 64M"
GREEDY = Sampling(temperature=0.0)


@dataclass(frozen=True)
class Started:
    engine: Any
    card: ModelCard
    tokenizer: Tokenizer

    @property
    def llm(self) -> LlmInfo:
        assert self.card.llm is not None
        return self.card.llm


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def started(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Started]:
    folder = tmp_path_factory.mktemp("vllm")
    model = make_tiny_llama(folder / "tiny")
    adapter = make_tiny_adapter(folder / "adapter")
    (model / "generation_config.json").write_text(json.dumps({"temperature": 0.0, "eos_token_id": [EOS, 7]}))
    arguments = f"{CPU} --max-lora-rank 8 --max-loras 2 --lora-modules polite={adapter}"
    engine = make_engine(str(model), engine_args=arguments, role=Role.PREFILL, max_num_seqs=8)
    card = await engine.start()
    assert isinstance(card, ModelCard)
    yield Started(engine, card, Tokenizer.from_str(engine.files()[0].decode()))  # type: ignore[union-attr]
    await engine.close()


def make_request(prompt: list[int], max_tokens: int = 8, **settings: Any) -> GenerateRequest:
    stop = settings.pop("stop", Stop(max_tokens=max_tokens, ignore_eos=True))
    return GenerateRequest(model="tiny", prompt=pack_tokens(prompt), **{"sampling": GREEDY, "stop": stop, **settings})


async def generate(started: Started, request: GenerateRequest) -> tuple[list[int], Delta, Summary]:
    """The tokens, the last delta, the summary."""
    *deltas, summary = [item async for item in started.engine.generate(request, Context("test"))]
    return [token for delta in deltas for token in delta.tokens], deltas[-1], summary


def text(prompt: str) -> list[int]:
    """As the model's tokenizer, which knows bytes only, has it."""
    return list(Tokenizer.from_str(byte_tokenizer().decode()).encode(prompt).ids)


async def test_the_card_comes_from_the_models_files(started: Started) -> None:
    llm, card = started.llm, started.card
    assert (card.name, card.role, card.backend) == ("tiny", Role.PREFILL, "vllm")
    assert (llm.context_length, llm.block_size, llm.max_num_seqs) == (CONTEXT, 32, 8)
    assert llm.total_blocks == (64 << 20) // (32 * 2 * 128 * 2 * 4)
    assert (llm.bos_token, llm.eos_token, llm.eos_token_ids, llm.adapters) == ("<s>", "</s>", (EOS, 7), ("polite",))
    assert [llm.tokenizer, llm.chat_template] == [sha256(file).hexdigest() for file in started.engine.files()]
    assert started.tokenizer.token_to_id("<s>") == BOS
    assert "add_generation_prompt" in started.engine.files()[1].decode()


def test_a_sentencepiece_model_is_read_where_the_library_has_no_fast_tokenizer(tmp_path: Path) -> None:
    def piece(text: str, score: float, kind: int) -> bytes:
        return delimited(b"\x0a", delimited(b"\x0a", text.encode()) + b"\x15" + struct.pack("<f", score) + bytes((0x18, kind)))

    pieces = (("<unk>", 0, UNKNOWN), ("<s>", 0, CONTROL), ("▁", -3, NORMAL), ("a", -2, NORMAL), ("▁a", -1, NORMAL))
    is_bpe = delimited(b"\x12", b"\x18\x02")
    model = tmp_path / "tokenizer.model"
    model.write_bytes(b"".join(piece(*each) for each in pieces) + is_bpe)
    from dynamo.worker.engine.vllm.engine import tokenizer_files

    slow = SimpleNamespace(vocab_file=str(model), add_bos_token=True, chat_template="{{ messages }}")
    file, template = tokenizer_files(slow)
    assert Tokenizer.from_buffer(file).encode("a a").tokens == ["<s>", "▁a", "▁a"]
    assert template == b"{{ messages }}"


async def test_the_eos_token_ends_a_generation_and_is_not_part_of_it(started: Started) -> None:
    forced = Sampling(temperature=0.0, logit_bias={7: 100.0})
    tokens, end, summary = await generate(started, make_request(text("a"), sampling=forced, stop=Stop(max_tokens=9)))
    assert (tokens, end.finish_reason, end.stop_token, summary.output_tokens) == ([], FinishReason.STOP, 7, 0)
    tokens, end, _ = await generate(started, make_request(text("a"), 4, sampling=forced))
    assert (tokens, end.finish_reason) == ([7] * 4, FinishReason.LENGTH)


async def test_unset_parameters_have_the_models_defaults(started: Started) -> None:
    open_ = make_request(text("what"), 12, sampling=Sampling())
    assert (await generate(started, open_))[0] == (await generate(started, make_request(text("what"), 12)))[0], (
        "greedy, as its settings say"
    )


async def test_tokens_can_be_forced_banned_and_penalised(started: Started) -> None:
    prompt = text("some prompt")
    usual, _, _ = await generate(started, make_request(prompt, 12))
    banned = Sampling(temperature=0.0, bad_words_token_ids=((usual[0],),))
    assert usual[0] not in (await generate(started, make_request(prompt, 12, sampling=banned)))[0]
    pair = Sampling(temperature=0.0, bad_words_token_ids=((usual[0], usual[1]),))
    assert (await generate(started, make_request(prompt, 2, sampling=pair)))[0] != usual[:2], "words of several tokens, too"
    allowed = Sampling(temperature=0.0, allowed_token_ids=(65, 66))
    assert set((await generate(started, make_request(prompt, 12, sampling=allowed)))[0]) <= {65, 66}
    penalised = Sampling(temperature=0.0, repetition_penalty=5.0, presence_penalty=2.0, frequency_penalty=2.0)
    long, _, _ = await generate(started, make_request(prompt, 60))
    assert len(set((await generate(started, make_request(prompt, 60, sampling=penalised)))[0])) > len(set(long))


async def test_prompt_logprobs_come_with_the_summary(started: Started) -> None:
    prompt = text("four")
    _, _, summary = await generate(started, make_request(prompt, 1, prompt_logprobs=2))
    steps = summary.prompt_logprobs
    assert steps is not None and len(steps) == 4
    assert steps[0] is None, "nothing comes before the first token"
    assert [step[0][0] for step in steps[1:] if step] == prompt[1:]
    assert all(step is not None and len(step) == 3 for step in steps[1:])


@pytest.mark.parametrize(
    ("guided", "fits"),
    [
        ({"choice": ["yes", 'no "really"']}, lambda text: text in ("yes", 'no "really"')),
        ({"regex": "[0-9]{3}-[a-c]"}, lambda text: len(text) == 5 and text[3] == "-"),
        ({"grammar": 'root ::= "ab" [0-9]'}, lambda text: text[:2] == "ab" and text[2:].isdigit()),
        (
            {"json_schema": {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}},
            lambda text: json.loads(text)["a"] in (1, 2),
        ),
        ({"json_schema": '{"type": "boolean"}'}, lambda text: isinstance(json.loads(text), bool)),
    ],
    ids=["choice", "regex", "grammar", "schema", "schema as text"],
)
async def test_guided_output_matches_its_grammar(started: Started, guided: dict[str, Any], fits: Any) -> None:
    sampling = Sampling(temperature=0.0, guided=guided, logit_bias={started.tokenizer.token_to_id("Ġ"): -100})
    tokens, end, _ = await generate(started, make_request(text("x"), sampling=sampling, stop=Stop(max_tokens=60)))
    assert end.finish_reason is FinishReason.STOP
    assert fits(started.tokenizer.decode(tokens))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sampling": Sampling(temperature=-1.0)}, "temperature"),
        ({"sampling": Sampling(top_p=2.0)}, "top_p"),
        ({"sampling": Sampling(logit_bias={100_000: 1.0})}, "logit_bias|100000"),
        ({"sampling": Sampling(allowed_token_ids=(100_000,))}, "allowed_token_ids"),
        ({"sampling": Sampling(guided={"regex": "a("})}, "regex|grammar|Failed"),
        ({"sampling": Sampling(guided={"json_schema": "{"})}, "json_schema"),
        ({"adapter": "rude"}, "rude"),
    ],
)
async def test_what_vllm_refuses_is_an_invalid_request(started: Started, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        await generate(started, make_request(text("x"), **settings))
    with pytest.raises(InvalidRequest):
        await generate(started, make_request([5, 100_000]))
    assert (await generate(started, make_request(text("x"), 2)))[2].output_tokens == 2, "it goes on"


async def test_an_adapter_generates_other_tokens_and_has_a_prefix_cache_of_its_own(started: Started) -> None:
    prompt = text("the same words for both of them, and some more to fill the first blocks of the cache") * 2
    plain, _, _ = await generate(started, make_request(prompt, 12))
    polite, _, summary = await generate(started, make_request(prompt, 12, adapter="polite"))
    assert plain != polite
    assert summary.cached_tokens == 0
    blocks = sequence_hashes(pack_tokens(prompt), 32, space_hash("polite", ""))
    await until(lambda: all(block in started.engine.kv for block in blocks))
    assert (await generate(started, make_request(prompt, 12, adapter="polite")))[0] == polite


async def test_adapters_are_loaded_while_it_serves_and_a_new_one_of_a_name_shares_no_cache(
    started: Started, tmp_path: Path
) -> None:
    engine, prompt = started.engine, text("load an adapter at run time, and ask it") * 2
    engine.check_adapters()
    assert engine.max_adapters == 2
    plain, _, _ = await generate(started, make_request(prompt, 12))
    await engine.load_adapter("late", str(make_tiny_adapter(tmp_path / "late", seed=2)))
    late, _, first = await generate(started, make_request(prompt, 12, adapter="late"))
    await engine.load_adapter("late", str(make_tiny_adapter(tmp_path / "later", seed=3)))
    later, _, second = await generate(started, make_request(prompt, 12, adapter="late"))
    assert len({tuple(plain), tuple(late), tuple(later)}) == 3
    assert first.cached_tokens == second.cached_tokens == 0
    blocks = sequence_hashes(pack_tokens(prompt), 32, space_hash("late", ""))
    await until(lambda: all(block in engine.kv for block in blocks))
    await engine.unload_adapter("late")
    with pytest.raises(InvalidRequest, match="no adapter 'late'"):
        await generate(started, make_request(prompt, 1, adapter="late"))
    with pytest.raises(NotFound, match="Loading lora none failed: No adapter found for"):
        await engine.load_adapter("none", str(tmp_path / "none"))
    broken = make_tiny_adapter(tmp_path / "broken")
    (broken / "adapter_config.json").write_text("{")
    with pytest.raises(EngineError):
        await engine.load_adapter("broken", str(broken))
    assert (await generate(started, make_request(prompt, 12)))[0] == plain


async def test_evictions_are_published(started: Started) -> None:
    kv, size, total = started.engine.kv, 32, started.llm.total_blocks
    first = text("first of all") * 16
    await generate(started, make_request(first, 1))
    blocks = sequence_hashes(pack_tokens(first), size)
    await until(lambda: all(block in kv for block in blocks))
    longest = CONTEXT - 8
    for number in range(2 * total * size // longest):
        await generate(started, make_request([number % 200, number // 200, *range(250)] * (longest // 252), 1))
    await until(lambda: not any(block in kv for block in blocks))
    assert len(kv) <= total


async def test_an_important_request_overtakes_those_that_wait(started: Started) -> None:
    ended: list[str] = []

    async def run(name: str, priority: int, max_tokens: int) -> None:
        await generate(started, make_request(text(name), max_tokens, priority=priority))
        ended.append(name)

    running = [asyncio.create_task(run(f"running {number}", 9, 100)) for number in range(8)]
    await until(lambda: started.engine.load().running == 8)
    unimportant = [asyncio.create_task(run(f"unimportant {number}", 0, 40)) for number in range(16)]
    await asyncio.sleep(0)
    await asyncio.gather(run("important", 5, 40), *running, *unimportant)
    places = [ended.index(name) for name in ended if name.startswith("unimportant")]
    assert ended.index("important") < sorted(places)[8], "some of the first may end in the same step"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--no-such-thing", "no-such-thing"),
        ("--block-size many", "block-size"),
        ('--dtype "float32', "quot"),
        ("--lora-modules nameless", "NAME=PATH"),
        ("--data-parallel-size 2 --data-parallel-rank 1", "all of its data-parallel ranks"),
    ],
)
async def test_arguments_that_vllm_does_not_know_are_refused(tmp_path: Path, arguments: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        make_engine(str(tmp_path), EngineKind.VLLM, engine_args=arguments)


async def test_a_folder_that_is_no_model_is_refused_when_it_starts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert choose_engine(str(tmp_path)) is EngineKind.VLLM
    with pytest.raises(InvalidRequest, match="vLLM cannot serve"):
        await make_engine(str(tmp_path), engine_args=CPU).start()


async def test_sleep_clears_the_cache_and_wake_gives_the_same_tokens(started: Started) -> None:
    engine = started.engine
    assert isinstance(engine, Sleeps)
    with pytest.raises(Unsupported, match="--enable-sleep-mode"):
        engine.check_sleep()  # the build for CPUs keeps its memory, and knows the rest
    prompt = text("a prompt that fills a block or two, so that some of it is cached before the sleep")
    first = (await generate(started, make_request(prompt)))[0]
    await until(lambda: engine.kv.held())
    sizes: list[int] = []
    engine.on_step(lambda: sizes.append(len(engine.kv)))
    await engine.sleep()
    assert await engine.vllm.llm.is_sleeping()
    assert (len(engine.kv), sizes[-1]) == (0, 0)
    await engine.wake()
    await engine.wake()
    assert not await engine.vllm.llm.is_sleeping()
    tokens, _, summary = await generate(started, make_request(prompt))
    assert (tokens, summary.cached_tokens) == (first, 0)
    await until(lambda: engine.kv.held() and len(engine.kv) == len(prompt) // 32)


class FakeLlm:
    """The part of vLLM's AsyncLLM that sleeps."""

    def __init__(self, *, enabled: bool = True, fails: bool = False, wakes: bool | None = True) -> None:
        self.vllm_config = SimpleNamespace(model_config=SimpleNamespace(enable_sleep_mode=enabled))
        self.calls: list[object] = []
        self._fails = fails
        self._wakes = wakes

    async def sleep(self, level: int) -> None:
        self.calls.append(level)
        if self._fails:
            raise RuntimeError("out of host memory")

    async def wake_up(self) -> bool | None:
        self.calls.append("wake")
        if self._fails:
            raise RuntimeError("out of host memory")
        return self._wakes


def with_fake(folder: Path, llm: FakeLlm) -> Any:
    engine: Any = make_engine(str(folder), EngineKind.VLLM)
    engine.vllm.llm = llm
    return engine


async def test_with_sleep_mode_it_sleeps_and_forgets_late_events_on_waking(tmp_path: Path) -> None:
    engine = with_fake(tmp_path, llm := FakeLlm(wakes=None))
    engine.check_sleep()
    engine.kv.store([1, 2])
    await engine.sleep()
    assert not engine.kv.held()
    engine.kv.store([3])  # an event of the last step before the sleep
    await engine.wake()
    assert not engine.kv.held()
    assert llm.calls == [1, "wake"]


async def test_a_failure_to_sleep_or_wake_is_an_engine_error(tmp_path: Path) -> None:
    failing = with_fake(tmp_path, FakeLlm(fails=True))
    for call in (failing.sleep, failing.wake):
        with pytest.raises(EngineError, match="out of host memory"):
            await call()
    half_awake = with_fake(tmp_path, FakeLlm(wakes=False))
    await half_awake.sleep()
    with pytest.raises(EngineError, match="completely"):
        await half_awake.wake()


async def test_the_engine_process_dies_and_others_can_take_its_requests_over(started: Started) -> None:
    assert isinstance(started.engine, MayFail)
    failure = asyncio.create_task(started.engine.failure())
    endless = started.engine.generate(make_request(text("x"), 1900), Context("test"))
    async with aclosing(endless) as items:
        await anext(items)
        assert not failure.done()
        [process] = [child for child in multiprocessing.active_children() if "EngineCore" in child.name]
        process.kill()
        with pytest.raises(Unavailable) as died:
            async for _ in items:
                pass
    assert died.value.retryable
    async with asyncio.timeout(120):
        assert "died" in str(await failure)
    with pytest.raises(DynamoError):
        await generate(started, make_request(text("x")))


async def test_each_rank_is_an_engine_with_a_cache_and_a_load_of_its_own(tmp_path: Path) -> None:
    before = set(multiprocessing.active_children())
    engine: Any = make_engine(str(make_tiny_llama(tmp_path / "tiny")), engine_args=f"{CPU} --data-parallel-size 2")
    with pytest.raises(InvalidRequest, match="2 data-parallel ranks"):
        await engine.start()
    engines = engine.ranks()
    cards = await asyncio.gather(*(rank.start() for rank in engines))
    try:
        tokenizer = Tokenizer.from_str(byte_tokenizer().decode())
        ranks = [Started(rank, card, tokenizer) for rank, card in zip(engines, cards, strict=True)]
        blocks = (64 << 20) // (32 * 2 * 128 * 2 * 4)
        assert [(rank.llm.data_parallel_size, rank.llm.total_blocks) for rank in ranks] == [(1, blocks)] * 2
        prompt = text("one prompt for both of the ranks, which is long enough to fill two blocks")
        expected = set(sequence_hashes(pack_tokens(prompt), 32))
        for number, rank in enumerate(ranks):
            assert (await generate(rank, make_request(prompt, 4)))[2].cached_tokens == 0
            await until(lambda kv=rank.engine.kv: set(kv.held()) == expected)
            assert [len(other.engine.kv.held()) for other in ranks[number + 1 :]] == [0] * (1 - number)
            assert (await generate(rank, make_request(prompt, 4)))[2].cached_tokens == 64
        both = await asyncio.gather(*(generate(rank, make_request(prompt, 4)) for rank in ranks))  # with the same id
        assert [summary.output_tokens for _, _, summary in both] == [4, 4]
        async with aclosing(ranks[1].engine.generate(make_request(prompt, 400), Context("long"))) as items:
            await anext(items)
            await until(lambda: ranks[1].engine.load().running == 1)
            assert ranks[0].engine.load().running == 0
    finally:
        for rank in engines:
            await rank.close()
    await until(lambda: set(multiprocessing.active_children()) <= before, 120)  # which vLLM may have to kill


async def test_a_start_that_is_given_up_ends_soon_and_leaves_nothing(tmp_path: Path) -> None:
    before = set(multiprocessing.active_children())

    def children() -> bool:
        return bool(set(multiprocessing.active_children()) - before)

    starting = asyncio.create_task(make_engine(str(make_tiny_llama(tmp_path / "tiny")), engine_args=CPU).start())
    await until(children, 120)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    await until(lambda: not children(), 120)
