"""Request bodies of the OpenAI API. `null` means the same as leaving a field out; for unknown fields see `RequestReader`.

Fields without a meaning here are accepted if ignoring them does not change the response (`user`, `store`), and rejected
otherwise (`audio`): see `unsupported_fields`. Fields "beyond OpenAI" are extensions of other servers for open models.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from msgspec import Meta, Struct

from dynamo.common.generation_rules import MAX_LOGPROB_TOKEN_IDS
from dynamo.frontend.api.calls import MAX_ID_CHARS
from dynamo.frontend.router.overrides import MAX_GOAL_S, MAX_TEMPERATURE, MAX_WEIGHT

INT32 = 2**31 - 1
INT64 = 2**63 - 1

TokenId: TypeAlias = Annotated[int, Meta(ge=0, le=INT32)]
Count: TypeAlias = Annotated[int, Meta(ge=0, le=INT32)]
Positive: TypeAlias = Annotated[int, Meta(ge=1, le=INT32)]
Name: TypeAlias = Annotated[str, Meta(min_length=1, max_length=256)]
Penalty: TypeAlias = Annotated[float, Meta(ge=-2, le=2)]
Bias: TypeAlias = Annotated[float, Meta(ge=-100, le=100)]
Text: TypeAlias = Annotated[str, Meta(min_length=1)]
Json: TypeAlias = dict[str, Any]
Metadata: TypeAlias = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
]
"""What clients keep with a stored object."""


class StreamOptions(Struct, kw_only=True, frozen=True):
    include_usage: Annotated[bool, Meta(description="End the stream with a chunk that has `usage`.")] | None = None
    continuous_usage_stats: Annotated[bool, Meta(description="Put the usage so far into every chunk.")] | None = None
    include_obfuscation: Annotated[bool, Meta(description="Accepted; chunks are never padded.")] | None = None


class JsonSchemaFormat(Struct, kw_only=True, frozen=True):
    name: Name
    schema: Json | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Struct, kw_only=True, frozen=True):
    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    format: Annotated[Json, Meta(description="Of a `structural_tag`.")] | None = None
    structures: Annotated[list[Json], Meta(description="Of a `structural_tag` in its older form.")] | None = None
    triggers: list[Text] | None = None


class StructuredOutputs(Struct, kw_only=True, frozen=True, omit_defaults=True):
    """One constraint on the output, in the form of vLLM's API."""

    json: str | Json | None = None
    regex: Text | None = None
    choice: Annotated[list[Text], Meta(min_length=1, max_length=1024)] | None = None
    grammar: Text | None = None
    json_object: bool | None = None
    structural_tag: Text | None = None


class AgentHints(Struct, kw_only=True, frozen=True):
    priority: Annotated[int, Meta(ge=-INT32, le=INT32)] | None = None


class RouterOverrides(Struct, kw_only=True, frozen=True):
    """Settings of the router mode `kv` for this request alone; other modes validate and ignore them."""

    overlap_score_weight: (
        Annotated[float, Meta(ge=0, le=MAX_WEIGHT, description="Blocks of prefill that one cached block saves.")] | None
    ) = None
    overlap_score_credit: Annotated[float, Meta(ge=0, le=MAX_WEIGHT, description="The same by another name.")] | None = None
    prefill_load_scale: (
        Annotated[float, Meta(ge=0, le=MAX_WEIGHT, description="Cost of a block to prefill, relative to a cached one.")] | None
    ) = None
    router_temperature: (
        Annotated[float, Meta(ge=0, le=MAX_TEMPERATURE, description="Above 0: spread of the choice of instances.")] | None
    ) = None
    ttft_goal: (
        Annotated[
            float, Meta(ge=0, le=MAX_GOAL_S, description="Seconds to the first token; refused if predicted to take longer.")
        ]
        | None
    ) = None
    itl_goal: (
        Annotated[float, Meta(ge=0, le=MAX_GOAL_S, description="Seconds between tokens that instances should keep to.")] | None
    ) = None


Annotation: TypeAlias = Literal["formatted_prompt", "token_ids", "worker_id", "request_id", "llm_metrics"]
ExtraField: TypeAlias = Literal["worker_id", "timing", "completion_token_ids"]


