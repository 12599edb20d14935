"""`{"name": "f", "parameters": {…}}; {…}`, with or without `<|python_tag|>` before it: Llama 3."""

from __future__ import annotations

from dynamo.frontend.preprocess.parsers import Tools
from dynamo.frontend.preprocess.tools.json_call import JsonCallReader, ReadStatus
from dynamo.frontend.preprocess.tools.markers import Markers
from dynamo.frontend.preprocess.tools.names import tool_names
from dynamo.frontend.preprocess.tools.reader import MAX_NAME_CHARS, Reader

_TAG = "<|python_tag|>"
_MARKERS = Markers(_TAG, "<|eom_id|>", "<|eot_id|>")


class Llama3Json(Reader):
    """JSON is a call only at the beginning, after the tag or after another call, and only with the name of a tool.

    Anything else may be a response in JSON.
    """

    def __init__(self, tools: Tools) -> None:
        super().__init__(self._start)
        self._names = tool_names(tools)
        self._call = self._reader()
        self._is_after_call = False
        self._separator = ""
        """Text after a call, held until it is decided whether another call follows."""

    def _reader(self) -> JsonCallReader:
        return JsonCallReader(self._parts, _MARKERS, self._names.__contains__)

    def _start(self) -> bool:
        """Read text where a call may begin."""
        stripped = self._text.lstrip("; \t\r\n" if self._is_after_call else None)
        self._separator += self._text[: len(self._text) - len(stripped)]
        self._text = stripped
        if not stripped and not self._ended and len(self._separator) <= MAX_NAME_CHARS:
            return False
        if stripped.startswith("{") and len(self._separator) <= MAX_NAME_CHARS:
            self._call = self._reader()
            self._step = self._in_call
        else:
            self._to_content()
        return True

    def _to_content(self) -> None:
        if self._separator.strip("; \t\r\n") or self._text or not self._is_after_call:
            self._parts.content(self._separator)
        self._separator = ""
        self._step = self._content

    def _in_call(self) -> bool:
        text, self._text = self._text, ""
        read, self._text = self._call.read(text, ended=self._ended)
        if read is ReadStatus.MORE:
            return False
        if read is ReadStatus.CALL:
            self._is_after_call = True
            self._separator = ""
            self._step = self._start
        else:
            self._to_content()
        return True

    def _content(self) -> bool:
        marker = self._until(_MARKERS, self._parts.content)
        if marker == _TAG:
            self._step = self._start
        return bool(marker)
