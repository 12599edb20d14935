from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from dynamo.common.errors import (
    DeadlineExceeded,
    DynamoError,
    EngineError,
    InstanceGone,
    InvalidRequest,
    Overloaded,
    ShuttingDown,
    Unavailable,
)
from dynamo.common.generation import (
    GRAMMAR_OWNER,
    Delta,
    FinishReason,
    GenerateRequest,
    Sampling,
    Stop,
    Summary,
    delta_encoder,
    image_part,
    pack_tokens,
    request_decoder,
    summary_encoder,
)
from dynamo.common.kv.tiers import Tier
from dynamo.common.model_card import TAKES_TEXT, LlmInfo, ModelCard, ModelKind
from dynamo.common.names import InstanceId
from dynamo.frontend.config import RetryOptions, ServingOptions, TextLimits
from dynamo.frontend.metrics import FrontendMetrics, RequestType
from dynamo.frontend.preprocess.offload import Offload
from dynamo.frontend.preprocess.plain import PlainTextModel
from dynamo.frontend.preprocess.text import TextDelta, TextRequest
from dynamo.frontend.router.fetch import TierFetch
from dynamo.frontend.security.accounts import ANONYMOUS, KeyAccount
from dynamo.frontend.security.keys import ApiKey, Limits
from dynamo.frontend.security.ledger import Ledger
from dynamo.frontend.serving.call import Call
from dynamo.frontend.serving.data_plane import DataPlane, Generation, open_data_plane
from dynamo.frontend.serving.text.text_models import TextModel
from tests.support.fakes import (
    DyingEngine,
    FakeClient,
    FakeDirectory,
    FakeLink,
    FakeStream,
    FakeText,
    FakeTexts,
    LoadText,
    RecordingRouter,
    TokenEngine,
    continuation,
    instance,
    llm_card,
    load_fake_text,
    tensor_card,
)
from tests.support.plane import generate
from tests.support.virtual_time import in_virtual_time, run
from tests.support.waiting import counting_turns, until

CALL = Call(account=ANONYMOUS, request_id="r", endpoint="completions", request_type=RequestType.STREAM)
PROMPT = [3, 1, 4, 1, 5]


class Front:
    def __init__(
        self,
        plane: DataPlane,
        client: FakeClient,
        link: FakeLink,
        router: RecordingRouter,
        registry: CollectorRegistry,
    ) -> None:
        self.plane = plane
        self.client = client
        self.link = link
        self.router = router
        self._registry = registry

    def count(self, name: str, **labels: str) -> float:
        return self._registry.get_sample_value(f"dynamo_frontend_{name}", {"model": "talker", **labels}) or 0.0


@asynccontextmanager
async def front(
    respond: Callable[[FakeStream], None] = lambda stream: None,
    *,
    instances: int = 8,
    card: ModelCard | None = None,
    settings: ServingOptions | None = None,
    load: LoadText = load_fake_text,
) -> AsyncIterator[Front]:
    directory = FakeDirectory(*(instance(id_, card or llm_card()) for id_ in range(1, instances + 1)))
    client, link, router, registry = FakeClient(respond), FakeLink(), RecordingRouter(), CollectorRegistry()
    async with open_data_plane(directory, client, link, router, FakeTexts(load), FrontendMetrics(registry), settings) as plane:
        yield Front(plane, client, link, router, registry)


def gone(id_: InstanceId) -> DynamoError:
    return InstanceGone(id_)


def lost(id_: InstanceId) -> DynamoError:
    """The instance is there, and only the stream was lost."""
    return InstanceGone(id_, is_alive=True)


def text_request(max_tokens: int = 8, **more: object) -> TextRequest:
    settings: dict[str, Any] = {"model": "talker", "prompt": PROMPT, "stop": Stop(max_tokens=max_tokens), **more}
    return TextRequest(**settings)


async def read_all(generation: Generation) -> list[TextDelta]:
    texts: list[TextDelta] = []
    while batch := await generation.read():
        texts += batch
    return texts


def tokens_of(texts: list[TextDelta]) -> list[int]:
    return [token for text in texts for token in text.tokens]


def delta(*tokens: int, index: int = 0, finish: FinishReason | None = None) -> bytes:
    return delta_encoder.encode(Delta(tokens, index, finish))


async def test_what_an_engine_found_cached_is_compared_if_routing_counted_on_slow_tiers() -> None:
    async with front(TokenEngine([], gone)) as f:
        for fetch in (None, TierFetch(((Tier.CPU, 1),), 1, 0.0, 0.0)):
            f.router.fetch = fetch
            async with generate(f.plane, text_request(3), CALL) as generation:
                await read_all(generation)
        assert f.router.found == [1]


