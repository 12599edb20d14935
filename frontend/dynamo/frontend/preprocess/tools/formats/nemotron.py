"""`<TOOLCALL>[{"name": "f", "arguments": {…}}, …]</TOOLCALL>`: Nemotron until Nano 2; later ones write as Qwen 3 Coder does."""

from __future__ import annotations

from dynamo.frontend.preprocess.parsers import OutputParser, Tools
from dynamo.frontend.preprocess.tools.json_calls import JsonCalls, JsonFormat

_FORM = JsonFormat.of("<TOOLCALL>", closes=("</TOOLCALL>",))


def nemotron(tools: Tools) -> OutputParser:
    return JsonCalls(_FORM)
