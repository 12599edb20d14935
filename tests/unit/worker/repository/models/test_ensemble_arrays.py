"""The arrays that flow through an ensemble, beside backends that write to what they may write to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import NoReturn

import numpy as np
from google.protobuf import text_format

from dynamo.common.tensors.tensors import Array
from dynamo.protos.model_config_pb2 import ModelConfig
from dynamo.worker.engine.base import Context
from dynamo.worker.repository.declared.execution import ModelRequest, ModelResult, Version
from dynamo.worker.repository.models.ensemble import EnsembleBackend
from tests.support.repositories import X_TO_Y, step


class Models:
    """`same` gives its input as its output, `doubled` works in place, and `late` gives its input when others have worked."""

    def __init__(self) -> None:
        self.has_worked = asyncio.Event()

    def config(self, model: str, version: str) -> ModelConfig:
        return text_format.Parse(X_TO_Y, ModelConfig(name=model))

    async def run(self, model: str, version: str, request: ModelRequest) -> AsyncIterator[ModelResult]:
        array: Array = request.inputs["x"]
        if model == "doubled":
            array = np.require(array, requirements=("C", "W"))  # as PyTorch's backend does
            array *= 2
            self.has_worked.set()
        elif model == "late":
            await self.has_worked.wait()
        yield ModelResult({"y": array})

    async def load(self, model: str, config: str, files: Mapping[str, bytes]) -> NoReturn:
        raise AssertionError("no model is loaded")

    async def unload(self, model: str, dependents: bool) -> NoReturn:
        raise AssertionError("no model is unloaded")


async def respond(*steps: str, given: Array) -> dict[str, list[float]]:
    outputs = "".join(f'output {{ name: "{name}" data_type: TYPE_FP32 dims: [ -1 ] }}\n' for name in ("late", "doubled"))
    text = f'input {{ name: "x" data_type: TYPE_FP32 dims: [ -1 ] }}\n{outputs}ensemble_scheduling {{ {" ".join(steps)} }}'
    config = text_format.Parse(text, ModelConfig(name="both"))
    ensemble = await EnsembleBackend(Models()).open(Version("both", "1", config, Path()))
    async with asyncio.timeout(120):
        result = await ensemble.respond(ModelRequest({"x": given}, Context("context-1")))
    return {name: array.tolist() for name, array in result.outputs.items()}


async def test_a_step_that_works_in_place_changes_nothing_that_another_one_reads() -> None:
    steps = (step("same", {"x": "x"}, {"y": "a"}), step("doubled", {"x": "a"}, {"y": "doubled"}))
    given = np.array([1, 2], np.float32)
    outputs = await respond(*steps, step("late", {"x": "a"}, {"y": "late"}), given=given)
    assert outputs == {"late": [1, 2], "doubled": [2, 4]}
    assert given.tolist() == [1, 2]
    assert given.flags.writeable


async def test_nor_does_one_whose_own_tensor_lies_in_the_memory_of_another() -> None:
    steps = (step("same", {"x": "x"}, {"y": "a"}), step("same", {"x": "x"}, {"y": "b"}))
    given = np.array([1, 2], np.float32)
    outputs = await respond(
        *steps, step("doubled", {"x": "a"}, {"y": "doubled"}), step("late", {"x": "b"}, {"y": "late"}), given=given
    )
    assert outputs == {"late": [1, 2], "doubled": [2, 4]}
    assert given.tolist() == [1, 2]
