"""One HTTP port, served inside the process's event loop. uvicorn installs no signal handlers: the process's own decide."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import uvicorn

from dynamo.common.lifecycle import within

if TYPE_CHECKING:
    from starlette.types import ASGIApp


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@dataclass(frozen=True, slots=True)
class HttpServer:
    """A port that is being served."""

    port: int
    _server: _Server
    _task: asyncio.Task[None]

    async def stop(self, grace_s: float) -> None:
        """Accept no new requests; running ones may finish for `grace_s` seconds. Idempotent."""
        self._server.config.timeout_graceful_shutdown = max(1, round(grace_s))
        self._server.should_exit = True
        await within(grace_s + 2.0, asyncio.shield(self._task), "the HTTP server's end")


@asynccontextmanager
async def serve_asgi(listener: socket.socket, app: ASGIApp, tls: ssl.SSLContext | None = None) -> AsyncIterator[HttpServer]:
    """Serve `app` on a listening socket until the context is left, which cuts requests that still run."""
    config = uvicorn.Config(
        app,
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=1,
        ssl_context_factory=None if tls is None else lambda config, default: tls,
    )
    server = _Server(config)
    async with asyncio.TaskGroup() as tasks:  # a server that breaks down takes the process with it
        task = tasks.create_task(server.serve(sockets=[listener]), name="HTTP server")
        http = HttpServer(listener.getsockname()[1], server, task)
        try:
            yield http
        finally:
            await http.stop(0.0)
            if not task.done():
                task.cancel()
