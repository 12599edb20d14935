"""Decoding of JSON request bodies. Errors are sentences that name the field."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeVar

import msgspec
import numpy as np

from dynamo.common.errors import InvalidRequest

T = TypeVar("T")

_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)', re.DOTALL)
_NO_BRACKET = bytes(set(range(256)) - set(b"[]{}"))
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
"""One level down, as the number 1; one level up, as -1."""
_AT = re.compile(r"(?: - at `(?:key` in `)?\$([^`]*)`)$")
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*)`")
_BOUND = re.compile(r"Expected `[^`]*` (of length )?(>=|<=|>|<) ([-0-9.e+]+)")
_KIND = re.compile(r"Expected `([^`]*)`, got `([^`]*)`")
_VALUE = re.compile(r"Invalid enum value (.*)", re.DOTALL)
_WORDS = {
    "str": "a string",
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "array": "an array",
    "object": "an object",
    "null": "null",
}
_BOUNDS = {">=": "at least", "<=": "at most", ">": "above", "<": "below"}


def decode(decoder: msgspec.json.Decoder[T], body: bytes, max_depth: int) -> T:
    """Return the request in `body`. Raises InvalidRequest, with the field as `param`."""
    try:
        request = decoder.decode(body)
    except msgspec.ValidationError as error:
        raise invalid(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the body is not JSON: {error}") from None
    except RecursionError:
        raise _too_deep(max_depth) from None
    check_depth(body, max_depth)
    return request


def check_depth(body: bytes, max_depth: int) -> None:
    """Raises InvalidRequest if `body`, which is JSON, nests arrays and objects deeper than `max_depth`."""
    if body.count(b"[") + body.count(b"{") <= max_depth:
        return
    brackets = _STRING.sub(b"", body).translate(_STEPS, _NO_BRACKET)
    depths = np.cumsum(np.frombuffer(brackets, np.int8), dtype=np.int32)
    if depths.size and depths.max() > max_depth:
        raise _too_deep(max_depth)


def _too_deep(max_depth: int) -> InvalidRequest:
    return InvalidRequest(f"the body nests arrays and objects deeper than {max_depth} levels")


def invalid(problem: str, params: Mapping[str, str] | None = None) -> InvalidRequest:
    """Return the error for a message of msgspec, in the words of this server."""
    position = _AT.search(problem)
    path = position.group(1).lstrip(".") if position else ""
    problem = problem[: position.start()] if position else problem
    if match := _UNKNOWN.fullmatch(problem):
        field = f"{path}.{match.group(1)}" if path else match.group(1)
        return InvalidRequest(f"unknown field '{_short(field)}'", param=_short(field))
    if match := _MISSING.fullmatch(problem):
        field = f"{path}.{match.group(1)}" if path else match.group(1)
        return InvalidRequest(f"the field '{field}' is missing", param=field)
    what = f"'{_short(path)}'" if path else "the body"
    return InvalidRequest(f"{what} {_sentence(problem)}", param=_short(path) or None)


def _sentence(problem: str) -> str:
    if match := _BOUND.fullmatch(problem):
        length, sign, bound = match.groups()
        number = f"{float(bound):.15g}" if "." in bound or "e" in bound else bound
        return f"must have a length of {_BOUNDS[sign]} {number}" if length else f"must be {_BOUNDS[sign]} {number}"
    if match := _KIND.fullmatch(problem):
        wanted = " or ".join(_WORDS.get(word, word) for word in match.group(1).split(" | "))
        return f"must be {wanted}, got {_WORDS.get(match.group(2), match.group(2))}"
    if match := _VALUE.fullmatch(problem):
        return f"must not be {_short(match.group(1))}"
    return f"is invalid: {_short(problem)}"


def _short(text: str) -> str:
    return text if len(text) <= 200 else text[:199] + "…"
