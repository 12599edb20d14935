"""Incremental detokenization: whole characters only, and no text that may turn out to be part of a stop string."""

from __future__ import annotations

import codecs
import re
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Protocol

import msgspec

from dynamo.common.generation import Delta, FinishReason
from dynamo.frontend.preprocess.text import TextDelta
from dynamo.frontend.preprocess.tokens.tokenizer import Piece, Tokenizer

_REPLACEMENT = "\ufffd"
CONTEXT_TOKENS = 8
"""How many tokens of the prompt are decoded along: they decide whether the response starts with a space."""
_LONGEST_CHARACTER = 4
"""Most tokens that one character can be split into: UTF-8 has at most four bytes."""


class Detokenizer:
    """Turns the tokens of one request's choices into text.

    The text continues the prompt. A stop string ends a choice, and is cut off unless the request includes it; it is matched
    only in the text of tokens after the first `min_tokens`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        n: int = 1,
        stop_strings: Sequence[str] = (),
        include_stop_string: bool = False,
        skip_special_tokens: bool = True,
        eos_token_ids: AbstractSet[int] = frozenset(),
        min_tokens: int = 0,
        prompt: Sequence[int] = (),
    ) -> None:
        """`eos_token_ids` end a choice without becoming its `stop_reason`.

        Only the last CONTEXT_TOKENS of `prompt` matter, and these only where the text of a token depends on its neighbours.
        """
        self._include_stop_string = include_stop_string
        self._eos_token_ids = eos_token_ids
        self._min_tokens = min_tokens
        self._running: dict[int, _ChoiceState] = {}
        pieces = tokenizer.pieces_without_special if skip_special_tokens else tokenizer.pieces
        for index, stopper in enumerate(new_stoppers(stop_strings, n)):
            text = _WindowText(tokenizer, prompt, skip_special_tokens) if pieces is None else _PieceText(pieces, pieces)
            self._running[index] = _ChoiceState(text, stopper)

    def __repr__(self) -> str:
        return f"Detokenizer(running choices {sorted(self._running)})"

    @property
    def done(self) -> bool:
        """Whether every choice has finished."""
        return not self._running

    def feed(self, delta: Delta) -> TextDelta | None:
        """Return new text, with all tokens since the last text and their logprobs; None if there is none yet.

        The end of a choice is always returned, once. Deltas of a finished choice give None.
        """
        index = delta.index
        choice = self._running.get(index)
        if choice is None:
            return None
        tokens = delta.tokens
        if choice.stopper is not None:
            return self._feed_until_stop(choice, choice.stopper, delta)
        whole = choice.text.whole
        text: str | None = None
        if whole is not None and len(tokens) == 1:  # the short way of most tokens
            piece = whole[tokens[0]]
            text = piece if piece.__class__ is str else None
        if text is None:
            push = choice.text.push
            text = push(tokens[0]) if len(tokens) == 1 else "".join([push(token) for token in tokens])
        if delta.finish_reason is not None:
            return self._end(choice, delta, text + choice.text.flush())
        if not text:
            choice.hold(tokens, delta.logprobs)
            return None
        if choice.tokens:
            return choice.release(index, text, tokens, delta.logprobs)
        return TextDelta(index, text, tokens, None, delta.logprobs)

    def _feed_until_stop(self, choice: _ChoiceState, stopper: Stopper, delta: Delta) -> TextDelta | None:
        certain: list[str] = []
        for count, token in enumerate(delta.tokens, 1):
            choice.seen += 1
            text = choice.text.push(token)
            if choice.seen <= self._min_tokens:
                certain.append(text)
                continue
            certain.append(stopper.push(text))
            if stopper.hit is not None:
                return self._stopped(choice, stopper.hit, delta, "".join(certain), count)
        if delta.finish_reason is not None:
            certain.append(stopper.push(choice.text.flush()))
            if stopper.hit is not None:
                return self._stopped(choice, stopper.hit, delta, "".join(certain), len(delta.tokens))
            return self._end(choice, delta, "".join(certain) + stopper.held)
        text = "".join(certain)
        if not text:
            choice.hold(delta.tokens, delta.logprobs)
            return None
        return choice.release(delta.index, text, delta.tokens, delta.logprobs)

    def _stopped(self, choice: _ChoiceState, hit: str, delta: Delta, text: str, count: int) -> TextDelta:
        """Finish a choice whose stop string was complete after `count` of the delta's tokens."""
        del self._running[delta.index]
        if self._include_stop_string:
            text += hit
        logprobs = delta.logprobs and delta.logprobs[:count]
        return choice.release(delta.index, text, delta.tokens[:count], logprobs, FinishReason.STOP, hit)

    def _end(self, choice: _ChoiceState, delta: Delta, text: str) -> TextDelta:
        del self._running[delta.index]
        token = delta.stop_token
        reason = None if token in self._eos_token_ids else token
        if not choice.tokens:
            return TextDelta(delta.index, text, delta.tokens, delta.finish_reason, delta.logprobs, reason, token)
        return choice.release(delta.index, text, delta.tokens, delta.logprobs, delta.finish_reason, reason, token)


