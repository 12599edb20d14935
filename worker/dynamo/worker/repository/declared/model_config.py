"""Model configurations: read from `config.pbtxt` or JSON, checked, and passed to models as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

from google.protobuf import json_format, text_format
from google.protobuf.message import Message

from dynamo.common.errors import InvalidRequest
from dynamo.common.tensors.message_json import to_json
from dynamo.common.tensors.tensors import Array, datatype_of_config
from dynamo.protos.model_config_pb2 import (
    ModelConfig,
    ModelInput,
    ModelInstanceGroup,
    ModelOutput,
    ModelRateLimiter,
)
from dynamo.worker.engine.batching_settings import fill_batching_defaults
from dynamo.worker.repository.declared.sequence_batching import check_added_inputs, fill_sequence_defaults

CONFIG_FILE = "config.pbtxt"
MAX_INSTANCES = 256
_IMAGE_DIMS = 3
_GPU_DEVICE = Path("/dev/nvidia0")

Field: TypeAlias = Any
"""A FieldDescriptor of whichever implementation protobuf runs on; the stubs do not agree on one."""

_PLATFORMS = {
    "onnxruntime_onnx": "onnxruntime",
    "pytorch_libtorch": "pytorch",
    "tensorrt_plan": "tensorrt",
    "ensemble": "ensemble",
}
_BACKENDS = {backend: platform for platform, backend in _PLATFORMS.items()}
_FILES = {
    "onnxruntime": "model.onnx",
    "python": "model.py",
    "pytorch": "model.pt",
    "openvino": "model.xml",
    "tensorrt": "model.plan",
}
_BY_FILE = {file: backend for backend, file in _FILES.items()} | {"model.pt2": "pytorch"}


def read_config(path: Path) -> ModelConfig:
    """Read a `config.pbtxt`. Raises InvalidRequest naming the file."""
    try:
        return _checked(text_format.Parse(path.read_text(encoding="utf-8"), ModelConfig()))
    except (OSError, ValueError, text_format.ParseError) as error:  # the parser raises ValueError for a number out of range
        raise InvalidRequest(f"{path.name} is not usable: {error}") from error


def config_from_json(text: str) -> ModelConfig:
    """Parse a configuration in JSON. Raises InvalidRequest."""
    try:
        return _checked(json_format.Parse(text, ModelConfig()))
    except (ValueError, json_format.ParseError) as error:
        raise InvalidRequest(f"the configuration is not usable: {error}") from error
    except RecursionError as error:
        raise InvalidRequest("the configuration is nested too deeply") from error


def _checked(config: ModelConfig) -> ModelConfig:
    """Return the configuration. Raises ValueError for a number that is no constant of its enum: protobuf reads any there is."""
    for declared, constant in _constants(config):
        if constant not in declared.enum_type.values_by_number:
            raise ValueError(f"{declared.name} is {constant}, which is no {declared.enum_type.name}")
    return config


def _constants(message: Message) -> Iterator[tuple[Field, int]]:
    """Yield the values of all fields of enums that are set, also those of parts of the message."""
    declared: Field
    for declared, value in message.ListFields():
        of_map = declared.message_type is not None and declared.message_type.GetOptions().map_entry
        for element in value.values() if of_map else value if declared.is_repeated else [value]:
            if isinstance(element, Message):
                yield from _constants(element)
            elif declared.enum_type is not None:
                yield declared, element


def config_to_json(config: ModelConfig) -> str:
    """Return the configuration as JSON with every field that is not part of a `oneof` and plain numbers, as models expect."""
    return json.dumps(to_json(config), separators=(",", ":"))


def settle_backend(config: ModelConfig, version_folder: Path | None) -> None:
    """Fill in `backend` and `platform`, from each other or from the model's file. Raises InvalidRequest."""
    if config.HasField("ensemble_scheduling") and not config.backend and not config.platform:
        config.platform = "ensemble"
    if not config.backend:
        config.backend = _PLATFORMS.get(config.platform, "")
    if not config.backend and config.platform:
        raise InvalidRequest(f"the platform '{config.platform}' is not supported: {', '.join(_PLATFORMS)} are")
    if not config.backend and version_folder is not None:
        config.backend = next((backend for file, backend in _BY_FILE.items() if (version_folder / file).exists()), "")
    if not config.backend:
        raise InvalidRequest(
            f"the model's backend is unknown: there is neither a {CONFIG_FILE} that names one, nor {' or '.join(_BY_FILE)}"
        )
    if not config.platform:
        config.platform = _BACKENDS.get(config.backend, "")


