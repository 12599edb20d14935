"""What a tensor model takes and gives, in any of the forms people write it in, as one `Declaration`.

| form | shapes |
|---|---|
| plain Python: attributes of a class, or a `Declaration` | with the batch dimension, as the arrays have them |
| YAML | the same, and the same names |
| Triton's `config.pbtxt`, or a `ModelConfig` message | Triton's: without the batch dimension when `max_batch_size` is above 0 |

A ModelConfig is kept whole, since it is the response to ModelConfig requests.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import msgspec
import yaml
from google.protobuf import text_format

from dynamo.common.errors import InvalidRequest
from dynamo.common.model_card import ModelCard, ModelKind, TensorSpec
from dynamo.common.tensors.tensors import datatype_named, datatype_of_config
from dynamo.protos.model_config_pb2 import ModelConfig, ModelInput, ModelOutput
from dynamo.worker.engine.batching_settings import Batching
from dynamo.worker.engine.request_queue import DEFAULT_QUEUE_SIZE
from dynamo.worker.paths import relative_path

YAML_SUFFIXES = (".yaml", ".yml")
PBTXT_SUFFIX = ".pbtxt"
_METRIC_TAG = re.compile("[A-Za-z0-9][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True)
class Tensor:
    """An input or output. `shape` includes the batch dimension if the model batches; -1 is any size."""

    datatype: str
    """BOOL, UINT8…UINT64, INT8…INT64, FP16, BF16, FP32, FP64 or BYTES."""
    shape: Sequence[int]
    optional: bool = False
    labels: Sequence[str] = ()
    """Class names of an output, for the classification extension."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """What a tensor model takes and returns."""

    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]
    name: str = ""
    max_batch_size: int = 0
    """0: the model does not batch, and its shapes have no batch dimension."""
    decoupled: bool = False
    """True: a request may get none, one or several responses."""
    versions: Sequence[str] = ("1",)
    """Oldest first."""
    batching: Batching | None = None
    concurrency: int | None = None
    """Calls at once; None: one for plain functions, any number for `async` ones."""
    platform: str = "dynamo"
    backend: str = "dynamo"
    model_config: bytes = b""
    """A serialized ModelConfig, if it was declared by one."""

    def to_card(self, name: str, *, needs_outputs: bool = True) -> ModelCard:
        """Return a model card. Raises InvalidRequest, naming the tensor, if the declaration contradicts itself, or declares no
        outputs where it needs some.
        """
        if self.max_batch_size < 0:
            raise InvalidRequest(f"model '{name}' declares the max_batch_size {self.max_batch_size}")
        if self.batching is not None and not self.max_batch_size:
            raise InvalidRequest(f"model '{name}' declares dynamic batching but no max_batch_size")
        if self.batching is not None and self.decoupled:
            raise InvalidRequest(f"model '{name}' cannot be decoupled and batch dynamically")
        if needs_outputs and not self.outputs:
            raise InvalidRequest(f"model '{name}' declares no outputs")
        return ModelCard(
            name=name,
            kind=ModelKind.TENSOR,
            versions=tuple(str(version) for version in self.versions),
            platform=self.platform,
            backend=self.backend,
            inputs=tuple(self._spec("input", key, tensor) for key, tensor in self.inputs.items()),
            outputs=tuple(self._spec("output", key, tensor) for key, tensor in self.outputs.items()),
            max_batch_size=self.max_batch_size,
            decoupled=self.decoupled,
            model_config=self._model_config(name),
        ).check()

    def _model_config(self, name: str) -> bytes:
        if not self.model_config or name == self.name:
            return self.model_config
        config = ModelConfig.FromString(self.model_config)
        config.name = name
        return config.SerializeToString(deterministic=True)

    def _spec(self, what: str, name: str, tensor: Tensor) -> TensorSpec:
        datatype_named(tensor.datatype, f"{what} '{name}'")
        shape = tuple(tensor.shape)
        if any(size < -1 for size in shape):
            raise InvalidRequest(f"{what} '{name}' has shape {list(shape)}; sizes are at least 0, or -1 for any")
        if self.max_batch_size and (not shape or shape[0] != -1):
            raise InvalidRequest(
                f"{what} '{name}' has shape {list(shape)}; with a max_batch_size it must begin with -1, the batch"
            )
        return TensorSpec(name=name, datatype=tensor.datatype, shape=shape, optional=tensor.optional, labels=tuple(tensor.labels))


def read_declaration(path: Path) -> Declaration:
    """Read a YAML or `config.pbtxt` file. Raises InvalidRequest, naming the file, if it cannot be read or parsed."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the declaration {path} cannot be read: {error}") from error
    try:
        if path.suffix == PBTXT_SUFFIX:
            return from_model_config(text_format.Parse(text, ModelConfig()), path.parent)
        if path.suffix in YAML_SUFFIXES:
            return from_yaml(text)
    except (text_format.ParseError, InvalidRequest) as error:
        raise InvalidRequest(f"the declaration {path} is not usable: {error}") from error
    raise InvalidRequest(f"the declaration {path} must end in .yaml, .yml or .pbtxt")


class _YamlTensor(msgspec.Struct, forbid_unknown_fields=True):
    datatype: str
    shape: list[int]
    optional: bool = False
    labels: list[str] = []
    name: str = ""