async def test_a_generation_gives_text_and_then_its_summary() -> None:
    async with front(TokenEngine([], gone)) as f:
        async with generate(f.plane, text_request(3), CALL) as generation:
            assert generation.prompt_tokens == len(PROMPT)
            texts = await read_all(generation)
            assert tokens_of(texts) == continuation(PROMPT, 3)
            assert texts[-1].finish_reason is FinishReason.LENGTH
            assert generation.summary == Summary(prompt_tokens=5, output_tokens=3, cached_tokens=1)
            assert generation.decision is not None
            assert await generation.read() == []
        assert not f.router.open
        assert f.count("output_tokens_total") == 3
        assert f.count("inflight_requests") == 0
        labels = {"endpoint": "completions", "request_type": "stream", "status": "success", "error_type": ""}
        assert f.count("requests_total", **labels) == 1


@pytest.mark.parametrize(("guided", "owner"), [({"regex": "a"}, "team"), (None, None)])
async def test_a_worker_is_told_whose_grammar_it_is(guided: dict[str, Any] | None, owner: str | None) -> None:
    call = msgspec.structs.replace(CALL, account=KeyAccount(ApiKey(name="team", salt=b"", digest=b"")))
    async with front(TokenEngine([], gone)) as f:
        async with generate(f.plane, text_request(3, sampling=Sampling(guided=guided)), call) as generation:
            await read_all(generation)
        assert [stream.headers.get(GRAMMAR_OWNER) for stream in f.client.streams] == [owner]


async def test_deltas_that_queued_up_are_read_together() -> None:
    async with (
        front(lambda stream: stream.data(delta(1), delta(2), delta(3))) as f,
        generate(f.plane, text_request(), CALL) as generation,
    ):
        assert [text.tokens for text in await generation.read()] == [(1,), (2,), (3,)]


async def test_many_log_probabilities_that_queued_up_are_read_in_turns_with_other_tasks() -> None:
    position = [(token, -1.0) for token in range(21)]
    queued = [delta_encoder.encode(Delta((1,), 0, None, [position]))] * 2000
    async with (
        front(lambda stream: stream.data(*queued)) as f,
        generate(f.plane, text_request(), CALL) as generation,
        counting_turns() as turns,
    ):
        sizes = [len(await generation.read())]
        before = turns[0]
        while sum(sizes) < len(queued):
            sizes.append(len(await generation.read()))
        assert max(sizes) < 400
        assert turns[0] - before >= len(sizes) - 1


async def test_the_worker_gets_the_tokens_under_the_models_own_name() -> None:
    card = llm_card()
    assert card.llm is not None
    card = msgspec.structs.replace(card, aliases=("t",), llm=msgspec.structs.replace(card.llm, adapters=("law",)))
    async with front(TokenEngine([], gone), card=card) as f:
        for name in ("t", "law"):
            call = Call(account=ANONYMOUS, request_id="r", priority=4)
            async with generate(f.plane, text_request(model=name), call) as generation:
                await read_all(generation)
        sent = [request_decoder.decode(stream.body) for stream in f.client.streams]
        assert [(request.model, request.adapter, request.priority) for request in sent] == [
            ("talker", "", 4),
            ("talker", "law", 4),
        ]
        assert f.router.requests[1].adapter == "law"
        assert f.router.requests[1].prompt == sent[1].prompt
        assert f.router.requests[1].expected_output_tokens == 8


async def test_the_router_learns_which_keys_and_sessions_have_long_outputs() -> None:
    async with front(TokenEngine([], gone)) as f:

        async def ask(key: str, session: str, tokens: int, times: int = 1) -> float:
            call = Call(account=KeyAccount(ApiKey(name=key, salt=b"", digest=b"")), request_id="r", session=session)
            for _ in range(times):
                async with generate(f.plane, text_request(max_tokens=tokens), call) as generation:
                    await read_all(generation)
            return f.router.requests[-1].learned_output

        assert await ask("long", "", 90) == 0.0
        await ask("long", "", 90, times=30)
        await ask("short", "", 3, times=30)
        await ask("short", "talkative", 60, times=30)
        long, short, session = [await ask(*each, 5) for each in (("long", ""), ("short", "new"), ("short", "talkative"))]
        assert long > 75 and 45 < session < 75 and short < 0.6 * long


def image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


class FetchingText(FakeText):
    """Its only image has 100 bytes when it is fetched."""

    async def to_generate(self, request: TextRequest, key: str = "") -> GenerateRequest:
        return msgspec.structs.replace(await super().to_generate(request), media=(image_part(bytes(100)),))


