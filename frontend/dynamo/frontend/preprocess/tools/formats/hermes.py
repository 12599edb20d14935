"""`<tool_call>{"name": "f", "arguments": {…}}</tool_call>`: Hermes, Qwen 2.5, Qwen 3, Granite 4."""

from __future__ import annotations

from dynamo.frontend.preprocess.parsers import OutputParser, Tools
from dynamo.frontend.preprocess.tools.json_calls import JsonCalls, JsonFormat

_FORM = JsonFormat.of("<tool_call>", closes=("</tool_call>",))


def hermes(tools: Tools) -> OutputParser:
    return JsonCalls(_FORM)
