"""Checks and small helpers that every API for text generation shares."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence

import msgspec

from dynamo.common.errors import InvalidRequest
from dynamo.common.model_card import LlmInfo, ModelCard
from dynamo.common.process.work import Work
from dynamo.frontend.config import TextLimits
from dynamo.frontend.preprocess.parsers import OutputParser, OutputParsers, ParserKind, Part, first_call_only
from dynamo.frontend.preprocess.text import ReasoningLimit, TextDelta, TextRequest


def llm_of(card: ModelCard) -> LlmInfo:
    """Return the card's language model part. Raises InvalidRequest for a model that does not generate text."""
    if card.llm is None:
        raise InvalidRequest(f"model '{card.name}' does not generate text", param="model")
    return card.llm


def choose_parsers(
    card: ModelCard,
    parsers: OutputParsers,
    forced: ParserKind | None,
    *,
    has_tools: bool,
    guided: bool,
    parallel: bool = True,
) -> tuple[ParserKind, ...]:
    """Return the parsers for the model's text: `forced` alone, or those that the model card names.

    Guided output is constrained from the first token on, so a request with it gets no reasoning parser. Without `parallel`, calls
    after the first are left out.
    """
    if forced is not None:
        return (forced,)
    llm = llm_of(card)
    if has_tools and not llm.tool_parser:
        raise InvalidRequest(
            f"model '{card.name}' has no tool parser: start its worker with --tool-call-parser, require a call with "
            "'tool_choice', or leave out 'tools'",
            param="tools",
        )
    if guided:
        llm = msgspec.structs.replace(llm, reasoning_parser="")
    kinds = parsers.choose(llm, with_tools=has_tools)
    return kinds if parallel else tuple(map(first_call_only, kinds))


def reasoning_limit(
    max_tokens: int, card: ModelCard, kinds: Sequence[ParserKind], text: TextRequest, param: str
) -> ReasoningLimit:
    """Return a limit for the reasoning that one of `kinds` parses. Raises InvalidRequest about `param` if it cannot be kept."""
    tags = next((kind.tags for kind in kinds if kind.tags is not None), None)
    problem = ""
    if llm_of(card).takes_text:
        problem = f"model '{card.name}' takes text, so its reasoning cannot be ended"
    elif text.sampling.guided is not None:
        problem = "a limit of reasoning cannot be combined with structured output"
    elif text.n > 1:
        problem = f"a limit of reasoning needs one choice, and 'n' is {text.n}"
    elif tags is None:
        problem = f"model '{card.name}' has no reasoning parser with tags: start its worker with --reasoning-parser"
    if problem or tags is None:
        raise InvalidRequest(problem, param=param)
    return ReasoningLimit(max_tokens=max_tokens, tags=tags)


def check_chars(chars: int, limits: TextLimits, param: str) -> None:
    if chars > limits.max_prompt_chars:
        raise InvalidRequest(f"the prompt has {chars} characters; at most {limits.max_prompt_chars} are allowed", param=param)


def stop_strings(stop: str | Sequence[str] | None, limits: TextLimits, param: str = "stop") -> tuple[str, ...]:
    """Return the stop strings of a request as a tuple. Raises InvalidRequest for too many, or an empty one."""
    strings = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(strings) > limits.max_stop_strings:
        raise InvalidRequest(f"got {len(strings)} stop strings; at most {limits.max_stop_strings} are allowed", param=param)
    if "" in strings:
        raise InvalidRequest("stop strings must not be empty", param=param)
    return strings


def parse_delta(parser: OutputParser, delta: TextDelta) -> list[Part]:
    """Return the parts that `delta` completes, including what the parser held back if it is the last delta."""
    parts = list(parser.feed(delta.text)) if delta.text else []
    if delta.finish_reason is not None:
        parts += parser.finish()
    return parts


def one_by_one(add: Callable[[TextDelta], object], deltas: Sequence[TextDelta]) -> Work[None]:
    """Call `add` with each delta: many that come at once, such as the last ones of many choices, may take long to parse."""
    for delta in deltas:
        add(delta)
        yield 0


def new_tool_call_id(prefix: str = "call_") -> str:
    return prefix + secrets.token_hex(12)
