"""Tensors of Python-backend models in shared memory: read where a frontend put them, written where a frontend can read them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dynamo.common.errors import EngineError
from dynamo.common.shared_memory.sharing import SharedMemory
from dynamo.common.tensors.request import TensorRequest, parse_response
from dynamo.common.tensors.response import ResponseForm
from dynamo.common.tensors.tensors import Buffer, from_numpy
from dynamo.protos.inference_pb2 import ModelInferRequest, ModelInferResponse
from dynamo.worker.repository.declared.execution import ModelResult
from dynamo.worker.repository.models.models import RepositoryModels
from tests.support.repositories import X_TO_Y, infer_all, opened, python_model

HEAD = """
import gc, os
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.kept = None
"""
SIZE = 100_000
Array = np.ndarray[Any, np.dtype[np.float32]]


class Pair:
    """The shared memory of a frontend, and that of the worker."""

    def __init__(self, folder: Path) -> None:
        self.frontend, self.worker = SharedMemory(folder, 16 * 2**20), SharedMemory(folder, 16 * 2**20)

    def body(self, *arrays: Array, offset: int = 0) -> list[Array]:
        """Return arrays as the worker gets them: views of a body in the frontend's arena, where they begin at `offset`."""
        reader = self.frontend.neighbour(self.worker.token)
        owner = self.worker.neighbour(self.frontend.token)
        assert reader is not None and owner is not None
        pieces = [bytes(offset), *(array.tobytes() for array in arrays)]
        reference = self.frontend.lend(pieces, sum(map(len, pieces)), reader)
        assert reference is not None
        view = self.worker.take(owner, reference)
        assert view is not None
        views, position = [], offset
        for array in arrays:
            views.append(np.frombuffer(view[position : position + array.nbytes], array.dtype))
            position += array.nbytes
        return views

    async def until_lent(self, count: int) -> None:
        """Wait until so many bodies of the frontend are in use."""
        async with asyncio.timeout(120):
            while True:
                self.frontend.sweep()
                if len(self.frontend.arena) == count:
                    return
                await asyncio.sleep(0.005)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    folder = tmp_path / "memory"
    folder.mkdir()
    pair = Pair(folder)
    yield pair
    pair.frontend.close()
    pair.worker.close()


@asynccontextmanager
async def served(folder: Path, pair: Pair, execute: str, config: str = X_TO_Y) -> AsyncIterator[RepositoryModels]:
    """Serve `model`, whose method `execute` is given, with the worker's shared memory; the body may take 30 seconds."""
    python_model(folder, "model", HEAD + execute, config)
    async with opened(folder, "model", memory=pair.worker) as models, asyncio.timeout(120):
        yield models


def values(seed: int = 1) -> Array:
    return np.random.default_rng(seed).random(SIZE, np.float32)


async def respond(models: RepositoryModels, inputs: Mapping[str, Array], **more: Any) -> Array:
    [result] = await infer_all(models, "model", inputs, **more)
    return result.outputs["y"]


async def warm(models: RepositoryModels, pair: Pair) -> None:
    """Have the process open the arena of the frontend, and the worker that of the process."""
    for _ in range(3):
        await respond(models, {"x": pair.body(values())[0]})


def is_shared(output: Array) -> bool:
    """Return whether an output lies in shared memory, where it is read-only; one that came through the socket is not."""
    return not output.flags.writeable


@pytest.mark.parametrize("offset", [0, 64, 1, 4096 + 3])
async def test_tensors_stay_in_shared_memory_on_both_ways(tmp_path: Path, pair: Pair, offset: int) -> None:
    execute = """
    def execute(self, requests):
        arrays = [r.inputs()[0].as_numpy() for r in requests]
        assert all(a.flags.aligned and a.flags.writeable for a in arrays)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", a + 1)]) for a in arrays]
"""
    async with served(tmp_path, pair, execute) as models:
        await warm(models, pair)
        for seed in range(5):
            expected = values(seed) + 1
            output = await respond(models, {"x": pair.body(values(seed), offset=offset)[0]})
            assert is_shared(output)
            np.testing.assert_array_equal(output, expected)
        await pair.until_lent(0)


