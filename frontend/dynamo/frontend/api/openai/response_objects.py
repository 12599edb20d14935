"""Response bodies of the OpenAI API. Streams write the same shapes by hand, in `chunks`."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Raw, Struct, UnsetType

from dynamo.common.generation import Summary


class CachedTokens(Struct, frozen=True):
    cached_tokens: int = 0


class CompletionTokens(Struct, frozen=True):
    reasoning_tokens: int


class Usage(Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens = CachedTokens()
    completion_tokens_details: CompletionTokens | UnsetType = UNSET
    """Present for models whose reasoning is parsed."""

    @classmethod
    def of(cls, summary: Summary, reasoning_tokens: int | None = None) -> Usage:
        return cls(
            prompt_tokens=summary.prompt_tokens,
            completion_tokens=summary.output_tokens,
            total_tokens=summary.prompt_tokens + summary.output_tokens,
            prompt_tokens_details=CachedTokens(summary.cached_tokens),
            completion_tokens_details=UNSET if reasoning_tokens is None else CompletionTokens(reasoning_tokens),
        )


class TopLogprob(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct, frozen=True):
    content: Raw
    """An array of `TokenLogprob`s, encoded."""
    refusal: None = None


class PromptLogprob(Struct, frozen=True):
    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class Function(Struct, frozen=True):
    name: str
    arguments: str


class CustomCall(Struct, frozen=True):
    name: str
    input: str


class ResponseToolCall(Struct, frozen=True):
    id: str
    function: Function | UnsetType = UNSET
    type: Literal["function", "custom"] = "function"
    custom: CustomCall | UnsetType = UNSET


class ResponseMessage(Struct, frozen=True, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str | None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | None = None
    """The same, by the name that vLLM and OpenRouter have for it."""
    tool_calls: list[ResponseToolCall] | UnsetType = UNSET
    function_call: Function | UnsetType = UNSET
    """The older form of `tool_calls`, for requests in that form."""
    refusal: None = None


class ChatChoice(Struct, frozen=True, kw_only=True):
    index: int
    message: ResponseMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None


class ChatCompletion(Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[Raw]
    """Each is a `ChatChoice`, encoded."""
    usage: Usage
    system_fingerprint: None = None
    prompt_logprobs: Raw | None = None
    """`PromptLogprobs`, encoded."""
    prompt_token_ids: list[int] | None = None
    nvext: dict[str, Any] | UnsetType = UNSET


class CompletionLogprobs(Struct, frozen=True):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Struct, frozen=True, kw_only=True):
    index: int
    text: str
    logprobs: Raw | None = None
    """`CompletionLogprobs`, encoded."""
    finish_reason: str
    stop_reason: str | int | None = None
    prompt_logprobs: Raw | None = None
    """`PromptLogprobs`, encoded."""
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None


class Completion(Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[Raw]
    """`CompletionChoice`s, encoded."""
    usage: Usage
    system_fingerprint: None = None
    nvext: dict[str, Any] | UnsetType = UNSET


class Embedding(Struct, frozen=True, kw_only=True):
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingUsage(Struct, frozen=True):
    prompt_tokens: int
    total_tokens: int


class Embeddings(Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class InputTokens(Struct, frozen=True, kw_only=True):
    """How long the input of a response would be."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class Tokenized(Struct, frozen=True, kw_only=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class TokenizerDescription(Struct, frozen=True, kw_only=True):
    """The keys of `tokenizer_config.json` that are known of every model."""

    tokenizer_class: Literal["PreTrainedTokenizerFast"] = "PreTrainedTokenizerFast"
    """What transformers calls a tokenizer that is one `tokenizer.json`."""
    model_max_length: int
    add_bos_token: bool
    bos_token: str | None
    eos_token: str | None
    chat_template: str | None


class Detokenized(Struct, frozen=True):
    prompt: str
