"""Decoupled models with dynamic batching: which requests they get together and in which order, and which are refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dynamo.common.errors import EngineError, Overloaded, Unavailable
from dynamo.common.tensors.request import SEQUENCE_OWNER
from dynamo.worker.engine.base import Context
from dynamo.worker.engine.request_queue import QueueTimeout
from dynamo.worker.repository.declared.execution import ModelRequest, ModelResult, closing
from dynamo.worker.repository.models.models import RepositoryModels
from dynamo.worker.repository.scheduling.response_order import ResponseOrder
from dynamo.worker.repository.scheduling.responses import MAX_UNREAD
from dynamo.worker.repository.wire import wire
from tests.support.repositories import X_TO_Y, infer, infer_all, opened, python_model, x
from tests.support.waiting import WAIT_S, until

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


INLINE = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for number in range(int(request.inputs()[0].as_numpy().ravel()[0])):
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array([[number]], np.float32))]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
SEQUENCES = "sequence_batching { oldest { max_candidate_sequences: 4 } }"


@pytest.mark.parametrize("batching", ["", "dynamic_batching { }", SEQUENCES])
@pytest.mark.parametrize("count", [5000, 20_000])
async def test_a_slow_reader_does_not_hold_up_others_of_a_model_that_sends_within_execute(
    tmp_path: Path, batching: str, count: int
) -> None:
    python_model(tmp_path, "inline", INLINE, f"{DECOUPLED}\nmax_batch_size: 1\n{batching}")

    def request(id: int, value: int) -> ModelRequest:
        parameters = {"sequence_id": id, "sequence_start": True, "sequence_end": True}
        return ModelRequest(
            {"x": np.full((1, 1), value, np.float32)}, Context(f"{id}"), parameters=parameters if batching else {}
        )

    async with (
        opened(tmp_path, "inline") as models,
        asyncio.timeout(WAIT_S),
        closing(models.run("inline", "", request(1, count))) as slow,
    ):
        await anext(slow)
        for id in (2, 3):
            async with closing(models.run("inline", "", request(id, 1))) as other:
                assert len([response async for response in other]) == 1
        if count <= MAX_UNREAD:
            assert len([response async for response in slow]) == count - 1
        else:
            with pytest.raises(Overloaded, match="too slowly"):
                assert len([response async for response in slow]) <= MAX_UNREAD + wire.RESPONSE_WINDOW


THREADED = """
import threading
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            count = int(request.inputs()[0].as_numpy().ravel()[0])
            threading.Thread(target=self.respond, args=(request.get_response_sender(), count)).start()
    def respond(self, sender, count):
        for number in range(count):
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array([[number]], np.float32))]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


@pytest.mark.parametrize("code", [INLINE, THREADED], ids=["inline", "threaded"])
async def test_sequences_whose_responses_one_owner_does_not_read_keep_no_slot_from_another(tmp_path: Path, code: str) -> None:
    python_model(tmp_path, "many", code, f"{DECOUPLED}\nmax_batch_size: 1\n{SEQUENCES}")

    def run(owner: str, id: int, value: int) -> AsyncIterator[ModelResult]:
        context = Context(f"{id}", headers={SEQUENCE_OWNER: owner})
        parameters = {"sequence_id": id, "sequence_start": True}
        return models.run("many", "", ModelRequest({"x": np.full((1, 1), value, np.float32)}, context, parameters=parameters))

    async with opened(tmp_path, "many") as models, AsyncExitStack() as open_streams, asyncio.timeout(WAIT_S):
        streams = [await open_streams.enter_async_context(closing(run("a", id, 2000))) for id in range(1, 5)]
        for stream in streams:
            await anext(stream)
        async with closing(run("b", 9, 1)) as other:
            assert len([response async for response in other]) == 1
        for stream in streams:
            assert len([response async for response in stream]) == 1999, "what one has still comes"


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
    async with opened(tmp_path, "slow") as models, asyncio.timeout(120):
        first = await begin(models, folder, 0)
        others = [await queued(models, value, priority=priority) for value, priority in ((1, 3), (2, 0), (3, 1))]
        (folder / "go").touch()
        orders = [response["y"] for response in await asyncio.gather(first, *others)]
    assert orders == [[1], [4], [3], [2]]


async def test_the_queue_of_a_decoupled_model_has_limits_and_ends_with_its_execute_or_process(tmp_path: Path) -> None:
    policy = "default_timeout_microseconds: 60000000 allow_timeout_override: true max_queue_size: 1"
    folder = python_model(tmp_path, "slow", SLOW, f"{DECOUPLED} dynamic_batching {{ default_queue_policy {{ {policy} }} }}")
    async with opened(tmp_path, "slow") as models, asyncio.timeout(120):
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
    async with opened(tmp_path, "slow") as models, asyncio.timeout(120):
        tasks = [await begin(models, folder, value) for value in (100, 1, 101)]
        ended: list[asyncio.Task[dict[str, Any]]] = []
        for task in tasks:
            task.add_done_callback(ended.append)
        (folder / "respond-101").touch()
        (folder / "respond-100").touch()
        assert await asyncio.gather(*tasks) == [{"y": [1]}, {"y": [2]}, {"y": [3]}]
    assert ended == tasks


