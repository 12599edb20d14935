"""`<tool_calls>[{"name": "f", "arguments": {…}}, …]</tool_calls>`, or an object per line: Jamba, Hunyuan, MiniMax M1."""

from __future__ import annotations

from dynamo.frontend.preprocess.parsers import OutputParser, Tools
from dynamo.frontend.preprocess.tools.json_calls import JsonCalls, JsonFormat

_FORM = JsonFormat.of("<tool_calls>", closes=("</tool_calls>",))


def jamba(tools: Tools) -> OutputParser:
    return JsonCalls(_FORM)
