"""Each request counts once in the demand for its pool, whatever becomes of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from dynamo.common.discovery import Instance
from dynamo.common.errors import (
    DeadlineExceeded,
    DynamoError,
    InstanceGone,
    InvalidRequest,
    NoInstances,
    Overloaded,
    Unavailable,
)
from dynamo.common.generation import GenerateRequest, Summary, pack_tokens, summary_encoder
from dynamo.common.model_card import LlmInfo, ModelCard, ModelKind, Role
from dynamo.common.names import InstanceId
from dynamo.common.scaling.pool import Pool
from dynamo.frontend.config import DisaggregationOptions
from dynamo.frontend.metrics import FrontendMetrics
from dynamo.frontend.router.base import RouteRequest, RoutingDecision
from dynamo.frontend.router.demand import DemandTable, PoolCounts, WaitingRequests
from dynamo.frontend.router.measured import MeasuredRouter
from dynamo.frontend.router_metrics import RouterMetrics
from dynamo.frontend.security.accounts import ANONYMOUS
from dynamo.frontend.serving.call import Call, Work
from dynamo.frontend.serving.dispatch.disaggregation import Disaggregation
from dynamo.frontend.serving.dispatch.dispatched_stream import DispatchedStream
from dynamo.frontend.serving.dispatch.dispatcher import Dispatcher
from dynamo.frontend.serving.queue.admission import AdmissionQueue
from tests.support.fakes import FakeClient, FakeDirectory, FakeLink, FakeStream, RecordingRouter, instance
from tests.support.virtual_time import in_virtual_time

PROMPT_TOKENS = 100


def card(role: Role = Role.AGGREGATED) -> ModelCard:
    llm = LlmInfo(context_length=4096, tokenizer="t", block_size=16)
    return ModelCard(name="talker", kind=ModelKind.LLM, role=role, llm=llm)


class Choosing(RecordingRouter):
    """A router that finds `overlap` blocks of a prompt, and lets so many requests run at once."""

    overlap = 0
    room = 100

    def pick(self, request: RouteRequest, candidates: Sequence[Instance], *, explain: bool = False) -> RoutingDecision:
        if len(self.open) >= self.room:
            raise Overloaded("all instances are busy")
        return msgspec.structs.replace(super().pick(request, candidates, explain=explain), overlap_blocks=self.overlap)

    def missing_tokens(self, request: RouteRequest, candidates: Sequence[Instance], *, with_room: bool = False) -> int | None:
        return len(request.prompt) // 4 - 16 * self.overlap


class Fleet:
    def __init__(
        self, *instances: Instance, respond: Callable[[FakeStream], None] = lambda stream: None, queue_size: int = 0
    ) -> None:
        self.directory, self.client, self.router = FakeDirectory(*instances), FakeClient(respond), Choosing()
        self.metrics, self.demand = FrontendMetrics(CollectorRegistry()), DemandTable()
        self.measured = MeasuredRouter(self.router, RouterMetrics(self.metrics), demand=self.demand)
        queue = AdmissionQueue(queue_size) if queue_size else None
        self.dispatcher = Dispatcher(self.directory, self.client, FakeLink(), self.measured, None, queue, self.demand)

    def work(self, **more: Any) -> Work:
        prompt = bytes(4 * PROMPT_TOKENS)
        metrics = self.metrics.for_model("talker")
        given = {"prompt": prompt, "expected_output_tokens": 7, "body": b""} | more
        return Work(model="talker", verb="generate", metrics=metrics, **given)

    def stream(self, deadline: float | None = None, **more: Any) -> DispatchedStream:
        return self.dispatcher.stream(self.work(**more), Call(account=ANONYMOUS, request_id="r", deadline=deadline))

    def counts(self, role: Role = Role.AGGREGATED) -> PoolCounts:
        return self.demand.of("talker", role)


def responding(stream: FakeStream) -> None:
    stream.data(b"token")
    stream.end(summary_encoder.encode(Summary(prompt_tokens=PROMPT_TOKENS, kv_transfer={"blocks": [1]})))


async def whole(stream: DispatchedStream) -> None:
    async with stream:
        while await stream.read():
            pass


async def test_no_more_of_a_prompt_is_saved_than_it_has_whatever_the_size_of_blocks_that_an_instance_says() -> None:
    """Blocks are looked for by the size that one candidate says; the numbers go to planners, which refuse what is too large."""
    fleet = Fleet(instance(1, card()), respond=responding)
    fleet.router.overlap = 2**60
    await whole(fleet.stream())
    counts = fleet.counts()
    assert (counts.computed_tokens, counts.take_saved()) == (1, ((1, PROMPT_TOKENS),))


async def test_a_request_counts_with_the_tokens_that_its_instance_has_not_cached() -> None:
    fleet = Fleet(instance(1, card()), respond=responding)
    fleet.router.overlap = 4
    await whole(fleet.stream())
    counts = fleet.counts()
    assert (counts.placed, counts.placed_tokens, counts.computed_tokens, counts.output_tokens) == (1, 100, 100 - 4 * 16, 7)
    assert counts.refused == 0
    arrived, samples = counts.take_samples()
    assert (arrived, len(samples)) == (1, 1)


async def test_what_an_instance_had_cached_is_told_once() -> None:
    fleet = Fleet(instance(1, card()), respond=responding)
    fleet.router.overlap = 4
    for _ in range(2):
        await whole(fleet.stream())
    assert fleet.counts().take_saved() == ((1, 2 * 4 * 16),)
    fleet.router.overlap = 0
    await whole(fleet.stream())
    assert fleet.counts().take_saved() == ()


async def test_a_request_with_tensors_counts_without_tokens() -> None:
    fleet = Fleet(instance(1, card()), respond=responding)
    await whole(fleet.stream(prompt=b"", expected_output_tokens=0))
    counts = fleet.counts()
    assert (counts.placed, counts.placed_tokens, counts.computed_tokens) == (1, 0, 0)


async def test_a_request_that_is_sent_to_another_instance_counts_once() -> None:
    def respond(stream: FakeStream) -> None:
        if stream.instance == 1:
            stream.fail(InstanceGone(InstanceId(1)))
        else:
            responding(stream)

    fleet = Fleet(instance(1, card()), instance(2, card()), respond=respond)
    await whole(fleet.stream())
    assert fleet.client.sent_to == [1, 2]
    assert (fleet.counts().placed, fleet.counts().refused) == (1, 0)


async def test_the_rest_of_a_response_that_moves_does_not_count() -> None:
    fleet = Fleet(instance(1, card()), instance(2, card()))
    async with fleet.stream() as stream:
        reading = asyncio.create_task(stream.read())
        (await fleet.client.next_stream()).data(b"token")
        await reading
        error = InstanceGone(InstanceId(1))
        fleet.client.streams[0].fail(error)
        with pytest.raises(InstanceGone):
            await stream.read()
        fleet.client.respond = responding
        await stream.move(error, fleet.work(prompt=bytes(4 * (PROMPT_TOKENS + 1))))
        while await stream.read():
            pass
    assert fleet.client.sent_to == [1, 2]
    assert fleet.counts().placed == 1


@pytest.mark.parametrize("busy", [False, True])
async def test_a_request_that_gets_no_instance_counts_as_refused_once(busy: bool) -> None:
    fleet = Fleet(*([instance(1, card())] if busy else []))
    fleet.router.room, fleet.router.overlap = 0, 2
    error: type[DynamoError] = Overloaded if busy else NoInstances
    async with fleet.stream() as stream:
        for _ in range(2):
            with pytest.raises(error):
                await stream.read()
    counts = fleet.counts()
    assert (counts.placed, counts.refused) == (0, 1)
    assert counts.refused_tokens == (100 - 2 * 16 if busy else 100)
    assert counts.take_samples()[0] == 1


async def test_a_request_that_its_client_has_sent_wrongly_does_not_count() -> None:
    class Refusing(Choosing):
        def pick(self, request: RouteRequest, candidates: Sequence[Instance], *, explain: bool = False) -> RoutingDecision:
            raise InvalidRequest("requests must name their instance here")

    fleet = Fleet(instance(1, card()))
    fleet.dispatcher.router.pick = Refusing().pick  # type: ignore[method-assign]
    with pytest.raises(InvalidRequest):
        await fleet.stream().read()
    with pytest.raises(Unavailable):
        await fleet.stream(pinned=InstanceId(7)).read()
    assert (fleet.counts().placed, fleet.counts().refused) == (0, 0)


@in_virtual_time
async def test_requests_in_the_queue_are_waiting_until_they_are_placed_or_give_up() -> None:
    fleet = Fleet(instance(1, card()), queue_size=2)
    fleet.router.room, fleet.router.overlap = 1, 1
    now = asyncio.get_running_loop().time()
    tasks = [asyncio.create_task(fleet.stream(deadline).result()) for deadline in (None, now + 5.0, None)]
    await asyncio.sleep(0.1)
    assert fleet.dispatcher.waiting() == {Pool("talker"): WaitingRequests(2, 2 * (100 - 16))}
    with pytest.raises(Overloaded, match="is full"):
        fleet.stream().check_line()
    assert (fleet.counts().placed, fleet.counts().refused) == (1, 1)
    await asyncio.sleep(10)
    with pytest.raises(DeadlineExceeded):
        await tasks[1]
    assert fleet.dispatcher.waiting() == {Pool("talker"): WaitingRequests(1, 100 - 16)}
    tasks[2].cancel()
    await asyncio.wait(tasks[2:])
    assert fleet.dispatcher.waiting() == {}
    assert (fleet.counts().placed, fleet.counts().refused) == (1, 3)
    fleet.client.streams[0].end(b"response")
    assert await tasks[0] == b"response"


async def test_a_prompt_that_is_computed_apart_counts_for_both_pools_and_its_tokens_for_one() -> None:
    fleet = Fleet(instance(1, card(Role.PREFILL)), instance(2, card(Role.DECODE)), respond=responding)
    prompt = GenerateRequest(model="talker", prompt=pack_tokens(range(PROMPT_TOKENS)))
    disaggregation = Disaggregation(fleet.dispatcher, DisaggregationOptions())
    call = Call(account=ANONYMOUS, request_id="r")
    placed = await disaggregation.place(fleet.work(prompt=prompt.prompt), prompt, call)
    await whole(fleet.dispatcher.stream(placed.work, call))
    prefill, decode = fleet.counts(Role.PREFILL), fleet.counts(Role.DECODE)
    assert (prefill.placed, prefill.placed_tokens, prefill.computed_tokens, prefill.output_tokens) == (1, 100, 100, 1)
    assert (decode.placed, decode.placed_tokens, decode.computed_tokens, decode.output_tokens) == (1, 100, 0, 7)
    assert fleet.counts().placed == 0


def test_the_times_to_first_token_are_compared_with_their_predictions() -> None:
    class Predicting(RecordingRouter):
        def pick(self, request: RouteRequest, candidates: Sequence[Instance], *, explain: bool = False) -> RoutingDecision:
            return msgspec.structs.replace(super().pick(request, candidates, explain=explain), ttft_s=2.0)

    now = 0.0
    demand = DemandTable(lambda: now)
    metrics = RouterMetrics(FrontendMetrics(CollectorRegistry()))
    router = MeasuredRouter(Predicting(), metrics, clock=lambda: now, demand=demand)
    for number, seconds in enumerate([1.0, 3.0, 8.0]):
        request = RouteRequest(model="talker", booking_id=str(number))
        router.pick(request, [instance(1, card())])
        now += seconds
        router.first_token(request.booking_id)
        router.finished(request.booking_id)
    assert demand.of("talker", Role.AGGREGATED).ttft_ratio() == 1.5
