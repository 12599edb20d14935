"""Split a model's output into content, reasoning and tool calls.

A model writes all of these as one text with its own markers. A parser, one per choice, takes the text as it streams in, cut
anywhere, and returns parts without the markers. Text that may be the beginning of a marker is held back until that is decided.
The model card names the parsers; `make_parser` chains them: reasoning first, then tool calls in the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias

from dynamo.common.errors import Unsupported
from dynamo.common.model_card import LlmInfo


@dataclass(frozen=True, slots=True)
class Content:
    """Text of the response itself."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that the model wrote before its response, as reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A piece of a tool call. The first piece has the name; the `arguments` of all pieces concatenated are JSON."""

    index: int
    """The number of the call in its choice, from 0; a call starts only when the one before is complete."""
    name: str = ""
    arguments: str = ""


Part: TypeAlias = Content | Reasoning | ToolCall
Tools: TypeAlias = Sequence[Mapping[str, Any]]
"""The tools of the request, as OpenAI writes them: `{"type": "function", "function": {"name", "parameters", …}}`."""


class OutputParser(Protocol):
    """Parses the text of one choice."""

    def feed(self, text: str) -> Sequence[Part]:
        """Return the parts that `text` completes."""
        ...

    def finish(self) -> Sequence[Part]:
        """Return what was held back; the text has ended."""
        ...


@dataclass(frozen=True, slots=True)
class ReasoningTags:
    """The markers around reasoning at the beginning of a text."""

    opens: tuple[str, ...]
    closes: tuple[str, ...]
    """The first of them can be used to end it."""
    is_open: bool = False
    """The text begins with reasoning even without an opening one."""


@dataclass(frozen=True, slots=True)
class ParserKind:
    """How to make a parser that model cards name."""

    make: Callable[[Tools], OutputParser]
    needs_special_tokens: bool = False
    """Its markers are special tokens, so the text must include those."""
    make_after_prompt: Callable[[Tools, str], OutputParser] | None = None
    """Used instead of `make` by a parser that depends on the end of the prompt, its second argument."""
    tags: ReasoningTags | None = None
    """Tags of a parser of reasoning that tags mark; None for other parsers."""
    with_call_ids: Callable[[Sequence[dict[str, Any]]], list[dict[str, Any]]] | None = None
    """Returns a conversation with such ids of its tool calls as chat templates of the format expect; None: they take any."""


@dataclass(frozen=True, slots=True)
class OutputParsers:
    """All available parsers by name."""

    tools: Mapping[str, ParserKind]
    reasoning: Mapping[str, ParserKind]

    def choose(self, llm: LlmInfo, *, with_tools: bool) -> tuple[ParserKind, ...]:
        """Return the parsers for requests to a model, in the order they see the text. Raises Unsupported for an unknown name."""
        chosen = []
        if llm.reasoning_parser:
            chosen.append(_named(self.reasoning, llm.reasoning_parser, "reasoning"))
        if with_tools and llm.tool_parser:
            chosen.append(_named(self.tools, llm.tool_parser, "tool"))
        return tuple(chosen)


def _named(kinds: Mapping[str, ParserKind], name: str, what: str) -> ParserKind:
    kind = kinds.get(name)
    if kind is None:
        available = ", ".join(sorted(kinds)) or "none"
        raise Unsupported(f"the model names the {what} parser '{name}', which is not available; available: {available}")
    return kind


def make_parser(kinds: Sequence[ParserKind], tools: Tools, prompt_end: str = "") -> OutputParser | None:
    """Return a parser for one choice; None if all of its text is content. `prompt_end` is the end of the prompt."""
    parsers = [
        kind.make(tools) if kind.make_after_prompt is None else kind.make_after_prompt(tools, prompt_end) for kind in kinds
    ]
    if not parsers:
        return None
    return parsers[0] if len(parsers) == 1 else Chain(parsers)


def first_call_only(kind: ParserKind) -> ParserKind:
    """Return the same kind of parsers, which leave out all calls but the first."""
    after = kind.make_after_prompt
    return replace(
        kind,
        make=lambda tools: FirstCall(kind.make(tools)),
        make_after_prompt=None if after is None else lambda tools, prompt_end: FirstCall(after(tools, prompt_end)),
    )


class FirstCall:
    """Leaves out the calls after the first one."""

    def __init__(self, parser: OutputParser) -> None:
        self._parser = parser

    def feed(self, text: str) -> Sequence[Part]:
        return _without_more_calls(self._parser.feed(text))

    def finish(self) -> Sequence[Part]:
        return _without_more_calls(self._parser.finish())


def _without_more_calls(parts: Sequence[Part]) -> Sequence[Part]:
    return [part for part in parts if not isinstance(part, ToolCall) or part.index == 0]


class Chain:
    """Runs parsers in a row: each parses the content that the one before it returned."""

    def __init__(self, parsers: Sequence[OutputParser]) -> None:
        self._first = parsers[0]
        self._rest = parsers[1] if len(parsers) == 2 else Chain(parsers[1:])

    def feed(self, text: str) -> Sequence[Part]:
        return self._pass_on(self._first.feed(text))

    def finish(self) -> Sequence[Part]:
        return [*self._pass_on(self._first.finish()), *self._rest.finish()]

    def _pass_on(self, parts: Sequence[Part]) -> list[Part]:
        result: list[Part] = []
        for part in parts:
            if isinstance(part, Content):
                result += self._rest.feed(part.text)
            else:
                result.append(part)
        return result
