"""Images that are larger than they look."""

from __future__ import annotations

import struct
import zlib


def png_chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def huge_png(width: int = 100_000, height: int = 100_000, before: bytes = b"") -> bytes:
    """Return the beginning of a PNG of few bytes and many pixels. `before`: chunks in front of its header."""
    header = png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + before + header + png_chunk(b"IDAT", zlib.compress(bytes(64 * 1024)))
