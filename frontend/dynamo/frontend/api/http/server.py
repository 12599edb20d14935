"""The HTTP port, which is up from the start of the process until its end.

operations = [*health_operations(readiness, links), *metrics_operations(render), …]
async with serve_http(options, HttpApp(operations, settings, guard)) as server: ...
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from dynamo.common.http.accepting import Descriptors
from dynamo.common.http.connection import HttpLimits
from dynamo.common.http.served import App
from dynamo.common.http.server import ConnectionObserver, HttpServer, serve_app
from dynamo.common.lifecycle import open_listener
from dynamo.common.security.tls import server_context
from dynamo.frontend.config import HttpOptions

_log = logging.getLogger(__name__)


def limits_of(options: HttpOptions) -> HttpLimits:
    return HttpLimits(
        max_connections=options.max_connections,
        max_head_bytes=options.max_head_bytes,
        head_timeout_s=options.head_timeout_s,
        idle_timeout_s=options.idle_timeout_s,
        min_body_bytes_per_s=options.min_body_bytes_per_s,
        unread_timeout_s=options.unread_timeout_s,
    )


@asynccontextmanager
async def serve_http(
    options: HttpOptions,
    app: App,
    *,
    flag: str = "--http-port",
    share_port: bool = False,
    observer: ConnectionObserver | None = None,
    descriptors: Descriptors | None = None,
) -> AsyncIterator[HttpServer]:
    """Serve `app` until the context is left. Raises ConfigError if the port, set by `flag`, or the certificate cannot be used."""
    context = None if options.tls is None else server_context(options.tls)
    listener = open_listener(options.host, options.port, flag=flag, reuse_port=share_port)
    async with serve_app(listener, app, context, limits_of(options), observer, descriptors) as server:
        _log.info("HTTP on %s:%d, %s", options.host, server.port, "no TLS" if context is None else "TLS")
        yield server
