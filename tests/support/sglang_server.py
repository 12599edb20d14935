"""A server that speaks what the remote engine uses of SGLang, as its documentation and sources of 2026 have it.

(`docs/basic_usage/sampling_params.md`, commit 0a0dd35; `srt/managers/tokenizer_manager.py`, commit c60799d.) GET /health,
/v1/models and /get_model_info; POST /generate with `input_ids`. An event has all tokens of its choice so far, with the stop
token, or the new ones where the server runs with `--incremental-streaming-output`; log probabilities are `[value, token, text]`.
POST /load_lora_adapter and /unload_lora_adapter (`srt/entrypoints/http_server.py`, `srt/lora/lora_registry.py`) respond with
`success` and `error_message`; a name that is loaded is refused. `image_data` has images as data URLs (`srt/utils/common.py`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

from dynamo.common.generation import Delta, GenerateRequest, Sampling, Stop, Summary, pack_tokens
from tests.support.engine_server import EngineServer


@dataclass
class SglangServer(EngineServer):
    paths: ClassVar[tuple[bytes, ...]] = (b"/generate",)
    is_incremental: bool = False
    sees: bool = False
    """Whether its model takes images; each is 100 tokens."""
    adapters: dict[str, str] = field(default_factory=dict)
    """Paths by name."""

    def models(self) -> dict[str, Any]:
        listed = {"id": self.model, "object": "model", "created": 1, "owned_by": "sglang", "root": self.model}
        adapters = [listed | {"id": name, "root": path, "parent": self.model} for name, path in self.adapters.items()]
        return {"object": "list", "data": [{**listed, "max_model_len": self.context_length}, *adapters]}

    def page(self, path: str) -> dict[str, Any] | None:
        if path != "/get_model_info":
            return None
        folder = str(self.folder)
        return {"model_path": folder, "tokenizer_path": folder, "is_generation": True, "has_image_understanding": self.sees}

    def change(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]] | None:
        name = body["lora_name"]
        match path:
            case "/load_lora_adapter" if name in self.adapters:
                return _failure(f"Failed to load LoRA adapter {name}: already loaded")
            case "/load_lora_adapter" if "missing" in body["lora_path"]:
                return _failure(f"Failed to load LoRA adapter {name}: no adapter_config.json")
            case "/load_lora_adapter":
                self.adapters[name] = body["lora_path"]
            case "/unload_lora_adapter" if name not in self.adapters:
                return _failure(f"LoRA with name {name} does not exist. Loaded LoRAs: {self.adapters.keys()}")
            case "/unload_lora_adapter":
                del self.adapters[name]
            case _:
                return None
        return 200, {"success": True, "error_message": "", "loaded_adapters": self.adapters}

    def refusal(self, body: dict[str, Any]) -> str | None:
        name = body.get("lora_path")
        if name is None or name in self.adapters:
            return None
        return f"The following requested LoRA adapters are not loaded: {name}\nLoaded adapters: {self.adapters.keys()}."

    def to_request(self, body: dict[str, Any]) -> GenerateRequest:
        settings = body["sampling_params"]
        biases = settings.get("logit_bias")
        return GenerateRequest(
            model="served",
            prompt=pack_tokens(body["input_ids"]),
            sampling=Sampling(
                temperature=settings.get("temperature"),
                seed=settings.get("sampling_seed"),
                logit_bias=biases and {int(token): bias for token, bias in biases.items()},
            ),
            stop=Stop(
                max_tokens=400 if (limit := settings.get("max_new_tokens", 128)) is None else limit,
                min_tokens=settings.get("min_new_tokens", 0),
                token_ids=tuple(settings.get("stop_token_ids", ())),
                ignore_eos=settings.get("ignore_eos", False),
            ),
            n=settings.get("n", 1),
            logprobs=body["top_logprobs_num"] - 1 if body.get("return_logprob") else None,
        )

    async def events(self, items: AsyncIterator[Delta | Summary], body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        tokens: dict[int, list[int]] = {}
        chosen: dict[int, list[Any]] = {}
        tops: dict[int, list[Any]] = {}
        last: list[dict[str, Any]] = []
        """What ends a choice, which says how much of the prompt was cached."""
        async for item in items:
            if isinstance(item, Summary):
                for event in last:
                    event["meta_info"]["cached_tokens"] = item.cached_tokens
                    yield event
                return
            new = [*item.tokens, *([] if item.stop_token is None else [item.stop_token])]
            positions = item.logprobs or []
            sent = 0 if not self.is_incremental else len(tokens.get(item.index, ()))
            tokens.setdefault(item.index, []).extend(new)
            chosen.setdefault(item.index, []).extend([value, token, None] for (token, value), *_ in positions)
            tops.setdefault(item.index, []).extend([[value, token, None] for token, value in position] for position in positions)
            finish: dict[str, Any] | None = None
            if item.finish_reason is not None:
                finish = {"type": item.finish_reason, "matched": item.stop_token}
            info: dict[str, Any] = {"id": "1", "finish_reason": finish, "cached_tokens": 0}
            info["prompt_tokens"] = len(body["input_ids"]) + 99 * len(body.get("image_data", ()))
            info["completion_tokens"] = len(tokens[item.index])
            if body.get("return_logprob"):
                info["output_token_logprobs"] = chosen[item.index][sent:]
                info["output_top_logprobs"] = tops[item.index][sent:]
            event = {"text": "", "index": item.index, "output_ids": tokens[item.index][sent:], "meta_info": info}
            if finish is None:
                yield event
            else:
                last.append(event)


def _failure(message: str) -> tuple[int, dict[str, Any]]:
    return 400, {"success": False, "error_message": message, "loaded_adapters": {}}
