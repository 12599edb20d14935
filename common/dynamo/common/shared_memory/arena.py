"""The owner's side of an arena: lends regions to readers and gets them back.

A region is lent to one reader, which is another process of this host. It becomes free when the reader has marked it as
released, or when the reader is dead. Nothing else ends a loan: not the end of the request, not silence. A reader that
never learned of a region cannot release it, however, so a region that no process has taken can be *revoked*: the owner clears its
generation, after which no reader can take it, waits until the reader's own counter shows that it cannot be in the middle of
taking it, and looks once more whether it was taken.

What is written before its reader is known, or by another process, goes into a region that is *reserved*: its owner *holds* it,
publishes it to one reader at most, and lets go of it. Held regions are not free, whatever the reader does.
"""

from __future__ import annotations

import errno
import mmap
import os
import re
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dynamo.common.process.work import Work
from dynamo.common.shared_memory.files import create_file, name_of, remove_file, tag_of
from dynamo.common.shared_memory.layout import (
    BEAT_OFFSET,
    UNIT_BYTES,
    Layout,
    Reference,
    aligned_begin,
    extent,
    released,
    table,
    taken,
    units_for,
)
from dynamo.common.shared_memory.units import Units

UNTAKEN_BEATS = 30
"""A region that its reader has not taken within so many of the reader's beats, which are seconds, is revoked."""
IDLE_SWEEPS = 10
"""Memory that no region used for so many sweeps is returned to the system."""
_QUIET_BEATS = 2
"""After so many beats of a reader, what it was doing at the first has ended."""
LEAST_PART_BYTES = 1024
"""Smaller pieces of a body are copied, wherever they lie."""
_LOOKED_AT = 2
"""So many of the longest lent regions are looked at with each new one, so that as many come back as are lent."""
_STEP_BYTES = 4 << 20
"""Copied at once into memory that is prepared for it: 4 ms."""
_CLOSED = -1
"""In place of a descriptor."""

_ABSENT, _IDLE, _RECENT, _USED = range(4)
"""States of a unit: without memory; free and not used since the last round; free; part of a region."""
_AGED = bytes((_ABSENT, _IDLE, _IDLE, _USED)) + bytes(range(4, 256))
_IDLE_RUNS = re.compile(bytes((_IDLE,)) + b"+")


class ArenaReader(Protocol):
    """The process that a region is lent to."""

    @property
    def tag(self) -> int:
        """What it is called in the arena: `files.tag_of`."""
        ...

    @property
    def is_alive(self) -> bool: ...

    @property
    def beat(self) -> int:
        """A counter that grows by one each time that its event loop has ended a turn, about once a second."""
        ...


class _NoReader:
    """In place of the reader of a region that was not lent."""

    tag = 0
    is_alive = True
    beat = 0


_NO_READER = _NoReader()


@dataclass(slots=True, eq=False)
class Region:
    """Units of an arena that are in use."""

    unit: int
    units: int
    generation: int = 0
    """0: it was not lent."""
    reader: ArenaReader = _NO_READER
    since: int = 0
    """The reader's beat when the region was lent or, if it is revoked, at that moment."""
    is_held: bool = False
    """Its owner still uses it."""
    parts: list[tuple[int, int]] = field(default_factory=list)
    """Offsets and sizes of what lies in it, in order, before it is lent: `lend_in_place`."""
    is_revoked: bool = False
    is_free: bool = False

    @property
    def size(self) -> int:
        return self.units * UNIT_BYTES


