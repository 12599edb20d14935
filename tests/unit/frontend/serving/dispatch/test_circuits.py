from __future__ import annotations

import asyncio
from collections.abc import Sequence

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
    Overloaded,
    UnknownError,
)
from dynamo.common.model_card import Role
from dynamo.common.names import InstanceId
from dynamo.frontend.config import CircuitOptions, ServingOptions
from dynamo.frontend.metrics import FrontendMetrics
from dynamo.frontend.router.simple import RoundRobin
from dynamo.frontend.security.accounts import ANONYMOUS
from dynamo.frontend.serving.call import Call, Work
from dynamo.frontend.serving.dispatch.circuits import LONGEST_OPEN_S, PROBES, WINDOW_S, Circuits, CircuitState
from dynamo.frontend.serving.dispatch.dispatcher import Dispatcher
from tests.support.fakes import FakeClient, FakeDirectory, FakeLink, FakeStream, instance, llm_card
from tests.support.virtual_time import in_virtual_time

MODEL = "adder"
OPTIONS = CircuitOptions()


class Pool:
    """Instances of one model, and what happens to their circuits."""

    def __init__(self, *instances: Instance, options: CircuitOptions = OPTIONS) -> None:
        self.instances: Sequence[Instance] = instances or tuple(map(instance, (1, 2, 3)))
        self.now = 0.0
        self.open: dict[str, int] = {}
        self.opened = 0
        self.circuits = Circuits(options, lambda model: self.instances, lambda: self.now, self._changed)

    def _changed(self, model: str, count: int, opened: bool) -> None:
        self.open[model] = count
        self.opened += opened

    def ended(self, id_: int, *results: bool, error: DynamoError | None = None) -> None:
        """Requests at an instance end, well (True) or with an error of its engine, or `error`."""
        for is_well in results:
            self.circuits.ended(self._of(id_), None if is_well else error or EngineError("broken"), is_probe=False)

    def fail(self, id_: int) -> None:
        """Have an instance fail as many requests as open its circuit."""
        self.ended(id_, *[False] * OPTIONS.min_failures)

    def probe(self, id_: int, *, is_well: bool) -> None:
        assert self.circuits.sent(self._of(id_))
        self.circuits.ended(self._of(id_), None if is_well else EngineError("broken"), is_probe=True)

    def state(self, id_: int) -> CircuitState:
        return self.circuits.state(MODEL, InstanceId(id_))

    def admits(self, id_: int) -> bool:
        self.circuits.advance()
        return self.circuits.admits(self._of(id_))

    def _of(self, id_: int) -> Instance:
        return next(each for each in self.instances if each.id == id_)


def test_an_instance_that_fails_half_of_its_requests_is_opened() -> None:
    pool = Pool()
    while pool.state(1) is CircuitState.CLOSED:
        pool.ended(1, False, True)
        pool.ended(2, True, True)
        pool.ended(3, True, True)
    assert pool.state(1) is CircuitState.OPEN
    assert [pool.admits(each) for each in (1, 2, 3)] == [False, True, True]
    assert (pool.open, pool.opened) == ({MODEL: 1}, 1)


def test_few_failures_among_many_requests_open_nothing() -> None:
    pool = Pool()
    for _ in range(100):
        pool.ended(1, False, *[True] * 9)
    assert pool.state(1) is CircuitState.CLOSED


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequest("no"),
        UnknownError("no"),
        Overloaded("full"),
        Cancelled(),
        DeadlineExceeded(),
        InstanceGone(InstanceId(1)),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_is_not_the_fault_of_the_engine_does_not_count(error: DynamoError) -> None:
    pool = Pool()
    pool.ended(1, *[False] * 100, error=error)
    assert not pool.circuits.is_watching


def test_requests_that_fail_everywhere_open_nothing() -> None:
    pool = Pool()
    for _ in range(100):
        for id_ in (1, 2, 3):
            pool.ended(id_, False, True)
    assert not pool.circuits.are_open


def test_no_more_than_a_share_of_a_pool_is_open_at_once() -> None:
    pool = Pool(*map(instance, range(1, 7)))
    for id_ in range(1, 7):
        pool.fail(id_)
    assert [pool.admits(id_) for id_ in range(1, 7)] == [False] * 3 + [True] * 3


def test_the_only_instance_is_never_opened() -> None:
    pool = Pool(instance(1))
    pool.fail(1)
    assert pool.admits(1)


def test_instances_in_another_role_are_no_others() -> None:
    cards = [llm_card(MODEL, role=role) for role in (Role.PREFILL, Role.DECODE, Role.DECODE)]
    pool = Pool(*(instance(id_, card) for id_, card in enumerate(cards, 1)))
    pool.fail(1)
    assert pool.admits(1)
    pool.fail(2)
    assert not pool.admits(2)


def test_it_is_half_open_after_a_time_and_closed_by_probes_one_at_a_time() -> None:
    pool = Pool()
    pool.fail(1)
    pool.now += OPTIONS.open_s - 0.1
    assert not pool.admits(1)
    pool.now += 0.2
    assert pool.state(1) is CircuitState.HALF_OPEN
    assert pool.admits(1)
    assert pool.circuits.sent(instance(1))
    assert not pool.admits(1), "one at a time"
    pool.circuits.ended(instance(1), None, is_probe=True)
    for _ in range(PROBES - 1):
        assert pool.state(1) is CircuitState.HALF_OPEN
        pool.probe(1, is_well=True)
    assert pool.state(1) is CircuitState.CLOSED
    assert pool.open == {MODEL: 0}


