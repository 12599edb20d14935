"""Requests that are wrong or too large, and the types against OpenAI's own."""

from __future__ import annotations

import asyncio
import json
import re
import typing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from openai.types import chat, completion_create_params, embedding_create_params, responses, shared_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from dynamo.common.config import ConfigError
from dynamo.frontend.api.openai.operations import read_request_template
from dynamo.frontend.api.openai.requests import (
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    ContentPart,
    EmbeddingRequest,
    FunctionDefinition,
    PastToolCall,
    StreamOptions,
    Tool,
)
from dynamo.frontend.api.openai.responses.requests import InputItem, InputPart, ResponsesRequest
from dynamo.frontend.config import HttpOptions, TextLimits, TextOptions
from tests.support.fakes import tensor_card
from tests.support.http_edge import Speaker, open_http_edge, raw_connection

CHAT = "/v1/chat/completions"
HELLO: dict[str, Any] = {"model": "talker", "messages": [{"role": "user", "content": "Hi"}]}


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (ChatRequest, chat_create_params.CompletionCreateParamsBase),
        (CompletionRequest, completion_create_params.CompletionCreateParamsBase),
        (EmbeddingRequest, embedding_create_params.EmbeddingCreateParams),
        (ResponsesRequest, response_create_params.ResponseCreateParamsBase),
        (ChatMessage, chat.ChatCompletionSystemMessageParam),
        (ChatMessage, chat.ChatCompletionUserMessageParam),
        (ChatMessage, chat.ChatCompletionAssistantMessageParam),
        (ChatMessage, chat.ChatCompletionToolMessageParam),
        (ContentPart, chat.ChatCompletionContentPartTextParam),
        (ContentPart, chat.ChatCompletionContentPartImageParam),
        (ContentPart, chat.ChatCompletionContentPartInputAudioParam),
        (PastToolCall, chat.ChatCompletionMessageFunctionToolCallParam),
        (PastToolCall, chat.ChatCompletionMessageCustomToolCallParam),
        (Tool, chat.ChatCompletionFunctionToolParam),
        (Tool, chat.ChatCompletionCustomToolParam),
        (FunctionDefinition, shared_params.FunctionDefinition),
        (StreamOptions, chat.ChatCompletionStreamOptionsParam),
        (InputItem, responses.EasyInputMessageParam),
        (InputItem, responses.ResponseOutputMessageParam),
        (InputItem, responses.ResponseFunctionToolCallParam),
        (InputPart, responses.ResponseInputTextParam),
        (InputPart, responses.ResponseInputImageParam),
    ],
)
def test_every_field_of_openai_is_declared(ours: type[msgspec.Struct], theirs: type) -> None:
    declared = {field.encode_name for field in msgspec.structs.fields(ours)}
    assert set(typing.get_type_hints(theirs)) - declared == set()


