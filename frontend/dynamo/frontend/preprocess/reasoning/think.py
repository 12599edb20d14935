"""`<think>…</think>`: DeepSeek R1, Qwen 3 and many others."""

from __future__ import annotations

from dynamo.frontend.preprocess.parsers import Tools
from dynamo.frontend.preprocess.tools.markers import Markers
from dynamo.frontend.preprocess.tools.reader import Reader, Step

_OPEN = "<think>"
_CLOSE = "</think>"
_CLOSING = Markers(_CLOSE)
_MAX_NEWLINES = 2
"""Newlines next to a tag that belong to it, as chat templates write them."""
_MAX_LAYOUT_CHARS = 64
"""Most white space before the opening tag."""


def think(tools: Tools, prompt_end: str = "", *, is_open: bool) -> Think:
    """Return a parser for the text after `prompt_end`, whose chat template may have opened or closed the reasoning."""
    before = prompt_end.rstrip()
    return Think(tools, is_open=before.endswith(_OPEN) or (is_open and not before.endswith(_CLOSE)))


class Think(Reader):
    """The text up to the closing tag, or all of it without one, is reasoning. Later tags are content."""

    def __init__(self, tools: Tools, *, is_open: bool) -> None:
        """`is_open`: the prompt contains the opening tag, or the model always reasons; an opening tag in the text is dropped."""
        super().__init__(self._beginning)
        self._is_open = is_open
        self._newlines = 0

    def _beginning(self) -> bool:
        start = self._text.lstrip()
        is_near = len(self._text) - len(start) <= _MAX_LAYOUT_CHARS
        if is_near and not self._ended and len(start) < len(_OPEN) and _OPEN.startswith(start):
            return False
        if is_near and start.startswith(_OPEN):
            self._text = start[len(_OPEN) :]
            self._is_open = True
        if self._is_open:
            self._begin(self._reasoning)
        else:
            self._step = self._unopened
        return True

    def _begin(self, step: Step) -> None:
        self._newlines = _MAX_NEWLINES
        self._step = step

    def _skip_newlines(self) -> None:
        while self._newlines and self._text:
            if self._text[0] != "\n":
                self._newlines = 0
                return
            self._text = self._text[1:]
            self._newlines -= 1

    def _reasoning(self) -> bool:
        self._skip_newlines()
        closing = _CLOSING.search(self._text)
        certain = closing.start() if closing else len(self._text) if self._ended else _CLOSING.certain(self._text)
        end = certain
        while (closing or not self._ended) and end and certain - end < _MAX_NEWLINES and self._text[end - 1] == "\n":
            end -= 1
        self._parts.reasoning(self._text[:end])
        self._text = self._text[closing.end() if closing else end :]
        if closing:
            self._begin(self._after_reasoning)
        return closing is not None

    def _after_reasoning(self) -> bool:
        self._skip_newlines()
        text, self._text = self._text, ""
        self._parts.content(text)
        return False

    def _unopened(self) -> bool:
        """Content without reasoning; a closing tag alone is dropped."""
        if self._until(_CLOSING, self._parts.content):
            self._begin(self._after_reasoning)
            return True
        return False
