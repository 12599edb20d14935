from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dynamo.common.errors import EngineError, InvalidRequest
from dynamo.common.tensors.request import TensorRequest
from dynamo.common.tensors.tensors import bf16_to_float32, from_numpy, to_numpy
from dynamo.protos.inference_pb2 import ModelInferRequest
from dynamo.worker.engine.base import Context
from dynamo.worker.engine.python import Batching, Declaration, InferContext, PythonEngine, Tensor
from tests.support.waiting import WAIT_S, expiring


def request(inputs: Mapping[str, Any], parameters: Mapping[str, Any] | None = None, datatype: str = "") -> TensorRequest:
    head = ModelInferRequest(model_name="m")
    raws = []
    for name, value in inputs.items():
        array = np.asarray(value)
        kind, raw = from_numpy(array, datatype)
        head.inputs.add(name=name, datatype=kind, shape=array.shape)
        raws.append(raw)
    for key, value in (parameters or {}).items():
        field = {bool: "bool_param", int: "int64_param", str: "string_param", float: "double_param"}[type(value)]
        setattr(head.parameters[key], field, value)
    return TensorRequest.build(head, raws)


async def infer_all(
    model: Any, tensor_request: TensorRequest, context: Context | None = None, engine: PythonEngine | None = None
) -> list[dict[str, np.ndarray[Any, Any]]]:
    used = engine or PythonEngine(lambda: model)
    if engine is None:
        await used.start()
    try:
        return [
            {
                output.name: to_numpy(raw, output.datatype, list(output.shape))
                for output, raw in zip(response.head.outputs, response.raw_outputs, strict=True)
            }
            async for response in used.infer(tensor_request, context or Context("r", version="1"))
        ]
    finally:
        if engine is None:
            await used.close()


class Base:
    inputs = {"x": Tensor("FP32", [-1])}  # noqa: RUF012
    outputs = {"y": Tensor("FP32", [-1])}  # noqa: RUF012


X = np.array([1, 2, 3], np.float32)


async def test_a_plain_function_runs_in_a_thread() -> None:
    class Model(Base):
        def infer(self, x: Any) -> Any:
            self.thread = threading.current_thread()
            return {"y": x * 2}

    model = Model()
    [response] = await infer_all(model, request({"x": X}))
    assert response["y"].tolist() == [2, 4, 6]
    assert model.thread is not threading.current_thread()


async def test_an_inline_function_runs_on_the_event_loop() -> None:
    class Model(Base):
        inline = True

        def infer(self, x: Any) -> Any:
            self.thread = threading.current_thread()
            return x

    model = Model()
    await infer_all(model, request({"x": X}))
    assert model.thread is threading.current_thread()


async def test_an_async_function_may_return_its_only_output_itself() -> None:
    class Model(Base):
        async def infer(self, x: Any) -> Any:
            await asyncio.sleep(0)
            return x + 1

    assert (await infer_all(Model(), request({"x": X})))[0]["y"].tolist() == [2, 3, 4]


async def test_lists_and_scalars_are_taken_as_the_declared_datatype() -> None:
    class Model:
        inputs = Base.inputs
        outputs = {"n": Tensor("INT32", []), "s": Tensor("BYTES", [2]), "h": Tensor("BF16", [1])}  # noqa: RUF012

        def infer(self, x: Any) -> Any:
            return {"n": len(x), "s": ["ä", b"\xff"], "h": [1.5]}

    [response] = await infer_all(Model(), request({"x": X}))
    assert (response["n"].tolist(), response["s"].tolist()) == (3, ["ä".encode(), b"\xff"])
    assert bf16_to_float32(response["h"]).tolist() == [1.5]


async def test_bf16_inputs_come_as_float32() -> None:
    class Model:
        inputs = {"x": Tensor("BF16", [-1])}  # noqa: RUF012
        outputs = Base.outputs

        def infer(self, x: Any) -> Any:
            assert x.dtype == np.float32
            return x

    [response] = await infer_all(Model(), request({"x": X}, datatype="BF16"))
    assert response["y"].tolist() == [1, 2, 3]


