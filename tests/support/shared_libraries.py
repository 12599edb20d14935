"""Which shared libraries a program needs, as its file says."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

_LOAD, _DYNAMIC = 1, 2
_NEEDED, _STRINGS = 1, 5


def needed_libraries(path: Path) -> set[str]:
    """Names of the libraries that the loader looks for, from a 64-bit little-endian ELF file."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as elf:
        assert elf[:6] == b"\x7fELF\x02\x01", f"{path} is no 64-bit little-endian ELF file"
        (headers_offset,) = struct.unpack_from("<Q", elf, 32)
        header_size, header_count = struct.unpack_from("<HH", elf, 54)
        # Of each segment: kind, flags, where it lies in the file, where in memory, where physically, its size in the file.
        segments = [struct.unpack_from("<IIQQQQ", elf, headers_offset + index * header_size) for index in range(header_count)]
        entries = [
            entry
            for kind, _, offset, _, _, size in segments
            if kind == _DYNAMIC
            for entry in struct.iter_unpack("<qQ", elf[offset : offset + size])
        ]
        [strings] = [value for tag, value in entries if tag == _STRINGS]
        [strings_offset] = [
            strings - memory + offset
            for kind, _, offset, memory, _, size in segments
            if kind == _LOAD and memory <= strings < memory + size
        ]
        starts = [strings_offset + value for tag, value in entries if tag == _NEEDED]
        return {elf[start : elf.find(b"\0", start)].decode() for start in starts}
