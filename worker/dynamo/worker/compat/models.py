"""What a worker says about a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any


class ModelInput(Enum):
    """What the handler of a model gets."""

    Text = "text"
    Tokens = "tokens"
    Tensor = "tensor"


@dataclass(frozen=True, slots=True)
class RegisteredModel:
    """A model as `register_model` describes it."""

    input: ModelInput
    name: str
    path: str
    context_length: int | None = None
    tool_parser: str = ""
    reasoning_parser: str = ""
    tensors: Mapping[str, Any] | None = None
    aliases: tuple[str, ...] = ()
