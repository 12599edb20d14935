"""What a model's text means: which of it is the answer, which reasoning, and which a call of a tool.

A model writes all of these as one text with markers of its own. A parser, one for each choice of a request, takes the text as it
comes, cut anywhere, and gives parts without the markers. Text that may be the beginning of a marker is held back until it is
certain. The model card names the parsers; `output_parser` chains them: reasoning first, the rest is searched for tool calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from dynamo.common.errors import Unsupported
from dynamo.common.model_card import LlmInfo


@dataclass(frozen=True, slots=True)
class Content:
    """Text of the answer itself."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that led to the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A piece of a call. The first piece of a call has its name; the `arguments` of all its pieces together are JSON."""

    index: int
    """Which of the answer's calls, counted from 0; a new call begins only when the one before is complete."""
    name: str = ""
    arguments: str = ""


Part: TypeAlias = Content | Reasoning | ToolCall
Tools: TypeAlias = Sequence[Mapping[str, Any]]
"""The tools of the request, as OpenAI writes them: `{"type": "function", "function": {"name", "parameters", …}}`."""


class OutputParser(Protocol):
    """Reads the text of one choice."""

    def feed(self, text: str) -> Sequence[Part]:
        """What became certain with `text`."""
        ...

    def finish(self) -> Sequence[Part]:
        """The text has ended: all that was held back."""
        ...


@dataclass(frozen=True, slots=True)
class ParserKind:
    """A parser by its name in model cards."""

    make: Callable[[Tools], OutputParser]
    needs_special_tokens: bool = False
    """Its markers are special tokens, which must not be left out of the text."""
    make_behind: Callable[[Tools, str], OutputParser] | None = None
    """Instead of `make`, for one that goes by how the prompt ends, which is the text it is given."""


@dataclass(frozen=True, slots=True)
class OutputParsers:
    """The parsers there are."""

    tools: Mapping[str, ParserKind]
    reasoning: Mapping[str, ParserKind]

    def choose(self, llm: LlmInfo, *, with_tools: bool) -> tuple[ParserKind, ...]:
        """The parsers for requests to a model, in the order of the text's way. Raises Unsupported for a name unknown here."""
        chosen = []
        if llm.reasoning_parser:
            chosen.append(_named(self.reasoning, llm.reasoning_parser, "reasoning"))
        if with_tools and llm.tool_parser:
            chosen.append(_named(self.tools, llm.tool_parser, "tool"))
        return tuple(chosen)


def _named(kinds: Mapping[str, ParserKind], name: str, what: str) -> ParserKind:
    kind = kinds.get(name)
    if kind is None:
        known = ", ".join(sorted(kinds)) or "none"
        raise Unsupported(f"the model names the {what} parser '{name}'; this server knows: {known}")
    return kind


def make_parser(kinds: Sequence[ParserKind], tools: Tools, prompt_end: str = "") -> OutputParser | None:
    """A parser for one choice; None if all its text is the answer. `prompt_end`: some characters before it."""
    parsers = [kind.make(tools) if kind.make_behind is None else kind.make_behind(tools, prompt_end) for kind in kinds]
    if not parsers:
        return None
    return parsers[0] if len(parsers) == 1 else Chain(parsers)


class Chain:
    """Parsers one behind the other: each gets the content that the one before it left."""

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
