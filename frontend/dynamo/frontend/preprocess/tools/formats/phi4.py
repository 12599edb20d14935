"""`functools[{"name": "f", "arguments": {…}}, …]`, or `<|tool_call|>[…]<|/tool_call|>`: Phi 4."""

from __future__ import annotations

from dynamo.frontend.preprocess.parsers import OutputParser, Tools
from dynamo.frontend.preprocess.tools.json_calls import JsonCalls, JsonFormat
from dynamo.frontend.preprocess.tools.names import tool_names

_FORM = JsonFormat.of("<|tool_call|>", closes=("<|/tool_call|>",), in_text=("functools[",))


def phi4(tools: Tools) -> OutputParser:
    return JsonCalls(_FORM, tool_names(tools).__contains__)
