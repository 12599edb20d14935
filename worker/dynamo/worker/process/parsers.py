"""Choose how frontends parse a model's output, by what its chat template writes around tool calls and reasoning."""

from __future__ import annotations

import re
from dataclasses import dataclass

from dynamo.common.parser_names import AUTO, GENERIC, NONE

_TOOLS_BY_MARKER = (
    ("<|channel|>", "openai"),
    ("｜DSML｜", "deepseek_v32"),
    ("<|tool_calls_section_begin|>", "kimi_k2"),
    ("tool_declare", "kimi_k2"),
    ("<minimax:tool_call>", "minimax_m2"),
    ("<seed:tool_call>", "seed_oss"),
    ("<longcat_tool_call>", "longcat"),
    ("<arg_key>", "glm45"),
    ("<function=", "qwen3_coder"),
    ("<TOOLCALL>", "nemotron"),
    ("[TOOL_CALLS]", "mistral"),
    ("functools[", "phi4_mini_json"),
    ("<|/tool_call|>", "phi4_mini_json"),
    ("<|tool_call|>", "granite"),
    ("<|python_start|>", "pythonic"),
    ("[func_name1(", "pythonic"),
    ("<|tool_call_start|>", "pythonic"),
    ("<|python_tag|>", "llama3_json"),
    ('"parameters": dictionary of argument name', "llama3_json"),
    ("<tool_calls>", "jamba"),
    ("<tool_call>", "hermes"),
)
"""In this order: a marker may be part of a format that another one names more exactly."""
_REASONING_BY_MARKER = (
    ("<|channel|>", "openai_gptoss"),
    ("[THINK]", "mistral"),
    ("◁think▷", "kimi"),
    ("<seed:think>", "seed_oss"),
    ("my thought process:", "granite"),
)
_REASONING_BY_TOOLS = {
    "deepseek_v3": "deepseek_v3",
    "deepseek_v31": "deepseek_v3",
    "deepseek_v32": "deepseek_v3",
    "glm45": "glm45",
    "kimi_k2": "kimi_k2",
    "minimax_m2": "minimax_m2",
    "nemotron": "nemotron",
}
"""Reasoning parsers of models that write `<think>`, by the models' tool parsers."""
_COMMENT = re.compile(r"\{#.*?#\}", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ChosenParsers:
    """The parsers of a model by name, "" for none, and why."""

    tool_parser: str
    reasoning_parser: str
    reason: str


def choose_parsers(template: str, tool_parser: str = AUTO, reasoning_parser: str = AUTO) -> ChosenParsers:
    """Return the parsers of a model with this chat template. Either may be given by name, or as `none`."""
    source = _COMMENT.sub("", template)
    detected = _detect_tools(source)
    reasons = "detected in the chat template"
    if tool_parser == AUTO and detected == GENERIC:
        reasons = "the chat template has no tools in a format that is supported"
    elif AUTO not in (tool_parser, reasoning_parser):
        reasons = "configured"
    tools = detected if tool_parser == AUTO else tool_parser
    reasoning = _detect_reasoning(source, detected) if reasoning_parser == AUTO else reasoning_parser
    return ChosenParsers("" if tools == NONE else tools, "" if reasoning == NONE else reasoning, reasons)


def _detect_tools(source: str) -> str:
    if "<｜tool▁calls▁begin｜>" in source:
        return "deepseek_v3" if "```json" in source else "deepseek_v31"
    if not re.search(r"\btools\b", source):
        return GENERIC
    return next((name for marker, name in _TOOLS_BY_MARKER if marker in source), GENERIC)


def _detect_reasoning(source: str, tools: str) -> str:
    for marker, name in _REASONING_BY_MARKER:
        if marker in source:
            return name
    if "</think>" not in source:
        return NONE
    return _REASONING_BY_TOOLS.get(tools, "qwen3" if "<think>" in source else "deepseek_r1")
