from __future__ import annotations

import asyncio

import pytest
from prometheus_client import CollectorRegistry

from dynamo.common.errors import DeadlineExceeded, NoInstances, Overloaded
from dynamo.common.model_card import Role
from dynamo.common.names import InstanceId
from dynamo.common.tensor_request import TensorRequest
from dynamo.frontend.config import QueueOptions, QueuePolicy, ServingOptions
from dynamo.frontend.metrics import FrontendMetrics
from dynamo.frontend.router.base import RoutingDecision
from dynamo.frontend.security.accounts import ANONYMOUS
from dynamo.frontend.serving.admission import AdmissionQueue
from dynamo.frontend.serving.call import Call, Work
from dynamo.frontend.serving.data_plane import open_data_plane
from dynamo.frontend.serving.dispatch import Dispatcher
from dynamo.protos.inference_pb2 import ModelInferRequest
from tests.support.fakes import FakeClient, FakeDirectory, FakeLink, FakeTexts, RecordingRouter, instance
from tests.support.virtual_time import in_virtual_time


class OneAtATime(RecordingRouter):
    """A router for which an instance with a request is busy."""

    def __init__(self, room: int = 1) -> None:
        super().__init__()
        self.room = room

    def pick(self, request, candidates, *, explain=False) -> RoutingDecision:  # type: ignore[no-untyped-def]
        if len(self.open) >= self.room:
            raise Overloaded("all instances are busy", retry_after_s=1)
        return super().pick(request, candidates, explain=explain)


class Fleet:
    """One instance that responses when told to, behind a dispatcher with a queue."""

    def __init__(self, size: int, policy: QueuePolicy = QueuePolicy.FCFS) -> None:
        self.directory, self.client, self.router = FakeDirectory(instance(1)), FakeClient(lambda stream: None), OneAtATime()
        self.waiting: list[int] = []
        self.queue = AdmissionQueue(size, policy, lambda model, waiting: self.waiting.append(waiting))
        self.metrics = FrontendMetrics(CollectorRegistry()).for_model("adder")
        self.dispatcher = Dispatcher(self.directory, self.client, FakeLink(), self.router, queue=self.queue)
        self.done: list[str] = []

    def send(self, name: str, *, prompt: int = 1, **call: object) -> asyncio.Task[None]:
        work = Work(model="adder", verb="infer", body=name.encode(), metrics=self.metrics, prompt=bytes(4 * prompt))

        async def sent() -> None:
            await self.dispatcher.call(work, Call(account=ANONYMOUS, request_id=name, **call))  # type: ignore[arg-type]
            self.done.append(name)

        return asyncio.create_task(sent())

    @property
    def served(self) -> list[str]:
        return [bytes(stream.body).decode() for stream in self.client.streams]

    async def respond(self) -> None:
        """The instance responses its oldest request; everything that follows from it happens."""
        next(stream for stream in self.client.streams if not stream.is_over).end(b"response")
        await asyncio.sleep(0.1)


def now() -> float:
    return asyncio.get_running_loop().time()


@in_virtual_time
async def test_requests_wait_while_all_are_busy_and_are_served_in_the_order_they_came() -> None:
    fleet = Fleet(10)
    tasks = [fleet.send(name) for name in "abcd"]
    await asyncio.sleep(0.1)
    assert fleet.served == ["a"]
    assert max(fleet.waiting) == 3
    for _ in tasks:
        await fleet.respond()
    await asyncio.gather(*tasks)
    assert fleet.done == list("abcd")
    assert fleet.waiting[-1] == 0


@in_virtual_time
async def test_higher_priority_goes_first_and_equals_stay_in_order() -> None:
    fleet = Fleet(10)
    first = fleet.send("first")
    await asyncio.sleep(0)
    tasks = [fleet.send("low"), fleet.send("high", priority=5), fleet.send("high too", priority=5)]
    await asyncio.sleep(0.1)
    fleet.router.room = 0  # none may begin until all stand in line
    await fleet.respond()
    fleet.router.room = 1
    late = fleet.send("late")
    for _ in range(4):
        await asyncio.sleep(0.1)
        await fleet.respond()
    await asyncio.gather(first, late, *tasks)
    assert fleet.done == ["first", "high", "high too", "low", "late"]


