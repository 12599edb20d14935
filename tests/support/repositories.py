"""Model repositories for tests: folders written on the spot, and requests to their models without any server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from dynamo.common.shared_memory.sharing import SharedMemory
from dynamo.worker.engine.base import Context
from dynamo.worker.repository.declared.execution import ModelRequest, ModelResult, Parameter, closing
from dynamo.worker.repository.models.models import RepositoryModels
from dynamo.worker.repository.models.settings import RepositorySettings

EXAMPLES = Path(__file__).parents[2] / "examples" / "repository"

DOUBLE = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("y", 2 * pb_utils.get_input_tensor_by_name(r, "x").as_numpy())])
            for r in requests
        ]
"""
X_TO_Y = """
input [ { name: "x" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ -1 ] } ]
"""


def python_model(repository: Path, name: str, code: str = DOUBLE, config: str = X_TO_Y, version: int = 1) -> Path:
    """Writes a model; returns its folder. `config` goes into `config.pbtxt` after name and backend; empty: there is none."""
    folder = repository / name
    (folder / str(version)).mkdir(parents=True, exist_ok=True)
    (folder / str(version) / "model.py").write_text(code)
    if config:
        (folder / "config.pbtxt").write_text(f'name: "{name}"\nbackend: "python"\n{config}')
    return folder


def model_with_config(repository: Path, name: str, config: str) -> Path:
    """A folder with nothing but this configuration and an empty version."""
    folder = repository / name
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(config)
    return folder


def step(model: str, inputs: dict[str, str], outputs: dict[str, str]) -> str:
    """Return a step of an ensemble."""
    maps = [f'input_map {{ key: "{key}" value: "{value}" }}' for key, value in inputs.items()]
    maps += [f'output_map {{ key: "{key}" value: "{value}" }}' for key, value in outputs.items()]
    return f'step {{ model_name: "{model}" model_version: -1 {" ".join(maps)} }}'


def ensemble(repository: Path, *steps: str, more: str = "", name: str = "both") -> None:
    """Writes an ensemble from x to y."""
    config = f'platform: "ensemble"\n{X_TO_Y}\nensemble_scheduling {{ {" ".join(steps)} }}\n{more}'
    model_with_config(repository, name, config)


@asynccontextmanager
async def opened(
    repository: Path, *load: str, also: Sequence[Path] = (), memory: SharedMemory | None = None, **settings: Any
) -> AsyncIterator[RepositoryModels]:
    """Open the models of `repository` and of those in `also`, and load some; raises if one does not load.

    `settings` are those that differ from production's.
    """
    copies = repository.with_name(f"{repository.name}-copies")
    models = RepositoryModels(RepositorySettings(folders=(repository, *also), copies=copies, **settings))
    if memory is not None:
        models.use_shared_memory(memory)
    try:
        for error in (await models.load_all(load)).values():
            raise error
        yield models
    finally:
        await models.close()


async def infer_all(
    models: RepositoryModels,
    model: str,
    inputs: Mapping[str, Any],
    version: str = "",
    parameters: Mapping[str, Parameter] | None = None,
    outputs: Sequence[str] = (),
) -> list[ModelResult]:
    arrays = {name: np.asarray(value) for name, value in inputs.items()}
    request = ModelRequest(arrays, Context("context-7"), outputs, parameters or {}, "request-7")
    async with closing(models.run(model, version, request)) as responses:
        return [response async for response in responses]


async def infer(models: RepositoryModels, model: str, inputs: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """Return the outputs of the only response as lists; bytes stay bytes."""
    [response] = await infer_all(models, model, inputs, **more)
    return {name: array.tolist() for name, array in response.outputs.items()}


def x(*values: float) -> dict[str, Any]:
    return {"x": np.array(values, np.float32)}
