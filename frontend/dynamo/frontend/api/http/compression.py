"""Compressed bodies of requests."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping

from dynamo.common.errors import InvalidRequest, PayloadTooLarge

WINDOW_BITS: Mapping[str, int] = {"gzip": 31, "deflate": 15}
"""zlib's names of them: gzip has its own header, deflate has that of zlib."""
BRIEF_BYTES = 16 * 1024
"""More than this is (de)compressed in a thread."""
_INPUT_BYTES = 64 * 1024
_STEP_BYTES = 2**20
"""Decompressed in one step: some milliseconds."""
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
    """Return a decompressed body. Raises as `decompress_steps` does."""
    return b"".join(decompress_steps(data, encoding, limit_bytes))


def decompress_steps(data: bytes, encoding: str, limit_bytes: int) -> Iterator[bytes]:
    """Decompress a body in steps to at most `limit_bytes`, and to no more than its compressed size can justify.

    Raises PayloadTooLarge, and InvalidRequest for invalid data.
    """
    stream = zlib.decompressobj(WINDOW_BITS[encoding])
    plausible_bytes = max(_SMALL_BYTES, len(data) * _MAX_RATIO)
    size = 0
    try:
        for begin in range(0, len(data), _INPUT_BYTES):
            rest = data[begin : begin + _INPUT_BYTES]
            while (rest or begin + _INPUT_BYTES >= len(data)) and not stream.eof:
                piece = stream.decompress(rest, min(_STEP_BYTES, limit_bytes + 1 - size))
                size += len(piece)
                _check_size(size, limit_bytes, plausible_bytes, encoding)
                yield piece
                rest = stream.unconsumed_tail
                if not rest and not piece:
                    break
            if stream.eof:
                unused = len(stream.unused_data) + max(0, len(data) - begin - _INPUT_BYTES)
                break
    except zlib.error as error:
        raise InvalidRequest(f"the body is not {encoding}: {error}") from None
    if not stream.eof:
        raise InvalidRequest(f"the body ends before its {encoding} data does")
    if unused:
        raise InvalidRequest(f"the body has {unused} bytes after its {encoding} data")


def _check_size(size: int, limit_bytes: int, plausible_bytes: int, encoding: str) -> None:
    if size > limit_bytes:
        raise PayloadTooLarge(f"the body is larger than {limit_bytes} bytes when decompressed")
    if size > plausible_bytes:
        raise PayloadTooLarge(f"the body is more than {_MAX_RATIO} times as large as its {encoding} data; send it uncompressed")
