from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from dynamo.common.discovery import Instance
from dynamo.common.errors import (
    Cancelled,
    DeadlineExceeded,
    DynamoError,
    EngineError,
    InstanceGone,
    InvalidRequest,
    NoInstances,
    Overloaded,
    ShuttingDown,
    Unavailable,
)
from dynamo.common.model_card import Role
from dynamo.common.names import InstanceId
from dynamo.frontend.config import RetryOptions, ServingOptions
from dynamo.frontend.metrics import FrontendMetrics
from dynamo.frontend.security.accounts import ANONYMOUS, KeyAccount
from dynamo.frontend.security.keys import ApiKey
from dynamo.frontend.serving.call import Call, Work
from dynamo.frontend.serving.dispatch.candidates import able_to_serve
from dynamo.frontend.serving.dispatch.dispatcher import Dispatcher
from dynamo.frontend.serving.dispatch.retry import QUARANTINE_S
from tests.support.fakes import (
    FakeClient,
    FakeDirectory,
    FakeLink,
    FakeStream,
    RecordingRouter,
    instance,
    llm_card,
    tensor_card,
)
from tests.support.virtual_time import in_virtual_time


@dataclass
class Bench:
    """A dispatcher among fakes."""

    directory: FakeDirectory
    client: FakeClient
    link: FakeLink
    router: RecordingRouter
    registry: CollectorRegistry
    metrics: FrontendMetrics
    dispatcher: Dispatcher

    def work(self, body: bytes = b"request", **more: Any) -> Work:
        return Work(model="adder", verb="infer", body=body, metrics=self.metrics.for_model("adder"), **more)

    async def call(self, call: Call | None = None) -> bytes:
        return bytes(await self.dispatcher.stream(self.work(), call or Call(account=ANONYMOUS, request_id="r")).result())

    def retries(self) -> float:
        return self.registry.get_sample_value("dynamo_frontend_retries_total", {"model": "adder"}) or 0.0


def bench(
    respond: Callable[[FakeStream], None] = lambda stream: None,
    *instances: Instance,
    settings: ServingOptions | None = None,
) -> Bench:
    directory = FakeDirectory(*(instances or (instance(1), instance(2), instance(3))))
    client, link, router = FakeClient(respond), FakeLink(), RecordingRouter()
    dispatcher = Dispatcher(directory, client, link, router, settings)
    registry = CollectorRegistry()
    return Bench(directory, client, link, router, registry, FrontendMetrics(registry), dispatcher)


def failing_on(failures: dict[int, DynamoError]) -> Callable[[FakeStream], None]:
    """Instances that fail every request; all others respond."""

    def respond(stream: FakeStream) -> None:
        error = failures.get(int(stream.instance))
        if error is None:
            stream.end(b"response")
        else:
            stream.fail(error)

    return respond


def gone(id_: int) -> InstanceGone:
    """The request did not reach it."""
    return InstanceGone(InstanceId(id_), "is gone", was_held=False)


def died(id_: int) -> InstanceGone:
    return InstanceGone(InstanceId(id_))


async def test_a_request_is_served_and_its_booking_released() -> None:
    b = bench(failing_on({}))
    assert await b.call(Call(account=ANONYMOUS, request_id="abc", headers={"traceparent": "00-1"})) == b"response"
    assert b.client.streams[0].headers == {"traceparent": "00-1", "request-id": "abc"}
    assert not b.router.open
    assert b.router.outcomes == [None]


async def test_a_request_with_a_prompt_tells_its_instance_the_booking() -> None:
    b = bench(failing_on({}))
    work = b.work()
    work.prompt = b"\1\0\0\0"
    await b.dispatcher.stream(work, Call(account=ANONYMOUS, request_id="abc")).result()
    assert b.client.streams[0].headers == {"request-id": "abc", "booking": b.router.requests[0].booking_id, "many": ""}


async def test_a_request_whose_instance_is_gone_is_served_by_another() -> None:
    b = bench(failing_on({1: gone(1)}))
    assert await b.call() == b"response"
    assert b.client.sent_to == [1, 2]
    assert b.retries() == 1
    assert not b.router.open


async def test_an_instance_that_is_gone_gets_no_further_request() -> None:
    b = bench(failing_on({1: gone(1)}))
    await b.call()
    await b.call()
    assert b.directory.down == [1]
    assert b.client.sent_to == [1, 2, 2]


