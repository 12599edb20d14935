"""An engine for language models: it says the prompt backwards, one token a step.

    DYN_ETCD_ENDPOINTS=http://127.0.0.1:2379 DYN_NATS_SERVERS=nats://127.0.0.1:4222 python examples/extending/reverse_engine.py

serves it as `reverse` in a fleet that runs already.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from hashlib import sha256

from dynamo.common.config import load
from dynamo.common.errors import InvalidRequest
from dynamo.common.generation import Delta, FinishReason, GenerateRequest, Summary
from dynamo.common.lifecycle import run
from dynamo.common.model_card import LlmInfo, ModelCard, ModelKind
from dynamo.worker.app import serve_worker
from dynamo.worker.config import WorkerConfig
from dynamo.worker.engine.base import Context, EngineLoad
from dynamo.worker.engine.echo import byte_tokenizer


class ReverseEngine:
    """The tokens of the prompt from the last to the first. Its tokens are the bytes of the text."""

    def __init__(self, name: str = "reverse") -> None:
        self._name = name
        self._running = 0

    async def start(self) -> ModelCard:
        [tokenizer] = self.files()
        info = LlmInfo(context_length=4096, tokenizer=sha256(tokenizer).hexdigest())
        return ModelCard(name=self._name, kind=ModelKind.LLM, llm=info).check()

    def files(self) -> Sequence[bytes]:
        """Return the contents of the files that the card names; the worker stores them for frontends."""
        return [byte_tokenizer()]

    async def generate(self, request: GenerateRequest, context: Context) -> AsyncIterator[Delta | Summary]:
        if request.n != 1:
            raise InvalidRequest("the reverse engine makes one choice per request", param="n")
        prompt = request.tokens
        limit = len(prompt) if request.stop.max_tokens is None else min(request.stop.max_tokens, len(prompt))
        self._running += 1
        try:
            for step, token in enumerate(reversed(prompt[len(prompt) - limit :]), start=1):
                reason = None if step < limit else FinishReason.STOP if limit == len(prompt) else FinishReason.LENGTH
                yield Delta((token,), finish_reason=reason)
                await asyncio.sleep(0)  # the turn of other requests; a cancelled request is closed here
        finally:
            self._running -= 1
        yield Summary(prompt_tokens=len(prompt), output_tokens=limit)

    def load(self) -> EngineLoad:
        return EngineLoad(running=self._running)

    async def close(self) -> None:
        return


if __name__ == "__main__":
    run(serve_worker(ReverseEngine(), load(WorkerConfig, [], os.environ, program="reverse")))
