"""Decoupled models with queue policies: which of their requests wait, in which order they run, and which are refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from dynamo.common.errors import EngineError, Overloaded, Unavailable
from dynamo.worker.engine.request_queue import QueueOptions, QueuePolicies, QueuePolicy, QueueTimeout, TimeoutAction
from dynamo.worker.repository.execution import ModelResult
from dynamo.worker.repository.models import RepositoryModels
from dynamo.worker.repository.request_gate import RequestGate, ResponseOrder
from tests.support.repositories import X_TO_Y, infer, opened, python_model, x
from tests.support.waiting import until

DECOUPLED = X_TO_Y + "model_transaction_policy { decoupled: true }\n"
SLOW = """
import os, threading, time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.folder = args["model_repository"]
        self.order = 0
    def wait_for(self, name):
        while not os.path.exists(os.path.join(self.folder, name)):
            time.sleep(0.001)
    def execute(self, requests):
        [request] = requests
        value = float(request.inputs()[0].as_numpy()[0])
        self.order += 1
        open(os.path.join(self.folder, f"begun-{value:g}"), "w").close()
        if value == 0:
            self.wait_for("go")
        if value == -1:
            os._exit(3)
        threading.Thread(target=self.respond, args=(request.get_response_sender(), value, self.order)).start()
    def respond(self, sender, value, order):
        if value >= 100:
            self.wait_for(f"respond-{value:g}")
        y = pb_utils.Tensor("y", np.array([order], np.float32))
        sender.send(pb_utils.InferenceResponse([y]), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


class Requests:
    """Requests at a gate, and the order in which they were let in."""

    def __init__(self, gate: RequestGate) -> None:
        self.entered: list[str] = []
        self.releases: dict[str, Callable[[], None]] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self._gate = gate

    async def arrive(self, name: str, **options: Any) -> None:
        self.tasks[name] = asyncio.create_task(self._enter(name, QueueOptions(**options)))
        await self.settle()

    async def leave(self, name: str) -> None:
        self.releases[name]()
        await self.settle()

    async def _enter(self, name: str, options: QueueOptions) -> None:
        self.releases[name] = await self._gate.enter(options)
        self.entered.append(name)

    async def settle(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)


async def test_requests_enter_in_the_order_of_their_priorities_as_slots_become_free() -> None:
    requests = Requests(gate := RequestGate(QueuePolicies(levels=3, default_level=2), 2))
    for name, priority in {"a": 3, "b": 3, "c": 3, "d": 0, "e": 1, "f": 1}.items():
        await requests.arrive(name, priority=priority)
    assert (requests.entered, gate.waiting) == (["a", "b"], 4)
    for name in ("b", "a", "f", "e"):
        await requests.leave(name if name in requests.releases else requests.entered[-1])
    assert requests.entered == ["a", "b", "e", "f", "d", "c"]


async def test_a_level_that_is_full_refuses_and_others_do_not() -> None:
    policies = QueuePolicies(levels=2, default_level=2, by_level={1: QueuePolicy(max_size=1)})
    requests = Requests(gate := RequestGate(policies, 1))
    for name in ("running", "waiting", "refused"):
        await requests.arrive(name, priority=1, request_id=name)
    await requests.arrive("other", priority=2)
    with pytest.raises(Overloaded, match=r"^\[request id: refused\] Exceeds maximum queue size$"):
        await requests.tasks["refused"]
    assert (requests.entered, gate.waiting) == (["running"], 2)


async def test_a_request_whose_timeout_passes_is_rejected() -> None:
    policy = QueuePolicy(timeout_us=60_000_000, allow_timeout_override=True)
    requests = Requests(RequestGate(QueuePolicies(default=policy), 1))
    await requests.arrive("running")
    await requests.arrive("patient")
    await requests.arrive("hasty", timeout_us=1000)
    with pytest.raises(QueueTimeout, match="Request timeout expired"):
        await requests.tasks["hasty"]
    await requests.leave("running")
    assert requests.entered == ["running", "patient"]


async def test_a_request_that_is_delayed_enters_after_the_others() -> None:
    policy = QueuePolicy(timeout_us=60_000_000, allow_timeout_override=True, timeout_action=TimeoutAction.DELAY)
    requests = Requests(gate := RequestGate(QueuePolicies(default=policy), 1))
    await requests.arrive("running")
    await requests.arrive("hasty", timeout_us=1)
    await requests.arrive("patient")
    later = asyncio.Event()
    asyncio.get_running_loop().call_later(0.001, later.set)  # timers of the event loop end in their order
    await later.wait()
    assert gate.waiting == 2
    await requests.leave("running")
    await requests.leave("patient")
    assert requests.entered == ["running", "patient", "hasty"]


async def test_a_slot_that_comes_as_its_request_leaves_goes_to_the_next() -> None:
    requests = Requests(gate := RequestGate(QueuePolicies(), 1))
    for name in ("running", "cancelled", "next"):
        await requests.arrive(name)
    requests.releases["running"]()  # "cancelled" has its slot and does not know it yet
    requests.tasks["cancelled"].cancel()
    await requests.settle()
    assert (requests.entered, gate.waiting) == (["running", "next"], 0)


async def test_a_request_that_is_cancelled_leaves_the_queue() -> None:
    requests = Requests(gate := RequestGate(QueuePolicies(), 1))
    for name in ("running", "cancelled", "next"):
        await requests.arrive(name)
    requests.tasks["cancelled"].cancel()
    requests.releases["running"]()  # in the same turn of the event loop
    await requests.settle()
    assert (requests.entered, gate.waiting) == (["running", "next"], 0)


async def test_requests_that_wait_when_the_gate_closes_are_cancelled() -> None:
    requests = Requests(gate := RequestGate(QueuePolicies(), 1))
    for name in ("running", "waiting"):
        await requests.arrive(name)
    gate.close()
    await requests.settle()
    assert requests.tasks["waiting"].cancelled() and gate.waiting == 0


async def test_ordered_responses_of_a_request_come_after_the_end_of_those_before_it() -> None:
    order, first_ends = ResponseOrder(), asyncio.Event()
    taken: list[str] = []

    async def responses(name: str, *, error: EngineError | None = None) -> AsyncIterator[ModelResult]:
        yield ModelResult({}, {"part": 1})
        if name == "first":
            await first_ends.wait()
            yield ModelResult({}, {"part": 2})
        if error is not None:
            raise error

    async def read(name: str, error: EngineError | None = None) -> None:
        try:
            async for response in order.ordered(responses(name, error=error)):
                taken.append(f"{name} {response.parameters['part']}")  # noqa: PERF401 - others append between
        except EngineError:
            taken.append(f"{name} failed")

    async def cancelled() -> None:
        async with aclosing(order.ordered(responses("cancelled"))) as ordered:  # type: ignore[type-var]
            await anext(ordered)

    tasks = [asyncio.create_task(read("first")), asyncio.create_task(read("second", EngineError("no")))]
    leaving = asyncio.create_task(cancelled())
    tasks.append(asyncio.create_task(read("third")))
    for _ in range(5):
        await asyncio.sleep(0)
    assert taken == ["first 1"]
    leaving.cancel()
    first_ends.set()
    await asyncio.gather(*tasks)
    assert taken == ["first 1", "first 2", "second 1", "second failed", "third 1"]


async def begin(models: RepositoryModels, folder: Path, value: float) -> asyncio.Task[dict[str, Any]]:
    """Begin a request whose `execute` runs until there is a file `go`."""
    task = asyncio.create_task(infer(models, "slow", x(value)))
    await until((folder / f"begun-{value:g}").exists)
    return task


async def queued(models: RepositoryModels, value: float, **parameters: int) -> asyncio.Task[dict[str, Any]]:
    before = models.find("slow").waiting("1")
    task = asyncio.create_task(infer(models, "slow", x(value), parameters=parameters))
    await until(lambda: models.find("slow").waiting("1") > before)
    return task


async def test_priorities_order_the_requests_of_a_decoupled_model(tmp_path: Path) -> None:
    config = f"{DECOUPLED} dynamic_batching {{ priority_levels: 3 default_priority_level: 2 }}"
    folder = python_model(tmp_path, "slow", SLOW, config)
    async with opened(tmp_path, "slow") as models, asyncio.timeout(30):
        first = await begin(models, folder, 0)
        others = [await queued(models, value, priority=priority) for value, priority in ((1, 3), (2, 0), (3, 1))]
        (folder / "go").touch()
        orders = [response["y"] for response in await asyncio.gather(first, *others)]
    assert orders == [[1], [4], [3], [2]]


async def test_the_queue_of_a_decoupled_model_has_limits_and_ends_with_its_execute_or_process(tmp_path: Path) -> None:
    policy = "default_timeout_microseconds: 60000000 allow_timeout_override: true max_queue_size: 1"
    folder = python_model(tmp_path, "slow", SLOW, f"{DECOUPLED} dynamic_batching {{ default_queue_policy {{ {policy} }} }}")
    async with opened(tmp_path, "slow") as models, asyncio.timeout(30):
        first = await begin(models, folder, 0)
        with pytest.raises(QueueTimeout):
            await infer(models, "slow", x(1), parameters={"timeout": 1000})
        waiting = await queued(models, 1)
        with pytest.raises(Overloaded, match="Exceeds maximum queue size"):
            await infer(models, "slow", x(2))
        (folder / "go").touch()
        assert [await first, await waiting] == [{"y": [1]}, {"y": [2]}]
        late = await begin(models, folder, 100)  # its `execute` has returned, so it is not in the way of others
        assert await infer(models, "slow", x(3)) == {"y": [4]}
        (folder / "respond-100").touch()
        assert await late == {"y": [3]}
        with pytest.raises(EngineError, match="ended with status 3"):
            await infer(models, "slow", x(-1))
        assert await when_started_again(models) == {"y": [1]}
        assert not (folder / "begun-2").exists()


async def when_started_again(models: RepositoryModels) -> dict[str, Any]:
    """Return the response of a model whose process has died."""
    while True:
        try:
            return await infer(models, "slow", x(4))
        except Unavailable:
            await asyncio.sleep(0.01)


async def test_responses_keep_the_order_of_requests_with_preserve_ordering(tmp_path: Path) -> None:
    folder = python_model(tmp_path, "slow", SLOW, f"{DECOUPLED} dynamic_batching {{ preserve_ordering: true }}")
    async with opened(tmp_path, "slow") as models, asyncio.timeout(30):
        tasks = [await begin(models, folder, value) for value in (100, 1, 101)]
        ended: list[asyncio.Task[dict[str, Any]]] = []
        for task in tasks:
            task.add_done_callback(ended.append)
        (folder / "respond-101").touch()
        (folder / "respond-100").touch()
        assert await asyncio.gather(*tasks) == [{"y": [1]}, {"y": [2]}, {"y": [3]}]
    assert ended == tasks
