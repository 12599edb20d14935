"""Requests with fields that this server does not have, with nulls, and without a model."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from dynamo.frontend.api.http.unknown_fields import MAX_NAMES, UnknownFields
from dynamo.frontend.config import HttpOptions
from tests.support.fakes import tensor_card
from tests.support.http_edge import HttpEdge, Speaker, chat_card, open_http_edge

CHAT = "/v1/chat/completions"
HELLO: dict[str, Any] = {"model": "talker", "messages": [{"role": "user", "content": "Hi"}]}
PROMPT: dict[str, Any] = {"model": "talker", "prompt": "Hi"}
INPUT: dict[str, Any] = {"model": "talker", "input": "Hi"}
ANTHROPIC: dict[str, Any] = {**HELLO, "max_tokens": 16}
EVERY_API = [
    (CHAT, HELLO),
    ("/v1/completions", PROMPT),
    ("/v1/responses", INPUT),
    ("/v1/messages", ANTHROPIC),
    ("/tokenize", PROMPT),
]


def counted(edge: HttpEdge, endpoint: str, field: str) -> float | None:
    labels = {"endpoint": endpoint, "field": field}
    return edge.registry.get_sample_value("dynamo_frontend_unknown_fields_total", labels)


@pytest.mark.parametrize(("path", "body"), EVERY_API)
async def test_a_field_that_the_server_does_not_have_is_ignored_by_every_api(path: str, body: dict[str, Any]) -> None:
    async with open_http_edge(respond=Speaker()) as edge:
        response = await edge.post(path, body | {"foo": {"bar": [1]}})
    assert response.status_code == 200, response.text


async def test_each_unknown_field_is_counted_and_logged_the_first_time(caplog: pytest.LogCaptureFixture) -> None:
    odd = {"foo": 1, "stream": True, "stream_options": {"include_usage": True, "color": "red"}, "nvext": {"router": {"heat": 1}}}
    async with open_http_edge(respond=Speaker()) as edge:
        for _ in range(2):
            assert (await edge.post(CHAT, HELLO | odd)).status_code == 200
        counts = {name: counted(edge, "chat_completions", name) for name in ("foo", "stream_options.color", "nvext.router.heat")}
    assert counts == {"foo": 2, "stream_options.color": 2, "nvext.router.heat": 2}
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert sorted(line.split("'")[1] for line in warnings) == ["foo", "nvext.router.heat", "stream_options.color"]


def test_the_names_that_are_counted_and_logged_are_bounded() -> None:
    counts: list[str] = []
    fields = UnknownFields(count=lambda endpoint, field: counts.append(field))
    for number in range(2 * MAX_NAMES):
        fields.ignore("chat_completions", f"field_{number}")
    fields.ignore("chat_completions", "field_0")
    UnknownFields(count=lambda endpoint, field: counts.append(field)).ignore("chat_completions", "a\nline")
    assert len(set(counts)) == MAX_NAMES + 1
    assert counts[-2:] == ["field_0", "other"]


@pytest.mark.parametrize("field", ["foo", "stream_options.foo", "nvext.router.foo"])
async def test_an_operator_may_have_unknown_fields_refused(field: str) -> None:
    body: dict[str, Any] = dict(HELLO)
    inner = body
    *objects, name = field.split(".")
    for part in objects:
        inner[part] = inner = {}
    inner[name] = 1
    async with open_http_edge(respond=Speaker(), http=HttpOptions(strict_fields=True)) as edge:
        error = await edge.error(CHAT, body)
    assert (error["param"], error["message"]) == (field, f"unknown field '{field}'")


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": "Hi", "foo": 1},
        {"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}]},
        {  # what the SDK's `.parse()` returns
            "role": "assistant",
            "content": "{}",
            "parsed": {"a": 1},
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
            "tool_calls": None,
        },
        {  # what LiteLLM returns
            "role": "assistant",
            "content": None,
            "provider_specific_fields": {"citations": None},
            "tool_calls": [
                {
                    "id": "call_1",
                    "type": "function",
                    "index": None,
                    "function": {"name": "f", "arguments": "{}", "parsed_arguments": {}},
                    "provider_specific_fields": {"thought_signature": "x"},
                }
            ],
        },
    ],
)
async def test_unknown_fields_of_messages_are_ignored_even_where_others_are_refused(message: dict[str, Any]) -> None:
    speaker = Speaker()
    messages = [{"role": "user", "content": "Hi"}, message, {"role": "user", "content": "Go on"}]
    async with open_http_edge(respond=speaker, http=HttpOptions(strict_fields=True)) as edge:
        response = await edge.post(CHAT, {"model": "talker", "messages": messages})
    assert response.status_code == 200, response.text
    assert "ephemeral" not in speaker.prompt


async def test_unknown_fields_of_anthropic_blocks_are_ignored_even_where_others_are_refused() -> None:
    block = {"type": "text", "text": "Hi", "cache_control": None, "foo": 1}
    async with open_http_edge(respond=Speaker(), http=HttpOptions(strict_fields=True)) as edge:
        response = await edge.post("/v1/messages", {**ANTHROPIC, "messages": [{"role": "user", "content": [block]}]})
        managed = await edge.post("/v1/messages", {**ANTHROPIC, "context_management": {"edits": []}})
    assert (response.status_code, managed.status_code) == (200, 200)


@pytest.mark.parametrize(("path", "body"), EVERY_API)
@pytest.mark.parametrize("model", [{}, {"model": None}, {"model": ""}])
async def test_the_model_may_be_left_out_where_one_is_served(
    path: str, body: dict[str, Any], model: dict[str, str | None]
) -> None:
    unnamed = {name: value for name, value in body.items() if name != "model"}
    async with open_http_edge(chat_card("only"), tensor_card("adder"), respond=Speaker()) as edge:
        response = await edge.post(path, unnamed | model)
    assert response.status_code == 200, response.text
    assert response.json().get("model", "only") == "only"


async def test_the_model_has_to_be_named_where_several_are_served() -> None:
    async with open_http_edge(chat_card("one"), chat_card("two"), respond=Speaker()) as edge:
        error = await edge.error(CHAT, {"messages": HELLO["messages"]})
    assert error["param"] == "model"
    assert error["message"] == (
        "the field 'model' is missing; it can be left out if exactly one model suits the request, but 2 do"
    )


async def test_no_field_of_any_kind_of_tool_choice_is_unknown() -> None:
    function = {"type": "function", "function": {"name": "now"}}
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [function]}}
    async with open_http_edge(chat_card(tool_parser="hermes"), respond=Speaker(), http=HttpOptions(strict_fields=True)) as edge:
        for choice in (function, allowed):
            response = await edge.post(CHAT, HELLO | {"tools": [function], "tool_choice": choice})
            assert "unknown field" not in response.text
        flat = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "now"}]}
        for choice in (flat, {"type": "function", "name": "now"}):
            response = await edge.post(
                "/v1/responses", INPUT | {"tools": [{"type": "function", "name": "now"}], "tool_choice": choice}
            )
            assert "unknown field" not in response.text
