"""POST /v1/completions, on a real port."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, cast

import pytest

from dynamo.common.errors import EngineError
from dynamo.common.generation import Delta, FinishReason, Summary, delta_encoder, request_decoder, summary_encoder
from dynamo.frontend.api.http.json_pieces import Spliced
from dynamo.frontend.api.openai.chunks import CompletionChunks, Details, Head, encode
from dynamo.frontend.api.openai.logprobs import CompletionLogprobWriter, EncodedLogprobs, PackedLogprobs
from dynamo.frontend.api.text.token_texts import TokenTexts
from dynamo.frontend.config import CapacityOptions, HttpOptions
from dynamo.frontend.preprocess.text import TextDelta
from tests.support.fakes import FakeStream
from tests.support.http_edge import Speaker, chat_card, end, events_of, open_http_edge, send_delta, text_of, tokens_of
from tests.support.waiting import until_free

PATH = "/v1/completions"
ONCE: dict[str, Any] = {"model": "talker", "prompt": "Once"}


async def test_a_response_has_the_shape_that_openai_clients_read() -> None:
    async with open_http_edge(respond=Speaker(reason=FinishReason.LENGTH)) as edge:
        body = (await edge.post(PATH, ONCE)).json()
    assert body.pop("id").startswith("cmpl-")
    assert body.pop("created") > 0
    assert body == {
        "object": "text_completion",
        "model": "talker",
        "choices": [
            {
                "index": 0,
                "text": "Hello you",
                "logprobs": None,
                "finish_reason": "length",
                "stop_reason": None,
                "prompt_logprobs": None,
                "prompt_token_ids": None,
                "token_ids": None,
            }
        ],
        "usage": {
            "prompt_tokens": 4,
            "completion_tokens": 9,
            "total_tokens": 13,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
        "system_fingerprint": None,
    }


async def test_a_stream_is_one_event_per_delta() -> None:
    async with open_http_edge(respond=Speaker()) as edge:
        response = await edge.post(PATH, ONCE | {"stream": True, "stream_options": {"include_usage": True}})
    chunks = [json.loads(data) for _, data in events_of(response.text)[:-1]]
    choices = [chunk["choices"][0] for chunk in chunks[:-1]]
    assert [(choice["text"], choice["finish_reason"]) for choice in choices] == [("Hel", None), ("lo", None), (" you", "stop")]
    assert chunks[-1]["usage"]["total_tokens"] == 13
    assert response.text.endswith("\n\ndata: [DONE]\n\n")


@pytest.mark.parametrize(
    ("prompt", "seen"),
    [
        ("Once", ["Once"]),
        (["Once", "upon"], ["Once", "upon"]),
        (list(tokens_of("Once")), ["Once"]),
        ([list(tokens_of("Once")), list(tokens_of("upon"))], ["Once", "upon"]),
    ],
)
async def test_prompts_come_in_four_forms(prompt: object, seen: list[str]) -> None:
    speaker = Speaker()
    async with open_http_edge(respond=speaker) as edge:
        response = await edge.post(PATH, ONCE | {"prompt": prompt})
    assert sorted(text_of(request.tokens) for request in speaker.requests) == sorted(seen)
    assert [choice["index"] for choice in response.json()["choices"]] == list(range(len(seen)))


def say_the_prompt(stream: FakeStream) -> None:
    request = request_decoder.decode(stream.body)
    for index in range(request.n):
        send_delta(stream, f"{text_of(request.tokens)}{index}", index=index, reason=FinishReason.STOP)
    end(stream, request.n * 5)


async def test_choices_of_a_batch_are_numbered_by_prompt_and_choice() -> None:
    async with open_http_edge(respond=say_the_prompt) as edge:
        response = await edge.post(PATH, ONCE | {"prompt": ["a", "b"], "n": 2, "temperature": 1})
        streamed = await edge.post(PATH, ONCE | {"prompt": ["a", "b"], "n": 2, "temperature": 1, "stream": True})
    expected = {0: "a0", 1: "a1", 2: "b0", 3: "b1"}
    assert {choice["index"]: choice["text"] for choice in response.json()["choices"]} == expected
    assert response.json()["usage"]["prompt_tokens"] == 2
    assert response.json()["usage"]["completion_tokens"] == 20
    choices = [json.loads(data)["choices"][0] for _, data in events_of(streamed.text)[:-1]]
    assert {choice["index"]: choice["text"] for choice in choices} == expected


async def test_one_invalid_prompt_fails_the_whole_batch_and_leaves_nothing_running() -> None:
    def half(stream: FakeStream) -> None:
        if text_of(request_decoder.decode(stream.body).tokens) == "bad":
            stream.fail(EngineError("no"))

    async with open_http_edge(respond=half) as edge:
        error = await edge.error(PATH, ONCE | {"prompt": ["good", "bad"]}, 500)
        assert all(stream.is_over for stream in edge.client.streams)
    assert error["message"] == "no"


async def test_echo_prepends_the_prompt() -> None:
    async with open_http_edge(respond=Speaker()) as edge:
        response = await edge.post(PATH, ONCE | {"echo": True})
        tokens = await edge.post(PATH, ONCE | {"echo": True, "prompt": list(tokens_of("Once"))})
        streamed = await edge.post(PATH, ONCE | {"echo": True, "stream": True})
    assert response.json()["choices"][0]["text"] == tokens.json()["choices"][0]["text"] == "OnceHello you"
    texts = [json.loads(data)["choices"][0]["text"] for _, data in events_of(streamed.text)[:-1]]
    assert "".join(texts) == "OnceHello you"


LONG = "a" * 100_000
EIGHT: dict[str, Any] = {"n": 8, "temperature": 1, "max_tokens": 3, "echo": True}
CHAT = "/v1/chat/completions"
LAST: dict[str, Any] = {
    "model": "talker",
    "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": LONG}],
    "continue_final_message": True,
}


@pytest.mark.parametrize(("path", "body"), [(PATH, ONCE | EIGHT | {"prompt": LONG}), (CHAT, LAST | EIGHT)])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_long_echo_is_held_for_all_choices_before_they_are_made(path: str, body: dict[str, Any], stream: bool) -> None:
    card = chat_card(context_length=200_000)
    async with open_http_edge(card, respond=Speaker()) as edge:
        response = await edge.post(path, body | {"stream": stream})
        assert response.status_code == 200
        assert response.text.count(LONG) == 8
        if not stream:
            choices = response.json()["choices"]
            assert [choice["index"] for choice in choices] == list(range(8))
        await until_free(edge.capacity)
    for http, capacity, status, words in (
        (HttpOptions(max_body_bytes=700_000), CapacityOptions(), 413, "at most 700000 are allowed"),
        (HttpOptions(), CapacityOptions(max_buffered_bytes=700_000), 503, "near its limit"),
    ):
        async with open_http_edge(card, respond=lambda stream: None, http=http, capacity=capacity) as edge:
            response = await edge.post(path, body | {"stream": stream})
            assert (response.status_code, words in response.text) == (status, True), response.text
            await until_free(edge.capacity)


@pytest.mark.parametrize("name", ["token_ids", "formatted_prompt"])
async def test_an_annotation_with_a_long_prompt_is_made_once_and_held(name: str) -> None:
    card = chat_card(context_length=200_000)
    plain = {"model": "talker", "prompt": "~" * 150_000, "max_tokens": 1, "stream": True}
    annotated = plain | {"nvext": {"annotations": [name] * 16}}
    async with open_http_edge(card, respond=Speaker()) as edge:
        response = await edge.post(PATH, annotated)
        await until_free(edge.capacity)
    [event] = [event for event in response.text.split("\n\n") if event.startswith("event: ")]
    head, _, value = event.partition("\n: ")
    assert head == f"event: {name}"
    assert json.loads(value) == (list(tokens_of("~" * 150_000)) if name == "token_ids" else "~" * 150_000)
    async with open_http_edge(card, respond=Speaker(), capacity=CapacityOptions(max_buffered_bytes=1_750_000)) as edge:
        assert (await edge.post(PATH, plain)).status_code == 200
        assert (await edge.post(PATH, annotated)).status_code == 503


@pytest.mark.parametrize("details", [Details(echo=["x", "x"]), Details(prompt_ids=[[5, 6]])])
def test_choices_begin_with_their_prompts_one_by_one(details: Details) -> None:
    """All of them together may be too long for one write."""
    chunks = CompletionChunks(Head(id="i", kind="k", created=1, model="m", usage=False), 2, details)
    waits = []
    for index in range(2):
        waits.append(chunks.awaits_prompt())
        chunks.add([TextDelta(index, "a", (1,))], [])
    assert [*waits, chunks.awaits_prompt()] == [True, True, False]


def test_the_tokens_of_a_prompt_are_encoded_once_for_all_its_choices() -> None:
    class Ids(tuple[int, ...]):
        encoded = 0

        def __iter__(self) -> Iterator[int]:
            self.encoded += 1
            return super().__iter__()

    prompts = [Ids([5, 6]), Ids([7])]
    chunks = CompletionChunks(Head(id="i", kind="k", created=1, model="m", usage=False), 2 * 128, Details(prompt_ids=prompts))
    events: list[bytes] = []
    for index in range(2 * 128):
        chunks.add([TextDelta(index, "a", (1,))], events)
    text = b"".join(events)
    assert text.count(b'"prompt_token_ids":[5,6]') == text.count(b'"prompt_token_ids":[7]') == 128
    assert [ids.encoded for ids in prompts] == [1, 1]


def test_many_log_probabilities_are_encoded_some_at_a_time() -> None:
    class Texts:
        def __getitem__(self, token: int) -> str:
            return f"<{token}>"

    positions = PackedLogprobs()
    positions.add([[(token, -1.5), *((other, -2.0 - other) for other in range(20))] for token in range(100, 5100)])
    texts = cast(TokenTexts, Texts())
    columns, long = EncodedLogprobs(CompletionLogprobWriter(texts, 20)), Spliced()
    columns.add(positions)
    pieces = long.pieces(encode([columns.finish(long)]))
    assert json.loads(b"".join(pieces)) == json.loads(encode([CompletionLogprobWriter(texts, 20).add(positions)]))
    assert max(map(len, pieces)) < sum(map(len, pieces)) / 3


async def test_prompt_log_probabilities_of_many_positions_are_spliced_after_those_of_the_text() -> None:
    async with open_http_edge(respond=Speaker(("xyz" * 500,), logprobs=lambda index: -0.1)) as edge:
        fields = {"prompt": "ab" * 1000, "logprobs": 1, "prompt_logprobs": 1, "max_tokens": 1500}
        choice = (await edge.post(PATH, ONCE | fields)).json()["choices"][0]
    assert "".join(choice["logprobs"]["tokens"]) == "xyz" * 500
    assert len(choice["prompt_logprobs"]) == 2000
    assert choice["prompt_logprobs"][0] is None
    assert choice["prompt_logprobs"][1][str(tokens_of("b")[0])]["logprob"] == -0.5


async def test_echo_with_logprobs_includes_those_of_the_prompt() -> None:
    async with open_http_edge(respond=Speaker(("x",), logprobs=lambda index: -0.1)) as edge:
        response = await edge.post(PATH, ONCE | {"echo": True, "logprobs": 1, "max_tokens": 1})
    logprobs = response.json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["O", "n", "c", "e", "x"]
    assert logprobs["token_logprobs"] == [None, -0.5, -0.5, -0.5, -0.1]
    assert logprobs["text_offset"] == [0, 1, 2, 3, 4]
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["top_logprobs"][4] == {"x": -0.1}


async def test_scoring_generates_no_token() -> None:
    def score(stream: FakeStream) -> None:
        request = request_decoder.decode(stream.body)
        assert (request.stop.max_tokens, request.prompt_logprobs) == (0, 0)
        stream.data(delta_encoder.encode(Delta(finish_reason=FinishReason.LENGTH)))
        stream.end(summary_encoder.encode(Summary(prompt_tokens=4, prompt_logprobs=[None, *([[(5, -1.0)]] * 3)])))

    async with open_http_edge(respond=score) as edge:
        response = await edge.post(PATH, ONCE | {"echo": True, "logprobs": 0, "max_tokens": 0})
        error = await edge.error(PATH, ONCE | {"max_tokens": 0})
    assert response.json()["choices"][0]["text"] == "Once"
    assert response.json()["choices"][0]["logprobs"]["token_logprobs"] == [None, -1.0, -1.0, -1.0]
    assert error["param"] == "max_tokens"


async def test_prompt_logprobs_are_keyed_by_token() -> None:
    async with open_http_edge(respond=Speaker()) as edge:
        response = await edge.post(PATH, ONCE | {"prompt": "ab", "prompt_logprobs": 1})
    [nothing, second] = response.json()["choices"][0]["prompt_logprobs"]
    assert nothing is None
    assert second[str(tokens_of("b")[0])] == {"logprob": -0.5, "rank": 1, "decoded_token": "b"}


async def test_best_of_returns_the_likeliest_choices() -> None:
    def speak(stream: FakeStream) -> None:
        request = request_decoder.decode(stream.body)
        assert (request.n, request.logprobs) == (3, 0)
        for index, (text, logprob) in enumerate((("bad", -3.0), ("best", -0.1), ("good", -1.0))):
            tokens = tokens_of(text)
            logprobs = [[(token, logprob)] for token in tokens]
            stream.data(delta_encoder.encode(Delta(tokens, index, FinishReason.STOP, logprobs)))
        end(stream, 11)

    async with open_http_edge(respond=speak) as edge:
        response = await edge.post(PATH, ONCE | {"best_of": 3, "n": 2, "temperature": 1})
    choices = response.json()["choices"]
    assert [(choice["index"], choice["text"], choice["logprobs"]) for choice in choices] == [(0, "best", None), (1, "good", None)]
    assert response.json()["usage"]["completion_tokens"] == 11


@pytest.mark.parametrize(
    ("wrong", "param", "words"),
    [
        ({"suffix": "end"}, "suffix", "'suffix' is not supported"),
        ({"best_of": 2, "stream": True}, "best_of", "cannot be streamed"),
        ({"best_of": 1, "n": 2}, "best_of", "at least 'n'"),
        ({"best_of": 2, "temperature": 0}, "best_of", "temperature above 0"),
        ({"best_of": 21}, "best_of", "at most 20"),
        ({"logprobs": 21}, "logprobs", "at most 20"),
        ({"prompt": []}, "prompt", "must not be empty"),
        ({"prompt": ["a", 1]}, "prompt", "must not mix texts and token ids"),
        ({"prompt": [1, "a"]}, "prompt", "must not mix texts and token ids"),
        ({"prompt": [[1], "a"]}, "prompt", "must not mix texts and token ids"),
        ({"prompt": [100000]}, "prompt", "token id 100000"),
        ({"prompt": [-1]}, "prompt[0]", "must be at least 0"),
        ({"prompt": "a" * 5000}, "prompt", "context"),
        ({"prompt": ["a"] * 65, "n": 2}, "prompt", "more than 128"),
        ({"echo": True, "logprobs": 1, "stream": True}, "echo", "cannot be streamed"),
    ],
)
async def test_contradictory_parameters_are_rejected(wrong: dict[str, Any], param: str, words: str) -> None:
    async with open_http_edge(respond=Speaker()) as edge:
        error = await edge.error(PATH, ONCE | wrong)
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert words in error["message"]
