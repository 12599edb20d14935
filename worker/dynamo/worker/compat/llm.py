"""Stands in for `dynamo.llm`: how a worker describes its model."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from enum import Enum, Flag, auto
from typing import Any

from dynamo.worker.compat.models import ModelInput, RegisteredModel
from dynamo.worker.compat.runtime import Endpoint

__all__ = ["ModelInput", "ModelRuntimeConfig", "ModelType", "WorkerType", "register_llm", "register_model"]

log = logging.getLogger(__name__)


class ModelType(Flag):
    """The kinds of requests. Here all language models take chat, completions, responses, messages and KServe.

    Embedding and Prefill are refused.
    """

    Chat = auto()
    Completions = auto()
    Embedding = auto()
    TensorBased = auto()
    Prefill = auto()


class WorkerType(Enum):
    Aggregated = "aggregated"
    Prefill = "prefill"
    Decode = "decode"
    Encode = "encode"


@dataclass
class ModelRuntimeConfig:
    """Settings of an engine. Only the configuration of tensors and the parsers have an effect here."""

    total_kv_blocks: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    tensor_model_config: dict[str, Any] | None = None
    engine_specific: dict[str, Any] = field(default_factory=dict)

    def set_tensor_model_config(self, config: dict[str, Any]) -> None:
        self.tensor_model_config = config

    def set_engine_specific(self, name: str, value: Any) -> None:
        self.engine_specific[name] = value


async def register_model(
    model_input: ModelInput,
    model_type: ModelType,
    endpoint: Endpoint,
    model_path: str,
    model_name: str | None = None,
    *,
    context_length: int | None = None,
    runtime_config: ModelRuntimeConfig | None = None,
    tensor_model_config: dict[str, Any] | None = None,
    worker_type: WorkerType = WorkerType.Aggregated,
    model_aliases: list[str] | None = None,
    **others: Any,
) -> None:
    """Describe the model that `endpoint` serves. It is registered when the endpoint serves."""
    if worker_type is not WorkerType.Aggregated:
        raise NotImplementedError(f"workers of type {worker_type.name} are not supported")
    if refused := [kind.name for kind in (ModelType.Embedding, ModelType.Prefill) if kind in model_type]:
        raise NotImplementedError(
            f"models of type {', '.join(map(str, refused))} are not supported: handlers generate or map tensors"
        )
    if ignored := sorted(name for name, value in others.items() if value is not None):
        log.warning("register_model: %s have no effect here", ", ".join(ignored))
    settings = runtime_config or ModelRuntimeConfig()
    endpoint.models.append(
        RegisteredModel(
            input=model_input,
            name=model_name or model_path,
            path=model_path,
            context_length=context_length,
            tool_parser=settings.tool_call_parser or "",
            reasoning_parser=settings.reasoning_parser or "",
            tensors=tensor_model_config or settings.tensor_model_config,
            aliases=tuple(model_aliases or ()),
        )
    )


register_llm = register_model
"""The name that it had before."""
