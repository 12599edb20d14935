"""The files in a JSON request to load a model, in base64: cut out before the rest is decoded, and decoded piece by piece."""

from __future__ import annotations

import binascii
import secrets
from collections.abc import Iterator, Mapping
from typing import TypeAlias

from dynamo.common.adapters import LoadAdapter
from dynamo.common.errors import InvalidRequest, PayloadTooLarge
from dynamo.common.process.work import Work
from dynamo.common.repository import Files, LoadRequest
from dynamo.frontend.api.kserve.model_files import MAX_SETTINGS_BYTES
from dynamo.frontend.api.kserve.repository_requests import FILE, load_with_files, parameters_of
from dynamo.frontend.api.kserve.rest.long_strings import unescaped

LongStrings: TypeAlias = Mapping[str, memoryview]
"""Long strings of a body, with their quotes, by the texts that stand in their place."""
_LONG_BYTES = 64 * 1024
_MAX_QUOTES = 1 << 18
"""What follows so many is not cut."""
_QUOTES_PER_STEP = 1024
_BACKSLASH = ord("\\")
_LEAST_RUN = 64


def cut_strings(body: bytes) -> Work[tuple[bytes, LongStrings]]:
    """Return a body with a short string in place of each long one, and the long ones by what stands there."""
    whole, nonce = memoryview(body), secrets.token_hex(16)
    kept: list[memoryview | bytes] = []
    strings: dict[str, memoryview] = {}
    end = 0
    start = -1
    for number, quote in enumerate(_quotes(body)):
        if number % _QUOTES_PER_STEP == 0:
            yield 0
        if number > _MAX_QUOTES:
            break
        if start < 0:
            start = quote
        elif not _is_escaped(body, start, quote):
            if quote - start > _LONG_BYTES:
                mark = f"{nonce}-{len(strings)}"
                strings[mark] = whole[start : quote + 1]
                kept += (whole[end:start], b'"%b"' % mark.encode())
                end = quote + 1
                yield 0
            start = -1
    if not strings:
        return body, strings
    kept.append(whole[end:])
    size = sum(map(len, kept))
    if size > MAX_SETTINGS_BYTES:
        raise PayloadTooLarge(f"the request has {size} bytes beside its files; at most {MAX_SETTINGS_BYTES} are allowed")
    return b"".join(kept), strings


def _quotes(body: bytes) -> Iterator[int]:
    position = body.find(b'"')
    while position >= 0:
        yield position
        position = body.find(b'"', position + 1)


def _is_escaped(body: bytes, start: int, quote: int) -> bool:
    """Return whether there is an odd number of backslashes before a quote in the string that begins at `start`."""
    if body[quote - 1] != _BACKSLASH:
        return False
    length = _LEAST_RUN
    while True:
        before = body[max(start + 1, quote - length) : quote]
        run = len(before) - len(before.rstrip(b"\\"))
        if run < len(before) or len(before) < length:
            return run % 2 == 1
        length *= 2


def load_from_json(model: str, body: Mapping[str, object], long: LongStrings) -> Work[tuple[LoadRequest | LoadAdapter, Files]]:
    """Return the load request of a JSON body, and the model's files, which are in base64. Raises InvalidRequest."""
    parameters: dict[str, object] = {}
    files: dict[str, list[bytes]] = {}
    for name, value in parameters_of(body).items():
        if not isinstance(value, str):
            parameters[name] = value
        elif name.startswith(FILE):
            try:
                files[name] = yield from _file(unescaped(long[value]) if value in long else iter((value.encode(),)))
            except ValueError:
                raise InvalidRequest(f"the parameter {name[:200]!r} is not base64") from None
        else:
            parameters[name] = _text(name, long[value]) if value in long else value
        yield 0
    return load_with_files(model, parameters, files)


def _file(text: Iterator[bytes]) -> Work[list[bytes]]:
    """Return the pieces of a file. Raises ValueError for what is not base64."""
    pieces: list[bytes] = []
    rest, has_ended = b"", False
    for part in text:
        part = rest + part
        end = len(part) - len(part) % 4
        rest, part = part[end:], part[:end]
        if part and (has_ended or b"=" in part[:-2]):
            raise ValueError("padding within the data")
        pieces.append(binascii.a2b_base64(part, strict_mode=True))
        has_ended = has_ended or part.endswith(b"=")
        yield 0
    if rest:
        raise ValueError("incomplete data")
    return pieces


def _text(name: str, string: memoryview) -> str:
    if len(string) > MAX_SETTINGS_BYTES:
        raise PayloadTooLarge(
            f"the parameter {name[:200]!r} has {len(string)} bytes; at most {MAX_SETTINGS_BYTES} are allowed beside files"
        )
    try:
        return b"".join(unescaped(string)).decode()
    except ValueError as error:
        raise InvalidRequest(f"the body is not JSON: {error}") from None
