"""Long texts, joined, and as they stand in JSON: in steps, so that other requests have their turns meanwhile.

A thread would not help: the encoder keeps the interpreter to itself. Nor would joining pieces at the end, which takes as long; a
`BytesIO` needs no copy.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from io import BytesIO

import msgspec

_STEP_BYTES = 256 * 1024
_LONGEST_ESCAPE_BYTES = 6
_decode = msgspec.json.Decoder(str).decode


async def joined(texts: Iterable[bytes]) -> bytes:
    """Return all texts as one."""
    whole = BytesIO()
    for text in texts:
        view = memoryview(text)
        for begin in range(0, len(view), _STEP_BYTES):
            whole.write(view[begin : begin + _STEP_BYTES])
            if whole.tell() > _STEP_BYTES:
                await asyncio.sleep(0)
    return whole.getvalue()


async def write_escaped(text: bytes, json: BytesIO) -> None:
    """Write what stands between the quotes for a text in UTF-8."""
    begin = 0
    while begin < len(text):
        end = _character(text, begin + _STEP_BYTES)
        json.write(msgspec.json.encode(text[begin:end].decode())[1:-1])
        begin = end
        await asyncio.sleep(0)


async def unescaped(json: bytes, begin: int, end: int) -> bytes:
    """Return the text, in UTF-8, that stands between the quotes of a string; `begin` and `end` are where that is."""
    text = BytesIO()
    while begin < end:
        stop = min(end, _whole(json, begin, begin + _STEP_BYTES))
        text.write(_decode(b'"%b"' % json[begin:stop]).encode())
        begin = stop
        await asyncio.sleep(0)
    return text.getvalue()


async def position(json: bytes, part: bytes, end: int) -> int:
    """Return the last position of a part before `end`, or -1."""
    while end > 0:
        begin = max(0, end - _STEP_BYTES)
        if (found := json.rfind(part, begin, end)) >= 0 or not begin:
            return found
        end = begin + len(part) - 1
        await asyncio.sleep(0)
    return -1


def _character(text: bytes, position: int) -> int:
    """Return the beginning of the character that has its bytes at a position."""
    while position < len(text) and text[position] & 0xC0 == 0x80:
        position -= 1
    return position


def _whole(json: bytes, begin: int, position: int) -> int:
    """Return a position nearby at which neither a character nor an escape is cut; at `begin` none is."""
    position = _character(json, position)
    last = json.rfind(b"\\", max(begin, position - _LONGEST_ESCAPE_BYTES), position)
    if last < 0:
        return position
    run = json[begin : last + 1]
    if (len(run) - len(run.rstrip(b"\\"))) % 2 == 0:  # each other one is what is escaped
        return position
    return max(position, last + (_LONGEST_ESCAPE_BYTES if json[last + 1 : last + 2] == b"u" else 2))
