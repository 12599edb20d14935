"""Tools of type `custom`, whose input is a text: what the model gets in their place, functions with one text `input`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct

from dynamo.common.errors import InvalidRequest
from dynamo.frontend.api.openai.requests import ChatRequest, FunctionDefinition, Tool

_INPUT = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}


class _CustomArguments(Struct):
    input: str


def custom_definition(name: str, description: str | None, grammar: Mapping[str, Any] | None) -> FunctionDefinition:
    """Return the function that a custom tool is to the model. `grammar`: what the description adds."""
    if grammar is not None and isinstance(definition := grammar.get("definition"), str):
        syntax = str(grammar.get("syntax", ""))[:32]
        description = f"{description or ''}\n\nThe input has this form ({syntax}):\n{definition}".lstrip()
    return FunctionDefinition(name=name, description=description, parameters=_INPUT)


def custom_arguments(input: str) -> str:
    """Return the arguments of the function that a custom tool is to the model."""
    return msgspec.json.encode({"input": input}).decode()


def custom_input(arguments: str) -> str:
    """Return the text of a call that the model wrote as that of a function; what is no such call as it is."""
    try:
        return msgspec.json.decode(arguments, type=_CustomArguments).input
    except (msgspec.MsgspecError, RecursionError):
        return arguments


def tool_definition(tool: Tool, where: str) -> FunctionDefinition:
    """Return a tool of a chat completion as a function. Raises InvalidRequest."""
    if tool.type == "function" and tool.function is not None:
        return tool.function
    if tool.type == "custom" and tool.custom is not None:
        custom = tool.custom
        grammar = (custom.format or {}).get("grammar")
        return custom_definition(custom.name, custom.description, grammar if isinstance(grammar, dict) else None)
    raise InvalidRequest(f"a tool of type '{tool.type}' needs '{tool.type}'", param=f"{where}.{tool.type}")


def function_call(call: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return a call of the history as the call of a function. Raises InvalidRequest."""
    kind = call.get("type", "function")
    if kind not in call:
        raise InvalidRequest(f"a call of type '{kind}' needs '{kind}'", param=f"{where}.{kind}")
    if kind == "function":
        return {name: value for name, value in call.items() if name != "custom"}
    custom = call["custom"]
    rest = {name: value for name, value in call.items() if name not in ("type", "custom")}
    return rest | {"function": {"name": custom["name"], "arguments": custom_arguments(custom["input"])}}


def custom_names(request: ChatRequest) -> frozenset[str]:
    """Return the names of the custom tools of a request."""
    return frozenset(tool.custom.name for tool in request.tools or () if tool.type == "custom" and tool.custom is not None)


class CustomCalls:
    """Holds back what the model writes for custom calls of one streamed choice until each is complete."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._open: tuple[int, list[str]] | None = None

    def starts(self, index: int, name: str, arguments: str) -> bool:
        """Return whether a call is one of a custom tool, which is held back from now on."""
        if name not in self._names:
            return False
        self._open = (index, [arguments])
        return True

    def holds(self, index: int, arguments: str) -> bool:
        """Return whether more arguments of a call are held back."""
        if self._open is None or self._open[0] != index:
            return False
        self._open[1].append(arguments)
        return True

    def end(self) -> list[dict[str, Any]]:
        """Return the piece with the text of the call that is held back, if there is one."""
        if self._open is None:
            return []
        (index, pieces), self._open = self._open, None
        return [{"index": index, "custom": {"input": custom_input("".join(pieces))}}]
