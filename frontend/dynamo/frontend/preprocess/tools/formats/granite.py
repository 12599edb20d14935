"""`<|tool_call|>[{"name": "f", "arguments": {…}}, …]`, with `<tool_call>` since 3.1: Granite 3."""

from __future__ import annotations

from dynamo.frontend.preprocess.parsers import OutputParser, Tools
from dynamo.frontend.preprocess.tools.json_calls import JsonCalls, JsonFormat

_FORM = JsonFormat.of("<|tool_call|>", "<tool_call>", closes=("</tool_call>", "<|end_of_text|>"))


def granite(tools: Tools) -> OutputParser:
    return JsonCalls(_FORM)