@in_virtual_time
async def test_by_wspt_short_requests_go_first_unless_a_long_one_is_important_enough() -> None:
    fleet = Fleet(10, QueuePolicy.WSPT)
    tasks = [fleet.send("running")]
    await asyncio.sleep(0.01)
    for name, prompt, priority in (("long", 1000, 0), ("short", 10, 0), ("long and important", 1000, 999), ("middle", 100, 0)):
        tasks.append(fleet.send(name, prompt=prompt, priority=priority))
        await asyncio.sleep(0.01)
    for _ in tasks:
        await fleet.respond()
    await asyncio.gather(*tasks)
    assert fleet.done == ["running", "long and important", "short", "middle", "long"]


@in_virtual_time
async def test_one_more_than_may_wait_is_refused_at_once_with_a_time_to_retry() -> None:
    fleet = Fleet(2)
    tasks = [fleet.send(name) for name in "abc"]
    await asyncio.sleep(0.1)
    with pytest.raises(Overloaded, match="the queue for model 'adder' is full: 2 waiting") as refused:
        await fleet.send("d")
    assert refused.value.retry_after_s is not None and refused.value.retry_after_s >= 1
    for _ in tasks:
        await fleet.respond()
    assert fleet.done == list("abc")


@in_virtual_time
async def test_a_request_whose_deadline_passes_in_line_fails_and_makes_room() -> None:
    fleet = Fleet(1)
    running = fleet.send("running")
    await asyncio.sleep(0.01)
    begun = now()
    with pytest.raises(DeadlineExceeded):
        await fleet.send("late", deadline=begun + 2)
    assert now() - begun == pytest.approx(2, abs=0.01)
    waiting = fleet.send("patient")
    await fleet.respond()
    await fleet.respond()
    await asyncio.gather(running, waiting)
    assert fleet.served == ["running", "patient"]


@in_virtual_time
async def test_who_cannot_be_served_in_time_is_refused_early() -> None:
    fleet = Fleet(10)
    tasks = [fleet.send(str(number)) for number in range(9)]
    for _ in range(4):
        await asyncio.sleep(1)
        await fleet.respond()  # from here on the pace is known: one in about a second
    with pytest.raises(Overloaded, match=r"wait for about \d\.\d s now, and this one has 1\.0 s left"):
        await fleet.send("in a hurry", deadline=now() + 1)
    in_time = fleet.send("in time", deadline=now() + 60)
    for _ in range(6):
        await fleet.respond()
    await asyncio.gather(in_time, *tasks)
    assert "in a hurry" not in fleet.served


@in_virtual_time
async def test_a_request_that_is_cancelled_in_line_is_not_served_and_delays_no_other() -> None:
    fleet = Fleet(10)
    tasks = [fleet.send(name) for name in "abc"]
    await asyncio.sleep(0.1)
    tasks[1].cancel()
    await fleet.respond()
    await fleet.respond()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert fleet.served == ["a", "c"]
    assert fleet.queue.waiting("adder") == 0


@in_virtual_time
async def test_room_that_only_a_load_report_shows_is_taken_soon() -> None:
    fleet = Fleet(10)
    fleet.router.room = 0
    task = fleet.send("a")
    await asyncio.sleep(1)
    assert fleet.served == []
    fleet.router.room = 1
    await asyncio.sleep(0.05)
    assert fleet.served == ["a"]
    await fleet.respond()
    await task


@in_virtual_time
async def test_when_the_last_instance_leaves_those_in_line_hear_so() -> None:
    fleet = Fleet(10)
    fleet.router.room = 0
    tasks = [fleet.send("a"), fleet.send("b")]
    await asyncio.sleep(0.1)
    fleet.directory.remove(InstanceId(1))
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(result) for result in results] == [NoInstances, NoInstances]
    assert fleet.queue.waiting("adder") == 0


