"""Requests of different shapes in one batch, for ONNX and Python models."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from google.protobuf import text_format
from onnx import TensorProto, helper

from dynamo.common.errors import EngineError
from dynamo.common.tensors.tensors import Array
from dynamo.protos.model_config_pb2 import ModelConfig
from dynamo.worker.engine.base import Context
from dynamo.worker.repository.declared.execution import ModelRequest, ModelResult, Version
from dynamo.worker.repository.sessions.session import SessionModel
from tests.support.repositories import X_TO_Y, infer, opened, python_model

KINDS = {
    "COUNT": ("BATCH_ELEMENT_COUNT", [3, 1, 4]),
    "SUM": ("BATCH_ACCUMULATED_ELEMENT_COUNT", [3, 4, 8]),
    "SUM0": ("BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO", [0, 3, 4, 8]),
    "MAX": ("BATCH_MAX_ELEMENT_COUNT_AS_SHAPE", [0, 0, 0, 0]),
    "ITEM": ("BATCH_ITEM_SHAPE", [3, 1, 2, 2]),
    "FLAT": ("BATCH_ITEM_SHAPE_FLATTEN", [3, 1, 2, 2]),
}
"""Batch inputs, and their values for requests of the shapes [1, 3], [1, 1] and [2, 2]."""
RAGGED = """
max_batch_size: 4
dynamic_batching { max_queue_delay_microseconds: 60000000 }
input [
  { name: "x" data_type: TYPE_FP32 dims: [ -1 ] allow_ragged_batch: true },
  { name: "row" data_type: TYPE_FP32 dims: [ 1 ] }
]
output [ { name: "y" data_type: TYPE_FP32 dims: [ -1 ] }, { name: "seen" data_type: TYPE_FP32 dims: [ -1 ] } ]
batch_output [ { target_name: "y" kind: BATCH_SCATTER_WITH_INPUT_SHAPE source_input: "x" } ]
"""


def batch_input(name: str, datatype: str = "TYPE_FP32", source: str = "x") -> str:
    return f'batch_input [ {{ kind: {KINDS[name][0]} target_name: "{name}" data_type: {datatype} source_input: "{source}" }} ]\n'


def ragged_model(repository: Path, name: str, config: str, *, y: str = "Add", datatype: int = TensorProto.FLOAT) -> None:
    """Writes a model: y is computed of x and itself, `seen` has in each row the elements of all batch inputs."""
    (repository / name / "1").mkdir(parents=True)
    (repository / name / "config.pbtxt").write_text(config)
    inputs = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n"]),
        helper.make_tensor_value_info("row", TensorProto.FLOAT, ["rows", 1]),
        *(helper.make_tensor_value_info(kind, datatype, ["a", "b"] if kind == "ITEM" else [f"size of {kind}"]) for kind in KINDS),
    ]
    nodes = [
        helper.make_node(y, ["x", "x"] if y == "Add" else ["x"], ["y"]),
        helper.make_node("Reshape", ["ITEM", "all"], ["items"]),
        helper.make_node("Concat", ["COUNT", "SUM", "SUM0", "MAX", "items", "FLAT"], ["values"], axis=0),
        helper.make_node("Cast", ["values"], ["floats"], to=TensorProto.FLOAT),
        helper.make_node("Add", ["row", "floats"], ["seen"]),
    ]
    outputs = [
        helper.make_tensor_value_info("y", TensorProto.FLOAT, ["m"]),
        helper.make_tensor_value_info("seen", TensorProto.FLOAT, ["rows", "k"]),
    ]
    graph = helper.make_graph(nodes, name, inputs, outputs, [helper.make_tensor("all", TensorProto.INT64, [1], [-1])])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(model, repository / name / "1" / "model.onnx")


def tensors(*shape: int) -> dict[str, np.ndarray]:  # type: ignore[type-arg]
    return {
        "x": np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + 10 * shape[1],
        "row": np.zeros((shape[0], 1), np.float32),
    }


@pytest.mark.parametrize("datatype", ["TYPE_FP32", "TYPE_INT32"])
async def test_a_model_gets_all_elements_and_what_tells_the_requests_apart(tmp_path: Path, datatype: str) -> None:
    config = RAGGED + "".join(batch_input(name, datatype) for name in KINDS)
    ragged_model(tmp_path, "m", config, datatype=TensorProto.FLOAT if datatype == "TYPE_FP32" else TensorProto.INT32)
    async with opened(tmp_path, "m") as models:
        requests = [tensors(1, 3), tensors(1, 1), tensors(2, 2)]
        responses = await asyncio.gather(*(infer(models, "m", request) for request in requests))
        assert [response["y"] for response in responses] == [(2 * request["x"]).tolist() for request in requests]
        seen = [float(value) for name, (_, values) in KINDS.items() if name != "MAX" for value in values]
        for request, response in zip(requests, responses, strict=True):
            assert [[*row[:10], *row[14:]] for row in response["seen"]] == [seen] * len(request["row"])
            assert len(response["seen"][0]) == len(seen) + 4


async def test_an_output_with_too_few_elements_for_the_batch_is_an_error(tmp_path: Path) -> None:
    config = RAGGED.replace("dynamic_batching { max_queue_delay_microseconds: 60000000 }", "")
    ragged_model(tmp_path, "m", config + "".join(map(batch_input, KINDS)), y="Unique")
    async with opened(tmp_path, "m") as models:
        with pytest.raises(EngineError, match="output 'y' has 1 elements; the requests of the batch need 3"):
            await infer(models, "m", tensors(1, 3) | {"x": np.ones((1, 3), np.float32)})


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (RAGGED.replace("allow_ragged_batch: true", ""), "input 'x' is declared in shape [-1, -1] with the batch dimension"),
        (RAGGED + "".join(batch_input(name, "TYPE_INT32") for name in KINDS), "batch_input 'COUNT' is declared as INT32"),
        (RAGGED + batch_input("COUNT").replace('"COUNT"', '"other"'), "batch_input names the input 'other', which the model"),
        (RAGGED + batch_input("ITEM").replace('"ITEM"', '"COUNT"'), "batch_input 'COUNT' is declared in shape [-1, -1]"),
    ],
)
async def test_batch_inputs_that_the_model_does_not_have_are_refused(tmp_path: Path, config: str, reason: str) -> None:
    ragged_model(tmp_path, "m", config)
    async with opened(tmp_path) as models:
        assert reason in str((await models.load_all(["m"]))["m"])


class CopyingSession:
    """Copies x to y, and refuses negative numbers."""

    signature = None

    def run(self, outputs: Sequence[str], inputs: Mapping[str, Array]) -> Sequence[Array]:
        if inputs["x"].min() < 0:
            raise ValueError("negative")
        return [inputs["x"] for _ in outputs]


async def test_sequences_whose_requests_cannot_be_joined_run_one_by_one_and_fail_alone(tmp_path: Path) -> None:
    config = text_format.Parse(f"name: 'm' max_batch_size: 4 {X_TO_Y} {batch_input('COUNT')}", ModelConfig())
    model = SessionModel(Version("m", "1", config, tmp_path), CopyingSession(), None)
    given = [np.ones((1, 2), np.float32), np.full((1, 3), -1, np.float32), np.ones((1, 4), np.float32)]
    results = await model.respond_all([ModelRequest({"x": array}, Context("r")) for array in given])
    await model.close()
    shapes = [result.outputs["y"].shape if isinstance(result, ModelResult) else str(result) for result in results]
    assert shapes == [(1, 2), "model 'm' failed: negative", (1, 4)]


async def test_a_python_model_gets_requests_of_different_shapes_together_and_as_they_are(tmp_path: Path) -> None:
    """As Triton's Python backend does, which also ignores `batch_input`."""
    code = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        sizes = [[t.as_numpy().size for t in r.inputs()] for r in requests]
        outputs = [np.array([sum(sizes, [])] * r.inputs()[0].as_numpy().shape[0], np.float32) for r in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", y)]) for y in outputs]
"""
    ragged = X_TO_Y.replace("dims: [ -1 ] }", "dims: [ -1 ] allow_ragged_batch: true }", 1) + batch_input("COUNT")
    python_model(tmp_path, "m", code, f"max_batch_size: 4 dynamic_batching {{ max_queue_delay_microseconds: 60000000 }} {ragged}")
    async with opened(tmp_path, "m") as models:
        requests = [{"x": np.ones(shape, np.float32)} for shape in ((1, 3), (1, 1), (2, 2))]
        responses = await asyncio.gather(*(infer(models, "m", request) for request in requests))
        assert [response["y"] for response in responses] == [[[3.0, 1.0, 4.0]], [[3.0, 1.0, 4.0]], [[3.0, 1.0, 4.0]] * 2]
