"""Calls written as a JSON object: `{"name": "f", "arguments": {…}}`, or with `parameters`."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from functools import cache
from typing import Any

import msgspec

from dynamo.frontend.preprocess.tools.markers import Markers
from dynamo.frontend.preprocess.tools.reader import MAX_HELD_CHARS, MAX_NAME_CHARS, Parts

_STRING = r'"(?:[^"\\]|\\.)*"'
_HEAD = re.compile(
    rf'\s*\{{\s*(?:"(?:type|id)"\s*:\s*{_STRING}\s*,\s*)*'
    rf'"name"\s*:\s*({_STRING})\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{{)'
)


class JsonEnd:
    """Finds where a JSON object or array ends. It is not checked further than that takes."""

    def __init__(self, opened: str = "", markers: Markers | None = None) -> None:
        """`opened`: the brackets that are open already. `markers` are no JSON, but may be text in its strings."""
        self._opened = list(opened)
        self._in_string = False
        self._escaped = False
        self._stops = _stops(markers)
        self.broken = False
        """What is at the end that was found cannot be in JSON."""
        self.marker_in_string = -1
        """Where, in the text that was searched last, the first marker in a string is."""

    def find(self, text: str, start: int = 0) -> int:
        """The index behind the end; -1 if it is not in `text`, of which the next call's text is the continuation."""
        self.marker_in_string = -1
        at = start
        if self._escaped and at < len(text):
            self._escaped = False
            at += 1
        while found := self._stops[self._in_string].search(text, at):
            at = found.end()
            match found.group():
                case '"':
                    self._in_string = not self._in_string
                case "\\" if self._in_string:
                    self._escaped = at == len(text)
                    at += 1
                case "{" | "[" as bracket:
                    self._opened.append(bracket)
                case "}" | "]" as bracket:
                    self._close("{" if bracket == "}" else "[")
                    if not self._opened:
                        return at
                case _ if self._in_string:
                    if self.marker_in_string < 0:
                        self.marker_in_string = found.start()
                case _:
                    self.broken = True
                    return found.start()
        return -1

    def _close(self, bracket: str) -> None:
        """Closes the innermost such bracket, and those in it, which models forget."""
        if bracket in self._opened:
            while self._opened.pop() != bracket:
                pass


@cache
def _stops(markers: Markers | None) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """What JsonEnd has to look at, outside of strings and in them."""
    own = "" if markers is None else f"{markers.pattern}|"
    return re.compile(own + r"[^\s\w+\-.,:]"), re.compile(own + r'["\\]')


@dataclass(frozen=True, slots=True)
class Over:
    """The arguments have ended."""

    rest: str
    """The text behind them."""
    complete: bool
    """They are whole, as far as JsonEnd looks."""


class Arguments:
    """Reads the JSON of a call's arguments and gives it as it comes.

    A marker in a string is text of it, or else the string was not closed. So what comes from there on waits for the JSON's end;
    if that does not come, the call has ended at the marker.
    """

    def __init__(self, parts: Parts, markers: Markers) -> None:
        self._parts = parts
        self._markers = markers
        self._end = JsonEnd(markers=markers)
        self._uncertain = ""
        """Perhaps the beginning of a marker."""
        self._waiting = ""

    def read(self, text: str, *, ended: bool) -> Over | None:
        """None if more is needed. `ended`: no more will come."""
        text = self._uncertain + text
        certain = len(text) if ended else self._markers.certain(text)
        text, self._uncertain = text[:certain], text[certain:]
        end = self._end.find(text)
        if end >= 0 and not self._end.broken:
            self._parts.arguments(self._waiting + text[:end])
            return Over(text[end:] + self._uncertain, complete=True)
        marker = 0 if self._waiting else self._end.marker_in_string
        text = self._waiting + text
        if marker < 0:
            marker = end if end >= 0 else len(text)
        elif end < 0 and len(text) - marker > MAX_HELD_CHARS:
            marker = len(text)  # so long a text is one
        self._parts.arguments(text[:marker])
        self._waiting = text[marker:]
        return Over(self._waiting + self._uncertain, complete=False) if end >= 0 or ended else None


class Read(Enum):
    MORE = auto()
    """All of the text was taken, and more is needed."""
    CALL = auto()
    """A call was read."""
    NO_CALL = auto()
    """This is no call, and nothing of it was taken."""


class JsonCallReader:
    """Reads one call. Its arguments are given as they come, if they come after its name; else all of it at once."""

    def __init__(self, parts: Parts, markers: Markers, accepts: Callable[[str], bool] = bool) -> None:
        """`markers` are those around calls. `accepts` says whether a tool may be called so."""
        self._parts = parts
        self._markers = markers
        self._accepts = accepts
        self._held = ""
        self._end = JsonEnd()
        self._scanned = 0
        self._arguments: Arguments | None = None
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
            self._arguments = Arguments(self._parts, self._markers)
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

    def _read_arguments(self, arguments: Arguments, text: str, ended: bool) -> tuple[Read, str]:
        over = arguments.read(text, ended=ended)
        if over is None:
            return Read.MORE, ""
        if not over.complete:
            return Read.CALL, over.rest
        self._is_tail = True
        self._end = JsonEnd("{")
        self._scanned = 0
        return self._read_tail(over.rest, ended)

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