async def test_media_that_were_fetched_count_as_bytes_of_the_request() -> None:
    held: list[int] = []

    def full(size_bytes: int) -> None:
        raise Overloaded("the server holds enough")

    async def load(card: ModelCard) -> TextModel:
        return FetchingText()

    request = text_request(media=(image("http://h/1"),))
    async with front(TokenEngine([], gone), load=load) as f:
        async with generate(f.plane, request, msgspec.structs.replace(CALL, hold=held.append)):
            assert held == [90]
        with pytest.raises(Overloaded):
            async with generate(f.plane, request, msgspec.structs.replace(CALL, hold=full)):
                pass
        assert not f.client.streams


@pytest.mark.parametrize(("tokens", "held"), [(16_000, []), (20_000, [2 * 4 * 20_000])])
async def test_the_ids_of_a_long_prompt_count_as_bytes_of_the_request(tokens: int, held: list[int]) -> None:
    counted: list[int] = []

    class LongText(FakeText):
        async def to_generate(self, request: TextRequest, key: str = "") -> GenerateRequest:
            return msgspec.structs.replace(await super().to_generate(request), prompt=pack_tokens([1] * tokens))

    async def load(card: ModelCard) -> TextModel:
        return LongText()

    call = msgspec.structs.replace(CALL, hold=counted.append)
    async with front(TokenEngine([], gone), load=load) as f, generate(f.plane, text_request(), call):
        assert counted == held


async def test_the_router_sees_the_digest_of_an_image_and_the_worker_the_token_in_its_place() -> None:
    card = llm_card()
    assert card.llm is not None
    card = msgspec.structs.replace(card, llm=msgspec.structs.replace(card.llm, image_token=PROMPT[2]))
    decoded = image_part(b"an image")
    async with front(TokenEngine([], gone), card=card) as f:
        async with generate(f.plane, text_request(media=(decoded,)), CALL) as generation:
            await read_all(generation)
        [stream] = f.client.streams
        sent = request_decoder.decode(stream.body)
        assert (list(sent.tokens), sent.media) == (PROMPT, (decoded,))
        [routed] = f.router.requests
        assert routed.prompt == pack_tokens(PROMPT[:2]) + decoded["sha256"] + pack_tokens(PROMPT[3:])


async def test_a_stop_string_cancels_the_engine_at_once() -> None:
    async with front(lambda stream: stream.data(delta(1), delta(2), delta(3))) as f:
        async with generate(f.plane, text_request(stop_strings=("2 ",)), CALL) as generation:
            texts = await generation.read()
            assert "".join(text.text for text in texts) == "1 "
            assert texts[-1].finish_reason is FinishReason.STOP
            assert f.client.streams[0].cancelled
            assert not f.router.open
            assert await generation.read() == []
            assert generation.summary.prompt_tokens == 5
        labels = {"endpoint": "completions", "request_type": "stream", "status": "success", "error_type": ""}
        assert f.count("requests_total", **labels) == 1


async def test_a_stop_string_in_one_choice_leaves_the_others_running() -> None:
    async with front() as f:
        f.client.respond = lambda stream: stream.data(delta(2), delta(1, index=1))
        async with generate(f.plane, text_request(n=2, stop_strings=("2 ",)), CALL) as generation:
            assert [text.finish_reason for text in await generation.read()] == [FinishReason.STOP, None]
            assert not f.client.streams[0].cancelled
            f.client.streams[0].data(delta(9), delta(7, index=1, finish=FinishReason.LENGTH))
            assert [(text.index, text.tokens) for text in await generation.read()] == [(1, (7,))]


async def test_leaving_early_cancels_the_engine() -> None:
    async with front(lambda stream: stream.data(delta(1))) as f:
        async with generate(f.plane, text_request(), CALL) as generation:
            await generation.read()
        assert f.client.streams[0].cancelled
        assert not f.router.open
        assert f.count("inflight_requests") == 0
        labels = {"endpoint": "completions", "request_type": "stream", "status": "error", "error_type": "cancelled"}
        assert f.count("requests_total", **labels) == 1


# Migration


def deaths_after(most: int) -> st.SearchStrategy[list[int]]:
    """After how many tokens each instance dies. Only the first may do so at once: a second one would blame the request."""
    return st.builds(list.__add__, st.lists(st.integers(0, most), max_size=1), st.lists(st.integers(1, most), max_size=2))


