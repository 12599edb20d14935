"""Which instances are left out after their canaries."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from dynamo.common.discovery import Instance
from dynamo.common.errors import DeadlineExceeded, DynamoError, EngineError, InstanceGone, Overloaded, ShuttingDown
from dynamo.common.messaging.buffers import Body, Buffer
from dynamo.common.names import InstanceId
from dynamo.frontend.fleet.canary import Canaries, watching_instances
from dynamo.frontend.metrics import FrontendMetrics
from dynamo.frontend.router.simple import RoundRobin
from dynamo.frontend.serving.dispatch.dispatcher import Dispatcher
from tests.support.fakes import FakeClient, FakeDirectory, FakeLink, instance
from tests.support.http_edge import chat_card
from tests.support.virtual_time import in_virtual_time
from tests.support.waiting import WAIT_S


class QueriedFleet:
    """A dispatcher that responds to canaries as a test wants, and leaves out as the real one does."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self.dispatcher = dispatcher
        self.failures: dict[int, DynamoError] = {}
        self.bodies: list[tuple[InstanceId, object]] = []
        self.queried = asyncio.Event()
        self.leave_out = dispatcher.leave_out
        self.take_back = dispatcher.take_back

    async def query(self, instance: Instance, verb: str, body: Body, deadline: float) -> Buffer:
        assert verb == "canary" and isinstance(body, bytes)
        self.bodies.append((instance.id, msgspec.msgpack.decode(body)))
        self.queried.set()
        if (error := self.failures.get(instance.id)) is not None:
            raise error
        return b""

    def candidates(self) -> set[int]:
        from dynamo.frontend.serving.call import Work  # what a request would be sent to

        work = Work(model="talker", verb="generate", body=b"", metrics=FrontendMetrics(CollectorRegistry()).for_model("talker"))
        return {candidate.id for candidate in self.dispatcher.candidates.select(work)}


class Fleet:
    def __init__(self, count: int = 2) -> None:
        self.directory = FakeDirectory(*(instance(number, chat_card()) for number in range(1, count + 1)))
        self.queries = QueriedFleet(Dispatcher(self.directory, FakeClient(), FakeLink(), RoundRobin()))
        self.registry = CollectorRegistry()
        self.canaries = Canaries(self.directory, self.queries, FrontendMetrics(self.registry), wait_s=0.01, timeout_s=WAIT_S)

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"dynamo_frontend_{name}", {"model": "talker", **labels})


async def test_an_instance_whose_engine_fails_is_left_out_until_it_passes() -> None:
    fleet = Fleet()
    await fleet.canaries.round()
    assert fleet.queries.candidates() == {1, 2}
    fleet.queries.failures[2] = EngineError("out of memory")
    await fleet.canaries.round()
    assert fleet.queries.candidates() == {1}
    assert fleet.value("instances_left_out") == 1
    assert fleet.value("canaries_total", outcome="failed") == 1
    del fleet.queries.failures[2]
    await fleet.canaries.round()
    assert fleet.queries.candidates() == {1, 2}
    assert fleet.value("instances_left_out") == 0


async def test_the_last_instances_of_a_model_are_used_whatever_their_canaries_say() -> None:
    fleet = Fleet()
    fleet.queries.failures = {1: DeadlineExceeded(), 2: DeadlineExceeded()}
    await fleet.canaries.round()
    assert fleet.queries.candidates() == {1, 2}
    assert fleet.value("instances_left_out") == 2


@pytest.mark.parametrize(
    "refusal",
    [lambda: Overloaded("full"), lambda: ShuttingDown("the worker"), lambda: InstanceGone(2)],
    ids=["full", "drains", "gone"],
)
async def test_what_requests_notice_themselves_is_no_failed_canary(refusal: Callable[[], DynamoError]) -> None:
    fleet = Fleet()
    fleet.queries.failures[2] = refusal()
    await fleet.canaries.round()
    assert fleet.queries.candidates() == {1, 2}


async def test_an_instance_that_came_back_under_its_name_begins_anew() -> None:
    fleet = Fleet()
    fleet.queries.failures[2] = DeadlineExceeded()
    await fleet.canaries.round()
    fleet.directory.remove(2)
    await fleet.canaries.round()
    assert fleet.value("instances_left_out") == 0


@in_virtual_time
async def test_a_refusal_does_not_shorten_how_long_an_instance_is_left_out() -> None:
    fleet = Fleet()
    fleet.queries.failures[2] = DeadlineExceeded()
    await fleet.canaries.round()
    fleet.queries.dispatcher.candidates.failed(InstanceId(2), ShuttingDown("the worker"))
    await asyncio.sleep(60)
    assert fleet.queries.candidates() == {1}


async def test_instances_are_queried_again_and_again_about_the_time_in_between() -> None:
    fleet = Fleet(1)
    async with watching_instances(fleet.canaries), asyncio.timeout(WAIT_S):
        for _ in range(3):
            fleet.queries.queried.clear()
            await fleet.queries.queried.wait()
    assert fleet.queries.bodies[0] == (1, {"model": "talker", "idle_s": 0.01})
