"""A worker for NVIDIA Dynamo that leaves the text to the frontend: token ids in, token ids out. It repeats the prompt."""

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

from dynamo.llm import ModelInput, ModelType, register_model
from dynamo.runtime import Context, DistributedRuntime, dynamo_worker


async def generate(request: dict[str, Any], context: Context) -> AsyncIterator[dict[str, Any]]:
    limit = request["stop_conditions"]["max_tokens"]
    for token in request["token_ids"][:limit]:
        if context.is_stopped():
            return
        yield {"token_ids": [token]}
    yield {"token_ids": [], "finish_reason": "length"}


@dynamo_worker()
async def worker(runtime: DistributedRuntime, model_path: str) -> None:
    endpoint = runtime.endpoint("theirs.tokens.generate")
    await register_model(ModelInput.Tokens, ModelType.Completions, endpoint, model_path, "tokens", context_length=256)
    await endpoint.serve_endpoint(generate, graceful_shutdown=True)


if __name__ == "__main__":
    asyncio.run(worker(sys.argv[1]))
