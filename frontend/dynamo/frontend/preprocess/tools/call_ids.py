"""Ids of earlier calls in the form that some chat templates expect. Clients send back those that this server made."""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import sha256
from typing import Any, TypeAlias

Message: TypeAlias = dict[str, Any]

_NINE_CHARACTERS = re.compile(r"[A-Za-z0-9]{9}")
_CHARACTERS = string.ascii_letters + string.digits


def with_nine_characters(messages: Sequence[Message]) -> list[Message]:
    """Return the conversation with ids of nine letters and digits, which templates of Mistral check."""
    return _with_ids(messages, lambda id, name, number: id if _NINE_CHARACTERS.fullmatch(id) else _digest(id))


def with_names(messages: Sequence[Message]) -> list[Message]:
    """Return the conversation with ids of name and number, such as `functions.f:0`, which Kimi K2 was trained on."""
    return _with_ids(messages, lambda id, name, number: f"functions.{name}:{number}")


def _with_ids(messages: Sequence[Message], new_id: Callable[[str, str, int], str]) -> list[Message]:
    """Replace ids by `new_id(id, name of the function, number of the call)`, in calls and in their results."""
    ids: dict[str, str] = {}
    for number, call in enumerate(_calls(messages)):
        name = call["function"].get("name") if isinstance(call.get("function"), Mapping) else ""
        ids[call["id"]] = new_id(call["id"], str(name), number)
    return [_replaced(message, ids) for message in messages] if ids else list(messages)


def _replaced(message: Message, ids: Mapping[str, str]) -> Message:
    result = message.get("tool_call_id")
    if isinstance(result, str):
        return {**message, "tool_call_id": ids.get(result, result)}
    if not message.get("tool_calls"):
        return message
    calls = [{**call, "id": ids[call["id"]]} if _has_id(call) else call for call in message["tool_calls"]]
    return {**message, "tool_calls": calls}


def _calls(messages: Iterable[Message]) -> Iterable[Mapping[str, Any]]:
    for message in messages:
        yield from filter(_has_id, message.get("tool_calls") or ())


def _has_id(call: object) -> bool:
    return isinstance(call, Mapping) and isinstance(call.get("id"), str)


def _digest(id: str) -> str:
    return "".join(_CHARACTERS[byte % len(_CHARACTERS)] for byte in sha256(id.encode()).digest()[:9])
