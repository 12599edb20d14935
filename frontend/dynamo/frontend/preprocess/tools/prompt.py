"""Describe tools, calls and results in plain messages, for chat templates that have none of these."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from dynamo.frontend.preprocess.parsers import Tools

_BEFORE = "You can call these functions. Each line in <tools> describes one as JSON, with the schema of its arguments:\n<tools>\n"
_AFTER = """
</tools>
To call a function, respond with its name and its arguments in this form, once for each call, and with nothing else:
<tool_call>{"name": NAME, "arguments": {ARGUMENTS}}</tool_call>
The results follow in <tool_response>. When no function is needed, respond in plain words."""


def in_plain_messages(messages: Sequence[Mapping[str, Any]], tools: Tools) -> list[dict[str, Any]]:
    """Return the conversation with `tools` in its system message, calls as text, and results as messages of the user."""
    plain: list[dict[str, Any]] = []
    results: list[str] = []
    for message in messages:
        if message["role"] == "tool":
            results.append(f"<tool_response>\n{_text(message.get('content'))}\n</tool_response>")
            continue
        if results:
            plain.append({"role": "user", "content": "\n".join(results)})
            results = []
        plain.append(_without_calls(message))
    if results:
        plain.append({"role": "user", "content": "\n".join(results)})
    return _with_description(plain, tools) if tools else plain


def _with_description(messages: list[dict[str, Any]], tools: Tools) -> list[dict[str, Any]]:
    lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    description = f"{_BEFORE}{lines}{_AFTER}"
    if messages and messages[0]["role"] == "system":
        return [{**messages[0], "content": _appended(messages[0].get("content"), "\n\n" + description)}, *messages[1:]]
    return [{"role": "system", "content": description}, *messages]


def _without_calls(message: Mapping[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if not isinstance(calls, list | tuple) or not calls:
        return dict(message)
    rest = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**rest, "content": _appended(message.get("content"), "\n".join(map(_call, calls)))}


def _call(call: Any) -> str:
    function = call.get("function") if isinstance(call, Mapping) else None
    function = function if isinstance(function, Mapping) else {}
    shown = {"name": function.get("name"), "arguments": function.get("arguments")}
    return f"<tool_call>{json.dumps(shown, ensure_ascii=False)}</tool_call>"


def _appended(content: Any, text: str) -> Any:
    """Return `content`, a text or a list of parts, with `text` at its end."""
    if isinstance(content, list | tuple):
        return [*content, {"type": "text", "text": text}]
    return f"{content}\n{text}".lstrip("\n") if content else text.lstrip("\n")


def _text(content: Any) -> str:
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
