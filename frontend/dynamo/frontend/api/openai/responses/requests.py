"""Request bodies of the Responses API, and their translation into chat requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct, field

from dynamo.common.errors import InvalidRequest
from dynamo.frontend.api.calls import MAX_ID_CHARS
from dynamo.frontend.api.openai.custom_tools import custom_arguments
from dynamo.frontend.api.openai.requests import (
    INT32,
    INT64,
    Bias,
    CalledFunction,
    ChatMessage,
    ChatRequest,
    ContentPart,
    Count,
    ImageUrl,
    InputAudio,
    Json,
    JsonSchemaFormat,
    Metadata,
    ModelRequest,
    PastToolCall,
    Penalty,
    Positive,
    ResponseFormat,
    StreamOptions,
    StructuredOutputs,
    Text,
    TokenId,
)
from dynamo.frontend.api.openai.responses.tools import (
    ResponseTool,
    ToolChoice,
    called_tools,
    chat_choice,
    flat_name,
    functions,
    is_left_out,
    known_tools,
    named_tools,
)
from dynamo.frontend.api.openai.store.events import CalledTool
from dynamo.frontend.api.openai.store.items import ItemIds

_LOGPROBS = "message.output_text.logprobs"
_INCLUDED = (_LOGPROBS, "reasoning.encrypted_content")
"""Clients that store nothing send the second one; there is no such content."""


class InputPart(Struct, kw_only=True, frozen=True):
    type: Literal["input_text", "output_text", "text", "refusal", "input_image", "input_audio", "reasoning_text", "summary_text"]
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None
    file_id: str | None = None
    detail: Literal["auto", "low", "high"] | None = None
    input_audio: InputAudio | None = None
    prompt_cache_breakpoint: Json | None = None
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class InputItem(Struct, kw_only=True, frozen=True):
    type: str = "message"
    id: str | None = None
    status: str | None = None
    phase: str | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[InputPart] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    input: Annotated[str, Meta(description="Of a `custom_tool_call`.")] | None = None
    output: str | list[InputPart] | None = None
    summary: list[InputPart] | None = None
    encrypted_content: str | None = None
    caller: Json | None = None
    is_async: bool | None = field(name="async", default=None)


class TextFormat(Struct, kw_only=True, frozen=True):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    schema: Json | None = None
    description: str | None = None
    strict: bool | None = None


class TextConfig(Struct, kw_only=True, frozen=True):
    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningConfig(Struct, kw_only=True, frozen=True):
    effort: Annotated[str, Meta(max_length=32)] | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ConversationId(Struct, kw_only=True, frozen=True):
    id: Annotated[str, Meta(max_length=80)]


class ResponsesRequest(ModelRequest, kw_only=True, frozen=True):
    """POST /v1/responses"""

    input: Annotated[str | list[InputItem], Meta(description="A text, or the items of a conversation.")]
    instructions: str | None = None
    max_output_tokens: Positive | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    tools: Annotated[list[ResponseTool], Meta(max_length=1024)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    metadata: Metadata | None = None
    store: Annotated[bool, Meta(description="Keep the response, for `previous_response_id` and to be read later.")] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: Json | None = None
    prompt_cache_retention: str | None = None
    truncation: Annotated[
        Literal["auto", "disabled"] | None,
        Meta(description="`auto`: drop the oldest items of a conversation that is too long for the model."),
    ] = None
    include: list[str] | None = None
    top_logprobs: Count | None = None
    previous_response_id: Annotated[str, Meta(max_length=80, description="A stored response that is continued.")] | None = None
    conversation: (
        Annotated[
            Annotated[str, Meta(max_length=80)] | ConversationId,
            Meta(description="A conversation that goes before the input, and takes both the input and the response."),
        ]
        | None
    ) = None
    background: Annotated[bool, Meta(description="Respond at once, and generate meanwhile.")] | None = None
    prompt: Json | None = None
    max_tool_calls: int | None = None
    context_management: Annotated[list[Json], Meta(description="Accepted; conversations are sent whole.")] | None = None
    moderation: Json | None = None
    access_programs: list[Any] | None = None
    image: Json | None = None
    # Beyond OpenAI
    top_k: Annotated[int, Meta(ge=-1, le=INT32, description="-1 and 0: all tokens.")] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    seed: Annotated[int, Meta(ge=-INT64 - 1, le=INT64)] | None = None
    logit_bias: Annotated[dict[str, Bias], Meta(max_length=1024, description="By token id.")] | None = None
    stop: str | list[Text] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=256)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    include_reasoning: Annotated[bool, Meta(description="False: leave reasoning out of the response.")] | None = None
    chat_template_kwargs: Json | None = None
    structured_outputs: StructuredOutputs | None = None
    cache_salt: Annotated[str, Meta(max_length=256)] | None = None
    priority: Annotated[int, Meta(ge=-INT32, le=INT32, description="Higher is more important.")] | None = None
    kv_transfer_params: Json | None = None
    vllm_xargs: Json | None = None
    request_id: Annotated[str, Meta(max_length=MAX_ID_CHARS, description="Without the header `x-request-id`.")] | None = None
    session_id: (
        Annotated[str, Meta(max_length=MAX_ID_CHARS, description="Requests of one session go to one instance.")] | None
    ) = None

    @property
    def wants_logprobs(self) -> bool:
        return _LOGPROBS in (self.include or ())

    def check(self) -> None:
        """Raises InvalidRequest for fields that are not supported."""
        unsupported = {
            "prompt": (self.prompt, "prompts are not stored; send 'instructions' and 'input'"),
            "max_tool_calls": (self.max_tool_calls, "tools are called by the client, which can count the calls"),
            "moderation": (self.moderation, "moderation is not supported"),
            "access_programs": (self.access_programs, "there are no access programs"),
            "image": (self.image, "images are not generated"),
            "kv_transfer_params": (self.kv_transfer_params, "transfers of KV caches are arranged by the server"),
            "vllm_xargs": (self.vllm_xargs, "arguments for extensions of an engine are not passed on"),
        }
        for name, (value, message) in unsupported.items():
            if value:
                raise InvalidRequest(f"'{name}' is not supported: {message}", param=name)
        for wanted in self.include or ():
            if wanted not in _INCLUDED:
                allowed = " and ".join(map(repr, _INCLUDED))
                raise InvalidRequest(f"'include' may have {allowed}, got {wanted[:80]!r}", param="include")
        if self.conversation is not None and self.previous_response_id is not None:
            raise InvalidRequest("'conversation' and 'previous_response_id' exclude each other", param="conversation")
        if self.background and self.store is False:
            raise InvalidRequest("background can only be used when `store` is true", param="store")

    def understood(self) -> tuple[ResponsesRequest, list[str]]:
        """Return the request without the tools, and the items of their calls, that no model gets here, and names for these.

        Raises InvalidRequest.
        """
        tools, left_out = known_tools(self.tools or ())
        items = self.input
        if not isinstance(items, str):
            items, others = understood_items(items)
            left_out += others
        return (msgspec.structs.replace(self, tools=tools, input=items), left_out) if left_out else (self, left_out)

    @property
    def called_tools(self) -> Mapping[str, CalledTool]:
        """The tools whose calls are written otherwise than those of functions."""
        return called_tools(self.tools or ())

    @property
    def conversation_id(self) -> str | None:
        return self.conversation.id if isinstance(self.conversation, ConversationId) else self.conversation

    @property
    def has_references(self) -> bool:
        """Whether items of the input only name stored ones."""
        return not isinstance(self.input, str) and any(item.type == "item_reference" for item in self.input)

    def items(self, ids: ItemIds) -> list[dict[str, Any]]:
        """Return the input as items with ids, in the form in which they are stored. Raises InvalidRequest."""
        input = self.input
        items = [InputItem(role="user", content=input)] if isinstance(input, str) else input
        return _items_to_store(items, ids, "input")

    def with_items(self, items: Sequence[Mapping[str, Any]]) -> ResponsesRequest:
        """Return the request with stored items, its own among them, as its input."""
        # One by one: a conversion holds the interpreter until it is done.
        return msgspec.structs.replace(self, input=[msgspec.convert(item, InputItem) for item in items])

    def to_chat(self) -> ChatRequest:
        """Return the same request as a chat request. Raises InvalidRequest."""
        self.check()
        format = self.text.format if self.text is not None else None
        return ChatRequest(
            model=self.model,
            messages=_messages(self.input, self.instructions),
            max_completion_tokens=self.max_output_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            stream=self.stream,
            tools=None if self.tools is None else functions(named_tools(self.tools)),
            tool_choice=chat_choice(self.tool_choice),
            parallel_tool_calls=self.parallel_tool_calls,
            reasoning_effort=self.reasoning.effort if self.reasoning is not None else None,
            response_format=None if format is None else _format(format),
            logprobs=self.wants_logprobs,
            top_logprobs=self.top_logprobs if self.wants_logprobs else None,
            top_k=self.top_k,
            min_p=self.min_p,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            repetition_penalty=self.repetition_penalty,
            seed=self.seed,
            logit_bias=self.logit_bias,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            skip_special_tokens=self.skip_special_tokens,
            include_stop_str_in_output=self.include_stop_str_in_output,
            chat_template_kwargs=self.chat_template_kwargs,
            structured_outputs=self.structured_outputs,
            cache_salt=self.cache_salt,
            priority=self.priority,
            session_id=self.session_id,
        )


def understood_items(items: list[InputItem]) -> tuple[list[InputItem], list[str]]:
    """Return the items that a conversation may have here, and a name for each kind of the others."""
    kinds = {item.type for item in items}
    others = {kind for kind in kinds if is_left_out(kind)}
    if not others:
        return items, []
    return [item for item in items if item.type not in others], [f"input.{kind}" for kind in sorted(others)]


def conversation_items(items: Sequence[InputItem], ids: ItemIds) -> list[dict[str, Any]]:
    """Return items for a conversation as they are stored. Raises InvalidRequest for those that no response could continue."""
    conversation = _Conversation(None)
    for index, item in enumerate(items):
        if item.type != "item_reference":
            _add(item, conversation, f"items[{index}]")
    return _items_to_store(items, ids, "items")


def _items_to_store(items: Sequence[InputItem], ids: ItemIds, where: str) -> list[dict[str, Any]]:
    """Return items with ids, in the form in which they are stored. Raises InvalidRequest.

    An id that an earlier item has is replaced, since lists are paged by ids.
    """
    stored = []
    taken: set[str] = set()
    for index, item in enumerate(items):
        is_reference = item.type == "item_reference"
        if is_reference and not item.id:
            raise InvalidRequest("an 'item_reference' needs 'id'", param=f"{where}[{index}]")
        fields = _without_nulls(msgspec.to_builtins(item))
        fields.pop("id", None)
        if item.type == "message" and isinstance(item.content, str):
            fields["content"] = [{"type": "output_text" if item.role == "assistant" else "input_text", "text": item.content}]
        id = item.id if item.id and (is_reference or item.id not in taken) else ids.new(item.type)
        taken.add(id)
        stored.append({"id": id, **fields})
    return stored


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


class _Conversation:
    """Collects messages. Reasoning, text and calls of one turn of the assistant are items here, and one message there."""

    def __init__(self, instructions: str | None) -> None:
        self._messages = [ChatMessage(role="system", content=instructions)] if instructions is not None else []
        self._reasoning: list[str] = []
        self._text: str | list[ContentPart | str] | None = None
        self._calls: list[PastToolCall] = []

    def reasoning(self, text: str) -> None:
        if self._text is not None or self._calls:
            self._end_turn()
        self._reasoning.append(text)

    def call(self, call: PastToolCall) -> None:
        self._calls.append(call)

    def message(self, message: ChatMessage) -> None:
        if message.role != "assistant" or self._text is not None or self._calls:
            self._end_turn()
        if message.role == "assistant":
            self._text = message.content
        else:
            self._messages.append(message)

    def messages(self) -> list[ChatMessage]:
        self._end_turn()
        return self._messages

    def _end_turn(self) -> None:
        if self._text is not None or self._calls:
            self._messages.append(
                ChatMessage(
                    role="assistant",
                    content=self._text,
                    tool_calls=self._calls or None,
                    reasoning_content="".join(self._reasoning) or None,
                )
            )
        self._reasoning, self._text, self._calls = [], None, []


def _messages(input: str | Sequence[InputItem], instructions: str | None) -> list[ChatMessage]:
    conversation = _Conversation(instructions)
    if isinstance(input, str):
        conversation.message(ChatMessage(role="user", content=input))
        return conversation.messages()
    for index, item in enumerate(input):
        _add(item, conversation, f"input[{index}]")
    messages = conversation.messages()
    if not messages:
        raise InvalidRequest("'input' must not be empty", param="input")
    return messages


def _add(item: InputItem, conversation: _Conversation, where: str) -> None:
    match item.type:
        case "function_call":
            if item.call_id is None or item.name is None or item.arguments is None:
                raise InvalidRequest("a 'function_call' needs 'call_id', 'name' and 'arguments'", param=where)
            function = CalledFunction(name=flat_name(item.name, item.namespace), arguments=item.arguments)
            conversation.call(PastToolCall(id=item.call_id, function=function))
        case "custom_tool_call":
            if item.call_id is None or item.name is None or item.input is None:
                raise InvalidRequest("a 'custom_tool_call' needs 'call_id', 'name' and 'input'", param=where)
            name, arguments = flat_name(item.name, item.namespace), custom_arguments(item.input)
            conversation.call(PastToolCall(id=item.call_id, function=CalledFunction(name=name, arguments=arguments)))
        case "function_call_output" | "custom_tool_call_output":
            if item.call_id is None or item.output is None:
                raise InvalidRequest(f"a '{item.type}' needs 'call_id' and 'output'", param=where)
            content = _content(item.output, where)
            conversation.message(ChatMessage(role="tool", tool_call_id=item.call_id, content=content))
        case "message":
            if item.role is None or item.content is None:
                raise InvalidRequest("a message needs 'role' and 'content'", param=where)
            conversation.message(ChatMessage(role=item.role, content=_content(item.content, where)))
        case "reasoning":
            parts = item.content if isinstance(item.content, list) else ()
            conversation.reasoning("".join(part.text or "" for part in parts))
        case "item_reference":
            raise AssertionError("references are replaced by the items that they name before")
        case _:
            raise InvalidRequest(f"there are no items of type {item.type[:80]!r}", param=f"{where}.type")


def _content(content: str | Sequence[InputPart], where: str) -> str | list[ContentPart | str]:
    if isinstance(content, str):
        return content
    return [_part(part, f"{where}.content[{index}]") for index, part in enumerate(content)]


def _part(part: InputPart, where: str) -> ContentPart:
    if part.type == "refusal":
        return ContentPart(type="refusal", refusal=part.refusal)
    if part.type == "input_image":
        if part.image_url is None:
            raise InvalidRequest("an 'input_image' needs 'image_url': files are not stored", param=where)
        return ContentPart(type="image_url", image_url=ImageUrl(url=part.image_url, detail=part.detail))
    if part.type == "input_audio":
        return ContentPart(type="input_audio", input_audio=part.input_audio)
    return ContentPart(type="text", text=part.text)


def _format(format: TextFormat) -> ResponseFormat:
    if format.type != "json_schema":
        return ResponseFormat(type=format.type)
    if format.schema is None:
        raise InvalidRequest("'text.format' of type 'json_schema' needs 'schema'", param="text.format.schema")
    return ResponseFormat(type="json_schema", json_schema=JsonSchemaFormat(name=format.name or "answer", schema=format.schema))
