"""A worker for NVIDIA Dynamo that makes tokens as fast as it can, or so many a second if a number is given.

Run by the interpreter that has the peer installed.
"""

import asyncio
import sys

import uvloop

from dynamo.llm import ModelInput, ModelType, WorkerType, register_model
from dynamo.runtime import DistributedRuntime, dynamo_worker

TOKENS = 128
PAUSE_S = 1 / float(sys.argv[1]) if len(sys.argv) > 1 else 0


@dynamo_worker()
async def main(runtime: DistributedRuntime) -> None:
    endpoint = runtime.endpoint("dynamo.backend.generate")
    kinds = ModelType.Completions | ModelType.Chat
    await register_model(ModelInput.Tokens, kinds, endpoint, "model", "m", worker_type=WorkerType.Aggregated)
    await endpoint.serve_endpoint(generate)


async def generate(request, context):
    # The peer passes no sampling parameters on from KServe requests, so the number is fixed for both systems.
    for index in range(TOKENS):
        yield {"token_ids": [300 + index % 200], "finish_reason": "length" if index == TOKENS - 1 else None}
        await asyncio.sleep(PAUSE_S)


uvloop.run(main())
