"""Calls written as tags, with one tag for each argument."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from dynamo.frontend.preprocess.parsers import Tools
from dynamo.frontend.preprocess.tools.markers import Markers
from dynamo.frontend.preprocess.tools.names import parameters_of
from dynamo.frontend.preprocess.tools.reader import MAX_HELD_CHARS, MAX_NAME_CHARS, Reader

_STRING = "string"
_STRINGS = frozenset({_STRING})
_ANY = frozenset({_STRING, "integer", "number", "boolean", "array", "object", "null"})
_MAX_SCHEMAS = 1000
"""Most schemas, one inside of another by `anyOf` and `oneOf`, that are looked through for the types of a parameter."""
_NAME = re.compile(r"""(["']?)(.+?)\1(?:(?<!\s)\s++string=["'](true|false)["'])?""")
"""A name, and what DeepSeek writes after that of an argument: whether the value is a string."""


@dataclass(frozen=True, slots=True)
class XmlFormat:
    """The tags of one format."""

    section: tuple[str, str]
    """Around one call or several; dropped."""
    call: tuple[str, str]
    """Before the name of a tool, and after its last argument."""
    parameter: tuple[str, str]
    """Before the name of an argument, and after its value."""
    name_ends: tuple[str, ...] = (">",)
    """After the name of a tool. Tags that belong to what follows stay."""
    parameter_name_ends: tuple[str, ...] = (">",)
    """Between the name of an argument and its value."""
    has_newlines: bool = False
    """A newline after the opening tag of a value, and one before its closing tag, belong to the tags."""


class _XmlMarkers:
    """The markers of a format, by where they can stand."""

    def __init__(self, form: XmlFormat) -> None:
        self.form = form
        self.content = Markers(*dict.fromkeys((*form.section, *form.call)))
        self.name_end = _name_end(form.name_ends)
        self.parameter_name_end = _name_end(form.parameter_name_ends)
        self.following = frozenset((form.call[1], form.parameter[0]))
        self.inside = Markers(*dict.fromkeys((*form.parameter, form.call[1], form.section[1])))
        self.value = Markers(form.parameter[1], form.parameter[0], form.call[1])


def _name_end(ends: tuple[str, ...]) -> Markers:
    """Return the markers after a name, and what shows that it is not one."""
    return Markers(*ends) if any(end.startswith("<") for end in ends) else Markers(*ends, "<", "\n")


def xml_calls(form: XmlFormat) -> Callable[[Tools], XmlCalls]:
    """Return a function that makes parsers for a format."""
    tags = _XmlMarkers(form)
    return lambda tools: XmlCalls(tools, tags)


class XmlCalls(Reader):
    """Strings are streamed, other values are returned when they are complete.

    A value has the type of the tool's schema: a string if the schema has none, or one that the value does not match.
    """

    def __init__(self, tools: Tools, tags: _XmlMarkers) -> None:
        super().__init__(self._content)
        self._tools = tools
        self._tags = tags
        self._form = tags.form
        self._schemas: Mapping[str, Any] = {}
        self._types: frozenset[str] = frozenset()
        self._parameters = 0
        self._held = ""
        self._stray = ""
        """Text between a call's tags, where none belongs; it becomes content after the call."""
        self._is_value_begun = False

    def _content(self) -> bool:
        marker = self._until(self._tags.content, self._parts.content)
        if marker == self._form.call[0]:
            self._begin_name(is_function=True)
        elif marker == self._form.section[0]:
            self._step = self._opened
        return bool(marker)

    def _opened(self) -> bool:
        """Skip white space between the two opening tags."""
        opening = self._form.call[0]
        stripped = self._text[:MAX_NAME_CHARS].lstrip()
        is_near = len(self._text) < MAX_NAME_CHARS
        if is_near and not self._ended and len(stripped) < len(opening) and opening.startswith(stripped):
            return False
        if stripped.startswith(opening):
            self._text = self._text.lstrip()
        self._step = self._content
        return True

    def _begin_name(self, *, is_function: bool) -> None:
        self._held = ""
        self._step = self._function_name if is_function else self._parameter_name

    def _hold(self, text: str) -> None:
        self._held += text

    def _name(self, markers: Markers, ends: tuple[str, ...]) -> str | None:
        """Return the text of a name; "" if it is not a name, None while it is incomplete."""
        if not self._held.strip():
            stripped = self._text.lstrip()
            self._held += self._text[: len(self._text) - len(stripped)]
            self._text = stripped
        marker = self._until(markers, self._hold)
        if not marker and not self._ended and len(self._held) <= MAX_NAME_CHARS:
            return None
        name = self._held.strip()
        if marker in ends and name and len(self._held) <= MAX_NAME_CHARS:
            self._text = (marker if marker in self._tags.following else "") + self._text
            return name
        self._text = self._held + marker + self._text
        return ""

    def _function_name(self) -> bool:
        text = self._name(self._tags.name_end, self._form.name_ends)
        if text is None:
            return False
        named = _NAME.fullmatch(text)
        name = named.group(2) if named is not None else ""
        if text and (not name or " " in name or name[0] in "{["):
            self._parts.content(self._held)
            name = ""
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
        marker = self._until(self._tags.inside, self._keep_stray)
        if marker == self._form.parameter[0]:
            self._begin_name(is_function=False)
        elif marker in (self._form.call[1], self._form.section[1]) or len(self._stray) > MAX_HELD_CHARS:
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
        text = self._name(self._tags.parameter_name_end, self._form.parameter_name_ends)
        if text is None:
            return False
        named = _NAME.fullmatch(text)
        if named is None:
            self._step = self._inside
            return True
        _, name, is_string = named.groups()
        self._types = _types(self._schemas.get(name)) if is_string is None else _STRINGS if is_string == "true" else _ANY
        self._parts.arguments(("," if self._parameters else "{") + _quoted(name) + ":")
        self._parameters += 1
        self._held = ""
        self._is_value_begun = False
        self._step = self._value
        return True

    def _value(self) -> bool:
        marker = self._until(self._tags.value, self._hold)
        if not self._is_value_begun:
            if not self._held and not marker:
                return False
            if self._form.has_newlines:
                self._held = self._held.removeprefix("\n")
            self._is_value_begun = True
            if self._types == _STRINGS:
                self._parts.arguments('"')
        if self._types == _STRINGS:
            self._give_string(is_complete=bool(marker))
        elif marker:
            self._parts.arguments(_json(self._without_newline(self._held), self._types))
        elif len(self._held) > MAX_HELD_CHARS:
            self._types = _STRINGS
            self._parts.arguments('"')
            return True
        elif self._ended:
            self._parts.arguments(self._held)
            self._held = ""
        if marker:
            if marker != self._form.parameter[1]:
                self._text = marker + self._text
            self._step = self._inside
        return bool(marker)

    def _give_string(self, *, is_complete: bool) -> None:
        """Stream the value."""
        text = self._without_newline(self._held)
        self._held = "" if is_complete else self._held[len(text) :]
        self._parts.arguments(_quoted(text)[1:] if is_complete else _quoted(text)[1:-1])

    def _without_newline(self, text: str) -> str:
        return text.removesuffix("\n") if self._form.has_newlines else text


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _types(schema: object) -> frozenset[str]:
    """Return the JSON types that a schema allows; a string if it names none, and any type if it is too large."""
    types: set[str] = set()
    schemas = [schema]
    for count, schema in enumerate(schemas, 1):
        named, choices = (schema.get("type"), _choices(schema)) if isinstance(schema, Mapping) else (None, None)
        if max(len(named) if isinstance(named, list) else 0, count + len(choices or ())) > _MAX_SCHEMAS:
            return _ANY
        own = [name for name in (named if isinstance(named, list) else [named]) if isinstance(name, str)]
        if own or isinstance(named, list) or not choices:
            types.update(own or _STRINGS)
        else:
            schemas += choices
    return frozenset(types)


def _choices(schema: Mapping[str, Any]) -> list[object] | None:
    choices = schema.get("anyOf", schema.get("oneOf"))
    return choices if isinstance(choices, list) else None


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
