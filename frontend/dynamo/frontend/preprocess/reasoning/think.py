"""`<think>…</think>`: DeepSeek R1, Qwen 3 and many others."""

from __future__ import annotations

from dynamo.frontend.preprocess.parsers import Tools
from dynamo.frontend.preprocess.tools.markers import Markers
from dynamo.frontend.preprocess.tools.reader import Reader, Step

_OPEN = "<think>"
_CLOSE = "</think>"
_CLOSING = Markers(_CLOSE)
_MAX_NEWLINES = 2
"""So many next to a tag belong to it, as chat templates write them."""
_MAX_LAYOUT_CHARS = 64
"""White space there may be before the opening tag."""


def think(tools: Tools, prompt_end: str = "", *, is_open: bool) -> Think:
    """For an answer behind `prompt_end`, in which the chat template may have opened the thoughts, or closed them at once."""
    before = prompt_end.rstrip()
    return Think(tools, is_open=before.endswith(_OPEN) or (is_open and not before.endswith(_CLOSE)))


class Think(Reader):
    """The text up to the closing tag is reasoning: to the end, if there is none. Later tags are text of the answer."""

    def __init__(self, tools: Tools, *, is_open: bool) -> None:
        """`is_open`: the prompt has the opening tag, or the model always thinks; one that it writes all the same is left out."""
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
        found = _CLOSING.search(self._text)
        certain = found.start() if found else len(self._text) if self._ended else _CLOSING.certain(self._text)
        end = certain
        while (found or not self._ended) and end and certain - end < _MAX_NEWLINES and self._text[end - 1] == "\n":
            end -= 1
        self._parts.reasoning(self._text[:end])
        self._text = self._text[found.end() if found else end :]
        if found:
            self._begin(self._answer)
        return found is not None

    def _answer(self) -> bool:
        self._skip_newlines()
        text, self._text = self._text, ""
        self._parts.content(text)
        return False

    def _unopened(self) -> bool:
        """No thoughts; a closing tag alone is left out all the same."""
        if self._until(_CLOSING, self._parts.content):
            self._begin(self._answer)
            return True
        return False
