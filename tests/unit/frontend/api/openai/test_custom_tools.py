"""Tools of type `custom` in chat completions."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.chat import ChatCompletion

from dynamo.frontend.preprocess.parsers import OutputParsers, ParserKind
from tests.support.http_edge import Speaker, chat_card, events_of, open_http_edge
from tests.support.parsers import brackets

CHAT = "/v1/chat/completions"
HELLO: dict[str, Any] = {"model": "talker", "messages": [{"role": "user", "content": "Hi"}]}
FUNCTION = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
GRAMMAR = {"type": "grammar", "grammar": {"syntax": "lark", "definition": "start: LINE"}}
PATCH = {"type": "custom", "custom": {"name": "apply_patch", "description": "Edit files.", "format": GRAMMAR}}
CUSTOM_CALL = {"id": "c1", "type": "custom", "custom": {"name": "apply_patch", "input": "a\nb"}}
PARSERS = OutputParsers(tools={"brackets": ParserKind(brackets)}, reasoning={})
CARD = chat_card(tool_parser="brackets")
BOTH = ('[apply_patch {"input":"x\\ny"}]', '[weather {"city":1}]')


async def test_a_custom_tool_is_called_with_a_text_beside_a_function() -> None:
    speaker = Speaker(BOTH)
    async with open_http_edge(CARD, respond=speaker, parsers=PARSERS) as edge:
        body = (await edge.post(CHAT, HELLO | {"tools": [PATCH, FUNCTION]})).json()
    ChatCompletion.model_validate(body)
    [choice] = body["choices"]
    custom, function = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls"
    assert (custom["type"], custom["custom"]) == ("custom", {"name": "apply_patch", "input": "x\ny"})
    assert "function" not in custom and "custom" not in function
    assert (function["type"], function["function"]) == ("function", {"name": "weather", "arguments": '{"city":1}'})
    assert "Edit files." in speaker.prompt and "start: LINE" in speaker.prompt


@pytest.mark.parametrize("texts", [BOTH, BOTH[::-1]])
async def test_a_streamed_custom_call_has_its_text_in_one_piece(texts: tuple[str, ...]) -> None:
    async with open_http_edge(CARD, respond=Speaker(texts), parsers=PARSERS) as edge:
        response = await edge.post(CHAT, HELLO | {"tools": [PATCH, FUNCTION], "stream": True})
    choices = [json.loads(data)["choices"] for _, data in events_of(response.text) if data != "[DONE]"]
    pieces = [piece for [choice] in choices for piece in choice["delta"].get("tool_calls", ())]
    calls: dict[int, dict[str, str]] = {}
    for piece in pieces:
        kind = "custom" if "custom" in piece else "function"
        text = piece[kind].get("input", "") + piece[kind].get("arguments", "")
        if "id" in piece:
            calls[piece["index"]] = {"type": piece["type"], "name": piece[kind]["name"], "text": text}
        else:
            assert calls[piece["index"]]["type"] == kind
            calls[piece["index"]]["text"] += text
    custom = {"type": "custom", "name": "apply_patch", "text": "x\ny"}
    function = {"type": "function", "name": "weather", "text": '{"city":1}'}
    assert list(calls.values()) == ([custom, function] if texts is BOTH else [function, custom])
    assert choices[-1][0]["finish_reason"] == "tool_calls"


async def test_a_custom_call_in_the_history_is_that_of_a_function_to_the_model() -> None:
    speaker = Speaker()
    past = [
        {"role": "assistant", "content": None, "tool_calls": [CUSTOM_CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "done"},
    ]
    async with open_http_edge(CARD, respond=speaker, parsers=PARSERS) as edge:
        response = await edge.post(CHAT, HELLO | {"messages": [*HELLO["messages"], *past], "tools": [PATCH]})
    assert response.status_code == 200, response.text
    assert '[apply_patch {"input": "a\\nb"}]\n<tool>done\n' in speaker.prompt


ALLOWED = {"mode": "required", "tools": [{"type": "custom", "custom": {"name": "apply_patch"}}]}


@pytest.mark.parametrize(
    "choice",
    ["required", {"type": "custom", "custom": {"name": "apply_patch"}}, {"type": "allowed_tools", "allowed_tools": ALLOWED}],
)
async def test_a_custom_tool_can_be_required(choice: Any) -> None:
    is_named = isinstance(choice, dict) and choice["type"] == "custom"
    text = '{"input": "x"}' if is_named else '[{"name": "apply_patch", "parameters": {"input": "x"}}]'
    async with open_http_edge(CARD, respond=Speaker((text,)), parsers=PARSERS) as edge:
        body = (await edge.post(CHAT, HELLO | {"tools": [FUNCTION, PATCH], "tool_choice": choice})).json()
    [call] = body["choices"][0]["message"]["tool_calls"]
    assert call["custom"] == {"name": "apply_patch", "input": "x"}


@pytest.mark.parametrize(
    ("wrong", "param", "message"),
    [
        ({"tools": [{"type": "custom"}]}, "tools[0].custom", "a tool of type 'custom' needs 'custom'"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "a tool of type 'function' needs 'function'"),
        ({"tools": [PATCH, PATCH]}, "tools", "two tools have the same name"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "c1", "type": "custom"}]}]},
            "messages[0].tool_calls[0].custom",
            "a call of type 'custom' needs 'custom'",
        ),
    ],
)
async def test_a_tool_or_call_without_its_kind_is_refused(wrong: dict[str, Any], param: str, message: str) -> None:
    async with open_http_edge(CARD, parsers=PARSERS) as edge:
        error = await edge.error(CHAT, HELLO | wrong)
    assert (error["param"], error["message"]) == (param, message)
