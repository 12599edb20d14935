"""Bodies on the wire: the boundary between JSON and binary tensors, and the compression of responses."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from dynamo.common.errors import InvalidRequest, PayloadTooLarge
from dynamo.common.tensors.tensors import Buffer
from dynamo.frontend.api.http.compression import BRIEF_BYTES, WINDOW_BITS
from dynamo.frontend.preprocess.offload import Offload

JSON_LENGTH = "inference-header-content-length"
SEND_BINARY = (
    "send large tensors in binary, after the JSON (the parameter 'binary_data_size', the header Inference-Header-Content-Length)"
)
_WORTHWHILE_BYTES = 1024
_MAX_DIGITS = 19
_STEP_BYTES = 2**20
"""Compressed in one go, some milliseconds: a caller who gives up waits no longer."""
_LEVEL = 1
"""Responses are mostly numbers, which higher levels do not make smaller."""


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a request's body."""

    json: bytes
    binary: memoryview
    """What follows the JSON."""
    is_raw: bool
    """Whether there is no JSON, so that `binary` is the model's only input."""


def split(body: bytes, json_length: str | None, max_json_bytes: int) -> Parts:
    """Split a body at its header `Inference-Header-Content-Length`; without the header, all of it is JSON.

    Raises InvalidRequest for a length that is no integer, or beyond the body, and PayloadTooLarge for too much JSON.
    """
    whole = memoryview(body)
    if json_length is None:
        return Parts(body, whole[len(body) :], is_raw=False)
    text = json_length.strip()
    digits = text[1:] if text[:1] in ("-", "+") else text
    if not (digits.isascii() and digits.isdecimal()):
        raise InvalidRequest(f"the header Inference-Header-Content-Length is {text[:40]!r}, which is no integer")
    if len(digits) > _MAX_DIGITS or not 0 <= int(text) <= len(body):
        raise InvalidRequest(f"inference header size should be in range (0, {len(body)}), got: {text[:40]}")
    length = int(text)
    if length > max_json_bytes:
        raise PayloadTooLarge(f"the body has more than {max_json_bytes} bytes of JSON; {SEND_BINARY}")
    json = body if length == len(body) else body[:length]
    return Parts(json, whole[length:], is_raw=length == 0)


def accepted_encoding(header: str) -> str:
    """Return `gzip` or `deflate` if the header Accept-Encoding prefers one of them to no compression, else an empty string."""
    weights: dict[str, float] = {}
    for entry in header.lower().split(","):
        name, _, weight = entry.partition(";")
        weights[name.strip()] = _weight(weight)
    best = max(WINDOW_BITS, key=lambda name: weights.get(name, 0.0))  # the first of equals
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
    stream = zlib.compressobj(_LEVEL, wbits=WINDOW_BITS[encoding])
    if size <= BRIEF_BYTES:
        return [*filter(None, map(stream.compress, pieces)), stream.flush()]
    views = [memoryview(piece) for piece in pieces]
    steps = (view[begin : begin + _STEP_BYTES] for view in views for begin in range(0, len(view), _STEP_BYTES))
    compressed = [await offload.run(stream.compress, step) for step in steps]
    return [*filter(None, compressed), await offload.run(stream.flush)]