@given(
    length=st.integers(1, 30),
    deaths=deaths_after(12),
    per_step=st.integers(1, 4),
    drains=st.booleans(),
)
def test_a_migrated_stream_has_neither_gap_nor_duplicate(length: int, deaths: list[int], per_step: int, drains: bool) -> None:
    """However often its instance dies, whenever, the client reads what an undisturbed run gives."""

    def error(id_: InstanceId) -> DynamoError:
        return ShuttingDown("the worker") if drains else lost(id_)

    async def main() -> None:
        async with front(TokenEngine(deaths, error, per_step)) as f:
            async with generate(f.plane, text_request(length), CALL) as generation:
                texts = await read_all(generation)
                assert tokens_of(texts) == continuation(PROMPT, length)
                assert "".join(text.text for text in texts) == "".join(f"{t} " for t in continuation(PROMPT, length))
                assert [text.finish_reason for text in texts if text.finish_reason] == [FinishReason.LENGTH]
                assert generation.summary.prompt_tokens == len(PROMPT)
                assert generation.summary.output_tokens == length
            sent_to = f.client.sent_to
            assert len(set(sent_to)) == len(sent_to), "an instance that failed is not sent it again"
            assert not f.router.open

    run(main())


async def test_a_generation_whose_next_instance_dies_at_once_as_well_is_not_moved_again() -> None:
    async with front(TokenEngine([2, 0], gone)) as f:
        async with generate(f.plane, text_request(8), CALL) as generation:
            with pytest.raises(EngineError, match="2 instances died while they held this request"):
                await read_all(generation)
        assert len(f.client.sent_to) == 2


async def test_a_generation_whose_second_instance_dies_in_the_middle_as_well_is_not_moved_again() -> None:
    async with front(TokenEngine([2, 3, 1], gone)) as f:
        async with generate(f.plane, text_request(8), CALL) as generation:
            with pytest.raises(EngineError, match="2 instances died while they held this request"):
                await read_all(generation)
        assert len(f.client.sent_to) == 2
        assert not f.router.open


async def test_a_migration_sends_the_prompt_with_all_tokens_received_and_what_is_left_of_the_budget() -> None:
    engine = TokenEngine([5], gone)
    async with front(engine) as f:
        async with generate(f.plane, text_request(8, stop=Stop(max_tokens=8, min_tokens=6)), CALL) as generation:
            await read_all(generation)
        rest = engine.requests[1]
        assert list(rest.tokens) == PROMPT + continuation(PROMPT, 5)
        assert (rest.stop.max_tokens, rest.stop.min_tokens) == (3, 1)
        assert f.count("model_migration_total", migration_type="ongoing_request") == 1
        assert f.count("retries_total") == 0


async def test_the_last_token_is_not_requested_twice_when_only_the_end_was_lost() -> None:
    engine = TokenEngine([4], gone)
    async with front(engine) as f:
        async with generate(f.plane, text_request(4), CALL) as generation:
            texts = await read_all(generation)
        assert tokens_of(texts) == continuation(PROMPT, 4)
        assert texts[-1].finish_reason is FinishReason.LENGTH
        assert len(engine.requests) == 1


async def test_a_finished_response_whose_summary_was_lost_is_complete() -> None:
    def respond(stream: FakeStream) -> None:
        stream.data(delta(1, 2, finish=FinishReason.STOP))
        stream.fail(InstanceGone(stream.instance))

    async with front(respond) as f:
        async with generate(f.plane, text_request(), CALL) as generation:
            assert tokens_of(await read_all(generation)) == [1, 2]
            assert generation.summary == Summary(prompt_tokens=5, output_tokens=2)
        assert len(f.client.streams) == 1


@pytest.mark.parametrize("field", ["prompt_tokens", "output_tokens", "cached_tokens"])
async def test_an_engine_that_reports_less_than_nothing_fails_the_request(field: str) -> None:
    def respond(stream: FakeStream) -> None:
        stream.data(delta(1, 2, finish=FinishReason.STOP))
        stream.end(msgspec.msgpack.encode({field: -1}))

    async with front(respond) as f, generate(f.plane, text_request(), CALL) as generation:
        with pytest.raises(EngineError, match="summary cannot be read"):
            await read_all(generation)


async def test_no_more_of_a_prompt_counts_as_cached_than_there_is() -> None:
    def respond(stream: FakeStream) -> None:
        stream.data(delta(1, 2, finish=FinishReason.STOP))
        stream.end(summary_encoder.encode(Summary(prompt_tokens=5, output_tokens=2, cached_tokens=1 << 53)))

    async with front(respond) as f, generate(f.plane, text_request(), CALL) as generation:
        await read_all(generation)
        assert generation.summary == Summary(prompt_tokens=5, output_tokens=2, cached_tokens=5)


