"""DeepSeek V3, R1 and V3.1, all inside of `<｜tool▁calls▁begin｜>…<｜tool▁calls▁end｜>`.

V3 and R1 write a call as the type `function`, the name and the arguments in a fenced block, V3.1 as name and arguments:

    <｜tool▁call▁begin｜>function<｜tool▁sep｜>f⏎```json⏎{…}⏎```<｜tool▁call▁end｜>
    <｜tool▁call▁begin｜>f<｜tool▁sep｜>{…}<｜tool▁call▁end｜>
"""

from __future__ import annotations

import re

from dynamo.frontend.preprocess.parsers import Tools
from dynamo.frontend.preprocess.tools.markers import Markers
from dynamo.frontend.preprocess.tools.reader import MAX_NAME_CHARS, Reader

_CALLS, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_SEPARATOR = "<｜tool▁sep｜>"
_ALL = (_CALLS, _CALLS_END, _CALL, _CALL_END, _SEPARATOR, "<｜end▁of▁sentence｜>")
_MARKERS = Markers(*_ALL)
_FENCES = ("\n```", "\n```\n")
_FENCED = Markers(*_ALL, *(fence + marker for fence in _FENCES for marker in _ALL))
_FENCED_NAME = re.compile(r"\s*([^\s`{]+)[ \t]*\r?\n```(?:json)?[ \t]*\r?\n")


class DeepSeek(Reader):
    def __init__(self, tools: Tools) -> None:
        super().__init__(self._content)
        self._held = ""

    def _hold(self, text: str) -> None:
        self._held += text

    def _content(self) -> bool:
        marker = self._until(_MARKERS, self._parts.content)
        if marker == _CALL:
            self._held = ""
            self._step = self._head
        return bool(marker)

    def _head(self) -> bool:
        """Read up to the separator: the type or the name."""
        marker = self._until(_MARKERS, self._hold)
        if not marker and not self._ended and len(self._held) <= MAX_NAME_CHARS:
            return False
        head = self._held.strip()
        if marker == _SEPARATOR and head == "function":
            self._step = self._fenced_name
        elif marker == _SEPARATOR and head and len(self._held) <= MAX_NAME_CHARS:
            self._parts.call(head)
            self._step = self._arguments
        else:
            self._parts.content(self._held)
            self._text = marker + self._text
            self._step = self._content
        return True

    def _fenced_name(self) -> bool:
        marker = _MARKERS.search(self._text)
        text = self._text[: min(marker.start() if marker else MAX_NAME_CHARS, MAX_NAME_CHARS)]
        stripped = text.lstrip()
        if stripped.startswith("{"):  # V3.1 and a tool that is called `function`
            self._parts.call("function")
            self._step = self._arguments
        elif named := _FENCED_NAME.match(text):
            self._parts.call(named.group(1))
            self._text = self._text[named.end() :]
            self._step = self._arguments
        elif not self._ended and len(self._text) < MAX_NAME_CHARS and not marker:
            return False
        else:
            self._step = self._content
        return True

    def _arguments(self) -> bool:
        marker = self._until(_FENCED, self._parts.arguments)
        if marker:
            self._parts.call_complete()
            self._text = marker.lstrip("\n`") + self._text
            self._step = self._content
        return bool(marker)
