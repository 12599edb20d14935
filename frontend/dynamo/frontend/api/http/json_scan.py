"""Bound a JSON text before anything is built from it.

Memory and time of decoding depend on the number of values, not of bytes: 4 MiB of `[],` are 1.4 million lists. So brackets,
colons and commas outside of strings are counted first, in blocks, with numpy: a block of 64 KiB takes about 0.3 ms. The scan does
not validate: where it misreads a text, that text is not JSON, and the decoder stops there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from dynamo.common.errors import InvalidRequest

NODE_VALUES = 8
"""Each object, array and key counts as so many numbers, which is what it costs."""
_BLOCK_BYTES = 64 * 1024
_BLOCKS_PER_TURN = 16
_LONG_BYTES = 2**20
"""Longer bodies are counted in blocks right away."""
_QUOTE, _BACKSLASH = ord('"'), ord("\\")
_NO_BRACKET = bytes(set(range(256)) - set(b"[]{}"))
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
"""One level down, as the number 1; one level up, as -1."""


async def scan_json(body: bytes | memoryview, *, max_depth: int, max_values: int) -> None:
    """Raise InvalidRequest if `body` nests too deeply or has too many values; let other requests run in between."""
    for number, _ in enumerate(_scan(body, max_depth, max_values), 1):
        if number % _BLOCKS_PER_TURN == 0:
            await asyncio.sleep(0)


def check_json(body: bytes | memoryview, *, max_depth: int, max_values: int, what: str = "the body") -> None:
    """Raise InvalidRequest if `body` nests too deeply or has too many values."""
    for _ in _scan(body, max_depth, max_values, what):
        pass


def too_deep(max_depth: int, what: str = "the body") -> InvalidRequest:
    return InvalidRequest(f"{what} nests arrays and objects deeper than {max_depth} levels")


def _too_many(max_values: int, what: str) -> InvalidRequest:
    return InvalidRequest(
        f"{what} has too many values; at most {max_values} are allowed, and each object, array and key counts as {NODE_VALUES}"
    )


def outside_strings(text: bytes | memoryview) -> Iterator[tuple[int, NDArray[np.uint8]]]:
    """Yield the text in blocks, each with its offset; the contents of strings are zeros."""
    octets = np.frombuffer(text, np.uint8)
    is_in_string = is_escaped = False
    for start in range(0, octets.size, _BLOCK_BYTES):
        block = octets[start : start + _BLOCK_BYTES]
        quotes, is_escaped = _quotes(block, is_escaped)
        inside = np.bitwise_and(np.cumsum(quotes, dtype=np.uint8), 1).astype(bool)
        if is_in_string:
            np.logical_not(inside, out=inside)
        is_in_string = bool(inside[-1])
        yield start, np.where(inside, np.uint8(0), block)


def _scan(body: bytes | memoryview, max_depth: int, max_values: int, what: str = "the body") -> Iterator[None]:
    """Yield after each block."""
    if isinstance(body, bytes) and _is_harmless(body, max_depth, max_values):
        return
    text = np.frombuffer(body, np.uint8)
    is_in_string = is_escaped = False
    depth = values = 0
    for start in range(0, text.size, _BLOCK_BYTES):
        block = text[start : start + _BLOCK_BYTES]
        quotes, is_escaped = _quotes(block, is_escaped)
        inside = np.bitwise_and(np.cumsum(quotes, dtype=np.uint8), 1).astype(bool)
        if is_in_string:
            np.logical_not(inside, out=inside)
        is_in_string = bool(inside[-1])
        outside = block[~inside].tobytes()
        brackets = outside.translate(_STEPS, _NO_BRACKET)
        values += outside.count(b",") + NODE_VALUES * (outside.count(b":") + brackets.count(b"\x01"))
        if values > max_values:
            raise _too_many(max_values, what)
        if brackets:
            depths = np.cumsum(np.frombuffer(brackets, np.int8), dtype=np.int32)
            if depth + depths.max() > max_depth:
                raise too_deep(max_depth, what)
            depth += int(depths[-1])
        yield


def _is_harmless(body: bytes, max_depth: int, max_values: int) -> bool:
    """Whether `body`, which is not long, is within the bounds even if everything in its strings counted."""
    if len(body) > _LONG_BYTES:
        return False
    opened = body.count(b"[") + body.count(b"{")
    return opened <= max_depth and body.count(b",") + NODE_VALUES * (body.count(b":") + opened) <= max_values


def _quotes(block: NDArray[np.uint8], is_escaped: bool) -> tuple[NDArray[np.bool_], bool]:
    """Return where in `block` strings begin and end, and whether the character after it is escaped, as its first one may be."""
    quotes = block == _QUOTE
    backslashes = np.flatnonzero(block == _BACKSLASH)
    if is_escaped:
        quotes[0] = False
        if backslashes.size and backslashes[0] == 0:
            backslashes = backslashes[1:]
    if not backslashes.size:
        return quotes, False
    breaks = np.flatnonzero(np.diff(backslashes) != 1)
    first = backslashes[np.concatenate(([0], breaks + 1))]
    after = backslashes[np.concatenate((breaks, [-1]))] + 1
    escaped = after[(after - first) % 2 == 1]  # behind an odd number of backslashes
    ends_escaped = bool(escaped.size) and int(escaped[-1]) == block.size
    quotes[escaped[:-1] if ends_escaped else escaped] = False
    return quotes, ends_escaped
