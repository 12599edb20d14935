from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import msgspec

from dynamo.common.admission import AdmissionQuery, AdmissionReport
from dynamo.common.names import Endpoint, InstanceId, admitted_reply
from dynamo.worker.process.admission import LISTEN_S, MAX_PROCESSES, SILENT_S, Admission, AdmissionCount, asked_frontends
from tests.support.fake_bus import FakeBus, FakeConnection
from tests.support.virtual_time import in_virtual_time
from tests.support.waiting import WAIT_S

ENDPOINT, INSTANCE = Endpoint(), InstanceId(31)


def count_of(*reports: AdmissionReport, queries: int = 2) -> AdmissionCount:
    """Return a count after so many queries, at 0 s, and these responses to them, at 0.1 s."""
    count = AdmissionCount()
    for _ in range(queries):
        count.ask(0.0)
    for report in reports:
        count.take(report, 0.1)
    return count


def test_all_processes_that_responded_must_have_admitted_the_instance() -> None:
    count = count_of(AdmissionReport("a", 2, is_admitted=True), AdmissionReport("b", 2, is_admitted=False))
    assert count.missing(2, LISTEN_S) == ["b"]
    count.take(AdmissionReport("b", 2, is_admitted=True), LISTEN_S)
    assert count.missing(2, LISTEN_S) == []


def test_a_process_may_respond_for_a_while_before_it_is_known() -> None:
    count = count_of(AdmissionReport("a", 2, is_admitted=True))
    assert count.missing(2, LISTEN_S / 2) is None
    assert count.missing(2, LISTEN_S) == []


def test_what_was_said_before_the_models_were_registered_does_not_count() -> None:
    assert count_of(AdmissionReport("a", 1, is_admitted=True)).missing(2, LISTEN_S) == ["a"]


def test_a_silent_process_is_dead() -> None:
    count = count_of(AdmissionReport("a", 2, is_admitted=False), AdmissionReport("b", 2, is_admitted=True))
    count.take(AdmissionReport("b", 2, is_admitted=True), SILENT_S)
    assert count.missing(2, SILENT_S) == ["a"]
    assert count.missing(2, 0.1 + SILENT_S) == []


def test_nothing_is_waited_for_without_a_subscriber() -> None:
    count = count_of(AdmissionReport("a", 1, is_admitted=False))
    count.none_subscribed()
    assert count.missing(2, 0.2) == []


def test_a_yes_to_a_query_that_was_never_sent_is_ignored() -> None:
    count = count_of(AdmissionReport("a", 1, is_admitted=False), AdmissionReport("a", 9, is_admitted=True))
    assert count.missing(2, LISTEN_S) == ["a"]


def test_a_sender_of_ever_new_names_is_not_kept_in_memory() -> None:
    count = count_of(*(AdmissionReport(f"{number}", 2, is_admitted=False) for number in range(2 * MAX_PROCESSES)))
    missing = count.missing(2, LISTEN_S)
    assert missing is not None
    assert len(missing) == MAX_PROCESSES


class Frontend:
    """One process of a frontend, which has admitted the instance once the test says so."""

    def __init__(self, bus: FakeBus, origin: str) -> None:
        self.has_admitted = False
        self.asked: list[Sequence[str]] = []
        self._origin = origin
        self._connection = FakeConnection(bus)

    async def open(self) -> None:
        await self._connection.subscribe(ENDPOINT.admission_subject(INSTANCE), self._respond)

    def die(self) -> None:
        self._connection.is_up = False

    def _respond(self, subject: str, reply: str, payload: memoryview, no_responders: bool) -> None:
        query = msgspec.msgpack.decode(payload, type=AdmissionQuery)
        self.asked.append(query.models)
        report = AdmissionReport(self._origin, query.number, self.has_admitted and bool(query.models))
        self._connection.publish_nowait(admitted_reply(subject), msgspec.msgpack.encode(report))


@asynccontextmanager
async def admission(
    *frontends: str, registered: Callable[[], Sequence[str] | None] = lambda: ["sim"], timeout_s: float = WAIT_S
) -> AsyncIterator[tuple[Admission, list[Frontend]]]:
    bus = FakeBus()
    opened = [Frontend(bus, origin) for origin in frontends]
    for each in opened:
        await each.open()
    async with asked_frontends(FakeConnection(bus), ENDPOINT, INSTANCE, registered, timeout_s) as asked:
        yield asked, opened


@in_virtual_time
async def test_an_instance_is_admitted_once_the_last_frontend_has_admitted_it() -> None:
    async with admission("a", "b") as (asked, [first, second]):
        first.has_admitted = True
        await asyncio.sleep(20)
        assert not asked.admitted.is_set()
        second.has_admitted = True
        await asyncio.sleep(2)
        assert asked.admitted.is_set()


@in_virtual_time
async def test_a_frontend_that_dies_delays_it_no_longer_than_its_silence_is_noticed() -> None:
    async with admission("a", "b") as (asked, [first, second]):
        first.has_admitted = True
        await asyncio.sleep(2)
        second.die()
        await asyncio.sleep(SILENT_S / 2)
        assert not asked.admitted.is_set()
        await asyncio.sleep(SILENT_S)
        assert asked.admitted.is_set()


@in_virtual_time
async def test_a_frontend_that_always_says_no_delays_it_up_to_the_bound() -> None:
    async with admission("a", timeout_s=30.0) as (asked, _):
        await asyncio.sleep(29)
        assert not asked.admitted.is_set()
        await asyncio.sleep(2)
        assert asked.admitted.is_set()


@in_virtual_time
async def test_without_frontends_it_is_admitted_at_once() -> None:
    async with admission() as (asked, _):
        await asyncio.sleep(0.01)
        assert asked.admitted.is_set()


@in_virtual_time
async def test_frontends_are_asked_for_the_models_once_these_are_registered() -> None:
    models: list[str] | None = None
    async with admission("a", registered=lambda: models) as (asked, [frontend]):
        frontend.has_admitted = True
        await asyncio.sleep(10)
        assert not asked.admitted.is_set()
        assert set(frontend.asked) == {()}
        models = ["sim"]
        await asyncio.sleep(1)
        assert asked.admitted.is_set()
        assert frontend.asked[-1] == ("sim",)


@in_virtual_time
async def test_an_admitted_instance_asks_no_more() -> None:
    async with admission("a") as (asked, [frontend]):
        frontend.has_admitted = True
        await asked.admitted.wait()
        count = len(frontend.asked)
        await asyncio.sleep(60)
        assert len(frontend.asked) == count


@in_virtual_time
async def test_with_a_bound_of_0_nothing_is_asked() -> None:
    async with admission("a", timeout_s=0.0) as (asked, [frontend]):
        assert asked.admitted.is_set()
        await asyncio.sleep(10)
        assert frontend.asked == []
