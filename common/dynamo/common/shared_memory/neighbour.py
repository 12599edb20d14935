"""The reader's side of another process's arena: views of regions, where they lie."""

from __future__ import annotations

import mmap
import os
import weakref
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dynamo.common.shared_memory.files import ArenaRefused, is_owned, name_of, open_file, remove_file, tag_of
from dynamo.common.shared_memory.layout import BEAT_OFFSET, UNIT_BYTES, Reference, begin_of, released, size_of, table, taken


class BadReference(Exception):
    """A reference does not mean a region that may be read. `str()` says why."""


class Neighbour:
    """The arena of another process of this host. Use `take` from one thread; views may be dropped in any."""

    def __init__(self, directory: Path, token: str, reader_tag: int) -> None:
        """Open it, as the process with this tag. Raises ArenaRefused."""
        self.token = token
        self._reader_tag = reader_tag
        self._directory = directory
        self._descriptor, self._layout = open_file(directory, token)
        self.tag = tag_of(token)
        layout = self._layout
        try:
            self._map = mmap.mmap(self._descriptor, layout.file_bytes, prot=mmap.PROT_READ)
            marks = mmap.mmap(self._descriptor, layout.table_bytes, offset=layout.marks_offset)
        except (OSError, ValueError) as error:  # ValueError: it has become shorter
            os.close(self._descriptor)
            raise ArenaRefused(f"{name_of(token)} cannot be mapped: {error}") from None
        self._data_offset, self._file_bytes = layout.data_offset, layout.file_bytes
        self._address = np.frombuffer(self._map, np.uint8).ctypes.data
        self._generations = table(self._map, layout.generations_offset, layout.units)
        self._extents = table(self._map, layout.extents_offset, layout.units)
        self._tags = table(self._map, layout.tags_offset, layout.units)
        self._beat = table(self._map, BEAT_OFFSET, 1)
        self._marks = table(marks, 0, layout.units)
        self._held: dict[int, weakref.ref[NDArray[np.uint8]]] = {}
        """The regions that are being read, by generation."""
        self._process = os.getpid()
        self._is_alive = True
        self.is_open = True
        self._last_beat = 0
        """The beat when it was closed."""

    def __repr__(self) -> str:
        return f"<Neighbour {name_of(self.token)}, {len(self._held)} regions held>"

    def __len__(self) -> int:
        """The number of its regions that are being read."""
        return len(self._held)

    @property
    def is_alive(self) -> bool:
        """Whether its process is alive and has not closed it. Once False, always False."""
        self._is_alive = self._is_alive and is_owned(self._descriptor)
        return self._is_alive

    @property
    def beat(self) -> int:
        """How many sweeps its process has done."""
        return self._beat[0] if self.is_open else self._last_beat

    def locate(self, address: int, size: int) -> int | None:
        """Return where in the file `size` bytes at `address` lie. None if they are not of this arena."""
        offset = address - self._address
        return offset if offset >= 0 and offset + size <= self._file_bytes else None

    def take(self, reference: Reference) -> memoryview:
        """Return a read-only view of a region. It goes back to its owner when the last view of it, or of a part, is gone.

        Raises BadReference.
        """
        if not self.is_open:
            raise BadReference(f"{name_of(self.token)} is closed")
        unit, size, generation = reference
        if not (0 < generation < 2**62 and size > 0 and 0 <= unit < self._layout.units):
            raise BadReference(f"{reference} is outside of {name_of(self.token)}")
        extent = self._extents[unit]
        if (self._generations[unit], size_of(extent), self._tags[unit]) != (generation, size, self._reader_tag):
            raise BadReference(f"{reference} is not lent to this process by {name_of(self.token)}")
        position = self._data_offset + unit * UNIT_BYTES + begin_of(extent)
        if position + size > self._file_bytes:
            raise BadReference(f"{reference} is outside of {name_of(self.token)}")
        if self._marks[unit] >> 1 == generation:
            raise BadReference(f"{reference} was taken from {name_of(self.token)} before")
        self._marks[unit] = taken(generation)
        if self._generations[unit] != generation:  # it was revoked before the mark could be seen
            self._marks[unit] = released(generation)
            raise BadReference(f"{reference} is not lent by {name_of(self.token)} any more")
        region = np.frombuffer(self._map, np.uint8, size, position)
        self._held[generation] = weakref.ref(region, partial(self._release, unit, generation))
        return region.data

    def _release(self, unit: int, generation: int, _: object) -> None:
        """Called in whichever thread drops the last view, and in a child of this process that drops its copy of one."""
        if os.getpid() != self._process:  # the marks are shared: releasing here would free what the parent still reads
            return
        self._marks[unit] = released(generation)
        del self._held[generation]
        self._unmap_if_unread()

    def close(self) -> None:
        """Close the file. Views stay valid. The memory is unmapped with the last view, even if this object lives on."""
        self._last_beat = self.beat
        self._is_alive = self.is_open = False
        os.close(self._descriptor)
        self._unmap_if_unread()

    def _unmap_if_unread(self) -> None:
        if self.is_open or self._held:
            return
        for view in (self._generations, self._extents, self._tags, self._beat, self._marks):
            view.release()
        del self._map

    def remove(self) -> None:
        """Remove the file that its dead process has left."""
        remove_file(self._directory, self.token)
