"""Calls written as a JSON object: `{"name": "f", "arguments": {…}}`, or with `parameters`."""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import Enum, auto
from typing import Any

import msgspec

from dynamo.frontend.preprocess.tools.reader import MAX_HELD_CHARS, MAX_NAME_CHARS, Parts

_IN_STRING = re.compile(r'["\\]')
_OUTSIDE = re.compile(r"[^\s\w+\-.,:]")
_STRING = r'"(?:[^"\\]|\\.)*"'
_HEAD = re.compile(
    rf'\s*\{{\s*(?:"(?:type|id)"\s*:\s*{_STRING}\s*,\s*)*'
    rf'"name"\s*:\s*({_STRING})\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{{)'
)


class JsonEnd:
    """Finds where a JSON object or array ends. It is not checked further than that takes."""

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._in_string = False
        self._escaped = False
        self.broken = False
        """The character at the end that was found cannot be in JSON."""

    def find(self, text: str, start: int = 0) -> int:
        """The index behind the end; -1 if it is not in `text`, of which the next call's text is the continuation."""
        at = start
        if self._escaped and at < len(text):
            self._escaped = False
            at += 1
        while found := (_IN_STRING if self._in_string else _OUTSIDE).search(text, at):
            at = found.end()
            match found.group():
                case '"':
                    self._in_string = not self._in_string
                case "\\" if self._in_string:
                    self._escaped = at == len(text)
                    at += 1
                case "{" | "[":
                    self._depth += 1
                case "}" | "]":
                    self._depth -= 1
                    if self._depth <= 0:
                        return at
                case _:
                    self.broken = True
                    return found.start()
        return -1


class Read(Enum):
    MORE = auto()
    """All of the text was taken, and more is needed."""
    CALL = auto()
    """A call was read."""
    NO_CALL = auto()
    """This is no call, and nothing of it was taken."""


class JsonCallReader:
    """Reads one call. Its arguments are given as they come, if they come after its name; else all of it at once."""

    def __init__(self, parts: Parts, accepts: Callable[[str], bool] = bool) -> None:
        """`accepts` says whether a tool may be called so."""
        self._parts = parts
        self._accepts = accepts
        self._held = ""
        self._end = JsonEnd()
        self._scanned = 0
        self._arguments: JsonEnd | None = None
        self._tail = ""
        self._is_tail = False

    def read(self, text: str, *, ended: bool = False) -> tuple[Read, str]:
        """What came of it, and the text that is left. `ended`: no more will come."""
        if self._is_tail:
            return self._read_tail(text, ended)
        if self._arguments is not None:
            return self._read_arguments(self._arguments, text, ended)
        self._held += text
        return self._read_head(ended)

    def _read_head(self, ended: bool) -> tuple[Read, str]:
        start = self._held.lstrip()
        if start and start[0] != "{":
            return self._no_call()
        head = _HEAD.match(self._held, 0, MAX_NAME_CHARS)
        if head is not None:
            name = _string(head.group(1))
            if not self._accepts(name):
                return self._no_call()
            rest = self._held[head.end() :]
            self._held = ""
            self._parts.call(name)
            self._arguments = JsonEnd()
            return self._read_arguments(self._arguments, rest, ended)
        end = self._end.find(self._held, self._scanned)
        self._scanned = len(self._held)
        if end < 0 and not ended and len(self._held) <= MAX_HELD_CHARS:
            return Read.MORE, ""
        call = None if end < 0 or end > MAX_HELD_CHARS or self._end.broken else _whole_call(self._held[:end])
        if call is None or not self._accepts(call[0]):
            return self._no_call()
        self._parts.call(*call)
        return Read.CALL, self._held[end:]

    def _read_arguments(self, scan: JsonEnd, text: str, ended: bool) -> tuple[Read, str]:
        end = scan.find(text)
        if end < 0:
            self._parts.arguments(text)
            return (Read.CALL if ended else Read.MORE), ""
        self._parts.arguments(text[:end])
        if scan.broken:
            return Read.CALL, text[end:]
        self._is_tail = True
        self._end = JsonEnd(depth=1)
        self._scanned = 0
        return self._read_tail(text[end:], ended)

    def _read_tail(self, text: str, ended: bool) -> tuple[Read, str]:
        """The rest of the object: usually its brace, which models forget; sometimes more fields, which say nothing."""
        self._tail += text
        start = self._tail.lstrip()
        if start and start[0] not in ",}":
            return Read.CALL, self._tail
        end = self._end.find(self._tail, self._scanned)
        self._scanned = len(self._tail)
        if end >= 0 and not self._end.broken:
            return Read.CALL, self._tail[end:]
        if end >= 0 or ended or len(self._tail) > MAX_HELD_CHARS:
            return Read.CALL, self._tail
        return Read.MORE, ""

    def _no_call(self) -> tuple[Read, str]:
        return Read.NO_CALL, self._held


def _string(text: str) -> str:
    """The string that a JSON string says; empty if it is none."""
    try:
        return msgspec.json.decode(text, type=str)
    except msgspec.MsgspecError:
        return ""


def _whole_call(text: str) -> tuple[str, str] | None:
    """Name and arguments."""
    try:
        call: dict[str, Any] = msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError):
        return None
    name = call.get("name")
    if not isinstance(name, str):
        return None
    arguments = call.get("arguments", call.get("parameters"))
    if isinstance(arguments, str):
        return (name, arguments) if _is_object(arguments) else None
    if arguments is None:
        return name, "{}"
    return (name, msgspec.json.encode(arguments).decode()) if isinstance(arguments, dict) else None


def _is_object(text: str) -> bool:
    try:
        return isinstance(msgspec.json.decode(text), dict)
    except (msgspec.MsgspecError, RecursionError):
        return False
