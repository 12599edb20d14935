"""Shared memory as a model's process sees it: inputs in place, in the arenas of others, and outputs.

Outputs go where the worker has given room for them, in its own arena, and otherwise into an arena of this process.

Inputs are mapped privately: a model may write to its arrays, and no other process sees that. When the last array of a part of a
request is gone, what was written is dropped, and the worker may release the memory.
"""

from __future__ import annotations

import mmap
import os
import resource
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path

import numpy as np

from dynamo.common.shared_memory.arena import Arena
from dynamo.common.shared_memory.files import ArenaRefused, is_owned, open_file, remove_file, tag_of
from dynamo.worker.repository.wire import wire
from dynamo.worker.repository.wire.wire import Array

_PAGE = mmap.PAGESIZE
_HIGHEST = 7 if sys.byteorder == "little" else 0
# An entry of /proc/self/pagemap, per page: Documentation/admin-guide/mm/pagemap.rst of Linux.
_ENTRY_BYTES = 8
_UNCHANGED = bytes(top for top in range(256) if not top & 0b1100_0000 or top & 0b0010_0000)
"""Highest bytes of entries of pages that are neither present nor swapped out, or that are those of the file."""


class _Inputs:
    """The arena of another process, mapped copy-on-write."""

    def __init__(self, directory: Path, token: str) -> None:
        """Raises ArenaRefused."""
        self.descriptor, layout = open_file(directory, token)
        self.bytes = layout.file_bytes
        self.map = mmap.mmap(self.descriptor, layout.file_bytes, access=mmap.ACCESS_COPY)
        self._address = np.frombuffer(self.map, np.uint8).ctypes.data
        self._pagemap = _open_pagemap()
        self.held: dict[int, tuple[int, weakref.ref[Array]]] = {}
        """The ranges of which the model has arrays: their ends, by their beginnings."""

    def may_be_changed(self, begin: int, end: int) -> bool:
        """Return whether this process may have private copies of these pages, because the model has written to them."""
        if self._pagemap is None:
            return True
        first, count = (self._address + begin) // _PAGE, (end - begin) // _PAGE
        entries = os.pread(self._pagemap, count * _ENTRY_BYTES, first * _ENTRY_BYTES)
        return bool(entries[_HIGHEST::_ENTRY_BYTES].translate(None, _UNCHANGED))

    def close(self) -> None:
        """Close the file. Arrays stay valid."""
        os.close(self.descriptor)
        if self._pagemap is not None:
            os.close(self._pagemap)

    def overlaps(self, begin: int, end: int) -> bool:
        return any(other < end and begin < other_end for other, (other_end, _) in list(self.held.items()))


@dataclass(slots=True)
class _Part:
    """Tensors of a request in the same pages."""

    arena: str
    begin: int
    """Where the first of these pages begins."""
    end: int
    """Where the last one ends."""
    tensors: list[tuple[wire.TensorHead, int]]
    """Each with its position in the file."""


@dataclass(slots=True)
class _OutputCursor:
    position: int
    """Where the next output goes, after its gap."""
    end: int
    is_used: bool = False


class _WorkerReader:
    """The reader of all outputs. It takes each output, and lives as long as this process."""

    is_alive = True
    beat = 0

    def __init__(self, tag: int) -> None:
        self.tag = tag


