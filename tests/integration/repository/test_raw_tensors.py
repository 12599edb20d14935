"""Tensors that Python models get, and give, in the form in which messages carry them."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import numpy as np
import pytest

from dynamo.common.errors import InvalidRequest
from dynamo.common.process.work import finish
from dynamo.common.shared_memory.sharing import SharedMemory
from dynamo.common.tensors.request import TensorRequest
from dynamo.common.tensors.tensors import bytes_array, encode_bytes
from dynamo.protos.inference_pb2 import ModelInferRequest
from dynamo.worker.engine.base import Context
from dynamo.worker.repository.engine import RepositoryEngine
from dynamo.worker.repository.models.settings import RepositorySettings
from dynamo.worker.repository.wire import wire
from dynamo.worker.repository.wire.raw_tensors import RawTensors, pack
from tests.support.repositories import X_TO_Y, ensemble, infer_all, opened, python_model, step

ECHO = """
import json
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("y", r.inputs()[0].as_numpy())], parameters=json.loads(r.parameters()))
            for r in requests
        ]
"""


def request(datatype: str, shape: list[int], raw: bytes, note: str = "") -> TensorRequest:
    head = ModelInferRequest(model_name="echo")
    if note:
        head.parameters["note"].string_param = note
    head.inputs.add(name="x", datatype=datatype, shape=shape)
    return TensorRequest.build(head, [raw])


def test_raw_tensors_are_arrays_where_they_are_looked_at_and_bytes_where_they_are_passed_on() -> None:
    place = wire.Place("arena", 64)
    heads = [wire.TensorHead("a", "INT16", (2, 1), 4, place), wire.TensorHead("b", "BYTES", (1,), 6)]
    raws = [b"\1\0\2\0", encode_bytes([b"hi"])]
    tensors = RawTensors(heads, raws)
    assert ("a" in tensors, "c" in tensors, len(tensors)) == (True, False, 2)
    assert {name: array.tolist() for name, array in tensors.items()} == {"a": [[1], [2]], "b": [b"hi"]}
    packed_heads, packed = pack(tensors)
    assert packed is raws
    assert [(head.name, head.place) for head in packed_heads] == [("a", None), ("b", None)], "they go elsewhere now"
    assert [head.size for head in pack(dict(tensors))[0]] == [4, 6], "arrays are packed alike"


@pytest.mark.parametrize(
    ("datatype", "raw", "expected"),
    [
        ("FP32", np.float32([1, 2]).tobytes(), np.float32([1, 2]).tobytes()),
        ("STRING", encode_bytes([b"", b"\0three"]), encode_bytes([b"", b"\0three"])),
        ("BOOL", b"\7\0", b"\1\0"),
        ("BF16", b"\x80\x3f\0\0", b"\x80\x3f\0\0"),
    ],
)
async def test_models_echo_each_datatype(tmp_path: Path, datatype: str, raw: bytes, expected: bytes) -> None:
    python_model(tmp_path, "echo", ECHO, X_TO_Y.replace("FP32", datatype))
    engine = RepositoryEngine(RepositorySettings(folders=(tmp_path,), copies=tmp_path / "copies"))
    await engine.start()
    name = "BYTES" if datatype == "STRING" else datatype
    try:
        for note in ("", "a", "", "b"):
            response = await engine.respond(request(name, [2], raw, note), Context("r"))
            assert {key: value.string_param for key, value in response.head.parameters.items()} == (
                {"note": note} if note else {}
            )
            [output] = response.head.outputs
            assert (output.name, output.datatype, list(output.shape)) == ("y", name, [2])
            assert [bytes(given) for given in response.raw_outputs] == [expected]
        with pytest.raises(InvalidRequest, match="input 'x'"):
            await engine.respond(request("FP32", [3], raw), Context("r"))
    finally:
        await engine.close()


async def test_long_strings_that_become_arrays_here_are_read_beside_other_requests(tmp_path: Path) -> None:
    batching = "max_batch_size: 1 sequence_batching { max_sequence_idle_microseconds: 60000000 }"
    python_model(tmp_path, "echo", ECHO, X_TO_Y.replace("FP32", "STRING") + batching)
    engine = RepositoryEngine(RepositorySettings(folders=(tmp_path,), copies=tmp_path / "copies"))
    await engine.start()
    raw = encode_bytes([b""] * 299_999 + [b"a"])
    starts = request("BYTES", [1, 300_000], raw)
    starts.head.parameters["sequence_id"].int64_param = 7
    starts.head.parameters["sequence_start"].bool_param = True
    begun = time.thread_time()
    finish(bytes_array(raw, 300_000))
    alone_s = time.thread_time() - begun
    responding = asyncio.create_task(engine.respond(starts, Context("r")))
    begun = time.thread_time()
    await asyncio.sleep(0)
    assert time.thread_time() - begun < alone_s / 2, "the first turn reads some of them"
    assert [bytes(given) for given in (await responding).raw_outputs] == [raw]
    await engine.close()


async def test_outputs_in_shared_memory_are_passed_on_to_the_next_model(tmp_path: Path) -> None:
    python_model(tmp_path, "echo", ECHO)
    steps = step("echo", {"x": "x"}, {"y": "between"}) + step("echo", {"x": "between"}, {"y": "y"})
    ensemble(tmp_path, steps, name="twice")
    memory_folder = tmp_path / "echo" / "memory"
    memory_folder.mkdir()
    memory = SharedMemory(memory_folder, 16 * 2**20)
    x = np.random.default_rng(1).random(100_000, np.float32)
    async with opened(tmp_path, "echo", "twice", memory=memory) as models:
        for _ in range(4):  # the first responses come before either side has opened the other's arena
            [result] = await infer_all(models, "twice", {"x": x})
            np.testing.assert_array_equal(result.outputs["y"], x)
        del result
    memory.close()
