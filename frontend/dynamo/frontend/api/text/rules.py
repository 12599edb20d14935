"""What every API that takes texts checks."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import msgspec

from dynamo.common.errors import InvalidRequest
from dynamo.common.model_card import LlmInfo, ModelCard
from dynamo.frontend.config import TextLimits
from dynamo.frontend.preprocess.parsers import OutputParser, OutputParsers, ParserKind, Part
from dynamo.frontend.preprocess.text import TextDelta


def llm_of(card: ModelCard) -> LlmInfo:
    """Raises InvalidRequest for a model that does not generate text."""
    if card.llm is None:
        raise InvalidRequest(f"model '{card.name}' does not generate text", param="model")
    return card.llm


def choose_parsers(
    card: ModelCard, parsers: OutputParsers, forced: ParserKind | None, *, has_tools: bool, guided: bool
) -> tuple[ParserKind, ...]:
    """Who reads the model's text. Structure that is demanded holds from the first token on, so there is no reasoning then."""
    if forced is not None:
        return (forced,)
    llm = llm_of(card)
    if has_tools and not llm.tool_parser:
        raise InvalidRequest(
            f"model '{card.name}' was registered without a tool parser: demand a call by 'tool_choice', or leave out 'tools'",
            param="tools",
        )
    if guided:
        llm = msgspec.structs.replace(llm, reasoning_parser="")
    return parsers.choose(llm, with_tools=has_tools)


def check_chars(chars: int, limits: TextLimits, param: str) -> None:
    if chars > limits.max_prompt_chars:
        raise InvalidRequest(f"the prompt has {chars} characters; at most {limits.max_prompt_chars} are taken", param=param)


def stop_strings(stop: str | Sequence[str] | None, limits: TextLimits, param: str = "stop") -> tuple[str, ...]:
    """Raises InvalidRequest."""
    strings = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(strings) > limits.max_stop_strings:
        raise InvalidRequest(f"there are {len(strings)} stop strings; at most {limits.max_stop_strings} are taken", param=param)
    if "" in strings:
        raise InvalidRequest("a stop string is empty", param=param)
    return strings


def parsed(parser: OutputParser, delta: TextDelta) -> list[Part]:
    """What a delta adds, to the end if it is the last."""
    parts = list(parser.feed(delta.text)) if delta.text else []
    if delta.finish_reason is not None:
        parts += parser.finish()
    return parts


def new_tool_call_id(prefix: str = "call_") -> str:
    return prefix + secrets.token_hex(12)