async def test_an_instance_that_only_lost_the_request_is_not_marked_down() -> None:
    b = bench(failing_on({1: InstanceGone(InstanceId(1), "lost part of its response on the way", is_alive=True)}))
    assert await b.call() == b"response"
    assert b.directory.down == []


async def test_an_instance_that_lost_the_request_gets_it_again_if_no_other_can_serve_it() -> None:
    lost = InstanceGone(InstanceId(1), "got only a part of the request", is_alive=True, was_held=False)
    gone = InstanceGone(InstanceId(2), "is gone", was_held=False)
    failures = {1: [lost], 2: [gone]}

    def respond(stream: FakeStream) -> None:
        if failures.get(int(stream.instance)):
            stream.fail(failures[int(stream.instance)].pop())
        else:
            stream.end(b"response")

    b = bench(respond, instance(1), instance(2))
    assert await b.call() == b"response"
    assert b.client.sent_to == [1, 2, 1]


@in_virtual_time
async def test_an_instance_that_drains_is_left_alone_for_a_second() -> None:
    b = bench(failing_on({1: ShuttingDown("the worker")}))
    assert await b.call() == b"response"
    assert await b.call() == b"response"
    await asyncio.sleep(1.01)
    assert await b.call() == b"response"
    assert b.client.sent_to == [1, 2, 2, 1, 2]
    assert b.directory.down == []


async def test_an_instance_that_refuses_is_sent_requests_all_the_same_if_it_is_the_only_one() -> None:
    b = bench(failing_on({1: Unavailable("the model is being reloaded")}), instance(1))
    for _ in range(2):
        with pytest.raises(Unavailable, match="being reloaded"):
            await b.call()
    assert b.client.sent_to == [1, 1]


@pytest.mark.parametrize("error", [InvalidRequest("no"), EngineError("broken"), DeadlineExceeded()])
async def test_an_error_that_is_not_retryable_is_raised(error: DynamoError) -> None:
    b = bench(failing_on({1: error}))
    with pytest.raises(type(error)):
        await b.call()
    assert b.client.sent_to == [1]
    assert b.router.outcomes == [error]


async def test_a_request_visits_no_instance_twice_and_reports_the_last_failure() -> None:
    b = bench(failing_on({id_: Overloaded(f"{id_} is full") for id_ in (1, 2, 3)}))
    with pytest.raises(Overloaded, match="3 is full"):
        await b.call()
    assert b.client.sent_to == [1, 2, 3]
    assert not b.router.open


async def test_attempts_are_limited() -> None:
    settings = ServingOptions(retry=RetryOptions(max_attempts=2))
    b = bench(failing_on({id_: Overloaded("full") for id_ in (1, 2, 3)}), settings=settings)
    with pytest.raises(Overloaded):
        await b.call()
    assert b.client.sent_to == [1, 2]


async def test_without_an_instance_a_request_fails_at_once() -> None:
    b = bench()
    b.directory.remove(1, 2, 3)
    call = asyncio.ensure_future(b.call())
    for _ in range(100):
        await asyncio.sleep(0)
    assert call.done(), "it waits for nothing"
    with pytest.raises(NoInstances, match="no instance is serving model 'adder' now"):
        await call


async def test_when_all_instances_are_gone_a_request_fails_at_once() -> None:
    b = bench(failing_on({id_: gone(id_) for id_ in (1, 2, 3)}))
    with pytest.raises(Unavailable):
        await b.call()
    with pytest.raises(NoInstances):
        await b.call()
    assert b.client.sent_to == [1, 2, 3]


@pytest.mark.parametrize("settings", [ServingOptions(), ServingOptions(retry=RetryOptions(max_attempts=100))])
async def test_a_request_that_kills_instances_kills_two_at_most(settings: ServingOptions) -> None:
    instances = [instance(id_) for id_ in range(1, 7)]
    b = bench(failing_on({id_: died(id_) for id_ in range(1, 7)}), *instances, settings=settings)
    with pytest.raises(EngineError, match="2 instances died while they held this request, so it is not sent to another one"):
        await b.call()
    assert b.client.sent_to == [1, 2]
    assert not b.router.open


def guided_work(b: Bench, fingerprint: bytes = b"schema") -> Work:
    work = b.work()
    work.fingerprint = fingerprint
    return work


