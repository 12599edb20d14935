"""The data plane and what it stands on: etcd, NATS, the directory, the router."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from dynamo.common.etcd import connect_etcd
from dynamo.common.messaging.jetstream.kv_stream import KvStream
from dynamo.common.messaging.jetstream.records import open_records
from dynamo.common.messaging.jetstream.store import FileStore
from dynamo.common.messaging.nats.connection import connect_nats
from dynamo.common.messaging.request_plane.client import open_client
from dynamo.common.names import leases_prefix
from dynamo.common.observability.log_settings import apply_log_settings
from dynamo.common.observability.server_settings import open_server_settings
from dynamo.common.observability.tracing import open_tracing
from dynamo.common.options import NatsOptions
from dynamo.common.shared_memory.sharing import open_shared_memory
from dynamo.frontend.api.console.fleet import LoadWatch
from dynamo.frontend.api.guard import Accounts
from dynamo.frontend.api.http.management.routing import RoutingControl
from dynamo.frontend.config import FrontendConfig
from dynamo.frontend.fleet.adapters import Adapters
from dynamo.frontend.fleet.directory import open_directory
from dynamo.frontend.fleet.event_bus import MESSAGES_PER_TURN, EventBus, open_event_bus
from dynamo.frontend.fleet.leases import open_leases
from dynamo.frontend.fleet.peers.limits import shared_limits
from dynamo.frontend.fleet.peers.response_changes import ResponseChanges
from dynamo.frontend.fleet.peers.turns import shared_turns
from dynamo.frontend.fleet.peers.usage import open_usage
from dynamo.frontend.fleet.repository import open_repositories
from dynamo.frontend.fleet.worker_streams import open_worker_streams
from dynamo.frontend.names.table import open_names
from dynamo.frontend.preprocess.text_files import open_text_files
from dynamo.frontend.serving.data_plane import DataPlane, open_data_plane
from dynamo.frontend.wiring.links import Links
from dynamo.frontend.wiring.metrics import Metrics
from dynamo.frontend.wiring.routing import open_router

BATCHES_TTL_S = 30 * 86_400.0
"""How long files and batches are kept."""

log = logging.getLogger(__name__)


@asynccontextmanager
async def open_plane(
    config: FrontendConfig,
    links: Links,
    loads: LoadWatch,
    control: RoutingControl,
    metrics: Metrics,
    accounts: Accounts | None,
) -> AsyncIterator[DataPlane]:
    """Open a data plane that has read the directory once. Waits for NATS and etcd, however long that takes.

    Fills `links`, and closes `loads` before the connection that it reads. Raises Unavailable or InvalidRequest if NATS or etcd
    refuse us.
    """
    async with AsyncExitStack() as stack:
        tracing = await stack.enter_async_context(open_tracing(config.trace, "dynamo-frontend"))
        etcd = await stack.enter_async_context(connect_etcd(config.etcd))
        directory = links.directory = await stack.enter_async_context(open_directory(etcd, config.namespace))
        nats = await stack.enter_async_context(connect_nats(config.nats, f"dynamo-frontend {os.getpid()}", role="frontend"))
        links.connection = nats
        metrics.link.follow("requests", nats)
        store = FileStore(nats, config.cache_dir.expanduser())
        written = (store, KvStream(nats)) if config.router.durable_kv_events else (store,)
        await stack.enter_async_context(open_worker_streams(nats, written))
        origin = secrets.token_hex(8) if accounts is None else accounts.fleet.origin
        if accounts is not None:
            await stack.enter_async_context(shared_limits(nats, config.namespace, accounts.fleet, accounts))
            links.limits = accounts.fleet
            if config.usage.ledger:
                usage = config.usage
                records = await stack.enter_async_context(
                    open_records(nats, "dynamo-usage", ttl_s=usage.retention_days * 86_400.0, max_bytes=usage.max_bytes)
                )
                links.usage = await stack.enter_async_context(
                    open_usage(records, accounts.ledger, config.namespace, accounts.fleet.origin)
                )
        kept = config.responses
        links.response_changes = ResponseChanges(nats, config.namespace)
        links.responses = await stack.enter_async_context(
            open_records(nats, "dynamo-responses", ttl_s=kept.ttl_s, max_bytes=kept.max_bytes)
        )
        events = links.events = await stack.enter_async_context(_open_events(config.nats, metrics))
        stack.push_async_callback(loads.close)
        memory = await stack.enter_async_context(open_shared_memory(config.shared_memory))
        client = links.client = await stack.enter_async_context(open_client(nats, config.namespace, memory=memory))
        router = await stack.enter_async_context(
            open_router(config, control, links, directory, events, nats, client, origin, metrics.router)
        )
        links.batches = await stack.enter_async_context(
            open_records(nats, "dynamo-batches", ttl_s=BATCHES_TTL_S, max_bytes=config.batches_max_bytes)
        )
        links.batch_leases = await stack.enter_async_context(open_leases(etcd, leases_prefix(config.namespace, "batches")))
        names = links.names = await stack.enter_async_context(open_names(etcd, config.namespace))
        links.settings = await stack.enter_async_context(
            open_server_settings(etcd, config.namespace, lambda settings: apply_log_settings(settings.log))
        )
        repositories = await stack.enter_async_context(open_repositories(etcd, config.namespace))
        adapters = Adapters(etcd, config.namespace, directory, config.serving.repository_timeout_s)
        texts = await stack.enter_async_context(open_text_files(store, config.text))
        plane = await stack.enter_async_context(
            open_data_plane(
                directory, client, nats, router, texts, metrics.frontend, config.serving, tracing, repositories, names, adapters
            )
        )
        if plane.turns is not None:
            await stack.enter_async_context(shared_turns(nats, config.namespace, origin, plane.turns))
        if not directory.ready.is_set():
            log.info("waiting for etcd")
        await directory.ready.wait()  # before, every model would be unknown
        await names.ready.wait()
        yield plane


@asynccontextmanager
async def _open_events(options: NatsOptions, metrics: Metrics) -> AsyncIterator[EventBus]:
    """Connect to NATS once more, for events: see `fleet.event_bus`."""
    name = f"dynamo-frontend {os.getpid()} events"
    async with (
        connect_nats(options, name, role="frontend", messages_per_turn=MESSAGES_PER_TURN) as nats,
        open_event_bus(nats) as events,
    ):
        metrics.link.follow("events", nats)
        events.on_dropped(metrics.events.dropped)
        yield events
