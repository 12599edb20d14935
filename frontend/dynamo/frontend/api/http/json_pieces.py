"""JSON with long parts, which are written in steps and put between the pieces of the rest."""

from __future__ import annotations

import secrets
from collections.abc import Sequence


class Spliced:
    """A text in JSON and the long parts of it, each with a mark that stands in its place until all are written."""

    def __init__(self) -> None:
        self._nonce = b""
        self._parts: list[Sequence[bytes]] = []

    def mark(self, pieces: Sequence[bytes]) -> bytes:
        """Return what is to be written, once, where `pieces` belong; in the order of their places."""
        self._nonce = self._nonce or secrets.token_hex(16).encode()
        self._parts.append(pieces)
        return self._mark(len(self._parts) - 1)

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
