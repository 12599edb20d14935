"""Long arrays in JSON, handled in steps: cut out of a body before it is decoded, then decoded piece by piece.

A piece of 16 KiB takes a decoder well below a millisecond, and some milliseconds if it is made to take long.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from dynamo.common.process.work import Work
from dynamo.frontend.api.http.json_scan import outside_strings

SHORT_BYTES = 128 * 1024
"""A body or a response of this size is read or written at once."""
PIECE_BYTES = 16 * 1024
_LONG_BYTES = 1024
"""Arrays of a long body from this length on are cut out of it, so that what is left is short."""
_ARRAY_BYTES = 512
"""Memory that it takes to keep an array apart."""
_MAX_ARRAYS = 1 << 18
INFER_DEPTH = 4
"""Tensors' `data` in a request of infer: within an object, the array `inputs`, and an object."""
GENERATE_DEPTH = 2
"""Arrays in a request of generate: within an object."""


@dataclass(frozen=True, slots=True)
class CutBody:
    """A body without its long arrays of data."""

    text: bytes
    """In place of each array, an array of one random number."""
    arrays: Mapping[bytes, memoryview]
    """The arrays by what stands in their place."""

    def restored(self, data: object) -> object:
        """Return the array in whose place `data` stands, decoded or not; `data` itself if there is none."""
        if not self.arrays:
            return data
        if isinstance(data, msgspec.Raw):
            return self.arrays.get(bytes(data), data)
        if isinstance(data, list) and len(data) == 1 and isinstance(data[0], int):
            return self.arrays.get(_mark(data[0]), data)
        return data


def _mark(number: int) -> bytes:
    return b"[%d]" % number


def cut_arrays(body: bytes, depth: int) -> Work[CutBody]:
    """Cut the arrays at `depth`, which counts themselves, out of a long body, but for short ones."""
    kept: list[memoryview | bytes] = []
    arrays: dict[bytes, memoryview] = {}
    whole = memoryview(body)
    nonce = secrets.randbits(62)
    end = 0
    for number, (start, stop) in enumerate(_arrays(body, depth)):
        if number > _MAX_ARRAYS:
            break  # the rest has too many values to be decoded
        if not start:
            yield 0
        if stop - start < _LONG_BYTES:
            continue
        yield _ARRAY_BYTES
        mark = _mark(nonce + len(arrays))
        arrays[mark] = whole[start:stop]
        kept += (whole[end:start], mark)
        end = stop
    if not arrays:
        return CutBody(body, arrays)
    kept.append(whole[end:])
    yield sum(map(len, kept))
    return CutBody(b"".join(kept), arrays)


def pieces(array: memoryview) -> Iterator[tuple[memoryview | None, bool]]:
    """Yield the text between the brackets of an array in pieces, cut at commas, and whether each is one long element alone.

    A piece that is None means that another one is still being looked for.
    """
    begin = 1
    for offset, block, depths in _depths(array):
        commas = np.flatnonzero((block == ord(",")) & (depths == 1))
        if not commas.size:
            yield None, False
            continue
        first, last = offset + int(commas[0]), offset + int(commas[-1])
        if first - begin > PIECE_BYTES:  # there was no comma in the block before
            yield array[begin:first], True
            begin = first + 1
        if begin <= last:
            yield array[begin:last], False
            begin = last + 1
    rest = array[begin : len(array) - 1]
    yield rest, len(rest) > PIECE_BYTES


def element_number(array: memoryview) -> Work[int]:
    """Return how many elements an array has, if it is not empty."""
    commas = 0
    for _, block, depths in _depths(array):
        commas += int(np.count_nonzero((block == ord(",")) & (depths == 1)))
        yield 0
    return commas + 1


def _arrays(body: bytes, depth: int) -> Iterator[tuple[int, int]]:
    """Yield start and end of each array at `depth`, which counts itself, and (0, 0) after each block."""
    start = -1
    for offset, block, depths in _depths(memoryview(body)):
        opened = (block == ord("[")) & (depths == depth)
        closed = (block == ord("]")) & (depths == depth - 1)
        for position in np.flatnonzero(opened | closed).tolist():
            if opened[position]:
                start = offset + position
            elif start >= 0:
                yield start, offset + position + 1
                start = -1
        yield 0, 0


def _depths(text: memoryview) -> Iterator[tuple[int, NDArray[np.uint8], NDArray[np.int32]]]:
    """For each block of a text, its offset, its octets with those in strings blanked, and the depth after each octet."""
    depth = 0
    for offset, block in outside_strings(text, PIECE_BYTES):
        steps = np.zeros(block.size, np.int8)
        steps[(block == ord("[")) | (block == ord("{"))] = 1
        steps[(block == ord("]")) | (block == ord("}"))] = -1
        depths = np.cumsum(steps, dtype=np.int32)
        depths += depth
        depth = int(depths[-1])
        yield offset, block, depths
