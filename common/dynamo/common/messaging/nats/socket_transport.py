"""The socket under nats-py: its transport, and a protocol of the event loop.

It reads messages of *fast* subscriptions straight out of its receive buffer and hands them to their callback, and passes every
other byte on to nats-py's parser.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias, cast
from urllib.parse import ParseResult

import msgspec
import numpy as np
from nats.aio.transport import Transport
from nats.errors import Error as NatsError

from dynamo.common.messaging.buffers import Buffer
from dynamo.common.messaging.unreadable import Unreadable

log = logging.getLogger(__name__)

OnMessage: TypeAlias = Callable[[str, str, memoryview, bool], None]
"""Called with subject, reply subject, payload, and whether nats-server says that what we published has no subscriber."""

RECEIVE_BYTES = 128 * 1024
_LAST_BYTES_S = 1.0
"""What is still to be written when a connection is closed gets so long."""
_NO_RESPONDERS = b"NATS/1.0 503"
FAST_KEY = b"f"
"""Begins the ids of fast subscriptions; nats-py numbers its own without a letter."""


def _ignore(subject: str, reply: str, payload: memoryview, no_responders: bool) -> None:
    """Handle a message that was on its way when its subscription ended."""


class _Info(msgspec.Struct):
    """What nats-server says of itself, in part."""

    tls_required: bool = False
    tls_verify: bool = False
    """Clients must show a certificate."""


def _decode_info(line: bytes) -> _Info:
    try:
        return msgspec.json.decode(line[4:].strip(), type=_Info)
    except msgspec.MsgspecError:  # nats-py refuses it
        return _Info()


class SocketTransport(Transport, asyncio.BufferedProtocol):
    """One connection's socket, seen by nats-py as its transport and by the event loop as a protocol.

    Until nats-py starts its read loop, bytes are kept for `readline`. From then on they are scanned: a message for a fast
    subscription is dispatched, anything else is queued for `read`.
    """

    def __init__(
        self,
        fast: Mapping[bytes, OnMessage],
        *,
        demands_tls: bool = False,
        has_certificate: bool = False,
        messages_per_turn: int | None = None,
    ) -> None:
        self.lost = asyncio.Event()
        """The connection that stood is gone."""
        self.last_read_at = float("-inf")
        """When the last byte came, on the loop's clock."""
        self.opened_at = float("-inf")
        self._fast = fast
        self._per_turn = sys.maxsize if messages_per_turn is None else messages_per_turn
        self._loop = asyncio.get_running_loop()
        self._forged = Unreadable("a message")
        self._demands_tls = demands_tls
        self._has_certificate = has_certificate
        self._transport: asyncio.Transport | None = None
        self._reset()

    def _reset(self) -> None:
        self._buffer = bytearray(RECEIVE_BYTES)
        self._view = memoryview(self._buffer)
        self._begin = 0
        self._end = 0
        self._scanning = False
        self._has_rest = False
        """Messages that were read wait for the next turn of the event loop, and reading is paused."""
        self._large: memoryview | None = None
        self._large_filled = 0
        self._large_done: Callable[[memoryview], None] | None = None
        self._queued: list[bytes] = []
        self._eof = False
        self._failure: Exception | None = None
        self._over_tls = False
        self._corked: list[bytes] | None = None
        """Pieces that wait for one write together."""
        self._reader: asyncio.Future[None] | None = None
        self._writable: asyncio.Future[None] | None = None
        self._paused = False
        self._closed: asyncio.Future[None] | None = None

    # nats-py's side

    async def connect(self, uri: ParseResult, buffer_size: int, connect_timeout: int) -> None:
        self._reset()
        self._closed = None  # until there is a connection: one that was refused will not report its end
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(connect_timeout):
            await loop.create_connection(lambda: self, uri.hostname or "127.0.0.1", uri.port or 4222)

    async def connect_tls(
        self, uri: str | ParseResult, ssl_context: ssl.SSLContext, buffer_size: int, connect_timeout: int
    ) -> None:
        assert self._transport is not None
        host = uri if isinstance(uri, str) else uri.hostname
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(connect_timeout):
            transport = await loop.start_tls(self._transport, self, ssl_context, server_hostname=host)
        assert transport is not None
        self._transport = transport
        self._over_tls = True
        # In TLS 1.3 a server refuses our certificate after our side of the handshake is done: it sends an alert and closes.
        # Of two writes to a closed socket the second fails, and asyncio drops what is unread. After one it reads the alert.
        self._corked = []

    @property
    def is_open(self) -> bool:
        """Whether what is written may still arrive. False as soon as the socket is gone, before nats-py has noticed."""
        return self._transport is not None and not self._eof and not self._transport.is_closing()

    def write(self, payload: bytes) -> None:
        if self._corked is not None:
            self._corked.append(payload)
        elif self.is_open:
            assert self._transport is not None
            self._transport.write(payload)

    def writelines(self, payload: Sequence[Buffer]) -> None:
        if self.is_open:
            assert self._transport is not None
            self._transport.writelines(payload)

    async def drain(self) -> None:
        if self._failure is not None:
            raise self._failure if self._scanning else self._refused()
        if self._paused:
            if self._writable is None:
                self._writable = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._writable)

    async def readline(self) -> bytes:
        if self._corked is not None:
            corked, self._corked = self._corked, None
            self.write(b"".join(corked))
        while True:
            end = self._buffer.find(b"\n", self._begin, self._end)
            if end >= 0:
                line = bytes(self._view[self._begin : end + 1])
                self._begin = end + 1
                if line.startswith(b"INFO"):
                    self._check(_decode_info(line))
                return line
            if self._eof:  # nats-py would take an empty read for success
                raise self._refused()
            await self._more()

    def _check(self, info: _Info) -> None:
        """Raise NatsError for a server that our options do not fit."""
        if self._demands_tls and not info.tls_required:
            # nats-py would go on in plain text, with our password: an attacker on the way could make it do so.
            raise NatsError("nats-server does not offer TLS, but TLS is required")
        if info.tls_verify and not self._has_certificate:
            raise NatsError("nats-server requires a client certificate, but --nats-tls-cert-file is not set")

    def _refused(self) -> ConnectionResetError:
        """Say that nats-server ended the connection before it accepted the login."""
        stage = "right after the TLS handshake; it may have refused the client certificate" if self._over_tls else "at once"
        return ConnectionResetError(f"nats-server closed the connection {stage} ({self._failure or 'no reason given'})")

    async def read(self, buffer_size: int) -> bytes:
        if not self._scanning:
            self._scanning = True
            self._scan()
        while not self._queued:
            if self._failure is not None:
                raise self._failure
            if self._eof:
                return b""
            await self._more()
        data = b"".join(self._queued)
        self._queued.clear()
        return data

    async def _more(self) -> None:
        self._reader = asyncio.get_running_loop().create_future()
        try:
            await self._reader
        finally:
            self._reader = None

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close at once, whether or not all has been written: a peer that reads no more would never let `close` end."""
        if self._transport is not None:
            self._transport.abort()

    async def wait_closed(self) -> None:
        if self._closed is None or self._closed.done():
            return
        try:
            async with asyncio.timeout(_LAST_BYTES_S):
                await asyncio.shield(self._closed)
        except TimeoutError:
            self.abort()

    def at_eof(self) -> bool:
        return self._eof and not self._queued

    def __bool__(self) -> bool:
        return True

    # the event loop's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
        self.opened_at = self._loop.time()
        self._transport.set_write_buffer_limits(high=1024 * 1024)
        if self._closed is None:  # else TLS was put on top
            self._closed = asyncio.get_running_loop().create_future()

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._large is not None:
            return self._large[self._large_filled :]
        if self._end == len(self._buffer):
            kept = self._end - self._begin
            if kept > len(self._buffer) // 2:  # a line longer than any that is legal; nats-py's parser will refuse it
                bigger = bytearray(len(self._buffer) * 2)
                bigger[:kept] = self._view[self._begin : self._end]
                self._buffer, self._view = bigger, memoryview(bigger)
            else:
                self._view[:kept] = self._view[self._begin : self._end]
            self._begin, self._end = 0, kept
        return self._view[self._end :]

    def buffer_updated(self, nbytes: int) -> None:
        self.last_read_at = self._loop.time()
        if self._large is not None:
            self._large_filled += nbytes
            if self._large_filled == self._large.nbytes:
                large, done = self._large, self._large_done
                self._large = self._large_done = None
                assert done is not None
                done(large[:-2])
            return
        self._end += nbytes
        if not self._scanning:
            self._wake()
        elif not self._has_rest:  # else they are still in order: under TLS, bytes may come though reading is paused
            self._scan()

    def eof_received(self) -> bool:
        self._eof = True
        self._wake()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._eof = True
        self._failure = exc
        if self._closed is not None and not self._closed.done():
            self._closed.set_result(None)
        self.resume_writing()
        self._wake()
        self.lost.set()

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        if self._writable is not None:
            if not self._writable.done():
                self._writable.set_result(None)
            self._writable = None

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    # reading messages

    def _scan(self) -> None:
        """Take the whole messages out of the receive buffer, and the beginning of one that is not whole yet.

        Past `messages_per_turn`, the others wait until everything else that is ready has run.
        """
        buffer, begin, end, left = self._buffer, self._begin, self._end, self._per_turn
        while begin < end and self._large is None:
            eol = buffer.find(b"\r\n", begin, end)
            if eol < 0:
                break
            first = buffer[begin]
            if first == 0x4D or (first == 0x48 and buffer[begin + 1] == 0x4D):  # MSG or HMSG
                if not left:
                    self._scan_later()
                    break
                left -= 1
                line = bytes(self._view[begin:eol])
                begin = self._message(line, eol + 2, end)
            else:
                self._queued.append(bytes(self._view[begin : eol + 2]))
                begin = eol + 2
        if begin == end and self._large is None:
            begin = end = 0
        self._begin, self._end = begin, end
        if self._queued:
            self._wake()

    def _scan_later(self) -> None:
        self._has_rest = True
        if self.is_open:
            assert self._transport is not None
            self._transport.pause_reading()
        self._loop.call_soon(self._scan_rest)

    def _scan_rest(self) -> None:
        self._has_rest = False
        self._scan()
        if not self._has_rest and self.is_open:
            assert self._transport is not None
            self._transport.resume_reading()

    def _message(self, line: bytes, begin: int, end: int) -> int:
        """Handles the message whose control line was just read and whose payload begins at `begin`; returns where it ends."""
        parts = line.split()
        size = int(parts[-1])
        on_message = self._fast.get(parts[2])
        if on_message is None and parts[2].startswith(FAST_KEY):
            on_message = _ignore
        if on_message is None:
            self._queued.append(line + b"\r\n")
        if end - begin >= size + 2:
            self._deliver(on_message, parts, memoryview(bytes(self._view[begin : begin + size])))
            return begin + size + 2
        # The rest is read straight into its place.
        large = np.empty(size + 2, np.uint8).data  # uninitialised, which no bytearray is
        have = end - begin
        large[:have] = self._view[begin:end]
        self._large, self._large_filled = large, have
        self._large_done = lambda payload: self._deliver(on_message, parts, payload)
        return end

    def _deliver(self, on_message: OnMessage | None, parts: list[bytes], payload: memoryview) -> None:
        if on_message is None:
            self._queued.append(payload.tobytes() + b"\r\n")
            self._wake()
            return
        no_responders = parts[0] == b"HMSG"
        if no_responders:
            # No process of ours sends headers to another: apart from nats-server's own report they are those of what JetStream
            # stores, which a login that may read it can have sent to any subject, past its permissions.
            headers, payload = payload[: int(parts[-2])].tobytes(), payload[int(parts[-2]) :]
            if payload or not headers.startswith(_NO_RESPONDERS) or b"Nats-Stream" in headers:
                return self._forged.drop(parts[1].decode(errors="replace"), "it has headers, as what JetStream sends")
            reply = parts[3].decode() if len(parts) == 6 else ""
        else:
            reply = parts[3].decode() if len(parts) == 5 else ""
        try:
            on_message(parts[1].decode(), reply, payload, no_responders)
        except Exception:  # one bad message must not take the connection down
            log.exception("a message on %s could not be handled", parts[1].decode(errors="replace"))
