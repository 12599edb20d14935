"""A worker for NVIDIA Dynamo that serves tensors: it gives each one back, and doubles numbers."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from dynamo.llm import ModelInput, ModelRuntimeConfig, ModelType, register_llm
from dynamo.runtime import DistributedRuntime, dynamo_worker

TENSORS = [{"name": "numbers", "data_type": "Int32", "shape": [-1]}, {"name": "words", "data_type": "Bytes", "shape": [-1]}]


async def generate(request: dict[str, Any], context: Any) -> AsyncIterator[dict[str, Any]]:
    tensors = []
    for tensor in request["tensors"]:
        data = tensor["data"]
        values = [2 * value for value in data["values"]] if data["data_type"] == "Int32" else data["values"]
        tensors.append({"metadata": tensor["metadata"], "data": {**data, "values": values}})
    yield {"model": request["model"], "tensors": tensors, "parameters": {}}


@dynamo_worker()
async def worker(runtime: DistributedRuntime) -> None:
    endpoint = runtime.endpoint("theirs.tensors.generate")
    settings = ModelRuntimeConfig()
    settings.set_tensor_model_config({"name": "tensors", "inputs": TENSORS, "outputs": TENSORS})
    await register_llm(ModelInput.Tensor, ModelType.TensorBased, endpoint, "tensors", runtime_config=settings)
    await endpoint.serve_endpoint(generate)


if __name__ == "__main__":
    asyncio.run(worker())
