"""The events of a response in the background: stored in chunks while it is generated, and followed from any frontend.

A chunk is a record under the number of its first event, so a reader finds the next chunk by counting events. That there is one
is announced (`fleet.peers.response_changes`): a reader reads once for each chunk, and hardly ever while none comes. The last
event is not stored: the response is, and a reader makes the event of it; so each stream has one, also where the writer died.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import TypeVar

from dynamo.common.errors import Unavailable
from dynamo.common.process.background import running
from dynamo.frontend.api.openai.store.events import ResponseObject, event
from dynamo.frontend.api.openai.store.items import check_size
from dynamo.frontend.api.openai.store.stored import LOST_S, RUNNING, StoredResponses

log = logging.getLogger(__name__)

T = TypeVar("T")

PERIOD_S = 0.1
"""Between two chunks, and between two attempts to read while JetStream is away."""
_COUNTED_BYTES = 64 * 1024
"""Bytes of events that are stored before the limit of the key counts them; the last ones count at the end."""
_CHUNK_BYTES = 1 << 20
"""Bytes of events in one record, from which on the next ones are in another one."""
_END = b"\n\n"


class EventLog:
    """Stores the events of one response. While JetStream is away they wait; after that they are left out."""

    def __init__(self, stored: StoredResponses, owner: str, response: ResponseObject) -> None:
        """`response`: as it is at the beginning, for the first event."""
        self.begun = False
        """There is more than the first event, so the response cannot be generated anew."""
        self._stored = stored
        self._owner = owner
        self._id = response.id
        self._waiting = [event("response.created", 0, response=response)]
        self._chunk = b""
        """What is being written: the same bytes again after a failure, which may have been that of the confirmation only."""
        self._written = 0
        """Events in chunks that were written."""
        self._is_failing = False
        """The last attempt to write failed."""
        self._bytes = self._counted_bytes = 0
        """Bytes of chunks that were written, and how many of these the key's limit counts already."""

    @asynccontextmanager
    async def writing(self) -> AsyncIterator[None]:
        """Write what there is, more while the body runs, and what is left after it.

        So who follows the response has its id while it waits for an instance.
        """
        async with running(self._write_periodically(), f"events of {self._id}"):
            yield
        await self._write(is_last=True)

    def add(self, events: Sequence[bytes]) -> None:
        """Add whole events, in pieces."""
        self.begun = True
        self._waiting += filter(None, events)

    async def _write_periodically(self) -> None:
        while True:
            await self._write()
            await asyncio.sleep(PERIOD_S)

    async def _write(self, *, is_last: bool = False) -> None:
        try:
            while self._chunk or self._waiting:
                if not self._chunk:
                    self._chunk = self._next_chunk()
                count = self._chunk.count(_END)
                await self._stored.add_events(self._id, self._written, self._chunk, count)
                self._written += count
                self._bytes += len(self._chunk)
                self._chunk = b""
            if self._bytes - self._counted_bytes >= (1 if is_last else _COUNTED_BYTES):
                await self._stored.count_events(self._owner, self._id, self._bytes, self._counted_bytes)
                self._counted_bytes = self._bytes
            self._is_failing = False
        except Unavailable as error:
            if not self._is_failing:  # it is tried ten times a second
                log.warning("events of response %s cannot be stored now: %s", self._id, error)
            self._is_failing = True

    def _next_chunk(self) -> bytes:
        """Take whole events from what waits: `_CHUNK_BYTES` of them, or one that is longer. Raises PayloadTooLarge."""
        size_bytes = count = 0
        for piece in self._waiting:
            count += 1
            size_bytes += len(piece)
            check_size(size_bytes)
            if size_bytes >= _CHUNK_BYTES and piece.endswith(_END):
                break
        chunk, self._waiting = b"".join(self._waiting[:count]), self._waiting[count:]
        return chunk


async def follow(stored: StoredResponses, owner: str, id: str, first: int) -> AsyncGenerator[bytes, None]:
    """Yield the events of a response from the number `first` on, and the one that ends it. Raises RecordNotFound."""
    await stored.current(owner, id)
    async with stored.watching(id) as watch:
        at = max((number for number in await stored.chunks_of_events(id) if number <= first), default=0) if first else 0
        while True:
            chunk = await _patiently(partial(stored.events, id, at))
            if chunk is not None:
                events = chunk.split(_END)[:-1]
                shown = events[max(0, first - at) :]
                at += len(events)
                watch.has_read(at)
                if shown:
                    yield _END.join(shown) + _END
                if watch.is_complete:
                    await watch.changed()
                continue
            response = await _patiently(partial(stored.current, owner, id))
            if response["status"] in RUNNING:
                await watch.changed()
            elif await _patiently(partial(stored.events, id, at)) is None:  # none came between the two looks
                if first <= at:
                    yield event(f"response.{response['status']}", at, response=response)
                return


async def _patiently(read: Callable[[], Awaitable[T]]) -> T:
    """Return what `read` returns. While JetStream is away, wait as long for it as for a frontend that is silent."""
    clock = asyncio.get_running_loop().time
    give_up_at = clock() + LOST_S
    while True:
        try:
            return await read()
        except Unavailable:
            if clock() >= give_up_at:
                raise
        await asyncio.sleep(PERIOD_S)
