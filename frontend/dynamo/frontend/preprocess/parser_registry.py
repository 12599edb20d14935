"""The output parsers that model cards can name."""

from __future__ import annotations

from functools import partial

from dynamo.frontend.preprocess.parsers import OutputParsers, ParserKind
from dynamo.frontend.preprocess.reasoning.think import think
from dynamo.frontend.preprocess.tools.deepseek import DeepSeek
from dynamo.frontend.preprocess.tools.harmony import Harmony
from dynamo.frontend.preprocess.tools.hermes import Hermes
from dynamo.frontend.preprocess.tools.llama3_json import Llama3Json
from dynamo.frontend.preprocess.tools.mistral import Mistral
from dynamo.frontend.preprocess.tools.pythonic import Pythonic
from dynamo.frontend.preprocess.tools.qwen3_coder import Qwen3Coder

_HERMES = ParserKind(Hermes)
_DEEPSEEK = ParserKind(DeepSeek, needs_special_tokens=True)
_HARMONY = ParserKind(Harmony, needs_special_tokens=True)
_QWEN3_CODER = ParserKind(Qwen3Coder)
_ALWAYS_THINKS = ParserKind(partial(think, is_open=True), make_after_prompt=partial(think, is_open=True))
_MAY_THINK = ParserKind(partial(think, is_open=False), make_after_prompt=partial(think, is_open=False))

PARSER_REGISTRY = OutputParsers(
    tools={
        "hermes": _HERMES,
        "llama3_json": ParserKind(Llama3Json),
        "mistral": ParserKind(Mistral, needs_special_tokens=True),
        "pythonic": ParserKind(Pythonic),
        "qwen3_coder": _QWEN3_CODER,
        "qwen3_xml": _QWEN3_CODER,
        "deepseek_v3": _DEEPSEEK,
        "deepseek_v3_1": _DEEPSEEK,
        "harmony": _HARMONY,
        "gpt_oss": _HARMONY,
    },
    reasoning={
        "deepseek_r1": _ALWAYS_THINKS,
        "qwen3": _MAY_THINK,
        "qwen3_thinking": _ALWAYS_THINKS,
        "gpt_oss": _HARMONY,
    },
)
