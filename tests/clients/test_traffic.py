"""Requests of the shapes that Codex and Claude Code send, through the SDKs of OpenAI and Anthropic. Written by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest

QUESTION = 'Run shell({"command": ["ls"]}).'
SHELL = {
    "type": "object",
    "properties": {"command": {"type": "array", "items": {"type": "string"}}, "timeout_ms": {"type": "number"}},
    "required": ["command"],
    "additionalProperties": False,
}
CODEX_TOOLS = [
    {"type": "function", "name": "shell", "description": "Runs a command.", "strict": False, "parameters": SHELL},
    {
        "type": "custom",
        "name": "apply_patch",
        "description": "Edits files.",
        "format": {"type": "grammar", "syntax": "lark", "definition": "start: LINE"},
    },
    {"type": "local_shell"},
    {"type": "web_search"},
]


def codex(openai: Any, items: list[Any]) -> Any:
    """Return the final response of a streamed turn."""
    stream = openai.responses.create(
        model="sim",
        instructions="You are a coding agent.",
        input=items,
        tools=CODEX_TOOLS,
        tool_choice="auto",
        parallel_tool_calls=True,
        reasoning={"effort": "medium", "summary": "auto"},
        store=False,
        stream=True,
        include=["reasoning.encrypted_content"],
        prompt_cache_key="0198c1f2-7d11-7000-8000-000000000001",
        extra_headers={"originator": "codex_cli_rs", "session_id": "0198c1f2-7d11-7000-8000-000000000001"},
    )
    events = list(stream)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].type == "response.completed"
    return events[-1].response


def said(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}


def test_a_turn_of_codex(url: str) -> None:
    from openai import OpenAI

    openai = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    items: list[Any] = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Sandbox: read-only."}]},
        said("What did I do?"),
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAA"},
        {"type": "custom_tool_call", "call_id": "c0", "name": "apply_patch", "input": "*** Begin Patch"},
        {"type": "custom_tool_call_output", "call_id": "c0", "output": "Done!"},
        {
            "type": "local_shell_call",
            "call_id": "c1",
            "status": "completed",
            "action": {"type": "exec", "command": ["ls"], "env": {}},
        },
        said(QUESTION),
    ]
    response = codex(openai, items)
    [call] = [item for item in response.output if item.type == "function_call"]
    assert (call.name, json.loads(call.arguments)) == ("shell", {"command": ["ls"]})
    items += [item.model_dump(exclude_none=True) for item in response.output]
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": "README.md"})
    assert codex(openai, items).output_text == "The tools returned: README.md"


@pytest.mark.parametrize("stream", [True, False])
def test_a_turn_of_claude_code(url: str, stream: bool) -> None:
    from anthropic import Anthropic

    client = Anthropic(base_url=url, api_key="none", max_retries=0)
    cached = {"cache_control": {"type": "ephemeral"}}
    tools: Any = [{"name": "shell", "description": "Runs a command.", "input_schema": SHELL, **cached}]
    system: Any = [{"type": "text", "text": "You are a coding agent."}, {"type": "text", "text": "Be brief.", **cached}]
    messages: list[Any] = [
        {"role": "user", "content": [{"type": "text", "text": "<system-reminder>None.</system-reminder>"}]},
        {
            "role": "assistant",
            "content": [{"type": "thinking", "thinking": "Hm.", "signature": "c2ln"}, {"type": "text", "text": "Yes?"}],
        },
        {"role": "user", "content": [{"type": "text", "text": QUESTION, **cached}]},
    ]
    headers = {"anthropic-beta": "interleaved-thinking-2025-05-14,fine-grained-tool-streaming-2025-05-14", "x-app": "cli"}

    def create() -> Any:
        options: Any = {
            "model": "sim",
            "max_tokens": 2000,
            "system": system,
            "tools": tools,
            "messages": messages,
            "metadata": {"user_id": "user_1"},
            "extra_headers": headers,
        }
        if not stream:
            return client.messages.create(**options)
        with client.messages.stream(**options) as events:
            return events.get_final_message()

    counted = client.messages.count_tokens(model="sim", system=system, tools=tools, messages=messages, extra_headers=headers)
    message = create()
    assert message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0) == counted.input_tokens
    [call] = [block for block in message.content if block.type == "tool_use"]
    assert (call.name, call.input, message.stop_reason) == ("shell", {"command": ["ls"]}, "tool_use")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "README.md"}], **cached}
    messages.extend([{"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}])
    assert [block.text for block in create().content] == ["The tools returned: README.md"]
