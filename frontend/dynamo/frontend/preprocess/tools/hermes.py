"""`<tool_call>{"name": "f", "arguments": {…}}</tool_call>`: Hermes, Qwen 2.5 and Qwen 3."""

from __future__ import annotations

from dynamo.frontend.preprocess.parsers import Tools
from dynamo.frontend.preprocess.tools.json_call import JsonCallReader, ReadStatus
from dynamo.frontend.preprocess.tools.markers import Markers
from dynamo.frontend.preprocess.tools.reader import Reader

_OPEN = "<tool_call>"
_MARKERS = Markers(_OPEN, "</tool_call>")


class Hermes(Reader):
    def __init__(self, tools: Tools) -> None:
        super().__init__(self._content)
        self._call = JsonCallReader(self._parts, _MARKERS)

    def _content(self) -> bool:
        marker = self._until(_MARKERS, self._parts.content)
        if marker == _OPEN:
            self._call = JsonCallReader(self._parts, _MARKERS)
            self._step = self._in_call
        return bool(marker)

    def _in_call(self) -> bool:
        text, self._text = self._text, ""
        read, self._text = self._call.read(text, ended=self._ended)
        if read is ReadStatus.MORE:
            return False
        self._step = self._content
        return True
