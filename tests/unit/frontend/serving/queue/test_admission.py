from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from dynamo.common.discovery import Instance
from dynamo.common.errors import DeadlineExceeded, NoInstances, Overloaded, RateLimited
from dynamo.common.model_card import Role
from dynamo.common.names import InstanceId
from dynamo.common.tensors.request import TensorRequest
from dynamo.frontend.api.capacity import Capacity
from dynamo.frontend.config import CapacityOptions, QueueOptions, QueuePolicy, ServingOptions
from dynamo.frontend.metrics import FrontendMetrics
from dynamo.frontend.router.base import RouteRequest, RoutingDecision, TooLate
from dynamo.frontend.security.accounts import ANONYMOUS, Account, KeyAccount
from dynamo.frontend.security.keys import ApiKey
from dynamo.frontend.serving.call import Call, Work, wait_uncounted
from dynamo.frontend.serving.data_plane import open_data_plane
from dynamo.frontend.serving.dispatch.dispatched_stream import DispatchedStream
from dynamo.frontend.serving.dispatch.dispatcher import Dispatcher
from dynamo.frontend.serving.queue.admission import AdmissionQueue
from dynamo.frontend.serving.queue.fair_queue import FairQueue
from dynamo.frontend.serving.queue.fair_slots import FairSlots
from dynamo.frontend.serving.queue.queue_order import MOST_PASSES
from dynamo.protos.inference_pb2 import ModelInferRequest
from tests.support.fakes import FakeClient, FakeDirectory, FakeLink, FakeTexts, RecordingRouter, instance
from tests.support.plane import infer
from tests.support.virtual_time import in_virtual_time


class OneAtATime(RecordingRouter):
    """A router for which an instance with a request is busy."""

    def __init__(self, room: int = 1) -> None:
        super().__init__()
        self.room = room
        self.room_of_each: int | None = None
        """Instead of `room`."""
        self.ttft_goal_s = math.inf
        self.missing: dict[str, int] = {}
        """By name, which is the salt of the prompt."""

    def missing_tokens(self, request: RouteRequest, candidates: Sequence[Instance], *, with_room: bool = False) -> int | None:
        return self.missing.get(request.cache_salt) if with_room and len(self.open) < self.room else None

    def pick(self, request, candidates, *, explain=False) -> RoutingDecision:  # type: ignore[no-untyped-def]
        if request.waited_s > self.ttft_goal_s:
            raise TooLate("no instance can begin in time")
        if self.room_of_each is not None:
            open_ = list(self.open.values())
            candidates = [each for each in candidates if open_.count(each.id) < self.room_of_each]
        if not candidates or (self.room_of_each is None and len(self.open) >= self.room):
            raise Overloaded("all instances are busy", retry_after_s=1)
        return super().pick(request, candidates, explain=explain)


