"""Demand and load reports, received from NATS.

Demand comes on a connection of its own: load reports are many, and are dropped for a while where this process cannot follow them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager

import msgspec

from dynamo.common.discovery import Instance
from dynamo.common.kv.events import load_message_decoder
from dynamo.common.messaging.nats.connection import Connection
from dynamo.common.messaging.unreadable import Unreadable
from dynamo.common.names import instance_of, loads_subject
from dynamo.common.scaling.demand import DemandReport, demand_subject
from dynamo.frontend.fleet.event_bus import EventBus
from dynamo.frontend.fleet.presence import Silent, Unknown
from dynamo.planner.observe.demand import DemandLedger
from dynamo.planner.observe.fleet import SILENT_S, PoolWatch

_demand_decoder = msgspec.msgpack.Decoder(DemandReport)


class FleetBus:
    """What comes from NATS, and whether enough comes to decide by."""

    def __init__(
        self,
        link: Connection,
        demand: DemandLedger,
        pools: PoolWatch,
        interval_s: float,
        follows_loads: Callable[[], bool] = lambda: True,
    ) -> None:
        """`follows_loads`: whether load reports are received now."""
        self.unreadable_demand = Unreadable("a demand report")
        self.unreadable_loads = Unreadable("a load report")
        self.demand = demand
        self._on_demand: list[Callable[[DemandReport], None]] = []
        self._pools = pools
        self._link = link
        self._interval_s = interval_s
        self._follows_loads = follows_loads
        self._loop = asyncio.get_running_loop()
        self._followed_since = self._loop.time()

    def __repr__(self) -> str:
        return f"<FleetBus {self.demand}, {self.why_unknown() or 'following'}>"

    def on_demand(self, callback: Callable[[DemandReport], None]) -> None:
        """Call `callback`, synchronously, with each report of a frontend."""
        self._on_demand.append(callback)

    def demand_came(self, subject: str, reply: str, payload: memoryview, no_responders: bool) -> None:
        report = self.unreadable_demand.read(_demand_decoder, subject, payload)
        if report is not None:
            self.demand.report(report, self._loop.time())
            for callback in self._on_demand:
                callback(report)

    def load_came(self, subject: str, reply: str, payload: memoryview, no_responders: bool) -> None:
        message = self.unreadable_loads.read(load_message_decoder, subject, payload)
        if message is None:
            return
        try:
            instance = instance_of(subject)
        except ValueError as error:
            self.unreadable_loads.drop(subject, error)
            return
        self._pools.load(instance, message)

    async def served_by(self, instance: Instance) -> Collection[str] | None:
        """Return None if an instance that etcd does not list any more is there: it reports its load (`Directory.confirm_by`).

        Raises Silent, or Unknown where load reports are not received.
        """
        is_back = self._loop.time() - self._link.reconnected_at >= SILENT_S
        if not self._hears() or not is_back or not self._follows_loads():
            raise Unknown
        if not self._pools.reports_load(instance):
            raise Silent
        return None

    def _hears(self) -> bool:
        return self._link.is_connected and not self._link.is_silent

    def why_unknown(self) -> str:
        """Return why it is not known what arrives, so that nothing may be decided by it; empty if it is known."""
        now = self._loop.time()
        if not self._hears():
            return "NATS cannot be reached"
        if not self.demand.reporting(now):
            return "no frontend reports its demand"
        if now - max(self._followed_since, self._link.reconnected_at) < self._interval_s:
            return "demand has been followed for less than an interval"
        return ""


@asynccontextmanager
async def following(bus: FleetBus, nats: Connection, events: EventBus, namespace: str) -> AsyncIterator[None]:
    """Subscribe while the body runs. Raises Unavailable if the connections are closed."""
    async with nats.subscribed(demand_subject(namespace), bus.demand_came):
        loads = await events.subscribe(loads_subject(namespace), bus.load_came)
        try:
            yield
        finally:
            await loads.close()
