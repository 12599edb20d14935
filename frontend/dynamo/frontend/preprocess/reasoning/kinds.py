"""How families of models mark their reasoning."""

from __future__ import annotations

from dynamo.frontend.preprocess.parsers import ParserKind
from dynamo.frontend.preprocess.reasoning.think import PrependedThink, Tags, reasoning_in
from dynamo.frontend.preprocess.tools.formats import kimi

THINK = Tags()
GRANITE = Tags(
    opens=("Here is my thought process:", "Here's my thought process:"),
    closes=("Here is my response:", "Here's my response:"),
    layout=" \n",
)
KIMI_K2 = Tags(ends=(kimi.SECTION,))
"""Calls may begin while the model still reasons."""

MAY_THINK = reasoning_in(THINK)
ALWAYS_THINKS = reasoning_in(THINK, is_open=True)

REASONING: dict[str, ParserKind] = {
    "deepseek_r1": ALWAYS_THINKS,
    "deepseek_v3": MAY_THINK,
    "glm45": MAY_THINK,
    "granite": reasoning_in(GRANITE),
    "kimi": reasoning_in(Tags(("◁think▷",), ("◁/think▷",)), needs_special_tokens=True),
    "kimi_k2": reasoning_in(KIMI_K2, needs_special_tokens=True),
    "minimax_m2": ALWAYS_THINKS,
    "minimax_m2_append_think": ParserKind(PrependedThink),
    "mistral": reasoning_in(Tags(("[THINK]",), ("[/THINK]",)), needs_special_tokens=True),
    "nemotron": MAY_THINK,
    "qwen3": MAY_THINK,
    "seed_oss": reasoning_in(Tags(("<seed:think>",), ("</seed:think>",)), needs_special_tokens=True),
}
