"""A frontend process: its parts in the order in which they start, and, backwards, end.

    HTTP (alive, not ready) → etcd, NATS → the data plane → gRPC (ready as soon as a worker is there)

On SIGTERM: report not ready, serve on for a moment until load balancers have noticed, accept nothing new, finish running requests
within the drain timeout, close. A second signal ends the process at once.

To run a frontend inside another program:

    async with serve_frontend(FrontendConfig(grpc=GrpcOptions(enabled=True))) as frontend:
        print(frontend.grpc_port, [card.name for card in frontend.plane.cards()])
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from dynamo.common.config import ConfigError
from dynamo.common.errors import InvalidRequest, Unavailable
from dynamo.common.etcd.config import check_etcd
from dynamo.common.http.accepting import Descriptors, raise_open_files
from dynamo.common.http.server import HttpServer
from dynamo.common.lifecycle import freeze_garbage, stop_on_signal
from dynamo.common.messaging.nats.login import check_nats
from dynamo.common.process.background import running, start
from dynamo.common.process.memory import Trimmer
from dynamo.frontend.api.capacity import Capacity
from dynamo.frontend.api.guard import make_guards
from dynamo.frontend.api.health import Readiness
from dynamo.frontend.api.kserve.server import open_kserve
from dynamo.frontend.api.openai.store.background import BackgroundResponses
from dynamo.frontend.api.rpc.server import GrpcServer, check_grpc
from dynamo.frontend.api.rpc.streams import StreamDrain
from dynamo.frontend.config import FrontendConfig
from dynamo.frontend.security.ledger import Ledger
from dynamo.frontend.serving.data_plane import DataPlane
from dynamo.frontend.wiring.grpc import open_grpc
from dynamo.frontend.wiring.http import open_http
from dynamo.frontend.wiring.metrics import Metrics
from dynamo.frontend.wiring.parts import PortParts
from dynamo.frontend.wiring.picker import PORT_FLAG, open_picker
from dynamo.frontend.wiring.plane import open_links, open_plane

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Frontend:
    """A frontend that serves."""

    http_port: int
    grpc_port: int | None
    """None without the gRPC side."""
    metrics_port: int | None
    """None without `--prometheus-port`."""
    picker_port: int | None
    """None without `--endpoint-picker`."""
    plane: DataPlane
    readiness: Readiness


async def run(config: FrontendConfig, *, metrics_folder: str | None = None) -> None:
    """Serve until SIGINT or SIGTERM, which may come while the process still waits for NATS or etcd.

    Raises ConfigError for a port, certificate or credential that cannot be used. With `metrics_folder` this is one of several
    processes on the same ports, whose metrics are added up.
    """
    stop = stop_on_signal()
    starting = asyncio.timeout(None)
    try:
        async with running(_expire(starting, stop), "stop"), running(Trimmer().run(), "freed memory"), AsyncExitStack() as stack:
            async with starting:
                await stack.enter_async_context(serve_frontend(config, metrics_folder=metrics_folder))
            freeze_garbage()
            await stop.wait()
    except TimeoutError:
        if not starting.expired():
            raise
        log.info("stopped before the start was complete")
    except (Unavailable, InvalidRequest) as error:
        raise ConfigError(str(error)) from error


@asynccontextmanager
async def serve_frontend(config: FrontendConfig, *, metrics_folder: str | None = None) -> AsyncIterator[Frontend]:
    """Serve a frontend for the body; then drain, bounded by `config.settle_s` and `config.drain_timeout_s`.

    Entering waits until NATS and etcd have been reached, however long that takes; the HTTP side is up before, and not ready.
    Raises ConfigError for a port or certificate that cannot be used, Unavailable or InvalidRequest if NATS or etcd refuse us.
    """
    check_nats(config.nats)
    check_etcd(config.etcd)
    metrics, drain = Metrics(metrics_folder), StreamDrain()
    folder = Path(metrics_folder) if metrics_folder else None
    with _plain_errors():
        async with AsyncExitStack() as stack:
            http_guard, grpc_guard = make_guards(config, Ledger(counted=metrics.frontend.key_used))
            accounts = http_guard.accounts
            if accounts is not None:
                await stack.enter_async_context(running(accounts.follow(), "keys"))
            parts = PortParts(
                config=config,
                metrics=metrics,
                readiness=Readiness(strict=config.kserve.strict_readiness),
                capacity=Capacity(config.capacity),
                descriptors=Descriptors(raise_open_files()),
                kserve=await stack.enter_async_context(open_kserve(config.kserve, folder, config.grpc.max_message_bytes)),
                share_port=metrics_folder is not None,
            )
            if config.grpc.wanted:
                check_grpc(config.grpc, share_port=parts.share_port)
            if config.endpoint_picker.enabled:
                check_grpc(config.picker_grpc, share_port=parts.share_port, flag=PORT_FLAG)
            links = await stack.enter_async_context(open_links(config))
            http = await stack.enter_async_context(open_http(parts, http_guard, links))
            limits = None if accounts is None else accounts.fleet
            await stack.enter_async_context(metrics.following(links, limits))
            reached = await stack.enter_async_context(open_plane(config, links, metrics, accounts))
            grpc = await stack.enter_async_context(open_grpc(parts, grpc_guard, reached, drain))
            picker = await stack.enter_async_context(open_picker(parts, http_guard, reached, drain))
            api = http.attach(reached)
            parts.readiness.attach(reached.plane)
            batches = start(api.batches.run(), "batches")
            servers = [server for server in (grpc, picker) if server is not None]
            stack.push_async_callback(_drain, parts, drain, http.server, servers, api.background, batches)
            grpc_port = None if grpc is None else grpc.port
            picker_port = None if picker is None else picker.port
            yield Frontend(http.server.port, grpc_port, http.metrics_port, picker_port, reached.plane, parts.readiness)


async def _drain(
    parts: PortParts,
    drain: StreamDrain,
    http: HttpServer,
    servers: Sequence[GrpcServer],
    background: BackgroundResponses,
    batches: asyncio.Task[None],
) -> None:
    config = parts.config
    parts.readiness.start_draining()
    http.start_draining()
    await asyncio.sleep(config.settle_s)  # load balancers that watch the readiness send nothing more by then
    log.info("draining")
    batches.cancel()  # others go on with them
    await asyncio.wait([batches])
    loop = asyncio.get_running_loop()
    drained_by = loop.time() + config.drain_timeout_s
    drain.start()
    async with asyncio.TaskGroup() as stops:
        stops.create_task(http.stop(config.drain_timeout_s))
        for server in servers:
            stops.create_task(server.stop(config.drain_timeout_s))
    await background.drain(max(0.0, drained_by - loop.time()))


@contextlib.contextmanager
def _plain_errors() -> Iterator[None]:
    """Raise the one error inside a group as itself: callers need not know that tasks run side by side in here."""
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
