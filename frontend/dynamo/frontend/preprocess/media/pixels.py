"""How large images are once they are decoded, as their headers say, so that none is decoded to find that it is too large.

A PNG of a few kilobytes may have 100,000 x 100,000 pixels. Formats that are not known here are left to the engine's own bound.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from dynamo.common.errors import HarmfulRequest

_MAX_STEPS = 65_536
"""Chunks, segments or blocks before the pixels of one image."""
_JPEG_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_JPEG_BARE = frozenset((0x01, *range(0xD0, 0xD8)))
"""Markers without a length."""
_JPEG_LAST = frozenset((0xD9, 0xDA))
_PNG_LAST = (b"IDAT", b"IEND")


class PixelBudget:
    """How many pixels the images of one request may still have together."""

    def __init__(self, pixels: int) -> None:
        self._most = pixels
        self._left = pixels

    def take(self, image: bytes) -> None:
        """Count an encoded image. Raises HarmfulRequest if the request has too many pixels with it."""
        width, height = size_of(image)
        self._left -= width * height
        if self._left < 0:
            raise HarmfulRequest(
                f"an image of {width} x {height} pixels makes the images of the request larger than {self._most} pixels",
                param="messages",
            )


def size_of(image: bytes) -> tuple[int, int]:
    """Return width and height, the largest if a header says several; (0, 0) for a format that is not known, or a cut header.

    Raises HarmfulRequest for one whose header has no end.
    """
    largest = (0, 0)
    try:
        for width, height in _sizes(image):
            if width * height > largest[0] * largest[1]:
                largest = width, height
    except (struct.error, IndexError):  # it ends in its header
        pass
    return largest


def _sizes(image: bytes) -> Iterator[tuple[int, int]]:
    if image.startswith(b"\x89PNG\r\n\x1a\n"):
        yield from _png(image)
    elif image.startswith(b"\xff\xd8"):
        yield from _jpeg(image)
    elif image.startswith((b"GIF87a", b"GIF89a")):
        yield from _gif(image)
    elif image.startswith(b"RIFF") and image[8:12] == b"WEBP":
        yield _webp(image)
    elif image.startswith(b"BM"):
        is_old = struct.unpack_from("<I", image, 14)[0] == 12
        width, height = struct.unpack_from("<HH" if is_old else "<ii", image, 18)
        yield abs(width), abs(height)


def _png(image: bytes) -> Iterator[tuple[int, int]]:
    position = 8
    for _ in range(_MAX_STEPS):
        length, kind = struct.unpack_from(">I4s", image, position)
        if kind in _PNG_LAST:
            return
        if kind == b"IHDR":
            yield struct.unpack_from(">II", image, position + 8)
        position += 12 + length
    raise _endless()


def _jpeg(image: bytes) -> Iterator[tuple[int, int]]:
    position = 2
    for _ in range(_MAX_STEPS):
        position = image.find(b"\xff", position)  # decoders pass over what is none
        if position < 0:
            return
        marker = image[position + 1]
        if marker in _JPEG_LAST:
            return
        if marker in (0x00, 0xFF):
            position += 1
        elif marker in _JPEG_BARE:
            position += 2
        else:
            if marker in _JPEG_FRAMES:
                height, width = struct.unpack_from(">HH", image, position + 5)
                yield width, height
            position += 2 + struct.unpack_from(">H", image, position + 2)[0]
    raise _endless()


def _gif(image: bytes) -> Iterator[tuple[int, int]]:
    """Yield the screen, and the screen with the first picture, which decoders make it as large as."""
    width, height, flags = struct.unpack_from("<HHB", image, 6)
    yield width, height
    position = 13 + (3 << (flags & 7) + 1 if flags & 0x80 else 0)
    is_block = False
    for _ in range(_MAX_STEPS):
        value = image[position]
        if is_block:
            position += 1 + value
            is_block = value != 0
        elif value == 0x2C:
            left, top, right, bottom = struct.unpack_from("<HHHH", image, position + 1)
            return (yield max(width, left + right), max(height, top + bottom))
        elif value == 0x3B:
            return
        else:
            is_block = value == 0x21
            position += 2 if is_block else 1
    raise _endless()


def _webp(image: bytes) -> tuple[int, int]:
    kind = image[12:16]
    if kind == b"VP8X":
        return 1 + int.from_bytes(image[24:27], "little"), 1 + int.from_bytes(image[27:30], "little")
    if kind == b"VP8L":
        bits = struct.unpack_from("<I", image, 21)[0]
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    if kind == b"VP8 ":
        width, height = struct.unpack_from("<HH", image, 26)
        return width & 0x3FFF, height & 0x3FFF
    return 0, 0


def _endless() -> HarmfulRequest:
    return HarmfulRequest(f"an image has more than {_MAX_STEPS} parts before its pixels", param="messages")
