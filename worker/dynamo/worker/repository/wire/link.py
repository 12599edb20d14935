"""The worker's end of the socket to a model's process.

One system call sends all messages of one turn of the event loop, and one reads many messages.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice
from typing import TypeAlias

from dynamo.worker.repository.wire import wire

log = logging.getLogger(__name__)

OnMessage: TypeAlias = Callable[[wire.Message, list[memoryview]], None]
MAX_UNSENT_BYTES = 4 * 2**20
"""`ready` waits while more bytes than this are unsent."""


class Link:
    """Sends and receives on the event loop that it is created on. `close` it."""

    def __init__(
        self, connection: socket.socket, on_message: OnMessage, on_end: Callable[[str], None], admit: wire.Admit = wire.admit_all
    ) -> None:
        """`on_end` is called once: with "" when the process has closed its end, with a reason if it sent an invalid message."""
        self._connection = connection
        self._on_message = on_message
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._messages = wire.MessageReader(admit)
        self._unsent: deque[wire.Buffer] = deque()
        self._unsent_bytes = 0
        self._is_scheduled = False
        """A call of `_write` is due: this turn, or when the socket takes more."""
        self._is_full = False
        """The socket takes no more now."""
        self._is_open = True
        self._room: deque[asyncio.Future[None]] = deque()
        connection.setblocking(False)
        self._loop.add_reader(connection, self._read)

    def send(self, pieces: Iterable[wire.Buffer]) -> None:
        """Send at the end of this turn. Does nothing after the end."""
        if not self._is_open:
            return
        for piece in pieces:
            self._unsent.append(piece)
            self._unsent_bytes += len(piece)
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._write)

    async def ready(self) -> None:
        """Wait until the process has read enough of what was sent."""
        while self._is_open and self._unsent_bytes > MAX_UNSENT_BYTES:
            room = self._loop.create_future()
            self._room.append(room)
            await room

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._loop.remove_reader(self._connection)
            self._loop.remove_writer(self._connection)
            self._connection.close()
            self._unsent.clear()
            # They refer to the owner, which refers to this: so it is gone without the garbage collector.
            self._on_message, self._on_end = _ignore, _ignore
            self._messages.close()
            self._wake()

    def _write(self) -> None:
        if not self._is_open:
            return
        while self._unsent:
            try:
                sent = self._connection.sendmsg(list(islice(self._unsent, wire.MAX_PIECES)))
            except BlockingIOError:
                self._is_full = True
                self._loop.add_writer(self._connection, self._write)
                return
            except OSError:  # the process has ended; `_read` notices it after the last message
                self._unsent.clear()
                self._unsent_bytes = 0
                break
            self._unsent_bytes -= sent
            while self._unsent and sent >= len(self._unsent[0]):
                sent -= len(self._unsent.popleft())
            if sent:
                self._unsent[0] = memoryview(self._unsent[0])[sent:]
        if self._is_full:
            self._is_full = False
            self._loop.remove_writer(self._connection)
        self._is_scheduled = False
        self._wake()

    def _wake(self) -> None:
        while self._room:
            room = self._room.popleft()
            if not room.done():
                room.set_result(None)

    def _read(self) -> None:
        try:
            count = self._connection.recv_into(self._messages.space())
        except BlockingIOError:
            return
        except OSError:
            count = 0
        if not count:
            return self._end("")
        try:
            for message, raws in self._messages.advance(count):
                self._on_message(message, raws)
        except Exception as error:
            log.exception("a process sent what cannot be read")
            self._end(f"sent what cannot be read: {error}")

    def _end(self, why: str) -> None:
        on_end = self._on_end
        self.close()
        on_end(why)


def _ignore(*_: object) -> None:
    """Stand in for the callbacks after the end."""
