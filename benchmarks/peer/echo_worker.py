"""A tensor worker for NVIDIA Dynamo that responds with its inputs. Run by the interpreter that has the peer installed."""

import uvloop

from dynamo.llm import ModelInput, ModelType, WorkerType, register_model
from dynamo.runtime import DistributedRuntime, dynamo_worker


@dynamo_worker()
async def main(runtime: DistributedRuntime) -> None:
    endpoint = runtime.endpoint("tensor.echo.generate")
    tensor = {"data_type": "Float32", "shape": [-1]}
    config = {"name": "echo", "inputs": [{"name": "INPUT0", **tensor}], "outputs": [{"name": "INPUT0", **tensor}]}
    await register_model(
        ModelInput.Tensor,
        ModelType.TensorBased,
        endpoint,
        "echo",
        worker_type=WorkerType.Aggregated,
        tensor_model_config=config,
    )
    await endpoint.serve_endpoint(generate)


async def generate(request, context):
    yield {"model": request["model"], "tensors": request["tensors"], "parameters": {}}


uvloop.run(main())
