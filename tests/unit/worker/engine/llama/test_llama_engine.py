"""The llama engine with the small language model: how it generates, not what."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from tokenizers import Tokenizer

from dynamo.common.errors import DynamoError, InvalidRequest, Unavailable
from dynamo.common.generation import Delta, FinishReason, GenerateRequest, Sampling, Stop, Summary, pack_tokens
from dynamo.common.kv.events import NO_STEPS
from dynamo.common.model_card import ModelCard
from dynamo.worker.engine.base import Context, Engine, EngineLoad, HasFiles
from dynamo.worker.engine.llama.engine import LlamaEngine

pytestmark = [pytest.mark.real_model, pytest.mark.asyncio(loop_scope="module")]

SLOTS, CONTEXT = 2, 512
GREEDY = Sampling(temperature=0)
GREETING = "<|im_start|>user\nSay hi in a few words<|im_end|>\n<|im_start|>assistant\n"


@dataclass(frozen=True)
class Loaded:
    engine: LlamaEngine
    card: ModelCard
    tokenizer: Tokenizer

    def tokens(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def loaded() -> AsyncIterator[Loaded]:
    engine = LlamaEngine("smollm2", slots=SLOTS, context_length=CONTEXT, threads=1)
    card = await engine.start()
    yield Loaded(engine, card, Tokenizer.from_str(engine.files()[0].decode()))
    await engine.close()


@pytest.fixture
def engine(loaded: Loaded) -> LlamaEngine:
    return loaded.engine


@dataclass
class Generation:
    deltas: list[Delta]
    summary: Summary

    @property
    def tokens(self) -> list[int]:
        return [token for delta in self.deltas for token in delta.tokens]

    @property
    def end(self) -> Delta:
        return self.deltas[-1]

    def logprobs(self) -> list[list[tuple[int, float]]]:
        return [step for delta in self.deltas for step in delta.logprobs or []]


def make_request(prompt: list[int], **settings: Any) -> GenerateRequest:
    settings = {"sampling": GREEDY, "stop": Stop(max_tokens=16), **settings}
    return GenerateRequest(model="smollm2", prompt=pack_tokens(prompt), **settings)


async def generate(engine: LlamaEngine, request: GenerateRequest) -> Generation:
    deltas: list[Delta] = []
    async for item in engine.generate(request, Context("test")):
        if isinstance(item, Summary):
            return Generation(deltas, item)
        deltas.append(item)
    raise AssertionError("no summary")


def noise(seed: int, length: int) -> list[int]:
    """Tokens of which no continuation is likely: where rounding would show first."""
    chosen = random.Random(seed)
    return [chosen.randrange(100, 49_000) for _ in range(length)]


async def test_the_card_names_the_tokenizer_and_the_template(loaded: Loaded) -> None:
    assert isinstance(loaded.engine, Engine) and isinstance(loaded.engine, HasFiles)
    llm = loaded.card.llm
    assert llm is not None
    assert [llm.tokenizer, llm.chat_template] == [sha256(file).hexdigest() for file in loaded.engine.files()]
    assert (loaded.card.name, llm.context_length, llm.max_num_seqs) == ("smollm2", CONTEXT, SLOTS)
    assert (llm.eos_token, loaded.tokenizer.token_to_id(llm.eos_token)) == ("<|im_end|>", llm.eos_token_ids[0])


async def test_a_generation_ends_with_the_token_that_stopped_it(loaded: Loaded) -> None:
    result = await generate(loaded.engine, make_request(loaded.tokens(GREETING), stop=Stop(max_tokens=200)))
    assert result.end == Delta((), 0, FinishReason.STOP, None, loaded.tokenizer.token_to_id("<|im_end|>"))
    assert 0 < result.summary.output_tokens == len(result.tokens) < 200
    assert result.end.stop_token not in result.tokens
    assert all(len(delta.tokens) == 1 for delta in result.deltas[:-1]), "one step, one delta"


@pytest.mark.parametrize("length", [1, 2, 33, 128, 129, pytest.param(300, marks=pytest.mark.slow)])
async def test_an_identical_prompt_is_cached_and_gives_the_same_tokens(engine: LlamaEngine, length: int) -> None:
    request = make_request(noise(length, length), logprobs=3)
    first, second = await generate(engine, request), await generate(engine, request)
    assert first.logprobs() == second.logprobs(), "not only the tokens"
    assert (first.summary.cached_tokens, second.summary.cached_tokens) == (0, length - 1)
    assert first.summary.prompt_tokens == length


async def test_a_generation_does_not_depend_on_concurrent_ones(engine: LlamaEngine) -> None:
    request = make_request(noise(1, 60), stop=Stop(max_tokens=12), logprobs=0)
    alone = await generate(engine, request)
    together = await asyncio.gather(
        *(generate(engine, item) for item in (make_request(noise(2, 130)), request, make_request(noise(3, 40))))
    )
    assert together[1].logprobs() == alone.logprobs()


async def test_two_slots_generate_at_the_same_time(engine: LlamaEngine) -> None:
    async def times(seed: int) -> list[float]:
        request = make_request(noise(seed, 20), stop=Stop(max_tokens=40, ignore_eos=True))
        return [time.monotonic() async for item in engine.generate(request, Context("test"))]

    first, second = await asyncio.gather(times(1), times(2))
    assert first[0] < second[10] and second[0] < first[10], "neither waits for the other to end"


async def test_more_requests_than_slots_wait_in_line_and_are_counted(engine: LlamaEngine) -> None:
    request = make_request(noise(9, 20), stop=Stop(max_tokens=12, ignore_eos=True))
    before = engine.load().totals

    async def run() -> list[EngineLoad]:
        return [engine.load() async for _ in engine.generate(request, Context("test"))]

    [first, *_] = await asyncio.gather(*(run() for _ in range(SLOTS + 2)))
    blocks = SLOTS * CONTEXT // 16
    assert (first[0].waiting, first[0].running, first[0].total_blocks) == (2, SLOTS, blocks)
    assert first[0].active_blocks == SLOTS * 2, "20 tokens and what was made of them"
    assert first[0].queued_prefill_tokens >= 2 * 20, "of those that wait"
    load = engine.load()
    assert dataclasses.replace(load, totals=NO_STEPS) == EngineLoad(total_blocks=blocks)
    finished, generated = load.totals.finished - before.finished, load.totals.generated - before.generated
    assert (finished, generated) == (SLOTS + 2, (SLOTS + 2) * 12)
    assert load.totals.seconds > 0.0


async def test_an_abandoned_generation_frees_its_slot_within_a_step(engine: LlamaEngine) -> None:
    endless = make_request(noise(4, 20), stop=Stop(ignore_eos=True))
    # A generation in the other slot is the clock: both slots do their steps together, however slow the machine is.
    async with aclosing(engine.generate(endless, Context("clock"))) as clock:  # type: ignore[type-var]
        await anext(clock)
        for _ in range(3):
            async with aclosing(engine.generate(endless, Context("test"))) as items:  # type: ignore[type-var]
                await anext(items)
                assert engine.load().running == SLOTS
            ticks = 0
            next_one = asyncio.create_task(generate(engine, make_request(noise(5, 20), stop=Stop(max_tokens=1))))
            while not next_one.done():
                await anext(clock)
                ticks += 1
            assert ticks < 100, "the abandoned one would go on for some 490 steps"
    assert engine.load().waiting == 0


async def test_a_request_that_is_cancelled_while_it_waits_never_runs(engine: LlamaEngine) -> None:
    long = [
        asyncio.create_task(generate(engine, make_request(noise(i, 9), stop=Stop(max_tokens=20, ignore_eos=True))))
        for i in range(SLOTS)
    ]
    await asyncio.sleep(0)
    waiting = asyncio.create_task(generate(engine, make_request(noise(7, 300), stop=Stop(max_tokens=200, ignore_eos=True))))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert [len(result.tokens) for result in await asyncio.gather(*long)] == [20] * SLOTS


async def test_the_event_loop_takes_turns_while_a_prompt_is_processed(engine: LlamaEngine) -> None:
    turns = 0
    working = asyncio.create_task(generate(engine, make_request(noise(11, 300), stop=Stop(max_tokens=1))))
    while not working.done():
        await asyncio.sleep(0.001)
        turns += 1
    assert turns > 30, "held by each step over 128 tokens, the loop would take fewer than ten"


async def test_stop_tokens_end_a_generation(loaded: Loaded) -> None:
    prompt = loaded.tokens(GREETING)
    whole = (await generate(loaded.engine, make_request(prompt))).tokens
    position = next(index for index in range(4, len(whole)) if whole[index] not in whole[:index])
    cut = await generate(loaded.engine, make_request(prompt, stop=Stop(max_tokens=16, token_ids=(whole[position],))))
    assert (cut.tokens, cut.end.finish_reason, cut.end.stop_token) == (whole[:position], FinishReason.STOP, whole[position])


async def test_a_generation_has_exactly_max_tokens(engine: LlamaEngine) -> None:
    for wanted in (1, 2, 7):
        result = await generate(engine, make_request(noise(13, 30), stop=Stop(max_tokens=wanted, ignore_eos=True)))
        assert (len(result.tokens), result.end.finish_reason) == (wanted, FinishReason.LENGTH)
        assert result.summary.output_tokens == wanted
    assert (await generate(engine, make_request(noise(13, 30), stop=Stop(max_tokens=0)))).deltas == [
        Delta((), 0, FinishReason.LENGTH)
    ]


async def test_min_tokens_continues_a_generation_past_its_end(loaded: Loaded) -> None:
    prompt = loaded.tokens(GREETING)
    ended = await generate(loaded.engine, make_request(prompt, stop=Stop(max_tokens=100)))
    min_tokens = len(ended.tokens) + 10
    longer = await generate(loaded.engine, make_request(prompt, stop=Stop(max_tokens=100, min_tokens=min_tokens)))
    assert len(longer.tokens) >= min_tokens
    assert longer.tokens[: len(ended.tokens)] == ended.tokens
    exact = await generate(loaded.engine, make_request(prompt, stop=Stop(max_tokens=min_tokens, min_tokens=min_tokens)))
    assert (len(exact.tokens), exact.end.finish_reason) == (min_tokens, FinishReason.LENGTH)


async def test_tokens_inside_a_character_are_reported(loaded: Loaded) -> None:
    llamas = loaded.tokens("🦙" * 12)
    character = loaded.tokens("🦙")
    assert len(character) == 3, "one character, several tokens"
    for wanted in range(7, 10):  # ends before, inside and after a character
        result = await generate(loaded.engine, make_request(llamas, stop=Stop(max_tokens=wanted), logprobs=0))
        assert result.tokens == (character * 4)[:wanted]
        assert len(result.logprobs()) == wanted


async def test_logprobs_name_the_chosen_token_first_and_the_best_others_after_it(engine: LlamaEngine) -> None:
    result = await generate(engine, make_request(noise(15, 20), logprobs=4))
    steps = result.logprobs()
    assert [step[0][0] for step in steps] == result.tokens
    for step in steps:
        values = [logprob for _, logprob in step]
        assert len({token for token, _ in step}) == len(step) == 5
        assert values == sorted(values, reverse=True), "greedy: the chosen one is the best"
        assert values[0] <= 0
    assert all(delta.logprobs is None for delta in (await generate(engine, make_request(noise(15, 20)))).deltas)


async def test_choices_differ_by_seed_and_repeat_with_it(engine: LlamaEngine) -> None:
    request = make_request(noise(16, 20), n=3, sampling=Sampling(temperature=1.5, seed=7), stop=Stop(max_tokens=6))

    async def choices() -> list[list[int]]:
        result = await generate(engine, request)
        assert [delta.finish_reason is not None for delta in result.deltas].count(True) == 3
        return [[token for delta in result.deltas if delta.index == index for token in delta.tokens] for index in range(3)]

    first = await choices()
    assert first == await choices()
    assert len({tuple(tokens) for tokens in first}) == 3

    last = await generate(engine, msgspec.structs.replace(request, n=1, first_choice=2))
    assert [token for delta in last.deltas for token in delta.tokens] == first[2]
    assert {delta.index for delta in last.deltas} == {0}


async def test_unset_sampling_parameters_are_those_the_models_authors_recommend(engine: LlamaEngine) -> None:
    async def sampled(**settings: float) -> list[int]:
        sampling = Sampling(seed=3, **settings)  # type: ignore[arg-type]
        return (await generate(engine, make_request(noise(17, 20), sampling=sampling, stop=Stop(max_tokens=24)))).tokens

    left_open = await sampled()
    assert left_open == await sampled(temperature=0.2, top_p=0.9)
    assert left_open != await sampled(temperature=0.8, top_p=0.95)


async def test_a_bias_bans_and_forces_tokens(engine: LlamaEngine) -> None:
    prompt = noise(17, 20)
    [usual] = (await generate(engine, make_request(prompt, stop=Stop(max_tokens=1)))).tokens
    banned = Sampling(temperature=0, bad_words_token_ids=((usual,),))
    assert (await generate(engine, make_request(prompt, sampling=banned, stop=Stop(max_tokens=1)))).tokens != [usual]
    forced = Sampling(temperature=0, logit_bias={4242: 100.0})
    assert (await generate(engine, make_request(prompt, sampling=forced, stop=Stop(max_tokens=3)))).tokens == [4242] * 3


async def test_a_repetition_penalty_changes_the_generation(engine: LlamaEngine) -> None:
    prompt = noise(18, 4) * 6
    plain = await generate(engine, make_request(prompt))
    penalised = await generate(engine, make_request(prompt, sampling=Sampling(temperature=0, repetition_penalty=5.0)))
    assert plain.tokens != penalised.tokens


@pytest.mark.parametrize(
    ("guided", "fits"),
    [
        ({"choice": ["yes", 'no "really"']}, lambda text: text in ("yes", 'no "really"')),
        ({"regex": "[0-9]{3}/[a-c]"}, lambda text: len(text) == 5 and text[3] == "/"),
        ({"grammar": 'root ::= "ab" [0-9]'}, lambda text: text[:2] == "ab" and text[2:].isdigit()),
        ({"json_object": True}, lambda text: isinstance(json.loads(text), dict)),
        (
            {"json_schema": {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}},
            lambda text: json.loads(text)["a"] in (1, 2),
        ),
        ({"json_schema": '{"type": "boolean"}'}, lambda text: isinstance(json.loads(text), bool)),
    ],
)  # fmt: skip
async def test_guided_output_matches_its_grammar(loaded: Loaded, guided: dict[str, Any], fits: Any) -> None:
    prompt = loaded.tokens("An empty JSON object is {} and nothing else. An empty JSON object is ")
    result = await generate(
        loaded.engine, make_request(prompt, sampling=Sampling(temperature=0, guided=guided), stop=Stop(max_tokens=60))
    )
    assert result.end.finish_reason is FinishReason.STOP
    assert fits(loaded.tokenizer.decode(result.tokens))


@pytest.mark.parametrize(
    ("prompt", "settings", "message"),
    [
        ([], {}, "no tokens"),
        ([49_152], {}, "49152"),
        ([5] * CONTEXT, {}, f"{CONTEXT} tokens"),
        ([5], {"sampling": Sampling(temperature=-0.1)}, "temperature"),
        ([5], {"sampling": Sampling(temperature=float("nan"))}, "temperature"),
        ([5], {"sampling": Sampling(top_p=0)}, "top_p"),
        ([5], {"sampling": Sampling(top_p=1.1)}, "top_p"),
        ([5], {"sampling": Sampling(top_k=-2)}, "top_k"),
        ([5], {"sampling": Sampling(min_p=2)}, "min_p"),
        ([5], {"sampling": Sampling(presence_penalty=3)}, "presence_penalty"),
        ([5], {"sampling": Sampling(repetition_penalty=0)}, "repetition_penalty"),
        ([5], {"sampling": Sampling(logit_bias={49_152: 1})}, "logit_bias"),
        ([5], {"sampling": Sampling(logit_bias={1: float("inf")})}, "logit_bias"),
        ([5], {"n": 0}, "n must be between 1 and 64, got 0"),
        ([5], {"n": 10_000}, "n must be between 1 and 64, got 10000"),
        ([5], {"logprobs": 100_000}, "logprobs"),
        ([5], {"stop": Stop(max_tokens=-1)}, "max_tokens"),
        ([5], {"stop": Stop(min_tokens=-1)}, "min_tokens"),
        ([5], {"data_parallel_rank": 1}, "data_parallel_rank"),
        ([5], {"sampling": Sampling(guided={})}, "exactly one"),
        ([5], {"sampling": Sampling(guided={"regex": "a", "choice": ["a"]})}, "exactly one"),
        ([5], {"sampling": Sampling(guided={"magic": 1})}, "magic"),
        ([5], {"sampling": Sampling(guided={"choice": []})}, "choice"),
        ([5], {"sampling": Sampling(guided={"regex": "a("})}, "regex"),
        ([5], {"sampling": Sampling(guided={"json_schema": {"type": "nonsense"}})}, "json_schema"),
        ([5], {"sampling": Sampling(guided={"json_schema": "{"})}, "json_schema"),
        ([5], {"sampling": Sampling(guided={"grammar": "root ::= ((("})}, "grammar"),
    ],
)
async def test_an_invalid_parameter_is_refused_by_name(
    engine: LlamaEngine, prompt: list[int], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        await generate(engine, make_request(prompt, **settings))


@pytest.mark.parametrize(
    "settings",
    [
        {"prompt_logprobs": 1},
        {"adapter": "lora"},
        {"cache_salt": "s"},
        {"kv_transfer": {}},
        {"media": ({"type": "image"},)},
        {"sampling": Sampling(allowed_token_ids=(1,))},
        {"sampling": Sampling(bad_words_token_ids=((1, 2),))},
        {"sampling": Sampling(guided={"choice": ["a"]}), "stop": Stop(min_tokens=3)},
    ],
)
async def test_parameters_that_llama_cpp_does_not_support_are_refused(engine: LlamaEngine, settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="not supported"):
        await generate(engine, make_request([5], **settings))


async def test_a_model_that_is_not_there_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="there is no file"):
        LlamaEngine("/nowhere/model.gguf")


async def test_a_file_that_is_no_model_does_not_load(tmp_path: Any) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(DynamoError, match=r"broken\.gguf|GGUF"):
        await LlamaEngine(str(path)).start()


async def test_a_truncated_model_does_not_load(engine: LlamaEngine, tmp_path: Any) -> None:
    path = tmp_path / "half.gguf"
    path.write_bytes(engine.path.read_bytes()[:8_000_000])
    with pytest.raises(InvalidRequest, match="cannot load"):
        await LlamaEngine(str(path)).start()


async def test_a_context_that_the_model_was_not_trained_for_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="8192"):
        await LlamaEngine("smollm2", context_length=8193).start()


async def test_the_waiting_request_of_the_highest_priority_runs_first(engine: LlamaEngine) -> None:
    ended: list[int] = []

    async def run(priority: int) -> None:
        await generate(engine, make_request(noise(19, 9), stop=Stop(max_tokens=10, ignore_eos=True), priority=priority))
        ended.append(priority)

    await asyncio.gather(*(run(priority) for priority in [9] * SLOTS + [1, 2, 3, 4]))
    assert ended[SLOTS : SLOTS + 2] in ([3, 4], [4, 3]), "two slots take the two most important"


async def test_a_prompt_that_had_to_leave_its_slot_is_still_cached(engine: LlamaEngine) -> None:
    prompts = [noise(seed, 50) for seed in range(20, 21 + SLOTS)]
    for prompt in prompts:
        await generate(engine, make_request(prompt, stop=Stop(max_tokens=2)))
    again = await generate(engine, make_request(prompts[0], stop=Stop(max_tokens=2)))
    assert again.summary.cached_tokens == 49


async def test_closing_ends_open_generations_and_refuses_new_ones() -> None:
    engine = LlamaEngine("smollm2", name="other", slots=1, context_length=512, threads=1)
    assert (await engine.start()).name == "other"
    generating = engine.generate(make_request([5], stop=Stop(ignore_eos=True)), Context("test"))
    await anext(generating)
    await engine.close()
    with pytest.raises(DynamoError, match=r"clos|cancel"):
        async for _ in generating:
            pass
    with pytest.raises(Unavailable):
        await generate(engine, make_request([5]))
