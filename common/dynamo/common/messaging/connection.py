"""One NATS connection per process.

nats-py connects, authenticates, reconnects and restores subscriptions, and carries JetStream. The request plane goes past it:
nats-py copies a payload about six times on its way through, and spends more on a message than the rest of a small request
costs. So the connection brings its own transport, which nats-py drives: it reads messages of *fast* subscriptions straight
out of its receive buffer and hands them to their callback, and passes every other byte on to nats-py's parser. Publishing
writes to the same socket.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeAlias, cast
from urllib.parse import ParseResult

import msgspec
import numpy as np
from nats.aio.client import Client
from nats.aio.transport import Transport
from nats.errors import Error as NatsError

from dynamo.common.errors import Unavailable
from dynamo.common.messaging.frames import Body, Buffer
from dynamo.common.messaging.login import check_nats, nats_tls_context
from dynamo.common.options import NatsOptions

log = logging.getLogger(__name__)

OnMessage: TypeAlias = Callable[[str, str, memoryview, bool], None]
"""Called with subject, reply subject, payload, and whether nats-server says that what we published has no subscriber."""

_RECEIVE_BYTES = 128 * 1024
_SOON_S = 0.001
_NO_RESPONDERS = b"NATS/1.0 503"


def _offers_tls(info: bytes) -> bool:
    try:
        return msgspec.json.decode(info[4:].strip(), type=_Info).tls_required
    except msgspec.MsgspecError:
        return False


class _Info(msgspec.Struct):
    """What nats-server says of itself, in part."""

    tls_required: bool = False


class _SocketTransport(Transport, asyncio.BufferedProtocol):
    """The socket, seen by nats-py as its transport and by the event loop as a protocol.

    Until nats-py starts its read loop, bytes are kept for `readline`. From then on they are scanned: a message for a fast
    subscription is dispatched, anything else is queued for `read`.
    """

    def __init__(self, *, demands_tls: bool = False) -> None:
        self.fast: dict[bytes, OnMessage] = {}
        self._demands_tls = demands_tls
        self._transport: asyncio.Transport | None = None
        self._reset()

    def _reset(self) -> None:
        self._buffer = bytearray(_RECEIVE_BYTES)
        self._view = memoryview(self._buffer)
        self._begin = 0
        self._end = 0
        self._scanning = False
        self._large: memoryview | None = None
        self._large_filled = 0
        self._large_done: Callable[[memoryview], None] | None = None
        self._queued: list[bytes] = []
        self._eof = False
        self._failure: Exception | None = None
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

    @property
    def is_open(self) -> bool:
        """Whether what is written may still arrive. False as soon as the socket is gone, before nats-py has noticed."""
        return self._transport is not None and not self._eof and not self._transport.is_closing()

    def write(self, payload: bytes) -> None:
        if self.is_open:
            assert self._transport is not None
            self._transport.write(payload)

    def writelines(self, payload: Sequence[Buffer]) -> None:
        if self.is_open:
            assert self._transport is not None
            self._transport.writelines(payload)

    async def drain(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._paused:
            if self._writable is None:
                self._writable = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._writable)

    async def readline(self) -> bytes:
        while True:
            end = self._buffer.find(b"\n", self._begin, self._end)
            if end >= 0:
                line = bytes(self._view[self._begin : end + 1])
                self._begin = end + 1
                if self._demands_tls and line.startswith(b"INFO") and not _offers_tls(line):
                    # nats-py would go on in plain text, with our password: anyone on the way could make it do so.
                    raise NatsError("nats-server does not offer TLS, without which we do not log in")
                return line
            if self._eof:  # nats-py would take an empty answer to its greeting for consent
                raise ConnectionResetError(
                    f"nats-server closed the connection before it let us in ({self._failure or 'no reason'})"
                )
            await self._more()

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

    async def wait_closed(self) -> None:
        if self._closed is not None:
            await self._closed

    def at_eof(self) -> bool:
        return self._eof and not self._queued

    def __bool__(self) -> bool:
        return True

    # the event loop's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
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
        if self._large is not None:
            self._large_filled += nbytes
            if self._large_filled == self._large.nbytes:
                large, done = self._large, self._large_done
                self._large = self._large_done = None
                assert done is not None
                done(large[:-2])
            return
        self._end += nbytes
        if self._scanning:
            self._scan()
        else:
            self._wake()

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
        """Takes every whole message out of the receive buffer, and the beginning of one that is not whole yet."""
        buffer, begin, end = self._buffer, self._begin, self._end
        while begin < end and self._large is None:
            eol = buffer.find(b"\r\n", begin, end)
            if eol < 0:
                break
            first = buffer[begin]
            if first == 0x4D or (first == 0x48 and buffer[begin + 1] == 0x4D):  # MSG or HMSG
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

    def _message(self, line: bytes, begin: int, end: int) -> int:
        """Handles the message whose control line was just read and whose payload begins at `begin`; returns where it ends."""
        parts = line.split()
        size = int(parts[-1])
        on_message = self.fast.get(parts[2])
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
        no_responders = False
        if parts[0] == b"HMSG":
            headers = int(parts[-2])
            no_responders = payload[: len(_NO_RESPONDERS)] == _NO_RESPONDERS
            payload = payload[headers:]
            reply = parts[3].decode() if len(parts) == 6 else ""
        else:
            reply = parts[3].decode() if len(parts) == 5 else ""
        try:
            on_message(parts[1].decode(), reply, payload, no_responders)
        except Exception:  # one bad message must not take the connection down
            log.exception("a message on %s could not be handled", parts[1].decode(errors="replace"))


class Connection:
    """A NATS connection that comes back by itself.

    While it is away `publish_nowait` refuses; nothing is replayed later behind the caller's back.
    """

    def __init__(self, client: Client, transport: _SocketTransport, name: str) -> None:
        self.client = client
        self.name = name
        self._transport = transport
        self.is_open = True
        self.reconnected_at = float("-inf")
        """When the connection last came back, on the loop's clock."""
        self._on_reconnect: list[Callable[[], None]] = []
        self._delayed: list[bytes] = []
        """Pieces of what `publish_soon` was given and has not gone out."""
        self._delayed_timer: asyncio.TimerHandle | None = None
        self._connected = asyncio.Event()
        self._lost = asyncio.Event()

    @property
    def is_connected(self) -> bool:
        return self._transport.is_open and self._connected.is_set() and self.client.is_connected

    async def connected(self) -> None:
        """Returns once there is a connection."""
        await self._connected.wait()

    async def lost(self) -> None:
        """Returns once there is none."""
        await self._lost.wait()

    @property
    def max_payload(self) -> int:
        """Bytes that nats-server takes in one message."""
        return self.client.max_payload

    def on_reconnect(self, callback: Callable[[], None]) -> None:
        """`callback` is called each time the connection has come back and subscriptions are restored."""
        self._on_reconnect.append(callback)

    def publish_soon(self, subject: str, payload: bytes, reply: str = "") -> bool:
        """As `publish_nowait`, but together with what is sent next, or a millisecond later: for what is not urgent.

        Each write wakes nats-server, and each of its writes a reader; together they cost hardly more than one.
        """
        if not self.is_connected:
            return False
        self._delayed += (_head(subject, reply, len(payload)), payload, b"\r\n")
        if self._delayed_timer is None:
            self._delayed_timer = asyncio.get_running_loop().call_later(_SOON_S, self._send_delayed)
        return True

    def _send_delayed(self) -> None:
        self._delayed_timer = None
        if self._delayed:
            self._transport.write(b"".join(self._delayed))  # does nothing without a connection
            self._delayed.clear()

    def publish_nowait(self, subject: str, payload: Body, reply: str = "") -> bool:
        """Hands one message to the socket. False, and nothing sent, while there is no connection."""
        if not self.is_connected:
            return False
        if isinstance(payload, bytes | bytearray | memoryview):
            payload = (payload,)
        size = sum(len(piece) for piece in payload)
        head = _head(subject, reply, size)
        if size <= _RECEIVE_BYTES:
            self._transport.write(b"".join((*self._delayed, head, *payload, b"\r\n")))
        else:
            self._transport.writelines((*self._delayed, head, *payload, b"\r\n"))
        self._delayed.clear()
        return True

    async def subscribe(self, subject: str, on_message: OnMessage) -> Subscription:
        """`on_message` is called, synchronously, for each message on `subject`. The subscription survives reconnects.

        Raises Unavailable if the connection was closed.
        """
        key = str(self.client._sid + 1).encode()  # known before the server knows it, so that no message comes too early
        self._transport.fast[key] = on_message
        try:
            subscription = await self.client.subscribe(subject, cb=_unused)
        except NatsError as error:
            self._forget(key)
            raise Unavailable(f"{subject} cannot be subscribed to: {error}") from error
        assert str(subscription._id).encode() == key
        with suppress(NatsError):  # the connection was lost: it is subscribed to with the next one
            await self.client.flush()
        return Subscription(self, subscription, key)

    def _down(self) -> None:
        self._delayed.clear()  # what is late is not sent: readers see the gap and query
        self._connected.clear()
        self._lost.set()

    def _up(self) -> None:
        self._connected.set()
        self._lost.clear()
        self.reconnected_at = asyncio.get_running_loop().time()
        for callback in self._on_reconnect:
            callback()

    def _forget(self, key: bytes) -> None:
        self._transport.fast.pop(key, None)