class Fleet:
    """One instance that responses when told to, behind a dispatcher with a queue."""

    def __init__(self, size: int, policy: QueuePolicy = QueuePolicy.FCFS) -> None:
        self.directory, self.client, self.router = FakeDirectory(instance(1)), FakeClient(lambda stream: None), OneAtATime()
        self.waiting: list[int] = []
        self.refused: list[str] = []
        self.waited: list[tuple[str, int, float]] = []
        self.queue = AdmissionQueue(
            size,
            policy,
            changed=lambda model, waiting: self.waiting.append(waiting),
            refused=lambda model, reason: self.refused.append(reason),
            waited=lambda model, priority, waited_s: self.waited.append((model, priority, waited_s)),
        )
        self.metrics = FrontendMetrics(CollectorRegistry()).for_model("adder")
        self.dispatcher = Dispatcher(self.directory, self.client, FakeLink(), self.router, queue=self.queue)
        self.done: list[str] = []

    def stream(self, name: str, *, prompt: int = 1, account: Account = ANONYMOUS, **more: object) -> DispatchedStream:
        """`more` is the deadline, or how its bytes count while it waits, or belongs to the work."""
        deadline: Any = more.pop("deadline", None)
        waiting: Any = more.pop("waiting", wait_uncounted)
        body, tokens = name.encode(), bytes(4 * prompt)
        work = Work(model="adder", verb="infer", body=body, metrics=self.metrics, prompt=tokens, cache_salt=name, **more)  # type: ignore[arg-type]
        call = Call(account=account, request_id=name, deadline=deadline, waiting=waiting)
        return self.dispatcher.stream(work, call)

    def send(self, name: str, **request: Any) -> asyncio.Task[None]:
        async def sent() -> None:
            await self.stream(name, **request).result()
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
    assert [priority for _, priority, _ in fleet.waited] == [5, 5, 0, 0], "the first one did not have to wait"
    assert all(model == "adder" and waited_s > 0 for model, _, waited_s in fleet.waited)


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
async def test_by_prefix_the_request_that_is_cached_where_there_is_room_goes_first() -> None:
    fleet = Fleet(10, QueuePolicy.PREFIX)
    fleet.router.missing = {"far": 900, "near": 100, "nearer": 10, "nearest, but unimportant": 0}
    tasks = [fleet.send("running")]
    await asyncio.sleep(0.01)
    tasks += [fleet.send(name, priority=0 if "unimportant" in name else 1) for name in fleet.router.missing]
    for _ in tasks:
        await asyncio.sleep(0.1)
        await fleet.respond()
    await asyncio.gather(*tasks)
    assert fleet.done == ["running", "nearer", "near", "far", "nearest, but unimportant"]


@in_virtual_time
async def test_by_prefix_a_request_is_passed_by_a_bounded_number_of_later_ones() -> None:
    fleet = Fleet(100, QueuePolicy.PREFIX)
    near = {f"near {number}": 1 for number in range(2 * MOST_PASSES)}
    fleet.router.missing = {"far": 900, **near}
    tasks = [fleet.send("running")]
    await asyncio.sleep(0.01)
    tasks += [fleet.send(name) for name in fleet.router.missing]
    await serve_all(fleet, tasks)
    assert fleet.done.index("far") == 1 + MOST_PASSES
    assert [name for name in fleet.done if name in near] == list(near)


@in_virtual_time
async def test_by_prefix_requests_go_in_order_while_nothing_is_known_of_caches() -> None:
    fleet = Fleet(10, QueuePolicy.PREFIX)
    tasks = [fleet.send(name) for name in "abcd"]
    await serve_all(fleet, tasks)
    assert fleet.done == list("abcd")


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
async def test_a_line_can_be_checked_without_waiting_in_it() -> None:
    fleet = Fleet(2)
    tasks = [fleet.send("a")]
    await asyncio.sleep(0.1)
    for name in "bc":
        fleet.stream("unimportant").check_line()
        tasks.append(fleet.send(name))
        await asyncio.sleep(0.1)
    assert fleet.queue.waiting("adder") == 2
    with pytest.raises(Overloaded, match="the queue for model 'adder' is full: 2 waiting"):
        fleet.stream("unimportant").check_line()
    fleet.stream("important", priority=1).check_line()
    await serve_all(fleet, tasks)
    assert fleet.done == list("abc"), "nothing has made room for a request that was only checked"


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
async def test_a_request_that_names_its_instance_waits_in_line_as_others_do() -> None:
    fleet = Fleet(10)
    tasks = [fleet.send(name) for name in "ab"]
    tasks.append(fleet.send("pinned", pinned=InstanceId(1)))
    await asyncio.sleep(0.1)
    tasks.append(fleet.send("c"))
    for _ in tasks:
        await fleet.respond()
    await asyncio.gather(*tasks)
    assert fleet.done == ["a", "b", "pinned", "c"]


