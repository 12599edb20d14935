"""A server that speaks what the remote engine uses of `vllm serve`, as its sources of August 2026 have it (`entrypoints/openai`).

GET /health and /v1/models (`max_model_len`, `root`); POST /v1/completions with `stream`, `return_token_ids` and
`return_tokens_as_token_ids`. `max_tokens` is 16 by default, and logprobs end at 20. With `changes_adapters` also POST
/v1/load_lora_adapter and /v1/unload_lora_adapter (`entrypoints/serve/lora`). A `SeeingServer` has POST /v1/chat/completions, too,
with images in messages and the same fields besides (`entrypoints/openai/chat_completion`); `max_tokens` is as many as fit there.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from dynamo.common.generation import Delta, GenerateRequest, Sampling, Stop, Summary, pack_tokens
from dynamo.worker.engine.sim.engine import SimEngine
from tests.support.engine_server import EngineServer, serving

MAX_LOGPROBS = 20


@dataclass
class VllmServer(EngineServer):
    paths: ClassVar[tuple[bytes, ...]] = (b"/v1/completions",)
    owner: str = "vllm"
    changes_adapters: bool = False
    adapters: dict[str, str] = field(default_factory=dict)
    """Paths by name."""

    def models(self) -> dict[str, Any]:
        listed = {
            "id": self.model,
            "object": "model",
            "created": 1,
            "owned_by": self.owner,
            "root": str(self.folder),
            "parent": None,
        }
        adapters = [listed | {"id": name, "root": path, "parent": self.model} for name, path in self.adapters.items()]
        return {"object": "list", "data": [{**listed, "max_model_len": self.context_length, "permission": []}, *adapters]}

    def change(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]] | None:
        if not self.changes_adapters:
            return None
        name = body["lora_name"]
        match path:
            case "/v1/load_lora_adapter" if name in self.adapters and not body["load_inplace"]:
                return _failure(400, f"The lora adapter '{name}' has already been loaded.")
            case "/v1/load_lora_adapter" if "missing" in body["lora_path"]:
                return _failure(404, f"Loading lora {name} failed: No adapter found for {body['lora_path']}")
            case "/v1/load_lora_adapter":
                self.adapters[name] = body["lora_path"]
            case "/v1/unload_lora_adapter" if name not in self.adapters:
                return _failure(404, f"The lora adapter '{name}' cannot be found.")
            case "/v1/unload_lora_adapter":
                del self.adapters[name]
            case _:
                return None
        return 200, {}

    def refusal(self, body: dict[str, Any]) -> str | None:
        return f"logprobs above {MAX_LOGPROBS}" if (body.get("logprobs") or 0) > MAX_LOGPROBS else None

    def to_request(self, body: dict[str, Any]) -> GenerateRequest:
        return to_request(body)

    async def events(self, items: AsyncIterator[Delta | Summary], body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        async for item in items:
            yield usage_event(item) if isinstance(item, Summary) else _chunk(item, body)


@dataclass
class SeeingServer(VllmServer):
    """A vision model, which takes 100 tokens for an image."""

    paths: ClassVar[tuple[bytes, ...]] = (b"/v1/completions", b"/v1/chat/completions")

    def to_request(self, body: dict[str, Any]) -> GenerateRequest:
        return to_request(body if "prompt" in body else {"max_tokens": 400, **body, "prompt": [1] * 100, "logprobs": _top(body)})

    async def events(self, items: AsyncIterator[Delta | Summary], body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        if "prompt" in body:
            async for event in super().events(items, body):
                yield event
            return
        yield {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
        async for event in super().events(items, body | {"logprobs": _top(body)}):
            for choice in event["choices"]:
                choice["delta"] = {"content": choice.pop("text")}
                if choice["logprobs"] is not None:
                    choice["logprobs"] = {"content": _positions(choice["logprobs"])}
            yield event


def _top(body: dict[str, Any]) -> int | None:
    top: int = body.get("top_logprobs", 0)
    return top if body.get("logprobs") else None


def _positions(columns: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"token": token, "logprob": value, "top_logprobs": [{"token": name, "logprob": other} for name, other in top.items()]}
        for token, value, top in zip(columns["tokens"], columns["token_logprobs"], columns["top_logprobs"], strict=True)
    ]


def _failure(status: int, message: str) -> tuple[int, dict[str, Any]]:
    return status, {"error": {"message": message, "type": "Error", "param": None, "code": status}}


def to_request(body: dict[str, Any]) -> GenerateRequest:
    biases = body.get("logit_bias")
    return GenerateRequest(
        model="served",
        prompt=pack_tokens(body["prompt"]),
        sampling=Sampling(
            temperature=body.get("temperature"),
            seed=body.get("seed"),
            logit_bias=biases and {int(token): bias for token, bias in biases.items()},
        ),
        stop=Stop(
            max_tokens=body.get("max_tokens", 16),
            min_tokens=body.get("min_tokens", 0),
            token_ids=tuple(body.get("stop_token_ids", ())),
            ignore_eos=body.get("ignore_eos", False),
        ),
        n=body.get("n", 1),
        logprobs=body.get("logprobs"),
        cache_salt=body.get("cache_salt", ""),
    )


def _chunk(delta: Delta, body: dict[str, Any]) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": delta.index, "text": "", "logprobs": None, "finish_reason": delta.finish_reason}
    choice["stop_reason"] = delta.stop_token if delta.stop_token in body.get("stop_token_ids", ()) else None
    if body.get("return_token_ids"):
        choice["token_ids"] = [*delta.tokens, *([] if delta.stop_token is None else [delta.stop_token])]
    if delta.logprobs is not None:
        choice["logprobs"] = {
            "text_offset": [0] * len(delta.logprobs),
            "token_logprobs": [position[0][1] for position in delta.logprobs],
            "tokens": [f"token_id:{position[0][0]}" for position in delta.logprobs],
            # The chosen token is one of the likeliest, if it is the likeliest.
            "top_logprobs": [
                {f"token_id:{token}": value for token, value in position[: max(body["logprobs"], 1)]}
                for position in delta.logprobs
            ],
        }
    return {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "served", "choices": [choice]}


def usage_event(summary: Summary) -> dict[str, Any]:
    usage = {
        "prompt_tokens": summary.prompt_tokens,
        "completion_tokens": summary.output_tokens,
        "prompt_tokens_details": {"cached_tokens": summary.cached_tokens},
    }
    return {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "served", "choices": [], "usage": usage}


def serve_vllm(engine: SimEngine, folder: Path, context_length: int = 512) -> AbstractAsyncContextManager[VllmServer]:
    """Serve `engine`, whose tokenizer and template are written to `folder`."""
    return serving(VllmServer, engine, folder, context_length)
