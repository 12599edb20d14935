"""Bound a JSON text before anything is built from it.

Memory and time of decoding depend on the number of values, not of bytes: 4 MiB of `[],` are 1.4 million lists. So brackets,
colons and commas outside of strings are counted first, in blocks, with numpy: a block of 64 KiB takes about 0.3 ms. Of a body of
few strings, such as one with a long prompt, the strings are cut out instead, in a tenth of that time. The scan does not validate:
where it misreads a text, that text is not JSON, and the decoder stops there.

A value counts as many as it takes to decode, in integers: 30 ns. Numbers near the ends of the range of doubles (1e308) take
msgspec 10 µs, 300 times as long, and those with hundreds of digits up to 1.8 µs for each 32 of them.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Generator, Iterator
from itertools import count

import numpy as np
from numpy.typing import NDArray

from dynamo.common.errors import InvalidRequest
from dynamo.common.http.served import media_type

NODE_VALUES = 8
"""Each object, array and key counts as so many numbers, which is what it costs."""
STRING_VALUES = 6
"""A string costs a decoder as much as so many numbers if it has other characters than ASCII's."""
VALUE_BYTES = 64
"""What a number or a short string takes in memory, with its place in an array."""
_EXTREME_VALUES = 256
"""What a number counts whose exponent has three digits."""
_EXTREME = re.compile(rb"[eE][+-]?[0-9]{3}")
_LONG_VALUES = 64
"""What each 32 digits in a row count."""
_DIGITS = bytes(ord("0") if octet in b"0123456789" else octet for octet in range(256))
_LONG_NUMBER = b"0" * 32
_BLOCK_BYTES = 64 * 1024
_BLOCKS_PER_TURN = 8
_LONG_BYTES = 2**20
"""Longer bodies are counted in blocks right away."""
_FEW_QUOTES = 1024
"""With more, not counting those in strings, the strings of a body are not cut out of it: each takes some hundred bytes."""
_MAX_BACKSLASHES = 16
"""Nor are they if more are in a row before a quote."""
_MARGIN = b" " * (_MAX_BACKSLASHES + 1)
_QUOTE, _BACKSLASH = ord('"'), ord("\\")
_NO_BRACKET = bytes(set(range(256)) - set(b"[]{}"))
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
"""One level down, as the number 1; one level up, as -1."""


async def scan_json(body: bytes | memoryview, *, max_depth: int, max_values: int) -> int:
    """Return how many values `body` has at most; let other requests run in between.

    Raises InvalidRequest if it nests too deeply or has too many.
    """
    if isinstance(body, bytes) and (values := _values_at_once(body, max_depth, max_values)) is not None:
        return values  # of most, and without steps
    steps = _scan_blocks(body, max_depth, max_values, "the body")
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


def is_json(content_type: str) -> bool:
    """Return whether a content type says that the body is JSON."""
    kind = media_type(content_type)
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))


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
    if isinstance(body, bytes) and (values := _values_at_once(body, max_depth, max_values)) is not None:
        return values
    return (yield from _scan_blocks(body, max_depth, max_values, what))


def _scan_blocks(body: bytes | memoryview, max_depth: int, max_values: int, what: str) -> Generator[int, None, int]:
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
        values += _values_outside(outside)
        if values > max_values:
            raise _too_many(max_values, what)
        lowest, depth = _depths(outside, depth)
        if lowest > max_depth:
            raise too_deep(max_depth, what)
        yield 0
    return values


def _values_outside(outside: bytes) -> int:
    """Return what a part of a text counts that has the last quote of each string and not its contents."""
    keys, strings = outside.count(b":"), outside.count(b'"')
    values = outside.count(b",") + NODE_VALUES * (keys + outside.count(b"[") + outside.count(b"{"))
    values += (STRING_VALUES - 1) * (strings - keys) + outside.count(b".")
    values += _LONG_VALUES * outside.translate(_DIGITS).count(_LONG_NUMBER)
    return values + _EXTREME_VALUES * len(_EXTREME.findall(outside))


def _depths(outside: bytes, depth: int) -> tuple[int, int]:
    """Return how many levels a part of a text reaches, and at which it ends, if it begins at `depth`."""
    brackets = outside.translate(_STEPS, _NO_BRACKET)
    if not brackets:
        return depth, depth
    depths = np.cumsum(np.frombuffer(brackets, np.int8), dtype=np.int32)
    return depth + int(depths.max()), depth + int(depths[-1])


def _values_at_once(body: bytes, max_depth: int, max_values: int) -> int | None:
    """Return what `body` counts, at most; None if it is long, also without its strings, has many, or may be beyond the bounds."""
    size = len(body)
    if size > _LONG_BYTES:
        return None
    if size <= _BLOCK_BYTES:  # most are within the bounds even if everything in their strings counts
        opened = body.count(b"[") + body.count(b"{")
        commas, colons = body.count(b","), body.count(b":")
        values = commas + NODE_VALUES * (colons + opened)
        extreme = (_EXTREME_VALUES + 1) * (commas + colons + opened)  # a string counts less
        if opened <= max_depth and values + extreme <= max_values:
            return values
    if body.count(b'"') - body.count(b'\\"') > _FEW_QUOTES:
        return None  # without the positions of all quotes, which take more than the body
    text = _MARGIN + body
    quotes = _quotes_of_few_strings(np.frombuffer(text, np.uint8))
    if quotes is None:
        return None
    ends = [0, *quotes, len(text)]
    parts = list(zip(ends[::2], ends[1::2], strict=False))
    if sum([end - start for start, end in parts]) > _BLOCKS_PER_TURN * _BLOCK_BYTES:
        return None
    outside = b"".join([text[start:end] for start, end in parts])
    values = _values_outside(outside)
    return values if values <= max_values and _depths(outside, 0)[0] <= max_depth else None


def _quotes_of_few_strings(text: NDArray[np.uint8]) -> list[int] | None:
    """Return where strings begin and end; None if there are many, or many backslashes before a quote."""
    quotes = np.flatnonzero(text == _QUOTE)
    is_end = np.ones(quotes.size, bool)
    escaped = np.arange(quotes.size)  # those behind as many backslashes as were looked at, or more
    for distance in range(1, _MAX_BACKSLASHES + 1):
        escaped = escaped[text[quotes[escaped] - distance] == _BACKSLASH]
        if not escaped.size:
            return None if np.count_nonzero(is_end) > _FEW_QUOTES else quotes[is_end].tolist()
        is_end[escaped] ^= True
    return None


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