class Arena:
    """The regions that this process lends. All calls belong to one thread. Close it to remove its file."""

    def __init__(self, directory: Path, capacity_bytes: int) -> None:
        """Create the file. Raises OSError."""
        self.layout = Layout(units_for(capacity_bytes))
        self._directory = directory
        self._lock, self.token = create_file(directory, self.layout.units)
        """The only descriptor that holds the lock: `mmap` keeps copies of what it is given. `token` is public."""
        try:
            self._map = _mapped(self._lock, self.layout)
        except BaseException:
            remove_file(directory, self.token)
            os.close(self._lock)
            raise
        os.register_at_fork(after_in_child=partial(_leave_to_parent, weakref.ref(self)))
        self._generations = table(self._map, self.layout.generations_offset, self.layout.units)
        self._extents = table(self._map, self.layout.extents_offset, self.layout.units)
        self._tags = table(self._map, self.layout.tags_offset, self.layout.units)
        self._marks = table(self._map, self.layout.marks_offset, self.layout.units)
        self._beat = table(self._map, BEAT_OFFSET, 1)
        self._data = memoryview(self._map)[self.layout.data_offset :]
        self._data_offset = self.layout.data_offset
        self._address = np.frombuffer(self._data, np.uint8).__array_interface__["data"][0]
        self._units = Units(self.layout.units)
        self._states = bytearray(self.layout.units)
        self._regions: dict[int, Region] = {}
        """Regions that are lent, by generation."""
        self._queue: deque[Region] = deque()
        """Regions that are lent, and some that are free by now, in the order in which they are looked at."""
        self._in_place: dict[int, Region] = {}
        """Regions that were not lent and that `lend_in_place` may lend, by unit."""
        self._views: dict[Region, weakref.ref[NDArray[np.uint8]]] = {}
        """Regions that are held as long as views of them exist."""
        self._unviewed: deque[Region] = deque()
        """Regions whose views are gone, and that are not let go of yet. Any thread adds to them."""
        self._last_generation = 0
        self._sweeps = 0

    def __repr__(self) -> str:
        return f"<Arena {name_of(self.token)}, {self.used_bytes} of {self.capacity_bytes} bytes in {len(self)} regions>"

    def __len__(self) -> int:
        """The number of regions that are lent."""
        return len(self._regions)

    @property
    def tag(self) -> int:
        """What this process is called in the arenas of others."""
        return tag_of(self.token)

    @property
    def capacity_bytes(self) -> int:
        return self.layout.units * UNIT_BYTES

    @property
    def used_bytes(self) -> int:
        """Bytes of the units that regions occupy."""
        return (self.layout.units - self._units.free) * UNIT_BYTES

    @property
    def resident_bytes(self) -> int:
        """Bytes of the units that occupy memory, whether or not a region uses them."""
        return (self.layout.units - self._states.count(_ABSENT)) * UNIT_BYTES

    def lend(self, pieces: Sequence[bytes | bytearray | memoryview], size: int, reader: ArenaReader) -> Reference | None:
        """Copy `pieces`, `size` bytes together and not empty, into a region for `reader`. None if there is no room."""
        begin = aligned_begin(size)
        region = self._allocate(begin + size)
        if region is None:
            return None
        position = region.unit * UNIT_BYTES + begin
        for piece in pieces:
            octets = piece.cast("B") if isinstance(piece, memoryview) else piece
            end = position + len(octets)
            self._data[position:end] = octets
            position = end
        return self._lend(region, begin, size, reader)

    def lend_in_steps(
        self, pieces: Sequence[bytes | bytearray | memoryview], size: int, reader: ArenaReader
    ) -> Work[Reference | None]:
        """Do what `lend` does in steps of some milliseconds; closed before its end, it lends nothing.

        Memory is prepared with each step: that takes longer than the copy.
        """
        begin = aligned_begin(size)
        count = units_for(begin + size)
        self._look_at_oldest()
        unit = self._units.allocate(count)
        if unit is None:
            return None
        prepared = copied = 0
        position = unit * UNIT_BYTES + begin
        try:
            for piece in pieces:
                octets = memoryview(piece).cast("B")
                for start in range(0, len(octets), _STEP_BYTES):
                    part = octets[start : start + _STEP_BYTES]
                    needed = units_for(position + len(part) - unit * UNIT_BYTES)
                    if needed > prepared and not self._populate(unit + prepared, needed - prepared):
                        return None
                    prepared = max(prepared, needed)
                    self._data[position : position + len(part)] = part
                    position += len(part)
                    copied += len(part)
                    if copied >= _STEP_BYTES:
                        copied = 0
                        yield 0
            region, unit = Region(unit, count), -1
            return self._lend(region, begin, size, reader)
        finally:
            if unit >= 0:
                self._states[unit : unit + prepared] = bytes((_RECENT,)) * prepared
                self._units.release(unit)

    def reserve(self, size: int) -> Region | None:
        """Return a region of at least `size` bytes, at least one, that the caller holds. None if there is no room."""
        region = self._allocate(size)
        if region is not None:
            region.is_held = True
        return region

    def data(self, region: Region) -> memoryview:
        """Return the memory of a region that is held."""
        begin = region.unit * UNIT_BYTES
        return self._data[begin : begin + region.size]

    def publish(self, region: Region, begin: int, size: int, reader: ArenaReader) -> Reference:
        """Lend `size` bytes, at least one, of a region that is held, from `begin` on, which lies in its first unit.

        Units after them become free. These bytes may not be written to any more. Raises ValueError if the region was lent before.
        """
        if region.generation or not region.is_held or not 0 <= begin < UNIT_BYTES or begin + size > region.size:
            raise ValueError(f"{size} bytes at {begin} of {region} cannot be lent")
        if (needed := units_for(begin + size)) < region.units:
            self._units.shorten(region.unit, needed)
            self._states[region.unit + needed : region.unit + region.units] = bytes((_RECENT,)) * (region.units - needed)
            region.units = needed
        return self._lend(region, begin, size, reader)

    def let_go(self, region: Region) -> None:
        """The caller of `reserve` uses the region no more: it is free now or, if it was lent, as soon as its reader lets go."""
        region.is_held = False
        if not region.generation:
            self._free(region)
        else:
            self._free_if_released(region)

    def view(self, region: Region) -> memoryview:
        """Return a read-only view of a region that is held and has `parts`.

        The region is let go of when the last view of any part is gone, in whichever thread. Until then, and until it is lent,
        `lend_in_place` knows it.
        """
        array = np.frombuffer(self._map, np.uint8, region.size, self._data_offset + region.unit * UNIT_BYTES)
        array.flags.writeable = False
        self._views[region] = weakref.ref(array, partial(_append, self._unviewed, region))
        self._in_place[region.unit] = region
        return array.data

    def lend_in_place(self, pieces: Sequence[bytes | bytearray | memoryview], size: int, reader: ArenaReader) -> Reference | None:
        """Lend a body whose large pieces are all parts of a region, at the right distances: only the others are copied.

        They go around the parts, which never change. None for all other bodies. Pieces consist of bytes.
        """
        if not self._in_place:
            return None
        others: list[tuple[int, bytes | bytearray | memoryview]] = []
        """The pieces to be copied, with their positions in the body."""
        region: Region | None = None
        begin = position = parts = 0
        for piece in pieces:
            offset = self._offset_of(piece) if len(piece) >= LEAST_PART_BYTES else None
            if offset is None:
                others.append((position, piece))
            else:
                if region is None:
                    region = self._in_place.get(offset // UNIT_BYTES)
                    begin = offset - position
                    if region is None:
                        return None
                part = offset - region.unit * UNIT_BYTES, len(piece)
                if offset - position != begin or region.parts[parts : parts + 1] != [part]:
                    return None
                parts += 1
            position += len(piece)
        if region is None or parts != len(region.parts):
            return None
        start = region.unit * UNIT_BYTES
        if not start <= begin <= begin + size <= start + region.size:
            return None
        for position, piece in others:
            self._data[begin + position : begin + position + len(piece)] = piece
        return self.publish(region, begin - start, size, reader)

    def _offset_of(self, piece: bytes | bytearray | memoryview) -> int | None:
        """Return where in the units a piece lies; None if somewhere else."""
        if not isinstance(piece, memoryview):
            return None
        offset: int = np.frombuffer(piece, np.uint8).__array_interface__["data"][0] - self._address
        return offset if 0 <= offset < self.capacity_bytes else None

    def _allocate(self, size: int) -> Region | None:
        self._look_at_oldest()
        count = units_for(size)
        unit = self._units.allocate(count)
        if unit is None:
            return None
        if not self._populate(unit, count):
            self._units.release(unit)
            return None
        return Region(unit, count)

    def _lend(self, region: Region, begin: int, size: int, reader: ArenaReader) -> Reference:
        unit = region.unit
        self._in_place.pop(unit, None)
        self._last_generation += 1
        region.generation, region.reader, region.since = self._last_generation, reader, reader.beat
        self._extents[unit] = extent(begin, size)
        self._tags[unit] = reader.tag
        self._generations[unit] = region.generation
        self._regions[region.generation] = region
        self._queue.append(region)
        return Reference(unit, size, region.generation)

    def _populate(self, unit: int, count: int) -> bool:
        """Have memory under the units; return False if the system has none: touching them would be a bus error."""
        end = unit + count
        if self._states.find(_ABSENT, unit, end) >= 0:
            try:
                os.posix_fallocate(self._lock, self.layout.data_offset + unit * UNIT_BYTES, count * UNIT_BYTES)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT):
                    raise
                return False
        self._states[unit:end] = bytes((_USED,)) * count
        return True

    def settle(self, generation: int) -> None:
        """The request is over for which a region was lent: it is free as soon as its reader lets go. Never waits."""
        region = self._regions.get(generation)
        if region is not None and not self._free_if_released(region) and self._marks[region.unit] != taken(generation):
            self._revoke(region)

    def is_lent(self, generation: int) -> bool:
        """Return whether a region has not come back yet."""
        region = self._regions.get(generation)
        return region is not None and not self._free_if_released(region)

    def _let_go_of_unviewed(self) -> None:
        while self._unviewed:
            region = self._unviewed.popleft()
            del self._views[region]
            self._in_place.pop(region.unit, None)
            self.let_go(region)

    def _look_at_oldest(self) -> None:
        if self._unviewed:
            self._let_go_of_unviewed()
        queue = self._queue
        for _ in range(min(_LOOKED_AT, len(queue))):
            region = queue.popleft()
            if not region.is_free and not self._free_if_released(region):
                queue.append(region)

    def _free_if_released(self, region: Region) -> bool:
        if region.is_held or self._marks[region.unit] != released(region.generation):
            return False
        self._free(region)
        return True

    def _revoke(self, region: Region) -> None:
        if not region.is_revoked:
            region.is_revoked = True
            region.since = region.reader.beat
            self._generations[region.unit] = 0

    def _free(self, region: Region) -> None:
        region.is_free = True
        self._regions.pop(region.generation, None)
        self._generations[region.unit] = 0
        self._states[region.unit : region.unit + region.units] = bytes((_RECENT,)) * region.units
        self._units.release(region.unit)

    def sweep(self) -> None:
        """Count a beat, free what can be freed, return idle memory. Call it about once a second, from the event loop."""
        self._beat[0] += 1
        self._let_go_of_unviewed()
        for region in list(self._regions.values()):
            self._check(region)
        self._queue = deque(self._regions.values())
        self._sweeps += 1
        if self._sweeps % IDLE_SWEEPS == 0:
            self._return_idle_memory()

    def _check(self, region: Region) -> None:
        if region.is_held or self._free_if_released(region):
            return
        if not region.reader.is_alive:
            return self._free(region)
        if self._marks[region.unit] == taken(region.generation):
            return
        waited = region.reader.beat - region.since
        if region.is_revoked:
            if waited >= _QUIET_BEATS:
                self._free(region)
        elif waited >= UNTAKEN_BEATS:
            self._revoke(region)

    def _return_idle_memory(self) -> None:
        for run in _IDLE_RUNS.finditer(bytes(self._states)):
            begin, end = run.span()
            offset = self.layout.data_offset + begin * UNIT_BYTES
            self._map.madvise(mmap.MADV_REMOVE, offset, (end - begin) * UNIT_BYTES)
            self._states[begin:end] = bytes(end - begin)
        self._states = self._states.translate(_AGED)

    def abandon(self) -> None:
        """Let the lock end, and leave the file, as when the process dies. Nothing may be lent any more."""
        lock, self._lock = self._lock, _CLOSED
        if lock != _CLOSED:
            os.close(lock)

    def close(self) -> None:
        """Remove the file, and let other processes know that its owner is gone. Readers keep what they have mapped."""
        if self._lock == _CLOSED:
            return  # or it belongs to the process that forked this one
        remove_file(self._directory, self.token)
        for view in (self._data, self._beat, self._marks, self._tags, self._extents, self._generations):
            view.release()
        self.abandon()


def _mapped(lock: int, layout: Layout) -> mmap.mmap:
    """Map the file of a descriptor. Raises OSError, also where memory of it could not be returned."""
    descriptor = os.open(f"/proc/self/fd/{lock}", os.O_RDWR | os.O_CLOEXEC)
    try:
        mapped = mmap.mmap(descriptor, layout.file_bytes)
    finally:
        os.close(descriptor)
    mapped.madvise(mmap.MADV_REMOVE, layout.data_offset, UNIT_BYTES)
    return mapped


def _append(regions: deque[Region], region: Region, _: object) -> None:
    regions.append(region)


def _leave_to_parent(reference: weakref.ref[Arena]) -> None:
    """In a process that was forked: let the lock end with the parent, however long the child lives."""
    arena = reference()
    if arena is not None:
        arena.abandon()
