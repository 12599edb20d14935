"""What frontends report of the demand, and that a report stays small."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from dynamo.common.kv.hashes import pack_hashes, sequence_hashes, unpack_hashes
from dynamo.common.model_card import LlmInfo, ModelCard, ModelKind, Role
from dynamo.common.names import InstanceId
from dynamo.common.scaling.demand import MAX_SAMPLE_HASHES, MAX_SAMPLES, MAX_SAVED, DemandReport, PoolDemand, demand_subject
from dynamo.common.scaling.pool import Pool
from dynamo.frontend.fleet.peers.demand import DemandReporter, reported_demand
from dynamo.frontend.metrics import FrontendMetrics
from dynamo.frontend.router.base import RouteRequest
from dynamo.frontend.router.demand import DemandTable, WaitingRequests
from dynamo.frontend.router.measured import MeasuredRouter
from dynamo.frontend.router_metrics import RouterMetrics
from tests.support.fake_bus import FakeBus, FakeConnection
from tests.support.fakes import RecordingRouter, instance
from tests.support.virtual_time import in_virtual_time

BLOCK = 16
TALKER = Pool("talker")


def card(name: str = "talker") -> ModelCard:
    return ModelCard(name=name, kind=ModelKind.LLM, llm=LlmInfo(context_length=4096, tokenizer="t", block_size=BLOCK))


def prompt_of(tokens: int, first: int = 0) -> bytes:
    return b"".join((first + token).to_bytes(4, "little") for token in range(tokens))


class Counted:
    """A router that places every request, and what is reported of it."""

    def __init__(self) -> None:
        self.now = 100.0
        self.demand = DemandTable(lambda: self.now)
        metrics = RouterMetrics(FrontendMetrics(CollectorRegistry()))
        self.router = MeasuredRouter(RecordingRouter(), metrics, clock=lambda: self.now, demand=self.demand)
        self.waiting: dict[Pool, WaitingRequests] = {}
        self.reporter = DemandReporter("us", self.demand, lambda: self.waiting, random.Random(1))

    def place(self, model: str = "talker", tokens: int = 40, first: int = 0, **more: object) -> None:
        request = RouteRequest(model=model, prompt=prompt_of(tokens, first), **more)  # type: ignore[arg-type]
        self.router.pick(request, [instance(1, card(model))])
        self.router.finished(request.booking_id)

    async def report(self) -> Mapping[Pool, PoolDemand]:
        return {demand.pool: demand for demand in await self.reporter.report()}


async def test_totals_count_from_the_start_and_samples_from_the_last_report() -> None:
    counted = Counted()
    counted.place(expected_output_tokens=5, learned_output=3.7, priority=3, waited_s=2.0)
    counted.now += 0.5
    first = (await counted.report())[TALKER]
    assert first.totals == (await counted.report())[TALKER].totals
    assert (first.totals.placed, first.totals.placed_tokens, first.totals.computed_tokens, first.totals.output_tokens) == (
        1,
        40,
        40,
        5,
    )
    [sample] = first.samples
    assert (sample.age_s, sample.weight, sample.prompt_tokens, sample.max_output, sample.priority) == (2.5, 1.0, 40, 5, 3)
    assert sample.expected_output == 4
    assert sample.tokens_per_hash == BLOCK
    assert sample.hashes == pack_hashes(sequence_hashes(prompt_of(40), BLOCK))
    assert (await counted.report())[TALKER].samples == ()


async def test_however_many_requests_arrive_a_report_describes_a_bounded_number_of_them_fairly() -> None:
    counted = Counted()
    arrivals = 5_000
    for number in range(arrivals):
        counted.now += 0.0001
        counted.place("talker" if number % 4 else "other", first=number)
    report = await counted.report()
    samples = [sample for demand in report.values() for sample in demand.samples]
    assert len(samples) <= MAX_SAMPLES
    for pool, share in ((TALKER, 0.75), (Pool("other"), 0.25)):
        mine = report[pool].samples
        assert sum(sample.weight for sample in mine) == pytest.approx(arrivals * share)
        assert len(mine) == pytest.approx(MAX_SAMPLES * share, abs=1)
        ages = [sample.age_s for sample in mine]
        assert ages == sorted(ages, reverse=True)
        assert sum(ages) / len(ages) == pytest.approx(0.25, abs=0.12)  # the middle of half a second


async def test_a_long_prompt_is_described_by_the_hashes_of_every_nth_block() -> None:
    counted = Counted()
    for tokens in (BLOCK * 200, BLOCK * 2000):  # the second one is hashed in steps
        counted.place(tokens=tokens)
        [sample] = (await counted.report())[TALKER].samples
        hashes, stride = unpack_hashes(sample.hashes), sample.tokens_per_hash // BLOCK
        assert len(hashes) <= MAX_SAMPLE_HASHES
        assert stride * len(hashes) <= tokens // BLOCK < stride * (len(hashes) + 1)
        assert hashes == sequence_hashes(prompt_of(tokens), BLOCK)[stride - 1 :: stride]


async def test_a_report_says_what_caches_saved_and_of_too_many_those_that_saved_most() -> None:
    counted = Counted()
    counted.place(tokens=BLOCK)
    counts = counted.demand.of(TALKER.model, TALKER.role)
    counts.saved = {InstanceId(number): number for number in range(MAX_SAVED + 5)}
    saved = (await counted.report())[TALKER].saved
    assert len(saved) == MAX_SAVED
    assert saved[0] == (MAX_SAVED + 4, MAX_SAVED + 4)
    assert min(tokens for _, tokens in saved) == 5
    assert (await counted.report())[TALKER].saved == ()


async def test_a_pool_for_which_requests_wait_and_none_was_placed_is_reported() -> None:
    counted = Counted()
    counted.waiting[TALKER] = WaitingRequests(3, 120)
    demand = (await counted.report())[TALKER]
    assert (demand.waiting, demand.waiting_tokens, demand.totals.placed) == (3, 120, 0)
    counted.waiting.clear()
    assert (await counted.report())[TALKER].waiting == 0


async def test_reports_fit_into_the_messages_of_nats_and_can_be_read() -> None:
    counted = Counted()
    for number in range(300):
        counted.place(f"model-{number}", tokens=BLOCK * 64)
    demands = await counted.reporter.report()
    messages = list(counted.reporter.messages(demands, 16_384))
    assert len(messages) > 1
    assert [demand for message in messages for demand in message.pools] == demands
    for message in messages:
        encoded = msgspec.msgpack.encode(message)
        assert len(encoded) <= 16_384
        assert msgspec.msgpack.decode(encoded, type=DemandReport) == message
    assert list(counted.reporter.messages([], 16_384)) == [DemandReport("us")]


async def test_numbers_that_clients_choose_do_not_make_a_report_unreadable() -> None:
    counted = Counted()
    for _ in range(3):
        counted.place(expected_output_tokens=1 << 62, priority=-(1 << 40))
    [message] = counted.reporter.messages(await counted.reporter.report(), 1 << 20)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=DemandReport) == message


@in_virtual_time
async def test_a_frontend_reports_every_second_also_while_nothing_arrives() -> None:
    bus, registry, counted = FakeBus(), CollectorRegistry(), Counted()
    reports: list[DemandReport] = []
    reader = FakeConnection(bus)

    def received(subject: str, reply: str, payload: memoryview, no_responders: bool) -> None:
        reports.append(msgspec.msgpack.decode(payload, type=DemandReport))

    await reader.subscribe(demand_subject("ns"), received)
    gauges = FrontendMetrics(registry)
    async with reported_demand(FakeConnection(bus), "ns", "us", counted.demand, lambda: counted.waiting, gauges):
        await asyncio.sleep(1.5)
        counted.place()
        counted.demand.of("talker", Role.AGGREGATED).refuse(RouteRequest(model="talker"), 4, 0, counted.now)
        counted.waiting[TALKER] = WaitingRequests(2, 10)
        await asyncio.sleep(2)
    assert [report.origin for report in reports] == ["us", "us", "us"]
    assert [len(report.pools) for report in reports] == [0, 1, 1]
    labels = {"model": "talker", "role": "aggregated"}
    for outcome in ("placed", "refused"):
        assert registry.get_sample_value("dynamo_frontend_demand_requests_total", {**labels, "outcome": outcome}) == 1
    assert registry.get_sample_value("dynamo_frontend_demand_waiting_requests", labels) == 2