class _ChoiceState(msgspec.Struct, eq=False):
    text: _Text
    stopper: Stopper | None
    seen: int = 0
    """Number of tokens so far; counted only if there are stop strings."""
    tokens: tuple[int, ...] = ()
    """Tokens whose text is held back."""
    _logprobs: list[list[tuple[int, float]]] | None = None

    def hold(self, tokens: tuple[int, ...], logprobs: list[list[tuple[int, float]]] | None) -> None:
        self.tokens += tokens
        if logprobs:
            self._logprobs = (self._logprobs or []) + logprobs

    def release(
        self,
        index: int,
        text: str,
        tokens: tuple[int, ...],
        logprobs: list[list[tuple[int, float]]] | None,
        reason: FinishReason | None = None,
        stop_reason: str | int | None = None,
        stop_token: int | None = None,
    ) -> TextDelta:
        """Return a delta with `text` and all tokens: the ones held back, then `tokens`."""
        if self.tokens:
            self.hold(tokens, logprobs)
            tokens, logprobs = self.tokens, self._logprobs
            self.tokens, self._logprobs = (), None
        return TextDelta(index, text, tokens, reason, logprobs, stop_reason, stop_token)


# Tokens to whole characters


class _Text(Protocol):
    @property
    def whole(self) -> Mapping[int, Piece] | None:
        """What `push` returns now for tokens whose piece is a text, changing nothing; None: it depends on more than the token."""
        ...

    def push(self, token: int) -> str:
        """Return the characters that `token` completes."""
        ...

    def flush(self) -> str:
        """Return what is left at the end: U+FFFD for an incomplete character."""
        ...


class _PieceText(msgspec.Struct, eq=False):
    """For tokenizers whose tokens have the same text in any context."""

    _pieces: Mapping[int, Piece]
    whole: Mapping[int, Piece] | None
    """None while a character has begun."""
    _half: bytes = b""
    """The beginning of a character: at most three bytes."""

    def push(self, token: int) -> str:
        piece = self._pieces[token]
        if not self._half and isinstance(piece, str):
            return piece
        if not piece:
            return ""
        if isinstance(piece, str):
            return self.flush() + piece
        data = self._half + piece
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._half = data[used:]
        self.whole = None if self._half else self._pieces
        return text

    def flush(self) -> str:
        half, self._half = self._half, b""
        self.whole = self._pieces
        return half.decode(errors="replace")


class _WindowText:
    """For all others: decodes the last few tokens again with each new one, and returns what the text grew by."""

    __slots__ = ("_before", "_before_text", "_new", "_skip", "_tokenizer")

    whole = None

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._before = list(prompt[-CONTEXT_TOKENS:])
        """Tokens whose text was returned."""
        self._before_text = self._decode(self._before)
        self._new: list[int] = []
        """Tokens after those."""

    def push(self, token: int) -> str:
        self._new.append(token)
        text = self._decode(self._before + self._new)
        if text.endswith(_REPLACEMENT) and len(self._new) < _LONGEST_CHARACTER:
            return ""
        return self._take(text)

    def flush(self) -> str:
        return self._take(self._decode(self._before + self._new)) if self._new else ""

    def _take(self, text: str) -> str:
        added = text[len(self._before_text) :]
        self._before = (self._before + self._new)[-CONTEXT_TOKENS:]
        self._new = []
        self._before_text = self._decode(self._before)
        return added

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=self._skip)


