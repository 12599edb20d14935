"""Bodies on the wire: their compression, and where JSON ends and binary tensors begin."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dynamo.common.errors import InvalidRequest, PayloadTooLarge
from dynamo.common.tensors import Buffer
from dynamo.frontend.api.http.exchange import Exchange

JSON_LENGTH = "inference-header-content-length"
_WINDOW_BITS: Mapping[str, int] = {"gzip": 31, "deflate": 15}
"""How zlib calls them: gzip has a header of its own, deflate that of zlib."""
_BRIEF_BYTES = 16 * 1024
"""More than this is (de)compressed in a thread."""
_WORTHWHILE_BYTES = 1024
_MAX_DIGITS = 19
_LEVEL = 1
"""Answers are mostly numbers, which higher levels do not make smaller."""


class UnknownEncoding(InvalidRequest):
    """The request is compressed in a way that is not understood here."""


@dataclass(frozen=True, slots=True)
class Parts:
    """A request's body, taken apart."""

    json: bytes
    binary: memoryview
    """What follows the JSON."""
    is_raw: bool
    """There is no JSON: `binary` is the model's one input."""


async def read_body(exchange: Exchange) -> bytes:
    """The request's body as it was before it was compressed.

    Raises PayloadTooLarge for more than the configured limit, compressed or not, InvalidRequest for broken compression,
    UnknownEncoding, and Cancelled if the client left.
    """
    encoding = exchange.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity", *_WINDOW_BITS):
        raise UnknownEncoding(f"the content encoding {encoding[:40]!r} is not known; gzip and deflate are")
    body = await exchange.any_body()
    if encoding not in _WINDOW_BITS:
        return body
    limit = exchange.settings.max_body_bytes
    if len(body) <= _BRIEF_BYTES:
        return decompress(body, encoding, limit)
    return await asyncio.to_thread(decompress, body, encoding, limit)


def decompress(data: bytes, encoding: str, limit_bytes: int) -> bytes:
    """Never makes more than `limit_bytes` of it, however small `data` is. Raises PayloadTooLarge, InvalidRequest."""
    stream = zlib.decompressobj(_WINDOW_BITS[encoding])
    try:
        found = stream.decompress(data, limit_bytes + 1)
    except zlib.error as error:
        raise InvalidRequest(f"the body is not {encoding}: {error}") from None
    if len(found) > limit_bytes:
        raise PayloadTooLarge(f"the body is larger than {limit_bytes} bytes when decompressed")
    if not stream.eof:
        raise InvalidRequest(f"the body ends before its {encoding} data does")
    if stream.unused_data:
        raise InvalidRequest(f"the body has {len(stream.unused_data)} bytes after its {encoding} data")
    return found


def split(body: bytes, json_length: str | None) -> Parts:
    """Cuts a body where its header `Inference-Header-Content-Length` says; without the header, all is JSON.

    Raises InvalidRequest for a length that is no whole number, or beyond the body.
    """
    whole = memoryview(body)
    if json_length is None:
        return Parts(body, whole[len(body) :], is_raw=False)
    text = json_length.strip()
    if not (text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS and int(text) <= len(body)):
        raise InvalidRequest(
            f"the header Inference-Header-Content-Length is {text[:40]!r}; it must be between 0 and the body's {len(body)} bytes"
        )
    length = int(text)
    json = body if length == len(body) else body[:length]
    return Parts(json, whole[length:], is_raw=length == 0)


def accepted_encoding(header: str) -> str:
    """`gzip` or `deflate` if the header Accept-Encoding prefers one of them to no compression, else nothing."""
    weights: dict[str, float] = {}
    for entry in header.lower().split(","):
        name, _, weight = entry.partition(";")
        weights[name.strip()] = _weight(weight)
    best = max(_WINDOW_BITS, key=lambda name: weights.get(name, 0.0))  # the first of equals
    return best if weights.get(best, 0.0) > 0 and weights.get(best, 0.0) >= weights.get("identity", 0.0) else ""


def _weight(text: str) -> float:
    name, _, value = text.strip().partition("=")
    try:
        return float(value) if name.strip() == "q" else 1.0
    except ValueError:
        return 0.0


async def compress(pieces: Sequence[Buffer], encoding: str) -> list[Buffer] | None:
    """`pieces` in one compressed stream; None if they are too few bytes to bother."""
    size = sum(map(len, pieces))
    if size < _WORTHWHILE_BYTES:
        return None
    if size <= _BRIEF_BYTES:
        return _compress(pieces, encoding)
    return await asyncio.to_thread(_compress, pieces, encoding)


def _compress(pieces: Sequence[Buffer], encoding: str) -> list[Buffer]:
    stream = zlib.compressobj(_LEVEL, wbits=_WINDOW_BITS[encoding])
    return [*[made for piece in pieces if (made := stream.compress(piece))], stream.flush()]
