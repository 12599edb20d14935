"""Bodies of requests and responses in tokens, in the form of vLLM's API."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from dynamo.common.errors import InvalidRequest
from dynamo.frontend.api.calls import MAX_ID_CHARS
from dynamo.frontend.api.openai.requests import (
    INT32,
    INT64,
    Bias,
    ChatRequest,
    CompletionRequest,
    Count,
    Json,
    ModelRequest,
    Penalty,
    Positive,
    StreamOptions,
    StructuredOutputs,
    Text,
    TokenId,
)
from dynamo.frontend.api.openai.response_objects import Usage

Tokens = list[TokenId]


class SamplingParams(Struct, kw_only=True, frozen=True, omit_defaults=True):
    """How to choose tokens. `null`, which renderers of others write, is the same as leaving a field out."""

    n: Positive | None = None
    max_tokens: (
        Annotated[int, Meta(ge=1, le=INT32, description="Default: as many as the model's context has room for.")] | None
    ) = None
    min_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=INT32)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=-INT64 - 1, le=INT64)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    logit_bias: Annotated[dict[str, Bias], Meta(max_length=1024, description="By token id.")] | None = None
    allowed_token_ids: Annotated[list[TokenId], Meta(min_length=1, max_length=65536)] | None = None
    bad_words: Annotated[list[Annotated[str, Meta(min_length=1, max_length=256)]], Meta(max_length=256)] | None = None
    stop: str | list[Text] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=256)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: Annotated[bool, Meta(description="In the text of `output_mode: text`.")] | None = None
    spaces_between_special_tokens: bool | None = None
    logprobs: Count | None = None
    prompt_logprobs: Count | None = None
    structured_outputs: StructuredOutputs | None = None
    detokenize: Annotated[bool, Meta(description="Accepted; responses have text with `output_mode: text`.")] | None = None
    output_kind: Any = None
    extra_args: Json | None = None


class TokensRequest(ModelRequest, kw_only=True, frozen=True):
    """POST /inference/v1/generate"""

    token_ids: Annotated[Tokens, Meta(min_length=1, description="The prompt.")]
    sampling_params: SamplingParams
    request_id: Annotated[str, Meta(max_length=MAX_ID_CHARS, description="Without the header `x-request-id`.")] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    output_mode: Annotated[Literal["tokens", "text"], Meta(description="`text`: text beside the tokens.")] | None = None
    return_token_ids: Annotated[bool, Meta(description="Return the prompt as well.")] | None = None
    cache_salt: Annotated[str, Meta(max_length=1024)] | None = None
    priority: Annotated[int, Meta(ge=-INT32, le=INT32, description="Higher is more important.")] | None = None
    session_id: (
        Annotated[str, Meta(max_length=MAX_ID_CHARS, description="Requests of one session go to one instance.")] | None
    ) = None
    kv_transfer_params: Annotated[Json, Meta(description="For the engine's connector, where the operator allows it.")] | None = (
        None
    )
    ec_transfer_params: Json | None = None
    features: Json | None = None
    content_parts: list[Json] | None = None
    token_offsets: list[Any] | None = None
    reasoning_ended: bool | None = None
    reasoning_parser_kwargs: Json | None = None

    @property
    def wants_text(self) -> bool:
        return self.output_mode == "text"

    def to_completion(self, model: str) -> CompletionRequest:
        """Return the request as a completion of the prompt's tokens. Raises InvalidRequest for fields that are not supported."""
        sampling = self.sampling_params
        unsupported = {
            "features": (self.features, "send images in messages of a chat completion"),
            "content_parts": (self.content_parts, "send images in messages of a chat completion"),
            "ec_transfer_params": (self.ec_transfer_params, "transfers of encoder caches are arranged by the server"),
            "sampling_params.extra_args": (sampling.extra_args, "arguments for extensions of an engine are not passed on"),
        }
        for name, (value, instead) in unsupported.items():
            if value:
                raise InvalidRequest(f"'{name}' is not supported: {instead}", param=name)
        return CompletionRequest(
            model=model,
            prompt=self.token_ids,  # type: ignore[arg-type]  # of ids alone, and not copied
            stream=self.stream,
            stream_options=self.stream_options,
            max_tokens=sampling.max_tokens,
            min_tokens=sampling.min_tokens,
            n=sampling.n,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            seed=sampling.seed,
            frequency_penalty=sampling.frequency_penalty,
            presence_penalty=sampling.presence_penalty,
            repetition_penalty=sampling.repetition_penalty,
            logit_bias=sampling.logit_bias,
            allowed_token_ids=sampling.allowed_token_ids,
            bad_words=sampling.bad_words,
            stop=sampling.stop,
            stop_token_ids=sampling.stop_token_ids,
            ignore_eos=sampling.ignore_eos,
            include_stop_str_in_output=sampling.include_stop_str_in_output,
            skip_special_tokens=sampling.skip_special_tokens,
            logprobs=sampling.logprobs,
            prompt_logprobs=sampling.prompt_logprobs,
            structured_outputs=sampling.structured_outputs,
            cache_salt=self.cache_salt,
            priority=self.priority,
            session_id=self.session_id,
        )


