"""Tool calls that `tool_choice` requires.

The output is constrained to a JSON schema made of the tools' parameters, so that JSON is all the parsers here read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dynamo.common.errors import InvalidRequest
from dynamo.frontend.preprocess.parsers import OutputParser, ParserKind, Part, ToolCall, Tools
from dynamo.frontend.preprocess.tools.json_calls import JsonCalls, JsonFormat

_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
_COMPOSING = frozenset({"allOf", "not", "if", "dependentSchemas", "patternProperties", "unevaluatedProperties", "$dynamicRef"})
_DEFINITIONS = ("$defs", "definitions")


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


class AnyCallsParser(JsonCalls):
    """Parses output that is a JSON array of calls. A call that was cut off keeps the arguments so far, or is lost without any."""

    def __init__(self) -> None:
        super().__init__(JsonFormat.of())
        self._step = self._first

    def finish(self) -> Sequence[Part]:
        parts = super().finish()
        return [part for part in parts if isinstance(part, ToolCall)] if self._in_list else parts


def require_named_call(name: str, tools: Tools) -> tuple[dict[str, Any], ParserKind]:
    """Return the constraint that makes the output a call of the tool `name`, and its parser. Raises InvalidRequest."""
    for tool in tools:
        if tool["function"]["name"] == name:
            return {"json_schema": _parameters(tool["function"])}, ParserKind(_one(name))
    raise InvalidRequest(f"'tool_choice' names '{name}', which is not in 'tools'", param="tool_choice")


def require_any_call(tools: Tools, *, parallel: bool) -> tuple[dict[str, Any], ParserKind]:
    """Return the constraint that makes the output a call of any of `tools`, or several calls if `parallel`, and its parser."""
    definitions: dict[str, dict[str, Any]] = {where: {} for where in _DEFINITIONS}
    calls = []
    for tool in tools:
        function = tool["function"]
        parameters = _parameters(function)
        for where in _DEFINITIONS:
            for key, definition in _taken(parameters, where).items():
                if definitions[where].setdefault(key, definition) != definition:
                    raise InvalidRequest(f"two tools define '{key}' in '{where}' differently", param="tools")
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
    schema |= {where: defined for where, defined in definitions.items() if defined}
    return {"json_schema": schema}, ParserKind(_any)


def _parameters(function: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a function's arguments: objects have no properties but those that it names, unless it says so."""
    schema = function.get("parameters") or _NO_PARAMETERS
    return dict(schema if _composes(schema) else _closed(schema))


def _composes(schema: object) -> bool:
    """Return whether an object may have to match several schemas, none of which names all of its properties."""
    if isinstance(schema, Mapping):
        return not _COMPOSING.isdisjoint(schema) or any(map(_composes, schema.values()))
    return isinstance(schema, list) and any(map(_composes, schema))


def _closed(schema: Any) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    closed = dict(schema)
    for name in ("properties", *_DEFINITIONS):
        if isinstance(inner := schema.get(name), Mapping):
            closed[name] = {key: _closed(value) for key, value in inner.items()}
    for name in ("anyOf", "oneOf", "prefixItems"):
        if isinstance(choices := schema.get(name), list):
            closed[name] = list(map(_closed, choices))
    if "items" in schema:
        closed["items"] = _closed(schema["items"])
    if schema.get("properties"):
        closed.setdefault("additionalProperties", False)
    return closed


def _taken(parameters: dict[str, Any], where: str) -> Mapping[str, Any]:
    """Remove and return definitions: references to them start at the root of the whole schema, so they must move there."""
    definitions = parameters.pop(where, {})
    return definitions if isinstance(definitions, dict) else {}


def _one(name: str) -> Any:
    def make(tools: Tools) -> OutputParser:
        return NamedCallParser(name)

    return make


def _any(tools: Tools) -> OutputParser:
    return AnyCallsParser()
