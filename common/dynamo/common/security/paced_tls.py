"""TLS of connections that others share the event loop with.

A handshake takes milliseconds of CPU time, and what a client sends in one read can be thousands of records that each change the
keys. So each turn of the event loop takes a few milliseconds of either for all connections of a port, in steps of 32 KiB, and the
rest is queued (`common.process.turns`). Connections that are open do not wait for handshakes.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, cast

from dynamo.common.process.turns import LoopTurns

_STEP_BYTES = 32 * 1024
"""Two of the longest records, or 1,200 that change keys, of some 28 µs each."""
_MOST_REPLIES_BYTES = 64 * 1024
"""Replies to records that change keys, in all: to 2,400 of them, which clients come to after terabytes."""
_MOST_SILENT_BYTES = 64 * 1024
"""Records without data that follow one another, at most."""


class EncryptedConnection(asyncio.Protocol):
    """The protocol of a connection until an event loop has made its TLS. It is `ENCRYPTED` in the context of that."""

    transport: asyncio.Transport
    """What is below TLS."""

    def __init__(self) -> None:
        self.early = bytearray()
        """What came before: uvloop reads from a connection at once."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's are not derived from it

    def data_received(self, data: bytes) -> None:
        self.early += data
        self.transport.pause_reading()

    def read_again(self) -> None:
        """Have the TLS, which has taken the place of this protocol, look at what has been read already."""
        if not self.transport.is_closing():
            cast("asyncio.BufferedProtocol", self.transport.get_protocol()).buffer_updated(0)


ENCRYPTED: ContextVar[EncryptedConnection] = ContextVar("ENCRYPTED")


class PacedTls(ssl.SSLObject):
    """The TLS of one connection, which an event loop drives. `PacedContext` makes them."""

    _received: ssl.MemoryBIO
    """What the event loop has read from the client."""
    _taken: ssl.MemoryBIO
    """The part of it that OpenSSL may read."""
    _replies: ssl.MemoryBIO
    _turns: LoopTurns
    _records: LoopTurns
    _go_on: Callable[[], None]
    _is_waiting: bool
    _replied_bytes: int
    _silent_bytes: int

    def pace(
        self,
        bios: tuple[ssl.MemoryBIO, ssl.MemoryBIO, ssl.MemoryBIO],
        handshakes: LoopTurns,
        records: LoopTurns,
        go_on: Callable[[], None],
    ) -> None:
        """Work in these turns from now on. `go_on` has the event loop read again."""
        self._received, self._taken, self._replies = bios
        self._turns = handshakes
        self._records = records
        self._go_on = go_on
        self._is_waiting = False
        self._replied_bytes = self._silent_bytes = 0

    def do_handshake(self) -> None:
        while self._take():
            try:
                super().do_handshake()
            except ssl.SSLWantReadError:
                if not self._received.pending:
                    raise
            else:
                self._turns = self._records
                return
        raise ssl.SSLWantReadError

    def read(self, len: int = 1024, buffer: Any = None) -> Any:
        """Return data, or their number in `buffer`. Raises SSLError for a client that has its keys changed without end."""
        while self._taken.pending or super().pending() or self._take():
            before = self._taken.pending
            replies = self._replies.pending
            try:
                data = super().read(len, buffer)
            except ssl.SSLWantReadError:
                self._count(before - self._taken.pending, self._replies.pending - replies)
                if not self._received.pending:
                    raise
            else:
                self._silent_bytes = 0
                self._count(0, self._replies.pending - replies)
                return data
        raise ssl.SSLWantReadError

    def pending(self) -> int:
        return super().pending() + self._taken.pending

    def unwrap(self) -> None:
        self._taken.write(self._received.read())
        super().unwrap()

    def _take(self) -> bool:
        """Let OpenSSL read one step more of what has come. Return False if the connection has to wait for its turn."""
        if self._received.pending:
            if not self._turns.has_time():
                if not self._is_waiting:
                    self._is_waiting = True
                    self._turns.wait(self._continue)
                return False
            self._taken.write(self._received.read(_STEP_BYTES))
        return True

    def _continue(self) -> None:
        self._is_waiting = False
        self._go_on()

    def _count(self, silent_bytes: int, replied_bytes: int) -> None:
        self._silent_bytes += silent_bytes
        self._replied_bytes += replied_bytes
        if self._silent_bytes > _MOST_SILENT_BYTES or self._replied_bytes > _MOST_REPLIES_BYTES:
            raise ssl.SSLError("too many records without data")


class PacedContext(ssl.SSLContext):
    """Makes the TLS of the connections of one port, from another context."""

    made_by: ssl.SSLContext
    handshakes: LoopTurns
    records: LoopTurns

    def wrap_bio(self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO, *args: Any, **options: Any) -> ssl.SSLObject:
        connection = ENCRYPTED.get()
        incoming.write(connection.early)
        taken = ssl.MemoryBIO()
        tls = self.made_by.wrap_bio(taken, outgoing, *args, **options)
        assert isinstance(tls, PacedTls)
        tls.pace((incoming, taken, outgoing), self.handshakes, self.records, connection.read_again)
        return tls


def paced(context: ssl.SSLContext, handshakes: LoopTurns, records: LoopTurns) -> PacedContext:
    """Return a context that makes TLS as `context` does, in the turns for handshakes and, later, for records."""
    context.sslobject_class = PacedTls
    made = PacedContext(ssl.PROTOCOL_TLS_SERVER)
    made.made_by, made.handshakes, made.records = context, handshakes, records
    return made
