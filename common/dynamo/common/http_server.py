"""One HTTP port, served inside the process's event loop.

async with serve_asgi(listener, app) as server:
    ...
    server.start_draining()        # each response is the last on its connection
    await server.stop(grace_s=30)
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from email.utils import formatdate
from typing import Protocol

from dynamo.common.asgi import ASGIApp
from dynamo.common.background import Tasks, running
from dynamo.common.http_connection import HttpConnection, HttpLimits
from dynamo.common.http_request import HttpRequest

_log = logging.getLogger(__name__)

_CHECK_S = 1.0
_BACKLOG = 2048
_HANDSHAKE_S = 10.0
OTHER_FILES = 256
"""File descriptors that are left for everything but HTTP connections."""


class ConnectionObserver(Protocol):
    """Learns of the connections that a server has accepted."""

    def opened(self) -> None: ...

    def closed(self, age_s: float) -> None:
        """`age_s`: how long it was open."""
        ...


class HttpServer:
    """A port that is being served."""

    def __init__(self, app: ASGIApp, limits: HttpLimits, observer: ConnectionObserver | None = None) -> None:
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
        self._max_connections = min(limits.max_connections, max(16, raise_open_files() - OTHER_FILES))
        self._requests = Tasks()
        self._listener: asyncio.Server | None = None
        self._quiet = asyncio.Event()
        """No request is being served."""
        self._empty = asyncio.Event()
        """There are no connections."""
        self._quiet.set()
        self._empty.set()
        self._stopped = False

    @property
    def open_connections(self) -> int:
        """The number of connections that count against the limit."""
        return len(self._connections)

    async def listen(self, listener: socket.socket, tls: ssl.SSLContext | None) -> None:
        self.port = listener.getsockname()[1]
        self._tick()
        self._listener = await self._loop.create_server(
            lambda: HttpConnection(self, self._app, self._loop),
            sock=listener,
            ssl=tls,
            backlog=_BACKLOG,
            ssl_handshake_timeout=None if tls is None else _HANDSHAKE_S,
        )

    def start_draining(self) -> None:
        """Let each response be the last on its connection, so that clients leave before `stop` closes the rest. Idempotent."""
        self.draining = True

    async def stop(self, grace_s: float) -> None:
        """Accept no more connections, let requests finish for `grace_s` seconds, then close all connections. Idempotent."""
        self.start_draining()
        if self._stopped:
            return
        self._stopped = True
        if self._listener is not None:
            self._listener.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                while self._requests or self._connections:  # a connection may end before its request, and take another one first
                    await self._quiet.wait()
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

    # Called by connections

    def opened(self, connection: HttpConnection) -> bool:
        if len(self._connections) < self._max_connections:
            self._connections[connection] = self._loop.time()
            self._empty.clear()
            if self._observer is not None:
                self._observer.opened()
            return True
        if len(self._refused) < OTHER_FILES // 2:
            self._refused.add(connection)
        else:
            connection.abort()
        return False

    def closed(self, connection: HttpConnection) -> None:
        opened_at = self._connections.pop(connection, None)
        if opened_at is not None and self._observer is not None:
            self._observer.closed(self._loop.time() - opened_at)
        self._refused.discard(connection)
        if not self._connections:
            self._empty.set()

    def serve(self, request: HttpRequest) -> None:
        self._quiet.clear()
        self._requests.start(request.run()).add_done_callback(self._served)

    def _served(self, task: asyncio.Task[None]) -> None:
        if not self._requests:  # `task` is out of them by now
            self._quiet.set()


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


@asynccontextmanager
async def serve_asgi(
    listener: socket.socket,
    app: ASGIApp,
    tls: ssl.SSLContext | None = None,
    limits: HttpLimits | None = None,
    observer: ConnectionObserver | None = None,
) -> AsyncIterator[HttpServer]:
    """Serve `app` on a listening socket until the context is left, which cuts off requests that still run."""
    server = HttpServer(app, limits or HttpLimits(), observer)
    await server.listen(listener, tls)
    try:
        async with running(server.keep_time(), "HTTP server"):
            yield server
    finally:
        await server.stop(0.0)
