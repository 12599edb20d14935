"""What parsers of model output have in common: a text that is read step by step, and the parts that come of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from dynamo.frontend.preprocess.parsers import Content, Part, Reasoning, ToolCall
from dynamo.frontend.preprocess.tools.markers import Markers

MAX_HELD_CHARS = 256 * 1024
"""How much text may wait for what follows it."""
MAX_NAME_CHARS = 1024
"""The same for names and what is around them."""
_MAX_LAYOUT_CHARS = 64

Step: TypeAlias = Callable[[], bool]
"""Reads some of the text, or goes over to another step; False if that takes more text."""


class Parts:
    """Collects parts; leaves out white space that is only layout around calls."""

    def __init__(self) -> None:
        self._parts: list[Part] = []
        self._calls = 0
        self._has_arguments = True
        self._layout = ""
        self._is_layout = True
        """Nothing but white space since the beginning or the last call."""

    def content(self, text: str) -> None:
        if self._is_layout:
            self._layout += text
            if not self._layout.strip() and len(self._layout) <= _MAX_LAYOUT_CHARS:
                return
            text, self._layout = self._layout, ""
            self._is_layout = False
        if text:
            self._parts.append(Content(text))

    def reasoning(self, text: str) -> None:
        if text:
            self._parts.append(Reasoning(text))

    def call(self, name: str, arguments: str = "") -> None:
        """Begins the next call."""
        self._layout, self._is_layout = "", True
        self._parts.append(ToolCall(self._calls, name, arguments))
        self._calls += 1
        self._has_arguments = bool(arguments)

    def arguments(self, text: str) -> None:
        """More of the last call's arguments."""
        if not self._has_arguments:
            text = text.lstrip()
        if text:
            self._parts.append(ToolCall(self._calls - 1, arguments=text))
            self._has_arguments = True

    def call_complete(self) -> None:
        """The last call has all its arguments; none are an empty object."""
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
    """An OutputParser as a chain of steps, each of which names the next."""

    def __init__(self, first: Step) -> None:
        self._text = ""
        """What no step has read yet."""
        self._parts = Parts()
        self._step = first
        self._ended = False

    def feed(self, text: str) -> Sequence[Part]:
        self._text += text
        while self._step():
            pass
        return self._parts.take()

    def finish(self) -> Sequence[Part]:
        self._ended = True
        while self._step():
            pass
        self._parts.end()
        return self._parts.take()

    def _until(self, markers: Markers, give: Callable[[str], None]) -> str:
        """Gives all text that is certainly before a marker. Takes the marker off and returns it; empty while there is none."""
        text = self._text
        found = markers.search(text)
        if found is not None:
            before, self._text = text[: found.start()], text[found.end() :]
            marker = found.group()
        else:
            certain = len(text) if self._ended else markers.certain(text)
            before, self._text = text[:certain], text[certain:]
            marker = ""
        if before:
            give(before)
        return marker

    def _strip(self, characters: str | None = None) -> bool:
        """Takes white space off the text's beginning; whether anything is left."""
        self._text = self._text.lstrip(characters)
        return bool(self._text)