def test_a_probe_that_fails_opens_it_for_twice_as_long_up_to_a_bound() -> None:
    pool = Pool()
    pool.fail(1)
    times = []
    for _ in range(8):
        opened_at = pool.now
        pool.now = pool.circuits.next_change_at
        times.append(pool.now - opened_at)
        pool.circuits.advance()
        pool.probe(1, is_well=False)
    assert times == [10.0, 20.0, 40.0, 80.0, 160.0, LONGEST_OPEN_S, LONGEST_OPEN_S, LONGEST_OPEN_S]


def test_a_probe_that_is_cancelled_gives_its_place_back() -> None:
    pool = Pool()
    pool.fail(1)
    pool.now += OPTIONS.open_s
    pool.circuits.advance()
    assert pool.circuits.sent(instance(1))
    pool.circuits.ended(instance(1), Cancelled(), is_probe=True)
    assert pool.state(1) is CircuitState.HALF_OPEN
    assert pool.admits(1)


def test_old_failures_are_forgotten() -> None:
    pool = Pool()
    pool.ended(1, *[False] * (OPTIONS.min_failures - 1))
    for _ in range(8):
        pool.now += WINDOW_S
        pool.ended(1, True)
    assert not pool.circuits.is_watching
    pool.ended(1, False)
    assert not pool.circuits.are_open


def test_nothing_is_kept_of_an_instance_that_left() -> None:
    pool = Pool()
    pool.fail(1)
    pool.instances = tuple(map(instance, (2, 3)))
    pool.circuits.removed(InstanceId(1))
    assert (pool.circuits.are_open, pool.circuits.is_watching, pool.open) == (False, False, {MODEL: 0})
    pool.circuits.ended(instance(1), EngineError("its last"), is_probe=False)
    assert not pool.circuits.is_watching


def test_without_the_option_nothing_is_opened() -> None:
    pool = Pool(options=CircuitOptions(enabled=False))
    pool.fail(1)
    assert not pool.circuits.is_watching


class Fleet:
    """Three instances, of which the first fails every second request while `is_broken`, behind a round-robin router."""

    def __init__(self, settings: ServingOptions | None = None) -> None:
        self.is_broken = True
        self.count = 0
        self.client = FakeClient(self._respond)
        directory = FakeDirectory(*map(instance, (1, 2, 3)))
        self.dispatcher = Dispatcher(directory, self.client, FakeLink(), RoundRobin(), settings)
        self._metrics = FrontendMetrics(CollectorRegistry()).for_model(MODEL)

    def _respond(self, stream: FakeStream) -> None:
        self.count += stream.instance == 1
        if stream.instance == 1 and self.is_broken and self.count % 2:
            stream.fail(EngineError("broken"))
        else:
            stream.end(b"response")

    async def failed(self, requests: int, every_s: float = 0.0, **more: object) -> int:
        """Return how many of so many requests fail."""
        failures = 0
        for _ in range(requests):
            work = Work(model=MODEL, verb="infer", body=b"", metrics=self._metrics, **more)  # type: ignore[arg-type]
            try:
                await self.dispatcher.stream(work, Call(account=ANONYMOUS, request_id="r")).result()
            except EngineError:
                failures += 1
            await asyncio.sleep(every_s)
        return failures


@in_virtual_time
async def test_of_three_instances_one_that_fails_half_fails_no_request_after_its_first_few() -> None:
    without = Fleet(ServingOptions(circuit=CircuitOptions(enabled=False)))
    assert await without.failed(600, every_s=0.1) == 100
    fleet = Fleet()
    assert await fleet.failed(100, every_s=0.1) == OPTIONS.min_failures
    assert await fleet.failed(600, every_s=0.1) == 0, "a probe that fails is sent to another instance"


@in_virtual_time
async def test_an_instance_that_is_repaired_gets_requests_again() -> None:
    fleet = Fleet()
    await fleet.failed(100, every_s=0.1)
    fleet.is_broken = False
    assert await fleet.failed(300, every_s=0.1) == 0
    assert not fleet.dispatcher.circuits.are_open
    fleet.client.streams.clear()
    await fleet.failed(30)
    assert fleet.client.sent_to.count(1) == 10


@in_virtual_time
async def test_a_request_that_names_an_open_instance_goes_there() -> None:
    fleet = Fleet()
    await fleet.failed(100, every_s=0.01)
    fleet.client.streams.clear()
    assert await fleet.failed(10, pinned=InstanceId(1)) == 5
    assert fleet.client.sent_to == [1] * 10


@in_virtual_time
async def test_requests_that_name_an_instance_do_not_open_it() -> None:
    fleet = Fleet()
    assert await fleet.failed(100, pinned=InstanceId(1)) == 50
    assert not fleet.dispatcher.circuits.are_open


@in_virtual_time
async def test_an_instance_whose_circuit_is_open_serves_where_no_other_can() -> None:
    fleet = Fleet()
    await fleet.failed(100, every_s=0.01)
    fleet.dispatcher.leave_out(InstanceId(2))
    fleet.dispatcher.leave_out(InstanceId(3))
    fleet.is_broken = False
    assert await fleet.failed(3) == 0
