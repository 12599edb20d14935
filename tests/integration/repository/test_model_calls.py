"""What a call of one model by another is allowed, and when it ends."""

from __future__ import annotations

import asyncio
import gc
import sys
import tracemalloc
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest
from google.protobuf import text_format

from dynamo.common.errors import EngineError, Overloaded
from dynamo.common.tensors.request import SEQUENCE_OWNER
from dynamo.protos.model_config_pb2 import ModelConfig
from dynamo.worker.engine.base import Context
from dynamo.worker.repository.declared.execution import ModelRequest, ModelResult, Version, closing
from dynamo.worker.repository.python.environments import Environments
from dynamo.worker.repository.python.python_backend import PythonBackend, PythonModel
from dynamo.worker.repository.stores.content_cache import ContentCache
from dynamo.worker.repository.stub.pb_utils import TritonError
from dynamo.worker.repository.wire.calls import MAX_CALLS, MAX_DEPTH, CallMemory
from dynamo.worker.repository.wire.wire import TensorHead
from tests.support.repositories import X_TO_Y, ensemble, infer, opened, python_model, step, x
from tests.support.waiting import until

HEAD = """
import asyncio, threading
import numpy as np
import triton_python_backend_utils as pb_utils

def call(value, name="called", **more):
    inputs = [pb_utils.Tensor("x", np.array([value], np.float32))]
    return pb_utils.InferenceRequest(model_name=name, inputs=inputs, requested_output_names=["y"], **more)

def value_of(request):
    return float(request.inputs()[0].as_numpy()[0])

def response(value):
    return pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array([value], np.float32))])

def code(response):
    return response.error().code() if response.has_error() else -1

class TritonPythonModel:
"""
DECOUPLED = X_TO_Y + "model_transaction_policy { decoupled: true }\n"
IN_ONE_CALL = """
    def execute(self, requests):
        self.last = code(call(1).exec())
        return [response(self.last) for _ in requests]
"""
AWAITED = """
    async def execute(self, requests):
        self.last = code(await call(1).async_exec())
        return [response(self.last) for _ in requests]
"""
ITERATED = """
    def execute(self, requests):
        self.last = code(next(call(1).exec(decoupled=True)))
        return [response(self.last) for _ in requests]
"""
SEVERAL = """
    def execute(self, requests):
        for request in requests:
            if value_of(request) == 2:
                request.get_response_sender().send(response(self.last), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            else:
                self.begin(request.get_response_sender())
"""
IN_A_THREAD = (
    SEVERAL
    + """
    def begin(self, sender):
        threading.Thread(target=self.respond, args=(sender,)).start()
    def respond(self, sender):
        self.last = code(call(1).exec())
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
)


class Called:
    """The only other model: responds to nothing until it may."""

    def __init__(self) -> None:
        self.contexts: list[Context] = []
        self.ended = 0
        self.may_respond = asyncio.Event()

    async def run(self, model: str, version: str, request: ModelRequest) -> AsyncIterator[ModelResult]:
        self.contexts.append(request.context)
        try:
            await self.may_respond.wait()
            yield ModelResult({"y": np.zeros(1, np.float32)})
        finally:
            self.ended += 1

    def config(self, model: str, version: str) -> ModelConfig:
        return ModelConfig(model_transaction_policy={"decoupled": False})

    async def load(self, model: str, config: str, files: Mapping[str, bytes]) -> NoReturn:
        raise AssertionError("no model is loaded")

    async def unload(self, model: str, dependents: bool) -> NoReturn:
        raise AssertionError("no model is unloaded")


@asynccontextmanager
async def caller(
    folder: Path, code: str, config: str = X_TO_Y, memory: CallMemory | None = None
) -> AsyncIterator[tuple[PythonModel, Called]]:
    """A model that calls another one."""
    model_folder = python_model(folder, "caller", HEAD + code, config)
    parsed = text_format.Parse((model_folder / "config.pbtxt").read_text(), ModelConfig())
    called = Called()
    backend = PythonBackend(called, Environments(ContentCache(folder, 0), 0), call_memory=memory)
    async with asyncio.timeout(120):
        model = await backend.open(Version("caller", "1", parsed, model_folder))
        try:
            yield model, called
        finally:
            await model.close()


async def only(model: PythonModel, request: ModelRequest) -> ModelResult | None:
    """Return the first response of a model, decoupled or not."""
    async with closing(model.stream(request)) as responses:
        async for each in responses:
            return each
    return None


# Deadline and end


@pytest.mark.parametrize(("deadlines", "deadline"), [((50.0,), 50.0), ((50.0, 70.0), 70.0), ((50.0, None), None)])
async def test_a_call_has_the_latest_deadline_of_the_requests_that_it_is_made_for(
    tmp_path: Path, deadlines: tuple[float | None, ...], deadline: float | None
) -> None:
    async with caller(tmp_path, IN_ONE_CALL) as (model, called):
        called.may_respond.set()
        start = asyncio.get_running_loop().time()
        contexts = [Context("r", None if each is None else start + each) for each in deadlines]
        await model.respond_all([ModelRequest(x(1), context) for context in contexts])
        [context] = called.contexts
    assert context.deadline == (None if deadline is None else start + deadline)
    assert [caller.model for caller in context.callers] == ["caller"]


@pytest.mark.parametrize("code", [IN_ONE_CALL, AWAITED, ITERATED], ids=["exec", "async_exec", "decoupled"])
async def test_a_call_ends_when_the_request_that_it_is_made_for_is_left(tmp_path: Path, code: str) -> None:
    async with caller(tmp_path, code) as (model, called):
        requesting = asyncio.ensure_future(model.respond(ModelRequest(x(1), Context("r"))))
        await until(lambda: bool(called.contexts))
        requesting.cancel()
        await until(lambda: called.ended == 1)
        assert called.contexts[0].is_cancelled
        called.may_respond.set()  # the process is free again
        result = await model.respond(ModelRequest(x(1), Context("r")))
    assert result.outputs["y"].tolist() == [-1.0]


async def test_the_model_is_notified_that_its_call_has_ended_so(tmp_path: Path) -> None:
    async with caller(tmp_path, "    last = -1\n" + IN_A_THREAD, DECOUPLED) as (model, called):
        requesting = asyncio.ensure_future(only(model, ModelRequest(x(1), Context("r"))))
        await until(lambda: bool(called.contexts))
        requesting.cancel()
        await until(lambda: called.ended == 1)
        while (result := await only(model, ModelRequest(x(2), Context("r")))) and result.outputs["y"].tolist() == [-1.0]:
            await asyncio.sleep(0)
    assert result is not None
    assert result.outputs["y"].tolist() == [TritonError.CANCELLED]


async def test_a_call_for_several_requests_goes_on_until_the_last_of_them_is_left(tmp_path: Path) -> None:
    code = """
    def execute(self, requests):
        result = code(call(1).exec())
        return [response(result) for _ in requests]
"""
    config = X_TO_Y + "max_batch_size: 2 dynamic_batching { max_queue_delay_microseconds: 60000000 }"
    rows = {"x": np.ones((1, 1), np.float32)}
    async with caller(tmp_path, code, config) as (model, called):
        first, second = [asyncio.ensure_future(model.respond(ModelRequest(rows, Context("r")))) for _ in range(2)]
        await until(lambda: bool(called.contexts))
        first.cancel()
        await asyncio.wait([first])
        called.may_respond.set()
        result = await second
    assert result.outputs["y"].tolist() == [-1.0]


async def test_a_model_whose_caller_has_left_calls_no_other_one(tmp_path: Path) -> None:
    code = """
    def initialize(self, args):
        self.last = -1
    def execute(self, requests):
        [request] = requests
        if value_of(request) == 2:
            return [response(self.last)]
        call(1).exec()
        while not request.is_cancelled():
            pass
        self.last = code(call(1).exec())
        return [response(0)]
"""
    async with caller(tmp_path, code) as (model, called):
        requesting = asyncio.ensure_future(model.respond(ModelRequest(x(1), Context("r"))))
        await until(lambda: bool(called.contexts))
        called.may_respond.set()
        requesting.cancel()
        result = await model.respond(ModelRequest(x(2), Context("r")))
    assert result.outputs["y"].tolist() == [TritonError.CANCELLED]
    assert len(called.contexts) == 1


# Owner

EACH = """
    def execute(self, requests):
        for request in requests:
            trace = request.trace() if value_of(request) == 2 else None
            call(1, correlation_id=request.correlation_id(), trace=trace).exec()
        return [response(0) for _ in requests]
"""


@pytest.mark.parametrize(
    ("requests", "has_trace", "owners"),
    [
        ([("op", 1)], False, ["op"]),
        ([("", 1)], False, [None]),
        ([("op", 1), ("op", 1)], False, ["op", "op"]),
        ([("op", 1), ("bob", 2)], False, ["op", "bob"]),
        ([("op", 1), ("bob", 0)], False, ["op", "\0bob\0op"]),
        ([("op", "1"), ("bob", "1")], False, ["\0bob\0op"] * 2),
        ([("op", 1), ("bob", 1), ("", 0)], True, ["op", "bob", None]),
        ([("op", 0), ("op", 0)], False, ["op", "op"]),
    ],
)
async def test_the_sequences_of_a_call_are_those_of_the_key_whose_request_has_the_trace_or_the_id(
    tmp_path: Path, requests: list[tuple[str, int | str]], has_trace: bool, owners: list[str | None]
) -> None:
    async with caller(tmp_path, EACH) as (model, called):
        called.may_respond.set()
        await model.respond_all(
            [
                ModelRequest(
                    x(1 + has_trace), Context("r", headers={SEQUENCE_OWNER: owner} if owner else {}), (), {"sequence_id": id}
                )
                for owner, id in requests
            ]
        )
    assert [context.headers.get(SEQUENCE_OWNER) for context in called.contexts] == owners


# Depth and number

ITSELF = """
    def execute(self, requests):
        left = value_of(requests[0])
        if not left:
            return [response(0)]
        result = call(left - 1, "NAME").exec()
        if result.has_error():
            raise pb_utils.TritonModelException(result.error().message())
        return [response(1 + result.output_tensors()[0].as_numpy()[0])]
"""
ITSELF_IN_THREADS = """
    def execute(self, requests):
        for request in requests:
            threading.Thread(target=self.respond, args=(request.get_response_sender(),)).start()
    def respond(self, sender):
        sender.send(next(call(1, "self").exec(decoupled=True)), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


def itself(name: str) -> str:
    return HEAD + ITSELF.replace("NAME", name)


async def test_a_model_may_call_itself_while_it_has_instances_that_are_free(tmp_path: Path) -> None:
    python_model(tmp_path, "self", itself("self"), X_TO_Y + "instance_group { count: 3 }")
    async with opened(tmp_path, "self") as models, asyncio.timeout(120):
        assert await infer(models, "self", x(2)) == {"y": [2.0]}


@pytest.mark.parametrize("count", [1, 3])
async def test_a_model_that_waits_for_itself_is_told_so(tmp_path: Path, count: int) -> None:
    python_model(tmp_path, "self", itself("self"), X_TO_Y + f"instance_group {{ count: {count} }}")
    async with opened(tmp_path, "self") as models, asyncio.timeout(120):
        with pytest.raises(EngineError, match=rf"self -> self: each process of model 'self' \({count}\) waits for this call"):
            await infer(models, "self", x(1000))
        assert await infer(models, "self", x(0)) == {"y": [0.0]}


async def test_so_is_one_that_waits_for_itself_by_way_of_a_model_and_an_ensemble(tmp_path: Path) -> None:
    python_model(tmp_path, "first", itself("both"))
    python_model(tmp_path, "second", itself("first"))
    ensemble(tmp_path, step("second", {"x": "x"}, {"y": "y"}))
    async with opened(tmp_path, "first", "second", "both") as models, asyncio.timeout(120):
        with pytest.raises(EngineError, match="first -> both -> second -> first: each process of model 'first'"):
            await infer(models, "first", x(1000))


async def test_calls_are_nested_only_so_deep(tmp_path: Path) -> None:
    python_model(tmp_path, "self", HEAD + ITSELF_IN_THREADS, DECOUPLED)
    async with opened(tmp_path, "self") as models, asyncio.timeout(120):
        with pytest.raises(EngineError, match=f"models call models {MAX_DEPTH} deep, which is the most: ... -> self -> self"):
            await infer(models, "self", x(1000))


async def test_a_process_has_only_so_many_calls_at_once(tmp_path: Path) -> None:
    """The others respond once those that are too many have been refused."""
    refused = tmp_path / "refused"
    code = f"""
    async def execute(self, requests):
        calls = [asyncio.ensure_future(call(1).async_exec()) for _ in range(int(value_of(requests[0])))]
        for _, first in zip(range(3), asyncio.as_completed(calls)):
            await first
        open({str(refused)!r}, "w").close()
        codes = [code(result) for result in await asyncio.gather(*calls)]
        counts = [codes.count(-1), codes.count(pb_utils.TritonError.UNAVAILABLE)]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array(counts, np.float32))])]
"""
    async with caller(tmp_path, code) as (model, called):
        requesting = asyncio.ensure_future(model.respond(ModelRequest(x(MAX_CALLS + 3), Context("r"))))
        await until(lambda: len(called.contexts) == MAX_CALLS and refused.exists())
        called.may_respond.set()
        result = await requesting
    assert result.outputs["y"].tolist() == [MAX_CALLS, 3]


# Memory


class Peak:
    bytes = 0


@contextmanager
def peak() -> Iterator[Peak]:
    """Measure what the body takes of memory at once."""
    measured = Peak()
    gc.collect()
    tracemalloc.start()
    try:
        yield measured
        measured.bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


MIB = 2**20
LARGEST = """
    async def execute(self, requests):
        sent, wanted = [int(value) for value in requests[0].inputs()[0].as_numpy()]
        inputs = [pb_utils.Tensor("x", np.full(max(1, sent // 4), wanted, np.float32))]
        calls = [pb_utils.InferenceRequest(model_name="called", inputs=inputs, requested_output_names=["y"]) for _ in range(12)]
        codes = [code(result) for result in await asyncio.gather(*[each.async_exec() for each in calls])]
        assert set(codes) <= {-1, pb_utils.TritonError.UNAVAILABLE}, codes
        return [response(codes.count(-1))]
"""
SIZED = """
    def execute(self, requests):
        wanted = [int(request.inputs()[0].as_numpy()[0]) for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", np.zeros(max(1, each // 4), np.float32))]) for each in wanted]
"""


class CountingMemory(CallMemory):
    """Counts the calls that it refuses."""

    refused = 0

    def allocate(self, size: int, tensors: Iterable[TensorHead]) -> memoryview:
        try:
            return super().allocate(size, tensors)
        except Overloaded:
            self.refused += 1
            raise


async def test_twelve_of_the_largest_calls_hold_no_more_than_the_worker_allows(tmp_path: Path) -> None:
    memory = CountingMemory(20 * MIB)
    async with caller(tmp_path, LARGEST, memory=memory) as (model, called):
        with peak() as held:
            requesting = asyncio.ensure_future(model.respond(ModelRequest(x(8 * MIB, 0), Context("r"))))
            await until(lambda: len(called.contexts) + memory.refused == 12)
            called.may_respond.set()
            result = await requesting
        assert result.outputs["y"].tolist() == [2]
        assert held.bytes < 21 * MIB
        await until(lambda: memory.held_bytes == 0)


@pytest.mark.parametrize("end", ["python", "ensemble"])
async def test_nor_do_the_largest_responses_to_calls(tmp_path: Path, end: str) -> None:
    instances = X_TO_Y + "instance_group { count: 4 }"
    python_model(tmp_path, "caller", HEAD + LARGEST)
    python_model(tmp_path, "called" if end == "python" else "part", HEAD + SIZED, instances)
    ensemble(tmp_path, step("part", {"x": "x"}, {"y": "y"}), name="ensemble" if end == "python" else "called")
    load = ["called", "caller"] if end == "python" else ["part", "called", "caller"]
    async with opened(tmp_path, *load, calls_bytes=20 * MIB) as models, asyncio.timeout(120):
        with peak() as held:
            outputs = await infer(models, "caller", x(4, 8 * MIB))
        assert 1 <= outputs["y"][0] < 12
        assert held.bytes < 21 * MIB
        assert await infer(models, "caller", x(4, 4)) == {"y": [12.0]}, "all of it is free again"


def test_an_element_of_bytes_counts_as_the_object_that_it_may_become() -> None:
    memory = CallMemory(MIB)
    tensor = TensorHead("x", "BYTES", (100, 100), 50_000)
    body = memory.allocate(tensor.size, [tensor])
    assert memory.held_bytes >= 50_000 + sys.getsizeof(b"x") * 10_000
    view = body[10:20]
    del body
    assert memory.held_bytes, "a part of it is in use"
    with pytest.raises(Overloaded, match="--model-calls-byte-size is 1048576"):
        memory.allocate(tensor.size, [tensor])
    del view
    assert memory.held_bytes == 0
