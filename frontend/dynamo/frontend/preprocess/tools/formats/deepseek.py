"""DeepSeek V3, R1 and V3.1, all inside of `<｜tool▁calls▁begin｜>…<｜tool▁calls▁end｜>`.

V3 and R1 write a call as the type `function`, the name and the arguments in a fenced block, V3.1 as name and arguments:

    <｜tool▁call▁begin｜>function<｜tool▁sep｜>f⏎```json⏎{…}⏎```<｜tool▁call▁end｜>
    <｜tool▁call▁begin｜>f<｜tool▁sep｜>{…}<｜tool▁call▁end｜>
"""

from __future__ import annotations

import re

from dynamo.frontend.preprocess.parsers import Tools
from dynamo.frontend.preprocess.tools.marked_calls import MarkedCalls, MarkedFormat
from dynamo.frontend.preprocess.tools.markers import Markers
from dynamo.frontend.preprocess.tools.reader import MAX_NAME_CHARS

_CALLS, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_SEPARATOR = "<｜tool▁sep｜>"
_ALL = (_CALLS, _CALLS_END, _CALL, _CALL_END, _SEPARATOR, "<｜end▁of▁sentence｜>")
_FENCES = ("\n```", "\n```\n")
_FENCED = Markers(*_ALL, *(fence + marker for fence in _FENCES for marker in _ALL))
_FENCED_NAME = re.compile(r"\s*+([^\s`{]++)[ \t]*+\r?\n```(?:json)?[ \t]*+\r?\n")


_FORM = MarkedFormat(_CALL, _SEPARATOR, Markers(*_ALL))


class DeepSeek(MarkedCalls):
    def __init__(self, tools: Tools) -> None:
        super().__init__(_FORM)

    def _begin_call(self, head: str) -> None:
        if head == "function":
            self._step = self._fenced_name
        else:
            super()._begin_call(head)

    def _fenced_name(self) -> bool:
        marker = _FORM.markers.search(self._text)
        text = self._text[: min(marker.start() if marker else MAX_NAME_CHARS, MAX_NAME_CHARS)]
        if text.lstrip().startswith("{"):  # V3.1 and a tool that is called `function`
            super()._begin_call("function")
        elif named := _FENCED_NAME.match(text):
            self._text = self._text[named.end() :]
            super()._begin_call(named.group(1))
        elif not self._ended and len(self._text) < MAX_NAME_CHARS and not marker:
            return False
        else:
            self._step = self._content
        return True

    def _arguments(self) -> bool:
        return self._arguments_until(_FENCED)
