"""A connection to NATS.

nats-py connects, authenticates, pings, and carries JetStream. The request plane goes past it: nats-py copies a payload about six
times on its way through, and spends more on a message than the rest of a small request costs. So the connection brings its own
transport (`socket_transport`), which nats-py drives. Fast subscriptions are read out of its receive buffer, and publishing
writes to the same socket.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from nats.aio.client import Client

from dynamo.common.errors import InvalidRequest, Unavailable
from dynamo.common.messaging.buffers import Body
from dynamo.common.messaging.nats.login import check_nats, current_secret, nats_tls_context
from dynamo.common.messaging.nats.socket_transport import FAST_KEY, RECEIVE_BYTES, OnMessage, SocketTransport
from dynamo.common.options import NatsOptions
from dynamo.common.process.background import running

__all__ = ["Connection", "OnMessage", "Subscription", "connect_nats"]

log = logging.getLogger(__name__)

_SOON_S = 0.001
_ATTEMPT_S = 10.0
"""A client that does not connect within this time is replaced by one that reads the credentials anew."""
_CLOSE_S = 2.0
_DEFAULT_MAX_PAYLOAD = 1024 * 1024
"""As in nats-server, which says so itself when it greets us."""


class _NatsClient(Client):
    """nats-py's client, whose read loop survives the pong to a ping that is not waited for any more."""

    async def _process_pong(self) -> None:
        if self._pongs and self._pongs[0].done():
            # A flush that was cancelled: nats-py would fail to set its result, log that, and read nothing more.
            self._pongs[0] = asyncio.get_running_loop().create_future()
        await super()._process_pong()


