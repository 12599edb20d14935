"""The HTTP port: which operations it has, and its server."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.routing import BaseRoute

from dynamo.common.http_server import HttpServer
from dynamo.frontend.api.console.fleet import LoadWatch
from dynamo.frontend.api.console.routes import Console, console_routes
from dynamo.frontend.api.guard import Guard
from dynamo.frontend.api.health import Readiness
from dynamo.frontend.api.http.exchange import HttpSettings
from dynamo.frontend.api.http.guard import HttpGuard
from dynamo.frontend.api.http.refusals import CountRefusals
from dynamo.frontend.api.http.routing_routes import RoutingControl, routing_routes
from dynamo.frontend.api.http.server import health_routes, make_app, metrics_routes, model_routes, serve_http
from dynamo.frontend.api.http_routes import text_routes
from dynamo.frontend.api.kserve.rest.routes import kserve_rest_routes
from dynamo.frontend.config import FrontendConfig
from dynamo.frontend.router.select import effective_mode
from dynamo.frontend.wiring.links import Links
from dynamo.frontend.wiring.metrics import Metrics


@asynccontextmanager
async def open_http(
    config: FrontendConfig,
    guard: Guard,
    readiness: Readiness,
    links: Links,
    loads: LoadWatch,
    control: RoutingControl,
    metrics: Metrics,
    *,
    share_port: bool,
) -> AsyncIterator[HttpServer]:
    """Serve HTTP until the context is left. Raises ConfigError for a port, certificate or template that cannot be used."""
    settings = HttpSettings.of(config.http, config.overload_status)
    routes = [
        *health_routes(readiness, links),
        *metrics_routes(metrics.render),
        *model_routes(readiness, time.time()),
        *text_routes(readiness, config.http, config.text, config.overload_status),
        *kserve_rest_routes(readiness, config.http, config.overload_status),
        *_console_routes(config, readiness, loads),
        *(routing_routes(readiness, control, settings) if config.http.admin_api else ()),
    ]
    app = HttpGuard(make_app(routes, config.overload_status), guard, settings)
    counted = CountRefusals(app, metrics.frontend.refused)
    async with serve_http(config.http, counted, share_port=share_port) as server:
        yield server


def _console_routes(config: FrontendConfig, readiness: Readiness, loads: LoadWatch) -> list[BaseRoute]:
    if not config.http.console:
        return []
    console = Console(
        readiness,
        loads,
        config.namespace,
        effective_mode(config.router).value,
        explains=config.http.admin_api,
        asks_keys=config.access.keys_file is not None,
        processes=config.processes,
    )
    return console_routes(console)