def fill_defaults(config: ModelConfig) -> None:
    """Set what the configuration leaves out to what is in effect, as Triton does: clients and models get to see it."""
    if config.version_policy.WhichOneof("policy_choice") is None:
        config.version_policy.latest.num_versions = 1
    if config.HasField("ensemble_scheduling"):
        config.backend = ""
        config.model_transaction_policy.decoupled = config.model_transaction_policy.decoupled
        return
    config.default_model_filename = config.default_model_filename or _FILES.get(config.backend, "")
    optimization = config.optimization
    for memory in ("input_pinned_memory", "output_pinned_memory"):
        if not optimization.HasField(memory):
            getattr(optimization, memory).enable = True
    if not config.instance_group:
        config.instance_group.add(name=config.name)
    for number, group in enumerate(config.instance_group):
        group.name = group.name or f"{config.name}_{number}"
        group.count = max(1, group.count)
        group.kind = ModelInstanceGroup.Kind.Value(f"KIND_{_kind(group)}")
    fill_sequence_defaults(config)
    fill_batching_defaults(config)


def check_supported(config: ModelConfig) -> None:
    """Raises InvalidRequest for settings that would change results and are not supported."""
    if config.HasField("sequence_batching"):
        check_added_inputs(config)
    tensors: list[ModelInput | ModelOutput] = [*config.input, *config.output]
    for tensor in tensors:
        if tensor.is_shape_tensor:
            raise InvalidRequest(f"tensor '{tensor.name}' is a shape tensor: not supported")
    if config.max_batch_size < 0:
        raise InvalidRequest(f"max_batch_size is {config.max_batch_size}")
    if any(islice(instances_of(config), MAX_INSTANCES, None)):
        raise InvalidRequest(f"more than {MAX_INSTANCES} instances are declared")


def check_tensors(config: ModelConfig) -> None:
    """Raises InvalidRequest, in Triton's words, for tensors that are still incomplete when the model has completed them."""
    tensors: list[tuple[str, ModelInput | ModelOutput]] = [("input", tensor) for tensor in config.input]
    tensors += [("output", tensor) for tensor in config.output]
    for image in config.input:
        if image.format and len(image.dims) != _IMAGE_DIMS:
            raise InvalidRequest(f"model input '{image.name}' NHWC/NCHW require 3 dims for {config.name}, got {len(image.dims)}")
    for kind, tensor in tensors:
        where = f"model {kind} '{tensor.name}'"
        if not tensor.data_type:
            raise InvalidRequest(f"{where} must specify 'data_type' for {config.name}")
        if not tensor.dims and config.backend == "python":
            raise InvalidRequest(f"{where} must specify 'dims' for {config.name}")
        if any(size < -1 or size == 0 for size in tensor.dims):
            raise InvalidRequest(
                f"{where} dimension must be integer >= 1, or -1 to indicate a variable-size dimension for {config.name}"
            )
        if tensor.HasField("reshape"):
            _check_reshape(where, config.name, tensor.dims, tensor.reshape.shape)


def _check_reshape(where: str, model: str, dims: Sequence[int], shape: Sequence[int]) -> None:
    """Raises InvalidRequest unless `shape` has the elements of `dims`, also between dimensions of variable size."""
    if any(size < -1 or size == 0 for size in shape):
        raise InvalidRequest(
            f"{where} reshape dimensions must be integer >= 1, or -1 to indicate a variable-size dimension for {model}"
        )
    counts, reshaped = _counts_between_variable(dims), _counts_between_variable(shape)
    if len(counts) != len(reshaped) and min(len(counts), len(reshaped)) > 1:
        raise InvalidRequest(f"{where} has different number of variable-size dimensions for dims and reshape for {model}")
    if counts != reshaped:
        raise InvalidRequest(f"{where} has different size for dims and reshape for {model}")


