"""Choose how frontends parse a model's output, by what its chat template writes around tool calls and reasoning."""

from __future__ import annotations

import re
from dataclasses import dataclass

from dynamo.common.output_formats import AUTO, GENERIC, NONE, REASONING_FORMATS, TOOL_FORMATS, ToolFormat

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
    if tool_parser == AUTO and detected is GENERIC:
        reasons = "the chat template has no tools in a format that is supported"
    elif AUTO not in (tool_parser, reasoning_parser):
        reasons = "configured"
    tools = detected.name if tool_parser == AUTO else tool_parser
    reasoning = _detect_reasoning(source, detected) if reasoning_parser == AUTO else reasoning_parser
    return ChosenParsers("" if tools == NONE else tools, "" if reasoning == NONE else reasoning, reasons)


def _detect_tools(source: str) -> ToolFormat:
    has_tools = re.search(r"\btools\b", source) is not None
    for form in TOOL_FORMATS:
        is_marked = any(marker in source for marker in form.markers) and form.further_marker in source
        if is_marked and (has_tools or not form.names_tools):
            return form
    return GENERIC


def _detect_reasoning(source: str, tools: ToolFormat) -> str:
    for form in REASONING_FORMATS:
        if any(marker in source for marker in form.markers):
            return form.name
    if "</think>" not in source:
        return NONE
    return tools.reasoning or ("qwen3" if "<think>" in source else "deepseek_r1")
