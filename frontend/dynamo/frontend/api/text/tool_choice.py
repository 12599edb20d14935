"""Tool calls that `tool_choice` requires.

The output is constrained to a JSON schema made of the tools' parameters, so that JSON is all the parsers here read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from dynamo.common.errors import InvalidRequest
from dynamo.frontend.preprocess.parsers import Content, OutputParser, ParserKind, Part, ToolCall, Tools


class NamedCallParser:
    """Parses output that is nothing but the arguments of one tool."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._started = False

    def feed(self, text: str) -> Sequence[Part]:
        if self._started:
            return [ToolCall(0, arguments=text)]
        self._started = True
        return [ToolCall(0, name=self._name, arguments=text)]

    def finish(self) -> Sequence[Part]:
        return []


class _Call(msgspec.Struct):
    name: str
    parameters: msgspec.Raw


_decoder = msgspec.json.Decoder(list[_Call])


class AnyCallsParser:
    """Parses output that is a JSON array of calls. Text that was cut off in the middle becomes content."""

    def __init__(self) -> None:
        self._text: list[str] = []

    def feed(self, text: str) -> Sequence[Part]:
        self._text.append(text)
        return []

    def finish(self) -> Sequence[Part]:
        text = "".join(self._text)
        try:
            calls = _decoder.decode(text)
        except (msgspec.MsgspecError, RecursionError):
            return [Content(text)] if text else []
        return [ToolCall(index, call.name, bytes(call.parameters).decode()) for index, call in enumerate(calls)]


def require_named_call(name: str, tools: Tools) -> tuple[dict[str, Any], ParserKind]:
    """Return the constraint that makes the output a call of the tool `name`, and its parser. Raises InvalidRequest."""
    for tool in tools:
        if tool["function"]["name"] == name:
            return {"json_schema": tool["function"].get("parameters") or {"type": "object"}}, ParserKind(_one(name))
    raise InvalidRequest(f"'tool_choice' names '{name}', which is not in 'tools'", param="tool_choice")


def require_any_call(tools: Tools, *, parallel: bool) -> tuple[dict[str, Any], ParserKind]:
    """Return the constraint that makes the output a call of any of `tools`, or several calls if `parallel`, and its parser."""
    definitions: dict[str, Any] = {}
    calls = []
    for tool in tools:
        function = tool["function"]
        parameters = dict(function.get("parameters") or {"type": "object"})
        for key, definition in _definitions(parameters).items():
            if definitions.setdefault(key, definition) != definition:
                raise InvalidRequest(f"two tools define '{key}' in '$defs' differently", param="tools")
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"type": "string", "enum": [function["name"]]}, "parameters": parameters},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    if not parallel:
        schema["maxItems"] = 1
    if definitions:
        schema["$defs"] = definitions
    return {"json_schema": schema}, ParserKind(_any)


def _definitions(parameters: dict[str, Any]) -> Mapping[str, Any]:
    """Remove and return `$defs`: references to them start at the root of the whole schema, so they must move there."""
    definitions = parameters.pop("$defs", {})
    return definitions if isinstance(definitions, dict) else {}


def _one(name: str) -> Any:
    def make(tools: Tools) -> OutputParser:
        return NamedCallParser(name)

    return make


def _any(tools: Tools) -> OutputParser:
    return AnyCallsParser()
