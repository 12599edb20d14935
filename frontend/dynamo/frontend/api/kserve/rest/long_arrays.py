"""Long arrays in JSON, handled in steps: cut out of a body before it is decoded, then decoded piece by piece.

Decoders do not let other threads run, so none is given more than a piece at a time. A piece of 64 KiB takes a few milliseconds.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dynamo.frontend.api.http.json_scan import outside_strings

PIECE_BYTES = 64 * 1024
_MAX_ARRAYS = 1 << 18
_DATA_DEPTH = 4
"""Tensors' `data` in a request: within an object, the array `inputs`, and an object."""


@dataclass(frozen=True, slots=True)
class CutBody:
    """A body without its long arrays of data."""

    text: bytes
    """In place of each array, an array of one random number."""
    arrays: Mapping[bytes, memoryview]
    """The arrays by what stands in their place."""


def cut_arrays(body: bytes) -> CutBody:
    """Cut the arrays at the depth of tensors' data that are longer than a piece out of a request's JSON."""
    if len(body) <= PIECE_BYTES:
        return CutBody(body, {})
    kept: list[bytes] = []
    arrays: dict[bytes, memoryview] = {}
    nonce = secrets.randbits(62)
    end = 0
    for number, (start, stop) in enumerate(_arrays(body, _DATA_DEPTH)):
        if number > _MAX_ARRAYS:
            break  # the rest has too many values to be decoded
        if stop - start <= PIECE_BYTES:
            continue
        mark = b"[%d]" % (nonce + len(arrays))
        arrays[mark] = memoryview(body)[start:stop]
        kept += (body[end:start], mark)
        end = stop
    return CutBody(b"".join((*kept, body[end:])), arrays)


def pieces(array: memoryview) -> Iterator[tuple[memoryview, bool]]:
    """Yield the text between the brackets of an array in pieces, cut at commas, and whether each is one long element alone."""
    begin = 1
    for offset, block, depths in _depths(array):
        commas = np.flatnonzero((block == ord(",")) & (depths == 1))
        if not commas.size:
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


def _arrays(body: bytes, depth: int) -> Iterator[tuple[int, int]]:
    """Start and end of each array at `depth`, which counts itself."""
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


def _depths(text: memoryview) -> Iterator[tuple[int, NDArray[np.uint8], NDArray[np.int32]]]:
    """For each block of a text, its offset, its octets with those in strings blanked, and the depth after each octet."""
    depth = 0
    for offset, block in outside_strings(text):
        steps = np.zeros(block.size, np.int8)
        steps[(block == ord("[")) | (block == ord("{"))] = 1
        steps[(block == ord("]")) | (block == ord("}"))] = -1
        depths = np.cumsum(steps, dtype=np.int32)
        depths += depth
        depth = int(depths[-1])
        yield offset, block, depths