# Stop strings


class _Pattern:
    """A stop string with its Knuth-Morris-Pratt table: for each match length, the length that remains after a mismatch."""

    __slots__ = ("_fallback", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self._fallback = [0] * (len(text) + 1)
        matched = 0
        for index in range(1, len(text)):
            matched = self.advance(matched, text[index])
            self._fallback[index + 1] = matched

    def advance(self, matched: int, character: str) -> int:
        """Return how many characters of the stop string match after `character`, given `matched` before it."""
        while matched and self.text[matched] != character:
            matched = self._fallback[matched]
        return matched + (self.text[matched] == character)


def new_stoppers(stop_strings: Sequence[str], n: int) -> Sequence[Stopper | None]:
    """Return a new `Stopper` for each of `n` choices, or None for each if there are no stop strings."""
    stops = tuple([_Pattern(text) for text in dict.fromkeys(stop_strings) if text]) if stop_strings else ()
    if not stops:
        return [None] * n
    first = re.compile(f"[{re.escape(''.join(stop.text[0] for stop in stops))}]")
    return [Stopper(stops, first) for _ in range(n)]


_LONG_TEXT_CHARS = 256
"""Text that comes together, as of engines that take text, from which on looking for whole stop strings costs less."""


class Stopper:
    """Searches the text of one choice, cut anywhere, for stop strings.

    The stop string that is complete first wins; of several that end together, the longest.
    """

    __slots__ = ("_first", "_matched", "_stops", "held", "hit")

    def __init__(self, stops: Sequence[_Pattern], first: re.Pattern[str]) -> None:
        """`first` matches the first character of any of `stops`."""
        self._stops = stops
        self._first = first
        self._matched = [0] * len(stops)
        self.held = ""
        """Text that may be the beginning of a stop string."""
        self.hit: str | None = None
        """The stop string that matched."""

    def push(self, text: str) -> str:
        """Return text that cannot be part of a stop string. Must not be called after a hit."""
        if not self.held and self._first.search(text) is None:
            return text
        whole = self.held + text
        end, hit = self._read_long(whole, text) if len(text) > _LONG_TEXT_CHARS else self._read(text, len(self.held))
        if hit is not None:
            self.hit, self.held = hit, ""
            return whole[: end - len(hit)]
        certain = len(whole) - max(self._matched)
        self.held = whole[certain:]
        return whole[:certain]

    def _read(self, text: str, before: int) -> tuple[int, str | None]:
        """Read text after `before` characters that are held. Return where a stop string ends, and which one; None: nowhere."""
        for end, character in enumerate(text, before + 1):
            hit = self._advance(character)
            if hit is not None:
                return end, hit
        return 0, None

    def _read_long(self, whole: str, text: str) -> tuple[int, str | None]:
        """Do as `_read` does with the end of `whole`, which begins with what is held, without a look at each character."""
        ends = [
            (begin + len(stop.text), -len(stop.text), stop.text) for stop in self._stops if (begin := whole.find(stop.text)) >= 0
        ]
        if ends:
            end, _, hit = min(ends)
            return end, hit
        for index, stop in enumerate(self._stops):
            matched, tail = self._matched[index], text
            if len(text) >= len(stop.text):  # no more than its end can be the beginning of the stop string
                matched, tail = 0, whole[len(whole) - len(stop.text) + 1 :]
            for character in tail:
                matched = stop.advance(matched, character)
            self._matched[index] = matched
        return 0, None

    def _advance(self, character: str) -> str | None:
        hit: str | None = None
        for index, stop in enumerate(self._stops):
            matched = self._matched[index] = stop.advance(self._matched[index], character)
            if matched == len(stop.text) and (hit is None or matched > len(hit)):
                hit = stop.text
        return hit
