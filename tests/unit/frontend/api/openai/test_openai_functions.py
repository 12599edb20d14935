"""Calls in the older form of OpenAI's API, and calls that are required together with structured output."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dynamo.frontend.preprocess.parsers import OutputParsers, ParserKind
from tests.support.http_edge import Speaker, chat_card, events_of, open_http_edge
from tests.support.parsers import brackets

CHAT = "/v1/chat/completions"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"name": "weather", "parameters": PARAMETERS}
TOOL = {"type": "function", "function": WEATHER}
HELLO: dict[str, Any] = {"model": "talker", "messages": [{"role": "user", "content": "Hi"}]}
PARSERS = OutputParsers(tools={"brackets": ParserKind(brackets)}, reasoning={})
CARD = chat_card(tool_parser="brackets")
CALL = Speaker(('[weather {"city":"Rome"}]',))
SCHEMA = {"type": "object", "properties": {"answer": {"type": "string"}}}


async def test_functions_are_tools_and_their_calls_come_back_in_the_same_form() -> None:
    async with open_http_edge(CARD, respond=CALL, parsers=PARSERS) as edge:
        body = (await edge.post(CHAT, HELLO | {"functions": [WEATHER]})).json()
        streamed = await edge.post(CHAT, HELLO | {"functions": [WEATHER], "function_call": "auto", "stream": True})
    assert json.dumps(TOOL) in CALL.prompt
    [choice] = body["choices"]
    assert choice["finish_reason"] == "function_call"
    assert choice["message"]["function_call"] == {"name": "weather", "arguments": '{"city":"Rome"}'}
    assert "tool_calls" not in choice["message"]
    choices = [json.loads(data)["choices"][0] for _, data in events_of(streamed.text)[:-1]]
    pieces = [choice["delta"]["function_call"] for choice in choices if "function_call" in choice["delta"]]
    assert pieces[0]["name"] == "weather" and "".join(piece["arguments"] for piece in pieces) == '{"city":"Rome"}'
    assert choices[-1]["finish_reason"] == "function_call"


async def test_a_function_that_is_named_is_required_and_none_leaves_them_out() -> None:
    speaker = Speaker(('{"city": "Rome"}',))
    async with open_http_edge(CARD, respond=speaker, parsers=PARSERS) as edge:
        body = (await edge.post(CHAT, HELLO | {"functions": [WEATHER], "function_call": {"name": "weather"}})).json()
        assert speaker.last.sampling.guided == {"json_schema": PARAMETERS | {"additionalProperties": False}}
        assert body["choices"][0]["message"]["function_call"]["arguments"] == '{"city": "Rome"}'
        await edge.post(CHAT, HELLO | {"functions": [WEATHER], "function_call": "none"})
    assert "weather" not in speaker.prompt


async def test_a_conversation_with_function_calls_is_one_with_tool_calls() -> None:
    speaker = Speaker()
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "function_call": {"name": "weather", "arguments": '{"city": "Rome"}'}},
        {"role": "function", "name": "weather", "content": "sunny"},
    ]
    async with open_http_edge(CARD, respond=speaker, parsers=PARSERS) as edge:
        response = await edge.post(CHAT, HELLO | {"messages": messages, "functions": [WEATHER]})
    assert response.status_code == 200, response.text
    assert '[weather {"city": "Rome"}]\n<tool>sunny\n' in speaker.prompt


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"functions": [WEATHER], "tools": [TOOL]}, "functions"),
        ({"functions": [WEATHER], "function_call": {"name": "other"}}, "function_call"),
        ({"functions": [WEATHER, WEATHER]}, "functions"),
    ],
)
async def test_wrong_functions_are_refused_by_the_names_that_the_client_has_for_them(wrong: dict[str, Any], param: str) -> None:
    async with open_http_edge(CARD, parsers=PARSERS) as edge:
        error = await edge.error(CHAT, HELLO | wrong)
    assert error["param"] == param


FORCED = [
    pytest.param(
        CHAT,
        HELLO | {"tools": [TOOL], "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
        [{"type": "function", "function": {"name": "weather"}}, "required"],
        id="chat",
    ),
    pytest.param(
        "/v1/responses",
        {
            "model": "talker",
            "input": "Hi",
            "tools": [TOOL | WEATHER],
            "text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}},
        },
        [{"type": "function", "name": "weather"}, "required"],
        id="responses",
    ),
    pytest.param(
        "/v1/messages",
        HELLO
        | {
            "max_tokens": 8,
            "tools": [{"name": "weather", "input_schema": PARAMETERS}],
            "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
        },
        [{"type": "tool", "name": "weather"}, {"type": "any"}],
        id="messages",
    ),
]


@pytest.mark.parametrize(("path", "body", "choices"), FORCED)
async def test_a_call_that_is_required_wins_over_structured_output(path: str, body: dict[str, Any], choices: list[Any]) -> None:
    named, any_call = Speaker(('{"city": "Rome"}',)), Speaker(('[{"name": "weather", "parameters": {"city": "Rome"}}]',))
    for choice, speaker in zip(choices, (named, any_call), strict=True):
        async with open_http_edge(CARD, respond=speaker, parsers=PARSERS) as edge:
            response = await edge.post(path, body | {"tool_choice": choice})
        assert response.status_code == 200, response.text
        assert speaker.last.sampling.guided is not None
        assert "answer" not in json.dumps(speaker.last.sampling.guided) and "city" in json.dumps(speaker.last.sampling.guided)
        assert "Rome" in response.text and (
            "tool_calls" in response.text or "_call" in response.text or "tool_use" in response.text
        )


async def test_max_completion_tokens_wins_over_another_max_tokens() -> None:
    speaker = Speaker()
    async with open_http_edge(respond=speaker) as edge:
        response = await edge.post(CHAT, HELLO | {"max_tokens": 5, "max_completion_tokens": 6})
    assert response.status_code == 200, response.text
    assert speaker.last.stop.max_tokens == 6


@pytest.mark.parametrize("metadata", [{str(number): "" for number in range(17)}, {"a": "x" * 513}, {"x" * 65: ""}])
@pytest.mark.parametrize(("path", "body"), [(CHAT, HELLO), ("/v1/responses", {"model": "talker", "input": "Hi"})])
async def test_metadata_is_bounded(path: str, body: dict[str, Any], metadata: dict[str, str]) -> None:
    async with open_http_edge(respond=Speaker()) as edge:
        assert (await edge.error(path, body | {"metadata": metadata}))["param"].startswith("metadata")
        assert (await edge.post(path, body | {"metadata": {"a": "x" * 512}})).status_code == 200
