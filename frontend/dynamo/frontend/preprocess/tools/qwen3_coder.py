"""`<tool_call><function=f><parameter=a>1</parameter></function></tool_call>`: Qwen 3 Coder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from dynamo.frontend.preprocess.parsers import Tools
from dynamo.frontend.preprocess.tools.markers import Markers
from dynamo.frontend.preprocess.tools.names import parameters_of
from dynamo.frontend.preprocess.tools.reader import MAX_HELD_CHARS, MAX_NAME_CHARS, Reader

_OPEN, _FUNCTION, _PARAMETER = "<tool_call>", "<function=", "<parameter="
_CONTENT = Markers(_OPEN, "</tool_call>", _FUNCTION, "</function>")
_NAME_END = Markers(">", "<", "\n")
_INSIDE = Markers(_PARAMETER, "</parameter>", "</function>", "</tool_call>")
_VALUE = Markers("</parameter>", _PARAMETER, "</function>")
_STRING = "string"


class Qwen3Coder(Reader):
    """Strings are streamed, other values are returned when they are complete.

    A value has the type of the tool's schema: a string if the schema has none, or one that the value does not match.
    """

    def __init__(self, tools: Tools) -> None:
        super().__init__(self._content)
        self._tools = tools
        self._schemas: Mapping[str, Any] = {}
        self._types: frozenset[str] = frozenset()
        self._parameters = 0
        self._held = ""
        self._stray = ""
        """Text between a call's tags, where none belongs; it becomes content after the call."""
        self._is_value_begun = False

    def _content(self) -> bool:
        marker = self._until(_CONTENT, self._parts.content)
        if marker == _FUNCTION:
            self._begin_name(is_function=True)
        elif marker == _OPEN:
            self._step = self._opened
        return bool(marker)

    def _opened(self) -> bool:
        """Skip white space between the two opening tags."""
        stripped = self._text[:MAX_NAME_CHARS].lstrip()
        is_near = len(self._text) < MAX_NAME_CHARS
        if is_near and not self._ended and len(stripped) < len(_FUNCTION) and _FUNCTION.startswith(stripped):
            return False
        if stripped.startswith(_FUNCTION):
            self._text = self._text.lstrip()
        self._step = self._content
        return True

    def _begin_name(self, *, is_function: bool) -> None:
        self._held = ""
        self._step = self._function_name if is_function else self._parameter_name

    def _hold(self, text: str) -> None:
        self._held += text

    def _name(self) -> str | None:
        """Return the name in an open tag; "" if it is not a name, None while it is incomplete."""
        marker = self._until(_NAME_END, self._hold)
        if not marker and not self._ended and len(self._held) <= MAX_NAME_CHARS:
            return None
        name = self._held.strip()
        if marker == ">" and name and len(self._held) <= MAX_NAME_CHARS:
            return name
        self._text = self._held + marker + self._text
        return ""

    def _function_name(self) -> bool:
        name = self._name()
        if name is None:
            return False
        if name:
            self._parts.call(name)
            self._schemas = parameters_of(self._tools, name)
            self._parameters = 0
            self._stray = ""
        self._step = self._inside if name else self._content
        return True

    def _keep_stray(self, text: str) -> None:
        self._stray += text

    def _inside(self) -> bool:
        marker = self._until(_INSIDE, self._keep_stray)
        if marker == _PARAMETER:
            self._begin_name(is_function=False)
        elif marker in ("</function>", "</tool_call>") or len(self._stray) > MAX_HELD_CHARS:
            self._end_call()
        elif not marker:
            if self._ended and self._stray.strip():
                self._parts.content(self._stray)
                self._stray = ""
            return False
        return True

    def _end_call(self) -> None:
        self._parts.arguments("}" if self._parameters else "{}")
        if self._stray.strip():
            self._parts.content(self._stray)
        self._stray = ""
        self._step = self._content

    def _parameter_name(self) -> bool:
        name = self._name()
        if name is None:
            return False
        if not name:
            self._step = self._inside
            return True
        self._types = _types(self._schemas.get(name))
        self._parts.arguments(("," if self._parameters else "{") + _quoted(name) + ":")
        self._parameters += 1
        self._held = ""
        self._is_value_begun = False
        self._step = self._value
        return True

    def _value(self) -> bool:
        marker = self._until(_VALUE, self._hold)
        if not self._is_value_begun:
            if not self._held and not marker:
                return False
            self._held = self._held.removeprefix("\n")
            self._is_value_begun = True
            if self._types == {_STRING}:
                self._parts.arguments('"')
        if self._types == {_STRING}:
            self._give_string(is_complete=bool(marker))
        elif marker:
            self._parts.arguments(_json(self._held.removesuffix("\n"), self._types))
        elif len(self._held) > MAX_HELD_CHARS:
            self._types = frozenset({_STRING})
            self._parts.arguments('"')
            return True
        elif self._ended:
            self._parts.arguments(self._held)
            self._held = ""
        if marker:
            if marker != "</parameter>":
                self._text = marker + self._text
            self._step = self._inside
        return bool(marker)

    def _give_string(self, *, is_complete: bool) -> None:
        """Stream the value, without a newline at its end, which belongs to the closing tag."""
        text = self._held.removesuffix("\n")
        self._held = "" if is_complete else self._held[len(text) :]
        self._parts.arguments(_quoted(text)[1:] if is_complete else _quoted(text)[1:-1])


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _types(schema: object) -> frozenset[str]:
    """Return the JSON types that a schema allows; a string if it names none."""
    if not isinstance(schema, Mapping):
        return frozenset({_STRING})
    named = schema.get("type")
    if isinstance(named, str):
        return frozenset({named})
    if isinstance(named, list):
        return frozenset(name for name in named if isinstance(name, str)) or frozenset({_STRING})
    choices = schema.get("anyOf", schema.get("oneOf"))
    if isinstance(choices, list) and choices:
        return frozenset[str]().union(*(_types(choice) for choice in choices))
    return frozenset({_STRING})


def _json(text: str, types: frozenset[str]) -> str:
    """Return a value as JSON: as it is if it has one of `types`, else as a string."""
    stripped = text.strip()
    literal = {"True": "true", "False": "false", "None": "null"}.get(stripped, stripped)
    try:
        value = msgspec.json.decode(literal)
    except (msgspec.MsgspecError, RecursionError):
        return _quoted(text)
    return literal if _type_of(value) & types else _quoted(text)


def _type_of(value: object) -> frozenset[str]:
    match value:
        case bool():
            return frozenset({"boolean"})
        case int():
            return frozenset({"integer", "number"})
        case float():
            return frozenset({"number", "integer"} if value.is_integer() else {"number"})
        case list():
            return frozenset({"array"})
        case dict():
            return frozenset({"object"})
    return frozenset({"null"} if value is None else ())