async def outcome(b: Bench, work: Work) -> str:
    try:
        return bytes(await b.dispatcher.stream(work, Call(account=ANONYMOUS, request_id="r")).result()).decode()
    except EngineError as error:
        return str(error)


REFUSED = "2 instances died while they held requests with this schema or grammar, so it is refused for 10 minutes"


@in_virtual_time
async def test_a_schema_that_killed_two_instances_goes_to_no_third_one_however_often_it_is_sent() -> None:
    deadly = {id_: died(id_) for id_ in range(1, 7)}
    b = bench(failing_on(deadly), *[instance(id_) for id_ in range(1, 7)])
    assert "2 instances died while they held this request" in await outcome(b, guided_work(b))
    assert [await outcome(b, guided_work(b)) for _ in range(64)] == [REFUSED] * 64
    assert b.client.sent_to == [1, 2]
    await asyncio.sleep(QUARANTINE_S)
    assert "2 instances died while they held this request" in await outcome(b, guided_work(b))
    assert await outcome(b, guided_work(b)) == REFUSED
    deadly.clear()
    assert await outcome(b, guided_work(b, b"another schema")) == "response"
    assert await outcome(b, b.work()) == "response"


async def test_requests_without_a_schema_are_never_refused_for_what_died_with_them() -> None:
    b = bench(failing_on({id_: died(id_) for id_ in range(1, 5)}), *[instance(id_) for id_ in range(1, 7)])
    for _ in range(2):
        assert "2 instances died while they held this request" in await outcome(b, b.work())
    assert await outcome(b, b.work()) == "response"


async def test_requests_in_flight_at_two_kills_are_all_served_by_a_third_instance_and_clear_their_schema() -> None:
    held: list[FakeStream] = []

    def respond(stream: FakeStream) -> None:
        held.append(stream) if stream.instance in (1, 2) else stream.end(b"response")

    b = bench(respond, *[instance(id_) for id_ in (1, 2, 3)])
    calls = [asyncio.create_task(outcome(b, guided_work(b))) for _ in range(32)]
    while len(held) < 32:
        await asyncio.sleep(0)
    b.dispatcher.leave_out(InstanceId(1))
    calls += [asyncio.create_task(outcome(b, guided_work(b))) for _ in range(32)]
    while len(held) < 64:
        await asyncio.sleep(0)
    assert {stream.instance for stream in held} == {1, 2}
    b.directory.remove(1, 2)  # as the watch says when leases end
    for stream in held:
        stream.fail(died(int(stream.instance)))
    assert await asyncio.gather(*calls) == ["response"] * 64
    assert await outcome(b, guided_work(b)) == "response"


async def test_an_instance_that_did_not_get_the_request_did_not_die_of_it() -> None:
    b = bench(failing_on({1: died(1), 2: gone(2), 3: ShuttingDown("the worker")}), *[instance(id_) for id_ in range(1, 5)])
    assert await b.call() == b"response"
    assert b.client.sent_to == [1, 2, 3, 4]


# The retry budget


@in_virtual_time
async def test_retries_stay_a_fraction_of_the_requests() -> None:
    settings = ServingOptions(retry=RetryOptions(ratio=0.2, floor_per_s=0.0, burst=1))
    b = bench(failing_on({1: Overloaded("full")}), settings=settings)
    outcomes = []
    for _ in range(101):
        try:
            await b.call()
            outcomes.append(True)
        except Overloaded:
            outcomes.append(False)
    assert sum(outcomes) == 1 + 20


@in_virtual_time
async def test_a_key_that_uses_up_its_retries_leaves_those_of_others() -> None:
    settings = ServingOptions(retry=RetryOptions(ratio=0.0, floor_per_s=0.0, burst=2))
    b = bench(failing_on({1: Overloaded("full")}), settings=settings)
    call_of_key = Call(account=KeyAccount(ApiKey(name="greedy", salt=b"", digest=b"")), request_id="k")
    for _ in range(2):
        assert await b.call(call_of_key) == b"response"
    with pytest.raises(Overloaded):
        await b.call(call_of_key)
    for _ in range(2):
        assert await b.call() == b"response"


