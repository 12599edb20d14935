"""The formats in which models write tool calls and reasoning, under the names that vLLM and NVIDIA Dynamo give them.

A worker recognizes a model's formats by its chat template and puts their names into the model card; frontends have a parser for
each (`dynamo.frontend.preprocess.parser_registry`).
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass

AUTO = "auto"
"""Choose by the model's chat template."""
NONE = "none"
"""No parser: all text of the model is content."""


@dataclass(frozen=True, slots=True)
class MarkupFormat:
    """A format of tool calls or of reasoning."""

    name: str
    aliases: tuple[str, ...] = ()
    """Other names of the same format."""
    markers: tuple[str, ...] = ()
    """A chat template of the format has at least one of these texts."""

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)


@dataclass(frozen=True, slots=True)
class ToolFormat(MarkupFormat):
    """A format of tool calls."""

    further_marker: str = ""
    """A chat template of the format has this text too."""
    names_tools: bool = True
    """Whether a chat template of the format names the variable `tools`."""
    reasoning: str = ""
    """Format of reasoning of those models that write `<think>`; "" if the chat template shows it."""


GENERIC = ToolFormat("generic")
"""For chat templates without tools: these are described in the system message, and any usual form of a call is parsed."""

_DEEPSEEK = ("<｜tool▁calls▁begin｜>",)

TOOL_FORMATS = (
    ToolFormat("deepseek_v3", (), _DEEPSEEK, "```json", names_tools=False, reasoning="deepseek_v3"),
    ToolFormat("deepseek_v31", ("deepseek_v3_1",), _DEEPSEEK, names_tools=False, reasoning="deepseek_v3"),
    ToolFormat("openai", ("gpt_oss", "harmony"), ("<|channel|>",)),
    ToolFormat("deepseek_v32", ("deepseek_v3_2",), ("｜DSML｜",), reasoning="deepseek_v3"),
    ToolFormat("kimi_k2", (), ("<|tool_calls_section_begin|>", "tool_declare"), reasoning="kimi_k2"),
    ToolFormat("minimax_m2", (), ("<minimax:tool_call>",), reasoning="minimax_m2"),
    ToolFormat("seed_oss", (), ("<seed:tool_call>",)),
    ToolFormat("longcat", (), ("<longcat_tool_call>",)),
    ToolFormat("glm45", ("glm47",), ("<arg_key>",), reasoning="glm45"),
    ToolFormat("qwen3_coder", ("nemotron_nano", "nemotron_v3", "qwen3_xml"), ("<function=",)),
    ToolFormat("nemotron", ("nemotron_deci", "nemotron_json"), ("<TOOLCALL>",), reasoning="nemotron"),
    ToolFormat("mistral", (), ("[TOOL_CALLS]",)),
    ToolFormat("phi4_mini_json", ("phi4",), ("functools[", "<|/tool_call|>")),
    ToolFormat("granite", (), ("<|tool_call|>",)),
    ToolFormat("pythonic", ("lfm2", "llama4_pythonic"), ("<|python_start|>", "[func_name1(", "<|tool_call_start|>")),
    ToolFormat("llama3_json", ("llama4_json",), ("<|python_tag|>", '"parameters": dictionary of argument name')),
    ToolFormat("jamba", ("hunyuan_a13b", "minimax"), ("<tool_calls>",)),
    ToolFormat("hermes", ("granite4", "qwen3"), ("<tool_call>",)),
    GENERIC,
)
"""The first whose markers a chat template has is that of the model: a marker may be part of a format that is further down."""

REASONING_FORMATS = (
    MarkupFormat("openai_gptoss", ("gpt_oss",), ("<|channel|>",)),
    MarkupFormat("mistral", (), ("[THINK]",)),
    MarkupFormat("kimi", (), ("◁think▷",)),
    MarkupFormat("seed_oss", (), ("<seed:think>",)),
    MarkupFormat("granite", (), ("my thought process:",)),
    MarkupFormat("deepseek_r1", ("qwen3_thinking", "step3")),
    MarkupFormat("deepseek_v3", ("deepseek_v31", "deepseek_v32")),
    MarkupFormat("glm45", ("glm47",)),
    MarkupFormat("kimi_k2", ("kimi_k25",)),
    MarkupFormat("minimax_m2"),
    MarkupFormat("minimax_m2_append_think", ("minimax_append_think",)),
    MarkupFormat("nemotron", ("nemotron_deci", "nemotron_nano", "nemotron_v3")),
    MarkupFormat("qwen3", ("basic",)),
)
"""The first whose markers a chat template has is that of the model; those without markers write `<think>`."""


def parse_tool_parser(text: str) -> str:
    """Return the name of a format of tool calls, without aliases; AUTO and NONE too. Raises ValueError."""
    return _parse(text, TOOL_FORMATS)


def parse_reasoning_parser(text: str) -> str:
    """Return the name of a format of reasoning, without aliases; AUTO and NONE too. Raises ValueError."""
    return _parse(text, REASONING_FORMATS)


def _parse(text: str, formats: Sequence[MarkupFormat]) -> str:
    names = {name: form.name for form in formats for name in form.names}
    if text in (AUTO, NONE):
        return text
    if text in names:
        return names[text]
    known = ", ".join((AUTO, NONE, *sorted(form.name for form in formats)))
    near = difflib.get_close_matches(text, names, n=1)
    raise ValueError(f"is not one of {known}" + (f"; did you mean {near[0]}?" if near else ""))
