"""The arena of this process and those of its neighbours, the other processes of this host that use shared memory.

Processes are not configured as neighbours. Each advertises the token of its arena. A process that can open that arena and
reads the nonce of the token in it shares the kernel, the directory and the user with its owner.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from dynamo.common.options import SharedMemoryOptions
from dynamo.common.process.background import running
from dynamo.common.process.work import Work
from dynamo.common.shared_memory.arena import Arena, Region
from dynamo.common.shared_memory.files import ArenaRefused, is_token, remove_stale_files
from dynamo.common.shared_memory.layout import Reference
from dynamo.common.shared_memory.neighbour import BadReference, Neighbour
from dynamo.common.tensors.tensors import Buffer

log = logging.getLogger(__name__)

_SWEEP_S = 1.0
_LEAST_ROOM_BYTES = 256 * 1024
"""Below this a copy costs less than to know a region by its views."""
_MAX_ROOM_BYTES = 16 * 2**20
"""The system prepares all memory of a region at once, for which the event loop waits."""
_MAX_COPIED_BYTES = 64 * 2**20
"""Numbers in JSON may become four times as large as their text. A copy takes 0.8 ms for each MiB: see `lend_in_steps`."""
_MAX_REFUSED = 1024
"""Tokens that could not be opened are remembered, so that a busy peer is not tried with each message."""


class ReceiveBuffer:
    """Memory of this process's arena for a body that is being received, before its reader is known."""

    __slots__ = ("_arena", "_region", "_size", "view")

    def __init__(self, arena: Arena, region: Region, size: int) -> None:
        self._arena = arena
        self._region = region
        self._size = size
        self.view = arena.data(region)[:size]
        """To be written to."""

    def finish(self) -> memoryview:
        """Return what was written, read-only. It is lent without a copy, and free when the last view of it is gone."""
        self.view.release()
        self._region.parts.append((0, self._size))
        return self._arena.view(self._region)[: self._size]

    def drop(self) -> None:
        """Free the memory: the rest of the body does not come."""
        self.view.release()
        self._arena.let_go(self._region)