@in_virtual_time
async def test_a_key_gets_no_more_of_the_fleet_by_naming_its_instances() -> None:
    fleet = Fleet(100)
    alice, bob = key("alice"), key("bob")
    tasks = [fleet.send("running", account=bob)]
    await asyncio.sleep(0.01)
    tasks += [fleet.send(f"a{number}", account=alice, pinned=InstanceId(1)) for number in range(4)]
    tasks += [fleet.send(f"b{number}", account=bob) for number in range(4)]
    await asyncio.sleep(0.01)
    for _ in tasks:
        await fleet.respond()
    await asyncio.gather(*tasks)
    turns = [name[0] for name in fleet.done[1:]]
    assert abs(turns[:4].count("a") - turns[:4].count("b")) <= 2
    assert sorted(turns[:2]) == ["a", "b"]


@in_virtual_time
async def test_requests_that_name_a_busy_instance_hold_up_no_others() -> None:
    fleet = Fleet(10)
    fleet.directory.add(instance(2))
    fleet.router.room_of_each = 1
    one, two = InstanceId(1), InstanceId(2)
    running = [fleet.send("on one", pinned=one), fleet.send("on two", pinned=two)]
    await asyncio.sleep(0.1)
    waiting = [fleet.send("first", pinned=one), fleet.send("second", pinned=one)]
    await asyncio.sleep(0.1)
    rest = [fleet.send("third"), fleet.send("fourth", pinned=two)]
    await asyncio.sleep(0.1)
    for name in ("on two", "third", "fourth", "on one", "first", "second"):
        next(s for s in fleet.client.streams if bytes(s.body).decode() == name and not s.is_over).end(b"response")
        await asyncio.sleep(0.1)
    await asyncio.gather(*running, *waiting, *rest)
    assert fleet.done == ["on two", "third", "fourth", "on one", "first", "second"]
    assert fleet.queue.waiting("adder") == 0


@in_virtual_time
async def test_a_new_request_does_not_wait_for_those_whose_instances_are_busy() -> None:
    fleet = Fleet(10)
    fleet.directory.add(instance(2))
    fleet.router.room_of_each = 1
    tasks = [fleet.send("running", pinned=InstanceId(1)), fleet.send("pinned", pinned=InstanceId(1))]
    await asyncio.sleep(0.1)
    began = now()
    tasks.append(fleet.send("new"))
    while "new" not in fleet.served and now() == began:
        await asyncio.sleep(0)
    assert now() == began
    for _ in tasks:
        await fleet.respond()
    await asyncio.gather(*tasks)


@in_virtual_time
async def test_without_a_queue_a_request_that_names_a_busy_instance_is_refused() -> None:
    fleet = Fleet(0)
    dispatcher = Dispatcher(fleet.directory, fleet.client, FakeLink(), fleet.router)
    work = Work(model="adder", verb="infer", body=b"x", metrics=fleet.metrics, pinned=InstanceId(1), needs_room=True)
    call = Call(account=ANONYMOUS, request_id="r")
    stream = dispatcher.stream(work, call)
    reading = asyncio.create_task(stream.read())
    await asyncio.sleep(0.1)
    with pytest.raises(Overloaded, match="busy"):
        await dispatcher.stream(work, call).result()
    reading.cancel()
    assert fleet.router.requests[0].needs_room


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
    with queue.position("talker", Role.DECODE, priority=0, tokens=1, deadline=None) as busy:
        await busy.turn()
        assert (queue.waiting("talker", Role.DECODE), queue.waiting("talker", Role.PREFILL)) == (1, 0)
        with queue.position("talker", Role.PREFILL, priority=0, tokens=1, deadline=None) as other:
            await other.turn()


@in_virtual_time
async def test_what_has_waited_too_long_for_its_goal_is_refused_and_the_next_has_its_turn() -> None:
    fleet = Fleet(10)
    fleet.router.ttft_goal_s = 2.0
    running, early = fleet.send("running"), fleet.send("early")
    await asyncio.sleep(1.5)
    late = fleet.send("late")
    await asyncio.sleep(1.0)
    with pytest.raises(TooLate):
        await early
    assert fleet.refused == ["goal"]
    await fleet.respond()
    await fleet.respond()
    await asyncio.gather(running, late)
    assert fleet.done == ["running", "late"]
    assert fleet.waiting[-1] == 0


