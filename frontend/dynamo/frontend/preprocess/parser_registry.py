"""The parser of each format of tool calls and reasoning that a model card can name.

`dynamo.common.output_formats` has the other half of each row: the format's other names, and what shows it in a chat template.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dynamo.common.output_formats import REASONING_FORMATS, TOOL_FORMATS, MarkupFormat
from dynamo.frontend.preprocess.parsers import OutputParsers, ParserKind
from dynamo.frontend.preprocess.reasoning.think import PrependedThink, Tags, reasoning_in
from dynamo.frontend.preprocess.tools.call_ids import with_names, with_nine_characters
from dynamo.frontend.preprocess.tools.formats import kimi
from dynamo.frontend.preprocess.tools.formats.deepseek import DeepSeek
from dynamo.frontend.preprocess.tools.formats.generic import Generic
from dynamo.frontend.preprocess.tools.formats.harmony import Harmony
from dynamo.frontend.preprocess.tools.formats.llama3_json import Llama3Json
from dynamo.frontend.preprocess.tools.formats.mistral import Mistral
from dynamo.frontend.preprocess.tools.formats.pythonic import Pythonic
from dynamo.frontend.preprocess.tools.json_calls import json_calls
from dynamo.frontend.preprocess.tools.xml_calls import XmlFormat, xml_calls

_DEEPSEEK = ParserKind(DeepSeek, needs_special_tokens=True)
_HARMONY = ParserKind(Harmony, needs_special_tokens=True)

_TOOLS = {
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v31": _DEEPSEEK,
    # DeepSeek V3.2: <｜DSML｜invoke name="f"><｜DSML｜parameter name="a" string="false">1</｜DSML｜parameter></｜DSML｜invoke>
    "deepseek_v32": ParserKind(
        xml_calls(
            XmlFormat(
                section=("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"),
                call=("<｜DSML｜invoke name=", "</｜DSML｜invoke>"),
                parameter=("<｜DSML｜parameter name=", "</｜DSML｜parameter>"),
            )
        ),
        needs_special_tokens=True,
    ),
    "generic": ParserKind(Generic),
    # GLM 4.5 and later, some without the newlines: <tool_call>f⏎<arg_key>a</arg_key>⏎<arg_value>1</arg_value>⏎</tool_call>
    "glm45": ParserKind(
        xml_calls(
            XmlFormat(
                section=("<tool_call>", "</tool_call>"),
                call=("<tool_call>", "</tool_call>"),
                parameter=("<arg_key>", "</arg_value>"),
                name_ends=("\n", "<arg_key>", "</tool_call>"),
                parameter_name_ends=("</arg_key>\n<arg_value>", "</arg_key><arg_value>"),
            )
        )
    ),
    # Granite 3: <|tool_call|>[{"name": "f", "arguments": {…}}, …], with <tool_call> since 3.1
    "granite": ParserKind(
        json_calls("<|tool_call|>", "<tool_call>", closes=("</tool_call>", "<|end_of_text|>")), needs_special_tokens=True
    ),
    # Hermes, Qwen 2.5, Qwen 3, Granite 4: <tool_call>{"name": "f", "arguments": {…}}</tool_call>
    "hermes": ParserKind(json_calls("<tool_call>", closes=("</tool_call>",))),
    # Jamba, Hunyuan, MiniMax M1: <tool_calls>[{"name": "f", "arguments": {…}}, …]</tool_calls>, or an object per line
    "jamba": ParserKind(json_calls("<tool_calls>", closes=("</tool_calls>",))),
    "kimi_k2": ParserKind(kimi.Kimi, needs_special_tokens=True, with_call_ids=with_names),
    "llama3_json": ParserKind(Llama3Json),
    # LongCat Flash: <longcat_tool_call>{"name": "f", "arguments": {…}}</longcat_tool_call>
    "longcat": ParserKind(json_calls("<longcat_tool_call>", closes=("</longcat_tool_call>",))),
    # MiniMax M2: <minimax:tool_call><invoke name="f"><parameter name="a">1</parameter></invoke></minimax:tool_call>
    "minimax_m2": ParserKind(
        xml_calls(
            XmlFormat(
                section=("<minimax:tool_call>", "</minimax:tool_call>"),
                call=("<invoke name=", "</invoke>"),
                parameter=("<parameter name=", "</parameter>"),
            )
        ),
        needs_special_tokens=True,
    ),
    "mistral": ParserKind(Mistral, needs_special_tokens=True, with_call_ids=with_nine_characters),
    # Nemotron until Nano 2: <TOOLCALL>[{"name": "f", "arguments": {…}}, …]</TOOLCALL>
    "nemotron": ParserKind(json_calls("<TOOLCALL>", closes=("</TOOLCALL>",))),
    "openai": _HARMONY,
    # Phi 4: functools[{"name": "f", "arguments": {…}}, …], or <|tool_call|>[…]<|/tool_call|>
    "phi4_mini_json": ParserKind(
        json_calls("<|tool_call|>", closes=("<|/tool_call|>",), in_text=("functools[",)), needs_special_tokens=True
    ),
    "pythonic": ParserKind(Pythonic),
    # Qwen 3 Coder, Nemotron 3, a line for each: <tool_call><function=f><parameter=a>1</parameter></function></tool_call>
    "qwen3_coder": ParserKind(
        xml_calls(
            XmlFormat(
                section=("<tool_call>", "</tool_call>"),
                call=("<function=", "</function>"),
                parameter=("<parameter=", "</parameter>"),
                has_newlines=True,
            )
        )
    ),
    # Seed OSS: <seed:tool_call><function=f><parameter=a>1</parameter></function></seed:tool_call>
    "seed_oss": ParserKind(
        xml_calls(
            XmlFormat(
                section=("<seed:tool_call>", "</seed:tool_call>"),
                call=("<function=", "</function>"),
                parameter=("<parameter=", "</parameter>"),
            )
        ),
        needs_special_tokens=True,
    ),
}

_MAY_THINK = reasoning_in(Tags())
_ALWAYS_THINKS = reasoning_in(Tags(), is_open=True)
_GRANITE = Tags(
    opens=("Here is my thought process:", "Here's my thought process:"),
    closes=("Here is my response:", "Here's my response:"),
    layout=" \n",
)

_REASONING = {
    "deepseek_r1": _ALWAYS_THINKS,
    "deepseek_v3": _MAY_THINK,
    "glm45": _MAY_THINK,
    "granite": reasoning_in(_GRANITE),
    "kimi": reasoning_in(Tags(("◁think▷",), ("◁/think▷",)), needs_special_tokens=True),
    # Calls may begin while the model still reasons.
    "kimi_k2": reasoning_in(Tags(ends=(kimi.SECTION,)), needs_special_tokens=True),
    "minimax_m2": _ALWAYS_THINKS,
    "minimax_m2_append_think": ParserKind(PrependedThink),
    "mistral": reasoning_in(Tags(("[THINK]",), ("[/THINK]",)), needs_special_tokens=True),
    "nemotron": _MAY_THINK,
    "openai_gptoss": _HARMONY,
    "qwen3": _MAY_THINK,
    "seed_oss": reasoning_in(Tags(("<seed:think>",), ("</seed:think>",)), needs_special_tokens=True),
}


def _by_all_names(formats: Sequence[MarkupFormat], kinds: Mapping[str, ParserKind]) -> dict[str, ParserKind]:
    names = {form.name: form.names for form in formats}
    return {name: kind for key, kind in kinds.items() for name in names[key]}


PARSER_REGISTRY = OutputParsers(_by_all_names(TOOL_FORMATS, _TOOLS), _by_all_names(REASONING_FORMATS, _REASONING))
