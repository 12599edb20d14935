"""One HTTP port, served inside the process's event loop.

async with serve_app(listener, app) as server:
    ...
    server.start_draining()        # each response is the last on its connection
    await server.stop(grace_s=30)
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from email.utils import formatdate
from typing import Protocol

from dynamo.common.http.accepting import OTHER_FILES, Descriptors, TlsListener, close_listener, raise_open_files
from dynamo.common.http.connection import HttpConnection, HttpLimits
from dynamo.common.http.request import HttpRequest
from dynamo.common.http.served import App
from dynamo.common.process.background import Tasks, running

_log = logging.getLogger(__name__)

_CHECK_S = 1.0
_BACKLOG = 2048
_REFUSED = OTHER_FILES // 2
"""Connections beyond the limit that are told so; further ones are closed."""


class ConnectionObserver(Protocol):
    """Learns of the connections that a server has accepted."""

    def opened(self) -> None: ...

    def closed(self, age_s: float) -> None:
        """`age_s`: how long it was open."""
        ...


class HttpServer:
    """A port that is being served."""

    def __init__(
        self,
        app: App,
        limits: HttpLimits,
        observer: ConnectionObserver | None = None,
        descriptors: Descriptors | None = None,
    ) -> None:
        """`descriptors` are shared with the other servers of the process."""
        self.limits = limits
        self._observer = observer
        self.draining = False
        self.date = b""
        self.port = 0
        self._app = app
        self._loop = asyncio.get_running_loop()
        self._connections: dict[HttpConnection, float] = {}
        """With the time at which they were opened."""
        self._refused: set[HttpConnection] = set()
        self._handshakes: dict[HttpConnection, bool] = {}
        """Whether the connections are within the limit whose TLS handshakes have not ended."""
        self._descriptors = descriptors or Descriptors(raise_open_files())
        self._counted = 0
        self._uncounted = 0
        """Connections beyond the limit that are told so."""
        self._requests = Tasks()
        self._listener: asyncio.Server | TlsListener[HttpConnection] | None = None
        self._empty = asyncio.Event()
        """There are no connections."""
        self._empty.set()
        self._stopped = False

    @property
    def open_connections(self) -> int:
        """The number of connections that count against the limit."""
        return self._counted

    async def listen(self, listener: socket.socket, tls: ssl.SSLContext | None) -> None:
        self.port = listener.getsockname()[1]
        self._tick()
        if tls is not None:
            listener.listen(_BACKLOG)
            self._listener = TlsListener(listener, tls, self._accepted, self._failed)
        else:
            self._listener = await self._loop.create_server(self._new_connection, sock=listener, backlog=_BACKLOG)

    def _new_connection(self) -> HttpConnection:
        return HttpConnection(self, self._app, self._loop)

    def start_draining(self) -> None:
        """Let each response be the last on its connection, so that clients leave before `stop` closes the rest. Idempotent."""
        self.draining = True

    async def stop(self, grace_s: float) -> None:
        """Accept no more connections, let requests finish for `grace_s` seconds, then close all connections. Idempotent.

        A connection without a request is closed after `last_requests_s`.
        """
        self.start_draining()
        if self._stopped:
            return
        self._stopped = True
        if self._listener is not None:
            await close_listener(self._listener)
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                with suppress(TimeoutError):
                    async with asyncio.timeout(self.limits.last_requests_s):
                        await self._empty.wait()
                while self._requests or self._connections:  # a connection may end before its request, and take another one first
                    await self._requests.finish()
                    self._close_idle()
                    await self._empty.wait()
        if self._requests:
            _log.warning("%d HTTP request(s) are cut off: they did not finish within %g s", len(self._requests), grace_s)
        await self._requests.close()
        self._close_idle()
        await asyncio.sleep(0)
        for connection in (*self._connections, *self._refused):
            connection.abort()

    def _close_idle(self) -> None:
        for connection in (*self._connections, *self._refused):
            connection.close_if_idle()

    async def keep_time(self) -> None:
        """Keep the date current and apply the time limits of connections."""
        while True:
            await asyncio.sleep(min(_CHECK_S, self.limits.head_timeout_s / 4))
            self._tick()
            now = self._loop.time()
            for connection in (*self._connections, *self._refused):
                connection.check(now)

    def _tick(self) -> None:
        self.date = f"date: {formatdate(usegmt=True)}\r\n".encode()

    # Called by the listener

    def _accepted(self) -> HttpConnection | None:
        is_served = self._count()
        if is_served is None:
            return None
        connection = self._new_connection()
        self._handshakes[connection] = is_served
        return connection

    def _failed(self, connection: HttpConnection) -> None:
        is_served = self._handshakes.pop(connection, None)
        if is_served is not None:
            self._uncount(is_served=is_served)

    def _count(self) -> bool | None:
        """Count a connection; return whether it is served, False if it is told that there are too many, None if it is closed."""
        if self._counted < self.limits.max_connections and self._descriptors.take():
            self._counted += 1
            return True
        if self._uncounted < _REFUSED:
            self._uncounted += 1
            return False
        return None

    def _uncount(self, *, is_served: bool) -> None:
        if is_served:
            self._counted -= 1
            self._descriptors.give_back()
        else:
            self._uncounted -= 1

    # Called by connections

    def opened(self, connection: HttpConnection) -> bool:
        is_served = self._handshakes.pop(connection, None)
        if is_served is None:
            is_served = self._count()
        if is_served:
            self._connections[connection] = self._loop.time()
            self._empty.clear()
            if self._observer is not None:
                self._observer.opened()
            return True
        if is_served is None:
            connection.abort()
        else:
            self._refused.add(connection)
        return False

    def closed(self, connection: HttpConnection) -> None:
        opened_at = self._connections.pop(connection, None)
        if opened_at is not None:
            self._uncount(is_served=True)
            if self._observer is not None:
                self._observer.closed(self._loop.time() - opened_at)
        elif connection in self._refused:
            self._refused.remove(connection)
            self._uncount(is_served=False)
        if not self._connections:
            self._empty.set()

    def serve(self, request: HttpRequest) -> None:
        self._requests.start(request.run())


@asynccontextmanager
async def serve_app(
    listener: socket.socket,
    app: App,
    tls: ssl.SSLContext | None = None,
    limits: HttpLimits | None = None,
    observer: ConnectionObserver | None = None,
    descriptors: Descriptors | None = None,
) -> AsyncIterator[HttpServer]:
    """Serve `app` on a listening socket until the context is left, which cuts off requests that still run."""
    server = HttpServer(app, limits or HttpLimits(), observer, descriptors)
    await server.listen(listener, tls)
    try:
        async with running(server.keep_time(), "HTTP server"):
            yield server
    finally:
        await server.stop(0.0)
