"""Long strings of JSON, read and written piece by piece."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator

import msgspec
import orjson

from dynamo.common.tensors.tensors import Buffer
from dynamo.frontend.api.kserve.rest.long_arrays import PIECE_BYTES

_CHARACTERS = re.compile(
    rb'(?:[^"\\]++'
    rb"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"  # a pair that is one character
    rb"|\\u(?![dD][89abAB])[0-9a-fA-F]{4}"
    rb"|\\[^u])*+"
)
"""Whole characters within a string, as far as there are any."""
_CONTINUED, _FIRST_BITS = 0x80, 0xC0
"""An octet that goes on with a character has these first bits."""
_text = msgspec.json.Decoder(str)


def unescaped(string: memoryview) -> Iterator[bytes]:
    """Yield what a string with its quotes says, as UTF-8. Raises ValueError if it is none."""
    text = string[1:-1]
    if len(string) < 2 or string[0] != string[-1] or string[0] != ord('"'):
        raise ValueError("a string was expected")
    begin = 0
    while begin < len(text):
        match = _CHARACTERS.match(text, begin, begin + PIECE_BYTES)
        end = match.end() if match is not None else begin
        if end == begin + PIECE_BYTES:
            while end < len(text) and end > begin and text[end] & _FIRST_BITS == _CONTINUED:
                end -= 1
        if end == begin:
            raise ValueError("a string has an invalid escape")
        yield _text.decode(b'"%b"' % bytes(text[begin:end])).encode()
        begin = end


def escaped(element: Buffer) -> Iterator[bytes]:
    """Yield a string of JSON, with its quotes, for text in UTF-8. Raises UnicodeDecodeError if it is none."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    view = memoryview(element)
    yield b'"'
    for begin in range(0, len(view), PIECE_BYTES):
        yield orjson.dumps(decoder.decode(view[begin : begin + PIECE_BYTES]))[1:-1]
    decoder.decode(b"", final=True)
    yield b'"'
