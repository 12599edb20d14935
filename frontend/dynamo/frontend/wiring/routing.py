"""The router: the one of the chosen mode, what it follows, and what is around it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from dynamo.common.discovery import Instance
from dynamo.common.messaging.buffers import Body, Buffer
from dynamo.common.messaging.jetstream.kv_stream import KvStream
from dynamo.common.messaging.request_plane.client import RequestClient
from dynamo.common.names import Endpoint, InstanceId
from dynamo.frontend.api.http.management.routing import RoutingControl
from dynamo.frontend.api.http.management.server import Links
from dynamo.frontend.config import FrontendConfig
from dynamo.frontend.fleet.kv.feed import open_kv_feed
from dynamo.frontend.fleet.kv.history import KvHistory
from dynamo.frontend.fleet.peers.bookings import shared_bookings
from dynamo.frontend.fleet.peers.shared_state import open_shared_state
from dynamo.frontend.router.base import Router
from dynamo.frontend.router.demand import DemandTable
from dynamo.frontend.router.explain import DecisionLog
from dynamo.frontend.router.kv import KvRouter
from dynamo.frontend.router.loads.table import LoadTable
from dynamo.frontend.router.loads.thresholds import ThresholdTable
from dynamo.frontend.router.measured import MeasuredRouter
from dynamo.frontend.router.policies.affinity import SessionRouter
from dynamo.frontend.router.policies.sequences import SequenceRouter
from dynamo.frontend.router.select import follows_loads, make_router
from dynamo.frontend.router_metrics import RouterMetrics


@dataclass(frozen=True, slots=True)
class Routing:
    """The router that requests meet, and what goes with it."""

    router: Router
    control: RoutingControl
    """What can be read and changed about routing while the process runs."""
    is_in_step: Callable[[InstanceId, str], bool]
    """Whether the router knows the cache of an instance of a model, as far as it follows caches."""


@asynccontextmanager
async def open_router(
    config: FrontendConfig, links: Links, client: RequestClient, origin: str, metrics: RouterMetrics, demand: DemandTable
) -> AsyncIterator[Routing]:
    """Open the router that requests meet: metrics, explanations and sessions around the one that picks instances.

    `origin` names this frontend to others, and `demand` counts the requests that are placed.
    """
    options, thresholds = config.router, ThresholdTable(config.router.thresholds)
    decisions = DecisionLog(everything=logging.getLogger("dynamo.frontend.router.explain").isEnabledFor(logging.DEBUG))
    async with AsyncExitStack() as stack:
        state = await stack.enter_async_context(open_shared_state(links.nats, config.namespace, origin, thresholds))
        picking = await stack.enter_async_context(_picking_router(config, links, client, origin, thresholds, metrics))
        router: Router = SequenceRouter(picking.router)
        if options.session_affinity_ttl_s is not None:
            router = sessions = SessionRouter(
                router,
                options.session_affinity_ttl_s,
                options.session_affinity_mode,
                options.session_affinity_max,
                on_placed=state.place if options.replica_sync else None,
                clock=asyncio.get_running_loop().time,
            )
            state.on_placed(sessions.placed)
        control = RoutingControl(thresholds, decisions, follows_loads(options), state.set_thresholds)
        yield Routing(MeasuredRouter(router, metrics, decisions, demand=demand), control, picking.is_in_step)


@dataclass(frozen=True, slots=True)
class _PickingRouter:
    router: Router
    is_in_step: Callable[[InstanceId, str], bool]


def _follows_nothing(instance: InstanceId, model: str) -> bool:
    return True


@asynccontextmanager
async def _picking_router(
    config: FrontendConfig,
    links: Links,
    client: RequestClient,
    origin: str,
    thresholds: ThresholdTable,
    metrics: RouterMetrics,
) -> AsyncIterator[_PickingRouter]:
    """Open the router of the chosen mode, which follows instances and, if configured, the bookings of other frontends."""
    clock, events = asyncio.get_running_loop().time, links.events
    if not follows_loads(config.router):
        yield _PickingRouter(make_router(config.router, LoadTable(), clock), _follows_nothing)
        return
    async with AsyncExitStack() as stack:
        loads = LoadTable(origin)
        router = make_router(config.router, loads, clock, thresholds)
        follower = router if isinstance(router, KvRouter) and config.router.kv.use_kv_events else None

        async def query(instance: Instance, verb: str, body: Body, deadline: float) -> Buffer:
            return await client.open(instance.id, instance.subject, verb, body, deadline=deadline).result()

        history: KvHistory | None = None
        if follower is not None and config.router.durable_kv_events:
            threshold, reset = config.router.snapshot_threshold, config.router.reset_states
            history = KvHistory(KvStream(links.nats), snapshot_threshold=threshold, reset=reset)
        feed = await stack.enter_async_context(
            open_kv_feed(events, links.directory, query, follower, loads, history, metrics.left_out)
        )
        events.on_dropped(feed.suspend)
        events.on_resumed(feed.resume)
        if config.router.replica_sync:
            endpoint = Endpoint(namespace=config.namespace)
            await stack.enter_async_context(shared_bookings(events, endpoint, loads, feed.is_registered))
        yield _PickingRouter(router, feed.is_in_step)
