"""A planner process: its parts in the order in which they start, and, backwards, end.

    status port → etcd: registrations, the leader's lease → NATS: demand, load reports → rounds

A planner that ends gives the lease back, so that another one decides at once. Targets stay as they are.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial

from dynamo.common.config import ConfigError, project_version
from dynamo.common.errors import InvalidRequest, Unavailable
from dynamo.common.etcd import Etcd, connect_etcd
from dynamo.common.etcd.config import check_etcd
from dynamo.common.lifecycle import freeze_garbage, stop_on_signal
from dynamo.common.messaging.nats.connection import Connection, connect_nats
from dynamo.common.messaging.nats.login import check_nats
from dynamo.common.observability.scrape import Scraper
from dynamo.common.observability.telemetry import RuntimeMetrics, make_registry
from dynamo.common.process.background import running
from dynamo.common.scaling.pool import Pool
from dynamo.frontend.config import RouterMode, RouterOptions
from dynamo.frontend.fleet.directory import Directory, open_directory
from dynamo.frontend.fleet.event_bus import MESSAGES_PER_TURN, EventBus
from dynamo.planner.budget import share_gpus
from dynamo.planner.capacity import Demand, tokens_of, unreachable
from dynamo.planner.config import PlannerConfig
from dynamo.planner.decide import PoolPlanner
from dynamo.planner.executors.base import Executor
from dynamo.planner.executors.choice import open_executor
from dynamo.planner.observe.bus import FleetBus, following
from dynamo.planner.observe.demand import DemandLedger
from dynamo.planner.observe.fleet import PoolWatch
from dynamo.planner.pools import Bounds, Decision, PoolView
from dynamo.planner.process.leader import Leadership, open_leadership
from dynamo.planner.process.metrics import PlannerMetrics
from dynamo.planner.process.planning import Planning
from dynamo.planner.process.standby import StandbyRecords
from dynamo.planner.process.state import PlannerState, initial_state
from dynamo.planner.process.status import PlannerStatus, serve_planner_status
from dynamo.planner.process.targets_key import TargetsKey
from dynamo.planner.whatif.advisor import Advisor
from dynamo.planner.whatif.background import SearchThread, search_thread

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Planner:
    """A planner that runs."""

    name: str
    planning: Planning
    leadership: Leadership
    status_port: int | None
    """None without `--status-port`."""


async def run(config: PlannerConfig) -> None:
    """Plan until SIGINT or SIGTERM. Raises ConfigError."""
    stop = stop_on_signal()
    try:
        check_nats(config.nats)
        check_etcd(config.etcd)
        async with open_planner(config):
            freeze_garbage()
            await stop.wait()
    except (InvalidRequest, Unavailable) as error:
        raise ConfigError(str(error)) from error


@asynccontextmanager
async def open_planner(config: PlannerConfig) -> AsyncIterator[Planner]:
    """Plan while the body runs. Returns when NATS is there, however long that takes; does not wait for etcd."""
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        name = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        searches = stack.enter_context(search_thread())
        registry = make_registry()
        metrics = PlannerMetrics(registry, config.bounds.gpus_of)
        runtime = RuntimeMetrics(registry, role="planner", version=project_version())
        status = PlannerStatus(initial_state(config, name, config.executor.kind))
        port = await enter(serve_planner_status(config.status, status, Scraper(registry, ()).scrape))
        etcd = await enter(connect_etcd(config.etcd))
        directory = await enter(open_directory(etcd, config.namespace))
        runtime.etcd_stale.set_function(lambda: directory.stale)
        executor = await enter(open_executor(config.executor, config.namespace, etcd, directory.registered))
        watch = PoolWatch(config.models)
        directory.on_registrations(watch.registrations)
        nats, events = await _connect(config, name, stack)
        events.on_dropped(metrics.load_reports_dropped.inc)
        runtime.nats_connected.set_function(lambda: nats.is_connected)
        status.show_connection(nats)
        bus = FleetBus(nats, DemandLedger(config.interval_s), watch, config.interval_s, lambda: not events.is_dropped)
        directory.confirm_by(bus.served_by)
        await enter(following(bus, nats, events, config.namespace))
        leadership = await enter(open_leadership(etcd, config.namespace, config.lease_ttl_s))
        planning = _planning(config, name, etcd, watch, bus, leadership, executor, searches)
        planning.on_round(status.show)
        planning.on_round(metrics.show)
        planning.on_change(metrics.changed)
        planning.on_round(partial(_count_unreadable, metrics, bus))
        await enter(running(_plan(directory, planning), "the rounds"))
        log.info("planning for namespace %s as %s", config.namespace, name)
        yield Planner(name, planning, leadership, port)
        log.info("leaving: targets stay as they are")


async def _connect(config: PlannerConfig, name: str, stack: AsyncExitStack) -> tuple[Connection, EventBus]:
    nats = await stack.enter_async_context(connect_nats(config.nats, f"dynamo-planner {name}", role="planner"))
    loads = connect_nats(config.nats, f"dynamo-planner {name} events", role="planner", messages_per_turn=MESSAGES_PER_TURN)
    events_nats = await stack.enter_async_context(loads)
    events = EventBus(events_nats)
    await stack.enter_async_context(running(events.watch(), "the lag of events"))
    return nats, events


def _planning(
    config: PlannerConfig,
    name: str,
    etcd: Etcd,
    watch: PoolWatch,
    bus: FleetBus,
    leadership: Leadership,
    executor: Executor | None,
    searches: SearchThread,
) -> Planning:
    goals = config.goals_of_requests
    routing = RouterOptions(mode=config.whatif_router_mode)

    def sharers() -> int:
        return max(1, len(watch.pools()))

    def make_decider(pool: Pool, bounds: Bounds) -> PoolPlanner:
        what_if = None
        # With `direct`, clients choose the instances.
        if config.whatif_router_mode is not RouterMode.DIRECT and config.whatif_cpu:
            what_if = Advisor(routing, pool.role, cpu_share=config.whatif_cpu, sharers=sharers, start=searches.start)
        has_budget = config.bounds.gpu_budget is not None
        return PoolPlanner(pool, goals, bounds, interval_s=config.interval_s, what_if=what_if, tells_misses=has_budget)

    def within_budget(decisions: Sequence[Decision], views: Mapping[Pool, PoolView]) -> Sequence[Decision]:
        bounds = config.bounds
        if bounds.gpu_budget is None:
            return decisions
        return share_gpus(decisions, views, bounds.gpu_budget, gpus_of=bounds.gpus_of, least_of=bounds.least_of)

    return Planning(
        config,
        name,
        watch=watch,
        bus=bus,
        leadership=leadership,
        key=TargetsKey(etcd, config.namespace),
        standby=StandbyRecords(etcd, config.namespace, watch),
        executor=executor,
        executor_name=config.executor.kind,
        make_decider=make_decider,
        within_budget=within_budget,
        unreachable=lambda view: unreachable(mean_demand(view), view.engine, goals),
    )


def mean_demand(view: PoolView) -> Demand:
    """Return the demand of a view's mean request."""
    arrivals = view.arrivals
    requests = max(arrivals.requests, 1.0)
    computed, output = tokens_of(view.pool.role, arrivals.computed_tokens / requests, view.engine.times.output_tokens)
    return Demand(
        requests_per_s=arrivals.requests / max(arrivals.seconds, 1e-9),
        computed_tokens=computed,
        prompt_tokens=arrivals.prompt_tokens / requests,
        output_tokens=output,
    )


async def _plan(directory: Directory, planning: Planning) -> None:
    """Begin when the registrations have been read: before, all pools would look empty."""
    if not directory.ready.is_set():
        log.info("waiting for etcd")
    await directory.ready.wait()
    await planning.run()


def _count_unreadable(metrics: PlannerMetrics, bus: FleetBus, state: PlannerState) -> None:
    metrics.unreadable("demand", bus.unreadable_demand.count + bus.demand.dropped)
    metrics.unreadable("load", bus.unreadable_loads.count)
