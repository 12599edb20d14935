"""A worker for NVIDIA Dynamo that has its own preprocessor: OpenAI's requests in, OpenAI's chunks out."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from dynamo.llm import ModelInput, ModelType, register_llm
from dynamo.runtime import DistributedRuntime, dynamo_worker


class Handler:
    async def generate(self, request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        said = request["prompt"] if "prompt" in request else request["messages"][-1]["content"]
        for word in f"you said {said}".split(" "):
            choice = {"text": f"{word} "} if "prompt" in request else {"delta": {"role": "assistant", "content": f"{word} "}}
            yield {"id": "1", "object": "chunk", "choices": [{"index": 0, "finish_reason": None, **choice}]}
        yield {"id": "1", "object": "chunk", "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}


@dynamo_worker()
async def worker(runtime: DistributedRuntime) -> None:
    component = runtime.namespace("theirs").component("backend")
    await component.create_service()
    endpoint = component.endpoint("generate")
    await register_llm(ModelInput.Text, ModelType.Chat | ModelType.Completions, endpoint, "org/texts", "texts")
    await endpoint.serve_endpoint(Handler().generate)


if __name__ == "__main__":
    asyncio.run(worker())