@pytest.mark.parametrize(
    ("wrong", "param", "message"),
    [
        ({"messages": []}, "messages", "'messages' must have a length of at least 1"),
        ({"messages": [{"role": "a king", "content": "Hi"}]}, "messages[0].role", None),
        ({"temperature": 2.5}, "temperature", "'temperature' must be at most 2"),
        ({"temperature": "hot"}, "temperature", "'temperature' must be a number or null, got a string"),
        ({"top_p": 0}, "top_p", "'top_p' must be above 0"),
        ({"n": 0}, "n", "'n' must be at least 1"),
        ({"n": 1.5}, "n", "'n' must be an integer or null, got a number"),
        ({"n": 129}, "n", "'n' must be at most 128, got 129"),
        ({"n": 2, "temperature": 0}, "n", "'n' above 1 needs a temperature above 0: at 0 all choices are the same"),
        ({"max_tokens": 0}, "max_tokens", "'max_tokens' must be at least 1"),
        ({"seed": 2**70}, "seed", "'seed' must be at most 9223372036854775807"),
        ({"logit_bias": {"x": 1, "-2": 1}}, "logit_bias", "the keys of 'logit_bias' must be token ids, got 'x', '-2'"),
        ({"logit_bias": {"5": 101}}, "logit_bias[...]", "'logit_bias[...]' must be at most 100"),
        ({"stop": ["a"] * 33}, "stop", "got 33 stop strings; at most 32 are allowed"),
        ({"stop": ""}, "stop", "stop strings must not be empty"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "'top_logprobs' must be at most 20, got 21"),
        ({"top_logprobs": 2}, "top_logprobs", "'top_logprobs' needs 'logprobs' to be true"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "'stream_options' is only allowed with 'stream'"),
        ({"modalities": ["audio"]}, "modalities", "responses are text; 'modalities' must be [\"text\"]"),
        (
            {"tool_choice": {"type": "mcp"}},
            "tool_choice.type",
            "'tool_choice.type' must be 'function', 'custom' or 'allowed_tools', got 'mcp'",
        ),
        ({"tool_choice": "never"}, "tool_choice", "'tool_choice' must be 'auto', 'none' or 'required', got 'never'"),
        ({"tools": [{"type": "web"}]}, "tools[0].type", "'tools[0].type' must be 'custom' or 'function', got 'web'"),
        (
            {"nvext": {"extra_fields": ["cost"]}},
            "nvext.extra_fields[0]",
            "'nvext.extra_fields[0]' must be 'completion_token_ids', 'timing' or 'worker_id', got 'cost'",
        ),
        ({"tool_choice": "required"}, "tool_choice", "'tool_choice' requires a call, but there are no tools"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "'guided_regex' and 'guided_choice' cannot be combined"),
        ({"guided_json": "{"}, "guided_json", None),
        ({"response_format": {"type": "json_schema"}}, "response_format", None),
        ({"nvext": {"annotations": ["worker_id"]}}, "nvext.annotations", "'nvext.annotations' needs 'stream'"),
    ],
)
async def test_invalid_fields_are_named(wrong: dict[str, Any], param: str, message: str | None) -> None:
    async with open_http_edge(respond=Speaker()) as edge:
        error = await edge.error(CHAT, HELLO | wrong)
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    if message is not None:
        assert error["message"] == message


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[1]", b'{"model": "\xff"}', b"null", b'{"model":"talker","messages":' + b"[" * 5000]
)
async def test_a_body_that_is_not_a_json_object_is_rejected(body: bytes) -> None:
    async with open_http_edge(respond=Speaker()) as edge:
        response = await edge.http.post(CHAT, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("word", ["NaN", "Infinity", "-Infinity"])
async def test_a_word_for_a_number_is_rejected_by_the_name_of_its_field(word: str) -> None:
    async with open_http_edge(respond=Speaker()) as edge:
        body = b'{"model": "talker", "prompt": "NaN", "temperature" : %b}' % word.encode()
        response = await edge.http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
        error = response.json()["error"]
        assert response.status_code == 400
        assert error["message"] == f"'temperature' must be a finite number, got {word.lstrip('-')}"
        assert error["param"] == "temperature"


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/completions", {"prompt": "hello"}, "max_tokens"),
        (CHAT, {"messages": HELLO["messages"]}, "max_tokens"),
        (CHAT, {"messages": HELLO["messages"]}, "max_completion_tokens"),
        ("/v1/responses", {"input": "hello"}, "max_output_tokens"),
        ("/v1/messages", {"messages": HELLO["messages"]}, "max_tokens"),
    ],
)
async def test_a_response_longer_than_the_context_has_room_for_is_rejected(path: str, body: dict[str, Any], field: str) -> None:
    body = {"model": "talker", **body}
    async with open_http_edge(respond=Speaker()) as edge:
        error = await edge.error(path, body | {field: 1_000_000})
        match = re.fullmatch(
            f"'{field}' is 1000000, but the prompt's [0-9]+ tokens leave room for ([0-9]+); "
            "this model's maximum context length is 4096 tokens",
            error["message"],
        )
        assert match is not None, error
        if path != "/v1/messages":
            assert (error["param"], error["code"]) == (field, "context_length_exceeded")
        assert (await edge.post(path, body | {field: int(match[1])})).status_code == 200


