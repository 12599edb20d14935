"""A worker whose model makes a token at once and then so many a second: `python -m benchmarks.paced_worker TOKENIZER RATE`.

Finds etcd and NATS by the usual variables.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import uvloop

from dynamo.common.config import load
from dynamo.common.generation import Delta, GenerateRequest, Summary
from dynamo.worker.app import serve_worker
from dynamo.worker.config import WorkerConfig
from dynamo.worker.engine.base import Context
from dynamo.worker.engine.echo import EchoTokens


class PacedTokens(EchoTokens):
    """Says the prompt again at a steady pace."""

    def __init__(self, tokenizer: bytes, tokens_per_s: float) -> None:
        super().__init__("paced", tokenizer=tokenizer)
        self._pause_s = 1 / tokens_per_s

    async def generate(self, request: GenerateRequest, context: Context) -> AsyncIterator[Delta | Summary]:
        async for item in super().generate(request, context):
            yield item
            await asyncio.sleep(self._pause_s)


if __name__ == "__main__":
    engine = PacedTokens(Path(sys.argv[1]).read_bytes(), float(sys.argv[2]))
    uvloop.run(serve_worker(engine, load(WorkerConfig, ["--model", "echo:llm"], os.environ, program="paced_worker")))
