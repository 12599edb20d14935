"""A server that speaks what the remote engine uses of TensorRT-LLM's `trtllm-serve`, as its sources of 2026 have it.

(`tensorrt_llm/serve/openai_protocol.py`, commit 0076e93). GET /health and /v1/models, without context length and folder; POST
/v1/completions, where `prompt` is token ids and `detokenize: false` returns token ids, without the stop token.
Fields that it does not have are refused.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, ClassVar

from dynamo.common.generation import Delta, GenerateRequest, Summary
from tests.support.engine_server import EngineServer
from tests.support.vllm_server import to_request, usage_event

FIELDS = frozenset(
    {
        *("model", "prompt", "stream", "stream_options", "n", "max_tokens", "min_tokens", "ignore_eos", "temperature", "top_p"),
        *("top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "seed", "logit_bias", "stop", "user"),
        *("stop_token_ids", "detokenize", "response_format", "priority", "logprobs", "best_of", "echo", "suffix", "lora_request"),
    }
)


@dataclass
class TensorRtServer(EngineServer):
    paths: ClassVar[tuple[bytes, ...]] = (b"/v1/completions",)

    def models(self) -> dict[str, Any]:
        return {"object": "list", "data": [{"id": self.model, "object": "model", "created": 1, "owned_by": "tensorrt_llm"}]}

    def refusal(self, body: dict[str, Any]) -> str | None:
        unknown = sorted(body.keys() - FIELDS)
        return f"Extra inputs are not permitted: {unknown[0]}" if unknown else None

    def to_request(self, body: dict[str, Any]) -> GenerateRequest:
        return to_request(body)

    async def events(self, items: AsyncIterator[Delta | Summary], body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        async for item in items:
            if isinstance(item, Summary):
                yield usage_event(item)
                continue
            choice = {"index": item.index, "text": "", "token_ids": [*item.tokens], "finish_reason": item.finish_reason}
            choice["stop_reason"] = item.stop_token if item.stop_token in body.get("stop_token_ids", ()) else None
            assert body["detokenize"] is False
            yield {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": self.model, "choices": [choice]}
