"""Shared memory between the worker and one process of a model, as the worker sees it.

The process gets the place of an input that lies in the arena of a frontend, and the worker keeps the input until the process has
released it. Outputs lie in the arena of the worker, where frontends read them, if the process was given room for them: as much as
its responses had lately. Other outputs lie in an arena of the process, and are copied for frontends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from dynamo.common.shared_memory.arena import Region
from dynamo.common.shared_memory.files import ArenaRefused
from dynamo.common.shared_memory.layout import UNIT_BYTES, Reference
from dynamo.common.shared_memory.neighbour import BadReference, Neighbour
from dynamo.common.shared_memory.sharing import SharedMemory
from dynamo.worker.repository.declared.execution import Arrays
from dynamo.worker.repository.wire import wire


class ProcessMemory:
    """One per process of a model."""

    def __init__(self, memory: SharedMemory, send: Callable[[wire.Message], None]) -> None:
        self._memory = memory
        self._data_offset = memory.arena.layout.data_offset
        self._send = send
        self._offered: set[str] = set()
        """Arenas of which the process was sent the token."""
        self._opened: set[str] = set()
        """Arenas that the process has opened, and so can read."""
        self._kept: dict[int, list[Arrays]] = {}
        """The inputs that the process may still read, by execution."""
        self._outputs: Neighbour | None = None
        self._rooms: dict[int, Region] = {}
        """Regions for outputs, by the number of the request."""
        self._usual_bytes = 0
        """The room that responses need, lately."""

    @property
    def settings(self) -> wire.Memory:
        memory = self._memory
        return wire.Memory(str(memory.directory), memory.capacity_bytes, memory.least_bytes, memory.token)

    def place(self, head: wire.TensorHead, raw: wire.Buffer) -> wire.TensorHead | None:
        """Return the head of an input that lies in an arena which the process can read; None if it has to be sent."""
        if head.size < self._memory.least_bytes:
            return None
        located = self._memory.locate(np.frombuffer(raw, np.uint8).__array_interface__["data"][0], head.size)
        if located is None:
            return None
        token, offset = located
        if token in self._opened:
            return wire.TensorHead(head.name, head.datatype, head.shape, head.size, wire.Place(token, offset))
        if token not in self._offered:
            self._offered.add(token)
            self._send(wire.OpenArena(token))
        return None

    def opened(self, token: str) -> None:
        """The process has opened an arena."""
        self._opened.add(token)

    def keep(self, execution: int, inputs: Sequence[Arrays]) -> None:
        """Keep the inputs of an execution until the process has released them."""
        self._kept[execution] = list(inputs)

    def release(self, executions: Sequence[int]) -> None:
        for execution in executions:
            self._kept.pop(execution, None)

    # Outputs

    def reserve(self, request: int) -> wire.OutputMemory | None:
        """Return room for the outputs of a request; None if they are small, or there is none."""
        arena = self._memory.arena
        if (
            self._usual_bytes < self._memory.least_bytes
            or self._memory.token not in self._opened
            or 2 * (arena.used_bytes + self._usual_bytes) > arena.capacity_bytes
            or (region := arena.reserve(self._usual_bytes)) is None
        ):
            return None
        self._rooms[request] = region
        return wire.OutputMemory(self._data_offset + region.unit * UNIT_BYTES, region.size)

    def responded(self, request: int, outputs: Sequence[wire.TensorHead]) -> None:
        """The only response to a request has come."""
        sizes = [output.size for output in outputs if output.size >= self._memory.least_bytes]
        needed = wire.HEAD_BYTES + sum(size + wire.gap(size) for size in sizes) if sizes else 0
        self._usual_bytes = max(needed, self._usual_bytes - self._usual_bytes // 8)
        self.take_back((request,))

    def take_back(self, requests: Iterable[int]) -> None:
        """The process does not write to the room for these requests."""
        for request in requests:
            region = self._rooms.pop(request, None)
            if region is not None and not region.parts:
                self._memory.arena.let_go(region)

    def open_outputs(self, token: str) -> None:
        """Open the arena of the process, and confirm it to the process."""
        try:
            self._outputs = Neighbour(self._memory.directory, token, self._memory.arena.tag)
        except ArenaRefused:
            return  # without ArenaOpened the process goes on sending its outputs
        self._send(wire.ArenaOpened(token))

    def views(self, request: int, outputs: Sequence[wire.TensorHead], raws: Sequence[memoryview]) -> Sequence[memoryview]:
        """Return the bytes of each output, which are in `raws` or in shared memory. Raises ValueError."""
        if all(output.place is None for output in outputs):
            return raws
        in_room = [output for output in outputs if output.place is not None and output.place.arena == self._memory.token]
        room = iter(self._take_room(request, in_room) if in_room else ())
        views = []
        for output, raw in zip(outputs, raws, strict=True):
            if output.place is None:
                views.append(raw)
            elif output.place.arena == self._memory.token:
                views.append(next(room))
            else:
                views.append(self._take(output, output.place))
        return views

    def _take_room(self, request: int, outputs: Sequence[wire.TensorHead]) -> list[memoryview]:
        """Return the outputs that lie in the room for a request. It is free when the last view of any is gone."""
        region = self._rooms.get(request)
        if region is None or region.parts:
            raise ValueError("an output lies in memory that was not given to the process")
        start = self._data_offset + region.unit * UNIT_BYTES
        for output in outputs:
            offset = 0 if output.place is None else output.place.position - start
            if not 0 <= offset <= offset + output.size <= region.size:
                raise ValueError("an output lies beyond the room that was given to the process")
            region.parts.append((offset, output.size))
        whole = self._memory.arena.view(region)
        return [whole[offset : offset + size] for offset, size in region.parts]

    def _take(self, tensor: wire.TensorHead, place: wire.Place) -> memoryview:
        """Return an output. Its memory goes back to the process with the last view of it. Raises ValueError."""
        if self._outputs is None or place.arena != self._outputs.token:
            raise ValueError("an output lies in an unknown arena")
        try:
            return self._outputs.take(Reference(place.position, tensor.size, place.generation))
        except BadReference as error:
            raise ValueError(str(error)) from None

    def close(self) -> None:
        """The process has ended."""
        self._send = _send_nothing
        self._kept.clear()
        self.take_back(list(self._rooms))
        if self._outputs is not None:
            self._outputs.remove()
            self._outputs.close()


def _send_nothing(message: wire.Message) -> None:
    """Stand in for `send` after the end, so that nothing refers to the process."""
