"""Decoding of JSON request bodies. Errors are sentences that name the field."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from dynamo.common.errors import InvalidRequest
from dynamo.frontend.api.http.allowed_values import allowed_values
from dynamo.frontend.api.http.exchange import Exchange
from dynamo.frontend.api.http.json_scan import VALUE_BYTES, scan_json, too_deep

T = TypeVar("T")

_AT = re.compile(r"(?: - at `(?:key` in `)?\$([^`]*)`)$")
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*)`")
_BOUND = re.compile(r"Expected `[^`]*` (of length )?(>=|<=|>|<) ([-0-9.e+]+)")
_KIND = re.compile(r"Expected `([^`]*)`, got `([^`]*)`")
_VALUE = re.compile(r"Invalid (?:enum )?value (.*)", re.DOTALL)
_BYTE = re.compile(r"\(byte (\d+)\)$")
_WORD = re.compile(rb"NaN|Infinity")
_KEY = re.compile(rb'"([^"\\]*)"\s*:\s*-?$')
_LONGEST_KEY = 200
_FEW_VALUES = 1024
"""So many are not worth counting."""
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


async def read_json(exchange: Exchange, decoder: msgspec.json.Decoder[T]) -> T:
    """Return the request in the body of `exchange`, which is bounded before it is decoded.

    Raises InvalidRequest, with the field as `param`, and what `Exchange.body` raises.
    """
    return decode(decoder, await scanned_body(exchange), exchange.settings.options.max_json_depth)


async def scanned_body(exchange: Exchange) -> bytes:
    """Return the JSON body of `exchange`, within the bounds on depth and values; what is built of them counts as held.

    Raises as `Exchange.body` does.
    """
    if exchange.scanned is not None:
        return exchange.take_scanned()
    body = await exchange.body()
    await scan_body(exchange, body)
    return body


async def scan_body(exchange: Exchange, body: bytes) -> None:
    """Hold what will be built of the values in a JSON body. Raises InvalidRequest for one beyond the bounds, and Overloaded."""
    options = exchange.settings.options
    values = await scan_json(body, max_depth=options.max_json_depth, max_values=options.max_json_values)
    if values > _FEW_VALUES:
        exchange.hold(VALUE_BYTES * values)


def decode(decoder: msgspec.json.Decoder[T], body: bytes, max_depth: int) -> T:
    """Return the request in a body that was scanned. Raises InvalidRequest, with the field as `param`."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise invalid(str(error), decoder.type) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _infinite(body, str(error)) or InvalidRequest(f"the body is not JSON: {error}") from None
    except RecursionError:
        raise too_deep(max_depth) from None


def _infinite(body: bytes, problem: str) -> InvalidRequest | None:
    """Return the error for the words NaN and Infinity, which some clients write for numbers; None if another is the problem."""
    position = _BYTE.search(problem)
    if position is None or not (word := _WORD.match(body, int(position.group(1)))):
        return None
    key = _KEY.search(body[max(0, word.start() - _LONGEST_KEY) : word.start()])
    name = key.group(1).decode(errors="replace") if key else ""
    what = f"'{name}'" if name else "a number"
    return InvalidRequest(f"{what} must be a finite number, got {word.group().decode()}", param=name or None)


def invalid(problem: str, kind: type | None = None) -> InvalidRequest:
    """Return the error for a message of msgspec about a request of type `kind`, in the words of this server."""
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
    if (match := _VALUE.fullmatch(problem)) and kind is not None and (values := allowed_values(kind, path)):
        return InvalidRequest(f"{what} must be {_listed(values)}, got {_short(match.group(1))}", param=_short(path))
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


def _listed(values: Sequence[object]) -> str:
    *others, last = map(repr, values)
    return f"{', '.join(others)} or {last}" if others else last


def _short(text: str) -> str:
    return text if len(text) <= 200 else text[:199] + "…"
