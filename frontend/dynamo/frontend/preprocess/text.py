"""Requests and responses of text generation in terms of text, as every API states and receives them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from dynamo.common.errors import InvalidRequest
from dynamo.common.generation import FinishReason, Sampling, Stop
from dynamo.frontend.preprocess.parsers import ReasoningTags


class ContextExceeded(InvalidRequest):
    """The prompt does not fit into the model's context."""


class ReasoningLimit(msgspec.Struct, frozen=True, kw_only=True):
    """The reasoning of a response is ended after so many tokens."""

    max_tokens: int
    tags: ReasoningTags


class TextRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt. Exactly one of `prompt` and `messages` is set."""

    model: str
    prompt: str | Sequence[int] | None = None
    """Text, or token ids."""
    messages: Sequence[Mapping[str, Any]] | None = None
    """A conversation, rendered with the model's chat template."""
    tools: Sequence[Mapping[str, Any]] = ()
    chat_template: str = ""
    """Replaces the model's own."""
    chat_template_kwargs: Mapping[str, Any] = msgspec.field(default_factory=dict)
    add_generation_prompt: bool = True
    continues_last: bool = False
    """The response continues the last message, which is a text of the assistant."""
    add_special_tokens: bool | None = None
    """Whether to add the tokens that the tokenizer puts around a text, such as BOS. None: to a prompt, not to a conversation."""
    truncate_prompt_tokens: int | None = None
    """Keep so many tokens of the prompt; -1: as many as leave room for the response."""
    drops_messages: bool = False
    """Drop the oldest messages of a conversation that leaves no room for the response. One with media is not shortened."""
    truncates_end: bool = False
    """Drop the end of a prompt that is too long, instead of its beginning."""
    sampling: Sampling = Sampling()
    bad_words: tuple[str, ...] = ()
    """Texts that must not be generated, besides the tokens in `sampling`."""
    stop: Stop = Stop()
    stop_strings: tuple[str, ...] = ()
    include_stop_string: bool = False
    skip_special_tokens: bool = True
    n: int = 1
    logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] = ()
    prompt_logprobs: int | None = None
    cache_salt: str = ""
    kv_transfer: dict[str, Any] | None = None
    """What the client says to the engine's connector for KV caches; then no other instance computes the prompt."""
    media: tuple[dict[str, Any], ...] = ()
    reasoning_limit: ReasoningLimit | None = None
    """Only with one choice, without structured output, and for models that take tokens."""


class TextDelta(msgspec.Struct, frozen=True, gc=False):
    """New text of one choice. `text` may be empty: a token can hold half a character."""

    index: int
    text: str
    tokens: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    logprobs: list[list[tuple[int, float]]] | None = None
    stop_reason: str | int | None = None
    """The stop string or stop token id that ended the choice; None for an end-of-sequence token of the model."""
    stop_token: int | None = None
    """The token that ended the choice, if one did; it is not part of `tokens`."""


_PIECE_CHARS = 8 * 1024
"""A longer text of a model that takes text may take a parser more than a few milliseconds: its length is the engine's choice."""


def in_pieces(delta: TextDelta) -> list[TextDelta]:
    """Return a delta as several if its text is long, so that what parses it can let others have their turns between them."""
    text = delta.text
    if len(text) <= _PIECE_CHARS:
        return [delta]
    begins = range(0, len(text) - _PIECE_CHARS, _PIECE_CHARS)
    pieces = [TextDelta(delta.index, text[begin : begin + _PIECE_CHARS]) for begin in begins]
    return [*pieces, msgspec.structs.replace(delta, text=text[begins[-1] + _PIECE_CHARS :])]
