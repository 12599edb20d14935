"""What an arena's file looks like, and what a reference to a region in it is.

| from | written by | holds |
|---|---|---|
| 0 | its owner, once | the header: format, boot id of the kernel, nonce, number of units |
| `BEAT_OFFSET` | its owner | a counter that grows with each turn of its sweep |
| page 1 | its owner | per unit: the generation of the region that begins there, 0 if none may be taken |
| next page | its owner | per unit: where in that region the body begins, and its bytes, see `extent` |
| next page | its owner | per unit: the tag of the process that it is lent to, see `files.tag_of` |
| next page | readers | per unit: the generation that was taken or released last (`taken`, `released`) |
| next unit | its owner | the units |
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from typing import NamedTuple

UNIT_BYTES = 32 * 1024
PAGE_BYTES = 4096
BEAT_OFFSET = 128
_FORMAT = b"dynamo-arena-3"
_HEADER = struct.Struct("<16s36s16sQ")
_WORD_BYTES = 8
_SIZE_BITS = 48
_ALIGNMENT = 64
MAX_UNITS = 2**26
"""2 TiB: a bound on what a header may claim."""


class Reference(NamedTuple):
    """A region that its owner lends."""

    unit: int
    """Where it begins."""
    size: int
    """Its bytes."""
    generation: int
    """Which of the regions that begin there one after another; never 0."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Offsets in the file of an arena with so many units."""

    units: int

    @property
    def generations_offset(self) -> int:
        return PAGE_BYTES

    @property
    def table_bytes(self) -> int:
        """Bytes of each of the four tables, in whole pages."""
        return _up(self.units * _WORD_BYTES, PAGE_BYTES)

    @property
    def extents_offset(self) -> int:
        return self.generations_offset + self.table_bytes

    @property
    def tags_offset(self) -> int:
        return self.extents_offset + self.table_bytes

    @property
    def marks_offset(self) -> int:
        return self.tags_offset + self.table_bytes

    @property
    def data_offset(self) -> int:
        return _up(self.marks_offset + self.table_bytes, UNIT_BYTES)

    @property
    def file_bytes(self) -> int:
        return self.data_offset + self.units * UNIT_BYTES


def table(mapped: mmap.mmap, offset: int, words: int) -> memoryview:
    """Return `words` numbers of 8 bytes each at `offset` of a mapped file."""
    start = offset // _WORD_BYTES
    return memoryview(mapped).cast("Q")[start : start + words]


def aligned_begin(size: int) -> int:
    """Return where in a region a body of `size` bytes begins best.

    It ends at a multiple of 64 bytes, since a request or response commonly ends with a tensor, which is aligned then.
    """
    return -size % _ALIGNMENT


def extent(begin: int, size: int) -> int:
    """The extent of a body of `size` bytes that begins at an offset in the first unit of its region."""
    return begin << _SIZE_BITS | size


def begin_of(extent: int) -> int:
    return extent >> _SIZE_BITS


def size_of(extent: int) -> int:
    return extent & (1 << _SIZE_BITS) - 1


def taken(generation: int) -> int:
    """The mark of a region whose reader has views of it."""
    return generation << 1


def released(generation: int) -> int:
    """The mark of a region whose reader has no view of it any more."""
    return generation << 1 | 1


def units_for(size: int) -> int:
    """The units that so many bytes, at least one, take."""
    return -(-size // UNIT_BYTES)


def encode_header(boot_id: str, nonce: bytes, units: int) -> bytes:
    return _HEADER.pack(_FORMAT, boot_id.encode(), nonce, units)


def decode_header(header: bytes) -> tuple[str, bytes, int]:
    """Return boot id, nonce and number of units. Raises ValueError for what is no header of this format."""
    if len(header) < _HEADER.size:
        raise ValueError("it is too short for an arena")
    form, boot_id, nonce, units = _HEADER.unpack_from(header)
    if form.rstrip(b"\0") != _FORMAT:
        raise ValueError("it is not an arena of this format")
    if not 0 < units <= MAX_UNITS:
        raise ValueError(f"it claims to have {units} units")
    return boot_id.rstrip(b"\0").decode("ascii", "replace"), nonce, units


def _up(size: int, step: int) -> int:
    return -(-size // step) * step
