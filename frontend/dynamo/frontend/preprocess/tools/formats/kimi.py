"""Kimi K2, all inside of `<|tool_calls_section_begin|>…<|tool_calls_section_end|>`:

<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{…}<|tool_call_end|>
"""

from __future__ import annotations

import re

from dynamo.frontend.preprocess.parsers import Tools
from dynamo.frontend.preprocess.tools.marked_calls import MarkedCalls, MarkedFormat
from dynamo.frontend.preprocess.tools.markers import Markers

SECTION = "<|tool_calls_section_begin|>"
_CALL, _SEPARATOR = "<|tool_call_begin|>", "<|tool_call_argument_begin|>"
_FORM = MarkedFormat(
    _CALL, _SEPARATOR, Markers(SECTION, _CALL, _SEPARATOR, "<|tool_call_end|>", "<|tool_calls_section_end|>", "<|im_end|>")
)
_ID = re.compile(r"(?:functions\.)?(.+?)(?::\d+)?")


class Kimi(MarkedCalls):
    """The id of a call has its name and its number in the conversation."""

    def __init__(self, tools: Tools) -> None:
        super().__init__(_FORM)

    def _begin_call(self, head: str) -> None:
        named = _ID.fullmatch(head)
        super()._begin_call(head if named is None else named.group(1))
