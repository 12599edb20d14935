"""Servers that take text: what requests become, and how their messages become text. Events are as llama.cpp's server has them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from dynamo.common.errors import EngineError, InvalidRequest, Unavailable
from dynamo.common.generation import (
    Delta,
    FinishReason,
    GenerateRequest,
    Sampling,
    Stop,
    TextPrompt,
    pack_text,
    pack_tokens,
)
from dynamo.common.model_card import TAKES_TEXT, LlmInfo
from dynamo.frontend.preprocess.parser_registry import PARSER_REGISTRY
from dynamo.frontend.preprocess.parsers import Part, Reasoning, ToolCall, make_parser
from dynamo.worker.engine.remote.errors import read_failure
from dynamo.worker.engine.remote.models import ListedModel
from dynamo.worker.engine.remote.text import REASONING_PARSER, TOOL_PARSER, TextDialect, TextReader

USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "add"}}


def make_request(prompt: TextPrompt | None = None, **fields: Any) -> GenerateRequest:
    return GenerateRequest(model="m", prompt=pack_text(prompt or TextPrompt(messages=[USER])), **fields)


def call(request: GenerateRequest) -> tuple[str, dict[str, Any]]:
    path, body = TextDialect("served").call(request)
    return path, json.loads(body)


def read(deltas: Sequence[dict[str, Any]], end: str = "stop", **fields: Any) -> list[Delta]:
    reader = TextReader(make_request(**fields))
    events = [{"index": 0, "delta": delta} for delta in deltas] + [{"index": 0, "delta": {}, "finish_reason": end}]
    read = [delta for event in events for delta in reader.read(json.dumps({"choices": [event]}).encode())]
    assert reader.has_finished
    return read


def text(deltas: Sequence[dict[str, Any]], **fields: Any) -> str:
    return "".join(delta.text for delta in read(deltas, **fields))


def test_a_conversation_is_sent_as_it_is_with_its_tools_and_media() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    places = [{"type": "text", "text": "this?"}, {"type": "media", "index": 0}]
    prompt = TextPrompt(messages=[{"role": "user", "content": places}], tools=[TOOL], template_variables={"thinking": True})
    sampling = Sampling(temperature=0.5, seed=3, guided={"json_schema": {"type": "object"}})
    path, body = call(make_request(prompt, media=(image,), sampling=sampling, stop=Stop(max_tokens=7), n=2, first_choice=1))
    assert path == "/v1/chat/completions"
    assert body["messages"] == [{"role": "user", "content": [places[0], image]}]
    assert (body["model"], body["max_tokens"], body["temperature"], body["seed"], body["n"]) == ("served", 7, 0.5, 4, 2)
    assert (body["tools"], body["chat_template_kwargs"]) == ([TOOL], {"thinking": True})
    assert body["response_format"]["json_schema"]["schema"] == {"type": "object"}
    assert "top_p" not in body, "the server's own default"


def test_a_prompt_is_a_text_completion() -> None:
    path, body = call(make_request(TextPrompt(prompt="once"), adapter="sql"))
    assert (path, body["prompt"], body["model"]) == ("/v1/completions", "once", "sql")
    assert "messages" not in body and "max_tokens" not in body


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        (make_request(stop=Stop(ignore_eos=True)), "ignore_eos"),
        (make_request(stop=Stop(max_tokens=2, min_tokens=1)), "min_tokens"),
        (make_request(stop=Stop(token_ids=(1,))), "stop_token_ids"),
        (make_request(cache_salt="tenant"), "cache_salt"),
        (make_request(sampling=Sampling(logit_bias={1: 1.0})), "logit_bias"),
        (make_request(sampling=Sampling(guided={"regex": "a"})), "regex"),
        (make_request(data_parallel_rank=1), "data_parallel_rank"),
        (GenerateRequest(model="m", prompt=pack_tokens((1,))), "prompt"),
    ],
)
def test_what_a_server_cannot_do_with_text_is_refused(request_: GenerateRequest, param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        call(request_)
    assert refused.value.param == param


def test_content_is_passed_on_and_usage_is_the_servers() -> None:
    reader = TextReader(make_request())
    assert reader.read(b'{"choices":[{"index":0,"delta":{"role":"assistant","content":null}}]}') == []
    assert reader.read(b'{"choices":[{"index":0,"delta":{"content":"Hello"},"finish_reason":null}]}') == [Delta(text="Hello")]
    assert reader.read(b'{"choices":[{"index":0,"delta":{},"finish_reason":"length"}]}') == [
        Delta(finish_reason=FinishReason.LENGTH)
    ]
    assert reader.read(b'{"choices":[{"index":0,"delta":{}}]}') == [], "some servers have an event after the last"
    usage = {"prompt_tokens": 31, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 30}}
    assert reader.read(json.dumps({"choices": [], "usage": usage}).encode()) == []
    summary = reader.summary()
    assert (summary.prompt_tokens, summary.output_tokens, summary.cached_tokens) == (31, 3, 30)


def test_text_completions_have_text() -> None:
    reader = TextReader(make_request(n=2))
    assert reader.read(b'{"choices":[{"index":1,"text":"a"}]}') == [Delta(index=1, text="a")]


def parsed(written: str) -> list[Part]:
    info = LlmInfo(context_length=0, tokenizer=TAKES_TEXT, tool_parser=TOOL_PARSER, reasoning_parser=REASONING_PARSER)
    parser = make_parser(PARSER_REGISTRY.choose(info, with_tools=True), [TOOL])
    assert parser is not None
    return [*parser.feed(written), *parser.finish()]


def test_reasoning_and_calls_that_the_server_parsed_reach_our_parsers_again() -> None:
    deltas = [
        {"reasoning_content": "I "},
        {"reasoning_content": "add."},
        {"content": "Adding."},
        {"tool_calls": [{"index": 0, "id": "1", "function": {"name": "add", "arguments": '{"a"'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": ": 1}"}}]},
        {"tool_calls": [{"index": 1, "id": "2", "function": {"name": "now"}}]},
    ]
    written = text(deltas, end="tool_calls")
    assert written == (
        "<think>I add.</think>Adding."
        '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><tool_call>{"name": "now", "arguments": {}}</tool_call>'
    )
    parts = parsed(written)
    assert "".join(part.text for part in parts if isinstance(part, Reasoning)) == "I add."
    calls = [part for part in parts if isinstance(part, ToolCall)]
    assert [part.name for part in calls if part.name] == ["add", "now"]
    assert "".join(part.arguments for part in calls if part.index == 0) == '{"a": 1}'


def test_structured_output_is_not_led_by_reasoning() -> None:
    guided = Sampling(guided={"json_object": True})
    assert text([{"reasoning": "hm"}, {"content": "{}"}], sampling=guided) == "{}"


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b'{"error": {"message": "no", "code": 400}}', InvalidRequest),
        (b'{"error": "out of memory"}', EngineError),
        (b'{"choices": [{"index": 2, "delta": {}}]}', EngineError),
        (b'{"choices": [{"index": 0, "finish_reason": "abort"}]}', Unavailable),
        (b"[", EngineError),
        (b'{"choices": [{"index": 0, "text": "\xff"}]}', EngineError),
        (b'{"usage": {"prompt_tokens": -1}}', EngineError),
        (b'{"usage": {"completion_tokens": 1e3}}', EngineError),
        (b'{"usage": {"prompt_tokens_details": {"cached_tokens": -1}}}', EngineError),
        (b'{"usage": {"prompt_tokens": 1%s}}' % (b"0" * 40), EngineError),
    ],
)
def test_an_event_that_cannot_be_used_ends_the_request(data: bytes, error: type[Exception]) -> None:
    with pytest.raises(error):
        TextReader(make_request()).read(data)


@pytest.mark.parametrize(
    "body", [b'{"error": {"message": "because"}}', b'{"error": "because", "error_type": "validation"}', b'{"message": "because"}']
)
def test_a_refusal_is_read_in_the_forms_of_all_servers(body: bytes) -> None:
    assert str(read_failure(422, body)) == "because"


def test_a_listed_model_says_what_it_takes() -> None:
    assert ListedModel(id="/models/Tiny.Q4.gguf").name == "Tiny.Q4"
    assert ListedModel(id="org/model").name == "org/model"
    assert ListedModel(id="m").modalities == ("image", "audio")