@in_virtual_time
async def test_a_refusal_that_cost_no_work_takes_no_retry() -> None:
    settings = ServingOptions(retry=RetryOptions(ratio=0.0, floor_per_s=0.0, burst=1))
    unknown = InvalidRequest("the sequence has not begun here")
    unknown.retryable = True
    b = bench(failing_on({1: unknown}), settings=settings)
    for _ in range(3):
        assert await b.call() == b"response"
    b.client.respond = failing_on({1: Overloaded("full")})
    assert await b.call() == b"response"
    with pytest.raises(Overloaded):
        await b.call()


@in_virtual_time
async def test_copies_for_shadows_neither_use_up_the_retries_of_requests_nor_earn_any() -> None:
    settings = ServingOptions(retry=RetryOptions(ratio=1.0, floor_per_s=0.0, burst=1))
    b = bench(failing_on({1: Overloaded("full")}), settings=settings)
    copy = Call(account=ANONYMOUS, request_id="c", is_copy=True)
    for _ in range(3):
        with pytest.raises(Overloaded):
            await b.call(copy)
    assert b.client.sent_to == [1, 1, 1]
    assert await b.call() == b"response"  # by the one retry that there is
    with pytest.raises(Overloaded):
        await b.call(copy)
    budget = ServingOptions(retry=RetryOptions(ratio=0.0, floor_per_s=0.0, burst=1))
    b = bench(failing_on({1: Overloaded("full")}), settings=budget)
    await b.call()
    with pytest.raises(Overloaded):
        await b.call(copy)
    with pytest.raises(Overloaded):
        await b.call()


# Deadlines


@in_virtual_time
async def test_a_request_whose_deadline_has_passed_is_not_sent() -> None:
    b = bench(failing_on({}))
    await asyncio.sleep(1)
    with pytest.raises(DeadlineExceeded):
        await b.call(Call(account=ANONYMOUS, request_id="r", deadline=0.5))
    assert b.client.sent_to == []


@in_virtual_time
async def test_a_failure_after_the_deadline_is_not_retried() -> None:
    b = bench()
    loop = asyncio.get_running_loop()
    # The instance's word comes in the same turn of the loop as the deadline.
    b.client.respond = lambda stream: loop.call_at(1.0, stream.fail, gone(1)) and None
    with pytest.raises(DeadlineExceeded):
        await b.call(Call(account=ANONYMOUS, request_id="r", deadline=1.0))
    assert b.client.sent_to == [1]
    assert not b.router.open


@in_virtual_time
async def test_requests_without_a_deadline_get_the_default_one() -> None:
    b = bench(settings=ServingOptions(request_timeout_s=3.0))
    with pytest.raises(DeadlineExceeded):
        await b.call()
    assert asyncio.get_running_loop().time() == 3.0
    assert not b.router.open


# Streams


async def test_a_stream_is_retried_before_its_first_frame() -> None:
    b = bench()
    async with b.dispatcher.stream(b.work(), Call(account=ANONYMOUS, request_id="r")) as stream:
        reading = asyncio.create_task(stream.read())
        (await b.client.next_stream()).fail(gone(1))
        second = await b.client.next_stream()
        second.data(b"one", b"two")
        assert await reading == [b"one", b"two"]
        assert b.router.first_tokens == list(b.router.open)
        second.end(b"last word")
        assert await stream.read() == []
        assert stream.trailer == b"last word"
        assert not b.router.open
    assert b.client.sent_to == [1, 2]


async def test_a_stream_is_not_retried_after_its_first_frame() -> None:
    b = bench()
    async with b.dispatcher.stream(b.work(), Call(account=ANONYMOUS, request_id="r")) as stream:
        b.client.respond = lambda opened: opened.data(b"one")
        assert await stream.read() == [b"one"]
        b.client.streams[0].fail(gone(1))
        with pytest.raises(InstanceGone):
            await stream.read()
    assert b.client.sent_to == [1]
    assert b.directory.down == [1]
    assert not b.router.open


async def test_leaving_a_stream_early_cancels_it_and_releases_the_booking() -> None:
    b = bench(lambda opened: opened.data(b"one"))
    async with b.dispatcher.stream(b.work(), Call(account=ANONYMOUS, request_id="r")) as stream:
        await stream.read()
        assert len(b.router.open) == 1
    assert b.client.streams[0].cancelled
    assert not b.router.open
    assert isinstance(b.router.outcomes[0], Cancelled)


