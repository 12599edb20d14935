"""Names of the formats in which models write tool calls and reasoning, as vLLM and NVIDIA Dynamo call them.

A worker puts the names into its model cards; frontends have a parser for each (`dynamo.frontend.preprocess.parser_registry`).
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping

AUTO = "auto"
"""Choose by the model's chat template."""
NONE = "none"
"""No parser: all text of the model is content."""
GENERIC = "generic"
"""For chat templates without tools: these are described in the system message, and any usual form of a call is parsed."""

TOOL_PARSERS = frozenset(
    {
        "deepseek_v3",
        "deepseek_v31",
        "deepseek_v32",
        GENERIC,
        "glm45",
        "granite",
        "hermes",
        "jamba",
        "kimi_k2",
        "llama3_json",
        "longcat",
        "minimax_m2",
        "mistral",
        "nemotron",
        "openai",
        "phi4_mini_json",
        "pythonic",
        "qwen3_coder",
        "seed_oss",
    }
)
TOOL_PARSER_ALIASES: Mapping[str, str] = {
    "deepseek_v3_1": "deepseek_v31",
    "deepseek_v3_2": "deepseek_v32",
    "glm47": "glm45",
    "gpt_oss": "openai",
    "granite4": "hermes",
    "harmony": "openai",
    "hunyuan_a13b": "jamba",
    "lfm2": "pythonic",
    "llama4_json": "llama3_json",
    "llama4_pythonic": "pythonic",
    "minimax": "jamba",
    "nemotron_deci": "nemotron",
    "nemotron_json": "nemotron",
    "nemotron_nano": "qwen3_coder",
    "nemotron_v3": "qwen3_coder",
    "phi4": "phi4_mini_json",
    "qwen3": "hermes",
    "qwen3_xml": "qwen3_coder",
}
"""Other names of the same formats."""

REASONING_PARSERS = frozenset(
    {
        "deepseek_r1",
        "deepseek_v3",
        "glm45",
        "granite",
        "kimi",
        "kimi_k2",
        "minimax_m2",
        "minimax_m2_append_think",
        "mistral",
        "nemotron",
        "openai_gptoss",
        "qwen3",
        "seed_oss",
    }
)
REASONING_PARSER_ALIASES: Mapping[str, str] = {
    "basic": "qwen3",
    "deepseek_v31": "deepseek_v3",
    "deepseek_v32": "deepseek_v3",
    "glm47": "glm45",
    "gpt_oss": "openai_gptoss",
    "kimi_k25": "kimi_k2",
    "minimax_append_think": "minimax_m2_append_think",
    "nemotron_deci": "nemotron",
    "nemotron_nano": "nemotron",
    "nemotron_v3": "nemotron",
    "qwen3_thinking": "deepseek_r1",
    "step3": "deepseek_r1",
}


def parse_tool_parser(text: str) -> str:
    """Return the name of a tool parser, without aliases; AUTO and NONE too. Raises ValueError."""
    return _parse(text, TOOL_PARSERS, TOOL_PARSER_ALIASES)


def parse_reasoning_parser(text: str) -> str:
    """Return the name of a reasoning parser, without aliases; AUTO and NONE too. Raises ValueError."""
    return _parse(text, REASONING_PARSERS, REASONING_PARSER_ALIASES)


def _parse(text: str, names: Collection[str], aliases: Mapping[str, str]) -> str:
    name = aliases.get(text, text)
    if name in names or name in (AUTO, NONE):
        return name
    near = difflib.get_close_matches(text, [*names, *aliases], n=1)
    raise ValueError(f"is not one of {', '.join((AUTO, NONE, *sorted(names)))}" + (f"; did you mean {near[0]}?" if near else ""))
