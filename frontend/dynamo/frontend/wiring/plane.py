"""The data plane and what it stands on: etcd, NATS, the directory, the router."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from dynamo.common.etcd import connect_etcd
from dynamo.common.etcd.leases import Leases, open_leases
from dynamo.common.messaging.jetstream.kv_stream import KvStream
from dynamo.common.messaging.jetstream.records import RecordStore, open_records
from dynamo.common.messaging.jetstream.store import FileStore
from dynamo.common.messaging.nats.connection import Connection
from dynamo.common.messaging.request_plane.client import open_client
from dynamo.common.names import leases_prefix
from dynamo.common.observability.log_settings import apply_log_settings
from dynamo.common.observability.server_settings import open_server_settings
from dynamo.common.observability.tracing import open_tracing
from dynamo.common.process.background import running
from dynamo.common.shared_memory.sharing import SharedMemory, open_shared_memory
from dynamo.frontend.api.console.fleet import LoadWatch
from dynamo.frontend.api.guard import Accounts
from dynamo.frontend.api.http.management.routing import RoutingControl
from dynamo.frontend.api.http.management.server import Links
from dynamo.frontend.api.kserve.settings import Settings
from dynamo.frontend.config import FrontendConfig
from dynamo.frontend.fleet.adapters import Adapters
from dynamo.frontend.fleet.admission import Admissions, reported_admissions
from dynamo.frontend.fleet.directory import open_directory
from dynamo.frontend.fleet.event_bus import MESSAGES_PER_TURN, EventBus
from dynamo.frontend.fleet.peers.demand import reported_demand
from dynamo.frontend.fleet.peers.limits import shared_limits
from dynamo.frontend.fleet.peers.response_changes import ResponseChanges
from dynamo.frontend.fleet.peers.usage import UsageStore, open_usage
from dynamo.frontend.fleet.peers.waiting_keys import shared_fairness
from dynamo.frontend.fleet.repository import open_repositories
from dynamo.frontend.fleet.standby import open_standby
from dynamo.frontend.fleet.targets import TargetsView, open_targets
from dynamo.frontend.fleet.worker_streams import open_worker_streams
from dynamo.frontend.names.table import NameTable, open_names
from dynamo.frontend.preprocess.text_files import open_text_files
from dynamo.frontend.router.demand import DemandTable
from dynamo.frontend.serving.data_plane import DataPlane, open_data_plane
from dynamo.frontend.wiring.metrics import Metrics
from dynamo.frontend.wiring.routing import open_router

BATCHES_TTL_S = 30 * 86_400.0
"""How long files and batches are kept."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """What there is once NATS and etcd have been reached."""

    plane: DataPlane
    memory: SharedMemory | None
    names: NameTable
    control: RoutingControl
    settings: Settings
    loads: LoadWatch
    targets: TargetsView
    responses: RecordStore
    response_changes: ResponseChanges
    batches: RecordStore
    """Files and batches."""
    batch_leases: Leases
    usage: UsageStore | None


@asynccontextmanager
async def open_links(config: FrontendConfig) -> AsyncIterator[Links]:
    """Follow etcd while the body runs, with connections to NATS that `open_plane` makes. Waits for neither."""
    name = f"dynamo-frontend {os.getpid()}"
    async with connect_etcd(config.etcd) as etcd, open_directory(etcd, config.namespace) as directory:
        nats = Connection(config.nats, name, role="frontend")
        events_nats = Connection(config.nats, f"{name} events", role="frontend", messages_per_turn=MESSAGES_PER_TURN)
        yield Links(etcd, directory, nats, events_nats, EventBus(events_nats))


@asynccontextmanager
async def open_plane(config: FrontendConfig, links: Links, metrics: Metrics, accounts: Accounts | None) -> AsyncIterator[Reached]:
    """Open a data plane that has read the directory once. Waits for NATS and etcd, however long that takes.

    Raises Unavailable or InvalidRequest if NATS or etcd refuse us.
    """
    etcd, nats, directory, namespace = links.etcd, links.nats, links.directory, config.namespace
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        tracing = await enter(open_tracing(config.trace, "dynamo-frontend"))
        await enter(nats.opened())
        metrics.link.follow("requests", nats)
        store = FileStore(nats, config.cache_dir.expanduser())
        written = (store, KvStream(nats)) if config.router.durable_kv_events else (store,)
        await enter(open_worker_streams(nats, written))
        usage = None
        if accounts is not None:
            await enter(shared_limits(nats, namespace, accounts.fleet, accounts))
            if config.usage.ledger:
                ttl_s = config.usage.retention_days * 86_400.0
                records = await enter(open_records(nats, "dynamo-usage", ttl_s=ttl_s, max_bytes=config.usage.max_bytes))
                usage = await enter(open_usage(records, accounts.ledger, namespace, accounts.fleet.origin))
        kept = config.responses
        responses = await enter(open_records(nats, "dynamo-responses", ttl_s=kept.ttl_s, max_bytes=kept.max_bytes))
        batches = await enter(open_records(nats, "dynamo-batches", ttl_s=BATCHES_TTL_S, max_bytes=config.batches_max_bytes))
        await enter(_events(links, metrics))
        loads = LoadWatch(links.events, namespace, asyncio.get_running_loop().time)
        stack.push_async_callback(loads.close)
        memory = await enter(open_shared_memory(config.shared_memory))
        client = await enter(open_client(nats, namespace, memory=memory))
        await enter(running(metrics.follow(client), "metrics of requests on NATS"))
        origin = secrets.token_hex(8) if accounts is None else accounts.fleet.origin
        demand = DemandTable()
        routing = await enter(open_router(config, links, client, origin, metrics.router, demand))
        leases = await enter(open_leases(etcd, leases_prefix(namespace, "batches")))
        names = await enter(open_names(etcd, namespace))
        settings = await enter(open_server_settings(etcd, namespace, lambda settings: apply_log_settings(settings.log)))
        standby = await enter(open_standby(etcd, namespace))
        repositories = await enter(open_repositories(etcd, namespace))
        adapters = Adapters(etcd, namespace, directory, config.serving.repository_timeout_s)
        texts = await enter(open_text_files(store, config.text))
        plane = await enter(
            open_data_plane(
                *(
                    directory,
                    client,
                    nats,
                    routing.router,
                    texts,
                    metrics.frontend,
                    config.serving,
                    tracing,
                    repositories,
                    names,
                    adapters,
                ),
                demand=demand,
                standby=standby,
            )
        )
        await enter(reported_demand(links.events, namespace, origin, demand, plane.waiting, metrics.frontend))
        if plane.fair_shares is not None:
            await enter(shared_fairness(nats, namespace, origin, plane.fair_shares))
        if not directory.ready.is_set():
            log.info("waiting for etcd")
        await directory.ready.wait()  # before, every model would be unknown
        await names.ready.wait()
        await standby.ready.wait()
        admissions = Admissions(directory, plane.has_text, routing.is_in_step)
        await enter(reported_admissions(nats, namespace, origin, admissions))
        yield Reached(
            plane=plane,
            memory=memory,
            names=names,
            control=routing.control,
            settings=Settings(settings, config.trace, config.log.file),
            loads=loads,
            targets=await enter(open_targets(etcd, namespace)),
            responses=responses,
            response_changes=ResponseChanges(nats, namespace),
            batches=batches,
            batch_leases=leases,
            usage=usage,
        )


@asynccontextmanager
async def _events(links: Links, metrics: Metrics) -> AsyncIterator[None]:
    """Connect to NATS once more, for events: see `fleet.event_bus`."""
    async with links.events_nats.opened(), running(links.events.watch(), "the lag of events"):
        metrics.link.follow("events", links.events_nats)
        links.events.on_dropped(metrics.events.dropped)
        yield
