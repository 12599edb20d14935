"""Outputs that are written to keep a parser busy: no piece of one, nor its end, holds the event loop."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

import pytest

from dynamo.frontend.preprocess.parser_registry import PARSER_REGISTRY
from dynamo.frontend.preprocess.parsers import OutputParser, ToolCall
from dynamo.frontend.preprocess.tools.formats.pythonic import MAX_CODE_CHARS
from tests.support.cuts import call, content, read
from tests.support.held import MAX_HELD_S, slowness

PIECE_CHARS = 16


def parser(name: str, schema: Mapping[str, Any] | None = None) -> OutputParser:
    parameters = {"type": "object", "properties": {"a": schema or {"type": "string"}}}
    return PARSER_REGISTRY.tools[name].make([{"type": "function", "function": {"name": "f", "parameters": parameters}}])


def longest_s(parser: OutputParser, text: str) -> float:
    """Return the most CPU time that one piece of a text takes, or its end."""
    longest = 0.0
    for start in range(0, len(text), PIECE_CHARS):
        begun = time.thread_time()
        parser.feed(text[start : start + PIECE_CHARS])
        longest = max(longest, time.thread_time() - begun)
    begun = time.thread_time()
    parser.finish()
    return max(longest, time.thread_time() - begun)


LONG_SCHEMA = {"anyOf": [{}] * 300_000}


@pytest.mark.parametrize(
    ("name", "text", "schema"),
    [
        ("mistral", "[TOOL_CALLS]{" * 2000, None),
        ("mistral", '[TOOL_CALLS]{"name":"f","arguments":{},' * 2000, None),
        ("mistral", '[TOOL_CALLS]{"' + "[TOOL_CALLS]{" * 5000, None),
        ("mistral", '[TOOL_CALLS]{"' + "[TOOL_CALLS]f{}" * 5000, None),
        ("mistral", '[TOOL_CALLS]f{"' + "[TOOL_CALLS]f{}" * 5000, None),
        ("phi4_mini_json", "functools[{" * 5000, None),
        ("pythonic", "[" + "f()," * 16_000 + "]", None),
        ("pythonic", "[f(a=f'{[" + "1," * 30_000 + "]}')]", None),
        ("pythonic", "[f(a=''' 'b''' + [" + "1," * 30_000 + "] + '''c' d''')]", None),
        ("qwen3_coder", "<function=f><parameter=a>1</parameter></function>", LONG_SCHEMA),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else "",
)
def test_no_piece_of_a_hostile_output_takes_long(name: str, text: str, schema: Mapping[str, Any] | None) -> None:
    bound_s = MAX_HELD_S
    for _ in range(2):  # a collection of garbage may fall into one
        held_s = longest_s(parser(name, schema), text)
        if held_s <= bound_s:
            return
        bound_s = MAX_HELD_S * slowness()
    assert held_s <= bound_s


@pytest.mark.parametrize(
    ("name", "head"),
    [("hermes", '<tool_call>{"name":"f","arguments":'), ("generic", '{"arguments":'), ("mistral", "[TOOL_CALLS]f")],
)
def test_brackets_of_the_wrong_kind_take_no_longer_than_others(name: str, head: str) -> None:
    def read_s(text: str) -> float:
        begun = time.thread_time()
        parser(name).feed(head + text)
        return time.thread_time() - begun

    wrong, right = "{" * 12_000 + "]" * 12_000, "{" * 12_000 + "}" * 12_000
    times = [(read_s(wrong), read_s(right)) for _ in range(3)]
    assert min(wrong_s for wrong_s, _ in times) < 10 * min(right_s for _, right_s in times)  # 100 times if each looks through all


@pytest.mark.parametrize(
    ("name", "held", "rest"),
    [
        ("mistral", '[TOOL_CALLS]{"', '[TOOL_CALLS]f{"a": "é"}'),
        ("mistral", '[TOOL_CALLS]f{"', '[TOOL_CALLS]{"name": "f", "arguments": {"a": "\\""}} and '),
        ("phi4_mini_json", 'functools[{"', 'functools[{"name": "f", "arguments": {}}] so '),
        ("hermes", '<tool_call>{"', '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call> '),
        ("generic", '<tool_call>{"', '```json\n{"name": "f", "arguments": {}}\n``` '),
        ("qwen3_coder", "<tool_call>", "<function=f><parameter=a>x</parameter></function> "),
        ("pythonic", "[f(a='", "<|python_end|> ' "),
        ("harmony", "", "<|channel|>commentary to=functions.f<|message|>{}<|call|>so "),
    ],
)
@pytest.mark.parametrize("repeated", [150, 3000])
def test_long_text_that_is_given_back_is_read_as_if_it_came_in_pieces(name: str, held: str, rest: str, repeated: int) -> None:
    text = (held if repeated < 1000 else "") + rest * repeated  # not more than may be held
    pieces = [text[start : start + 1000] for start in range(0, len(text), 1000)]
    assert read(parser(name), [text]) == read(parser(name), pieces)


def test_a_marker_outside_of_strings_ends_a_call_that_has_begun() -> None:
    reader = parser("mistral")
    reader.feed('[TOOL_CALLS]{"name": [1, ')
    assert reader.feed("[TOOL_CALLS]f{") != []
    assert read(parser("mistral"), ['[TOOL_CALLS]{"name": [1, [TOOL_CALLS]f{}']) == [content('{"name": [1, '), call("f", "{}")]


@pytest.mark.parametrize("quote", ["'", '"'])
def test_long_strings_in_a_list_of_calls_are_kept(quote: str) -> None:
    long = "x, \\n [" * 5000
    assert len(long) > 4 * MAX_CODE_CHARS
    (part,) = read(parser("pythonic"), [f"[f(a={quote}{long}{quote}, b=1)]"])
    assert part[0] == "call" and json.loads(part[-1]) == {"a": long.replace("\\n", "\n"), "b": 1}


def test_a_parameter_whose_schema_has_too_many_types_may_have_any() -> None:
    text = "<function=f><parameter=a>1</parameter></function>"
    assert read(parser("qwen3_coder", {"anyOf": [{}] * 100}), [text]) == [call("f", '{"a":"1"}')]
    assert read(parser("qwen3_coder", {"anyOf": [{}] * 10_000}), [text]) == [call("f", '{"a":1}')]
    assert read(parser("qwen3_coder", {"type": ["integer"] * 10_000}), [text]) == [call("f", '{"a":1}')]


def test_the_pieces_of_content_between_markers_are_joined() -> None:
    parts = parser("hermes").feed("<tool_call>{" * 100)
    assert len(parts) < 10 and not any(isinstance(part, ToolCall) for part in parts)