class NvExt(Struct, kw_only=True, frozen=True):
    """NVIDIA's extension `nvext`."""

    greed_sampling: Annotated[bool, Meta(description="Always the likeliest token.")] | None = None
    use_raw_prompt: Annotated[bool, Meta(description="The one message is the prompt, without a chat template.")] | None = None
    annotations: Annotated[list[Annotation], Meta(max_length=16, description="Additional events of the stream.")] | None = None
    extra_fields: Annotated[list[ExtraField], Meta(max_length=16, description="Fields of the response's `nvext`.")] | None = None
    max_thinking_tokens: Annotated[int, Meta(ge=0, le=INT32, description="Reasoning is ended after so many tokens.")] | None = (
        None
    )
    token_data: Annotated[list[TokenId], Meta(min_length=1, description="Token ids that replace the prompt.")] | None = None
    backend_instance_id: Annotated[str, Meta(max_length=16, description="The instance to route to, in hex.")] | None = None
    decode_worker_id: Annotated[str, Meta(max_length=16, description="The same by another name.")] | None = None
    prefill_worker_id: (
        Annotated[str, Meta(max_length=16, description="The instance that computes the prompt for the other one, in hex.")] | None
    ) = None
    priority: Annotated[int, Meta(ge=-INT32, le=INT32, description="Higher is more important.")] | None = None
    session_id: (
        Annotated[str, Meta(max_length=MAX_ID_CHARS, description="Requests of one session go to one instance.")] | None
    ) = None
    agent_hints: AgentHints | None = None
    router: RouterOverrides | None = None


class ModelRequest(Struct, kw_only=True, frozen=True):
    """A request to one model."""

    model: (
        Annotated[
            str,
            Meta(
                max_length=256,
                description="A served model, an alias, or a LoRA adapter of one. May be left out where only one model suits.",
            ),
        ]
        | None
    ) = None

    @property
    def model_name(self) -> str:
        """The model; empty if the request names none."""
        return self.model or ""