BATCHED = """
import numpy as np
import triton_python_backend_utils as pb_utils
import os

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL

class TritonPythonModel:
    def initialize(self, args):
        self.folder = args["model_repository"]
    def execute(self, requests):
        values = [float(r.inputs()[0].as_numpy()[0, 0]) for r in requests]
        if -1 in values and not os.path.exists(os.path.join(self.folder, "died")):
            open(os.path.join(self.folder, "died"), "w").close()
            os._exit(3)
        for place, (request, value) in enumerate(zip(requests, values)):
            sender = request.get_response_sender()
            for part in range(int(abs(value))):
                y = pb_utils.Tensor("y", np.array([[len(requests) * 100 + place * 10 + part]], np.float32))
                sender.send(pb_utils.InferenceResponse([y]))
            sender.send(flags=FINAL)
"""
TOGETHER = """
max_batch_size: 4
dynamic_batching { max_queue_delay_microseconds: 60000000 preferred_batch_size: 3 }
"""


async def parts(models: RepositoryModels, value: float) -> list[float]:
    """Return for each response the size of the batch, the place in it, and the number of the response, as digits."""
    responses = await infer_all(models, "batched", {"x": np.array([[value]], np.float32)})
    return [float(response.outputs["y"][0, 0]) for response in responses if response.outputs]


async def test_a_decoupled_model_gets_batches_and_responds_to_each_request_by_itself(tmp_path: Path) -> None:
    python_model(tmp_path, "batched", BATCHED, DECOUPLED + TOGETHER)
    async with opened(tmp_path, "batched") as models, asyncio.timeout(120):
        responses = await asyncio.gather(*(parts(models, value) for value in (2, 1, 3)))
        assert models.find("batched").waiting("1") == 0
    assert responses == [[300, 301], [310], [320, 321, 322]]


async def test_a_caller_that_leaves_a_decoupled_batch_leaves_the_others_their_responses(tmp_path: Path) -> None:
    python_model(tmp_path, "batched", BATCHED, DECOUPLED + TOGETHER)

    async def first_part(value: float) -> float:
        request = ModelRequest({"x": np.array([[value]], np.float32)}, Context("leaving"))
        async with aclosing(models.run("batched", "", request)) as responses:  # type: ignore[type-var]
            return float((await anext(responses)).outputs["y"][0, 0])

    async with opened(tmp_path, "batched") as models, asyncio.timeout(120):
        assert await asyncio.gather(parts(models, 1), first_part(400), parts(models, 2)) == [[300], 310, [320, 321]]
        assert await asyncio.gather(*(parts(models, 1) for _ in range(3))) == [[300], [310], [320]], "its slot is free again"


async def test_requests_of_a_decoupled_batch_are_retried_one_by_one(tmp_path: Path) -> None:
    folder = python_model(tmp_path, "batched", BATCHED, DECOUPLED + TOGETHER)
    async with opened(tmp_path, "batched") as models, asyncio.timeout(120):
        left = asyncio.create_task(parts(models, 9))
        others = [asyncio.create_task(parts(models, 1))]
        await until(lambda: models.find("batched").waiting("1") == 2)
        left.cancel()
        others += [asyncio.create_task(parts(models, value)) for value in (2, -1)]
        assert await asyncio.gather(*others) == [[100], [100, 101], [100]], "each again, alone, since the process died"
    assert (folder / "died").exists() and left.cancelled()


async def test_single_responses_keep_the_order_of_requests_and_a_caller_that_leaves_holds_up_no_other() -> None:
    order, first_ends, ended = ResponseOrder(), asyncio.Event(), list[str]()

    async def response(name: str) -> ModelResult:
        if name in ("first", "cancelled"):
            await first_ends.wait()
        if name == "failed":
            raise EngineError("no")
        if name == "expired":
            raise QueueTimeout
        return ModelResult({})

    async def call(name: str) -> None:
        with suppress(EngineError, QueueTimeout):
            await order.in_turn(response(name))
        ended.append(name)

    tasks = {name: asyncio.create_task(call(name)) for name in ("first", "cancelled", "failed", "expired", "last")}
    for _ in range(5):
        await asyncio.sleep(0)
    assert ended == ["expired"], "it has not left the queue"
    tasks["cancelled"].cancel()
    first_ends.set()
    await asyncio.gather(*tasks.values(), return_exceptions=True)
    assert ended == ["expired", "first", "failed", "last"]
