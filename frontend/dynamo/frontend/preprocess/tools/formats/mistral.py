"""`[TOOL_CALLS] [{"name": "f", "arguments": {…}}, …]`, or since v11 `[TOOL_CALLS]f[ARGS]{…}` for each call: Mistral."""

from __future__ import annotations

import re

from dynamo.frontend.preprocess.parsers import Tools
from dynamo.frontend.preprocess.tools.json_call import Arguments
from dynamo.frontend.preprocess.tools.json_calls import JsonCalls, JsonFormat
from dynamo.frontend.preprocess.tools.reader import MAX_NAME_CHARS

_FORM = JsonFormat.of("[TOOL_CALLS]", closes=("[ARGS]", "[CALL_ID]", "</s>"))
_NAMED = re.compile(r"\s*+([\w.\-]++)\s*+(?:\[CALL_ID\]\w*+\s*+)?(?:\[ARGS\]\s*+)?(?=\{)")
_NAME_BEGINS = re.compile(r"\s*+[\w.\-]*+\s*+(?:\[[\w\[\]\s]*+)?")


class Mistral(JsonCalls):
    def __init__(self, tools: Tools) -> None:
        super().__init__(_FORM)
        self._arguments = Arguments(self._parts, _FORM.markers)

    def _no_call(self) -> None:
        """What follows the marker is no object: it may be a name."""
        if self._in_list or self._step != self._first:
            super()._no_call()
        else:
            self._step = self._name

    def _name(self) -> bool:
        text = self._text[:MAX_NAME_CHARS]
        named = _NAMED.match(text)
        if named is not None:
            self._before = ""
            self._parts.call(named.group(1))
            self._text = self._text[named.end() :]
            self._arguments = Arguments(self._parts, _FORM.markers)
            self._step = self._in_arguments
            return True
        if not self._ended and len(self._text) <= MAX_NAME_CHARS and _NAME_BEGINS.fullmatch(text):
            return False
        super()._no_call()
        return True

    def _in_arguments(self) -> bool:
        text, self._text = self._text, ""
        end = self._arguments.read(text, ended=self._ended)
        if end is None:
            return False
        self._text = end.rest
        self._step = self._content
        return True