async def test_tokens_beyond_those_that_were_requested_are_not_charged() -> None:
    def respond(stream: FakeStream) -> None:
        for tokens in ((1, 2), (3, 4, 5, 6), (7,)):
            asyncio.get_running_loop().call_soon(stream.data, delta(*tokens, finish=FinishReason.STOP if 7 in tokens else None))
        asyncio.get_running_loop().call_soon(stream.end, b"")

    ledger = Ledger()
    account = KeyAccount(ApiKey(name="team", salt=b"", digest=b""), lambda: 0.0, ledger=ledger)
    call = msgspec.structs.replace(CALL, account=account)
    async with front(respond) as f, generate(f.plane, text_request(max_tokens=4), call) as generation:
        assert tokens_of(await read_all(generation)) == [1, 2, 3, 4, 5, 6, 7]
    [row] = ledger.rows(ledger.today())
    assert (row.prompt_tokens, row.completion_tokens) == (5, 4)


@pytest.mark.parametrize("token", [-1, 1 << 32, 1 << 63])
async def test_a_token_that_is_none_fails_the_request(token: int) -> None:
    def respond(stream: FakeStream) -> None:
        stream.data(msgspec.msgpack.encode([[token], 0, "stop"]))

    async with front(respond) as f, generate(f.plane, text_request(), CALL) as generation:
        with pytest.raises(EngineError, match="response cannot be read"):
            await read_all(generation)


async def test_migrations_are_limited() -> None:
    engine = TokenEngine([1] * 9, lost)
    async with front(engine, settings=ServingOptions(retry=RetryOptions(migration_limit=2))) as f:
        async with generate(f.plane, text_request(8), CALL) as generation:
            with pytest.raises(InstanceGone):
                await read_all(generation)
        assert len(engine.requests) == 3
        assert not f.router.open


async def test_migrations_come_out_of_the_retry_budget() -> None:
    engine = TokenEngine([1] * 9, lost)
    retry = RetryOptions(ratio=0.0, floor_per_s=0.0, burst=1)
    async with front(engine, settings=ServingOptions(retry=retry)) as f:
        async with generate(f.plane, text_request(8), CALL) as generation:
            with pytest.raises(InstanceGone):
                await read_all(generation)
        assert len(engine.requests) == 2


async def test_without_another_instance_a_stream_ends_with_the_error() -> None:
    async with front(TokenEngine([2], gone), instances=1) as f:
        async with generate(f.plane, text_request(8), CALL) as generation:
            with pytest.raises(InstanceGone):
                await read_all(generation)
        labels = {"endpoint": "completions", "request_type": "stream", "status": "error", "error_type": "unavailable"}
        assert f.count("requests_total", **labels) == 1


@pytest.mark.parametrize("n", [1, 2])
async def test_structured_output_does_not_go_on_elsewhere(n: int) -> None:
    async with front(ChoiceEngine([2])) as f:
        async with generate(f.plane, text_request(8, n=n, sampling=Sampling(guided={"json_object": True})), CALL) as generation:
            with pytest.raises(InstanceGone):
                await read_all(generation)
        assert len(f.client.streams) == 1


async def test_a_schema_that_two_instances_died_of_is_refused_with_any_prompt_and_other_schemas_are_served() -> None:
    def request(schema: dict[str, Any], prompt: list[int]) -> TextRequest:
        return text_request(4, prompt=prompt, sampling=Sampling(guided={"json_schema": schema}))

    async def read(text: TextRequest) -> None:
        async with generate(f.plane, text, CALL) as generation:
            await read_all(generation)

    async with front(TokenEngine([0, 0], gone), instances=4) as f:
        with pytest.raises(EngineError, match="2 instances died while they held this request"):
            await read(request({"type": "string"}, [1]))
        with pytest.raises(EngineError, match="2 instances died while they held requests with this schema or grammar"):
            await read(request({"type": "string"}, [2]))
        assert len(f.client.sent_to) == 2
        await read(request({"type": "null"}, [1]))
        await read(text_request(4))


class ChoiceEngine(DyingEngine):
    """A `respond` for FakeClient: the choices of a request, each with tokens of its own, come in a random order.

    `deaths` says after how many deltas each request, in order, loses its instance; the rest complete.
    """

    def __init__(self, deaths: list[int], seed: int = 0) -> None:
        super().__init__(deaths)
        self._random = Random(seed)

    def __call__(self, stream: FakeStream) -> None:
        request, limit, death = self.next_request(stream)
        left = [iter(choice_tokens(request, index, limit)) for index in range(request.n)]
        counts = [0] * request.n
        turns = [index for index in range(request.n) for _ in range(limit)]
        self._random.shuffle(turns)
        for index in turns if death is None else turns[:death]:
            counts[index] += 1
            stream.data(delta(next(left[index]), index=index, finish=FinishReason.LENGTH if counts[index] == limit else None))
        if death is None:
            stream.end(summary_encoder.encode(Summary(prompt_tokens=request.prompt_tokens, output_tokens=len(turns))))
        else:
            stream.fail(lost(stream.instance))


