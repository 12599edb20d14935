"""A frontend process: its parts in the order in which they start, and, backwards, end.

    HTTP (alive, not ready) → etcd, NATS → the data plane → gRPC (ready as soon as a worker is there)

On SIGTERM: say not ready, serve on for a moment until that has got around, take nothing new, finish what runs within the drain
timeout, close. A second signal ends the process at once.

To have a frontend inside a program of one's own:

    async with serve_frontend(FrontendConfig(grpc=GrpcOptions(enabled=True))) as frontend:
        print(frontend.grpc_port, [card.name for card in frontend.plane.cards()])
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial

from dynamo.common.background import running
from dynamo.common.config import ConfigError, project_version
from dynamo.common.discovery import Instance
from dynamo.common.errors import InvalidRequest, Unavailable
from dynamo.common.etcd import connect_etcd
from dynamo.common.http_server import HttpServer
from dynamo.common.lifecycle import freeze_garbage, stop_on_signal
from dynamo.common.messaging.client import RequestClient, open_client
from dynamo.common.messaging.connection import Connection, connect_nats
from dynamo.common.messaging.frames import Body, Buffer
from dynamo.common.messaging.kv_stream import KvStream
from dynamo.common.messaging.store import FileStore
from dynamo.common.model_card import ModelCard
from dynamo.common.names import Endpoint
from dynamo.common.tally import Tally
from dynamo.common.telemetry import RuntimeMetrics, make_registry, render
from dynamo.common.tracing import open_tracing
from dynamo.frontend.api.console.fleet import LoadWatch
from dynamo.frontend.api.console.routes import Console, console_routes
from dynamo.frontend.api.guard import make_guards
from dynamo.frontend.api.health import Readiness
from dynamo.frontend.api.http.exchange import HttpSettings
from dynamo.frontend.api.http.guard import HttpGuard
from dynamo.frontend.api.http.refusals import CountRefusals
from dynamo.frontend.api.http.routing_routes import RoutingControl, routing_routes
from dynamo.frontend.api.http.server import (
    LinkState,
    health_routes,
    make_app,
    metrics_routes,
    model_routes,
    serve_http,
)
from dynamo.frontend.api.http_routes import text_routes
from dynamo.frontend.api.kserve.infer import TENSOR_ENDPOINT
from dynamo.frontend.api.kserve.rest.routes import kserve_rest_routes
from dynamo.frontend.api.kserve.service import SERVICE, KserveService
from dynamo.frontend.api.kserve.stream import StreamLimits
from dynamo.frontend.api.rpc.guard import account_source, guarded
from dynamo.frontend.api.rpc.health import HEALTH_SERVICE, REFLECTION_SERVICES, HealthService, ReflectionService
from dynamo.frontend.api.rpc.metered import metered
from dynamo.frontend.api.rpc.server import GrpcServer, Handlers, check_grpc, serve_grpc
from dynamo.frontend.api.rpc.streams import StreamDrain
from dynamo.frontend.config import FrontendConfig
from dynamo.frontend.fleet.directory import Directory, open_directory
from dynamo.frontend.fleet.kv_feed import Bookings, open_kv_feed
from dynamo.frontend.fleet.kv_history import KvHistory
from dynamo.frontend.fleet.repository import open_repositories
from dynamo.frontend.fleet.siblings import open_siblings
from dynamo.frontend.metrics import FrontendMetrics, GrpcServerMetrics, RouterMetrics
from dynamo.frontend.router.affinity import SessionRouter
from dynamo.frontend.router.base import Router
from dynamo.frontend.router.explain import DecisionLog, ExplainingRouter
from dynamo.frontend.router.kv import KvRouter
from dynamo.frontend.router.load import LoadTable
from dynamo.frontend.router.measured import MeasuredRouter
from dynamo.frontend.router.select import effective_mode, follows_loads, make_router
from dynamo.frontend.router.thresholds import ThresholdTable
from dynamo.frontend.security.accounts import Account
from dynamo.frontend.serving.data_plane import DataPlane, open_data_plane
from dynamo.frontend.serving.text_models import TextModel

log = logging.getLogger(__name__)

_WATCH_S = 1.0
_FLUSH_S = 0.2


@dataclass(frozen=True, slots=True)
class Frontend:
    """A frontend that serves."""

    http_port: int
    grpc_port: int | None
    """None without the gRPC side."""
    plane: DataPlane
    readiness: Readiness


@dataclass(slots=True)
class _Links:
    """Filled as the process starts."""

    connection: Connection | None = None
    directory: Directory | None = None

    @property
    def nats(self) -> LinkState:
        if self.connection is None:
            return LinkState.CONNECTING
        return LinkState.CONNECTED if self.connection.is_connected else LinkState.DISCONNECTED

    @property
    def etcd(self) -> LinkState:
        if self.directory is None or not self.directory.ready.is_set():
            return LinkState.CONNECTING
        return LinkState.STALE if self.directory.stale else LinkState.CONNECTED


async def run(config: FrontendConfig, *, metrics_folder: str | None = None) -> None:
    """Serves until SIGINT or SIGTERM, which may come while the process still waits for NATS or etcd.

    Raises ConfigError for a port, certificate or credential that cannot be used. With `metrics_folder` this is one of several
    processes on the same ports, whose metrics are added up.
    """
    stop = stop_on_signal()
    start = asyncio.timeout(None)
    try:
        async with running(_expire(start, stop), "stop"), AsyncExitStack() as stack:
            async with start:
                await stack.enter_async_context(serve_frontend(config, metrics_folder=metrics_folder))
            freeze_garbage()
            await stop.wait()
    except TimeoutError:
        if not start.expired():
            raise
        log.info("stopped before the start was complete")
    except (Unavailable, InvalidRequest) as error:
        raise ConfigError(str(error)) from error


@asynccontextmanager
async def serve_frontend(config: FrontendConfig, *, metrics_folder: str | None = None) -> AsyncIterator[Frontend]:
    """A frontend for the body; on the way out it drains, bounded by `config.settle_s` and `config.drain_timeout_s`.

    Entering waits until NATS and etcd have been reached, however long that takes; the HTTP side is up before, and not ready.
    Raises ConfigError for a port or certificate that cannot be used, Unavailable or InvalidRequest if NATS or etcd refuse us.
    """
    config.nats.to_config().check()
    config.etcd.to_config().check()
    registry = make_registry()
    metrics, grpc_metrics = FrontendMetrics(registry), GrpcServerMetrics(registry)
    runtime = RuntimeMetrics(registry, role="frontend", version=project_version())
    readiness, links = Readiness(), _Links()
    control = RoutingControl(
        ThresholdTable(config.router.thresholds),
        DecisionLog(everything=logging.getLogger("dynamo.frontend.router.explain").isEnabledFor(logging.DEBUG)),
        follows_loads(config.router),
    )
    share_port = metrics_folder is not None
    routes = [
        *health_routes(readiness, links),
        *metrics_routes(lambda: render(registry, metrics_folder)),
        *model_routes(readiness, time.time()),
        *text_routes(readiness, config.http, config.text, config.overload_status),
        *kserve_rest_routes(readiness, config.http, config.overload_status),
    ]
    console = Console(
        readiness,
        config.namespace,
        effective_mode(config.router).value,
        explains=config.http.admin_api,
        asks_keys=config.access.keys_file is not None,
        processes=config.processes,
    )
    if config.http.console:
        routes += console_routes(console)
    if config.http.admin_api:
        routes += routing_routes(readiness, control, HttpSettings.of(config.http, config.overload_status))
    with _plain_errors():
        async with AsyncExitStack() as stack:
            http_guard, grpc_guard = make_guards(config)
            if config.grpc.wanted:
                check_grpc(config.grpc, share_port=share_port)
            http_settings = HttpSettings.of(config.http, config.overload_status)
            app = HttpGuard(make_app(routes, config.overload_status), http_guard, http_settings)
            counted = CountRefusals(app, metrics.refused)
            http = await stack.enter_async_context(serve_http(config.http, counted, share_port=share_port))
            await stack.enter_async_context(_watching(runtime, links, (metrics.tally, grpc_metrics.tally) if share_port else ()))
            tracing = await stack.enter_async_context(open_tracing(config.trace, "dynamo-frontend"))
            etcd = await stack.enter_async_context(connect_etcd(config.etcd.to_config()))
            directory = links.directory = await stack.enter_async_context(open_directory(etcd, config.namespace))
            name = f"dynamo-frontend {os.getpid()}"
            nats = links.connection = await stack.enter_async_context(connect_nats(config.nats.to_config(), name))
            client = await stack.enter_async_context(open_client(nats, config.namespace))
            console.loads = LoadWatch(nats, config.namespace, asyncio.get_running_loop().time)
            stack.push_async_callback(console.loads.close)
            store = FileStore(nats, config.cache_dir.expanduser())

            async def load_text(card: ModelCard) -> TextModel:
                from dynamo.frontend.preprocess import pipeline  # heavy; a fleet of tensor models does without

                return await pipeline.load_text_model(card, store, config.text.limits, fast_tokenizer=config.text.fast_tokenizer)

            router = await stack.enter_async_context(_router(config, control, directory, nats, client))
            router = MeasuredRouter(router, RouterMetrics(metrics))
            repositories = await stack.enter_async_context(open_repositories(etcd, config.namespace))
            plane = await stack.enter_async_context(
                open_data_plane(directory, client, nats, router, load_text, metrics, config.serving, tracing, repositories)
            )
            if not directory.ready.is_set():
                log.info("waiting for etcd")
            await directory.ready.wait()  # before, every model would be unknown
            drain = StreamDrain()
            grpc: GrpcServer | None = None
            if config.grpc.wanted:
                services = grpc_services(config, plane, readiness, drain, account_source(grpc_guard))
                services = guarded(services, grpc_guard, partial(metrics.refused, TENSOR_ENDPOINT))
                services = metered(services, grpc_metrics)
                grpc = await stack.enter_async_context(serve_grpc(config.grpc, services, share_port=share_port))
            readiness.attach(plane)
            stack.push_async_callback(_drain, config, readiness, drain, http, grpc)
            yield Frontend(http.port, None if grpc is None else grpc.port, plane, readiness)


@asynccontextmanager
async def _router(
    config: FrontendConfig, control: RoutingControl, directory: Directory, nats: Connection, client: RequestClient
) -> AsyncIterator[Router]:
    """The router that requests meet: sessions and explanations around the one that chooses."""
    options = config.router
    clock = asyncio.get_running_loop().time
    async with AsyncExitStack() as stack:
        siblings = await stack.enter_async_context(open_siblings(nats, config.namespace, control.thresholds))
        control.set_thresholds = siblings.set_thresholds
        router = await stack.enter_async_context(_choosing_router(config, control.thresholds, directory, nats, client))
        if options.session_affinity_ttl_s is not None:
            router = siblings.sessions = SessionRouter(
                router,
                options.session_affinity_ttl_s,
                options.session_affinity_mode,
                options.session_affinity_max,
                on_placed=siblings.place if options.replica_sync else None,
                clock=clock,
            )
        yield ExplainingRouter(router, control.decisions)


@asynccontextmanager
async def _choosing_router(
    config: FrontendConfig, thresholds: ThresholdTable, directory: Directory, nats: Connection, client: RequestClient
) -> AsyncIterator[Router]:
    """The router of the chosen mode, kept in step with instances and, if wanted, with other frontends."""
    clock = asyncio.get_running_loop().time
    if not follows_loads(config.router):
        yield make_router(config.router, LoadTable(), clock)
        return
    async with AsyncExitStack() as stack:
        bookings = Bookings(nats, Endpoint(namespace=config.namespace)) if config.router.replica_sync else None
        loads = LoadTable(secrets.token_hex(8), None if bookings is None else bookings.say)
        router = make_router(config.router, loads, clock, thresholds)
        follower = router if isinstance(router, KvRouter) and config.router.kv.use_kv_events else None

        async def ask(instance: Instance, verb: str, body: Body, deadline: float) -> Buffer:
            return await client.open(instance.id, instance.subject, verb, body, deadline=deadline).result()

        history: KvHistory | None = None
        if follower is not None and config.router.durable_kv_events:
            threshold, reset = config.router.snapshot_threshold, config.router.reset_states
            history = KvHistory(KvStream(nats), snapshot_threshold=threshold, reset=reset)
        await stack.enter_async_context(open_kv_feed(nats, directory, ask, follower, loads, history))
        if bookings is not None:
            await stack.enter_async_context(bookings.exchanged(loads))
        yield router


def grpc_services(
    config: FrontendConfig, plane: DataPlane, readiness: Readiness, drain: StreamDrain, account: Callable[[], Account]
) -> dict[str, Handlers]:
    """Everything on the gRPC port, by full service name."""
    limits = StreamLimits(max_requests=config.grpc.max_stream_requests, max_message_bytes=config.grpc.max_message_bytes)
    reflection = ReflectionService((SERVICE, HEALTH_SERVICE, *REFLECTION_SERVICES), drain).handlers()
    return {
        SERVICE: KserveService(plane, readiness, drain, limits, account, config.overload_status).handlers(),
        HEALTH_SERVICE: HealthService(plane, readiness).handlers(),
        **dict.fromkeys(REFLECTION_SERVICES, reflection),
    }


async def _drain(
    config: FrontendConfig, readiness: Readiness, drain: StreamDrain, http: HttpServer, grpc: GrpcServer | None
) -> None:
    readiness.start_draining()
    await asyncio.sleep(config.settle_s)  # whoever watches our readiness sends no more by then
    log.info("draining")
    drain.start()
    async with asyncio.TaskGroup() as stops:
        stops.create_task(http.stop(config.drain_timeout_s))
        if grpc is not None:
            stops.create_task(grpc.stop(config.drain_timeout_s))


@contextlib.contextmanager
def _plain_errors() -> Iterator[None]:
    """Raises the one error inside a group as itself: that tasks run side by side in here is no concern of callers."""
    try:
        yield
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
            error = error.exceptions[0]
        if error is group:
            raise
        raise error from None


async def _expire(start: asyncio.Timeout, stop: asyncio.Event) -> None:
    await stop.wait()
    with contextlib.suppress(RuntimeError):  # the start is complete
        start.reschedule(asyncio.get_running_loop().time())


@asynccontextmanager
async def _watching(runtime: RuntimeMetrics, links: _Links, tallies: Sequence[Tally]) -> AsyncIterator[None]:
    """Keeps the metrics of the links current and, for scrapes that are another process's, adds what `tallies` have counted."""

    async def watch() -> None:
        while True:
            runtime.etcd_stale.set(links.etcd is not LinkState.CONNECTED)
            runtime.nats_connected.set(links.nats is LinkState.CONNECTED)
            for tally in tallies:
                tally.flush()
            await asyncio.sleep(_FLUSH_S if tallies else _WATCH_S)

    try:
        async with running(watch(), "links"):
            yield
    finally:
        for tally in tallies:
            tally.flush()
