"""The HTTP port: which operations it has, and its server."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace

from dynamo.common.http.accepting import Descriptors
from dynamo.common.http.server import HttpServer
from dynamo.frontend.api.capacity import Capacity
from dynamo.frontend.api.console.fleet import LoadWatch
from dynamo.frontend.api.console.operations import Console, console_operations
from dynamo.frontend.api.guard import Guard
from dynamo.frontend.api.health import Readiness
from dynamo.frontend.api.http.app import HttpApp
from dynamo.frontend.api.http.exchange import HttpSettings
from dynamo.frontend.api.http.guard import HttpGuard
from dynamo.frontend.api.http.management.adapters import adapter_operations
from dynamo.frontend.api.http.management.names import name_operations
from dynamo.frontend.api.http.management.routing import RoutingControl, routing_operations
from dynamo.frontend.api.http.management.server import health_operations, metrics_operations, model_operations, process_operations
from dynamo.frontend.api.http.management.usage import usage_operations
from dynamo.frontend.api.http.openapi import openapi_operations
from dynamo.frontend.api.http.operation import Operation
from dynamo.frontend.api.http.server import serve_http
from dynamo.frontend.api.http.unknown_fields import UnknownFields
from dynamo.frontend.api.kserve.server import KserveServer
from dynamo.frontend.api.openai.batches.batch import Batches
from dynamo.frontend.api.openai.batches.files import Files
from dynamo.frontend.api.openai.batches.operations import BatchOperations
from dynamo.frontend.api.openai.batches.runner import BatchRunner
from dynamo.frontend.api.openai.store.background import BackgroundResponses
from dynamo.frontend.api.openai.store.quota import StoredBytes
from dynamo.frontend.api.operations import protocol_operations
from dynamo.frontend.config import FrontendConfig
from dynamo.frontend.router.select import effective_mode
from dynamo.frontend.wiring.links import Links
from dynamo.frontend.wiring.metrics import Metrics


@dataclass(frozen=True, slots=True)
class HttpSide:
    """The HTTP port, and what is carried out as if it had been requested there."""

    server: HttpServer
    batches: BatchRunner
    metrics_port: int | None
    """The port of `--prometheus-port`, if it is open."""


@asynccontextmanager
async def open_http(
    config: FrontendConfig,
    guard: Guard,
    readiness: Readiness,
    links: Links,
    loads: LoadWatch,
    control: RoutingControl,
    metrics: Metrics,
    capacity: Capacity,
    kserve: KserveServer,
    background: BackgroundResponses,
    quota: StoredBytes,
    descriptors: Descriptors,
    *,
    share_port: bool,
) -> AsyncIterator[HttpSide]:
    """Serve HTTP until the context is left. Raises ConfigError for a port, certificate or template that cannot be used."""
    unknown_fields = UnknownFields(refuse=config.http.strict_fields, count=metrics.frontend.unknown_field)
    settings = HttpSettings(
        options=config.http, overload=config.overload_status, capacity=capacity, unknown_fields=unknown_fields
    )
    protocols = protocol_operations(readiness, config.text, kserve=kserve, background=background)
    files = Files(links.stored_batches, config.namespace, quota=quota)
    batches = Batches(links.stored_batches, config.namespace, quota=quota)
    by_path = {operation.path: operation for operation in protocols if operation.method == "POST"}
    runner = BatchRunner(files, batches, links.leases_of_batches, by_path, settings, guard.account_named, metrics.frontend)
    monitoring = _monitoring_operations(config, readiness, links, metrics)
    operations = http_operations(
        config, readiness, links, loads, control, metrics, protocols, BatchOperations(files, batches, runner.poke)
    )
    app = HttpApp(operations, settings, HttpGuard(guard, config.http), metrics.frontend.refused)
    async with AsyncExitStack() as stack:
        metrics_port = None
        if config.prometheus.port is not None:
            options = replace(config.http, host=config.prometheus.host, port=config.prometheus.port)
            monitored = HttpApp(monitoring, settings, HttpGuard(guard, options), metrics.frontend.refused)
            port = serve_http(options, monitored, flag="--prometheus-port", share_port=share_port, descriptors=descriptors)
            metrics_port = (await stack.enter_async_context(port)).port
        port = serve_http(config.http, app, share_port=share_port, observer=metrics.http_connections, descriptors=descriptors)
        yield HttpSide(await stack.enter_async_context(port), runner, metrics_port)


def http_operations(
    config: FrontendConfig,
    readiness: Readiness,
    links: Links,
    loads: LoadWatch,
    control: RoutingControl,
    metrics: Metrics,
    protocols: Sequence[Operation],
    batches: BatchOperations,
) -> list[Operation]:
    """Return all operations of the HTTP port."""
    operations = [
        *_monitoring_operations(config, readiness, links, metrics),
        *process_operations(),
        *model_operations(readiness, time.time()),
        *adapter_operations(readiness),
        *protocols,
        *batches.operations(),
        *_console_operations(config, readiness, loads),
        *(routing_operations(readiness, control) if config.http.admin_api else ()),
        *(name_operations(readiness, links.change_names) if config.http.admin_api else ()),
        *(usage_operations(links.read_usage) if config.http.admin_api else ()),
    ]
    return [*operations, *openapi_operations(operations)]


def _monitoring_operations(config: FrontendConfig, readiness: Readiness, links: Links, metrics: Metrics) -> list[Operation]:
    """Return those that `--prometheus-port` has, too."""
    return [
        *health_operations(readiness, links),
        *(metrics_operations(metrics.scrape) if config.prometheus.enabled else ()),
    ]


def _console_operations(config: FrontendConfig, readiness: Readiness, loads: LoadWatch) -> list[Operation]:
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
    return console_operations(console)