class Connection:
    """A NATS connection that comes back by itself. Use `connect_nats`.

    nats-py gives a client up for good on nearly any error that nats-server reports, on an expired login for one. So clients do
    not reconnect: each time a connection is lost, a new client connects, reads credentials and certificates again, and
    subscribes to what was subscribed to. While there is no connection `publish_nowait` refuses; nothing is replayed later
    behind the caller's back.
    """

    def __init__(self, options: NatsOptions, name: str, *, role: str = "", messages_per_turn: int | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self.name = name
        self.opened_at = float("-inf")
        """When the connection was first made, on the loop's clock."""
        self.reconnected_at = float("-inf")
        """When the connection last came back, on the loop's clock."""
        self._last_heard_at = self._loop.time()
        """When an earlier connection sent its last byte."""
        self.max_payload = _DEFAULT_MAX_PAYLOAD
        """Bytes that nats-server takes in one message."""
        self._options = options
        self._inbox_prefix = options.inbox_prefix or "_".join(filter(None, ("_INBOX", role)))
        self._messages_per_turn = messages_per_turn
        self._fast: dict[bytes, OnMessage] = {}
        self._subscriptions: dict[bytes, str] = {}
        self._last_key = 0
        self._client: Client = _NatsClient()
        self._transport = SocketTransport(self._fast)
        self._is_closed = False
        self._is_up = False
        self._connected = asyncio.Event()
        self._lost = asyncio.Event()
        self._pings: set[asyncio.Future[bool]] = set()
        self._on_reconnect: list[Callable[[], None]] = []
        self._delayed: list[bytes] = []
        """Pieces of what `publish_soon` was given and has not gone out."""
        self._delayed_timer: asyncio.TimerHandle | None = None
        self._last_warning = ""

    def __repr__(self) -> str:
        state = "connected" if self.is_connected else "closed" if self._is_closed else "connecting"
        return f"<Connection {self.name!r} {state}, {len(self._subscriptions)} subscriptions>"

    @property
    def client(self) -> Client:
        """nats-py's client of the present connection, for JetStream. Another one after a reconnect: do not keep it."""
        return self._client

    @property
    def is_connected(self) -> bool:
        return self._is_up and self._transport.is_open

    @property
    def last_read_at(self) -> float:
        """When nats-server last sent a byte, on the loop's clock. It is pinged every `ping_interval_s`."""
        return self._transport.last_read_at

    @property
    def is_silent(self) -> bool:
        """Whether nats-server owes us the response to a ping: then silence of others says nothing about them."""
        return self._loop.time() - self.last_read_at > 1.5 * self._options.ping_interval_s

    @property
    def away_s(self) -> float:
        """For how many seconds nats-server has not been heard; 0 while it responds."""
        if self.is_connected and not self.is_silent:
            return 0.0
        return self._loop.time() - max(self._last_heard_at, self.last_read_at)

    def ping(self) -> asyncio.Future[bool]:
        """Return a future that is done when all that nats-server has sent by now has been read and handled.

        It is cancelled when the connection is lost.
        """
        pong: asyncio.Future[bool] = self._loop.create_future()
        if not self.is_connected:
            pong.cancel()
            return pong
        self._pings.add(pong)
        pong.add_done_callback(self._pings.discard)
        self._client._pongs.append(pong)
        self._transport.write(b"PING\r\n")
        return pong

    async def connected(self) -> None:
        """Return once there is a connection."""
        await self._connected.wait()

    async def lost(self) -> None:
        """Return once there is none."""
        await self._lost.wait()

    def on_reconnect(self, callback: Callable[[], None]) -> None:
        """Call `callback` each time the connection has come back and subscriptions are restored."""
        self._on_reconnect.append(callback)

    # publishing

    def publish_soon(self, subject: str, payload: bytes, reply: str = "") -> bool:
        """As `publish_nowait`, but together with what is sent next, or a millisecond later: for what is not urgent.

        Each write wakes nats-server, and each of its writes a reader; together they cost hardly more than one.
        """
        if not self.is_connected or self._is_too_large(subject, len(payload)):
            return False
        self._delayed += (_head(subject, reply, len(payload)), payload, b"\r\n")
        if self._delayed_timer is None:
            self._delayed_timer = self._loop.call_later(_SOON_S, self._send_delayed)
        return True

    def _send_delayed(self) -> None:
        self._delayed_timer = None
        if self._delayed:
            self._transport.write(b"".join(self._delayed))  # does nothing without a connection
            self._delayed.clear()

    def publish_nowait(self, subject: str, payload: Body, reply: str = "") -> bool:
        """Hand one message to the socket. Return False, and send nothing, without a connection or above `max_payload`."""
        if not self.is_connected:
            return False
        if isinstance(payload, bytes | bytearray | memoryview):
            payload = (payload,)
        size = sum(map(len, payload))
        if size > self.max_payload:
            return not self._is_too_large(subject, size)
        head = _head(subject, reply, size)
        if size <= RECEIVE_BYTES:
            self._transport.write(b"".join((*self._delayed, head, *payload, b"\r\n")))
        else:
            self._transport.writelines((*self._delayed, head, *payload, b"\r\n"))
        self._delayed.clear()
        return True

    def _is_too_large(self, subject: str, size: int) -> bool:
        """nats-server would end the connection."""
        if size <= self.max_payload:
            return False
        log.error("a message of %d bytes on %s is not sent: nats-server takes at most %d", size, subject, self.max_payload)
        return True

    # subscribing

    async def subscribe(self, subject: str, on_message: OnMessage) -> Subscription:
        """Call `on_message`, synchronously, for each message on `subject`. The subscription survives reconnects.

        Returns when nats-server has it; without a connection at once. Raises Unavailable if this connection was closed.
        """
        if self._is_closed:
            raise Unavailable(f"{subject} cannot be subscribed to: the connection to NATS is closed")
        self._last_key += 1
        key = FAST_KEY + b"%d" % self._last_key
        self._fast[key] = on_message
        self._subscriptions[key] = subject
        if self.is_connected:
            self._transport.write(_subscribe(subject, key))
            try:
                await asyncio.wait({self.ping()})  # if the connection is lost, it is subscribed to with the next one
            except asyncio.CancelledError:
                self._unsubscribe(key)
                raise
        return Subscription(self, key)

    @asynccontextmanager
    async def subscribed(self, subject: str, on_message: OnMessage) -> AsyncIterator[None]:
        """Subscribe while the body runs. Raises as `subscribe` does."""
        subscription = await self.subscribe(subject, on_message)
        try:
            yield
        finally:
            await subscription.close()

    def _unsubscribe(self, key: bytes) -> None:
        self._fast.pop(key, None)
        if self._subscriptions.pop(key, None) is not None and self.is_connected:
            self._transport.write(b"UNSUB %b\r\n" % key)

    # staying connected

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """Connect for the body, and close the connection at its end. Enters when it stands, however long that takes."""
        try:
            await self._connect()
            self.opened_at = self._loop.time()
            self._up()
            async with running(self._keep(), "the NATS connection"):
                yield
        finally:
            await self.close()

    async def _keep(self) -> None:
        """Connect again whenever the connection is lost, until cancelled or closed."""
        while True:
            await self._watch()
            if self._is_closed:
                return
            self._down()
            log.warning("the NATS connection is lost; reconnecting")
            await self._discard(self._client, self._transport)
            await self._connect()
            log.info("the NATS connection is back")
            self.reconnected_at = self._loop.time()
            self._up()
            for callback in self._on_reconnect:
                callback()

    async def _watch(self) -> None:
        """Return when the socket is gone; abort it when nats-server has been silent for too long."""
        interval_s = self._options.ping_interval_s / 2
        while not self._transport.lost.is_set():
            slept_at = self._loop.time()
            with suppress(TimeoutError):
                async with asyncio.timeout(interval_s):
                    await self._transport.lost.wait()
            now = self._loop.time()
            if now - slept_at > 2 * interval_s:
                continue  # it was this process that hung: what has come meanwhile is read first
            if now - max(self.last_read_at, self._transport.opened_at) > self._options.silence_s:
                log.warning("nats-server has been silent for %.1f s; the connection is given up", self._options.silence_s)
                self._transport.abort()
                await self._transport.lost.wait()

    async def _connect(self) -> None:
        """Try until a connection stands, is logged in and has all subscriptions."""
        while True:
            client = _NatsClient()
            try:
                tls = nats_tls_context(self._options)
                transport = SocketTransport(
                    self._fast,
                    demands_tls=tls is not None,
                    has_certificate=self._options.tls_cert_file is not None,
                    messages_per_turn=self._messages_per_turn,
                )
                client._transport = transport
            except InvalidRequest as error:  # a certificate that is just being replaced
                self._warn(error)
                await asyncio.sleep(self._options.reconnect_wait_s)
                continue
            try:
                async with asyncio.timeout(_ATTEMPT_S):
                    await self._log_in(client, tls)
                    transport.write(b"".join(_subscribe(subject, key) for key, subject in self._subscriptions.items()))
                    await client.flush()
            except Exception as error:
                # Of nats-py, of the sockets, of the files with credentials: it may be right a moment later.
                self._warn(error)
                await self._discard(client, transport)
                await asyncio.sleep(self._options.reconnect_wait_s)
                continue
            except BaseException:
                transport.abort()
                raise
            self._client, self._transport = client, transport
            self._last_warning = ""
            return

    async def _log_in(self, client: Client, tls: ssl.SSLContext | None) -> None:
        options = self._options

        async def failed(error: Exception) -> None:
            self._warn(error)

        await client.connect(
            servers=list(options.servers),
            name=self.name,
            error_cb=failed,
            allow_reconnect=False,
            max_reconnect_attempts=-1,
            reconnect_time_wait=options.reconnect_wait_s,  # type: ignore[arg-type]  # passed to asyncio.sleep
            ping_interval=options.ping_interval_s,  # type: ignore[arg-type]
            max_outstanding_pings=2**31,  # `_watch` decides when there were too many
            inbox_prefix=self._inbox_prefix,
            user=options.user,
            password=current_secret(options.password),
            token=current_secret(options.token),
            nkeys_seed=options.nkey_seed_file,
            user_credentials=options.credentials_file,
            tls=tls,
        )

    def _warn(self, error: Exception) -> None:
        """Log why there is no connection: once, while it is for the same reason."""
        text = str(error) or type(error).__name__
        if text != self._last_warning:
            self._last_warning = text
            log.warning("NATS: %s", text)

    async def _discard(self, client: Client, transport: SocketTransport) -> None:
        """End what is left of a client whose connection is gone, or never stood."""
        transport.abort()
        with suppress(Exception):  # whatever it finds: it is not used any more
            async with asyncio.timeout(_CLOSE_S):
                await client.close()

    def _up(self) -> None:
        self.max_payload = self._client.max_payload
        self._is_up = True
        self._lost.clear()
        self._connected.set()

    def _down(self) -> None:
        self._delayed.clear()  # what is late is not sent: readers see the gap and query
        self._is_up = False
        for ping in list(self._pings):
            ping.cancel()
        self._last_heard_at = max(self._last_heard_at, self.last_read_at)
        self._connected.clear()
        self._lost.set()

    def abort(self) -> None:
        """Cut the connection at once, as a failing network would. It is made again unless it was closed."""
        self._transport.abort()

    async def close(self) -> None:
        """Send what has been published, within a second, and disconnect."""
        self._is_closed = True
        self._send_delayed()
        self._down()
        with suppress(Exception):
            async with asyncio.timeout(_CLOSE_S):
                await self._client.close()
        self._transport.abort()


class Subscription:
    """A fast subscription."""

    def __init__(self, connection: Connection, key: bytes) -> None:
        self._connection = connection
        self._key = key

    async def close(self) -> None:
        """Unsubscribe. No message is delivered after this."""
        self._connection._unsubscribe(self._key)


@asynccontextmanager
async def connect_nats(
    options: NatsOptions, name: str, *, role: str = "", messages_per_turn: int | None = None
) -> AsyncIterator[Connection]:
    """Open a connection. Returns when it stands, however long that takes: a server that refuses us may accept us a moment later.

    `role`, `frontend` or `worker`: processes of other roles need no permission to read what JetStream responds to this one.
    `messages_per_turn`: messages that are handled before the event loop gets to everything else; None: all that have arrived.
    Raises InvalidRequest for an address or a file that cannot be used.
    """
    check_nats(options)
    connection = Connection(options, name, role=role, messages_per_turn=messages_per_turn)
    async with connection.opened():
        yield connection


def _head(subject: str, reply: str, size: int) -> bytes:
    """Return what precedes a message of `size` bytes."""
    return (f"PUB {subject} {reply} {size}\r\n" if reply else f"PUB {subject} {size}\r\n").encode()


def _subscribe(subject: str, key: bytes) -> bytes:
    return b"SUB %b %b\r\n" % (subject.encode(), key)