def _counts_between_variable(dims: Sequence[int]) -> list[int]:
    """Return the elements of the parts into which dimensions of variable size cut a shape."""
    counts = [1]
    for size in dims:
        if size == -1:
            counts.append(1)
        else:
            counts[-1] *= size
    return counts


def ignored_settings(config: ModelConfig, *, has_cache: bool, has_rate_limiter: bool) -> list[str]:
    """Return the settings of a configuration that are not supported and without which results are the same."""
    settings = {
        "response_cache": config.response_cache.enable and not has_cache,
        "cc_model_filenames": bool(config.cc_model_filenames),
        "rate_limiter": not has_rate_limiter and any(group.HasField("rate_limiter") for group in config.instance_group),
    }
    return [name for name, is_set in settings.items() if is_set]


@dataclass(frozen=True, slots=True)
class ModelInstance:
    """One of the instances of a model that run side by side."""

    name: str
    kind: str
    """`CPU`, `GPU` or `MODEL`."""
    device: int = 0
    rate_limiter: ModelRateLimiter = field(default_factory=ModelRateLimiter)


def instances_of(config: ModelConfig) -> Iterator[ModelInstance]:
    """Yield the instances of a configuration, at least one."""
    groups = [group for group in config.instance_group if not group.passive] or [ModelInstanceGroup()]
    for number, group in enumerate(groups):
        kind = _kind(group)
        devices = list(group.gpus) or [0]
        for device in devices if kind == "GPU" else [0]:
            for index in range(max(1, group.count)):
                name = f"{group.name or f'{config.name}_{number}'}_{index}"
                yield ModelInstance(name, kind, device, group.rate_limiter)


def _kind(group: ModelInstanceGroup) -> str:
    if group.kind == ModelInstanceGroup.KIND_AUTO:
        return "GPU" if _GPU_DEVICE.exists() else "CPU"
    return ModelInstanceGroup.Kind.Name(group.kind).removeprefix("KIND_")


class Reshape:
    """Converts between the shapes that clients see and those that the model sees."""

    def __init__(self, config: ModelConfig) -> None:
        self._batch = 1 if config.max_batch_size else 0
        self._inputs = {t.name: tuple(t.reshape.shape) for t in config.input if t.HasField("reshape")}
        self._outputs = {t.name: tuple(t.dims) for t in config.output if t.HasField("reshape")}

    @property
    def has_inputs(self) -> bool:
        """Whether any input is reshaped."""
        return bool(self._inputs)

    @property
    def has_outputs(self) -> bool:
        """Whether any output is reshaped."""
        return bool(self._outputs)

    def input(self, name: str, array: Array) -> Array:
        """Return an input in the model's shape. Raises InvalidRequest if the elements do not fit."""
        shape = self._inputs.get(name)
        return array if shape is None else self._reshaped(name, array, shape)

    def output(self, name: str, array: Array) -> Array:
        shape = self._outputs.get(name)
        return array if shape is None else self._reshaped(name, array, shape)

    def _reshaped(self, name: str, array: Array, shape: tuple[int, ...]) -> Array:
        try:
            return array.reshape((*array.shape[: self._batch], *shape))
        except ValueError:
            raise InvalidRequest(f"tensor '{name}' of shape {list(array.shape)} cannot be reshaped to {list(shape)}") from None


def model_dims(tensor: ModelInput | ModelOutput) -> tuple[int, ...]:
    """Return the shape that the model sees, without the batch dimension."""
    return tuple(tensor.reshape.shape if tensor.HasField("reshape") else tensor.dims)


def datatype_name(tensor: ModelInput | ModelOutput) -> str:
    """Return the KServe datatype of a tensor. Raises InvalidRequest if it has none."""
    datatype = datatype_of_config(tensor.data_type)
    if datatype is None:
        raise InvalidRequest(f"tensor '{tensor.name}' has no data_type")
    return datatype.name
