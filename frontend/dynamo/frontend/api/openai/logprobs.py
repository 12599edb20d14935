"""Log probabilities in the forms of OpenAI's API."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import TypeVar

import msgspec
from msgspec import Raw

from dynamo.frontend.api.http.json_pieces import JsonArray, Spliced
from dynamo.frontend.api.openai.response_objects import (
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprob,
    TopLogprob,
)
from dynamo.frontend.api.text.token_texts import TokenTexts, best_first

_encode: Callable[[object], bytes] = msgspec.json.Encoder().encode
T = TypeVar("T")

Positions = Sequence[Sequence[tuple[int, float]]]
"""For each token: itself and its alternatives, with their log probabilities."""


MANY_POSITIONS = 512
"""The log probabilities of more tokens are not put together on the event loop."""


class PackedLogprobs:
    """`Positions` in 16 bytes for each token or alternative, where tuples take seven times as much."""

    __slots__ = ("_lengths", "_tokens", "_values", "total")

    def __init__(self) -> None:
        self._lengths = array("I")
        self._tokens = array("q")
        self._values = array("d")
        self.total = 0.0
        """The sum over the tokens themselves."""

    def __len__(self) -> int:
        """Return the number of positions."""
        return len(self._lengths)

    def __iter__(self) -> Iterator[list[tuple[int, float]]]:
        begin = 0
        for length in self._lengths:
            end = begin + length
            yield list(zip(self._tokens[begin:end], self._values[begin:end], strict=True))
            begin = end

    def add(self, positions: Positions) -> None:
        for position in positions:
            self._lengths.append(len(position))
            self.total += position[0][1] if position else 0.0
            self._tokens.extend([token for token, _ in position])
            self._values.extend([value for _, value in position])


def chat_logprobs(positions: Positions, texts: TokenTexts, top: int) -> list[TokenLogprob]:
    tokens = []
    for position in positions:
        token, logprob = position[0]
        tops = [TopLogprob(texts[other], value, texts.bytes_of(other)) for other, value in best_first(position, top)]
        tokens.append(TokenLogprob(texts[token], logprob, texts.bytes_of(token), tops))
    return tokens


class CompletionLogprobWriter:
    """Writes the columns of plain completions; character offsets run over the whole text of a choice."""

    def __init__(self, texts: TokenTexts, top: int) -> None:
        self._texts = texts
        self._top = top
        self._offset = 0

    def add(
        self, positions: Iterable[Sequence[tuple[int, float]] | None], tokens: Sequence[int] | None = None
    ) -> CompletionLogprobs:
        """`tokens` gives the ids for positions without an entry: the first token of a prompt has no probability."""
        names: list[str] = []
        values: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for index, position in enumerate(positions):
            token = position[0][0] if position else tokens[index] if tokens is not None else 0
            names.append(self._texts[token])
            values.append(position[0][1] if position else None)
            tops.append(self._alternatives(position) if position else None)
            offsets.append(self._offset)
            self._offset += len(names[-1])
        return CompletionLogprobs(names, values, tops, offsets)

    def _alternatives(self, position: Sequence[tuple[int, float]]) -> dict[str, float]:
        """Return the token itself and the likeliest ones, as OpenAI does, so that there may be one more than requested."""
        return {self._texts[token]: value for token, value in (position[0], *best_first(position, self._top))}


class EncodedLogprobs:
    """The columns of plain completions, encoded some positions at a time: an encoder keeps the interpreter to itself."""

    def __init__(self, writer: CompletionLogprobWriter) -> None:
        self._writer = writer
        self._columns = [JsonArray() for _ in msgspec.structs.fields(CompletionLogprobs)]

    def add(self, positions: Iterable[Sequence[tuple[int, float]] | None], tokens: Sequence[int] | None = None) -> None:
        """Add what `CompletionLogprobWriter.add` returns."""
        begin = 0
        for group in _groups(positions):
            part = self._writer.add(group, None if tokens is None else tokens[begin : begin + len(group)])
            for column, values in zip(self._columns, msgspec.structs.astuple(part), strict=True):
                column.extend(_encode(values))
            begin += len(group)

    def finish(self, long: Spliced) -> Raw:
        """Return what stands for the columns as an object."""
        fields = zip(msgspec.structs.fields(CompletionLogprobs), self._columns, strict=True)
        return Raw(_encode({field.encode_name: Raw(long.put(column)) for field, column in fields}))


def encoded_prompt_logprobs(positions: Sequence[Sequence[tuple[int, float]] | None], texts: TokenTexts, long: Spliced) -> Raw:
    """Return what stands for `prompt_logprobs`, encoded some positions at a time."""
    result = JsonArray()
    for group in _groups(positions):
        result.extend(_encode(prompt_logprobs(group, texts)))
    return Raw(long.put(result))


def _groups(positions: Iterable[T]) -> Iterator[list[T]]:
    left = iter(positions)
    while group := list(islice(left, MANY_POSITIONS)):
        yield group


def prompt_logprobs(positions: Sequence[Sequence[tuple[int, float]] | None], texts: TokenTexts) -> PromptLogprobs:
    """Return the tokens of each prompt position by their id; None for the first, which has no probability."""
    result: PromptLogprobs = []
    for position in positions:
        if not position:
            result.append(None)
            continue
        ranks = {token: rank for rank, (token, _) in enumerate(best_first(position, len(position)), 1)}
        has_ranks = len(position) > 1
        shown = {
            str(token): PromptLogprob(value, ranks[token] if has_ranks else None, texts[token])
            for token, value in dict(position).items()
        }
        result.append(shown)
    return result