def choice_tokens(request: GenerateRequest, index: int, length: int) -> list[int]:
    """What one choice of a request is: a function of all tokens before and of which choice it is."""
    choice = request.first_choice + index
    tokens = list(request.tokens)
    for _ in range(length):
        tokens.append((sum((at + 1) * token for at, token in enumerate(tokens)) * 31 + 7 + choice) % 50_000)
    return tokens[request.prompt_tokens :]


def choices_of(texts: list[TextDelta], n: int) -> list[list[int]]:
    return [tokens_of([text for text in texts if text.index == index]) for index in range(n)]


WHOLE = GenerateRequest(model="talker", prompt=pack_tokens(PROMPT))


@given(n=st.integers(2, 4), length=st.integers(1, 8), deaths=deaths_after(30), seed=st.integers(0, 99))
def test_every_choice_of_a_migrated_request_goes_on_where_it_was(n: int, length: int, deaths: list[int], seed: int) -> None:
    async def main() -> None:
        async with front(ChoiceEngine(deaths, seed)) as f:
            async with generate(f.plane, text_request(length, n=n), CALL) as generation:
                texts = await read_all(generation)
                assert choices_of(texts, n) == [choice_tokens(WHOLE, index, length) for index in range(n)]
                assert sorted(text.index for text in texts if text.finish_reason) == list(range(n))
                assert (generation.summary.prompt_tokens, generation.summary.output_tokens) == (len(PROMPT), n * length)
            assert not f.router.open
            assert f.count("inflight_requests") == 0

    run(main())


async def test_choices_that_had_finished_are_not_requested_again() -> None:
    engine = ChoiceEngine([])

    def respond(stream: FakeStream) -> None:
        stream.data(delta(7, index=0, finish=FinishReason.STOP), delta(8, index=1), delta(9, 10, index=2))
        stream.fail(InstanceGone(stream.instance))
        f.client.respond = engine

    async with front(respond) as f:
        async with generate(f.plane, text_request(2, n=3), CALL) as generation:
            texts = await read_all(generation)
        (rest,) = engine.requests
        assert (rest.first_choice, rest.n, list(rest.tokens), rest.stop.max_tokens) == (1, 1, [*PROMPT, 8], 1)
        assert [request.sequences for request in f.router.requests] == [3, 1]
        reasons = {text.index: text.finish_reason for text in texts if text.finish_reason}
        assert reasons == {0: FinishReason.STOP, 1: FinishReason.LENGTH, 2: FinishReason.LENGTH}  # of the last, the end was lost


async def test_each_choice_that_goes_on_costs_one_of_the_retry_budget() -> None:
    retry = RetryOptions(ratio=0.0, floor_per_s=0.0, burst=2)
    async with front(ChoiceEngine([3]), settings=ServingOptions(retry=retry)) as f:
        async with generate(f.plane, text_request(8, n=3), CALL) as generation:
            with pytest.raises(InstanceGone):
                await read_all(generation)
        assert not f.router.open
        assert len(f.client.streams) == 1


async def test_leaving_after_choices_have_parted_cancels_all_of_them() -> None:
    engine = ChoiceEngine([3])
    async with front() as f:
        f.client.respond = lambda stream: engine(stream) if len(f.client.streams) == 1 else stream.data(delta(1))
        async with generate(f.plane, text_request(8, n=2), CALL) as generation:
            while len(f.client.streams) < 3:
                assert await generation.read()
            _, *moved = f.client.streams
            assert not any(stream.cancelled for stream in moved)
        assert all(stream.cancelled for stream in moved)
        assert not f.router.open
        assert f.count("inflight_requests") == 0


async def test_an_engine_that_responds_with_more_than_the_one_choice_is_an_error() -> None:
    async with front() as f:
        engine = ChoiceEngine([3])
        f.client.respond = lambda stream: engine(stream) if len(f.client.streams) == 1 else stream.data(delta(1, index=1))
        async with generate(f.plane, text_request(8, n=2), CALL) as generation:
            with pytest.raises(EngineError, match="not requested"):
                await read_all(generation)
        assert not f.router.open


