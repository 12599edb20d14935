"""What comes from NATS, and whether enough comes to decide by."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import msgspec
import pytest

from dynamo.common.kv.events import LoadMessage, LoadReport
from dynamo.common.names import Endpoint, InstanceId
from dynamo.common.scaling.demand import DemandReport, demand_subject
from dynamo.frontend.fleet.presence import Silent, Unknown
from dynamo.planner.observe.bus import FleetBus
from dynamo.planner.observe.demand import VANISHED_S, DemandLedger
from dynamo.planner.observe.fleet import SILENT_S, PoolWatch
from tests.support.pools import CHAT, instance, load
from tests.support.virtual_time import in_virtual_time


@dataclass
class FakeLink:
    is_connected: bool = True
    is_silent: bool = False
    reconnected_at: float = float("-inf")


def bus(link: FakeLink) -> tuple[FleetBus, PoolWatch]:
    watch = PoolWatch()
    return FleetBus(link, DemandLedger(5.0), watch, 5.0), watch


def receive(bus: FleetBus, message: object = None, payload: bytes = b"") -> None:
    """Deliver a demand report, or these bytes as one."""
    payload = payload or msgspec.msgpack.encode(message)
    bus.demand_came(demand_subject("dynamo"), "", memoryview(payload), False)


@in_virtual_time
async def test_demand_is_known_after_an_interval_in_which_a_frontend_reported() -> None:
    fleet, _ = bus(FakeLink())
    assert fleet.why_unknown() == "no frontend reports its demand"
    receive(fleet, DemandReport("f1"))
    assert fleet.why_unknown() == "demand has been followed for less than an interval"
    await asyncio.sleep(5)
    receive(fleet, DemandReport("f1"))
    assert fleet.why_unknown() == ""
    await asyncio.sleep(VANISHED_S + 1)
    assert fleet.why_unknown() == "no frontend reports its demand"


@in_virtual_time
async def test_without_nats_demand_is_unknown_and_after_it_came_back_for_an_interval_more() -> None:
    link = FakeLink()
    fleet, _ = bus(link)
    await asyncio.sleep(5)
    receive(fleet, DemandReport("f1"))
    for link.is_connected, link.is_silent in ((False, False), (True, True)):
        assert fleet.why_unknown() == "NATS cannot be reached"
    link.is_silent, link.reconnected_at = False, 4.0
    assert fleet.why_unknown() == "demand has been followed for less than an interval"
    await asyncio.sleep(4)
    receive(fleet, DemandReport("f1"))
    assert fleet.why_unknown() == ""


@in_virtual_time
async def test_messages_that_cannot_be_read_are_counted_and_change_nothing() -> None:
    fleet, watch = bus(FakeLink())
    watch.registrations([instance(1)], [])
    receive(fleet, payload=b"\xc1")
    receive(fleet, ["f1", [[["chat"], [-1]]]])
    message = msgspec.msgpack.encode(LoadMessage("chat", LoadReport(running=2)))
    fleet.load_came(Endpoint().load_subject(InstanceId(1)), "", memoryview(b"\xc1"), False)
    fleet.load_came("dynamo.dynamo.backend.load.what", "", memoryview(message), False)
    assert (fleet.unreadable_demand.count, fleet.unreadable_loads.count) == (2, 2)
    assert fleet.demand.reporting(0.0) == 0
    fleet.load_came(Endpoint().load_subject(InstanceId(1)), "", memoryview(message), False)
    assert watch.views({}, 5.0)[CHAT].instances[0].requests == 2


@pytest.mark.parametrize(
    ("tokens", "hashes"),
    [(1 << 53, b""), (100, b"abc"), (100, bytes(8 * 65))],
    ids=["an endless prompt", "half a hash", "more hashes than are sent"],
)
@in_virtual_time
async def test_a_report_whose_samples_could_not_be_played_is_not_used(tokens: int, hashes: bytes) -> None:
    fleet, _ = bus(FakeLink())
    sample = [0.1, 1.0, tokens, 0, 0, 16, hashes]
    receive(fleet, ["f1", [[["chat"], [0] * 6, 0, 0, 0.0, [sample]]]])
    assert (fleet.unreadable_demand.count, fleet.demand.reporting(0.0)) == (1, 0)


@in_virtual_time
async def test_an_instance_that_etcd_lost_is_there_while_it_reports_its_load() -> None:
    fleet, watch = bus(FakeLink())
    watch.registrations([instance(1), instance(2)], [])
    watch.load(InstanceId(1), load())
    watch.load(InstanceId(2), load())
    await asyncio.sleep(SILENT_S + 1)
    watch.load(InstanceId(1), load())
    assert await fleet.served_by(instance(1)) is None
    for dead in (instance(2), instance(3)):
        with pytest.raises(Silent):
            await fleet.served_by(dead)


@in_virtual_time
async def test_nothing_is_said_of_an_instance_where_load_reports_are_not_received() -> None:
    link = FakeLink()
    followed = [True]
    watch = PoolWatch()
    fleet = FleetBus(link, DemandLedger(5.0), watch, 5.0, lambda: followed[0])
    watch.registrations([instance(1)], [])
    await asyncio.sleep(10)
    with pytest.raises(Silent):
        await fleet.served_by(instance(1))
    for link.is_connected, link.is_silent, link.reconnected_at, followed[0] in (
        (False, False, 0.0, True),
        (True, True, 0.0, True),
        (True, False, 9.0, True),
        (True, False, 0.0, False),
    ):
        with pytest.raises(Unknown):
            await fleet.served_by(instance(1))
