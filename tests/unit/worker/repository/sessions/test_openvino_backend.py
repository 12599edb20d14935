"""Models of OpenVINO, run by OpenVINO."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import openvino
import pytest

from tests.support.repositories import infer, opened


def save(repository: Path, shape: list[int], config: str = "") -> None:
    """Write a model that doubles x to y."""
    opset = openvino.opset13
    parameter = opset.parameter(shape, np.float32, name="x")
    parameter.output(0).set_names({"x"})
    doubled = opset.multiply(parameter, opset.constant(np.float32(2)))
    doubled.output(0).set_names({"y", "alias"})
    folder = repository / "m"
    (folder / "1").mkdir(parents=True)
    openvino.save_model(openvino.Model([doubled], [parameter], "double"), folder / "1" / "model.xml", compress_to_fp16=False)
    if config:
        (folder / "config.pbtxt").write_text(f'backend: "openvino"\n{config}')


async def test_a_model_needs_no_configuration_and_runs_in_batches(tmp_path: Path) -> None:
    save(tmp_path, [-1, 2])
    async with opened(tmp_path, "m") as models:
        config = models.config("m", "")
        assert (config.backend, config.default_model_filename, config.max_batch_size) == ("openvino", "model.xml", 4)
        assert [(each.name, each.dims) for each in (*config.input, *config.output)] == [("x", [2]), ("alias", [2])]
        rows = [np.array([[row, 1]], np.float32) for row in range(8)]
        results = await asyncio.gather(*(infer(models, "m", {"x": row}) for row in rows))
        assert results == [{"alias": [[2 * row, 2]]} for row in range(8)]


async def test_a_fixed_batch_size_is_made_free_and_an_output_may_have_any_of_its_names(tmp_path: Path) -> None:
    config = """
        max_batch_size: 8
        input { name: "x" data_type: TYPE_FP32 dims: [ 2 ] }
        output { name: "y" data_type: TYPE_FP32 dims: [ 2 ] }
        parameters { key: "INFERENCE_NUM_THREADS" value { string_value: "1" } }
        parameters { key: "PERFORMANCE_HINT" value { string_value: "LATENCY" } }
    """
    save(tmp_path, [1, 2], config)
    async with opened(tmp_path, "m") as models:
        assert await infer(models, "m", {"x": np.ones((3, 2), np.float32)}) == {"y": [[2, 2]] * 3}


async def test_a_model_takes_the_shapes_of_the_configuration_on_demand(tmp_path: Path) -> None:
    config = """
        input { name: "x" data_type: TYPE_FP32 dims: [ 1, 5 ] }
        parameters { key: "RESHAPE_IO_LAYERS" value { string_value: "YES" } }
    """
    save(tmp_path, [1, 2], config)
    async with opened(tmp_path, "m") as models:
        assert await infer(models, "m", {"x": np.ones((1, 5), np.float32)}) == {"alias": [[2] * 5]}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ('input { name: "x" data_type: TYPE_INT8 dims: [ 1, 2 ] }', "input 'x' is declared as INT8; the model has FP32"),
        ('input { name: "z" data_type: TYPE_FP32 dims: [ 1, 2 ] }', "the model has no input 'z'; it has x"),
        ('parameters { key: "INFERENCE_NUM_THREADS" value { string_value: "x" } }', "which is not a number"),
        ('parameters { key: "TARGET_DEVICE" value { string_value: "NONE" } }', "OpenVINO cannot load 1/model.xml"),
        ('parameters { key: "CPU_EXTENSION_PATH" value { string_value: "../x.so" } }', "is not a path inside the model's folder"),
        (
            'max_batch_size: 2 input { name: "x" data_type: TYPE_FP32 dims: [ 2 ] } '
            'parameters { key: "SKIP_OV_DYNAMIC_BATCHSIZE" value { string_value: "YES" } }',
            "with the batch dimension in front; the model has [1, 2]",
        ),
    ],
)
async def test_a_configuration_that_does_not_fit_is_refused(tmp_path: Path, config: str, expected: str) -> None:
    save(tmp_path, [1, 2], config)
    async with opened(tmp_path) as models:
        assert expected in str((await models.load_all(["m"]))["m"])
