"""`[TOOL_CALLS] [{"name": "f", "arguments": {…}}, …]`, or `[TOOL_CALLS]f[ARGS]{…}` for each call: Mistral."""

from __future__ import annotations

import re

from dynamo.frontend.preprocess.parsers import Tools
from dynamo.frontend.preprocess.tools.json_call import Arguments, JsonCallReader, ReadStatus
from dynamo.frontend.preprocess.tools.markers import Markers
from dynamo.frontend.preprocess.tools.reader import MAX_NAME_CHARS, Reader

_CALLS = "[TOOL_CALLS]"
_MARKERS = Markers(_CALLS, "[ARGS]", "[CALL_ID]", "</s>")
_NAMED = re.compile(r"\s*([\w.\-]+)\s*(?:\[CALL_ID\]\w*\s*)?(?:\[ARGS\]\s*)?(?=\{)")
_NAME_BEGINS = re.compile(r"\s*[\w.\-]*\s*(?:\[[\w\[\]\s]*)?")


class Mistral(Reader):
    def __init__(self, tools: Tools) -> None:
        super().__init__(self._content)
        self._call = JsonCallReader(self._parts, _MARKERS)
        self._arguments = Arguments(self._parts, _MARKERS)

    def _content(self) -> bool:
        marker = self._until(_MARKERS, self._parts.content)
        if marker == _CALLS:
            self._step = self._form
        return bool(marker)

    def _form(self) -> bool:
        """Decide which of the two forms follows."""
        if not self._strip():
            return False
        if self._text[0] == "[":
            self._text = self._text[1:]
            self._step = self._first_object
        elif self._text[0] == "{":
            self._begin_object()
        else:
            self._step = self._name
        return True

    def _begin_object(self) -> None:
        self._call = JsonCallReader(self._parts, _MARKERS)
        self._step = self._object

    def _first_object(self) -> bool:
        if not self._strip() and not self._ended:
            return False
        if self._text.startswith("{"):
            self._begin_object()
        elif self._text.startswith("]"):
            self._text = self._text[1:]
            self._step = self._content
        else:
            self._text = "[" + self._text
            self._step = self._content
        return True

    def _object(self) -> bool:
        text, self._text = self._text, ""
        read, self._text = self._call.read(text, ended=self._ended)
        if read is ReadStatus.MORE:
            return False
        self._step = self._next_object if read is ReadStatus.CALL else self._content
        return True

    def _next_object(self) -> bool:
        """Read between the calls of a list, and at its end."""
        if not self._strip():
            return False
        if self._text[0] == "{":
            self._begin_object()
        elif self._text[0] == ",":
            self._text = self._text[1:]
        else:
            self._text = self._text.removeprefix("]")
            self._step = self._content
        return True

    def _name(self) -> bool:
        text = self._text[:MAX_NAME_CHARS]
        named = _NAMED.match(text)
        if named is not None:
            self._parts.call(named.group(1))
            self._text = self._text[named.end() :]
            self._arguments = Arguments(self._parts, _MARKERS)
            self._step = self._in_arguments
            return True
        if not self._ended and len(self._text) <= MAX_NAME_CHARS and _NAME_BEGINS.fullmatch(text):
            return False
        self._step = self._content
        return True

    def _in_arguments(self) -> bool:
        text, self._text = self._text, ""
        end = self._arguments.read(text, ended=self._ended)
        if end is None:
            return False
        self._text = end.rest
        self._step = self._content
        return True
