"""What any login may publish on the subjects that frontends follow: invented instances, models and sizes, and garbage."""

from __future__ import annotations

import asyncio
import logging

import msgspec
import pytest

from dynamo.common.discovery import Instance
from dynamo.common.kv.events import LoadMessage, LoadReport
from dynamo.common.messaging.buffers import Body, Buffer
from dynamo.common.names import Endpoint, InstanceId
from dynamo.frontend.fleet.kv.feed import open_kv_feed
from dynamo.frontend.fleet.peers.bookings import shared_bookings
from dynamo.frontend.fleet.peers.shared_state import open_shared_state
from dynamo.frontend.router.loads.shared_bookings import InstanceBookings, SharedBookings
from dynamo.frontend.router.loads.table import LoadTable
from dynamo.frontend.router.loads.thresholds import Thresholds, ThresholdTable
from tests.support.fake_bus import FakeBus, FakeConnection
from tests.support.fakes import ENDPOINT, FakeDirectory, instance, llm_card
from tests.support.virtual_time import in_virtual_time

GARBAGE = (b"", b"\xc1", b"\x91" * 100_000, b"\x92\xa1\xff\x90", b"\x92\xa1x\x91\x93\xa1\xff\x01\x02")
_encode = msgspec.msgpack.encode


class Feed(FakeConnection):
    async def connected(self) -> None: ...


async def never(instance: Instance, verb: str, body: Body, deadline: float) -> Buffer:
    return await asyncio.get_running_loop().create_future()


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_load_reports_of_invented_instances_take_no_memory() -> None:
    bus, loads = FakeBus(), LoadTable()
    nats = Feed(bus)
    async with open_kv_feed(nats, FakeDirectory(instance(1, llm_card())), never, None, loads):
        await turns()
        for number in range(1, 1000):
            nats.publish_nowait(
                ENDPOINT.load_subject(InstanceId(number)), _encode(LoadMessage(model="talker", report=LoadReport(waiting=3)))
            )
        await turns()
        assert "instances=1 " in repr(loads)


async def test_load_reports_of_invented_models_of_an_instance_take_no_memory_and_count_for_nothing() -> None:
    bus, loads, registered = FakeBus(), LoadTable(), instance(1, llm_card())
    nats = Feed(bus)
    async with open_kv_feed(nats, FakeDirectory(registered), never, None, loads):
        await turns()
        for model in ("talker", *(f"invented-{number}" for number in range(1000))):
            nats.publish_nowait(
                ENDPOINT.load_subject(registered.id), _encode(LoadMessage(model=model, report=LoadReport(waiting=3)))
            )
        await turns()
        (row,) = loads.rows([registered])
        assert list(row.reports) == ["talker"]
        assert row.estimate().requests == 3


async def test_bookings_of_invented_instances_take_no_memory() -> None:
    bus, loads, endpoint = FakeBus(), LoadTable("us"), Endpoint()
    nats = FakeConnection(bus)
    async with shared_bookings(nats, endpoint, loads, lambda id_: id_ == 1):
        rows = [InstanceBookings(number, 1, 5, 0, 1, 5, 0) for number in range(1000)]
        nats.publish_nowait(endpoint.bookings_subject(), _encode(SharedBookings("them", rows)))
        await turns()
        assert len(loads) == 1


@in_virtual_time
async def test_bookings_never_make_a_message_that_nats_refuses() -> None:
    bus, endpoint = FakeBus(), Endpoint()
    ours, theirs = FakeConnection(bus), FakeConnection(bus)
    loads, applied = LoadTable("us"), LoadTable("them")
    prompts: list[InstanceId] = []
    applied.on_peer_prompt(lambda instance, blocks, computed_at: prompts.append(instance))
    async with (
        shared_bookings(theirs, endpoint, applied, lambda id_: True),
        shared_bookings(ours, endpoint, loads, lambda id_: True),
    ):
        for number in range(1, 5000):
            loads.book(f"r{number}", InstanceId(number), 0.0, prefill_tokens=128_000, blocks=range(number, number + 200))
            loads.share_prompt(InstanceId(number), range(number, number + 190_000), 60.0)
        await asyncio.sleep(0.1)
        assert len(applied) == len(prompts) == 4999
        for number in range(1, 5000, 2):
            loads.finished(f"r{number}")
        bus.is_lost = lambda subject, payload: True
        await asyncio.sleep(0.1)
        assert len(applied) == 4999
        bus.is_lost = lambda subject, payload: False
        await asyncio.sleep(1.0)
        assert len(applied) == 2499, "the periodic messages make up for what was lost"
        assert ours.largest <= ours.max_payload