@in_virtual_time
async def test_what_no_instance_can_begin_in_time_does_not_wait() -> None:
    fleet = Fleet(10)
    fleet.router.ttft_goal_s = -1.0
    with pytest.raises(TooLate):
        await fleet.stream("hopeless").result()
    assert not fleet.waiting


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

        running = asyncio.create_task(infer(plane, request, Call(account=ANONYMOUS, request_id="running")))
        await asyncio.sleep(0.01)
        expiring = asyncio.create_task(infer(plane, request, Call(account=ANONYMOUS, request_id="expiring", deadline=now() + 1)))
        await asyncio.sleep(0.01)
        assert count("requests") == 1
        with pytest.raises(Overloaded):
            await infer(plane, request, Call(account=ANONYMOUS, request_id="one too many"))
        with pytest.raises(DeadlineExceeded):
            await expiring
        assert count("requests") == 0
        assert (count("refusals_total", reason="full"), count("refusals_total", reason="expired")) == (1, 1)
        assert (count("seconds_count", priority="normal"), count("seconds_count", priority="high")) == (1, 0)
        assert count("seconds_sum", priority="normal") == pytest.approx(1, abs=0.1)
        client.streams[0].end(b"response")
        await running


# Between keys


def key(name: str, weight: float = 1.0) -> KeyAccount:
    return KeyAccount(ApiKey(name=name, salt=b"", digest=b"", weight=weight))


async def serve_all(fleet: Fleet, tasks: list[asyncio.Task[None]]) -> None:
    for _ in tasks:
        await asyncio.sleep(0.1)
        await fleet.respond()
    await asyncio.gather(*tasks)


@in_virtual_time
async def test_a_light_key_does_not_wait_behind_the_requests_of_a_heavy_one() -> None:
    fleet, heavy, light = Fleet(30), key("heavy"), key("light")
    tasks = [fleet.send(f"h{number}", account=heavy) for number in range(20)]
    await asyncio.sleep(0.1)
    tasks += [fleet.send(f"l{number}", account=light) for number in range(3)]
    await serve_all(fleet, tasks)
    assert fleet.done[:7] == ["h0", "h1", "l0", "h2", "l1", "h3", "l2"]
    assert fleet.done[7:] == [f"h{number}" for number in range(4, 20)]


@in_virtual_time
async def test_keys_get_tokens_in_proportion_to_their_weights() -> None:
    fleet, double, single = Fleet(100), key("double", 2.0), key("single")
    tasks = [fleet.send("first")]
    await asyncio.sleep(0.1)
    tasks += [fleet.send(f"d{number}", account=double, prompt=30) for number in range(30)]
    tasks += [fleet.send(f"s{number}", account=single, prompt=10) for number in range(30)]
    await serve_all(fleet, tasks)
    served = "".join(name[0] for name in fleet.done[1:36])
    tokens = {"d": 30 * served.count("d"), "s": 10 * served.count("s")}
    assert tokens["d"] == pytest.approx(2 * tokens["s"], rel=0.15)


@in_virtual_time
async def test_a_key_gets_no_more_tokens_by_requests_with_many_choices() -> None:
    fleet, many, one = Fleet(100), key("many"), key("one")
    tasks = [fleet.send("first")]
    await asyncio.sleep(0.1)
    tasks += [fleet.send(f"m{number}", account=many, expected_output_tokens=10, sequences=8) for number in range(30)]
    tasks += [fleet.send(f"o{number}", account=one, expected_output_tokens=10) for number in range(60)]
    await serve_all(fleet, tasks)
    served = "".join(name[0] for name in fleet.done[1:64])
    assert 81 * served.count("m") == pytest.approx(11 * served.count("o"), rel=0.15)


