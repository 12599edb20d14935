"""The HTTP port: which operations it has, and its server.

It is served before NATS and etcd are reached. Until then the operations that need them are refused, and all others are there.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, NoReturn, cast

from dynamo.common.errors import Unavailable
from dynamo.common.http.server import HttpServer
from dynamo.frontend.api.console.operations import Console, console_operations
from dynamo.frontend.api.guard import Guard
from dynamo.frontend.api.http.app import HttpApp
from dynamo.frontend.api.http.exchange import HttpSettings
from dynamo.frontend.api.http.guard import HttpGuard
from dynamo.frontend.api.http.management.adapters import adapter_operations
from dynamo.frontend.api.http.management.names import name_operations
from dynamo.frontend.api.http.management.routing import routing_operations
from dynamo.frontend.api.http.management.server import (
    Links,
    health_operations,
    metrics_operations,
    model_operations,
    process_operations,
)
from dynamo.frontend.api.http.management.usage import usage_operations
from dynamo.frontend.api.http.openapi import openapi_operations
from dynamo.frontend.api.http.operation import Operation
from dynamo.frontend.api.http.server import serve_http
from dynamo.frontend.api.http.unknown_fields import UnknownFields
from dynamo.frontend.api.openai.batches.batch import Batches
from dynamo.frontend.api.openai.batches.files import Files
from dynamo.frontend.api.openai.batches.operations import BatchOperations
from dynamo.frontend.api.openai.batches.runner import BatchRunner
from dynamo.frontend.api.openai.operations import read_request_template
from dynamo.frontend.api.openai.store.background import BackgroundResponses
from dynamo.frontend.api.openai.store.owned import Storage
from dynamo.frontend.api.openai.store.quota import StoredBytes
from dynamo.frontend.api.openai.store.stored import StoredResponses
from dynamo.frontend.api.openai.to_text import RequestTemplate
from dynamo.frontend.api.operations import protocol_operations
from dynamo.frontend.router.select import effective_mode
from dynamo.frontend.wiring.parts import PortParts
from dynamo.frontend.wiring.plane import Reached


class _NotReached:
    """Stands for what has not been reached yet: a request that uses it is refused."""

    def __getattr__(self, name: str) -> NoReturn:
        raise Unavailable("the server is starting: it has no connection to NATS yet")


_STARTING = Reached(**dict.fromkeys((field.name for field in fields(Reached)), cast(Any, _NotReached())))
"""Operations made with it declare what the later ones do: routing, authorization and `/openapi.json` are whole from the start."""


class HttpApi:
    """The operations of the HTTP port, and what is carried out for them beside requests."""

    def __init__(
        self, parts: PortParts, settings: HttpSettings, guard: Guard, links: Links, template: RequestTemplate, reached: Reached
    ) -> None:
        config, metrics = parts.config, parts.metrics.frontend
        quota, namespace = StoredBytes(guard.stored_bytes), config.namespace
        responses, kept = (Storage(records, namespace, quota=quota) for records in (reached.responses, reached.batches))
        stored = StoredResponses(responses, reached.response_changes, metrics, by_default=config.responses.store)
        self.background = BackgroundResponses(stored)
        kserve = replace(parts.kserve, settings=reached.settings)
        protocols = protocol_operations(
            reached.plane, parts.readiness, config.text, kserve=kserve, background=self.background, template=template
        )
        by_path = {operation.path: operation for operation in protocols if operation.method == "POST"}
        files, batches = Files(kept), Batches(kept)
        self.batches = BatchRunner(files, batches, reached.batch_leases, by_path, settings, guard.account_named, metrics)
        batched = BatchOperations(files, batches, self.batches.poke).operations()
        self.operations = http_operations(parts, links, reached, [*protocols, *batched])


@dataclass(frozen=True, slots=True)
class HttpSide:
    """The HTTP port."""

    server: HttpServer
    metrics_port: int | None
    """The port of `--prometheus-port`, if it is open."""
    app: HttpApp
    make_api: Callable[[Reached], HttpApi]

    def attach(self, reached: Reached) -> HttpApi:
        """Carry out all operations from now on."""
        api = self.make_api(reached)
        self.app.attach(api.operations)
        return api


@asynccontextmanager
async def open_http(parts: PortParts, guard: Guard, links: Links) -> AsyncIterator[HttpSide]:
    """Serve HTTP until the context is left. Raises ConfigError for a port, certificate or template that cannot be used."""
    config, metrics, descriptors = parts.config, parts.metrics, parts.descriptors
    unknown_fields = UnknownFields(refuse=config.http.strict_fields, count=metrics.frontend.unknown_field)
    settings = HttpSettings(
        options=config.http, overload=config.overload_status, capacity=parts.capacity, unknown_fields=unknown_fields
    )
    make_api = partial(HttpApi, parts, settings, guard, links, read_request_template(config.text.request_template))
    app = HttpApp(make_api(_STARTING).operations, settings, HttpGuard(guard, config.http), metrics.frontend.refused)
    async with AsyncExitStack() as stack:
        metrics_port = None
        if config.prometheus.port is not None:
            options = replace(config.http, host=config.prometheus.host, port=config.prometheus.port)
            monitoring = _monitoring_operations(parts, links)
            monitored = HttpApp(monitoring, settings, HttpGuard(guard, options), metrics.frontend.refused)
            port = serve_http(options, monitored, flag="--prometheus-port", share_port=parts.share_port, descriptors=descriptors)
            metrics_port = (await stack.enter_async_context(port)).port
        observer = metrics.http_connections
        port = serve_http(config.http, app, share_port=parts.share_port, observer=observer, descriptors=descriptors)
        yield HttpSide(await stack.enter_async_context(port), metrics_port, app, make_api)


def http_operations(parts: PortParts, links: Links, reached: Reached, protocols: Iterable[Operation]) -> list[Operation]:
    """Return all operations of the HTTP port, with those of `protocols`."""
    plane, readiness, has_admin_api = reached.plane, parts.readiness, parts.config.http.admin_api
    operations = [
        *_monitoring_operations(parts, links),
        *process_operations(),
        *model_operations(plane, readiness, time.time()),
        *adapter_operations(plane),
        *protocols,
        *_console_operations(parts, reached),
        *(routing_operations(plane, reached.control) if has_admin_api else ()),
        *(name_operations(reached.names) if has_admin_api else ()),
        *(usage_operations(reached.usage) if has_admin_api else ()),
    ]
    return [*operations, *openapi_operations(operations)]


def _monitoring_operations(parts: PortParts, links: Links) -> list[Operation]:
    """Return those that `--prometheus-port` has, too."""
    return [
        *health_operations(parts.readiness, links),
        *(metrics_operations(parts.metrics.scrape) if parts.config.prometheus.enabled else ()),
    ]


def _console_operations(parts: PortParts, reached: Reached) -> list[Operation]:
    config = parts.config
    if not config.http.console:
        return []
    console = Console(
        reached.plane,
        parts.readiness,
        reached.loads,
        reached.targets,
        config.namespace,
        effective_mode(config.router).value,
        explains=config.http.admin_api,
        asks_keys=config.access.keys_file is not None,
        processes=config.processes,
    )
    return console_operations(console)