async def test_thresholds_of_invented_models_are_bounded() -> None:
    bus, table = FakeBus(), ThresholdTable()
    nats = FakeConnection(bus)
    async with open_shared_state(nats, "ns", "us", table):
        for number in range(20):
            events = [["thresholds", f"m{number}-{count}", number * 500 + count + 1, 0.5, None] for count in range(500)]
            nats.publish_nowait("dynamo.ns.frontends", _encode(["them", events]))
        nats.publish_nowait("dynamo.ns.frontends", _encode(["them", [["thresholds", "m" * 1000, 5, 0.5, None]]]))
        await turns()
        assert len(table.changes()) == 4096
        assert table.of("m19-499") == Thresholds(active_decode_blocks=0.5)


@in_virtual_time
async def test_a_flood_of_requests_for_all_thresholds_is_answered_once_a_second() -> None:
    bus, table, published = FakeBus(), ThresholdTable(), []
    nats, other = FakeConnection(bus), FakeConnection(bus)
    async with open_shared_state(nats, "ns", "us", table) as state:
        state.set_thresholds("talker", Thresholds(active_prefill_tokens=1))
        await turns()
        await other.subscribe("dynamo.ns.frontends", lambda subject, reply, payload, missing: published.append(bytes(payload)))
        flood = _encode(("them", [("asking",)] * 500))
        for _ in range(20):
            other.publish_nowait("dynamo.ns.frontends", flood)
        await asyncio.sleep(1.5)
        ours = [message for message in published if message != flood]
        assert [len(msgspec.msgpack.decode(message)[1]) for message in ours] == [1]
        other.publish_nowait("dynamo.ns.frontends", _encode(("them", [("asking",)])))
        await asyncio.sleep(1.5)
        assert len(published) == 20 + 1 + 1 + 1, "a later request is answered"


async def test_a_message_with_more_changes_than_frontends_put_into_one_is_dropped() -> None:
    bus, table = FakeBus(), ThresholdTable()
    nats = FakeConnection(bus)
    async with open_shared_state(nats, "ns", "us", table):
        for count, model in ((501, "many"), (500, "few")):
            nats.publish_nowait("dynamo.ns.frontends", _encode(("them", [("thresholds", model, 1, None, 1)] * count)))
        await turns()
        assert list(table.changes()) == ["few"]


@pytest.mark.parametrize("what", ["kv", "load", "bookings", "frontends"])
async def test_garbage_is_one_line_and_no_traceback(what: str, caplog: pytest.LogCaptureFixture) -> None:
    bus, endpoint = FakeBus(), ENDPOINT
    nats = Feed(bus)
    caplog.set_level(logging.WARNING)
    subjects = {
        "kv": endpoint.kv_subject(InstanceId(1)),
        "load": endpoint.load_subject(InstanceId(1)),
        "bookings": endpoint.bookings_subject(),
        "frontends": "dynamo.ns.frontends",
    }
    async with (
        open_kv_feed(nats, FakeDirectory(instance(1, llm_card())), never, None, LoadTable()),
        open_shared_state(nats, "ns", "us", ThresholdTable()),
        shared_bookings(nats, endpoint, LoadTable("us"), lambda id_: True),
    ):
        await turns()
        for garbage in GARBAGE * 20:
            nats.publish_nowait(subjects[what], garbage)
        await turns()
    assert len([record for record in caplog.records if "was dropped" in record.getMessage()]) == 1
    assert not any(record.exc_info for record in caplog.records)