async def test_a_generation_that_names_its_instance_is_not_moved() -> None:
    async with front(TokenEngine([2], gone)) as f:
        async with generate(
            f.plane, text_request(8), Call(account=ANONYMOUS, request_id="r", instance=InstanceId(3))
        ) as generation:
            with pytest.raises(InstanceGone):
                await read_all(generation)
        assert f.client.sent_to == [3]


async def test_an_engine_failure_in_the_middle_is_final() -> None:
    async with front(TokenEngine([2], lambda id_: EngineError("out of memory"))) as f:
        async with generate(f.plane, text_request(8), CALL) as generation:
            with pytest.raises(EngineError, match="out of memory"):
                await read_all(generation)
        assert len(f.client.streams) == 1


@in_virtual_time
async def test_a_stream_cut_by_our_own_connection_goes_on_even_at_the_only_instance() -> None:
    async with front(lambda stream: stream.data(delta(*continuation(PROMPT, 2))), instances=1) as f:
        async with generate(f.plane, text_request(8), CALL) as generation:
            texts = await generation.read()
            f.link.cut()
            f.client.streams[0].fail(gone(InstanceId(1)))
            f.client.respond = TokenEngine([], gone)
            asyncio.get_running_loop().call_later(2.0, f.link.restore)
            texts += await read_all(generation)
        assert tokens_of(texts) == continuation(PROMPT, 8)
        assert f.client.sent_to == [1, 1]


# What can go wrong otherwise


@pytest.mark.parametrize(
    ("response", "trailer"),
    [
        (b"\xc1", b""),
        (delta(1, index=5), b""),
        (delta(1, index=-1), b""),
        (delta(1), summary_encoder.encode(Summary())),
        (delta(1, finish=FinishReason.STOP), b"\xc1"),
    ],
    ids=["no delta", "unknown choice", "negative choice", "unfinished", "no summary"],
)
async def test_nonsense_from_an_engine_is_an_engine_error(response: bytes, trailer: bytes) -> None:
    def respond(stream: FakeStream) -> None:
        stream.data(response)
        stream.end(trailer)

    async with front(respond) as f:
        async with generate(f.plane, text_request(), CALL) as generation:
            with pytest.raises(EngineError):
                await read_all(generation)
        assert not f.router.open
        assert f.count("inflight_requests") == 0


async def test_a_tensor_model_does_not_generate() -> None:
    async with front(card=tensor_card("talker")) as f:
        with pytest.raises(InvalidRequest, match="takes tensors"):
            generate(f.plane, text_request(), CALL)


@in_virtual_time
async def test_a_generation_waits_for_the_tokenizer_no_longer_than_its_deadline() -> None:
    async def never(card: ModelCard) -> TextModel:
        await asyncio.Event().wait()
        raise AssertionError

    async with front(load=never) as f:
        with pytest.raises(DeadlineExceeded):
            async with generate(f.plane, text_request(), Call(account=ANONYMOUS, request_id="r", deadline=2.0)):
                pass
        assert asyncio.get_running_loop().time() == 2.0
        assert f.count("inflight_requests") == 0


async def test_a_model_without_a_readable_tokenizer_is_unavailable_with_the_reason() -> None:
    async def broken(card: ModelCard) -> TextModel:
        raise Unavailable("the object store does not answer")

    async with front(load=broken) as f:
        with pytest.raises(Unavailable, match="the tokenizer of model 'talker' is not available: the object store"):
            async with generate(f.plane, text_request(), CALL):
                pass


def text_card(context_length: int) -> ModelCard:
    return ModelCard(name="talker", kind=ModelKind.LLM, llm=LlmInfo(context_length=context_length, tokenizer=TAKES_TEXT))


@pytest.mark.parametrize("context_length", [0, 1_000_000])
async def test_a_prompt_counts_as_no_more_tokens_than_it_has_bytes_and_a_server_may_add(context_length: int) -> None:
    def respond(stream: FakeStream) -> None:
        stream.data(delta_encoder.encode(Delta(text="word", finish_reason=FinishReason.STOP)))
        stream.end(summary_encoder.encode(Summary(prompt_tokens=10**15, output_tokens=1, cached_tokens=10**15)))

    async with front(respond, card=text_card(context_length)) as f:
        async with generate(f.plane, text_request(), CALL) as generation:
            await read_all(generation)
        [stream] = f.client.streams
        most = len(request_decoder.decode(stream.body).prompt) + 4096
        assert generation.summary is not None
        assert (generation.summary.prompt_tokens, generation.summary.cached_tokens) == (most, most)