async def test_what_a_model_writes_to_its_inputs_is_seen_by_no_other_request(tmp_path: Path, pair: Pair) -> None:
    execute = """
    def execute(self, requests):
        x, z = (pb_utils.get_input_tensor_by_name(requests[0], name).as_numpy() for name in "xz")
        before = x + z
        x[:] = -1
        z[:] = -2
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", before)])]
"""
    config = X_TO_Y + 'input [ { name: "z" data_type: TYPE_FP32 dims: [ -1 ] } ]'
    async with served(tmp_path, pair, execute, config) as models:
        await respond(models, dict(zip("xz", pair.body(values(1), values(2)), strict=True)))
        for _ in range(3):
            x, z = pair.body(values(1), values(2), offset=4)
            together = await asyncio.gather(*(respond(models, {"x": x, "z": z}) for _ in range(4)))
            for output in together:
                np.testing.assert_array_equal(output, values(1) + values(2))
            np.testing.assert_array_equal(x, values(1))
            np.testing.assert_array_equal(z, values(2))
            del x, z
        del together, output
        await pair.until_lent(0)


async def test_an_array_that_a_model_keeps_never_changes_and_its_memory_comes_back_after_it(tmp_path: Path, pair: Pair) -> None:
    execute = """
    def execute(self, requests):
        x = requests[0].inputs()[0].as_numpy()
        if x[0] == -1:
            self.kept = x
            x = np.zeros(1, np.float32)
        elif x[0] == -2:
            x, self.kept = self.kept.copy(), None
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", x)])]
"""
    async with served(tmp_path, pair, execute) as models:
        await warm(models, pair)
        first = values()
        first[0] = -1
        await respond(models, {"x": pair.body(first)[0]})
        for seed in range(60):
            output = await respond(models, {"x": pair.body(values(seed))[0]})
            np.testing.assert_array_equal(output, values(seed))
            del output
        await pair.until_lent(1)
        last = values()
        last[0] = -2
        np.testing.assert_array_equal(await respond(models, {"x": pair.body(last)[0]}), first)
        await pair.until_lent(0)


async def test_nothing_stays_lent_after_the_death_of_a_process_and_its_file_is_removed(tmp_path: Path, pair: Pair) -> None:
    execute = """
    def execute(self, requests):
        x = requests[0].inputs()[0].as_numpy()
        if x[0] == -1:
            os._exit(3)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", x)])]
"""
    poison = values()
    poison[0] = -1
    async with served(tmp_path, pair, execute) as models:
        await warm(models, pair)
        body = pair.body(poison)
        with pytest.raises(Exception, match="ended with status 3"):
            await respond(models, {"x": body[0]})
        del body
        await pair.until_lent(0)
    assert len(list((tmp_path / "memory").iterdir())) == 2, "the files of the frontend and of the worker"


def to_response(result: ModelResult) -> tuple[ModelInferResponse, list[Buffer]]:
    head, raws = ModelInferResponse(), []
    for name, array in result.outputs.items():
        datatype, raw = from_numpy(array)
        head.outputs.add(name=name, datatype=datatype, shape=array.shape)
        raws.append(raw)
    return head, raws


TWO_OUTPUTS = """
    def execute(self, requests):
        [x] = [r.inputs()[0].as_numpy() for r in requests]
        outputs = [pb_utils.Tensor("y", x + 1), pb_utils.Tensor("z", (x + 2)[: len(x) // 2])]
        return [pb_utils.InferenceResponse(outputs)]
"""
Z_TOO = X_TO_Y + 'output [ { name: "z" data_type: TYPE_FP32 dims: [ -1 ] } ]'


