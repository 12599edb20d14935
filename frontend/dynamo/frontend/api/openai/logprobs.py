"""Log probabilities in the forms of OpenAI's API."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence

from dynamo.frontend.api.openai.response_objects import (
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprob,
    TopLogprob,
)
from dynamo.frontend.api.text.token_texts import TokenTexts, best_first

Positions = Sequence[Sequence[tuple[int, float]]]
"""For each token: itself and its alternatives, with their log probabilities."""


MANY_POSITIONS = 512
"""The log probabilities of more tokens are not put together on the event loop."""


class PackedLogprobs:
    """`Positions` in 16 bytes for each token or alternative, where tuples take seven times as much."""

    __slots__ = ("_lengths", "_tokens", "_values")

    def __init__(self) -> None:
        self._lengths = array("I")
        self._tokens = array("q")
        self._values = array("d")

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


def join_logprobs(parts: Sequence[CompletionLogprobs]) -> CompletionLogprobs:
    return CompletionLogprobs(
        [token for part in parts for token in part.tokens],
        [value for part in parts for value in part.token_logprobs],
        [tops for part in parts for tops in part.top_logprobs],
        [offset for part in parts for offset in part.text_offset],
    )


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
