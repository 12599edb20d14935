"""Request bodies: bounded, decoded into our own types, and refused with sentences that name the field."""

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
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "array": "an array",
    "object": "an object",
    "null": "null",
}
_BOUNDS = {">=": "at least", "<=": "at most", ">": "above", "<": "below"}


def decode(decoder: msgspec.json.Decoder[T], body: bytes, max_depth: int) -> T:
    """The request in `body`. Raises InvalidRequest, with the field as `param`."""
    try:
        found = decoder.decode(body)
    except msgspec.ValidationError as error:
        raise invalid(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the body is not JSON: {error}") from None
    except RecursionError:
        raise _too_deep(max_depth) from None
    check_depth(body, max_depth)
    return found


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
    """The error for what msgspec found wrong, in our words."""
    at = _AT.search(problem)
    path = at.group(1).lstrip(".") if at else ""
    problem = problem[: at.start()] if at else problem
    if found := _UNKNOWN.fullmatch(problem):
        field = f"{path}.{found.group(1)}" if path else found.group(1)
        return InvalidRequest(f"the field '{_short(field)}' is not known", param=_short(field))
    if found := _MISSING.fullmatch(problem):
        field = f"{path}.{found.group(1)}" if path else found.group(1)
        return InvalidRequest(f"the field '{field}' is missing", param=field)
    what = f"'{_short(path)}'" if path else "the body"
    return InvalidRequest(f"{what} {_sentence(problem)}", param=_short(path) or None)


def _sentence(problem: str) -> str:
    if found := _BOUND.fullmatch(problem):
        length, sign, bound = found.groups()
        number = f"{float(bound):.15g}" if "." in bound or "e" in bound else bound
        return f"must have a length of {_BOUNDS[sign]} {number}" if length else f"must be {_BOUNDS[sign]} {number}"
    if found := _KIND.fullmatch(problem):
        wanted = " or ".join(_WORDS.get(word, word) for word in found.group(1).split(" | "))
        return f"must be {wanted}, not {_WORDS.get(found.group(2), found.group(2))}"
    if found := _VALUE.fullmatch(problem):
        return f"cannot be {_short(found.group(1))}"
    return f"is wrong: {_short(problem)}"


def _short(text: str) -> str:
    return text if len(text) <= 200 else text[:199] + "…"
