"""Tools of the Responses API: which kinds a model gets, in the form of functions, and which are left out.

| kind | what the model gets |
|---|---|
| `function` | the function |
| `custom` | a function with one text, `input`, whose calls are items `custom_tool_call` |
| `namespace` | each of its functions and custom tools, as `NAMESPACE__NAME` |
| all others (`web_search`, `mcp`, `local_shell`, …) | nothing: they are run by servers that have them |
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from dynamo.common.errors import InvalidRequest
from dynamo.frontend.api.http.exchange import Exchange
from dynamo.frontend.api.openai.custom_tools import custom_definition
from dynamo.frontend.api.openai.requests import (
    AllowedToolChoice,
    AllowedTools,
    ChosenFunction,
    FunctionDefinition,
    Json,
    Name,
    NamedCustomChoice,
    NamedToolChoice,
    Tool,
)
from dynamo.frontend.api.openai.store.events import NO_TOOLS, CalledTool

_KINDS = frozenset({"function", "custom", "namespace"})
_LEFT_OUT_ITEMS = re.compile(r"[a-z_]+_(call|output)|mcp_[a-z_]+|compaction[a-z_]*|additional_tools|configuration_update|program")
"""Items of the history that only servers with such tools put there."""

_MOST_NAMES = 32
MAX_TOOLS = 1024
"""In all namespaces together."""


class ResponseTool(Struct, kw_only=True, frozen=True):
    type: str
    name: Annotated[str, Meta(pattern="^[A-Za-z0-9_-]{1,96}$")] | None = None
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None
    format: Annotated[Json, Meta(description="Of a `custom` tool: what its input looks like.")] | None = None
    tools: Annotated[list[ResponseTool], Meta(max_length=1024, description="Of a `namespace`.")] | None = None


class ResponseToolChoice(Struct, kw_only=True, frozen=True, tag_field="type", tag="function"):
    name: Name
    namespace: str | None = None


class CustomToolChoice(Struct, kw_only=True, frozen=True, tag_field="type", tag="custom"):
    name: Name
    namespace: str | None = None


class AllowedResponseTool(Struct, kw_only=True, frozen=True):
    type: str
    name: Name | None = None
    namespace: str | None = None


class AllowedResponseTools(Struct, kw_only=True, frozen=True, tag_field="type", tag="allowed_tools"):
    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedResponseTool], Meta(min_length=1, max_length=1024)]


ToolChoice = Literal["none", "auto", "required"] | ResponseToolChoice | CustomToolChoice | AllowedResponseTools


@dataclass(frozen=True, slots=True)
class NamedTool:
    """A tool that the model gets."""

    called: CalledTool
    definition: FunctionDefinition

    @property
    def name(self) -> str:
        """The name by which the model calls it."""
        return self.definition.name


def known_tools(tools: Sequence[ResponseTool]) -> tuple[list[ResponseTool], list[str]]:
    """Return the tools of kinds that a model gets, and a name for each kind of the others. Raises InvalidRequest."""
    count = sum(max(1, len(tool.tools or ())) for tool in tools)
    if count > MAX_TOOLS:
        raise InvalidRequest(f"got {count} tools; at most {MAX_TOOLS} are allowed", param="tools")
    others = sorted({tool.type for tool in tools} - _KINDS)
    return [tool for tool in tools if tool.type in _KINDS], [f"tools.{kind}" for kind in others]


def leave_out(exchange: Exchange, names: Iterable[str]) -> None:
    """Count what is left out of a request as fields that this server does not have. Raises InvalidRequest if it refuses these."""
    for name in islice(names, _MOST_NAMES):
        exchange.settings.unknown_fields.ignore(exchange.endpoint or exchange.path, name)


def is_left_out(item_type: str) -> bool:
    """Return whether an item of the history belongs to tools that no model gets here."""
    return item_type not in ("function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output") and bool(
        _LEFT_OUT_ITEMS.fullmatch(item_type)
    )


def named_tools(tools: Sequence[ResponseTool]) -> list[NamedTool]:
    """Return the tools as functions. Raises InvalidRequest."""
    return list(_named(tools, "tools", ""))


def _named(tools: Sequence[ResponseTool], where: str, namespace: str) -> Iterator[NamedTool]:
    for index, tool in enumerate(tools):
        path = f"{where}[{index}]"
        if tool.name is None:
            raise InvalidRequest(f"a tool of type {tool.type[:80]!r} needs a name", param=f"{path}.name")
        if tool.type == "namespace" and not namespace:
            yield from _named(tool.tools or (), f"{path}.tools", tool.name)
        elif tool.type in ("function", "custom"):
            called = CalledTool(tool.name, namespace or None, tool.type == "custom")
            yield NamedTool(called, _definition(tool, flat_name(tool.name, namespace)))
        else:
            raise InvalidRequest(f"a namespace has no tool of type {tool.type[:80]!r}", param=path)


def flat_name(name: str, namespace: str | None) -> str:
    return f"{namespace}__{name}" if namespace else name


def _definition(tool: ResponseTool, name: str) -> FunctionDefinition:
    if tool.type == "function":
        return FunctionDefinition(name=name, description=tool.description, parameters=tool.parameters, strict=tool.strict)
    return custom_definition(name, tool.description, tool.format)


def functions(tools: Iterable[NamedTool]) -> list[Tool]:
    return [Tool(type="function", function=tool.definition) for tool in tools]


def called_tools(tools: Sequence[ResponseTool]) -> Mapping[str, CalledTool]:
    """Return the tools whose calls are written otherwise than those of functions, by the name that the model has for them."""
    if all(tool.type == "function" for tool in tools):
        return NO_TOOLS
    return {tool.name: tool.called for tool in named_tools(tools) if tool.called.is_custom or tool.called.namespace}


def chat_choice(choice: ToolChoice | None) -> Literal["none", "auto", "required"] | NamedToolChoice | AllowedToolChoice | None:
    """Return the choice as the chat API has it. Raises InvalidRequest if no model gets any of the tools that are allowed."""
    if isinstance(choice, ResponseToolChoice | CustomToolChoice):
        return _chosen(choice)
    if isinstance(choice, AllowedResponseTools):
        allowed: list[NamedToolChoice | NamedCustomChoice] = [
            _chosen(tool) for tool in choice.tools if tool.type in ("function", "custom")
        ]
        if not allowed:
            raise InvalidRequest("'tool_choice' allows only tools that this server does not have", param="tool_choice")
        return AllowedToolChoice(allowed_tools=AllowedTools(mode=choice.mode, tools=allowed))
    return choice


def _chosen(choice: ResponseToolChoice | CustomToolChoice | AllowedResponseTool) -> NamedToolChoice:
    if choice.name is None:
        raise InvalidRequest("a tool that 'tool_choice' allows needs a name", param="tool_choice")
    return NamedToolChoice(function=ChosenFunction(name=flat_name(choice.name, choice.namespace)))


def shown_tools(tools: Iterable[ResponseTool]) -> list[dict[str, Any]]:
    """Return tools as a response repeats them."""
    return [_shown(tool) for tool in tools]


def _shown(tool: ResponseTool) -> dict[str, Any]:
    fields = {name: value for name, value in msgspec.structs.asdict(tool).items() if value is not None}
    if tool.tools is not None:
        fields["tools"] = list(map(_shown, tool.tools))
    return {"parameters": None, "strict": None, **fields} if tool.type == "function" else fields
