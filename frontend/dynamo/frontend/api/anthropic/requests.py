"""Request bodies of the Anthropic API, and their translation into text requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta, Struct

from dynamo.common.errors import InvalidRequest
from dynamo.common.generation import Sampling, Stop
from dynamo.common.model_card import LlmInfo, ModelCard
from dynamo.frontend.api.text.rules import check_chars, choose_parsers, llm_of, stop_strings
from dynamo.frontend.api.text.tool_choice import require_any_call, require_named_call
from dynamo.frontend.config import TextLimits
from dynamo.frontend.preprocess.parsers import OutputParsers, ParserKind
from dynamo.frontend.preprocess.text import TextRequest

Json: TypeAlias = dict[str, Any]


class ContentSource(Struct, kw_only=True, frozen=True):
    type: Literal["base64", "url", "text", "file"]
    media_type: str | None = None
    data: str | None = None
    url: str | None = None
    file_id: str | None = None


class ToolResultPart(Struct, kw_only=True, frozen=True):
    """A part of a tool result."""

    type: Literal["text", "image"]
    text: str | None = None
    source: ContentSource | None = None
    cache_control: Json | None = None


class ContentBlock(Struct, kw_only=True, frozen=True):
    type: Literal["text", "image", "tool_use", "tool_result", "thinking", "redacted_thinking"]
    text: str | None = None
    source: ContentSource | None = None
    id: str | None = None
    name: str | None = None
    input: Json | None = None
    tool_use_id: str | None = None
    content: str | list[ToolResultPart] | None = None
    is_error: bool | None = None
    thinking: str | None = None
    signature: str | None = None
    data: str | None = None
    citations: list[Any] | Json | None = None
    caller: Json | None = None
    cache_control: Annotated[Json, Meta(description="Accepted; prefixes are cached anyway.")] | None = None


class InputMessage(Struct, kw_only=True, frozen=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[ContentBlock]


class SystemBlock(Struct, kw_only=True, frozen=True):
    type: Literal["text"]
    text: str
    cache_control: Json | None = None
    citations: list[Any] | None = None


class MessagesTool(Struct, kw_only=True, frozen=True):
    name: Annotated[str, Meta(pattern="^[A-Za-z0-9_-]{1,128}$")]
    input_schema: Json | None = None
    description: str | None = None
    type: str | None = None
    strict: bool | None = None
    cache_control: Json | None = None
    input_examples: list[Any] | None = None
    eager_input_streaming: bool | None = None
    defer_loading: bool | None = None
    allowed_callers: list[str] | None = None


class MessagesToolChoice(Struct, kw_only=True, frozen=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Struct, kw_only=True, frozen=True):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: str | None = None


class OutputFormat(Struct, kw_only=True, frozen=True):
    type: Literal["json_schema"]
    schema: Json


class OutputConfig(Struct, kw_only=True, frozen=True):
    format: OutputFormat | None = None
    effort: Annotated[str, Meta(max_length=32)] | None = None


class CountRequest(Struct, kw_only=True, frozen=True):
    """POST /v1/messages/count_tokens"""

    model: Annotated[str, Meta(max_length=256)] | None = None
    messages: Annotated[list[InputMessage], Meta(min_length=1)]
    system: str | list[SystemBlock] | None = None
    tools: Annotated[list[MessagesTool], Meta(max_length=1024)] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: Annotated[OutputFormat, Meta(description="The older place of `output_config.format`.")] | None = None
    cache_control: Json | None = None
    context_management: Annotated[Json, Meta(description="Accepted; conversations are sent whole.")] | None = None
    speed: str | None = None

    @property
    def model_name(self) -> str:
        """The model; empty if the request names none."""
        return self.model or ""


class MessagesRequest(CountRequest, kw_only=True, frozen=True):
    """POST /v1/messages"""

    max_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    metadata: Json | None = None
    service_tier: str | None = None
    inference_geo: str | None = None
    diagnostics: Json | None = None
    container: str | Json | None = None
    fallbacks: list[Any] | str | Json | None = None

    @property
    def user(self) -> str:
        """The user that the metadata name; empty if they name none."""
        user = (self.metadata or {}).get("user_id")
        return user if isinstance(user, str) else ""


@dataclass(frozen=True, slots=True)
class PreparedMessages:
    """A validated request, as a text request for the data plane."""

    text: TextRequest
    parsers: tuple[ParserKind, ...]
    tools: Sequence[Mapping[str, Any]]


def to_text(request: MessagesRequest, card: ModelCard, parsers: OutputParsers, limits: TextLimits) -> PreparedMessages:
    """Prepare a request. Raises InvalidRequest, Unsupported."""
    for name in ("container", "fallbacks"):
        if getattr(request, name) is not None:
            raise InvalidRequest(f"'{name}' is not supported", param=name)
    text = conversation(request, llm_of(card), limits)
    tools = text.tools
    forced: ParserKind | None = None
    guided: dict[str, Any] | None = None
    output_format = request.output_format
    if request.output_config is not None:
        output_format = request.output_config.format or output_format
    if output_format is not None:
        guided = {"json_schema": output_format.schema}
    choice = request.tool_choice
    parallel = choice is None or not choice.disable_parallel_tool_use
    if choice is not None and choice.type in ("any", "tool"):
        if not tools:
            raise InvalidRequest("'tool_choice' requires a call, but there are no tools", param="tool_choice")
        guided, forced = (  # in place of another structure of the output, if the request has one
            require_named_call(choice.name or "", tools) if choice.type == "tool" else require_any_call(tools, parallel=parallel)
        )
    kinds = choose_parsers(card, parsers, forced, has_tools=bool(tools), guided=guided is not None, parallel=parallel)
    return PreparedMessages(
        msgspec.structs.replace(
            text,
            sampling=Sampling(temperature=request.temperature, top_p=request.top_p, top_k=request.top_k, guided=guided),
            stop=Stop(max_tokens=request.max_tokens),
            stop_strings=stop_strings(request.stop_sequences, limits, "stop_sequences"),
            skip_special_tokens=not any(kind.needs_special_tokens for kind in kinds),
        ),
        kinds,
        tools,
    )


def conversation(request: CountRequest, llm: LlmInfo, limits: TextLimits) -> TextRequest:
    """Return the text request for a conversation, without sampling settings. Raises InvalidRequest."""
    if len(request.messages) > limits.max_messages:
        raise InvalidRequest(f"got {len(request.messages)} messages; at most {limits.max_messages} are allowed", param="messages")
    messages: list[dict[str, Any]] = []
    if request.system:
        system = request.system if isinstance(request.system, str) else "\n".join(block.text for block in request.system)
        messages.append({"role": "system", "content": system})
    media: list[dict[str, Any]] = []
    for index, message in enumerate(request.messages):
        messages += _messages(message, f"messages[{index}]", llm, media)
    check_chars(sum(map(_chars, messages)), limits, "messages")
    tools = [] if request.tool_choice is not None and request.tool_choice.type == "none" else _tools(request.tools or ())
    variables: dict[str, Any] = {}
    if request.thinking is not None:
        variables["enable_thinking"] = request.thinking.type != "disabled"
    if request.output_config is not None and request.output_config.effort is not None:
        variables["reasoning_effort"] = request.output_config.effort
    last = messages[-1] if messages else {}
    beginning = last.get("content") if last.get("role") == "assistant" and "tool_calls" not in last else None
    return TextRequest(
        model=request.model_name,
        messages=messages,
        media=tuple(media),
        tools=tools,
        chat_template_kwargs=variables,
        continues_last=isinstance(beginning, str) and bool(beginning.strip()),
    )


def _chars(message: Mapping[str, Any]) -> int:
    content = message.get("content") or ""
    text = len(content) if isinstance(content, str) else sum(len(part.get("text", "")) for part in content)
    return text + sum(len(call["function"]["arguments"]) for call in message.get("tool_calls", ()))


def _messages(message: InputMessage, where: str, llm: LlmInfo, media: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one message as chat templates expect it; tool results become separate messages before it."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    results: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for index, block in enumerate(message.content):
        path = f"{where}.content[{index}]"
        if block.type == "text":
            parts.append({"type": "text", "text": _required(block.text, "text", path)})
        elif block.type == "thinking":
            thoughts.append(block.thinking or "")
        elif block.type == "image":
            parts.append(_image(_required(block.source, "source", path), path, llm, media))
        elif block.type == "tool_use":
            arguments = msgspec.json.encode(block.input or {}).decode()
            function = {"name": _required(block.name, "name", path), "arguments": arguments}
            calls.append({"id": _required(block.id, "id", path), "type": "function", "function": function})
        elif block.type == "tool_result":
            call = _required(block.tool_use_id, "tool_use_id", path)
            results.append({"role": "tool", "tool_call_id": call, "content": _result(block.content, path, llm, media)})
    translated: dict[str, Any] = {"role": message.role}
    if parts:
        translated["content"] = "\n".join(part["text"] for part in parts) if all("text" in part for part in parts) else parts
    if calls:
        translated["tool_calls"] = calls
    if thoughts:
        translated["reasoning_content"] = "".join(thoughts)
    return [*results, translated] if len(translated) > 1 else results


def _result(
    content: str | list[ToolResultPart] | None, where: str, llm: LlmInfo, media: list[dict[str, Any]]
) -> str | list[dict[str, Any]]:
    if not isinstance(content, list):
        return content or ""
    parts = [
        {"type": "text", "text": _required(block.text, "text", where)}
        if block.type == "text"
        else _image(_required(block.source, "source", where), where, llm, media)
        for block in content
    ]
    return "\n".join(part["text"] for part in parts) if all("text" in part for part in parts) else parts


def _image(source: ContentSource, where: str, llm: LlmInfo, media: list[dict[str, Any]]) -> dict[str, Any]:
    if "image" not in llm.modalities:
        raise InvalidRequest("the model does not support content of type image", param=where)
    if source.type == "base64" and source.data is not None and source.media_type is not None:
        url = f"data:{source.media_type};base64,{source.data}"
    elif source.type == "url" and source.url is not None:
        url = source.url
    else:
        raise InvalidRequest("an image needs a source of type 'base64' or 'url'", param=where)
    part = {"type": "image_url", "image_url": {"url": url}}
    media.append(part)
    return part


def _tools(tools: Sequence[MessagesTool]) -> list[dict[str, Any]]:
    functions = []
    for index, tool in enumerate(tools):
        if tool.type not in (None, "custom") or tool.input_schema is None:
            raise InvalidRequest(f"the tool '{tool.name}' must be a client tool with an 'input_schema'", param=f"tools[{index}]")
        function = {"name": tool.name, "parameters": tool.input_schema}
        if tool.description is not None:
            function["description"] = tool.description
        functions.append({"type": "function", "function": function})
    if len({tool.name for tool in tools}) != len(tools):
        raise InvalidRequest("two tools have the same name", param="tools")
    return functions


def _required(value: Any, name: str, where: str) -> Any:
    if value is None:
        raise InvalidRequest(f"'{where}' needs '{name}'", param=f"{where}.{name}")
    return value