@in_virtual_time
async def test_a_pinned_request_does_not_wait_for_others() -> None:
    fleet = Fleet(10)
    tasks = [fleet.send(name) for name in "ab"]
    await asyncio.sleep(0.1)
    with pytest.raises(Overloaded, match="all instances are busy"):
        await fleet.send("pinned", instance=InstanceId(1))
    for _ in tasks:
        await fleet.respond()


@in_virtual_time
async def test_a_quiet_hour_says_nothing_about_the_pace() -> None:
    fleet = Fleet(10)
    for _ in range(3):
        tasks = [fleet.send("running"), fleet.send("waiting")]
        await asyncio.sleep(0.5)
        await fleet.respond()
        await fleet.respond()
        await asyncio.gather(*tasks)
        await asyncio.sleep(3600)
    tasks = [fleet.send("running"), fleet.send("first"), fleet.send("second", deadline=now() + 5)]
    await asyncio.sleep(0.1)
    assert fleet.queue.waiting("adder") == 2
    for _ in tasks:
        await fleet.respond()
    await asyncio.gather(*tasks)


@in_virtual_time
async def test_the_first_in_line_is_let_wait_however_slow_it_was_before() -> None:
    """Or a pace once measured as slow would stay the last one measured."""
    fleet = Fleet(10)
    slow = [fleet.send("running"), fleet.send("waiting")]
    await asyncio.sleep(100)
    await fleet.respond()
    await fleet.respond()
    running, hasty = fleet.send("running"), fleet.send("hasty", deadline=now() + 1)
    await asyncio.sleep(0.01)
    await fleet.respond()
    await fleet.respond()
    await asyncio.gather(*slow, running, hasty)


@in_virtual_time
async def test_busy_decode_instances_do_not_delay_requests_for_a_prefill_instance() -> None:
    queue = AdmissionQueue(1)
    with queue.place("talker", Role.DECODE, priority=0, tokens=1, deadline=None) as busy:
        await busy.turn()
        assert (queue.waiting("talker", Role.DECODE), queue.waiting("talker", Role.PREFILL)) == (1, 0)
        with queue.place("talker", Role.PREFILL, priority=0, tokens=1, deadline=None) as other:
            await other.turn()


@in_virtual_time
async def test_metrics_say_how_many_wait_and_why_others_may_not() -> None:
    registry = CollectorRegistry()
    metrics, client, router = FrontendMetrics(registry), FakeClient(lambda stream: None), OneAtATime()
    settings = ServingOptions(queue=QueueOptions(size=1))
    directory = FakeDirectory(instance(1))
    async with open_data_plane(directory, client, FakeLink(), router, FakeTexts(), metrics, settings) as plane:
        head = ModelInferRequest(model_name="adder")
        head.inputs.add(name="x", datatype="INT32", shape=[1])
        request = TensorRequest.build(head, [bytes(4)])

        def count(name: str, **labels: str) -> float:
            return registry.get_sample_value(f"dynamo_frontend_router_queue_{name}", {"model": "adder", **labels}) or 0.0

        running = asyncio.create_task(plane.infer(request, Call(account=ANONYMOUS, request_id="running")))
        await asyncio.sleep(0.01)
        expiring = asyncio.create_task(plane.infer(request, Call(account=ANONYMOUS, request_id="expiring", deadline=now() + 1)))
        await asyncio.sleep(0.01)
        assert count("requests") == 1
        with pytest.raises(Overloaded):
            await plane.infer(request, Call(account=ANONYMOUS, request_id="one too many"))
        with pytest.raises(DeadlineExceeded):
            await expiring
        assert count("requests") == 0
        assert (count("refusals_total", reason="full"), count("refusals_total", reason="expired")) == (1, 1)
        client.streams[0].end(b"response")
        await running
