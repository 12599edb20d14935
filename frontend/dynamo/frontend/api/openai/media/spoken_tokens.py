"""How many tokens a conversation has taken, by what its server says.

Its events have a `usage` at the end of a response. What comes of a response before that is estimated, as for other streams of
models that do not count as they go: its client may leave, and a server need not count at all.
"""

from __future__ import annotations

import json
from typing import Final, TypeVar

import msgspec

from dynamo.common.errors import EngineError
from dynamo.frontend.serving.prompt_tokens import BYTES_PER_TOKEN

_AUDIO_CHARACTERS_PER_TOKEN: Final = 3200
"""50 ms of what OpenAI's models say, 24,000 samples of two bytes a second, in base64."""
_MOST_TOKENS: Final = 1 << 31
"""The most of one response: a server may say any number, and a ledger would keep each of its digits."""
_MOST_OPEN: Final = 16
"""Responses at once whose estimates a `usage` replaces; those of older ones stay."""
_ID_BYTES: Final = 64
_LONGEST_INVALID: Final = 256 * 1024
"""Events that are no JSON, by numbers such as NaN, are read in Python up to this length, in one turn."""

_NONE: Final = msgspec.Raw(b"null")
T = TypeVar("T")


class _UsageSaid(msgspec.Struct):
    input_tokens: float | int | None = None
    output_tokens: float | int | None = None
    prompt_tokens: float | int | None = None
    completion_tokens: float | int | None = None
    """The last two as vLLM has them at the end of a transcription."""


class _Responded(msgspec.Struct):
    id: msgspec.Raw = _NONE
    usage: msgspec.Raw = _NONE


class _ServerEvent(msgspec.Struct):
    """Parts of any form: what has another one than that of the protocol, only the client has to know."""

    type: msgspec.Raw = _NONE
    response_id: msgspec.Raw = _NONE
    item_id: msgspec.Raw = _NONE
    delta: msgspec.Raw = _NONE
    usage: msgspec.Raw = _NONE
    response: msgspec.Raw = _NONE


_events = msgspec.json.Decoder(_ServerEvent)
_responded = msgspec.json.Decoder(_Responded)
_usage = msgspec.json.Decoder(_UsageSaid)
_text = msgspec.json.Decoder(str)


class SpokenTokens:
    """The tokens of one conversation."""

    def __init__(self) -> None:
        self.input = self.output = 0
        self._estimates: dict[bytes, int] = {}
        """The part of `output` that is estimated, by response, or by item for what the client has said."""

    def __repr__(self) -> str:
        return f"<SpokenTokens, input={self.input}, output={self.output} with {sum(self._estimates.values())} estimated>"

    def read(self, message: str) -> bool:
        """Count what an event says, and return whether it says anything of tokens.

        Raises EngineError for one that has a `usage` and cannot be read.
        """
        has_usage = '"usage"' in message
        if not has_usage and '.delta"' not in message:
            return False
        try:
            event = _read(message)
        except EngineError:
            if has_usage:
                raise
            return False
        response = _part(event.response, _responded) or _Responded()
        of = next((bytes(id) for id in (response.id, event.response_id, event.item_id) if id != _NONE), b"")[:_ID_BYTES]
        kind = bytes(event.type)
        if kind.endswith(b'.delta"'):
            self._estimate(of, _estimated(kind, event.delta))
        for usage in (_part(event.usage, _usage), _part(response.usage, _usage)):
            if usage is not None:
                self._count(of, usage)
        return True

    def _estimate(self, of: bytes, tokens: int) -> None:
        self.output += tokens
        self._estimates[of] = self._estimates.get(of, 0) + tokens
        if len(self._estimates) > _MOST_OPEN:
            del self._estimates[next(iter(self._estimates))]

    def _count(self, of: bytes, usage: _UsageSaid) -> None:
        """Replace the estimate of a response, and of events that do not say which they are of."""
        self.output -= self._estimates.pop(of, 0) + self._estimates.pop(b"", 0)
        self.input += _bounded(usage.input_tokens or usage.prompt_tokens)
        self.output += _bounded(usage.output_tokens or usage.completion_tokens)


def _read(message: str) -> _ServerEvent:
    """Raises EngineError for what is no JSON, except for numbers that Python writes into it."""
    try:
        return _events.decode(message)
    except (msgspec.MsgspecError, RecursionError) as error:
        why: Exception = error
    if len(message) <= _LONGEST_INVALID:
        try:
            return _events.decode(json.dumps(json.loads(message, parse_constant=lambda _: None)))
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            why = error
    raise EngineError(f"an event of the server cannot be read, so its tokens cannot be counted: {why}") from why


def _part(raw: msgspec.Raw, decoder: msgspec.json.Decoder[T]) -> T | None:
    try:
        return None if raw == _NONE else decoder.decode(raw)
    except msgspec.MsgspecError:
        return None


def _estimated(kind: bytes, delta: msgspec.Raw) -> int:
    if kind.endswith(b'audio.delta"'):
        return max(1, len(bytes(delta)) // _AUDIO_CHARACTERS_PER_TOKEN)
    text = _part(delta, _text) or ""
    return max(1, len(text) // BYTES_PER_TOKEN)


def _bounded(tokens: float | int | None) -> int:
    return int(min(max(0, tokens or 0), _MOST_TOKENS))
