"""Values in JSON, and how Triton says that they are of another type."""

from __future__ import annotations

from typing import Any

from dynamo.common.errors import InvalidRequest

_MAX_UNSIGNED = 2**64 - 1


def as_string(value: object, key: str = "") -> str:
    if not isinstance(value, str):
        raise _wrong("non-string as string", key)
    return value


def as_boolean(value: object, key: str = "") -> bool:
    if not isinstance(value, bool):
        raise _wrong("non-boolean as boolean", key)
    return value


def as_unsigned(value: object, key: str = "") -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MAX_UNSIGNED:
        raise _wrong("non-unsigned-integer as unsigned-integer", key)
    return value


def as_array(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise _wrong("non-array as array", "")
    return value


def _wrong(what: str, key: str) -> InvalidRequest:
    text = f"attempt to access JSON {what}"
    return InvalidRequest(f"Unable to parse '{key}': {text}" if key else text, param=key or None)
