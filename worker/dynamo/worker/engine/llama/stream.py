"""From the chunks that llama.cpp's server streams to token ids.

A chunk names one token: the newest. Tokens inside a character that several tokens spell come without a chunk of their own; the
chunk of the last one has the text of all, and counts them. So the other tokens are reconstructed from that text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from math import nan

import msgspec

from dynamo.common.errors import DynamoError, EngineError, InvalidRequest

UNKNOWN_LOGPROB = nan
"""Log probability of a token inside a character: llama.cpp does not report it."""

MAX_SPELLED_BYTES = 256
"""Parts of a character are short; longer text is not one."""


class _Probability(msgspec.Struct):
    id: int
    logprob: float


class _PositionLogprobs(msgspec.Struct):
    id: int
    logprob: float
    top_logprobs: list[_Probability]


class _Positions(msgspec.Struct):
    content: list[_PositionLogprobs]


class _ChunkChoice(msgspec.Struct):
    text: str
    finish_reason: str | None
    logprobs: _Positions | None = None


class ChunkTimings(msgspec.Struct):
    """`cache_n`: prompt tokens found in the prefix cache; `predicted_n`: tokens generated so far."""

    cache_n: int = 0
    prompt_ms: float = 0.0
    predicted_n: int = 0


class _ChunkError(msgspec.Struct):
    code: int = 500
    message: str = "llama.cpp failed without a word"


class CompletionChunk(msgspec.Struct):
    """One event of a streamed completion."""

    choices: list[_ChunkChoice] = []
    timings: ChunkTimings = msgspec.field(default_factory=ChunkTimings)
    error: _ChunkError | None = None

    @property
    def finish_reason(self) -> str | None:
        """`stop`, `length`, or None before the end."""
        return self.choices[0].finish_reason if self.choices else None

    def to_error(self) -> DynamoError | None:
        """Return the error of the chunk, if it has one."""
        if self.error is None:
            return None
        kind = InvalidRequest if 400 <= self.error.code < 500 else EngineError
        return kind(f"llama.cpp: {self.error.message}")


decode_chunk = msgspec.json.Decoder(CompletionChunk).decode


class TokenVocabulary:
    """What the tokens of a model add to the text."""

    def __init__(self, pieces: Sequence[bytes], silent: frozenset[int]) -> None:
        """`pieces` is the text of each token in UTF-8, see `GgufModel.token_bytes`; `silent` tokens may end a generation."""
        self.pieces = pieces
        self.silent = silent
        self._ids: Mapping[bytes, int] = {piece: id for id, piece in reversed([*enumerate(pieces)]) if piece}
        self._longest = max(map(len, pieces), default=0)

    def __len__(self) -> int:
        return len(self.pieces)

    def spell(self, text: bytes, count: int) -> tuple[int, ...]:
        """Return `count` tokens that spell `text`, the longest first; if there are none, the fewest that spell it.

        Returns an empty tuple if `text` cannot be spelled.
        """
        ids, longest = self._ids, self._longest

        @cache
        def rest(start: int, remaining: int) -> tuple[int, ...] | None:
            if start == len(text) or remaining == 0:
                return () if start == len(text) and remaining == 0 else None
            for end in range(min(len(text), start + longest), start, -1):
                token = ids.get(text[start:end])
                if token is not None and (others := rest(end, remaining - 1)) is not None:
                    return (token, *others)
            return None

        if len(text) > MAX_SPELLED_BYTES:
            return ()
        for tried in (count, *range(1, len(text) + 1)):
            if (tokens := rest(0, tried)) is not None:
                return tokens
        return ()


Step = list[tuple[int, float]]
"""Token and its log probability first, then the alternatives."""


class ChunkReader:
    """Turns the chunks of one completion into steps, one per token."""

    def __init__(self, vocabulary: TokenVocabulary, *, held: frozenset[int]) -> None:
        """`held` tokens are held back until it is known whether they end the generation."""
        self._vocabulary = vocabulary
        self._hold = held
        self._seen = 0
        self._held: Step | None = None

    def feed(self, chunk: CompletionChunk) -> list[Step]:
        """Return the tokens that are certain now. After a token that ended the generation, the next chunk follows at once."""
        choice = chunk.choices[0] if chunk.choices else None
        if choice is None or choice.logprobs is None or not choice.logprobs.content:
            return []
        steps = [] if self._held is None else [self._held]
        self._held = None
        position = choice.logprobs.content[-1]
        steps += self._missed(choice.text, position.id, chunk.timings.predicted_n - self._seen - 1)
        self._seen = chunk.timings.predicted_n
        others = [(other.id, other.logprob) for other in position.top_logprobs if other.id != position.id]
        step = [(position.id, position.logprob), *others]
        if position.id in self._hold:
            self._held = step
        else:
            steps.append(step)
        return steps

    def end(self) -> Step | None:
        """Return the token that was held back when the completion ended."""
        held, self._held = self._held, None
        return held

    def _missed(self, text: str, last: int, count: int) -> list[Step]:
        if count <= 0:
            return []
        spelled = text.encode()
        piece = self._vocabulary.pieces[last]
        before = spelled[: len(spelled) - len(piece)] if spelled.endswith(piece) else spelled
        return [[(token, UNKNOWN_LOGPROB)] for token in self._vocabulary.spell(before, count)]