class StubMemory:
    """Inputs and outputs of one process in shared memory. The main thread takes inputs, any thread lends outputs."""

    def __init__(self, settings: wire.Memory, on_release: Callable[[int], None]) -> None:
        """`on_release` is called with the number of an execution when no array of its inputs is left, in whichever thread."""
        self._settings = settings
        self._reader = _WorkerReader(tag_of(settings.reader))
        self._directory = Path(settings.directory)
        self._on_release = on_release
        self._inputs: dict[str, _Inputs] = {}
        self._parts: dict[int, int] = {}
        """How many parts of its inputs each execution has, while arrays of them exist."""
        self._counting = threading.RLock()
        self._outputs: Arena | None = None
        self._lending = threading.Lock()
        self._can_lend = False
        self._room: memoryview | None = None
        """The arena of the worker."""
        self._rooms: dict[int, _OutputCursor] = {}
        """Where the outputs of a response go, by the number of the request."""

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing that `sweep` could do later."""
        return not self._inputs and (self._outputs is None or not self._outputs.resident_bytes)

    # Inputs

    def open(self, token: str) -> bool:
        """Map an arena. Return whether its tensors can be read."""
        if token not in self._inputs:
            try:
                self._inputs[token] = _Inputs(self._directory, token)
            except (ArenaRefused, OSError):
                return False
        return True

    def take(self, execution: int, requests: Sequence[wire.InferenceHead]) -> dict[tuple[int, str], memoryview]:
        """Return the bytes of the inputs that lie in shared memory, by the number of their request and their name.

        Raises KeyError for an arena that is gone.
        """
        views: dict[tuple[int, str], memoryview] = {}
        faults = _page_faults()
        parts = [(request.number, part) for request in requests for part in _parts_of(request.inputs)]
        with self._counting:
            self._parts[execution] = len(parts)
        unheld = len(parts)
        try:
            for request, part in parts:
                if self._take_part(execution, request, part, faults, views):
                    unheld -= 1
        finally:
            if unheld:
                self._drop_parts(execution, unheld)
        return views

    def _take_part(
        self, execution: int, request: int, part: _Part, faults: int, views: dict[tuple[int, str], memoryview]
    ) -> bool:
        """Add views of the tensors of a part, or copies; return whether they are views."""
        inputs = self._inputs[part.arena]
        begin, end = part.begin, part.end
        if begin < 0 or end > inputs.bytes:
            raise KeyError(part.arena)
        if inputs.overlaps(begin, end):  # with other arrays of the model: what it does to those must not show in these
            for tensor, position in part.tensors:
                copy = bytearray(tensor.size)
                os.preadv(inputs.descriptor, [copy], position)
                views[request, tensor.name] = memoryview(copy)
            return False
        region = np.frombuffer(inputs.map, np.uint8, end - begin, begin)
        inputs.held[begin] = end, weakref.ref(region, partial(self._release, inputs, begin, end, faults, execution))
        whole = region.data
        for tensor, position in part.tensors:
            views[request, tensor.name] = whole[position - begin : position - begin + tensor.size]
        return True

    def _release(self, inputs: _Inputs, begin: int, end: int, faults: int, execution: int, _: object) -> None:
        """Called in whichever thread drops the last array. `faults`: of this process, before the array was made."""
        if _page_faults() != faults and inputs.may_be_changed(begin, end):  # a private copy begins with a fault
            inputs.map.madvise(mmap.MADV_DONTNEED, begin, end - begin)
        del inputs.held[begin]
        self._drop_parts(execution, 1)

    def _drop_parts(self, execution: int, count: int) -> None:
        with self._counting:
            self._parts[execution] -= count
            is_last = not self._parts[execution]
            if is_last:
                del self._parts[execution]
        if is_last:
            self._on_release(execution)

    # Outputs

    def output_arena(self) -> str:
        """Create the arena of this process if there is none, and return its token; empty if that is not possible."""
        try:
            with self._lending:
                if self._outputs is None:
                    self._outputs = Arena(self._directory, self._settings.capacity_bytes)
                return self._outputs.token
        except OSError:
            return ""

    def outputs_are_read(self) -> None:
        """The worker has opened the arena of this process."""
        self._can_lend = True

    def open_room(self) -> bool:
        """Map the arena of the worker. Return whether outputs can be written there."""
        try:
            descriptor, layout = open_file(self._directory, self._settings.reader)
        except ArenaRefused:
            return False
        try:
            self._room = memoryview(mmap.mmap(descriptor, layout.file_bytes))
        except OSError:
            return False
        finally:
            os.close(descriptor)
        return True

    def offer_room(self, request: int, room: wire.OutputMemory) -> None:
        self._rooms[request] = _OutputCursor(room.position + wire.HEAD_BYTES, room.position + room.size)

    def forget_room(self, request: int) -> None:
        self._rooms.pop(request, None)

    def _put(self, room: _OutputCursor, raw: wire.Buffer) -> int | None:
        """Write an output into the room for it, and return where; None if it does not fit."""
        size = len(raw)
        begin = room.position + (wire.gap(size) if room.is_used else 0)
        if self._room is None or begin + size > room.end:
            return None
        self._room[begin : begin + size] = raw
        room.position, room.is_used = begin + size, True
        return begin

    def lend(self, request: int, head: wire.TensorHead, raw: wire.Buffer) -> wire.TensorHead:
        """Copy an output to shared memory if it is large and there is room; return its head, with the place then."""
        if head.size < self._settings.least_bytes:
            return head
        room = self._rooms.get(request)
        if room is not None and (position := self._put(room, raw)) is not None:
            place = wire.Place(self._settings.reader, position)
            return wire.TensorHead(head.name, head.datatype, head.shape, head.size, place)
        if not self._can_lend or self._outputs is None:
            return head
        with self._lending:
            reference = self._outputs.lend((raw,), head.size, self._reader)
        if reference is None:
            return head
        place = wire.Place(self._outputs.token, reference.unit, reference.generation)
        return wire.TensorHead(head.name, head.datatype, head.shape, head.size, place)

    def remove(self) -> None:
        """Remove the file of the outputs: this process ends."""
        if self._outputs is not None:
            remove_file(self._directory, self._outputs.token)

    def sweep(self) -> None:
        """Give memory back, and forget the arenas of dead processes. Called about once a second."""
        for token, inputs in list(self._inputs.items()):
            if not inputs.held and not is_owned(inputs.descriptor):
                del self._inputs[token]
                inputs.close()
        if self._outputs is not None:
            with self._lending:
                self._outputs.sweep()


def _page_faults() -> int:
    """Return how many page faults this process has had."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_minflt + usage.ru_majflt


def _open_pagemap() -> int | None:
    """Open the page map of this process, which marks private copies of pages; None if the system has none."""
    try:
        return os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None


def _parts_of(tensors: Sequence[wire.TensorHead]) -> list[_Part]:
    """Return the tensors in shared memory, grouped by the pages that they share."""
    parts: list[_Part] = []
    placed = [(tensor.place.arena, tensor.place.position, tensor) for tensor in tensors if tensor.place is not None]
    if len(placed) > 1:
        placed.sort(key=itemgetter(0, 1))
    for arena, position, tensor in placed:
        end = -(-(position + tensor.size) // _PAGE) * _PAGE
        last = parts[-1] if parts else None
        if last is not None and last.arena == arena and position < last.end:
            last.tensors.append((tensor, position))
            last.end = max(last.end, end)
        else:
            parts.append(_Part(arena, position // _PAGE * _PAGE, end, [(tensor, position)]))
    return parts
