"""Connections of a process, counted from when they are accepted: how many it may have, and the handshakes of TLS."""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

from dynamo.common.process.background import Tasks
from dynamo.common.process.turns import LoopTurns
from dynamo.common.security.paced_tls import ENCRYPTED, EncryptedConnection, paced

_log = logging.getLogger(__name__)

P = TypeVar("P", bound=asyncio.BaseProtocol)

OTHER_FILES = 256
"""File descriptors that are left for everything but the connections of servers."""
_FEWEST = 16
_HANDSHAKE_S = 10.0
_ACCEPTED_AT_ONCE = 64
_TURNS_TO_ACCEPT = 4
"""Turns of the event loop from a connection in the kernel to its protocol."""
_PAUSE_S = 1.0
"""After the system had no descriptor, or no memory, for a connection."""
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class Descriptors:
    """The file descriptors that the servers of a process may use for connections, all together."""

    def __init__(self, open_files: int) -> None:
        """`open_files`: the limit of the process."""
        self._left = max(_FEWEST, open_files - OTHER_FILES)

    def take(self) -> bool:
        """Return whether there was one left, which is in use from then on."""
        if self._left <= 0:
            return False
        self._left -= 1
        return True

    def give_back(self) -> None:
        self._left += 1


class TlsListener(Generic[P]):
    """Accepts the connections of a TLS port.

    An event loop's own server tells a protocol of its connection after the handshake, so a client that connects and says nothing
    would use a descriptor that is not counted.
    """

    def __init__(
        self, listener: socket.socket, tls: ssl.SSLContext, accepted: Callable[[], P | None], failed: Callable[[P], None]
    ) -> None:
        """`accepted` returns the protocol of a new connection, None if it is to be closed; `failed` is called with one whose
        handshake has failed, and which does not learn of its connection.
        """
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._tls = paced(tls, LoopTurns(self._loop.call_soon), LoopTurns(self._loop.call_soon))
        self._accepted = accepted
        self._failed = failed
        self._handshakes = Tasks()
        self._pause: asyncio.TimerHandle | None = None
        self._is_closed = False
        listener.setblocking(False)
        self._loop.add_reader(listener, self._accept)

    def close(self) -> None:
        """Accept nothing more, and end the handshakes. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._loop.remove_reader(self._listener)
        if self._pause is not None:
            self._pause.cancel()
        self._listener.close()
        for handshake in self._handshakes:
            handshake.cancel()

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _EXHAUSTED:
                    raise
                _log.error("no connection can be accepted for now: %s", error)
                self._loop.remove_reader(self._listener)
                self._pause = self._loop.call_later(_PAUSE_S, self._resume)
                return
            protocol = self._accepted()
            if protocol is None:
                connection.close()
            else:
                self._handshakes.start(self._shake_hands(connection, protocol), "TLS handshake")

    def _resume(self) -> None:
        self._loop.add_reader(self._listener, self._accept)

    async def _shake_hands(self, connection: socket.socket, protocol: P) -> None:
        connection.setblocking(False)
        with suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        encrypted = EncryptedConnection()
        ENCRYPTED.set(encrypted)
        early = _Early()
        is_open = is_connected = False
        try:
            await self._loop.connect_accepted_socket(lambda: encrypted, connection)  # closes the socket if it fails
            is_connected = True
            secured = await self._loop.start_tls(
                encrypted.transport, early, self._tls, server_side=True, ssl_handshake_timeout=_HANDSHAKE_S
            )
            if secured is not None and not early.is_lost:
                is_open = True
                early.hand_over(protocol, secured)
        except (OSError, EOFError) as error:  # of TLS, too: what clients do wrong
            _log.debug("a TLS handshake failed: %s", error)
        finally:
            if not is_open:
                if is_connected:
                    encrypted.transport.abort()
                self._failed(protocol)


class _Early(asyncio.Protocol):
    """Keeps what comes in the turn of the event loop in which a handshake ends, until the connection has its protocol."""

    def __init__(self) -> None:
        self.is_lost = False
        self._data = bytearray()
        self._is_eof = False

    def data_received(self, data: bytes) -> None:
        self._data += data

    def eof_received(self) -> None:
        self._is_eof = True

    def connection_lost(self, error: Exception | None) -> None:
        self.is_lost = True

    def hand_over(self, protocol: asyncio.BaseProtocol, transport: asyncio.Transport) -> None:
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        if self._data and not transport.is_closing():
            if isinstance(protocol, asyncio.BufferedProtocol):
                _fill(protocol, memoryview(self._data))
            elif isinstance(protocol, asyncio.Protocol):
                protocol.data_received(bytes(self._data))
        if self._is_eof and isinstance(protocol, asyncio.Protocol | asyncio.BufferedProtocol):
            protocol.eof_received()


def _fill(protocol: asyncio.BufferedProtocol, data: memoryview) -> None:
    while data:
        buffer = memoryview(protocol.get_buffer(len(data)))
        count = min(len(buffer), len(data))
        buffer[:count] = data[:count]
        protocol.buffer_updated(count)
        data = data[count:]


async def close_listener(listener: asyncio.Server | TlsListener[P]) -> None:
    """Stop listening once the connections that the kernel has accepted are served: it would reset those that it still holds."""
    for _ in range(_TURNS_TO_ACCEPT):
        await asyncio.sleep(0)
    listener.close()


def raise_open_files() -> int:
    """Raise the limit of open files as far as the system permits, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or soft < hard:
        wanted = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
        if soft < wanted:
            with suppress(ValueError, OSError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
                soft = wanted
    return soft