@in_virtual_time
async def test_higher_priority_goes_first_whichever_key_it_has() -> None:
    fleet, one, other = Fleet(30), key("one"), key("other")
    tasks = [fleet.send("first")]
    await asyncio.sleep(0.1)
    tasks += [fleet.send(f"batch{number}", account=other, priority=-1000) for number in range(2)]
    tasks += [fleet.send(f"normal{number}", account=one) for number in range(3)]
    tasks += [fleet.send("high", account=one, priority=5)]
    await serve_all(fleet, tasks)
    assert fleet.done == ["first", "high", "normal0", "normal1", "normal2", "batch0", "batch1"]


@in_virtual_time
async def test_a_heavy_key_that_fills_the_queue_makes_room_for_a_light_one() -> None:
    fleet, heavy, light = Fleet(4), key("heavy"), key("light")
    tasks = [fleet.send(f"h{number}", account=heavy) for number in range(5)]
    await asyncio.sleep(0.1)
    refused = fleet.send("h5", account=heavy)
    with pytest.raises(Overloaded, match="full: 4 waiting"):
        await refused
    tasks += [fleet.send("l0", account=light), fleet.send("l1", account=light)]
    await asyncio.sleep(0.1)
    for displaced in (tasks.pop(4), tasks.pop(3)):
        with pytest.raises(Overloaded, match="full: 4 waiting"):
            await displaced
    with pytest.raises(Overloaded):  # each has half of the queue now
        await fleet.send("l2", account=light)
    await serve_all(fleet, tasks)
    assert sorted(fleet.done) == ["h0", "h1", "h2", "l0", "l1"]
    assert max(fleet.waiting) == 4


@in_virtual_time
async def test_what_the_requests_of_a_key_hold_that_wait_in_line_leaves_room_for_others() -> None:
    fleet, capacity, tasks = Fleet(30), Capacity(CapacityOptions(max_buffered_bytes=1000)), []
    for number in range(5):
        occupied = capacity.enter()
        occupied.hold(150)
        tasks.append(fleet.send(f"h{number}", account=key("heavy"), waiting=occupied.waiting))
        await asyncio.sleep(0.1)
        if tasks[-1].done():
            occupied.leave()
    assert [task.done() for task in tasks] == [False, False, False, True, True]
    with pytest.raises(RateLimited, match="300 bytes of the API key 'heavy' wait for instances"):
        await tasks.pop()
    occupied = capacity.enter()
    occupied.hold(400)
    tasks[-1] = fleet.send("l0", account=key("light"), waiting=occupied.waiting)
    await serve_all(fleet, tasks)
    assert fleet.done == ["h0", "h1", "l0", "h2"]


@in_virtual_time
async def test_a_full_queue_refuses_the_longest_of_the_least_important_requests_for_a_more_important_one() -> None:
    fleet = Fleet(4)
    tasks = {"running": fleet.send("running")}
    await asyncio.sleep(0.01)
    for name, prompt, priority in (("long", 1000, 1), ("low", 10, 0), ("low and long", 100, 0), ("low too", 10, 0)):
        tasks[name] = fleet.send(name, prompt=prompt, priority=priority)
    await asyncio.sleep(0.01)
    tasks["high"] = fleet.send("high", priority=2)
    with pytest.raises(Overloaded, match="full: 4 waiting"):
        await tasks.pop("low and long")
    with pytest.raises(Overloaded, match="full: 4 waiting"):
        await fleet.send("as low as the lowest")
    await serve_all(fleet, list(tasks.values()))
    assert fleet.done == ["running", "high", "long", "low", "low too"]


@in_virtual_time
async def test_a_request_is_not_displaced_by_one_of_lower_priority() -> None:
    fleet, heavy, light = Fleet(2), key("heavy"), key("light")
    tasks = [fleet.send(f"h{number}", account=heavy) for number in range(3)]
    await asyncio.sleep(0.1)
    with pytest.raises(Overloaded):
        await fleet.send("batch", account=light, priority=-1000)
    await serve_all(fleet, tasks)


class Waiting:
    """An item that costs nothing to make."""

    def __init__(self, key: str, number: int) -> None:
        self.key, self.number, self.rank = key, number, 0.0

    def __lt__(self, other: object) -> bool:
        return isinstance(other, Waiting) and self.number < other.number