async def test_the_context_holds_id_version_parameters_and_deadline() -> None:
    seen: list[InferContext] = []

    class Model(Base):
        def infer(self, x: Any, context: InferContext) -> Any:
            seen.append(context)
            return x

    loop = asyncio.get_running_loop()
    context = Context("id-7", deadline=loop.time() + 100, version="3")
    parameters = {"a": 1, "b": "t", "c": 0.5, "d": True, "triton_models_timeout": 5}  # the last one by its name in generate
    await infer_all(Model(), request({"x": X}, parameters), context)
    assert (seen[0].request_id, seen[0].version) == ("id-7", "3")
    assert seen[0].parameters == {"a": 1, "b": "t", "c": 0.5, "d": True, "timeout": 5}
    assert not seen[0].is_cancelled
    context.cancelled.set()
    assert seen[0].is_cancelled


async def test_an_optional_input_that_is_missing_keeps_its_default() -> None:
    class Model:
        inputs = {"x": Tensor("FP32", [-1]), "by": Tensor("FP32", [1], optional=True)}  # noqa: RUF012
        outputs = Base.outputs

        def infer(self, x: Any, by: Any = 10) -> Any:
            return (x * by).astype(np.float32)

    assert (await infer_all(Model(), request({"x": X})))[0]["y"].tolist() == [10, 20, 30]
    both = request({"x": X, "by": np.array([2], np.float32)})
    assert (await infer_all(Model(), both))[0]["y"].tolist() == [2, 4, 6]


async def test_calls_of_a_plain_function_overlap_only_with_declared_concurrency() -> None:
    class Model(Base):
        def __init__(self, concurrency: int) -> None:
            self.concurrency = concurrency
            self.wait_s = WAIT_S if concurrency > 1 else expiring(0.3)
            self.meet = threading.Barrier(2)

        def infer(self, x: Any) -> Any:
            try:
                self.meet.wait(self.wait_s)
            except threading.BrokenBarrierError:
                raise RuntimeError("alone") from None
            return x

    for concurrency, fails in ((1, True), (2, False)):
        engine = PythonEngine(lambda concurrency=concurrency: Model(concurrency))  # type: ignore[misc]
        await engine.start()
        results = await asyncio.gather(
            *(infer_all(None, request({"x": X}), engine=engine) for _ in range(2)), return_exceptions=True
        )
        assert any(isinstance(result, EngineError) for result in results) is fails
        await engine.close()


async def test_a_sync_generator_streams_its_responses_and_is_closed_when_abandoned() -> None:
    closed = threading.Event()

    class Model(Base):
        decoupled = True

        def infer(self, x: Any) -> Iterator[Any]:
            try:
                for value in x:
                    yield {"y": [value]}
            finally:
                closed.set()

    assert [response["y"].tolist() for response in await infer_all(Model(), request({"x": X}))] == [[1], [2], [3]]
    closed.clear()
    engine = PythonEngine(Model)
    await engine.start()
    iterator = engine.infer(request({"x": X}), Context("r"))
    await anext(iterator)
    assert not closed.is_set()
    await iterator.aclose()  # type: ignore[attr-defined]
    assert closed.is_set()
    await engine.close()


async def test_an_async_generator_is_closed_when_abandoned() -> None:
    closed = asyncio.Event()

    class Model(Base):
        decoupled = True

        async def infer(self, x: Any) -> AsyncIterator[Any]:
            try:
                for value in x:
                    yield {"y": [value]}
            finally:
                closed.set()

    engine = PythonEngine(Model)
    await engine.start()
    iterator = engine.infer(request({"x": X}), Context("r"))
    await anext(iterator)
    await iterator.aclose()  # type: ignore[attr-defined]
    assert closed.is_set()
    await engine.close()


async def test_a_decoupled_model_may_give_no_response() -> None:
    class Model(Base):
        decoupled = True

        def infer(self, x: Any) -> Iterator[Any]:
            yield from ()

    assert await infer_all(Model(), request({"x": X})) == []


class Raises(Base):
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def infer(self, x: Any) -> Any:
        raise self.error


