"""Bound a JSON text before anything is built from it.

Memory and time of decoding depend on the number of values, not of bytes: 4 MiB of `[],` are 1.4 million lists. So brackets,
colons and commas outside of strings are counted first, in blocks, with numpy: a block of 64 KiB takes about 0.3 ms. The scan does
not validate: where it misreads a text, that text is not JSON, and the decoder stops there.

A value counts as many as it takes to decode, in integers: 30 ns. Numbers near the ends of the range of doubles (1e308) take
msgspec 10 µs, 300 times as long.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Generator, Iterator
from itertools import count

import numpy as np
from numpy.typing import NDArray

from dynamo.common.errors import InvalidRequest

NODE_VALUES = 8
"""Each object, array and key counts as so many numbers, which is what it costs."""
STRING_VALUES = 6
"""A string costs a decoder as much as so many numbers if it has other characters than ASCII's."""
VALUE_BYTES = 64
"""What a number or a short string takes in memory, with its place in an array."""
_EXTREME_VALUES = 256
"""What a number counts whose exponent has three digits."""
_EXTREME = re.compile(rb"[eE][+-]?[0-9]{3}")
_BLOCK_BYTES = 64 * 1024
_BLOCKS_PER_TURN = 8
_LONG_BYTES = 2**20
"""Longer bodies are counted in blocks right away."""
_QUOTE, _BACKSLASH = ord('"'), ord("\\")
_NO_BRACKET = bytes(set(range(256)) - set(b"[]{}"))
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
"""One level down, as the number 1; one level up, as -1."""


async def scan_json(body: bytes | memoryview, *, max_depth: int, max_values: int) -> int:
    """Return how many values `body` has at most; let other requests run in between.

    Raises InvalidRequest if it nests too deeply or has too many.
    """
    if isinstance(body, bytes) and (harmless := _harmless_values(body, max_depth, max_values)) is not None:
        return harmless  # most are, and need no steps
    steps = scan_steps(body, max_depth, max_values)
    for number in count(1):
        try:
            next(steps)
        except StopIteration as end:
            if number > _BLOCKS_PER_TURN:
                await asyncio.sleep(0)  # it is decoded in a turn of its own
            return int(end.value)
        if number % _BLOCKS_PER_TURN == 0:
            await asyncio.sleep(0)
    raise AssertionError("steps end")


def check_json(body: bytes | memoryview, *, max_depth: int, max_values: int, what: str = "the body") -> None:
    """Raise InvalidRequest if `body` nests too deeply or has too many values."""
    for _ in scan_steps(body, max_depth, max_values, what):
        pass


def too_deep(max_depth: int, what: str = "the body") -> InvalidRequest:
    return InvalidRequest(f"{what} nests arrays and objects deeper than {max_depth} levels")


def _too_many(max_values: int, what: str) -> InvalidRequest:
    return InvalidRequest(
        f"{what} has too many values; at most {max_values} are allowed, and each object, array and key counts as {NODE_VALUES},"
        f" a string as {STRING_VALUES}, a number with a fraction as 2"
    )


def outside_strings(text: bytes | memoryview, block_bytes: int = _BLOCK_BYTES) -> Iterator[tuple[int, NDArray[np.uint8]]]:
    """Yield the text in blocks, each with its offset; the contents of strings are zeros."""
    octets = np.frombuffer(text, np.uint8)
    is_in_string = is_escaped = False
    for start in range(0, octets.size, block_bytes):
        block = octets[start : start + block_bytes]
        quotes, is_escaped = _quotes(block, is_escaped)
        inside = np.bitwise_and(np.cumsum(quotes, dtype=np.uint8), 1).astype(bool)
        if is_in_string:
            np.logical_not(inside, out=inside)
        is_in_string = bool(inside[-1])
        yield start, np.where(inside, np.uint8(0), block)


def scan_steps(body: bytes | memoryview, max_depth: int, max_values: int, what: str = "the body") -> Generator[int, None, int]:
    """Return how many values `body` has at most. Yields zero after each block. Raises as `check_json` does."""
    if isinstance(body, bytes) and (harmless := _harmless_values(body, max_depth, max_values)) is not None:
        return harmless
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
        keys, strings = outside.count(b":"), outside.count(b'"')  # of each string, key or not, the quote that ends it
        values += outside.count(b",") + NODE_VALUES * (keys + brackets.count(b"\x01"))
        values += (STRING_VALUES - 1) * (strings - keys) + outside.count(b".")
        values += _EXTREME_VALUES * len(_EXTREME.findall(outside))
        if values > max_values:
            raise _too_many(max_values, what)
        if brackets:
            depths = np.cumsum(np.frombuffer(brackets, np.int8), dtype=np.int32)
            if depth + depths.max() > max_depth:
                raise too_deep(max_depth, what)
            depth += int(depths[-1])
        yield 0
    return values


def _harmless_values(body: bytes, max_depth: int, max_values: int) -> int | None:
    """Return what `body` counts if everything in its strings does; None if it is long, or may not be within the bounds."""
    if len(body) > _LONG_BYTES:
        return None
    opened = body.count(b"[") + body.count(b"{")
    commas, colons = body.count(b","), body.count(b":")
    values = commas + NODE_VALUES * (colons + opened)
    extreme = (_EXTREME_VALUES + 1) * (commas + colons + opened)  # a string counts less
    return values if opened <= max_depth and values + extreme <= max_values else None


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
