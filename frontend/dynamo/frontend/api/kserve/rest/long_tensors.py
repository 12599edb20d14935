"""Tensors whose data is a long array in JSON: read piece by piece into their raw form."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import msgspec

from dynamo.common.errors import InvalidRequest
from dynamo.common.process.work import Work
from dynamo.common.tensors.tensors import Buffer, DataType, element_count
from dynamo.frontend.api.kserve.rest.elements import (
    LONG_ELEMENTS,
    check_depth,
    decode,
    depth_of,
    encode,
    no_json,
    other_form,
    values_of,
)
from dynamo.frontend.api.kserve.rest.long_arrays import PIECE_BYTES, pieces
from dynamo.frontend.api.kserve.rest.long_strings import unescaped

_VALUE_BYTES = 32
"""Memory of a number, in a list."""
_SPACES = b" \t\r\n"


@dataclass(frozen=True, slots=True)
class LongTensor:
    """A tensor whose raw form is made piece by piece."""

    size_bytes: int
    pieces: Iterator[Buffer]
    """Its raw form, in steps: some are empty. Raise InvalidRequest as `to_raw` does."""


def long_tensor(data: memoryview | list[Any], kind: DataType, shape: Sequence[int], what: str) -> Work[LongTensor]:
    """Do what `to_raw` does for a long array, given as JSON or decoded. Numbers are only read when the pieces are."""
    count = element_count(shape, what)
    if isinstance(data, list):
        yield _VALUE_BYTES * len(data)
        pieces = _encoded(values_of(data, kind, shape, count, what), kind, what)
    else:
        pieces = _LongData(kind, shape, count, what).raws(data)
        if count > len(data) // 2 + 1:  # more than there can be: no memory is taken for what is an error
            for _ in pieces:
                yield 0
    if kind.size:
        return LongTensor(count * kind.size, pieces)
    raws: list[Buffer] = []
    for raw in pieces:
        yield len(raw)
        raws.append(raw)
    return LongTensor(sum(map(len, raws)), iter(raws))


def _encoded(values: list[Any], kind: DataType, what: str) -> Iterator[Buffer]:
    for start in range(0, len(values), LONG_ELEMENTS):
        yield encode(values[start : start + LONG_ELEMENTS], kind, what, start)


class _LongData:
    """Reads a long array of JSON in pieces."""

    def __init__(self, kind: DataType, shape: Sequence[int], count: int, what: str) -> None:
        self._kind = kind
        self._shape = shape
        self._count = count
        self._what = what
        self._total = 0
        """Elements so far."""
        self._fits = True
        """Whether all arrays that were read have the lengths that the shape says."""

    def raws(self, array: memoryview) -> Iterator[Buffer]:
        depth = depth_of(array, self._what)
        check_depth(depth, self._what)
        yield from self._raws(array, depth, self._shape if depth > 1 else ())
        if self._total != self._count:
            raise InvalidRequest(f"{self._what} has {self._total} elements in its contents where its shape needs {self._count}")
        if self._count and not (self._fits and depth in (1, len(self._shape))):
            raise other_form(self._what, self._shape)

    def _raws(self, array: memoryview, depth: int, shape: Sequence[int]) -> Iterator[Buffer]:
        """Yield the elements, flat. `shape` is that of the array; empty: any number of elements."""
        length = 0
        for piece, is_long in pieces(array):
            if piece is None:
                yield b""
                continue
            if is_long:
                piece = _trimmed(piece, self._what)
            if is_long and len(piece) > PIECE_BYTES:
                yield from self._string(piece) if depth == 1 else self._raws(_row(piece, self._what), depth - 1, shape[1:])
                length += 1
                continue
            rows = decode(msgspec.Raw(b"[" + bytes(piece) + b"]"), self._kind, depth, self._what)
            if not rows and length:
                raise no_json(self._what, "trailing comma in array")
            length += len(rows)
            if shape and length > shape[0]:
                raise other_form(self._what, self._shape)
            for level in range(1, depth):
                if level < len(shape):
                    self._fits = self._fits and all(len(row) == shape[level] for row in rows)
                rows = list(chain.from_iterable(rows))
            yield self._counted(encode(rows, self._kind, self._what, self._total), len(rows))
        self._fits = self._fits and (not shape or length == shape[0])

    def _string(self, text: memoryview) -> Iterator[Buffer]:
        """Yield one long element of BYTES, whose length is written to the first buffer at last."""
        if self._kind.size:
            raise InvalidRequest(f"{self._what} has data that is not {self._kind.name}: an element has {len(text)} characters")
        length = bytearray(4)
        yield self._counted(length, 1)
        size = 0
        try:
            for part in unescaped(text):
                size += len(part)
                yield part
        except ValueError as error:
            raise no_json(self._what, str(error)) from None
        length[:] = size.to_bytes(4, "little")

    def _counted(self, raw: Buffer, elements: int) -> Buffer:
        self._total += elements
        if self._total > self._count:
            raise InvalidRequest(f"{self._what} has more elements in its contents than the {self._count} that its shape needs")
        return raw


def _trimmed(text: memoryview, what: str) -> memoryview:
    """Return a text without the white space around it. Raises InvalidRequest if that is long."""
    first, last = bytes(text[:PIECE_BYTES]), bytes(text[-PIECE_BYTES:])
    begin, end = len(first) - len(first.lstrip(_SPACES)), len(last) - len(last.rstrip(_SPACES))
    if begin == len(first) or end == len(last):
        raise no_json(what, f"there are more than {PIECE_BYTES} bytes of white space")
    return text[begin : len(text) - end]


def _row(text: memoryview, what: str) -> memoryview:
    if text[0] != ord("[") or text[-1] != ord("]"):
        raise no_json(what, "an array was expected")
    return text