class TextGenerationRequest(ModelRequest, kw_only=True, frozen=True):
    """The fields that chat and plain completions share."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Positive | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    n: Positive | None = None
    stop: str | list[Text] | None = None
    seed: Annotated[int, Meta(ge=-INT64 - 1, le=INT64)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: Annotated[dict[str, Bias], Meta(max_length=1024, description="By token id.")] | None = None
    user: str | None = None
    # Beyond OpenAI
    top_k: Annotated[int, Meta(ge=-1, le=INT32, description="-1 and 0: all tokens.")] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    min_tokens: Count | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=256)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    allowed_token_ids: Annotated[list[TokenId], Meta(min_length=1, max_length=65536)] | None = None
    bad_words_token_ids: (
        Annotated[list[Annotated[list[TokenId], Meta(min_length=1, max_length=256)]], Meta(max_length=1024)] | None
    ) = None
    bad_words: (
        Annotated[list[Annotated[str, Meta(min_length=1, max_length=256)]], Meta(max_length=256, description="Texts to avoid.")]
        | None
    ) = None
    prompt_logprobs: Count | None = None
    logprob_token_ids: (
        Annotated[
            list[TokenId],
            Meta(max_length=MAX_LOGPROB_TOKEN_IDS, description="Tokens to report with each token, in place of the likeliest."),
        ]
        | None
    ) = None
    return_token_ids: Annotated[bool, Meta(description="Return the ids of the prompt and of the response.")] | None = None
    return_tokens_as_token_ids: Annotated[bool, Meta(description="Show tokens as `token_id:17` in log probabilities.")] | None = (
        None
    )
    truncate_prompt_tokens: (
        Annotated[int, Meta(ge=-1, le=INT32, description="Keep so many tokens of the prompt; -1: as many as fit.")] | None
    ) = None
    truncation_side: Annotated[Literal["left", "right"], Meta(description="Where tokens are dropped.")] | None = None
    add_special_tokens: (
        Annotated[bool, Meta(description="Add BOS and the like. Default: to a prompt, not to a conversation.")] | None
    ) = None
    structured_outputs: StructuredOutputs | None = None
    use_beam_search: bool | None = None
    prompt_embeds: Any = None
    thinking_token_budget: Annotated[int, Meta(ge=0, le=INT32, description="As `nvext.max_thinking_tokens`.")] | None = None
    repetition_detection: Json | None = None
    kv_transfer_params: Json | None = None
    vllm_xargs: Json | None = None
    request_id: Annotated[str, Meta(max_length=MAX_ID_CHARS, description="Without the header `x-request-id`.")] | None = None
    session_id: (
        Annotated[str, Meta(max_length=MAX_ID_CHARS, description="Requests of one session go to one instance.")] | None
    ) = None
    response_format: ResponseFormat | None = None
    guided_json: str | Json | None = None
    guided_regex: Text | None = None
    guided_choice: Annotated[list[Text], Meta(min_length=1, max_length=1024)] | None = None
    guided_grammar: Text | None = None
    cache_salt: Annotated[str, Meta(max_length=256)] | None = None
    priority: Annotated[int, Meta(ge=-INT32, le=INT32, description="Higher is more important.")] | None = None
    nvext: NvExt | None = None

    def unsupported_fields(self) -> dict[str, str]:
        """Return the fields that are set although they are not supported, each with an error message."""
        messages = {
            "use_beam_search": "beam search is not supported" if self.use_beam_search else "",
            "prompt_embeds": "prompts are texts or token ids; embeddings are not supported" if self.prompt_embeds else "",
            "repetition_detection": "detection of repetitions is not supported" if self.repetition_detection else "",
            "kv_transfer_params": "transfers of KV caches are arranged by the server" if self.kv_transfer_params else "",
            "vllm_xargs": "arguments for extensions of an engine are not passed on" if self.vllm_xargs else "",
        }
        return {name: message for name, message in messages.items() if message}


# Chat


class ImageUrl(Struct, kw_only=True, frozen=True, omit_defaults=True):
    url: Text
    detail: Literal["auto", "low", "high"] | None = None


class InputAudio(Struct, kw_only=True, frozen=True, omit_defaults=True):
    data: Text
    format: Name


class ContentPart(Struct, kw_only=True, frozen=True, omit_defaults=True):
    type: Literal["text", "input_text", "output_text", "refusal", "thinking", "image_url", "input_audio"]
    text: str | None = None
    refusal: str | None = None
    thinking: str | None = None
    image_url: ImageUrl | None = None
    input_audio: InputAudio | None = None
    prompt_cache_breakpoint: Annotated[Json, Meta(description="Accepted; prompts are cached by themselves.")] | None = None

    @property
    def field(self) -> str:
        """The field that a part of this type must have."""
        return "text" if self.type in ("input_text", "output_text") else self.type

    @property
    def words(self) -> str:
        """The text of a part that is content and no medium."""
        return self.text or self.refusal or ""


class CalledFunction(Struct, kw_only=True, frozen=True):
    name: Name
    arguments: Annotated[str | dict[str, Any], Meta(description="JSON, or the object itself.")]


class CalledCustom(Struct, kw_only=True, frozen=True):
    name: Name
    input: str


class PastToolCall(Struct, kw_only=True, frozen=True, omit_defaults=True):
    id: str
    function: CalledFunction | None = None
    custom: CalledCustom | None = None
    type: Literal["function", "custom"] = "function"
    index: int | None = None


class ChatMessage(Struct, kw_only=True, frozen=True, omit_defaults=True):
    role: Annotated[str, Meta(pattern="^[A-Za-z0-9_-]{1,64}$", description="Others than OpenAI's are the template's affair.")]
    content: str | list[ContentPart | str] | None = None
    name: str | None = None
    tool_calls: list[PastToolCall] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    annotations: list[Any] | None = None
    audio: Json | None = None
    function_call: Annotated[CalledFunction, Meta(description="The older form of `tool_calls`, of one.")] | None = None


class FunctionDefinition(Struct, kw_only=True, frozen=True, omit_defaults=True):
    name: Annotated[str, Meta(pattern="^[A-Za-z0-9_-]{1,96}$")]
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None


class CustomDefinition(Struct, kw_only=True, frozen=True):
    name: Annotated[str, Meta(pattern="^[A-Za-z0-9_-]{1,96}$")]
    description: str | None = None
    format: Annotated[Json, Meta(description="What its input looks like: described to the model, and not enforced.")] | None = (
        None
    )


class Tool(Struct, kw_only=True, frozen=True):
    type: Literal["function", "custom"]
    function: FunctionDefinition | None = None
    custom: CustomDefinition | None = None


class ChosenFunction(Struct, kw_only=True, frozen=True):
    name: Name


class NamedToolChoice(Struct, kw_only=True, frozen=True, tag_field="type", tag="function"):
    function: ChosenFunction

    @property
    def name(self) -> str:
        return self.function.name


class NamedCustomChoice(Struct, kw_only=True, frozen=True, tag_field="type", tag="custom"):
    custom: ChosenFunction

    @property
    def name(self) -> str:
        return self.custom.name


class AllowedTools(Struct, kw_only=True, frozen=True):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedToolChoice | NamedCustomChoice], Meta(min_length=1, max_length=1024)]


class AllowedToolChoice(Struct, kw_only=True, frozen=True, tag_field="type", tag="allowed_tools"):
    allowed_tools: AllowedTools


class ChatRequest(TextGenerationRequest, kw_only=True, frozen=True):
    """POST /v1/chat/completions"""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: Count | None = None
    tools: Annotated[list[Tool], Meta(max_length=1024)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | NamedCustomChoice | AllowedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Annotated[str, Meta(max_length=32)] | None = None
    store: bool | None = None
    metadata: Metadata | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: Json | None = None
    prompt_cache_retention: str | None = None
    modalities: list[Literal["text", "audio"]] | None = None
    audio: Json | None = None
    prediction: Json | None = None
    web_search_options: Json | None = None
    moderation: Json | None = None
    verbosity: str | None = None
    functions: Annotated[list[FunctionDefinition], Meta(max_length=1024, description="The older form of `tools`.")] | None = None
    function_call: (
        Annotated[
            Literal["none", "auto"] | ChosenFunction,
            Meta(description="The older form of `tool_choice`; so the response has the older one of calls, too."),
        ]
        | None
    ) = None
    # Beyond OpenAI
    chat_template: (
        Annotated[str, Meta(min_length=1, max_length=65536, description="If the operator allows it, replaces the model's own.")]
        | None
    ) = None
    chat_template_kwargs: Json | None = None
    documents: Annotated[list[Json], Meta(max_length=1024, description="For templates that know documents.")] | None = None
    echo: Annotated[bool, Meta(description="Begin the response with the last message, if it is the assistant's.")] | None = None
    include_reasoning: Annotated[bool, Meta(description="False: leave reasoning out of the response.")] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: Annotated[bool, Meta(description="Continue the last message.")] | None = None

    @property
    def field_names(self) -> dict[str, str]:
        """The names that this request has for fields which errors name otherwise."""
        tools = {} if self.functions is None else {"tools": "functions", "tool_choice": "function_call"}
        return tools if self.max_completion_tokens is None else tools | {"max_tokens": "max_completion_tokens"}

    def unsupported_fields(self) -> dict[str, str]:
        messages = {
            "audio": "responses are text; 'audio' is not supported" if self.audio is not None else "",
            "modalities": "responses are text; 'modalities' must be [\"text\"]" if "audio" in (self.modalities or ()) else "",
            "web_search_options": "web search is not supported" if self.web_search_options is not None else "",
            "moderation": "moderation is not supported" if self.moderation is not None else "",
        }
        return super().unsupported_fields() | {name: message for name, message in messages.items() if message}


class CompletionRequest(TextGenerationRequest, kw_only=True, frozen=True):
    """POST /v1/completions"""

    max_tokens: Annotated[int, Meta(ge=0, le=INT32, description="0 only with `echo`.")] | None = None
    prompt: Annotated[
        str | list[str | TokenId | list[TokenId]],
        Meta(description="A text, an array of texts, an array of token ids, or an array of arrays of token ids."),
    ]
    best_of: Positive | None = None
    echo: bool | None = None
    logprobs: Count | None = None
    suffix: str | None = None


# Embeddings


class EmbeddingRequest(ModelRequest, kw_only=True, frozen=True):
    """POST /v1/embeddings"""

    input: Annotated[str | list[str | TokenId | list[TokenId]], Meta(description="A text, or an array of texts.")]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: (
        Annotated[
            int, Meta(ge=1, le=1 << 20, description="Number of dimensions to cut the vectors to; they are normalized again.")
        ]
        | None
    ) = None
    user: str | None = None


# Tokens


class TokenizeRequest(ModelRequest, kw_only=True, frozen=True):
    """POST /tokenize: either `prompt` or `messages`."""

    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1)] | None = None
    tools: Annotated[list[Tool], Meta(max_length=1024)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: Annotated[str, Meta(min_length=1, max_length=65536)] | None = None
    chat_template_kwargs: Json | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(ModelRequest, kw_only=True, frozen=True):
    """POST /detokenize"""

    tokens: list[TokenId]
    skip_special_tokens: bool | None = None