async def test_a_body_of_another_content_type_is_rejected() -> None:
    async with open_http_edge(respond=Speaker()) as edge:
        responses = [
            await edge.http.post(CHAT, content=json.dumps(HELLO), headers={"content-type": kind})
            for kind in ("application/x-www-form-urlencoded", "application/json; charset=utf-8")
        ]
    form, charset = responses
    assert form.status_code == 400
    assert "application/json" in form.json()["error"]["message"]
    assert charset.status_code == 200


async def test_a_body_may_be_as_large_as_the_limit_and_no_larger() -> None:
    body = json.dumps(HELLO | {"user": "x" * 2000}).encode()
    json_type = {"content-type": "application/json"}

    async def slowly() -> Any:
        yield body[:100]
        yield body[100:]

    async with open_http_edge(respond=Speaker(), http=HttpOptions(max_body_bytes=len(body))) as edge:
        assert (await edge.http.post(CHAT, content=body, headers=json_type)).status_code == 200
        assert (await edge.http.post(CHAT, content=slowly(), headers=json_type)).status_code == 200
    async with open_http_edge(respond=Speaker(), http=HttpOptions(max_body_bytes=len(body) - 1)) as edge:
        for content in (body, slowly()):
            response = await edge.http.post(CHAT, content=content, headers=json_type)
            assert response.status_code == 413
            assert str(len(body) - 1) in response.json()["error"]["message"]


async def test_a_body_with_a_too_large_content_length_is_rejected_unread() -> None:
    async with open_http_edge(http=HttpOptions(max_body_bytes=4096)) as edge:

        def ask() -> bytes:
            with raw_connection(edge.port) as connection:
                connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 999999999\r\n\r\n")
                return connection.recv(100)

        assert b" 413 " in await asyncio.to_thread(ask)


def nested(levels: int) -> dict[str, Any]:
    """The request with `chat_template_kwargs` that make it `levels` deep."""
    inner: Any = 1
    for _ in range(levels - 2):
        inner = [inner]
    return HELLO | {"chat_template_kwargs": {"x": inner}, "user": "[" * 1000}


async def test_json_may_be_nested_up_to_the_limit() -> None:
    async with open_http_edge(respond=Speaker(), http=HttpOptions(max_json_depth=20)) as edge:
        assert (await edge.post(CHAT, nested(20))).status_code == 200
        error = await edge.error(CHAT, nested(21))
    assert error["message"] == "the body nests arrays and objects deeper than 20 levels"


async def test_json_without_tensors_has_a_limit_of_its_own() -> None:
    body = json.dumps(HELLO | {"user": "x" * 2000}).encode()
    json_type = {"content-type": "application/json"}
    async with open_http_edge(respond=Speaker(), http=HttpOptions(max_json_bytes=len(body))) as edge:
        assert (await edge.http.post(CHAT, content=body, headers=json_type)).status_code == 200
        response = await edge.http.post(CHAT, content=body + b" ", headers=json_type)
    assert response.status_code == 413
    assert HttpOptions().max_json_bytes == 4 * 2**20


@pytest.mark.parametrize(
    "many",
    [
        {"chat_template_kwargs": {"a": [[]] * 150}},
        {"chat_template_kwargs": {str(number): 0 for number in range(150)}},
        {"chat_template_kwargs": {"a": [1] * 1000}},
        {"an unknown field": [{}] * 150},
        {"messages": [{"role": "user", "content": "a"}] * 50},
    ],
)
async def test_a_body_with_too_many_values_is_rejected_before_it_is_decoded(many: dict[str, Any]) -> None:
    async with open_http_edge(respond=Speaker(), http=HttpOptions(max_json_values=1000)) as edge:
        error = await edge.error(CHAT, HELLO | many)
        assert (await edge.post(CHAT, HELLO | {"user": "[],{}:" * 1000})).status_code == 200
    assert error["message"].startswith("the body has too many values; at most 1000 are allowed")


async def test_a_schema_in_a_string_is_bounded_too() -> None:
    async with open_http_edge(respond=Speaker()) as edge:
        error = await edge.error(CHAT, HELLO | {"guided_json": '{"a":[' + "[]," * 30_000 + "0]}"})
        assert (await edge.post(CHAT, HELLO | {"guided_json": '{"type":"object"}'})).status_code == 200
    assert error["message"].startswith("the body has too many values")


