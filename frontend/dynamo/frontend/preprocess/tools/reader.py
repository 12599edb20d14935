"""The base of output parsers: a state machine that reads text step by step and collects parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from dynamo.frontend.preprocess.parsers import Content, Part, Reasoning, ToolCall
from dynamo.frontend.preprocess.tools.markers import Markers

MAX_HELD_CHARS = 256 * 1024
"""Most text that is held back for what follows it."""
MAX_NAME_CHARS = 1024
"""Most text that is held back for a name and what is around it."""
MAX_SCANNED_CHARS = 32 * 1024
"""Most text that is held back for the end of its JSON. If no call ends there, it is all read again in one turn of the event loop,
which takes 22 ms if it consists of short calls, their events included (2026-11-26, one core at 2.6 GHz)."""
_PIECE_CHARS = 4096
"""Text that is given back is read again in pieces: a marker in a piece copies the rest of the piece."""
_BRIEF_CHARS = 1024
"""Content up to this length is joined with the content before."""
_MAX_LAYOUT_CHARS = 64

Step: TypeAlias = Callable[[], bool]
"""Consumes some of the text or changes the step; returns False if it needs more text."""


class PartBuffer:
    """Collects parts; drops white space that only separates calls."""

    def __init__(self) -> None:
        self._parts: list[Part] = []
        self._calls = 0
        self._has_arguments = True
        self._layout = ""
        self._is_layout = True
        """There was only white space since the beginning or the last call."""

    def content(self, text: str) -> None:
        if self._is_layout:
            self._layout += text
            if not self._layout.strip() and len(self._layout) <= _MAX_LAYOUT_CHARS:
                return
            text, self._layout = self._layout, ""
            self._is_layout = False
        if not text:
            return
        if self._parts and isinstance(last := self._parts[-1], Content) and len(last.text) <= _BRIEF_CHARS:
            self._parts[-1] = Content(last.text + text)
        else:
            self._parts.append(Content(text))

    def reasoning(self, text: str) -> None:
        if text:
            self._parts.append(Reasoning(text))

    def call(self, name: str, arguments: str = "") -> None:
        """Start the next call."""
        self._layout, self._is_layout = "", True
        self._parts.append(ToolCall(self._calls, name, arguments))
        self._calls += 1
        self._has_arguments = bool(arguments)

    def arguments(self, text: str) -> None:
        """Add to the last call's arguments."""
        if not self._has_arguments:
            text = text.lstrip()
        if text:
            self._parts.append(ToolCall(self._calls - 1, arguments=text))
            self._has_arguments = True

    def call_complete(self) -> None:
        """End the last call; without arguments, they are an empty object."""
        if not self._has_arguments:
            self.arguments("{}")

    def end(self) -> None:
        if self._layout and not self._calls:
            self._parts.append(Content(self._layout))
        self._layout = ""

    def take(self) -> Sequence[Part]:
        parts, self._parts = self._parts, []
        return parts


class Reader:
    """An OutputParser as a state machine: each step chooses the next."""

    def __init__(self, first: Step) -> None:
        self._text = ""
        """Text that no step has consumed."""
        self._parts = PartBuffer()
        self._step = first
        self._ended = False
        """What is in `_text` is the last of the text."""

    def feed(self, text: str) -> Sequence[Part]:
        self._text += text
        while self._step():
            if len(self._text) > _PIECE_CHARS:
                self._read_in_pieces(is_last=False)
        return self._parts.take()

    def finish(self) -> Sequence[Part]:
        self._ended = True
        while self._step():
            if len(self._text) > _PIECE_CHARS:
                self._read_in_pieces(is_last=True)
        self._parts.end()
        return self._parts.take()

    def _read_in_pieces(self, *, is_last: bool) -> None:
        """Read text that is long after a step as if it came piece by piece."""
        later = self._split()
        while True:
            if self._step():
                if len(self._text) > _PIECE_CHARS:
                    later += self._split()
            elif later:
                self._text += later.pop()
                self._ended = is_last and not later
            else:
                return

    def _split(self) -> list[str]:
        """Keep one piece of the text, and return the others, the last one first."""
        text, self._text = self._text, self._text[:_PIECE_CHARS]
        self._ended = False
        return [text[start : start + _PIECE_CHARS] for start in range(_PIECE_CHARS, len(text), _PIECE_CHARS)][::-1]

    def _until(self, markers: Markers, give: Callable[[str], None]) -> str:
        """Pass text before the next marker to `give`; consume the marker and return it, or "" while there is none."""
        text = self._text
        match = markers.search(text)
        if match is not None:
            before, self._text = text[: match.start()], text[match.end() :]
            marker = match.group()
        else:
            certain = len(text) if self._ended else markers.certain(text)
            before, self._text = text[:certain], text[certain:]
            marker = ""
        if before:
            give(before)
        return marker

    def _strip(self) -> bool:
        """Strip white space from the beginning of the text; return whether anything is left."""
        self._text = self._text.lstrip()
        return bool(self._text)