class SharedMemory:
    """One per process; use `open_shared_memory`. All calls belong to the event loop's thread."""

    def __init__(self, directory: Path, capacity_bytes: int, least_bytes: int = 32 * 1024) -> None:
        """Create this process's arena. Raises OSError."""
        self._directory = directory
        self.least_bytes = least_bytes
        """Smaller bodies are not lent."""
        self.arena = Arena(directory, capacity_bytes)
        self._neighbours: dict[str, Neighbour] = {}
        self._refused: set[str] = set()
        self.bytes: Counter[str] = Counter()
        """Bytes of bodies that were `lent` and `taken` by reference."""
        self.fallbacks: Counter[str] = Counter()
        """Bodies that went inline although the peer is a neighbour, or claims to be one, by reason."""

    def __repr__(self) -> str:
        return f"<SharedMemory {self.arena!r} with {len(self._neighbours)} neighbours>"

    @property
    def token(self) -> str:
        """What other processes need to open this process's arena."""
        return self.arena.token

    @property
    def directory(self) -> Path:
        return self._directory

    def locate(self, address: int, size: int) -> tuple[str, int] | None:
        """Return the token of the arena in which `size` bytes at `address` lie, and their offset in its file; None if in none."""
        for token, neighbour in self._neighbours.items():
            if (offset := neighbour.locate(address, size)) is not None:
                return token, offset
        return None

    @property
    def used_bytes(self) -> int:
        """Bytes of this process's arena that are lent."""
        return self.arena.used_bytes

    @property
    def capacity_bytes(self) -> int:
        return self.arena.capacity_bytes

    def neighbour(self, token: str) -> Neighbour | None:
        """Return the process that advertises `token`, if it shares memory with this one."""
        neighbour = self._neighbours.get(token)
        if neighbour is None and token not in self._refused:
            try:
                neighbour = self._neighbours[token] = Neighbour(self._directory, token, self.arena.tag)
            except ArenaRefused as error:
                self._refuse(token, error)
        return neighbour

    def _refuse(self, token: str, error: ArenaRefused) -> None:
        self.fallbacks["unreachable"] += 1
        if not is_token(token):
            return  # it may be long, and takes no time to be refused again
        if len(self._refused) >= _MAX_REFUSED:
            self._refused.clear()
        self._refused.add(token)
        log.info("bodies for the owner of an arena travel in messages: %s", error)

    def lend(self, body: Buffer | Sequence[Buffer], size: int, reader: Neighbour) -> Reference | None:
        """Copy a body of `size` bytes into a region for `reader`.

        None if that is gone or, counted, if the body is too large to be copied at once or there is no room.
        """
        if not reader.is_open:
            return None
        pieces = (body,) if isinstance(body, bytes | bytearray | memoryview) else body
        reference = self.arena.lend_in_place(pieces, size, reader)
        if reference is None and size <= _MAX_COPIED_BYTES:
            reference = self.arena.lend(pieces, size, reader)
        if reference is None:
            self.fallbacks["large" if size > _MAX_COPIED_BYTES else "full"] += 1
        else:
            self.bytes["lent"] += size
        return reference

    def lend_in_steps(self, body: Buffer | Sequence[Buffer], size: int, reader: Neighbour) -> Work[Reference | None]:
        """Do what `lend` does in steps of some milliseconds; closed before its end, it lends nothing.

        `lend` is called for most requests, so it shares no calls with this.
        """
        if not reader.is_open:
            return None
        pieces = (body,) if isinstance(body, bytes | bytearray | memoryview) else body
        reference = self.arena.lend_in_place(pieces, size, reader)
        if reference is None and size <= _MAX_COPIED_BYTES:
            reference = yield from self.arena.lend_in_steps(pieces, size, reader)
        if reference is None:
            self.fallbacks["large" if size > _MAX_COPIED_BYTES else "full"] += 1
        else:
            self.bytes["lent"] += size
        return reference

    def room(self, size: int) -> ReceiveBuffer | None:
        """Return memory for a body that is about to be received. None if it is small or very large, or for lack of room.

        Half of the arena is left for bodies whose readers are known.
        """
        arena = self.arena
        if not max(self.least_bytes, _LEAST_ROOM_BYTES) <= size <= _MAX_ROOM_BYTES or not self._neighbours:
            return None
        if 2 * (arena.used_bytes + size) > arena.capacity_bytes:
            return None
        region = arena.reserve(size)
        return None if region is None else ReceiveBuffer(arena, region, size)

    def take(self, owner: Neighbour, reference: Reference) -> memoryview | None:
        """Return a read-only view of what `owner` lent. None, counted and logged, if the reference does not check."""
        try:
            view = owner.take(reference)
        except BadReference as error:
            log.warning("a body is not read from shared memory: %s", error)
            self.fallbacks["refused"] += 1
            return None
        self.bytes["taken"] += reference.size
        return view

    def sweep(self) -> None:
        """Get back what dead neighbours held, and remove what they have left."""
        for token, neighbour in list(self._neighbours.items()):
            if not neighbour.is_alive:
                log.info("the owner of %s is gone", neighbour)
                neighbour.remove()
                neighbour.close()
                del self._neighbours[token]
        self.arena.sweep()

    def close(self) -> None:
        self.arena.close()
        self._close_neighbours()

    def abandon(self) -> None:
        """Close all files and remove none, as when the process dies."""
        self.arena.abandon()
        self._close_neighbours()

    def _close_neighbours(self) -> None:
        for neighbour in self._neighbours.values():
            if neighbour.is_open:
                neighbour.close()

    @property
    def held_regions(self) -> int:
        """The number of regions of other processes that are being read."""
        return sum(map(len, self._neighbours.values()))

    async def keep(self) -> None:
        """Sweep, for ever."""
        while True:
            await asyncio.sleep(_SWEEP_S)
            self.sweep()


@asynccontextmanager
async def open_shared_memory(options: SharedMemoryOptions) -> AsyncIterator[SharedMemory | None]:
    """Create this process's arena, after removing those of dead processes. None, with a warning, where that cannot be."""
    memory = _create(options) if options.size else None
    if memory is None:
        yield None
        return
    try:
        async with running(memory.keep(), "the shared memory"):
            yield memory
    finally:
        memory.close()


def _create(options: SharedMemoryOptions) -> SharedMemory | None:
    try:
        if removed := remove_stale_files(options.dir):
            log.info("removed %d arenas of dead processes from %s", removed, options.dir)
        return SharedMemory(options.dir, options.size, options.threshold)
    except OSError as error:
        log.warning("no shared memory in %s, bodies travel in messages: %s", options.dir, error.strerror)
        return None