class Unequal(Base):
    inputs = {"x": Tensor("BYTES", [-1])}  # noqa: RUF012
    outputs = {"y": Tensor("INT64", [1])}  # noqa: RUF012
    inline = True

    def infer(self, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return np.array([len(set(x.tolist()))])


@pytest.mark.parametrize("decoupled", [False, True])
async def test_long_bytes_are_read_beside_other_requests(decoupled: bool) -> None:
    model = Unequal()
    model.decoupled = decoupled
    turns, strings = 0, [b""] * 499_999 + [b"a"]
    task = asyncio.create_task(infer_all(model, request({"x": np.array(strings, object)})))
    while not task.done():
        await asyncio.sleep(0)
        turns += 1
    assert task.result()[0]["y"].tolist() == [2]
    assert turns > 10


@pytest.mark.parametrize("decoupled", [False, True])
async def test_long_bytes_are_encoded_beside_other_requests(decoupled: bool) -> None:
    strings = np.array([b"", b"a", "ä"] * 200_000, object)

    class Long(Base):
        outputs = {"y": Tensor("BYTES", [-1])}  # noqa: RUF012
        inline = True

        def infer(self, x: Any) -> Any:
            return strings

    model = Long()
    model.decoupled = decoupled  # type: ignore[attr-defined]
    turns = 0
    task = asyncio.create_task(infer_all(model, request({"x": X})))
    while not task.done():
        await asyncio.sleep(0)
        turns += 1
    [response] = task.result()
    assert response["y"].tolist() == [b"", b"a", "ä".encode()] * 200_000
    assert turns > 10


async def test_an_invalid_request_passes_through_as_the_callers_mistake() -> None:
    with pytest.raises(InvalidRequest, match="too small"):
        await infer_all(Raises(InvalidRequest("x is too small")), request({"x": X}))


class Odd(BaseException):
    """An error that `except Exception` does not catch."""


@pytest.mark.parametrize(
    "error", [KeyError("k"), StopIteration(), ValueError("bad\nnews"), SystemExit(3), KeyboardInterrupt("stop"), Odd("stop")]
)
async def test_any_other_error_names_its_type_and_text_and_is_logged_once(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(EngineError, match=type(error).__name__) as raised:
        await infer_all(Raises(error), request({"x": X}))
    assert str(error) in str(raised.value)
    assert "Traceback" not in str(raised.value)
    assert len(caplog.records) == 1


@pytest.mark.parametrize("error", [asyncio.CancelledError(), SystemExit(3), KeyboardInterrupt("stop"), Odd("stop")])
async def test_errors_of_async_models_are_reported_the_same_way(error: BaseException) -> None:
    class Model(Base):
        async def infer(self, x: Any) -> Any:
            raise error  # a CancelledError is one of the model's own tasks

    with pytest.raises(EngineError, match=type(error).__name__):
        await infer_all(Model(), request({"x": X}))


@pytest.mark.parametrize("hook", ["load", "close"])
async def test_a_base_exception_of_load_or_close_is_an_engine_error(hook: str) -> None:
    def fail(model: Any) -> None:
        raise KeyboardInterrupt("stop")

    async def live() -> None:
        engine = PythonEngine(type("Model", (Base,), {"infer": lambda self, x: x, hook: fail}))
        await engine.start()
        await engine.close()

    with pytest.raises(EngineError, match="KeyboardInterrupt"):
        await live()


async def test_a_request_can_be_abandoned_though_its_generator_is_stuck_in_a_step() -> None:
    stuck, released = threading.Event(), threading.Event()

    class Model(Base):
        decoupled = True

        def infer(self, x: Any) -> Iterator[Any]:
            stuck.set()
            released.wait()
            yield {"y": x}

    engine = PythonEngine(Model)
    await engine.start()
    waiting = asyncio.create_task(infer_all(None, request({"x": X}), engine=engine))
    await asyncio.to_thread(stuck.wait)
    waiting.cancel()
    async with asyncio.timeout(120):
        await asyncio.gather(waiting, return_exceptions=True)
    assert waiting.cancelled()
    released.set()
    await engine.close()


@pytest.mark.parametrize(
    ("result", "words"),
    [
        ({"z": X}, "output 'z', which it does not declare"),
        ({}, "did not give its output 'y'"),
        (None, "NoneType"),
        ({"y": np.zeros((2, 2), np.float32)}, r"shape \[2, 2\]; it declares \[-1\]"),
        ({"y": np.zeros(3, np.float64)}, "FP64"),
        ({"y": ["text"]}, "no FP32 tensor"),
    ],
)
async def test_an_output_that_is_not_as_declared_is_an_engine_error(result: Any, words: str) -> None:
    class Model(Base):
        def infer(self, x: Any) -> Any:
            return result

    with pytest.raises(EngineError, match=words):
        await infer_all(Model(), request({"x": X}))


async def test_dynamic_batching_joins_concurrent_requests_into_one_call() -> None:
    class Model:
        inputs = {"x": Tensor("FP32", [-1, 2])}  # noqa: RUF012
        outputs = {"y": Tensor("FP32", [-1])}  # noqa: RUF012
        max_batch_size = 8
        batching = Batching(max_queue_delay_us=50_000)

        def __init__(self) -> None:
            self.rows: list[int] = []

        def infer(self, x: Any) -> Any:
            self.rows.append(len(x))
            return x.sum(axis=1)

    model = Model()
    engine = PythonEngine(lambda: model)
    await engine.start()
    contexts = [Context(str(n)) for n in range(4)]
    results = await asyncio.gather(
        *(infer_all(None, request({"x": np.full((2, 2), n, np.float32)}), contexts[n], engine=engine) for n in range(4))
    )
    await engine.close()
    assert model.rows == [8]
    assert [result[0]["y"].tolist() for result in results] == [[2 * n, 2 * n] for n in range(4)]
    assert all(context.timings.queue_ns > 0 and context.timings.infer_ns > 0 for context in contexts)


async def test_load_and_close_are_called_and_declare_follows_load() -> None:
    calls: list[str] = []

    class Model:
        def load(self) -> None:
            calls.append("load")

        def declare(self) -> Declaration:
            calls.append("declare")
            return Declaration(name="named", inputs=Base.inputs, outputs=Base.outputs, versions=["1", "2"])

        def infer(self, x: Any) -> Any:
            return x

        async def close(self) -> None:
            calls.append("close")

    engine = PythonEngine(Model)
    [card] = await engine.start()
    await engine.close()
    assert calls == ["load", "declare", "close"]
    assert (card.name, card.versions) == ("named", ("1", "2"))


class NoInput(Base):
    def infer(self, z: Any) -> Any: ...


class Undeclared:
    def infer(self, x: Any) -> Any: ...


class NotDecoupled(Base):
    def infer(self, x: Any) -> Iterator[Any]:
        yield x


class ContextOfABatch:
    inputs = {"x": Tensor("FP32", [-1, 2])}  # noqa: RUF012
    outputs = {"y": Tensor("FP32", [-1])}  # noqa: RUF012
    max_batch_size = 8
    batching = Batching()

    def infer(self, x: Any, context: InferContext) -> Any: ...


class BadPreferred(ContextOfABatch):
    batching = Batching(preferred_batch_size=[9])

    def infer(self, x: Any) -> Any: ...  # type: ignore[override]


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (NoInput, "no argument for the input 'x'"),
        (Undeclared, "declares no inputs and outputs"),
        (NotDecoupled, "not declared as decoupled"),
        (ContextOfABatch, "takes a context"),
        (BadPreferred, "preferred batch size 9"),
        (Base, "no method 'infer'"),
    ],
)
async def test_a_model_that_cannot_work_is_refused_at_the_start(model: type, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        await PythonEngine(model).start()


SOURCE = """
import neighbour
from dynamo.worker.engine.python import Tensor
class FileModel:
    inputs = {"x": Tensor("FP32", [-1])}
    outputs = {"y": Tensor("FP32", [-1])}
    def infer(self, x):
        return x * neighbour.FACTOR
class Declared:
    def infer(self, x):
        return x
"""


async def test_a_class_is_loaded_from_a_file_with_its_neighbours_and_its_declaration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "some_model.py").write_text(SOURCE)
    (tmp_path / "neighbour.py").write_text("FACTOR = 5\n")
    (tmp_path / "some_model.yaml").write_text(
        "name: declared\ninputs: {x: {datatype: FP32, shape: [-1]}}\noutputs: {y: {datatype: FP32, shape: [-1]}}\n"
    )
    engine = PythonEngine.load(f"{tmp_path}/some_model.py:FileModel")
    [card] = await engine.start()
    assert card.name == "file_model"
    assert (await infer_all(None, request({"x": X}), engine=engine))[0]["y"].tolist() == [5, 10, 15]
    declared = PythonEngine.load(f"{tmp_path}/some_model.py:Declared", name="other")
    assert (await declared.start())[0].name == "other"


@pytest.mark.parametrize(
    "target", ["nonsense", ":Class", "no/such/file.py:Class", "no_such_module_at_all:Class", "json:NoSuchClass", "json:dumps"]
)
def test_a_class_that_is_not_there_is_refused_in_words(target: str) -> None:
    with pytest.raises(InvalidRequest):
        PythonEngine.load(target)