async def test_the_prompts_that_are_echoed_count_for_each_choice() -> None:
    request = {"model": "talker", "prompt": "x" * 50, "echo": True, "n": 4, "temperature": 1, "max_tokens": 1}
    async with open_http_edge(respond=Speaker(), text=TextOptions(limits=TextLimits(max_prompt_chars=199))) as edge:
        assert (await edge.error("/v1/completions", request))["param"] == "prompt"
        assert (await edge.post("/v1/completions", request | {"n": 3})).status_code == 200


async def test_settings_bound_what_a_request_may_demand() -> None:
    limits = TextLimits(max_messages=2, max_prompt_chars=40, max_choices=2, max_stop_strings=1, max_logprobs=1, max_best_of=2)
    message = {"role": "user", "content": "12345"}
    async with open_http_edge(respond=Speaker(logprobs=lambda index: -1.0), text=TextOptions(limits=limits)) as edge:
        fitting = HELLO | {"messages": [message] * 2, "n": 2, "stop": ["a"], "logprobs": True, "top_logprobs": 1}
        assert (await edge.post(CHAT, fitting)).status_code == 200
        for wrong, param in (
            ({"messages": [message] * 3}, "messages"),
            ({"messages": [message, message | {"content": "1" * 36}]}, "messages"),
            ({"n": 3}, "n"),
            ({"stop": ["a", "b"]}, "stop"),
            ({"top_logprobs": 2}, "top_logprobs"),
        ):
            assert (await edge.error(CHAT, fitting | wrong))["param"] == param
        assert (await edge.post("/v1/completions", {"model": "talker", "prompt": "1" * 40})).status_code == 200
        assert (await edge.error("/v1/completions", {"model": "talker", "prompt": "1" * 41}))["param"] == "prompt"


async def test_numbers_that_do_not_fit_the_wire_format_are_rejected() -> None:
    async with open_http_edge(respond=Speaker()) as edge:
        error = await edge.error(CHAT, HELLO | {"guided_json": {"maximum": 2**64}})
    assert error["message"] == "a number in the request has more than 64 bits"


async def test_a_tensor_model_has_no_chat() -> None:
    async with open_http_edge(tensor_card()) as edge:
        error = await edge.error(CHAT, HELLO | {"model": "adder"})
    assert (error["message"], error["param"]) == ("model 'adder' does not generate text", "model")


async def test_a_wrong_method_or_path_is_an_error_in_openais_form() -> None:
    async with open_http_edge() as edge:
        wrong_method, wrong_path = await edge.http.get(CHAT), await edge.http.post("/v1/nothing")
    assert (wrong_method.status_code, wrong_path.status_code) == (405, 404)
    assert wrong_method.json()["error"] == {
        "message": f"method GET is not allowed for '{CHAT}'",
        "type": "invalid_request_error",
        "param": None,
        "code": None,
    }


async def test_a_request_template_provides_defaults(tmp_path: Path) -> None:
    file = tmp_path / "template.json"
    file.write_text('{"model": "talker", "temperature": 0.3, "max_completion_tokens": 77}')
    speaker = Speaker()
    async with open_http_edge(respond=speaker, text=TextOptions(request_template=file)) as edge:
        assert (await edge.post(CHAT, {"messages": HELLO["messages"]})).status_code == 200
        assert (speaker.last.sampling.temperature, speaker.last.stop.max_tokens) == (0.3, 77)
        assert (await edge.post(CHAT, HELLO | {"temperature": 1, "max_tokens": 5})).status_code == 200
        assert (speaker.last.sampling.temperature, speaker.last.stop.max_tokens) == (1, 5)
        assert (await edge.post("/v1/completions", {"prompt": "x"})).status_code == 200
        assert speaker.last.stop.max_tokens == 77


def test_a_request_template_that_cannot_be_read_is_a_configuration_error(tmp_path: Path) -> None:
    file = tmp_path / "template.json"
    file.write_text('{"modle": "talker"}')
    with pytest.raises(ConfigError, match="modle"):
        read_request_template(file)
