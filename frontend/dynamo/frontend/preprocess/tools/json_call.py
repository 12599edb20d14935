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
from dynamo.frontend.preprocess.tools.reader import MAX_NAME_CHARS, MAX_SCANNED_CHARS, PartBuffer

_STRING = r'"(?:[^"\\]|\\.)*"'
_HEAD = re.compile(
    rf'\s*\{{\s*(?:"(?:type|id)"\s*:\s*{_STRING}\s*,\s*)*'
    rf'"name"\s*:\s*({_STRING})\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{{)'
)


class JsonEnd:
    """Finds the end of a JSON object or array; does not validate it otherwise.

    A marker outside of strings ends the search. So of two texts that begin after different markers, the search in one ends where
    the next marker is in a string of the other: all searches in a text that is given back again and again pass it a few times.
    """

    def __init__(self, markers: Markers, *, in_object: bool = False) -> None:
        """`markers` cannot occur in JSON except in its strings. `in_object`: the text begins in an object."""
        self._opened = ["{"] if in_object else []
        self._open_counts = {"{": 1 if in_object else 0, "[": 0}
        self._in_string = False
        self._escaped = False
        self._stops = _stops(markers)
        self.broken = False
        """The end is at a character that cannot be in JSON."""
        self.marker_in_string = -1
        """Index of the first marker in a string, in the text that was searched last; -1 if there is none."""

    def find(self, text: str, start: int, stop_at: int) -> int:
        """Return the index after the end; -1 if it is not before `stop_at`, where the next call goes on."""
        self.marker_in_string = -1
        position = start
        if self._escaped and position < stop_at:
            self._escaped = False
            position += 1
        while stop := self._stops[self._in_string].search(text, position, stop_at):
            position = stop.end()
            match stop.group():
                case '"':
                    self._in_string = not self._in_string
                case "\\" if self._in_string:
                    self._escaped = position == stop_at
                    position += 1
                case "{" | "[" as bracket:
                    self._opened.append(bracket)
                    self._open_counts[bracket] += 1
                case "}" | "]" as bracket:
                    self._close("{" if bracket == "}" else "[")
                    if not self._opened:
                        return position
                case _ if self._in_string:
                    if self.marker_in_string < 0:
                        self.marker_in_string = stop.start()
                case _:
                    self.broken = True
                    return stop.start()
        return -1

    def _close(self, bracket: str) -> None:
        """Close the innermost such bracket, and the ones inside it, which models sometimes forget."""
        if not self._open_counts[bracket]:
            return
        closed = ""
        while closed != bracket:
            closed = self._opened.pop()
            self._open_counts[closed] -= 1


