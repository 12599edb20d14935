"""Models of OpenVINO (`model.xml` with `model.bin`) on CPUs, by the optional package `openvino`."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from dynamo.common.errors import DynamoError, InvalidRequest
from dynamo.common.tensors.tensors import Array
from dynamo.protos.model_config_pb2 import ModelConfig
from dynamo.worker.paths import relative_path
from dynamo.worker.repository.declared.execution import Arrays, Version
from dynamo.worker.repository.declared.model_config import model_dims
from dynamo.worker.repository.sessions.session import SessionTensor, Signature, first_line, model_file, number_parameter

DEFAULT_FILE = "model.xml"
_DATATYPES = {
    "boolean": "BOOL",
    "u8": "UINT8",
    "u16": "UINT16",
    "u32": "UINT32",
    "u64": "UINT64",
    "i8": "INT8",
    "i16": "INT16",
    "i32": "INT32",
    "i64": "INT64",
    "f16": "FP16",
    "f32": "FP32",
    "f64": "FP64",
}
_NUMBERS = ("INFERENCE_NUM_THREADS", "COMPILATION_NUM_THREADS", "PERFORMANCE_HINT_NUM_REQUESTS")


class OpenVinoSession:
    def __init__(self, compiled: Any, config: ModelConfig) -> None:
        self.signature = Signature(
            [_to_tensor(port, config) for port in compiled.inputs], [_to_tensor(port, config) for port in compiled.outputs]
        )
        self._compiled = compiled
        self._requests = threading.local()
        """Each thread has an inference request of its own: one computes one batch at a time."""

    def run(self, outputs: Sequence[str], inputs: Arrays) -> Sequence[Array]:
        if not hasattr(self._requests, "own"):
            self._requests.own = self._compiled.create_infer_request()
        results = self._requests.own.infer({name: np.require(array, requirements=("C", "A")) for name, array in inputs.items()})
        return [results[name] for name in outputs]


def open_openvino(version: Version) -> OpenVinoSession:
    """Load a model. Raises InvalidRequest with the reason if that fails."""
    file = model_file(version, DEFAULT_FILE)
    try:
        import openvino
    except ModuleNotFoundError:
        raise InvalidRequest("OpenVINO models need the package openvino: install dynamo-serving[openvino]") from None
    config = version.config
    try:
        core = openvino.Core()
        if extension := _text(config, "CPU_EXTENSION_PATH"):
            core.add_extension(str(version.folder / relative_path(extension)))
        model = core.read_model(str(file))
        _reshape(model, config)
        return OpenVinoSession(core.compile_model(model, _text(config, "TARGET_DEVICE") or "CPU", _properties(config)), config)
    except DynamoError:
        raise
    except Exception as error:
        raise InvalidRequest(f"OpenVINO cannot load {version.version}/{file.name}: {first_line(error)}") from error


def _properties(config: ModelConfig) -> dict[str, Any]:
    properties: dict[str, Any] = {}
    for name in _NUMBERS:
        number = number_parameter(config, name)
        if number is not None:
            properties[name] = number
    for name in ("NUM_STREAMS", "PERFORMANCE_HINT"):
        if text := _text(config, name):
            properties[name] = text
    return properties


def _reshape(model: Any, config: ModelConfig) -> None:
    """Give a model with a fixed batch size one of any size, and with RESHAPE_IO_LAYERS the shapes of the configuration."""
    shapes: dict[str, list[int]] = {}
    declared = {tensor.name: list(model_dims(tensor)) for tensor in config.input}
    for port in model.inputs:
        tensor = _to_tensor(port, config)
        dims = list(tensor.dims)
        if config.max_batch_size and dims and _text(config, "SKIP_OV_DYNAMIC_BATCHSIZE") != "YES":
            dims[0] = -1
        if tensor.name in declared and _text(config, "RESHAPE_IO_LAYERS") == "YES":
            dims = [*dims[: 1 if config.max_batch_size else 0], *declared[tensor.name]]
        if dims != list(tensor.dims):
            shapes[tensor.name] = dims
    if shapes:
        model.reshape(shapes)


def _text(config: ModelConfig, name: str) -> str:
    return config.parameters[name].string_value if name in config.parameters else ""


def _to_tensor(port: Any, config: ModelConfig) -> SessionTensor:
    """Return what a port is, under the one of its names that the configuration has."""
    declared = {tensor.name for tensor in config.input} | {tensor.name for tensor in config.output}
    names = sorted(port.get_names()) or [port.get_node().get_friendly_name()]
    kind = port.get_element_type().get_type_name()
    shape = port.get_partial_shape()
    dims = () if shape.rank.is_dynamic else tuple(-1 if size.is_dynamic else size.get_length() for size in shape)
    return SessionTensor(next((name for name in names if name in declared), names[0]), kind, _DATATYPES.get(kind), dims)
