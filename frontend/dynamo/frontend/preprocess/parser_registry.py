"""The output parsers that model cards can name."""

from __future__ import annotations

from dynamo.common.parser_names import REASONING_PARSER_ALIASES, TOOL_PARSER_ALIASES
from dynamo.frontend.preprocess.parsers import OutputParsers, ParserKind
from dynamo.frontend.preprocess.reasoning.kinds import REASONING
from dynamo.frontend.preprocess.tools.formats.deepseek import DeepSeek
from dynamo.frontend.preprocess.tools.formats.deepseek_v32 import deepseek_v32
from dynamo.frontend.preprocess.tools.formats.generic import Generic
from dynamo.frontend.preprocess.tools.formats.glm import glm45
from dynamo.frontend.preprocess.tools.formats.granite import granite
from dynamo.frontend.preprocess.tools.formats.harmony import Harmony
from dynamo.frontend.preprocess.tools.formats.hermes import hermes
from dynamo.frontend.preprocess.tools.formats.jamba import jamba
from dynamo.frontend.preprocess.tools.formats.kimi import Kimi
from dynamo.frontend.preprocess.tools.formats.llama3_json import Llama3Json
from dynamo.frontend.preprocess.tools.formats.longcat import longcat
from dynamo.frontend.preprocess.tools.formats.minimax import minimax_m2
from dynamo.frontend.preprocess.tools.formats.mistral import Mistral
from dynamo.frontend.preprocess.tools.formats.nemotron import nemotron
from dynamo.frontend.preprocess.tools.formats.phi4 import phi4
from dynamo.frontend.preprocess.tools.formats.pythonic import Pythonic
from dynamo.frontend.preprocess.tools.formats.qwen3_coder import qwen3_coder
from dynamo.frontend.preprocess.tools.formats.seed_oss import seed_oss

_DEEPSEEK = ParserKind(DeepSeek, needs_special_tokens=True)
_HARMONY = ParserKind(Harmony, needs_special_tokens=True)

_TOOLS = {
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v31": _DEEPSEEK,
    "deepseek_v32": ParserKind(deepseek_v32, needs_special_tokens=True),
    "generic": ParserKind(Generic),
    "glm45": ParserKind(glm45),
    "granite": ParserKind(granite, needs_special_tokens=True),
    "hermes": ParserKind(hermes),
    "jamba": ParserKind(jamba),
    "kimi_k2": ParserKind(Kimi, needs_special_tokens=True),
    "llama3_json": ParserKind(Llama3Json),
    "longcat": ParserKind(longcat),
    "minimax_m2": ParserKind(minimax_m2, needs_special_tokens=True),
    "mistral": ParserKind(Mistral, needs_special_tokens=True),
    "nemotron": ParserKind(nemotron),
    "openai": _HARMONY,
    "phi4_mini_json": ParserKind(phi4, needs_special_tokens=True),
    "pythonic": ParserKind(Pythonic),
    "qwen3_coder": ParserKind(qwen3_coder),
    "seed_oss": ParserKind(seed_oss, needs_special_tokens=True),
}
_REASONING = {**REASONING, "openai_gptoss": _HARMONY}

PARSER_REGISTRY = OutputParsers(
    tools={**_TOOLS, **{alias: _TOOLS[name] for alias, name in TOOL_PARSER_ALIASES.items()}},
    reasoning={
        **_REASONING,
        **{alias: _REASONING[name] for alias, name in REASONING_PARSER_ALIASES.items()},
    },
)
