"""An engine server that runs elsewhere: what requests become, what happens when it refuses, is lost, or comes back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from dynamo.common.config import ConfigError, load
from dynamo.common.errors import (
    DynamoError,
    EngineError,
    InvalidRequest,
    NotFound,
    Overloaded,
    PayloadTooLarge,
    Unavailable,
    Unsupported,
)
from dynamo.common.generation import (
    Delta,
    FinishReason,
    GenerateRequest,
    Sampling,
    Stop,
    Summary,
    TextPrompt,
    image_part,
    pack_text,
    pack_tokens,
)
from dynamo.common.http.client import HttpClient
from dynamo.common.model_card import AdapterReport, LlmInfo
from dynamo.worker.config import WorkerConfig
from dynamo.worker.engine.base import Context
from dynamo.worker.engine.remote.completions import StreamReader, TensorRtDialect, VllmDialect
from dynamo.worker.engine.remote.dialect import Dialect
from dynamo.worker.engine.remote.engine import RemoteEngine
from dynamo.worker.engine.remote.errors import NotServed, read_failure
from dynamo.worker.engine.remote.options import RemoteOptions
from dynamo.worker.engine.remote.sglang import SglangDialect, SglangReader
from dynamo.worker.engine.sim.engine import SimEngine
from dynamo.worker.process.engine_factory import make_remote, sim_config
from dynamo.worker.tokenizers.folder import read_folder
from tests.support.engine_server import serving
from tests.support.sglang_server import SglangServer
from tests.support.vllm_server import SeeingServer, VllmServer, serve_vllm
from tests.support.waiting import WAIT_S, until


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[VllmServer]:
    async with serve_vllm(SimEngine(sim_config("speedup=0", "sim", 8, 512)), tmp_path) as started:
        yield started


@pytest.fixture
async def engine(server: VllmServer) -> RemoteEngine:
    engine = RemoteEngine(HttpClient(server.url, key="secret", timeout_s=WAIT_S))
    await engine.start()
    return engine


def make_request(tokens: list[int] | None = None, max_tokens: int | None = 4, **fields: Any) -> GenerateRequest:
    stop = Stop(max_tokens=max_tokens, ignore_eos=True)
    return GenerateRequest(model="m", prompt=pack_tokens(tokens or [104, 105]), **{"stop": stop, **fields})


async def generate(engine: RemoteEngine, request: GenerateRequest | None = None) -> list[Delta | Summary]:
    async with asyncio.timeout(120):
        return [item async for item in engine.generate(request or make_request(), Context("r1"))]


async def test_a_request_has_token_ids_the_key_and_its_id(server: VllmServer, engine: RemoteEngine) -> None:
    context = Context("r1", headers={"traceparent": "00-1-2-01", "other": "x"})
    async for _ in engine.generate(make_request(sampling=Sampling(temperature=0.5)), context):
        pass
    body, head = server.requests[-1], server.headers[-1].lower()
    assert (body["model"], body["prompt"], body["temperature"]) == ("served", [104, 105], 0.5)
    assert (body["return_token_ids"], body["max_tokens"]) == (True, 4)
    assert b"authorization: bearer secret\r\n" in head
    assert b"x-request-id: r1\r\n" in head and b"traceparent: 00-1-2-01\r\n" in head and b"other" not in head


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (400, InvalidRequest),
        (404, NotServed),
        (413, PayloadTooLarge),
        (422, InvalidRequest),
        (429, Overloaded),
        (500, EngineError),
        (501, Unsupported),
        (502, Unavailable),
        (503, Overloaded),
    ],
)
async def test_a_refusal_is_the_error_of_its_status(
    server: VllmServer, engine: RemoteEngine, status: int, error: type[DynamoError]
) -> None:
    server.refusals.append((status, "because"))
    with pytest.raises(error, match="because") as raised:
        await generate(engine)
    assert type(raised.value) is error
    assert len(await generate(engine)) == 5


def test_a_refusal_that_is_no_json_names_its_status() -> None:
    assert str(read_failure(503, b"<html>")) == "the server responded with status 503"
    refused = b'{"error": {"message": "Incorrect API key provided: sk-123"}}'
    assert [str(read_failure(status, refused)) for status in (401, 403)] == ["the server refuses the key of its worker"] * 2
    overloaded = read_failure(429, b"", "7")
    assert isinstance(overloaded, Overloaded) and overloaded.retry_after_s == 7


async def test_closing_a_generation_aborts_it_on_the_server(server: VllmServer, engine: RemoteEngine) -> None:
    async with aclosing(engine.generate(make_request(max_tokens=400), Context("r1"))) as items:  # type: ignore[type-var]
        await anext(items)
        assert engine.load().running == 1
    assert engine.load().running == 0
    await until(lambda: server.engine.load().running == 0)


async def test_a_server_that_dies_fails_its_requests_as_a_lost_instance_and_serves_again_when_it_is_back(
    server: VllmServer, engine: RemoteEngine
) -> None:
    server.lost_after = 2
    with pytest.raises(Unavailable, match=r"closed the connection|cannot be reached") as lost:
        await generate(engine, make_request(max_tokens=400))
    assert lost.value.retryable
    assert engine.load().running == 0
    server.lost_after = None
    assert isinstance((await generate(engine))[-1], Summary)


async def test_a_server_that_is_gone_is_unavailable_until_it_is_back(server: VllmServer) -> None:
    restarted = VllmServer(server.engine, server.folder)
    async with restarted.serving():
        engine = RemoteEngine(HttpClient(restarted.url, timeout_s=WAIT_S))
        await engine.start()
    with pytest.raises(Unavailable, match="cannot be reached"):
        await generate(engine)
    async with restarted.serving():
        assert isinstance((await generate(engine))[-1], Summary)


async def test_a_server_whose_engine_has_died_is_unavailable(server: VllmServer, engine: RemoteEngine) -> None:
    server.is_dead = True
    with pytest.raises(Unavailable, match="is unhealthy: EngineCore"):
        await generate(engine)


async def test_a_worker_waits_for_its_server(server: VllmServer, caplog: pytest.LogCaptureFixture) -> None:
    server.is_ready = False
    engine = RemoteEngine(HttpClient(server.url, timeout_s=WAIT_S))
    starting = asyncio.create_task(engine.start())
    await until(lambda: "waiting for the engine server" in caplog.text)
    server.is_ready = True
    async with asyncio.timeout(120):
        assert (await starting).name == "served"


async def test_the_card_is_what_the_server_and_its_folder_say(server: VllmServer) -> None:
    options = RemoteOptions(urls=(server.url + "/v1/",))
    card = await make_remote(options.urls[0], options, name="other", context_length=100).start()
    assert (card.name, card.backend) == ("other", "vllm")
    assert card.llm is not None and card.llm.context_length == 100


async def test_a_server_on_another_machine_needs_a_tokenizer(server: VllmServer, tmp_path: Path) -> None:
    server.folder = Path("org/model")
    with pytest.raises(InvalidRequest, match="--tokenizer"):
        await RemoteEngine(HttpClient(server.url, timeout_s=WAIT_S)).start()
    named = make_remote(server.url, RemoteOptions(tokenizer=tmp_path / "tokenizer.json"))
    await named.start()
    assert len(named.files()) == 1


async def test_a_server_that_refuses_tokens_is_refused_at_the_start(server: VllmServer) -> None:
    server.refusals.append((400, "prompt must be text"))
    with pytest.raises(InvalidRequest, match="cannot be used with token ids: prompt must be text"):
        await RemoteEngine(HttpClient(server.url, timeout_s=WAIT_S)).start()


async def test_a_server_of_another_kind_gets_text_if_its_tokenizer_is_not_at_hand(server: VllmServer) -> None:
    server.owner, server.folder = "library", Path("llama3")
    engine = RemoteEngine(HttpClient(server.url, timeout_s=WAIT_S))
    with pytest.raises(InvalidRequest, match="cannot be used with text"):  # this one has no chat completions
        await engine.start()


@pytest.mark.parametrize("is_incremental", [False, True])
async def test_sglang_may_repeat_all_tokens_or_send_the_new_ones(tmp_path: Path, is_incremental: bool) -> None:
    async with serving(SglangServer, SimEngine(sim_config("speedup=0", "sim", 8, 512)), tmp_path) as server:
        server.is_incremental = is_incremental
        engine = make_remote(server.url, RemoteOptions())
        assert (await engine.start()).backend == "sglang"
        request = make_request(logprobs=2, n=2, sampling=Sampling(temperature=1.0, seed=5))
        items = await generate(engine, request)
        expected = [item async for item in server.engine.generate(request, Context("r1"))]
        assert tokens_of(items) == tokens_of(expected)
        assert [len(position) for item in items if isinstance(item, Delta) for position in item.logprobs or ()] == [3] * 8


@asynccontextmanager
async def beside_sglang(folder: Path, *, sees: bool = False) -> AsyncIterator[tuple[SglangServer, RemoteEngine, LlmInfo]]:
    async with serving(SglangServer, SimEngine(sim_config("speedup=0", "sim", 8, 512)), folder) as server:
        server.sees = sees
        engine = make_remote(server.url, RemoteOptions())
        card = await engine.start()
        assert card.llm is not None
        yield server, engine, card.llm


async def test_sglang_gets_images_beside_the_tokens_and_says_how_many_they_take(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"image_token_id": 104}')
    async with beside_sglang(tmp_path, sees=True) as (server, engine, llm):
        assert (llm.modalities, llm.image_token) == (("image",), 104)
        items = await generate(engine, make_request(media=(image_part(b"\x89PNG"),)))
        assert server.requests[-1]["image_data"] == ["data:image/*;base64,iVBORw=="]
        assert isinstance(items[-1], Summary) and items[-1].prompt_tokens == 101
        await generate(engine, make_request(stop=Stop(), media=(image_part(b"\x89PNG"),)))
        assert server.requests[-1]["sampling_params"]["max_new_tokens"] is None, "as many as fit"


async def test_vllm_gets_images_in_conversations_and_sends_tokens_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"image_token_id": 104}')
    async with serving(SeeingServer, SimEngine(sim_config("speedup=0", "sim", 8, 512)), tmp_path) as server:
        engine = make_remote(server.url, RemoteOptions())
        card = await engine.start()
        assert card.llm is not None and (card.llm.modalities, card.llm.renders_media) == (("image",), True)
        parts = [{"type": "media", "index": 0}, {"type": "text", "text": "what is it?"}]
        tools = [{"type": "function", "function": {"name": "look"}}]
        asked = pack_text(TextPrompt(messages=[{"role": "user", "content": parts}], tools=tools))
        request = make_request(media=(image_part(b"\x89PNG"),), conversation=asked, logprobs=2)
        *deltas, summary = await generate(engine, request)
        sent = server.requests[-1]
        [image, _] = sent["messages"][0]["content"]
        assert image == {"type": "image_url", "image_url": {"url": "data:image/*;base64,iVBORw=="}}
        assert "prompt" not in sent and (sent["tool_choice"], sent["max_tokens"], sent["top_logprobs"]) == ("none", 4, 3)
        positions = [step for delta in deltas if isinstance(delta, Delta) for step in delta.logprobs or ()]
        assert [step[0][0] for step in positions] == tokens_of(deltas)[0] and [len(step) for step in positions] == [3] * 4
        assert isinstance(summary, Summary) and summary.prompt_tokens == 100
        as_many_as_fit = make_request(max_tokens=None, media=request.media, conversation=asked, stop=Stop())
        await generate(engine, as_many_as_fit)
        assert "max_tokens" not in server.requests[-1]
        with pytest.raises(InvalidRequest, match="in conversations only"):
            await generate(engine, make_request(media=request.media))


async def test_a_model_of_sglang_that_takes_text_alone_declares_no_images(tmp_path: Path) -> None:
    async with beside_sglang(tmp_path) as (_, _, llm):
        assert (llm.modalities, llm.image_token) == ((), None)


async def test_adapters_are_loaded_and_unloaded_at_sglang(tmp_path: Path) -> None:
    async with beside_sglang(tmp_path) as (server, engine, _):
        engine.check_adapters()
        await engine.load_adapter("sql", "/adapters/sql")
        await generate(engine, make_request(adapter="sql"))
        assert server.requests[-1]["lora_path"] == "sql"
        await engine.load_adapter("sql", "/adapters/other")
        assert server.adapters == {"sql": "/adapters/other"}
        with pytest.raises(InvalidRequest, match=r"no adapter_config\.json"):
            await engine.load_adapter("sql", "/adapters/missing")
        assert server.adapters == {"sql": "/adapters/other"}, "which it has again"
        server.adapters.clear()  # as by a restart
        with pytest.raises(NotServed):  # the request continues elsewhere
            await generate(engine, make_request(adapter="sql"))
        await generate(engine, make_request(adapter="sql"))
        await engine.unload_adapter("sql")
        assert server.adapters == {}
        await engine.unload_adapter("sql")  # another client may have done it
        with pytest.raises(InvalidRequest, match="not loaded"):
            await generate(engine, make_request(adapter="sql"))


def tokens_of(items: list[Delta | Summary]) -> dict[int, list[int]]:
    tokens: dict[int, list[int]] = {}
    for item in items:
        if isinstance(item, Delta):
            tokens.setdefault(item.index, []).extend(item.tokens)
    return tokens


def sglang_event(**info: Any) -> bytes:
    return json.dumps({"output_ids": [5, 9], "meta_info": {"completion_tokens": 2, **info}}).encode()


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (sglang_event(finish_reason={"type": "abort", "status_code": 400, "message": "no"}), InvalidRequest),
        (sglang_event(finish_reason={"type": "abort", "status_code": 503, "message": "no"}), Unavailable),
        (sglang_event(finish_reason={"type": "abort"}), Unavailable),
        (sglang_event(output_token_logprobs=[[-1.0, 5, None]]), EngineError),
        (b'{"text": "a"}', EngineError),
        (b'{"error": {"message": "no", "code": 400}}', InvalidRequest),
    ],
)
def test_an_event_of_sglang_that_cannot_be_used_ends_the_request(data: bytes, error: type[DynamoError]) -> None:
    with pytest.raises(error):
        SglangReader(make_request(logprobs=1), frozenset()).read(data)


def test_a_stop_token_that_sglang_matched_is_not_part_of_a_choice() -> None:
    reader = SglangReader(make_request(), frozenset())
    [delta] = reader.read(sglang_event(finish_reason={"type": "stop", "matched": 9}))
    assert (delta.tokens, delta.stop_token, delta.finish_reason) == ((5,), 9, FinishReason.STOP)


@pytest.mark.parametrize(
    ("guided", "ours", "theirs"),
    [
        (
            {"json_schema": {"type": "object"}},
            {"json_schema": '{"type":"object"}'},
            {"type": "json", "schema": {"type": "object"}},
        ),
        ({"json_object": True}, {"json_schema": '{"type": "object"}'}, {"type": "json_object"}),
        ({"regex": "a+"}, {"regex": "a+"}, {"type": "regex", "regex": "a+"}),
        ({"choice": ["a.", "b"]}, {"regex": r"(a\.|b)"}, {"type": "regex", "regex": r"(a\.|b)"}),
        ({"grammar": "root ::= 'a'"}, {"ebnf": "root ::= 'a'"}, {"type": "ebnf", "ebnf": "root ::= 'a'"}),
    ],
)
def test_structured_output_has_the_servers_names(guided: Any, ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    request = make_request(sampling=Sampling(guided=guided))
    path, body = SglangDialect(64, frozenset()).call(request)
    assert path == "/generate"
    assert json.loads(body)["sampling_params"].items() >= ours.items()
    _, body = TensorRtDialect("m", 64, frozenset()).call(request)
    assert json.loads(body)["response_format"] == theirs


@pytest.mark.parametrize("response", [b"nonsense\r\n\r\n", b"HTTP/1.1 200 OK\r\nx: " + b"y" * 70_000])
async def test_a_server_that_does_not_speak_http_is_an_engine_error(response: bytes) -> None:
    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(response)
        await reader.read()
        writer.close()

    async with await asyncio.start_server(connected, "127.0.0.1", 0) as listener:
        client = HttpClient(f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}", timeout_s=WAIT_S)
        with pytest.raises(EngineError):
            await client.fetch("GET", "/v1/models")


@pytest.mark.parametrize(
    "url", ["localhost:8000", "ftp://host", "http://", "http://host:99999", "http://user@host", "http://h?x=1"]
)
def test_a_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(InvalidRequest, match="--url must be"):
        HttpClient(url, timeout_s=WAIT_S)


def event(**choice: Any) -> bytes:
    return json.dumps({"choices": [{"index": 0, "text": "", **choice}]}).encode()


def test_an_end_of_text_token_ends_a_choice_and_is_not_part_of_it() -> None:
    reader = StreamReader(make_request(stop=Stop(max_tokens=9)), frozenset({2}))
    assert reader.read(event(token_ids=[5, 2], finish_reason="stop")) == [Delta((5,), 0, FinishReason.STOP, None, 2)]
    assert reader.summary().output_tokens == 1 and reader.has_finished


def test_a_stop_token_that_only_the_server_knows_is_not_part_of_a_choice() -> None:
    reader = StreamReader(make_request(), frozenset())
    [delta] = reader.read(event(token_ids=[5, 9], finish_reason="stop", stop_reason=9))
    assert (delta.tokens, delta.stop_token) == ((5,), 9)


@pytest.mark.parametrize(
    "dialect", [VllmDialect("m", 4, frozenset()), TensorRtDialect("m", 4, frozenset()), SglangDialect(4, frozenset())]
)
def test_a_server_sends_no_more_tokens_than_the_contexts_of_all_choices_have(dialect: Dialect) -> None:
    reader = dialect.reader(make_request(n=2))

    def sent(index: int, tokens: list[int]) -> bytes:
        if not isinstance(dialect, SglangDialect):
            return event(index=index, token_ids=tokens)
        meta = {"completion_tokens": len(tokens)}
        return json.dumps({"index": index, "output_ids": tokens, "meta_info": meta}).encode()

    [delta] = reader.read(sent(0, [5] * 4))
    assert len(delta.tokens) == 4
    with pytest.raises(EngineError, match="sent 9 tokens; the model's context has room for 8"):
        reader.read(sent(1, [5] * 5))


def test_the_chosen_token_comes_first_and_then_the_likeliest_others() -> None:
    logprobs = {
        "tokens": ["token_id:5"],
        "token_logprobs": [-3.0],
        "top_logprobs": [{"token_id:5": -3.0, "token_id:8": -1.0, "token_id:7": -0.5}],
    }
    [delta] = StreamReader(make_request(logprobs=1), frozenset()).read(event(token_ids=[5], logprobs=logprobs))
    assert delta.logprobs == [[(5, -3.0), (7, -0.5)]]


def unusable_events() -> Iterator[tuple[bytes, type[DynamoError]]]:
    yield b"{", EngineError
    yield event(text="a"), EngineError  # without token ids
    yield event(token_ids=[5], index=3), EngineError
    yield event(token_ids=[5]), EngineError  # without log probabilities
    yield event(token_ids=[5], logprobs={"tokens": ["a"], "token_logprobs": [0], "top_logprobs": [{"a": 0}]}), EngineError
    yield event(token_ids=[], finish_reason="abort"), Unavailable
    yield b'{"error": {"message": "no", "code": 400}}', InvalidRequest
    yield b'{"error": {"message": "no", "code": 500}}', EngineError
    yield b'{"error": {"message": "no", "code": null, "type": "invalid_request_error"}}', InvalidRequest
    yield b'{"error": {"message": "no", "code": "unavailable", "type": "service_unavailable"}}', Unavailable


@pytest.mark.parametrize(("data", "error"), [*unusable_events()])
def test_an_event_that_cannot_be_used_ends_the_request(data: bytes, error: type[DynamoError]) -> None:
    with pytest.raises(error):
        StreamReader(make_request(logprobs=1), frozenset()).read(data)


def vllm_body(request: GenerateRequest) -> Any:
    path, body = VllmDialect("m", 64, frozenset()).call(request)
    assert path == "/v1/completions"
    return json.loads(body)


def test_settings_have_the_servers_names() -> None:
    sampling = Sampling(logit_bias={7: 1.0}, seed=3, guided={"regex": "a+"})
    body = vllm_body(make_request(sampling=sampling, first_choice=2, logprobs=20))
    assert (body["logit_bias"], body["seed"], body["structured_outputs"]) == ({"7": 1.0}, 5, {"regex": "a+"})
    assert body["logprobs"] == 20, "which servers allow"
    assert "temperature" not in body, "the server's own default"


def test_a_limit_beyond_the_context_is_the_room_that_is_left() -> None:
    body = vllm_body(make_request([1] * 10, 1000))
    assert body["max_tokens"] == 54
    assert vllm_body(make_request([1] * 10, None))["max_tokens"] == 54


def test_a_folder_says_template_and_tokens(server: VllmServer) -> None:
    folder = server.folder
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    token = next(iter(tokenizer["model"]["vocab"]))
    config = {"eos_token": {"content": token}, "bos_token": "<s>", "chat_template": [{"name": "default", "template": "old"}]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text('{"eos_token_id": [3, 0]}')
    text = read_folder(folder)
    first = tokenizer["model"]["vocab"][token]
    assert (text.bos_token, text.eos_token, text.chat_template) == ("<s>", token, b"old")
    assert text.eos_token_ids == tuple(dict.fromkeys((first, 3, 0)))
    (folder / "chat_template.jinja").write_text("new")
    assert read_folder(folder).chat_template == b"new"
    (folder / "tokenizer.json").unlink()
    with pytest.raises(InvalidRequest, match="cannot be read"):
        read_folder(folder)


@pytest.mark.parametrize(
    "flags",
    [
        ["--engine", "remote"],
        ["--url", "http://a", "--model", "sim"],
        ["--url", "http://a", "--engine", "sim"],
        ["--url", "http://a", "--num-workers", "2"],
    ],
)
def test_a_url_takes_the_place_of_a_model(flags: list[str]) -> None:
    with pytest.raises(ConfigError, match="--url"):
        load(WorkerConfig, flags, {}, program="worker")


def test_several_names_with_a_url_are_aliases() -> None:
    flags = ["--url", "http://a", "--url", "http://b", "--model-name", "x", "y"]
    config = load(WorkerConfig, flags, {}, program="worker")
    assert (config.remote.urls, config.aliases) == (("http://a", "http://b"), ("y",))


async def test_adapters_are_loaded_and_unloaded_at_the_server(server: VllmServer, engine: RemoteEngine) -> None:
    engine.check_adapters()
    with pytest.raises(Unsupported, match="VLLM_ALLOW_RUNTIME_LORA_UPDATING"):
        await engine.load_adapter("sql", "/adapters/sql")
    server.changes_adapters = True
    await engine.load_adapter("sql", "/adapters/sql")
    await generate(engine, make_request(adapter="sql"))
    assert server.requests[-1]["model"] == "sql"
    await engine.load_adapter("sql", "/adapters/other")
    assert server.adapters == {"sql": "/adapters/other"}
    with pytest.raises(NotFound, match="No adapter found for /adapters/missing"):
        await engine.load_adapter("new", "/adapters/missing")
    await engine.unload_adapter("sql")
    assert server.adapters == {}
    await engine.unload_adapter("sql")  # another client may have done it


async def test_an_adapter_that_the_server_has_lost_is_loaded_again(server: VllmServer, engine: RemoteEngine) -> None:
    server.changes_adapters = True
    await engine.load_adapter("sql", "/adapters/sql")
    server.adapters.clear()  # as by a restart
    server.refusals = [(404, "The model `sql` does not exist.")]
    with pytest.raises(NotServed):  # the request continues elsewhere
        await generate(engine, make_request(adapter="sql"))
    assert server.adapters == {"sql": "/adapters/sql"}
    await generate(engine, make_request(adapter="sql"))
    server.refusals, server.changes_adapters = [(404, "The model `sql` does not exist.")], False
    with pytest.raises(NotServed):
        await generate(engine, make_request(adapter="sql"))


async def test_an_adapter_that_another_worker_has_loaded_at_the_server_is_taken_over(server: VllmServer) -> None:
    server.changes_adapters, server.adapters = True, {"sql": "/adapters/sql"}
    engine = RemoteEngine(HttpClient(server.url, key="secret", timeout_s=WAIT_S))
    card = await engine.start()
    assert card.llm is not None
    assert card.llm.adapters == ("sql",)
    assert card.llm.adapter_reports == (AdapterReport(name="sql", path="/adapters/sql"),)
    server.changes_adapters = False
    await engine.load_adapter("sql", "/adapters/sql")
    assert server.adapters == {"sql": "/adapters/sql"}