async def _unused(message: Any) -> None:
    """nats-py wants a callback; a fast subscription's messages never get as far as that."""
    raise AssertionError(f"a message on {message.subject} went past its fast subscription")


class Subscription:
    """A fast subscription."""

    def __init__(self, connection: Connection, subscription: Any, key: bytes) -> None:
        self._connection = connection
        self._subscription = subscription
        self._key = key

    async def close(self) -> None:
        """No message is delivered after this."""
        self._connection._forget(self._key)
        if self._connection.client.is_connected:
            await self._subscription.unsubscribe()


@asynccontextmanager
async def connect_nats(options: NatsOptions, name: str) -> AsyncIterator[Connection]:
    """A connection; returns when it stands, however long that takes: a server that refuses us may know us a moment later.

    Raises InvalidRequest for a file that cannot be used, and Unavailable for what no waiting mends.
    """
    check_nats(options)
    tls = nats_tls_context(options)
    client = Client()
    transport = _SocketTransport(demands_tls=tls is not None)
    client._transport = transport
    connection = Connection(client, transport, name)

    async def down() -> None:
        if connection.is_open:
            connection._down()
            log.warning("the NATS connection is lost; reconnecting")

    async def up() -> None:
        log.info("the NATS connection is back")
        connection._up()

    async def failed(error: Exception) -> None:
        log.warning("NATS: %s", str(error) or type(error).__name__)

    try:
        await client.connect(
            servers=list(options.servers),
            name=name,
            error_cb=failed,
            disconnected_cb=down,
            reconnected_cb=up,
            max_reconnect_attempts=-1,
            reconnect_time_wait=options.reconnect_wait_s,  # type: ignore[arg-type]  # passed to asyncio.sleep
            ping_interval=options.ping_interval_s,  # type: ignore[arg-type]
            max_outstanding_pings=2,
            user=options.user,
            password=options.password,
            token=options.token,
            nkeys_seed=options.nkey_seed_file,
            user_credentials=options.credentials_file,
            tls=tls,
            drain_timeout=2,
        )
    except NatsError as error:
        raise Unavailable(f"NATS refused the connection: {error}") from error
    connection._connected.set()
    try:
        yield connection
    finally:
        connection.is_open = False
        connection._down()
        await client.close()


def _head(subject: str, reply: str, size: int) -> bytes:
    """What precedes a message of `size` bytes."""
    return (f"PUB {subject} {reply} {size}\r\n" if reply else f"PUB {subject} {size}\r\n").encode()