@pytest.mark.parametrize("wanted", [("y", "z"), ("y",), ("z",), ("z", "y")])
async def test_a_response_is_lent_where_its_outputs_lie(tmp_path: Path, pair: Pair, wanted: tuple[str, ...]) -> None:
    reader = pair.worker.neighbour(pair.frontend.token)
    owner = pair.frontend.neighbour(pair.worker.token)
    assert reader is not None and owner is not None
    async with served(tmp_path, pair, TWO_OUTPUTS, Z_TOO) as models:
        await warm(models, pair)
        for seed in range(3):
            head = ModelInferRequest(model_name="model", id="7")
            head.inputs.add(name="x", datatype="FP32", shape=[SIZE])
            for name in wanted:
                head.outputs.add(name=name)
            request = TensorRequest.build(head, [values(seed).tobytes()])
            form = ResponseForm.of(request, models.find("model").card)
            [result] = await infer_all(models, "model", {"x": values(seed)})
            expected = {name: array.copy() for name, array in result.outputs.items()}
            body = form.encode(*to_response(result))
            await asyncio.sleep(0)
            pair.worker.sweep()
            used = pair.worker.used_bytes
            reference = pair.worker.lend(body, sum(map(len, body)), reader)
            assert reference is not None
            assert (pair.worker.used_bytes <= used) == (set(wanted) == {"y", "z"}), (
                "otherwise the outputs that are left are copied"
            )
            for name, array in result.outputs.items():
                np.testing.assert_array_equal(array, expected[name])
            view = pair.frontend.take(owner, reference)
            assert view is not None
            response, raws = parse_response(view)
            assert [output.name for output in response.outputs] == sorted(wanted), "in the order of the model"
            for output, raw in zip(response.outputs, raws, strict=True):
                np.testing.assert_array_equal(np.frombuffer(raw, np.float32), expected[output.name])
            del result, body, view, raws, raw, array
        await asyncio.sleep(0)  # the event loop keeps what woke this task up
        pair.worker.sweep()
        assert pair.worker.used_bytes == 0


async def test_room_for_outputs_comes_back_after_errors_cancellations_and_deaths(tmp_path: Path, pair: Pair) -> None:
    execute = """
    def execute(self, requests):
        [x] = [r.inputs()[0].as_numpy() for r in requests]
        if x[0] == -1:
            os._exit(3)
        if x[0] == -2:
            raise ValueError("no")
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", x)])]
"""
    async with served(tmp_path, pair, execute) as models:
        await warm(models, pair)
        wrong = values()
        wrong[0] = -2
        with pytest.raises(EngineError, match="no"):
            await respond(models, {"x": wrong})
        many = [asyncio.create_task(respond(models, {"x": values()})) for _ in range(20)]
        await asyncio.sleep(0)
        for task in many[::2]:
            task.cancel()
        for task in many[1::2]:
            np.testing.assert_array_equal(await task, values())
        many.clear()
        del task
        wrong[0] = -1
        with pytest.raises(EngineError, match="ended with status 3"):
            await respond(models, {"x": wrong})
        await asyncio.sleep(0)  # the event loop keeps what woke this task up
        pair.worker.sweep()
        assert pair.worker.used_bytes == 0


async def test_room_for_outputs_of_rescheduled_requests_comes_back(tmp_path: Path, pair: Pair) -> None:
    execute = """
    def execute(self, requests):
        self.calls = getattr(self, "calls", 0) + 1
        [x] = [r.inputs()[0].as_numpy() for r in requests]
        if self.calls <= 3 or self.calls % 10 == 0:
            return [pb_utils.InferenceResponse([pb_utils.Tensor("y", x)])]
        requests[0].set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
        return [None]
"""
    iterative = "sequence_batching { iterative_sequence: true }"
    async with served(tmp_path, pair, execute, f"{X_TO_Y} {iterative}") as models:
        for _ in range(3):
            await warm(models, pair)
        for _ in range(3):
            np.testing.assert_array_equal(await respond(models, {"x": values()}), values())
        await asyncio.sleep(0)  # the event loop keeps what woke this task up
        pair.worker.sweep()
        assert pair.worker.used_bytes == 0


async def test_outputs_that_find_no_room_go_through_the_socket(tmp_path: Path, pair: Pair) -> None:
    execute = """
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", r.inputs()[0].as_numpy())]) for r in requests]
"""
    async with served(tmp_path, pair, execute) as models:
        await warm(models, pair)
        kept = [await respond(models, {"x": values(seed)}) for seed in range(100)]
        for seed, output in enumerate(kept):
            np.testing.assert_array_equal(output, values(seed))
        assert is_shared(kept[0]) and not is_shared(kept[-1])
        del kept, output
        for _ in range(3):  # each looks for regions that have come back
            output = await respond(models, {"x": values(1)})
        assert is_shared(output)