async def test_a_cancelled_call_is_cancelled_at_the_instance_and_releases_the_booking() -> None:
    b = bench()
    calling = asyncio.create_task(b.call())
    stream = await b.client.next_stream()
    calling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await calling
    assert stream.cancelled
    assert not b.router.open


async def test_a_request_that_cannot_be_sent_releases_the_booking() -> None:
    def too_large(stream: FakeStream) -> None:
        raise InvalidRequest("the request is too large")

    b = bench(too_large)
    with pytest.raises(InvalidRequest):
        await b.call()
    assert not b.router.open
    assert len(b.router.outcomes) == 1


async def test_two_requests_of_one_id_have_bookings_of_their_own() -> None:
    b = bench()
    calls = [asyncio.create_task(b.call(Call(account=ANONYMOUS, request_id="same"))) for _ in range(2)]
    await asyncio.sleep(0)
    assert len(b.router.open) == 2
    for stream in b.client.streams:
        stream.end(b"response")
    assert await asyncio.gather(*calls) == [b"response", b"response"]


# A named instance


async def test_a_request_that_names_its_instance_goes_nowhere_else() -> None:
    b = bench(failing_on({2: Overloaded("full")}))
    with pytest.raises(Overloaded):
        await b.dispatcher.stream(b.work(pinned=InstanceId(2)), Call(account=ANONYMOUS, request_id="r")).result()
    assert b.client.sent_to == [2]


async def test_the_error_for_an_unknown_instance_names_it() -> None:
    b = bench()
    with pytest.raises(Unavailable, match="instance ff does not serve model 'adder' now"):
        await b.dispatcher.stream(b.work(pinned=InstanceId(255)), Call(account=ANONYMOUS, request_id="r")).result()


# Our own NATS connection


@in_virtual_time
async def test_requests_wait_for_the_connection_and_are_then_served() -> None:
    b = bench(failing_on({}))
    b.link.cut()
    asyncio.get_running_loop().call_later(2.0, b.link.restore)
    assert await b.call(Call(account=ANONYMOUS, request_id="r", deadline=10.0)) == b"response"
    assert 2.0 < asyncio.get_running_loop().time() < 2.2


@in_virtual_time
@pytest.mark.parametrize("deadline", [10.0, 100.0])
async def test_requests_wait_for_the_connection_until_their_deadline(deadline: float) -> None:
    b = bench(failing_on({}), settings=ServingOptions(retry=RetryOptions(disconnected_wait_s=30.0)))
    b.link.cut()
    with pytest.raises(DeadlineExceeded):
        await b.call(Call(account=ANONYMOUS, request_id="r", deadline=deadline))
    assert asyncio.get_running_loop().time() == deadline


@in_virtual_time
async def test_a_request_is_served_when_the_connection_is_back_just_before_its_deadline() -> None:
    b = bench(failing_on({}))
    b.link.cut()
    asyncio.get_running_loop().call_later(90.0, b.link.restore)
    assert await b.call(Call(account=ANONYMOUS, request_id="r", deadline=100.0)) == b"response"


@in_virtual_time
async def test_requests_without_a_deadline_do_not_wait_for_the_connection_forever() -> None:
    b = bench(failing_on({}), settings=ServingOptions(retry=RetryOptions(disconnected_wait_s=30.0)))
    b.link.cut()
    with pytest.raises(Unavailable, match="no connection to its workers"):
        await b.call()
    assert asyncio.get_running_loop().time() == 30.0


@in_virtual_time
async def test_after_a_reconnect_an_instance_that_is_still_away_is_waited_for() -> None:
    away = {1: gone(1)}
    b = bench(failing_on(away), instance(1))  # type: ignore[arg-type]
    b.link.cut()
    b.link.restore()
    asyncio.get_running_loop().call_later(1.0, away.clear)
    assert await b.call() == b"response"
    assert asyncio.get_running_loop().time() < 1.6
    assert b.directory.down == [], "it was not gone, only later than we"


@in_virtual_time
async def test_after_a_reconnect_an_instance_that_is_still_away_is_not_waited_for_if_another_is_back() -> None:
    b = bench(failing_on({1: gone(1), 2: gone(2)}))
    b.link.cut()
    b.link.restore()
    assert [await b.call() for _ in range(3)] == [b"response"] * 3
    assert b.client.sent_to == [1, 2, 3] * 3
    assert b.directory.down == []