@given(
    steps=st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 50), st.booleans()), min_size=1, max_size=200),
    weights=st.fixed_dictionaries({key: st.sampled_from([0.5, 1.0, 4.0]) for key in "abc"}),
)
def test_between_two_keys_that_always_wait_no_one_is_ahead_by_more_than_a_request(
    steps: list[tuple[str, int, bool]], weights: dict[str, float]
) -> None:
    """There is always a request of `a` and of `b` in the queue; requests of `c` come and go."""
    queue: FairQueue[Waiting] = FairQueue()
    served = dict.fromkeys("abc", 0.0)
    numbers = itertools.count()
    for name in "ab":
        queue.push(Waiting(name, next(numbers)))
    for name, cost, is_there in steps:
        if is_there:
            queue.push(Waiting("c", next(numbers)))
        first = queue.next()
        assert first is not None
        item = queue.pop(first)
        queue.charge(item.key, cost, weights[item.key])
        served[item.key] += cost / weights[item.key]
        if item.key != "c":
            queue.push(Waiting(item.key, next(numbers)))
        assert abs(served["a"] - served["b"]) <= 50 / min(weights["a"], weights["b"])
        if name == "c" and (waiting := next((item for item in queue if item.key == "c"), None)):
            queue.remove(waiting)
    assert len(queue) == sum(1 for _ in queue)


@in_virtual_time
async def test_slots_are_given_to_keys_in_turn_and_come_back_however_the_work_ends() -> None:
    slots, order = FairSlots(2), []

    async def work(account: KeyAccount, name: str) -> None:
        async with slots.slot(account):
            order.append(name)
            await asyncio.sleep(1.0)
            if name == "a1":
                raise ValueError(name)

    one, other = key("one"), key("other")
    tasks = [asyncio.create_task(work(one, f"a{number}")) for number in range(8)]
    await asyncio.sleep(0.1)
    tasks += [asyncio.create_task(work(other, f"b{number}")) for number in range(3)]
    await asyncio.sleep(0.1)
    tasks[7].cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert order == ["a0", "a1", "b0", "a2", "b1", "a3", "b2", "a4", "a5", "a6"]
    assert [type(result) for result in results if result is not None] == [ValueError, asyncio.CancelledError]


@in_virtual_time
async def test_requests_for_many_busy_instances_are_tried_the_less_often_the_more_there_are() -> None:
    fleet = Fleet(200)
    fleet.router.room_of_each = 0
    for number in range(2, 101):
        fleet.directory.add(instance(number))
    tasks = [fleet.send(str(number), pinned=InstanceId(number)) for number in range(1, 101)]
    tries = 0
    pick = fleet.router.pick

    def count(*arguments: Any, **options: Any) -> RoutingDecision:
        nonlocal tries
        tries += 1
        return pick(*arguments, **options)

    fleet.router.pick = count  # type: ignore[method-assign]
    await asyncio.sleep(10)
    assert tries < 10 * 500
    fleet.router.room_of_each = 1
    await asyncio.sleep(1)
    assert len(fleet.served) == 100
    for _ in tasks:
        await fleet.respond()
    await asyncio.gather(*tasks)


@in_virtual_time
async def test_a_request_that_names_its_instance_has_its_turn_as_soon_as_one_there_ends() -> None:
    fleet = Fleet(10)
    fleet.directory.add(instance(2))
    fleet.router.room_of_each = 1
    one, two = InstanceId(1), InstanceId(2)
    tasks = [fleet.send("on one", pinned=one), fleet.send("on two", pinned=two)]
    await asyncio.sleep(0.1)
    tasks += [fleet.send("pinned", pinned=one), fleet.send("free")]
    await asyncio.sleep(0.1)
    began = now()
    fleet.client.streams[0].end(b"response")
    while "pinned" not in fleet.served and now() == began:
        await asyncio.sleep(0)
    assert now() == began
    for _ in tasks[1:]:
        await fleet.respond()
    await asyncio.gather(*tasks)
    assert fleet.done[-1] == "free"
