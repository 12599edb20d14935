"""`<longcat_tool_call>{"name": "f", "arguments": {…}}</longcat_tool_call>`: LongCat Flash."""

from __future__ import annotations

from dynamo.frontend.preprocess.parsers import OutputParser, Tools
from dynamo.frontend.preprocess.tools.json_calls import JsonCalls, JsonFormat

_FORM = JsonFormat.of("<longcat_tool_call>", closes=("</longcat_tool_call>",))


def longcat(tools: Tools) -> OutputParser:
    return JsonCalls(_FORM)
