"""A request for text generation and its response, as they are sent between frontend and worker (msgpack)."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable
from enum import StrEnum
from hashlib import sha256
from typing import Annotated, Any, TypeAlias

import msgspec

from dynamo.common.errors import InvalidRequest

GRAMMAR_OWNER = "grammar-owner"
"""The header that says whose schema or grammar a request has: the name of an API key. Keys take turns where they are compiled."""


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    CONTENT_FILTER = "content_filter"
    TOOL_CALLS = "tool_calls"


def pack_tokens(tokens: Iterable[int]) -> bytes:
    """Return token ids as little-endian u32, the form that is sent and hashed."""
    packed = array("I", tokens)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(data: bytes) -> array[int]:
    """Inverse of `pack_tokens`."""
    tokens = array("I")
    tokens.frombytes(data)
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens


class TextPrompt(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an engine gets that takes text instead of tokens. Exactly one of `prompt` and `messages` is set.

    The fields are sent in this order, so that the turns of a conversation begin alike, by which routers find its cache.
    """

    tools: list[dict[str, Any]] = []
    template_variables: dict[str, Any] = {}
    """What a request sets for the chat template."""
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    """As in OpenAI's chat completions, but with `{"type": "media", "index": 0, …}` for the first of `GenerateRequest.media`."""


def pack_text(prompt: TextPrompt) -> bytes:
    """Return a prompt in the form that is sent and hashed: JSON, with spaces up to a multiple of four bytes.

    Counted as tokens of four bytes each it has about as many as the text.
    """
    packed = msgspec.json.encode(prompt)
    return packed + b" " * (-len(packed) % 4)


def unpack_text(data: bytes) -> TextPrompt:
    """Inverse of `pack_text`. Raises InvalidRequest for anything else."""
    try:
        return _text_decoder.decode(data)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InvalidRequest(f"the model takes text, and the request's prompt is none: {error}", param="prompt") from error


_text_decoder = msgspec.json.Decoder(TextPrompt)


class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to choose tokens. None means the engine's own default."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    logit_bias: dict[int, float] | None = None
    guided: dict[str, Any] | None = None
    """Structured output: one of `json_schema`, `json_object`, `regex`, `choice`, `grammar`, `structural_tag`."""
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words_token_ids: tuple[tuple[int, ...], ...] | None = None


class Stop(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """When to end. Stop strings are matched by the frontend, which has the text; engines match token ids only."""

    max_tokens: int | None = None
    min_tokens: int = 0
    token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One prompt for one instance."""

    model: str
    prompt: bytes
    """Token ids, see `pack_tokens`; for a model that takes text, see `pack_text`."""
    sampling: Sampling = Sampling()
    stop: Stop = Stop()
    n: int = 1
    logprobs: int | None = None
    """How many alternatives to report per generated token; 0 reports the chosen token only."""
    logprob_token_ids: tuple[int, ...] = ()
    """Report these tokens, instead of the likeliest ones, beside each generated token. Needs `logprobs`, which is 0 then."""
    prompt_logprobs: int | None = None
    priority: int = 0
    """Higher is more important."""
    adapter: str = ""
    """LoRA adapter."""
    cache_salt: str = ""
    """Requests share cached prefixes only with requests of the same salt."""
    data_parallel_rank: int | None = None
    kv_transfer: dict[str, Any] | None = None
    """Disaggregated serving: what the engine's connector needs to fetch or to offer the prompt's KV blocks."""
    media: tuple[dict[str, Any], ...] = ()
    """Images and audio in the order of the prompt: content parts of the OpenAI API; for engines that take tokens `image_part`s.

    Only for engines whose card declares the modality.
    """
    conversation: bytes = b""
    """What `prompt` was made of, see `pack_text`: for engines that render conversations with images themselves."""
    first_choice: int = 0
    """Index of the first choice, if the request continues a part of a larger one: engines whose choices have random numbers by
    index continue with theirs. `Delta.index` counts from 0 all the same.
    """

    @property
    def tokens(self) -> array[int]:
        return unpack_tokens(self.prompt)

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt, in tokens; for a model that takes text, an estimate."""
        return len(self.prompt) // 4


def image_part(data: bytes) -> dict[str, Any]:
    """Return an encoded image as engines that take tokens get it. The prompt has one token in its place."""
    return {"type": "image", "sha256": sha256(data).digest(), "data": data}


TokenId: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=(1 << 32) - 1)]
# What readers accept, so that no instance can keep others busy with one response for seconds.
MAX_DELTA_TOKENS = 1 << 18
_DeltaTokens: TypeAlias = Annotated[tuple[TokenId, ...], msgspec.Meta(max_length=MAX_DELTA_TOKENS)]
_Logprobs: TypeAlias = Annotated[list[list[tuple[int, float]]], msgspec.Meta(max_length=MAX_DELTA_TOKENS + 1)]
_MAX_SUMMARY_BYTES = 4 * 2**20


class Delta(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """What one engine step added to one choice. Trailing fields at their default are not sent."""

    tokens: _DeltaTokens = ()
    index: int = 0
    """Which of the request's `n` choices."""
    finish_reason: FinishReason | None = None
    logprobs: _Logprobs | None = None
    """One entry per token of `tokens`: (token id, log probability), the token first, then the best alternatives.

    One more for `stop_token`, of engines that report it.
    """
    stop_token: int | None = None
    """The stop token that ended the choice, if one did; it is not part of `tokens`."""
    text: str = ""
    """What a model that takes text generated, instead of `tokens`."""


TokenCount: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
"""What engines report: keys are charged by it."""


class Summary(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The trailer that ends a generation."""

    prompt_tokens: TokenCount = 0
    output_tokens: TokenCount = 0
    cached_tokens: TokenCount = 0
    """Prompt tokens whose KV blocks were found in the instance's prefix cache."""
    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    kv_transfer: dict[str, Any] | None = None
    prompt_logprobs: list[list[tuple[int, float]] | None] | None = None


request_encoder = msgspec.msgpack.Encoder()
request_decoder = msgspec.msgpack.Decoder(GenerateRequest)
delta_encoder = msgspec.msgpack.Encoder()
delta_decoder = msgspec.msgpack.Decoder(Delta)
summary_encoder = msgspec.msgpack.Encoder()
summary_decoder = msgspec.msgpack.Decoder(Summary)


def read_summary(body: bytes | bytearray | memoryview) -> Summary:
    """Decode what an engine ended a response with. Raises ValueError."""
    if len(body) > _MAX_SUMMARY_BYTES:
        raise ValueError(f"it has {len(body)} bytes; at most {_MAX_SUMMARY_BYTES} are allowed")
    summary: Summary = summary_decoder.decode(body)
    return summary