class _YamlBatching(msgspec.Struct, forbid_unknown_fields=True):
    preferred_batch_size: tuple[int, ...] = ()
    max_queue_delay_us: Annotated[int, msgspec.Meta(ge=0)] = 0
    max_queue_size: Annotated[int, msgspec.Meta(ge=1)] = DEFAULT_QUEUE_SIZE


class _Yaml(msgspec.Struct, forbid_unknown_fields=True):
    inputs: dict[str, _YamlTensor] | list[_YamlTensor]
    outputs: dict[str, _YamlTensor] | list[_YamlTensor]
    name: str = ""
    type: str = "TensorBased"
    max_batch_size: Annotated[int, msgspec.Meta(ge=0)] = 0
    decoupled: bool = False
    versions: tuple[str | int, ...] = ("1",)
    batching: _YamlBatching | None = None
    concurrency: Annotated[int, msgspec.Meta(ge=1)] | None = None


def from_yaml(text: str) -> Declaration:
    """Parse YAML whose keys are the fields of `Declaration`; tensors are a mapping by name or a list with `name` in each."""
    try:
        parsed = msgspec.convert(yaml.safe_load(text), _Yaml)
    except (yaml.YAMLError, msgspec.ValidationError) as error:
        raise InvalidRequest(" ".join(str(error).split())) from error
    batching = parsed.batching
    return Declaration(
        name=parsed.name,
        inputs=_yaml_tensors(parsed.inputs),
        outputs=_yaml_tensors(parsed.outputs),
        max_batch_size=parsed.max_batch_size,
        decoupled=parsed.decoupled,
        versions=tuple(str(version) for version in parsed.versions),
        concurrency=parsed.concurrency,
        batching=None if batching is None else Batching(**msgspec.structs.asdict(batching)),
    )


def _yaml_tensors(given: Mapping[str, _YamlTensor] | Sequence[_YamlTensor]) -> dict[str, Tensor]:
    named = list(given.items()) if isinstance(given, Mapping) else [(tensor.name, tensor) for tensor in given]
    tensors: dict[str, Tensor] = {}
    for name, tensor in named:
        if not name or name in tensors:
            raise InvalidRequest(f"two tensors are called '{name}'" if name else "a tensor has no name")
        tensors[name] = Tensor(tensor.datatype, tuple(tensor.shape), tensor.optional, tuple(tensor.labels))
    return tensors


def from_model_config(config: ModelConfig, folder: Path | None = None) -> Declaration:
    """From Triton's ModelConfig. Label files are looked for in `folder`.

    Raises InvalidRequest for label files outside of `folder`, and for what would change the meaning of tensors and is not
    supported: reshape, ragged batches, shape tensors, sequence batching and ensembles. Raises it for wrong metric tags, too.
    """
    check_metric_tags(config)
    choice = config.WhichOneof("scheduling_choice")
    if choice in ("sequence_batching", "ensemble_scheduling"):
        raise InvalidRequest(f"{choice} is not supported by this engine")
    batch = (-1,) if config.max_batch_size else ()
    counts = [group.count or 1 for group in config.instance_group if not group.passive]
    return Declaration(
        name=config.name,
        inputs={item.name: _config_tensor(item, batch) for item in config.input},
        outputs={item.name: replace(_config_tensor(item, batch), labels=_labels(item, folder)) for item in config.output},
        max_batch_size=config.max_batch_size,
        decoupled=config.model_transaction_policy.decoupled,
        versions=tuple(str(version) for version in sorted(config.version_policy.specific.versions)) or ("1",),
        batching=Batching.read(config.dynamic_batching) if choice == "dynamic_batching" else None,
        concurrency=sum(counts) or None,
        platform=config.platform or "dynamo",
        backend=config.backend or "dynamo",
        model_config=config.SerializeToString(deterministic=True),
    )


def check_metric_tags(config: ModelConfig) -> None:
    """Raises InvalidRequest for a key that cannot be, behind `_`, the name of a label."""
    for tag in sorted(config.metric_tags):
        if not _METRIC_TAG.fullmatch(tag):
            raise InvalidRequest(
                f"metric_tags must have keys of letters, digits and '_', which is not their first character, got '{tag[:100]}'"
            )


def _config_tensor(item: ModelInput | ModelOutput, batch: tuple[int, ...]) -> Tensor:
    if item.HasField("reshape") or item.is_shape_tensor or (isinstance(item, ModelInput) and item.allow_ragged_batch):
        raise InvalidRequest(f"tensor '{item.name}' uses reshape, shape tensors or ragged batches: not supported")
    datatype = datatype_of_config(item.data_type)
    if datatype is None:
        raise InvalidRequest(f"tensor '{item.name}' has no data_type")
    return Tensor(
        datatype=datatype.name,
        shape=(*batch, *item.dims),
        optional=isinstance(item, ModelInput) and item.optional,
    )


def _labels(item: ModelOutput, folder: Path | None) -> tuple[str, ...]:
    if not item.label_filename or folder is None:
        return ()
    path = folder / relative_path(item.label_filename)
    try:
        return tuple(path.read_text(encoding="utf-8").splitlines())
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the label file of output '{item.name}' cannot be read: {error}") from error
