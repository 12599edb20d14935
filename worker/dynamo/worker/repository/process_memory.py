"""Shared memory between the worker and one process of a model, as the worker sees it.

The process gets the place of an input that lies in the arena of a frontend, and the worker keeps the input until the process has
released it. Outputs lie in an arena of the process, and are read in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dynamo.common.shared_memory.files import ArenaRefused
from dynamo.common.shared_memory.layout import Reference
from dynamo.common.shared_memory.neighbour import BadReference, Neighbour
from dynamo.common.shared_memory.sharing import SharedMemory
from dynamo.worker.repository import wire
from dynamo.worker.repository.execution import Arrays


class ProcessMemory:
    """One per process of a model."""

    def __init__(self, memory: SharedMemory, send: Callable[[wire.Message], None]) -> None:
        self._memory = memory
        self._send = send
        self._offered: set[str] = set()
        """Arenas of which the process was sent the token."""
        self._opened: set[str] = set()
        """Those of them that it can read."""
        self._kept: dict[int, list[Arrays]] = {}
        """The inputs that the process may still read, by execution."""
        self._outputs: Neighbour | None = None

    @property
    def settings(self) -> wire.Memory:
        memory = self._memory
        return wire.Memory(str(memory.directory), memory.capacity_bytes, memory.least_bytes, memory.arena.tag)

    def place(self, array: wire.Array) -> wire.Place | None:
        """Return where an input lies in an arena that the process can read; None if it has to be sent."""
        if (
            array.nbytes < self._memory.least_bytes
            or array.dtype.hasobject
            or not (array.dtype.isnative and array.flags.c_contiguous)
        ):
            return None
        located = self._memory.locate(array.__array_interface__["data"][0], array.nbytes)
        if located is None:
            return None
        token, offset = located
        if token in self._opened:
            return wire.Place(token, offset)
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

    def open_outputs(self, token: str) -> None:
        """Open the arena of the process, and confirm it to the process."""
        try:
            self._outputs = Neighbour(self._memory.directory, token, self._memory.arena.tag)
        except ArenaRefused:
            return  # without ArenaOpened the process goes on sending its outputs
        self._send(wire.ArenaOpened(token))

    def take(self, tensor: wire.TensorHead, place: wire.Place) -> memoryview:
        """Return an output. Its memory goes back to the process with the last view of it. Raises ValueError."""
        if self._outputs is None or place.arena != self._outputs.token:
            raise ValueError("an output lies in an unknown arena")
        try:
            return self._outputs.take(Reference(place.position, tensor.size, place.generation))
        except BadReference as error:
            raise ValueError(str(error)) from None

    def close(self) -> None:
        """The process has ended."""
        self._kept.clear()
        if self._outputs is not None:
            self._outputs.remove()
            self._outputs.close()


def to_head(name: str, array: Any, place: wire.Place) -> wire.TensorHead:
    """Return the head of an input in shared memory."""
    return wire.TensorHead(name, wire.datatype_of(name, array), tuple(array.shape), array.nbytes, place)