@cache
def _stops(markers: Markers) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Return patterns for the characters that matter outside of strings, and inside."""
    return re.compile(markers.pattern + r"|[^\s\w+\-.,:]"), re.compile(markers.pattern + r'|["\\]')


@dataclass(frozen=True, slots=True)
class ArgumentsEnd:
    """Where the arguments of a call ended."""

    rest: str
    """The text after them."""
    complete: bool
    """Whether their brackets are balanced."""


class Arguments:
    """Streams the JSON of a call's arguments.

    A marker in a string is either text or a sign that the string was not closed. So text from there on is held until the JSON
    ends; if it does not, the call ended at the marker.
    """

    def __init__(self, parts: PartBuffer, markers: Markers) -> None:
        self._parts = parts
        self._markers = markers
        self._end = JsonEnd(markers)
        self._uncertain = ""
        """Text that may be the beginning of a marker."""
        self._waiting = ""

    def read(self, text: str, *, ended: bool) -> ArgumentsEnd | None:
        """Read more text; return None until the arguments end. `ended`: this is the last text."""
        text = self._uncertain + text
        certain = len(text) if ended else self._markers.certain(text)
        text, self._uncertain = text[:certain], text[certain:]
        end = self._end.find(text, 0, len(text))
        if end >= 0 and not self._end.broken:
            self._parts.arguments(self._waiting + text[:end])
            return ArgumentsEnd(text[end:] + self._uncertain, complete=True)
        marker = 0 if self._waiting else self._end.marker_in_string
        text = self._waiting + text
        if marker < 0:
            marker = end if end >= 0 else len(text)
        elif end < 0 and len(text) - marker > MAX_SCANNED_CHARS:
            marker = len(text)  # too long to hold back: treat it as text
        self._parts.arguments(text[:marker])
        self._waiting = text[marker:]
        return ArgumentsEnd(self._waiting + self._uncertain, complete=False) if end >= 0 or ended else None


class ReadStatus(Enum):
    MORE = auto()
    """All of the text was consumed, and more is needed."""
    CALL = auto()
    """A call was read."""
    NO_CALL = auto()
    """This is not a call, and nothing of it was consumed."""


class JsonCallReader:
    """Reads one call. Its arguments are streamed if they follow its name; else the call is returned at once."""

    def __init__(self, parts: PartBuffer, markers: Markers, accepts: Callable[[str], bool] = bool) -> None:
        """`markers` are the ones around calls. `accepts` returns whether a tool has that name."""
        self._parts = parts
        self._markers = markers
        self._accepts = accepts
        self._held = ""
        self._end = JsonEnd(markers)
        self._scanned = 0
        self._arguments: Arguments | None = None
        self._tail = ""
        self._is_tail = False

    def read(self, text: str, *, ended: bool = False) -> tuple[ReadStatus, str]:
        """Read more text; return the status and the text that is left. `ended`: this is the last text."""
        if self._is_tail:
            return self._read_tail(text, ended)
        if self._arguments is not None:
            return self._read_arguments(self._arguments, text, ended)
        self._held += text
        return self._read_head(ended)

    def _read_head(self, ended: bool) -> tuple[ReadStatus, str]:
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
        size = len(self._held)
        end = self._end.find(self._held, self._scanned, size)
        self._scanned = size
        if end < 0 and not ended and size <= MAX_SCANNED_CHARS:
            return ReadStatus.MORE, ""
        call = None if end < 0 or end > MAX_SCANNED_CHARS or self._end.broken else _whole_call(self._held[:end])
        if call is None or not self._accepts(call[0]):
            return self._no_call()
        self._parts.call(*call)
        return ReadStatus.CALL, self._held[end:]

    def _read_arguments(self, arguments: Arguments, text: str, ended: bool) -> tuple[ReadStatus, str]:
        end = arguments.read(text, ended=ended)
        if end is None:
            return ReadStatus.MORE, ""
        if not end.complete:
            return ReadStatus.CALL, end.rest
        self._is_tail = True
        self._end = JsonEnd(self._markers, in_object=True)
        self._scanned = 0
        return self._read_tail(end.rest, ended)

    def _read_tail(self, text: str, ended: bool) -> tuple[ReadStatus, str]:
        """Read the rest of the object: usually its brace, which may be missing; sometimes more fields, which are ignored."""
        self._tail += text
        start = self._tail.lstrip()
        if start and start[0] not in ",}":
            return ReadStatus.CALL, self._tail
        certain = len(self._tail) if ended else self._markers.certain(self._tail)
        end = self._end.find(self._tail, self._scanned, certain)
        self._scanned = certain
        if end >= 0 and not self._end.broken:
            return ReadStatus.CALL, self._tail[end:]
        if end >= 0 or ended or len(self._tail) > MAX_SCANNED_CHARS:
            return ReadStatus.CALL, self._tail
        return ReadStatus.MORE, ""

    def _no_call(self) -> tuple[ReadStatus, str]:
        return ReadStatus.NO_CALL, self._held


def _string(text: str) -> str:
    """Decode a JSON string; "" if it is invalid."""
    try:
        return msgspec.json.decode(text, type=str)
    except msgspec.MsgspecError:
        return ""


def _whole_call(text: str) -> tuple[str, str] | None:
    """Return the name and arguments of a call; None if `text` is not one."""
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
