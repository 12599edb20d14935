"""Calls of a model whose chat template has no tools: `prompt` describes them, and this reads any usual form of a JSON call.

    <tool_call>{"name": "f", "arguments": {…}}</tool_call>

The object, or a list of them, may also stand at the beginning of the output, or in a fenced block, if it names an existing tool.
"""

from __future__ import annotations

from dynamo.frontend.preprocess.parsers import Tools
from dynamo.frontend.preprocess.tools.json_calls import JsonCalls, JsonFormat
from dynamo.frontend.preprocess.tools.names import tool_names
from dynamo.frontend.preprocess.tools.reader import MAX_NAME_CHARS

_FENCE = "```"
_FORM = JsonFormat.of("<tool_call>", closes=("</tool_call>",), in_text=("```json",))


class Generic(JsonCalls):
    def __init__(self, tools: Tools) -> None:
        super().__init__(_FORM, tool_names(tools).__contains__)
        self._is_fenced = False
        self._step = self._start

    def _start(self) -> bool:
        text = self._text.lstrip()
        if not text and not self._ended and len(self._text) <= MAX_NAME_CHARS:
            return False
        if text.startswith(("{", "[")):
            self._is_certain = False  # no marker
            self._step = self._first
        else:
            self._step = self._content
        return True

    def _open(self, marker: str) -> None:
        super()._open(marker)
        self._is_fenced = marker.startswith(_FENCE)

    def _next(self) -> bool:
        if self._is_fenced and self._strip():
            if not self._ended and len(self._text) < len(_FENCE) and _FENCE.startswith(self._text):
                return False
            if self._text.startswith(_FENCE):
                self._text = self._text.removeprefix(_FENCE)
                self._is_fenced = False
                self._step = self._content
                return True
        return super()._next()