async def test_a_long_text_comes_in_pieces_that_parsers_read_in_turns_and_counts_as_one() -> None:
    long = "".join(map(str, range(10_000)))

    def respond(stream: FakeStream) -> None:
        stream.data(delta_encoder.encode(Delta(text=long)))
        stream.data(delta_encoder.encode(Delta(text=long, finish_reason=FinishReason.STOP)))
        stream.end(summary_encoder.encode(Summary()))

    async def load(card: ModelCard) -> TextModel:
        return PlainTextModel(card, TextLimits(), Offload())

    card, request = text_card(context_length=4000), text_request(prompt="talk")
    async with front(respond, card=card, load=load) as f, generate(f.plane, request, CALL) as generation:
        deltas = await read_all(generation)
    assert "".join(delta.text for delta in deltas) == 2 * long
    assert max(len(delta.text) for delta in deltas) <= 8192
    assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + [FinishReason.STOP]
    assert generation.summary is not None and generation.summary.output_tokens == 2


@pytest.mark.parametrize(
    ("reported", "counted"),
    [
        ((700, 1000), (700, 1000)),
        ((2, 1), (2, 1)),
        ((700, 10**9), (700, 1200)),
        ((10**15, 1), (4000, 1)),
        ((0, 0), (5, 2)),
    ],
)
async def test_what_an_engine_that_takes_text_reports_is_charged_recorded_and_measured(
    reported: tuple[int, int], counted: tuple[int, int]
) -> None:
    def respond(stream: FakeStream) -> None:
        stream.data(delta_encoder.encode(Delta(text="word " * 500)))
        stream.data(delta_encoder.encode(Delta(text="word " * 500, finish_reason=FinishReason.STOP)))
        stream.end(summary_encoder.encode(Summary(prompt_tokens=reported[0], output_tokens=reported[1])))

    ledger = Ledger()
    account = KeyAccount(
        ApiKey(name="team", salt=b"", digest=b"", limits=Limits(tokens_per_minute=10_000)), lambda: 0.0, ledger=ledger
    )
    card = text_card(context_length=4000)
    async with front(respond, card=card) as f:
        async with generate(f.plane, text_request(1200), msgspec.structs.replace(CALL, account=account)) as generation:
            await read_all(generation)
        assert generation.summary is not None
        assert (generation.summary.prompt_tokens, generation.summary.output_tokens) == counted
        assert f.count("output_tokens_total") == counted[1]
        assert f.count("input_sequence_tokens_sum") == counted[0]
    [row] = ledger.rows(ledger.today())
    assert (row.prompt_tokens, row.completion_tokens) == counted
    assert [limit.remaining for limit in account.rate_limits()] == [10_000 - sum(counted)]


def salted_card(name: str = "talker", *, takes_cache_salt: bool = True) -> ModelCard:
    return ModelCard(
        name=name, kind=ModelKind.LLM, llm=LlmInfo(context_length=4096, tokenizer="t", takes_cache_salt=takes_cache_salt)
    )


@pytest.mark.parametrize("takes_cache_salt", [True, False])
async def test_the_router_and_the_engine_get_the_salt_of_the_key_where_the_engine_has_salts(takes_cache_salt: bool) -> None:
    accounts = [KeyAccount(ApiKey(name=name, salt=b"", digest=b"")) for name in ("a", "b")]
    async with front(TokenEngine([], gone), card=salted_card(takes_cache_salt=takes_cache_salt)) as f:
        for account in (ANONYMOUS, *accounts):
            for salt in ("", "s"):
                call = msgspec.structs.replace(CALL, account=account)
                async with generate(f.plane, text_request(3, cache_salt=salt), call) as generation:
                    await read_all(generation)
        of_engine = [request_decoder.decode(stream.body).cache_salt for stream in f.client.streams]
        assert [request.cache_salt for request in f.router.requests] == of_engine
    assert of_engine[:2] == ["", "s"]
    if takes_cache_salt:
        assert len(set(of_engine)) == 6
    else:
        assert of_engine == ["", "s"] * 3


async def test_copies_for_shadows_keep_the_prompts_of_keys_apart_too() -> None:
    account = KeyAccount(ApiKey(name="a", salt=b"", digest=b""))
    call = msgspec.structs.replace(CALL, account=account, shadows=("talker",))
    async with front(TokenEngine([], gone), card=salted_card()) as f:
        async with generate(f.plane, text_request(3), call) as generation:
            await read_all(generation)
        await until(lambda: f.count("shadow_requests_total", outcome="success") == 1)
        salts = [request_decoder.decode(stream.body).cache_salt for stream in f.client.streams]
    assert salts == [account.isolate("")] * 2