@in_virtual_time
@pytest.mark.parametrize("has_responded", [False, True])
async def test_a_frontend_that_just_started_waits_for_instances_that_it_never_reached(has_responded: bool) -> None:
    away = {number: InstanceGone(number, "is gone", was_held=False, has_responded=has_responded) for number in (1, 2, 3)}
    b = bench(failing_on(away))  # type: ignore[arg-type]
    b.link.opened_at = 0.0
    asyncio.get_running_loop().call_later(1.0, away.clear)
    if has_responded:
        with pytest.raises(InstanceGone):
            await b.call()
        assert b.directory.down == [1, 2, 3]
    else:
        assert await b.call() == b"response"
        assert b.directory.down == []


@in_virtual_time
async def test_after_a_reconnect_a_fleet_that_was_emptied_is_waited_for() -> None:
    b = bench(failing_on({}))
    b.directory.remove(1, 2, 3)
    b.link.cut()
    b.link.restore()
    asyncio.get_running_loop().call_later(1.0, b.directory.add, instance(7))
    assert await b.call() == b"response"
    assert b.client.sent_to == [7]


@in_virtual_time
async def test_the_grace_after_a_reconnect_ends() -> None:
    b = bench(failing_on({1: gone(1)}), instance(1))
    b.link.cut()
    b.link.restore()
    with pytest.raises(Unavailable):
        await b.call()
    assert 5.0 <= asyncio.get_running_loop().time() < 6.0
    assert b.directory.down == [1]


@in_virtual_time
async def test_while_our_own_connection_is_silent_no_instance_is_blamed_for_its_silence() -> None:
    silent = {id_: died(id_) for id_ in (1, 2, 3)}
    b = bench(failing_on(silent))  # type: ignore[arg-type]
    b.link.is_silent = True

    def received() -> None:
        b.link.is_silent = False
        silent.clear()

    asyncio.get_running_loop().call_later(6.0, received)
    assert await b.call() == b"response"
    assert 6.0 < asyncio.get_running_loop().time() < 6.6
    assert b.directory.down == []
    assert b.retries() > 2


# Who can serve


def test_a_version_is_served_by_instances_that_have_it() -> None:
    old, new = instance(1, tensor_card(versions=("1",))), instance(2, tensor_card(versions=("1", "2")))
    assert able_to_serve((old, new)) == (old, new)
    assert able_to_serve((old, new), version="2") == (new,)


def test_tokens_go_only_to_instances_of_the_same_tokenizer() -> None:
    old, new = instance(1, llm_card(tokenizer="t1")), instance(2, llm_card(tokenizer="t2"))
    assert able_to_serve((old, new), tokenizer="t2") == (new,)


def test_a_decode_instance_serves_only_beside_a_prefill_instance() -> None:
    decode, prefill = instance(1, llm_card(role=Role.DECODE)), instance(2, llm_card(role=Role.PREFILL))
    both = instance(3, llm_card())
    assert able_to_serve((decode,)) == (decode,)
    assert able_to_serve((prefill,)) == ()
    assert able_to_serve((decode, prefill, both)) == (decode, both)
    assert able_to_serve((decode, prefill, both), role=Role.PREFILL) == (prefill,)
    assert able_to_serve((decode, prefill, both), role=Role.DECODE) == (decode,)


async def test_candidates_are_computed_once_per_change_of_the_fleet() -> None:
    b = bench()
    first = b.dispatcher.candidates.able_to_serve("adder")
    assert b.dispatcher.candidates.able_to_serve("adder") is first
    b.directory.add(instance(4))
    assert len(b.dispatcher.candidates.able_to_serve("adder")) == 4


async def test_a_stream_shows_where_it_is_and_what_it_has_tried() -> None:
    b = bench(failing_on({1: gone(1), 2: EngineError("broken")}))
    async with b.dispatcher.stream(b.work(), Call(account=ANONYMOUS, request_id="r")) as stream:
        assert repr(stream) == "<DispatchedStream r of model 'adder', failed at []: None>"
        with pytest.raises(EngineError):
            await stream.read()
        assert repr(stream) == "<DispatchedStream r of model 'adder', failed at ['1']: EngineError('broken')>"
