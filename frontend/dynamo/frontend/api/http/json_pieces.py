"""JSON with long parts, which are written in steps and put between the pieces of the rest."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import msgspec

_PIECE_BYTES = 64 * 1024


class JsonArray:
    """A long array, which grows by elements that are encoded as they come: all at once would hold up everything else."""

    __slots__ = ("_last", "_pieces", "_size")

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._last = bytearray(b"[")
        self._size = 1

    def extend(self, array: bytes) -> None:
        """Add the elements of `array`, which is written without white space."""
        elements = memoryview(array)[1:-1]
        if not elements:
            return
        if self._size > 1:
            self._last += b","
        self._size += len(elements) + 1
        self._last += elements
        if len(self._last) > _PIECE_BYTES:
            self._pieces.append(bytes(self._last))
            self._last = bytearray()

    def pieces(self) -> list[bytes]:
        """Return the array in its pieces; it may grow afterwards."""
        return [*self._pieces, bytes(self._last) + b"]"]


class Spliced(msgspec.Struct, eq=False):
    """A text in JSON and the long parts of it, each with a mark that stands in its place until all are written."""

    _nonce: bytes = b""
    _parts: list[Sequence[bytes]] = []

    def mark(self, pieces: Sequence[bytes]) -> bytes:
        """Return what is to be written, once, where `pieces` belong; in the order of their places."""
        self._nonce = self._nonce or secrets.token_hex(16).encode()
        self._parts.append(pieces)
        return self._mark(len(self._parts) - 1)

    def put(self, array: JsonArray) -> bytes:
        """Return what is to be written, once, where `array` belongs: the array itself if it is short, or else a mark."""
        pieces = array.pieces()
        return pieces[0] if len(pieces) == 1 else self.mark(pieces)

    def _mark(self, number: int) -> bytes:
        return b'"%b-%d"' % (self._nonce, number)

    def pieces(self, text: bytes) -> list[bytes]:
        """Return `text`, in which the marks are, with what they stand for."""
        spliced: list[bytes] = []
        begin = 0
        for number, part in enumerate(self._parts):
            mark = self._mark(number)
            end = text.index(mark, begin)
            spliced += (text[begin:end], *part)
            begin = end + len(mark)
        return [*spliced, text[begin:]]