class TokenIdLogprob(Struct, kw_only=True, frozen=True):
    token_id: int
    token: str
    """`token_id:17`; with `output_mode: text` the token's text."""
    logprob: float
    bytes: list[int] | None = None
    top_logprobs: list[TokenIdLogprob] | UnsetType = UNSET
    """Present for generated tokens, not for their alternatives."""


class TokenChoice(Struct, kw_only=True, frozen=True):
    index: int
    token_ids: list[int]
    text: str | UnsetType = UNSET
    logprobs: Raw | None = None
    """`{"content": […]}` with `TokenIdLogprob`s, encoded."""
    finish_reason: str | None
    stop_reason: str | int | None = None


class TokensResponse(Struct, kw_only=True, frozen=True):
    request_id: str
    model: str
    created: int
    output_mode: Literal["tokens", "text"] = "tokens"
    choices: list[Raw]
    """Each is a `TokenChoice`, encoded."""
    usage: Usage
    prompt_logprobs: Raw | None = None
    prompt_token_ids: list[int] | None = None
    kv_transfer_params: Json | None = None


# Rendering


class DerenderedLogprob(Struct, kw_only=True, frozen=True):
    token_id: TokenId | None = None
    token: str | None = None
    logprob: float
    top_logprobs: list[DerenderedLogprob] | None = None

    @property
    def position(self) -> list[tuple[int, float]]:
        """The token and its alternatives, with their log probabilities. Raises InvalidRequest."""
        return [(self.id, self.logprob), *((top.id, top.logprob) for top in self.top_logprobs or ())]

    @property
    def id(self) -> int:
        """The token. Raises InvalidRequest."""
        if self.token_id is not None:
            return self.token_id
        name, _, digits = (self.token or "").rpartition("token_id:")
        if name or not digits.isdecimal() or len(digits) > 10:
            raise InvalidRequest("log probabilities need 'token_id', or 'token' of the form token_id:17", param="logprobs")
        return int(digits)


class DerenderedLogprobs(Struct, kw_only=True, frozen=True):
    content: list[DerenderedLogprob] | None = None

    def positions(self) -> list[list[tuple[int, float]]] | None:
        """Return the positions. Raises InvalidRequest."""
        return None if self.content is None else [each.position for each in self.content]


class DerenderedChoice(Struct, kw_only=True, frozen=True):
    index: Count
    token_ids: Tokens | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: DerenderedLogprobs | None = None


class DerenderedResponse(Struct, kw_only=True, frozen=True):
    """What /inference/v1/generate has responded."""

    request_id: Annotated[str, Meta(max_length=MAX_ID_CHARS)] | None = None
    output_mode: Literal["tokens"] | None = None
    choices: Annotated[list[DerenderedChoice], Meta(min_length=1, max_length=1024)]
    prompt_token_ids: Tokens | None = None


class DerenderChatRequest(ModelRequest, kw_only=True, frozen=True):
    """POST /v1/chat/completions/derender"""

    generate_response: DerenderedResponse
    prompt_tokens: Count | None = None
    prompt_token_ids: Tokens | None = None
    chat_request: ChatRequest | None = None
    stream: Literal[False] | None = None


class DerenderCompletionRequest(ModelRequest, kw_only=True, frozen=True):
    """POST /v1/completions/derender"""

    generate_responses: Annotated[list[DerenderedResponse], Meta(min_length=1, max_length=1024)]
    prompt_tokens: list[Count] | None = None
    prompt_token_ids: list[Tokens | None] | None = None
    completion_request: CompletionRequest | None = None
    stream: Literal[False] | None = None


class RenderedRequest(Struct, kw_only=True, frozen=True, omit_defaults=True):
    """A request for /inference/v1/generate."""

    request_id: str
    model: str
    token_ids: list[int]
    sampling_params: SamplingParams
    stream: bool = False
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    priority: int = 0
