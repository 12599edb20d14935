"""When a worker reports the load of its engine, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from dynamo.common.kv.events import KvState, LoadReport, load_message_decoder, request_key
from dynamo.common.kv.hashes import unpack_hashes
from dynamo.common.names import InstanceId
from dynamo.worker.engine.base import EngineLoad
from dynamo.worker.process.publisher import IDLE_REPORT_S, REPORT_S, KvPublishers, publishing
from tests.support.fakes import ENDPOINT
from tests.support.virtual_time import in_virtual_time

ME = InstanceId(7)


class StatedEngine:
    """An engine whose load the test sets."""

    def __init__(self) -> None:
        self.kv = KvState()
        self.running = 0
        self.step: Callable[[], None] = lambda: None

    def on_step(self, callback: Callable[[], None]) -> None:
        self.step = callback

    def load(self) -> EngineLoad:
        return EngineLoad(running=self.running)


class Bus:
    """Keeps load reports, each with the time at which it was published."""

    is_connected = True
    max_payload = 1 << 20
    reconnected_at = float("-inf")

    def __init__(self) -> None:
        self.reports: list[tuple[float, LoadReport]] = []

    def publish_soon(self, subject: str, payload: bytes, reply: str = "") -> bool:
        if subject == ENDPOINT.load_subject(ME):
            now = asyncio.get_running_loop().time()
            self.reports.append((now, load_message_decoder.decode(payload).report))
        return True


class Worker:
    def __init__(self, engine: StatedEngine, bus: Bus, publishers: KvPublishers) -> None:
        self.engine = engine
        self.bus = bus
        self.publishers = publishers

    def step(self, running: int) -> None:
        self.engine.running = running
        self.engine.step()

    @property
    def reports(self) -> list[tuple[float, int]]:
        """When, and how many were running."""
        return [(round(time, 6), report.running) for time, report in self.bus.reports]


@asynccontextmanager
async def worker() -> AsyncIterator[Worker]:
    """A worker that has just reported its load for the first time, as an idle one does."""
    engine, bus = StatedEngine(), Bus()
    async with publishing(bus, ENDPOINT, ME, [("m", engine)]) as publishers:
        await asyncio.sleep(0)
        worker = Worker(engine, bus, publishers)
        assert worker.reports == [(0.0, 0)]
        yield worker


@in_virtual_time
async def test_a_change_is_reported_at_once_if_nothing_was_reported_lately() -> None:
    async with worker() as w:
        await asyncio.sleep(0.2)
        w.step(3)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert w.reports[1:] == [(0.2, 3)]


@in_virtual_time
async def test_quick_changes_are_reported_together_every_50_ms() -> None:
    async with worker() as w:
        for number in range(1, 199):  # a step each millisecond
            await asyncio.sleep(0.001)
            w.step(number)
        await asyncio.sleep(0.1)
        assert REPORT_S == 0.05
        assert [time for time, _ in w.reports] == [0.0, 0.05, 0.1, 0.15, 0.2]
        assert w.reports[-1][1] == 198, "the last change is not lost"


@in_virtual_time
async def test_steps_without_a_change_are_not_reported() -> None:
    async with worker() as w:
        w.step(2)
        await asyncio.sleep(0.1)
        before = list(w.reports)
        for _ in range(300):
            await asyncio.sleep(0.001)
            w.step(2)
        assert w.reports == before == [(0.0, 0), (0.05, 2)]


@in_virtual_time
async def test_an_update_of_the_cache_is_a_change() -> None:
    async with worker() as w:
        await asyncio.sleep(0.1)
        w.engine.kv.store([1, 2])
        w.step(0)
        await asyncio.sleep(0.1)
        assert len(w.reports) == 2
        assert w.bus.reports[-1][1].kv_number == w.engine.kv.number


@in_virtual_time
async def test_an_unchanged_load_is_reported_periodically() -> None:
    async with worker() as w:
        await asyncio.sleep(4 * IDLE_REPORT_S + 0.01)
        assert w.reports == [(number * IDLE_REPORT_S, 0) for number in range(5)]
        assert IDLE_REPORT_S < 1


@in_virtual_time
async def test_an_idle_report_is_skipped_right_after_another_report() -> None:
    async with worker() as w:
        await asyncio.sleep(IDLE_REPORT_S - 0.01)
        w.step(1)
        await asyncio.sleep(0.03)
        assert w.reports[1:] == [(IDLE_REPORT_S - 0.01, 1)]


@in_virtual_time
async def test_each_accepted_request_is_named_in_two_reports_even_if_the_load_is_as_before() -> None:
    async with worker() as w:
        w.publishers.accepted("m", "booking")
        w.publishers.accepted("another model", "booking")
        await asyncio.sleep(3 * IDLE_REPORT_S)
        named = [unpack_hashes(report.accepted) for _, report in w.bus.reports]
        assert named[:4] == [[], [request_key("booking")], [request_key("booking")], []]
        assert w.reports[1][0] == REPORT_S


@in_virtual_time
async def test_nothing_is_reported_after_the_end() -> None:
    async with worker() as w:
        w.step(1)
    await asyncio.sleep(5)
    assert w.reports == [(0.0, 0)]
