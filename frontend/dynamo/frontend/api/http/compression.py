"""Compressed bodies of requests."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

from dynamo.common.errors import InvalidRequest, PayloadTooLarge

WINDOW_BITS: Mapping[str, int] = {"gzip": 31, "deflate": 15}
"""zlib's names of them: gzip has its own header, deflate has that of zlib."""
BRIEF_BYTES = 16 * 1024
"""More than this is (de)compressed in a thread."""
_MAX_RATIO = 100
"""A body that decompresses to more than so many times its size, and to more than `_SMALL_BYTES`, is taken for an attack."""
_SMALL_BYTES = 2**20


class UnknownEncoding(InvalidRequest):
    """The request has an unsupported content encoding."""


def encoding_of(header: str) -> str:
    """Return `gzip`, `deflate`, or an empty string for a body that is not compressed. Raises UnknownEncoding."""
    encoding = header.strip().lower()
    if encoding in ("", "identity"):
        return ""
    if encoding not in WINDOW_BITS:
        raise UnknownEncoding(f"unsupported content encoding {encoding[:40]!r}; expected gzip or deflate")
    return encoding


def decompress(data: bytes, encoding: str, limit_bytes: int) -> bytes:
    """Decompress a body to at most `limit_bytes`, and to no more than its compressed size can justify.

    Raises PayloadTooLarge, and InvalidRequest for invalid data.
    """
    stream = zlib.decompressobj(WINDOW_BITS[encoding])
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
