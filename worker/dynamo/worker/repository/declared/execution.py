"""What a backend is, and what a request looks like to it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias, runtime_checkable

import msgspec

from dynamo.common.errors import DynamoError
from dynamo.common.tensors.tensors import Array
from dynamo.protos.inference_pb2 import InferParameter
from dynamo.protos.model_config_pb2 import ModelConfig
from dynamo.worker.engine.base import Context
from dynamo.worker.engine.batching import Batch, Tensors

Arrays: TypeAlias = Mapping[str, Array]
Parameter: TypeAlias = bool | int | float | str


class ModelRequest(msgspec.Struct, frozen=True):
    """One inference request, decoded once, however many models it passes through."""

    inputs: Arrays
    """BYTES as object arrays of `bytes`, BF16 as float32. With the batch dimension if the model batches."""
    context: Context
    outputs: Sequence[str] = ()
    """The names of the requested outputs; empty: all."""
    parameters: Mapping[str, Parameter] = msgspec.field(default_factory=dict)
    id: str = ""
    """As the client named it."""


class ModelResult(msgspec.Struct, frozen=True):
    outputs: Arrays
    parameters: Mapping[str, Parameter] = msgspec.field(default_factory=dict)
    is_final: bool = True
    """False: more may follow. The end may also come by itself, after the last."""


class Executable(Protocol):
    """One loaded version of a model."""

    async def respond(self, request: ModelRequest) -> ModelResult:
        """Return the response of a model that is not decoupled. Raises DynamoError."""
        ...

    @property
    def waiting(self) -> int:
        """Requests that have not begun. May be read on any thread."""
        ...

    async def close(self) -> None:
        """Free all resources. Called when no request is open."""
        ...


@runtime_checkable
class Streams(Protocol):
    """What an executable of a decoupled model has, too."""

    def stream(self, request: ModelRequest) -> AsyncIterator[ModelResult]:
        """Yield any number of responses. Raises DynamoError."""
        ...


class RunsBatches(Executable, Protocol):
    """A loaded version whose requests may run in batches."""

    @property
    def processes(self) -> Sequence[object]:
        """Processes that run it, and may be waiting for a response of it; empty: threads run it, which call no model."""
        ...

    async def run_batch(self, batch: Batch) -> Tensors | list[Any]:
        """Return the joined outputs; or, as a list, the response to each request, or its error. The model is not decoupled."""
        ...


class SequenceInstance(Protocol):
    """One instance of a model."""

    async def respond_all(self, requests: Sequence[ModelRequest]) -> list[ModelResult | DynamoError]:
        """Run requests as one batch, in this order."""
        ...

    async def close(self) -> None: ...


class ModelRegistry(Protocol):
    """The other models of the same worker, for ensembles and for models that call models."""

    def run(self, model: str, version: str, request: ModelRequest) -> AsyncIterator[ModelResult]:
        """Run a request. Raises ModelNotFound, and InvalidRequest for inputs that the model does not take."""
        ...

    def config(self, model: str, version: str) -> ModelConfig:
        """Return the configuration of a model. Raises ModelNotFound."""
        ...

    async def load(self, model: str, config: str, files: Mapping[str, bytes]) -> None: ...

    async def unload(self, model: str, dependents: bool) -> None: ...


@dataclass(frozen=True, slots=True)
class Version:
    """One version of a model, to be loaded."""

    name: str
    """The model's name."""
    version: str
    config: ModelConfig
    folder: Path
    """The model's folder; the version is a folder inside it."""

    @property
    def path(self) -> Path:
        return self.folder / self.version


class ModelBackend(Protocol):
    """Loads models of one kind."""

    async def complete(self, version: Version) -> ModelConfig:
        """Return the configuration, completed with what the model itself declares of its tensors. Raises DynamoError."""
        ...

    async def open(self, version: Version) -> Executable:
        """Load the version. Raises DynamoError with the reason if that fails."""
        ...


@runtime_checkable
class OpensInstances(ModelBackend, Protocol):
    """What a backend is whose models may have a scheduler."""

    async def open(self, version: Version) -> RunsBatches: ...

    async def open_instances(self, version: Version) -> Sequence[SequenceInstance]:
        """Load the version, and return its instances one by one. Raises DynamoError with the reason if that fails."""
        ...


def to_parameter(value: InferParameter) -> Parameter:
    parameter: Parameter = getattr(value, value.WhichOneof("parameter_choice") or "string_param")
    return parameter


def from_parameter(value: Parameter) -> InferParameter:
    if isinstance(value, bool):
        return InferParameter(bool_param=value)
    if isinstance(value, int):
        return InferParameter(int64_param=value)
    if isinstance(value, float):
        return InferParameter(double_param=value)
    return InferParameter(string_param=value)


@asynccontextmanager
async def closing(responses: AsyncIterator[ModelResult]) -> AsyncIterator[AsyncIterator[ModelResult]]:
    """Close the iterator of a model at the end of the body, so that a request left early is cancelled now."""
    try:
        yield responses
    finally:
        if isinstance(responses, AsyncGenerator):
            await responses.aclose()
