"""What Anthropic clients send, and how it becomes a conversation."""

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
from dynamo.frontend.api.text.tool_choice import named_call, some_call
from dynamo.frontend.config import TextLimits
from dynamo.frontend.preprocess.parsers import OutputParsers, ParserKind
from dynamo.frontend.preprocess.text import TextRequest

Json: TypeAlias = dict[str, Any]


class Source(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    type: Literal["base64", "url", "text", "file"]
    media_type: str | None = None
    data: str | None = None
    url: str | None = None
    file_id: str | None = None


class ResultBlock(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """A part of a tool's result."""

    type: Literal["text", "image"]
    text: str | None = None
    source: Source | None = None
    cache_control: Json | None = None


class Block(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    type: Literal["text", "image", "tool_use", "tool_result", "thinking", "redacted_thinking"]
    text: str | None = None
    source: Source | None = None
    id: str | None = None
    name: str | None = None
    input: Json | None = None
    tool_use_id: str | None = None
    content: str | list[ResultBlock] | None = None
    is_error: bool | None = None
    thinking: str | None = None
    signature: str | None = None
    data: str | None = None
    citations: list[Any] | Json | None = None
    caller: Json | None = None
    cache_control: Annotated[Json, Meta(description="Accepted; prefixes are cached anyway.")] | None = None


class Message(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class SystemBlock(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    type: Literal["text"]
    text: str
    cache_control: Json | None = None
    citations: list[Any] | None = None


class Tool(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
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


class ToolChoice(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: str | None = None


class OutputFormat(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    type: Literal["json_schema"]
    schema: Json


class OutputConfig(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    format: OutputFormat | None = None
    effort: Annotated[str, Meta(max_length=32)] | None = None


class CountRequest(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """POST /v1/messages/count_tokens"""

    model: Annotated[str, Meta(min_length=1, max_length=256)]
    messages: Annotated[list[Message], Meta(min_length=1)]
    system: str | list[SystemBlock] | None = None
    tools: Annotated[list[Tool], Meta(max_length=1024)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: Json | None = None
    speed: str | None = None


class MessagesRequest(CountRequest, kw_only=True, frozen=True, forbid_unknown_fields=True):
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


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, ready to be run."""

    text: TextRequest
    parsers: tuple[ParserKind, ...]
    tools: Sequence[Mapping[str, Any]]


def to_text(request: MessagesRequest, card: ModelCard, parsers: OutputParsers, limits: TextLimits) -> Asked:
    """Raises InvalidRequest, Unsupported."""
    for name in ("container", "fallbacks"):
        if getattr(request, name) is not None:
            raise InvalidRequest(f"'{name}' is not available on this server", param=name)
    text = conversation(request, llm_of(card), limits)
    tools = text.tools
    forced: ParserKind | None = None
    guided: dict[str, Any] | None = None
    if request.output_config is not None and request.output_config.format is not None:
        guided = {"json_schema": request.output_config.format.schema}
    choice = request.tool_choice
    if choice is not None and choice.type in ("any", "tool"):
        if not tools:
            raise InvalidRequest("'tool_choice' demands a call, and there are no tools", param="tool_choice")
        if guided is not None:
            raise InvalidRequest("'tool_choice' demands a call; no other structure goes with that", param="tool_choice")
        guided, forced = (
            named_call(choice.name or "", tools)
            if choice.type == "tool"
            else some_call(tools, parallel=not choice.disable_parallel_tool_use)
        )
    kinds = choose_parsers(card, parsers, forced, has_tools=bool(tools), guided=guided is not None)
    return Asked(
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
    """What goes into the prompt. Raises InvalidRequest."""
    if len(request.messages) > limits.max_messages:
        raise InvalidRequest(
            f"there are {len(request.messages)} messages; at most {limits.max_messages} are taken", param="messages"
        )
    messages: list[dict[str, Any]] = []
    if request.system:
        system = request.system if isinstance(request.system, str) else "\n".join(block.text for block in request.system)
        messages.append({"role": "system", "content": system})
    media: list[dict[str, Any]] = []
    for at, message in enumerate(request.messages):
        messages += _messages(message, f"messages[{at}]", llm, media)
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
        model=request.model,
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


def _messages(message: Message, where: str, llm: LlmInfo, media: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Results of tools are messages of their own here."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    results: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for at, block in enumerate(message.content):
        there = f"{where}.content[{at}]"
        if block.type == "text":
            parts.append({"type": "text", "text": _needed(block.text, "text", there)})
        elif block.type == "thinking":
            thoughts.append(block.thinking or "")
        elif block.type == "image":
            parts.append(_image(_needed(block.source, "source", there), there, llm, media))
        elif block.type == "tool_use":
            arguments = msgspec.json.encode(block.input or {}).decode()
            function = {"name": _needed(block.name, "name", there), "arguments": arguments}
            calls.append({"id": _needed(block.id, "id", there), "type": "function", "function": function})
        elif block.type == "tool_result":
            call = _needed(block.tool_use_id, "tool_use_id", there)
            results.append({"role": "tool", "tool_call_id": call, "content": _result(block.content, there, llm, media)})
    found: dict[str, Any] = {"role": message.role}
    if parts:
        found["content"] = "\n".join(part["text"] for part in parts) if all("text" in part for part in parts) else parts
    if calls:
        found["tool_calls"] = calls
    if thoughts:
        found["reasoning_content"] = "".join(thoughts)
    return [*results, found] if len(found) > 1 else results


def _result(
    content: str | list[ResultBlock] | None, where: str, llm: LlmInfo, media: list[dict[str, Any]]
) -> str | list[dict[str, Any]]:
    if not isinstance(content, list):
        return content or ""
    parts = [
        {"type": "text", "text": _needed(block.text, "text", where)}
        if block.type == "text"
        else _image(_needed(block.source, "source", where), where, llm, media)
        for block in content
    ]
    return "\n".join(part["text"] for part in parts) if all("text" in part for part in parts) else parts


def _image(source: Source, where: str, llm: LlmInfo, media: list[dict[str, Any]]) -> dict[str, Any]:
    if "image" not in llm.modalities:
        raise InvalidRequest("the model takes no image; there is one in the messages", param=where)
    if source.type == "base64" and source.data is not None and source.media_type is not None:
        url = f"data:{source.media_type};base64,{source.data}"
    elif source.type == "url" and source.url is not None:
        url = source.url
    else:
        raise InvalidRequest("an image needs a source of type 'base64' or 'url'", param=where)
    part = {"type": "image_url", "image_url": {"url": url}}
    media.append(part)
    return part


def _tools(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    found = []
    for at, tool in enumerate(tools):
        if tool.type not in (None, "custom") or tool.input_schema is None:
            raise InvalidRequest(
                f"the tool '{tool.name}' is not one of the client's own, with an 'input_schema'", param=f"tools[{at}]"
            )
        function = {"name": tool.name, "parameters": tool.input_schema}
        if tool.description is not None:
            function["description"] = tool.description
        found.append({"type": "function", "function": function})
    if len({tool.name for tool in tools}) != len(tools):
        raise InvalidRequest("two tools have the same name", param="tools")
    return found


def _needed(value: Any, name: str, where: str) -> Any:
    if value is None:
        raise InvalidRequest(f"'{where}' needs '{name}'", param=f"{where}.{name}")
    return value
