"""KServe messages about the server and its models, made from model cards."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from google.protobuf.message import Message

from dynamo.common.errors import EngineError, InvalidRequest, ModelNotFound, NoInstances
from dynamo.common.model_card import ModelCard, ModelKind, TensorSpec
from dynamo.common.process.work import Work
from dynamo.common.repository import IndexEntry, ModelState
from dynamo.common.tensors.message_limits import MessageLimits, parse_message
from dynamo.common.tensors.tensors import DATATYPES, datatype_of_config
from dynamo.frontend.api.kserve.words import check_version
from dynamo.frontend.security.accounts import Account
from dynamo.frontend.serving.data_plane import DataPlane
from dynamo.protos.inference_pb2 import (
    ModelConfigResponse,
    ModelMetadataResponse,
    ModelStatisticsResponse,
    RepositoryIndexResponse,
    ServerMetadataResponse,
)
from dynamo.protos.model_config_pb2 import ModelConfig, ModelInput, ModelOutput

EXTENSIONS = (
    "classification",
    "model_repository",
    "model_repository(unload_dependents)",
    "model_configuration",
    "system_shared_memory",
    "binary_tensor_data",
    "parameters",
    "statistics",
    "trace",
    "logging",
)
"""Supported protocol extensions, by their published names."""

_NO_INSTANCE = "no instance is attached"
_QUICK_BYTES = 2048
"""A longer description takes a thread: a tensor without any property has two bytes in it."""
_QUICK_TENSORS = 64
_CONFIG_LIMITS = MessageLimits(max_message_fields=32_768)

TEXT_INPUTS = (
    TensorSpec(name="text_input", datatype="BYTES", shape=(1,)),
    TensorSpec(name="streaming", datatype="BOOL", shape=(1,), optional=True),
)
TEXT_OUTPUTS = (
    TensorSpec(name="text_output", datatype="BYTES", shape=(-1,)),
    TensorSpec(name="finish_reason", datatype="BYTES", shape=(-1,)),
)
"""The tensors of a language model as KServe clients see them. Further inputs, all optional, are in docs/clients.md."""


@cache
def server_version() -> str:
    """Return the version of the installed distribution; `unknown` if the project runs from its sources."""
    try:
        return version("dynamo-serving")
    except PackageNotFoundError:
        return "unknown"


def is_long(card: ModelCard) -> bool:
    """Return whether `model_metadata` and `model_config` may take more than a millisecond: workers say what is in a card."""
    return len(card.model_config) > _QUICK_BYTES or len(card.inputs) + len(card.outputs) + len(card.labels) > _QUICK_TENSORS


def is_long_json(message: Message) -> bool:
    """Return whether to write a message as JSON may take more than some milliseconds."""
    return message.ByteSize() > _QUICK_BYTES


def server_metadata(name: str) -> ServerMetadataResponse:
    return ServerMetadataResponse(name=name, version=server_version(), extensions=EXTENSIONS)


def model_metadata(card: ModelCard, version: str = "") -> ModelMetadataResponse:
    """Return the metadata of a model, or of one version of it.

    A ModelConfig in the card takes precedence. Shapes of models that batch start with -1.
    """
    config = _own_config(card)
    if config is None:
        platform, inputs, outputs = card.platform, *_tensors(card)
    else:
        batch = (-1,) if config.max_batch_size > 0 else ()
        platform = config.platform or config.backend or card.platform
        inputs = tuple(_spec(tensor, batch) for tensor in config.input)
        outputs = tuple(_spec(tensor, batch) for tensor in config.output)
    return ModelMetadataResponse(
        name=card.name if config is None else config.name or card.name,
        versions=(version,) if version else card.versions,
        platform=platform,
        inputs=map(_tensor_metadata, inputs),
        outputs=map(_tensor_metadata, outputs),
        properties=card.labels,
    )


def model_config(card: ModelCard) -> ModelConfigResponse:
    """Return the ModelConfig that the worker registered, or one made from the card."""
    return ModelConfigResponse(config=_own_config(card) or _made_config(card))


async def statistics(plane: DataPlane, account: Account, model: str, version: str) -> ModelStatisticsResponse:
    """Return the statistics of a model or of all. Raises InvalidRequest, as Triton, for a model or version that is not there."""
    try:
        return await plane.statistics(account, model, check_version(version))
    except ModelNotFound as error:
        if error.version:
            raise InvalidRequest(f"requested model version is not available for model '{model[:400]}'") from error
        raise InvalidRequest(f"requested model '{model[:400]}' is not available") from error
    except NoInstances as error:
        raise InvalidRequest(f"requested model '{model[:400]}' is not available") from error


def index_of(
    plane: DataPlane, is_ready: Callable[[str, str], bool], account: Account, *, only_ready: bool
) -> Work[list[RepositoryIndexResponse.ModelIndex]]:
    """Return the entries of all models that the caller may use, or of those that are ready."""
    held = yield from plane.repository_index(account)
    return (yield from repository_index(plane.cards(account), is_ready, held, only_ready=only_ready))


def repository_index(
    cards: Iterable[ModelCard],
    is_ready: Callable[[str, str], bool],
    entries: Iterable[IndexEntry] = (),
    *,
    only_ready: bool = False,
) -> Work[list[RepositoryIndexResponse.ModelIndex]]:
    """Return one entry per model and version. `is_ready` takes these two; `entries` are those of the workers' repositories.

    A model is ready if this server can serve it; the reasons why one is not, or not on all workers, are the repositories'.
    """
    by_version: dict[tuple[str, str], IndexEntry] = {}
    for entry in entries:
        yield 0
        if entry.state is ModelState.READY and not is_ready(entry.name, entry.version):
            entry = IndexEntry(name=entry.name, version=entry.version, reason=entry.reason or _NO_INSTANCE)
        by_version[entry.name, entry.version] = entry
    for card in cards:
        for number in card.versions:
            yield 0
            current = by_version.get((card.name, number)) or IndexEntry(name=card.name, version=number, reason=_NO_INSTANCE)
            if is_ready(card.name, number):
                reason = "" if current.reason == _NO_INSTANCE else current.reason
                current = IndexEntry(name=card.name, version=number, state=ModelState.READY, reason=reason)
            by_version[card.name, number] = current
    index = []
    for entry in by_version.values():
        yield 0
        if entry.state is ModelState.READY or not only_ready:
            described = RepositoryIndexResponse.ModelIndex(name=entry.name, version=entry.version, state=entry.state.value)
            described.reason = entry.reason
            index.append(described)
    return index


def _own_config(card: ModelCard) -> ModelConfig | None:
    """Return the ModelConfig inside the card, if there is one. Raises EngineError if it is invalid."""
    if not card.model_config:
        return None
    try:
        return parse_message(ModelConfig, card.model_config, _CONFIG_LIMITS)
    except InvalidRequest as error:
        raise EngineError(f"model '{card.name}' registered a model configuration that cannot be read") from error


def _made_config(card: ModelCard) -> ModelConfig:
    inputs, outputs = _tensors(card)
    batch_dims = 1 if card.max_batch_size > 0 else 0
    config = ModelConfig(name=card.name, platform=card.platform, backend=card.backend, max_batch_size=card.max_batch_size)
    for spec in inputs:
        config.input.add(
            name=spec.name,
            data_type=_config_type(spec),
            dims=spec.shape[batch_dims:],
            optional=spec.optional,
        )
    for spec in outputs:
        config.output.add(name=spec.name, data_type=_config_type(spec), dims=spec.shape[batch_dims:])
    if card.decoupled:
        config.model_transaction_policy.decoupled = True
    return config


def _tensors(card: ModelCard) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    if card.kind is ModelKind.LLM and not card.inputs:
        return TEXT_INPUTS, TEXT_OUTPUTS
    return card.inputs, card.outputs


def _tensor_metadata(spec: TensorSpec) -> ModelMetadataResponse.TensorMetadata:
    return ModelMetadataResponse.TensorMetadata(name=spec.name, datatype=spec.datatype, shape=spec.shape)


def _spec(tensor: ModelInput | ModelOutput, batch: tuple[int, ...]) -> TensorSpec:
    datatype = datatype_of_config(tensor.data_type)
    return TensorSpec(name=tensor.name, datatype="INVALID" if datatype is None else datatype.name, shape=(*batch, *tensor.dims))


def _config_type(spec: TensorSpec) -> int:
    return DATATYPES[spec.datatype].config_type
