"""Bodies on the wire: their compression, and the boundary between JSON and binary tensors."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dynamo.common.errors import InvalidRequest, PayloadTooLarge
from dynamo.common.tensors import Buffer
from dynamo.frontend.api.http.exchange import Exchange
from dynamo.frontend.preprocess.offload import Offload

JSON_LENGTH = "inference-header-content-length"
_WINDOW_BITS: Mapping[str, int] = {"gzip": 31, "deflate": 15}
"""zlib's names of them: gzip has its own header, deflate has that of zlib."""
_BRIEF_BYTES = 16 * 1024
"""More than this is (de)compressed in a thread."""
_MAX_RATIO = 100
"""A body that decompresses to more than so many times its size, and to more than `_SMALL_BYTES`, is taken for an attack."""
_SMALL_BYTES = 2**20
_WORTHWHILE_BYTES = 1024
_MAX_DIGITS = 19
_LEVEL = 1
"""Responses are mostly numbers, which higher levels do not make smaller."""


class UnknownEncoding(InvalidRequest):
    """The request has an unsupported content encoding."""


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a request's body."""

    json: bytes
    binary: memoryview
    """What follows the JSON."""
    is_raw: bool
    """Whether there is no JSON, so that `binary` is the model's only input."""


async def read_body(exchange: Exchange, max_bytes: int | None = None) -> bytes:
    """Read and decompress the request's body. `max_bytes` is the configured limit of bodies with tensors by default.

    Raises PayloadTooLarge for more than the configured limit, compressed or not, InvalidRequest for invalid compressed data,
    UnknownEncoding, and Cancelled if the client left.
    """
    encoding = exchange.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity", *_WINDOW_BITS):
        raise UnknownEncoding(f"unsupported content encoding {encoding[:40]!r}; expected gzip or deflate")
    limit = exchange.settings.options.max_body_bytes if max_bytes is None else max_bytes
    body = await exchange.any_body(limit)
    if encoding not in _WINDOW_BITS:
        return body
    decompressed = await exchange.settings.offload.run_if(len(body) > _BRIEF_BYTES, decompress, body, encoding, limit)
    exchange.hold(len(decompressed))
    return decompressed


def decompress(data: bytes, encoding: str, limit_bytes: int) -> bytes:
    """Decompress a body to at most `limit_bytes`, and to no more than its compressed size can justify.

    Raises PayloadTooLarge, and InvalidRequest for invalid data.
    """
    stream = zlib.decompressobj(_WINDOW_BITS[encoding])
    plausible_bytes = max(_SMALL_BYTES, len(data) * _MAX_RATIO)
    try:
        decompressed = stream.decompress(data, min(limit_bytes, plausible_bytes) + 1)
    except zlib.error as error:
        raise InvalidRequest(f"the body is not {encoding}: {error}") from None
    if len(decompressed) > limit_bytes:
        raise PayloadTooLarge(f"the body is larger than {limit_bytes} bytes when decompressed")
    if len(decompressed) > plausible_bytes:
        raise PayloadTooLarge(f"the body is more than {_MAX_RATIO} times as large as its {encoding} data; send it uncompressed")
    if not stream.eof:
        raise InvalidRequest(f"the body ends before its {encoding} data does")
    if stream.unused_data:
        raise InvalidRequest(f"the body has {len(stream.unused_data)} bytes after its {encoding} data")
    return decompressed


def split(body: bytes, json_length: str | None) -> Parts:
    """Split a body at its header `Inference-Header-Content-Length`; without the header, all of it is JSON.

    Raises InvalidRequest for a length that is no integer, or beyond the body.
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
    """Return `gzip` or `deflate` if the header Accept-Encoding prefers one of them to no compression, else an empty string."""
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


async def compress(pieces: Sequence[Buffer], encoding: str, offload: Offload) -> list[Buffer] | None:
    """Return `pieces` as one compressed stream; None if they are too small to be worth it."""
    size = sum(map(len, pieces))
    if size < _WORTHWHILE_BYTES:
        return None
    return await offload.run_if(size > _BRIEF_BYTES, _compress, pieces, encoding)


def _compress(pieces: Sequence[Buffer], encoding: str) -> list[Buffer]:
    stream = zlib.compressobj(_LEVEL, wbits=_WINDOW_BITS[encoding])
    return [*[compressed for piece in pieces if (compressed := stream.compress(piece))], stream.flush()]
