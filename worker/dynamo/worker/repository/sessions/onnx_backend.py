"""ONNX models by ONNX Runtime, the optional package `onnxruntime`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from dynamo.common.errors import DynamoError, InvalidRequest
from dynamo.common.tensors.tensors import Array
from dynamo.protos.model_config_pb2 import ModelConfig
from dynamo.worker.paths import relative_path
from dynamo.worker.repository.declared.execution import Arrays, Version
from dynamo.worker.repository.declared.model_config import instances_of
from dynamo.worker.repository.sessions.session import SessionTensor, Signature, first_line, model_file, number_parameter

DEFAULT_FILE = "model.onnx"

_DATATYPES = {
    "tensor(bool)": "BOOL",
    "tensor(uint8)": "UINT8",
    "tensor(uint16)": "UINT16",
    "tensor(uint32)": "UINT32",
    "tensor(uint64)": "UINT64",
    "tensor(int8)": "INT8",
    "tensor(int16)": "INT16",
    "tensor(int32)": "INT32",
    "tensor(int64)": "INT64",
    "tensor(float16)": "FP16",
    "tensor(float)": "FP32",
    "tensor(double)": "FP64",
    "tensor(string)": "BYTES",
}
"""ONNX's types that numpy has."""


class _Node(Protocol):
    """An input or output of a session."""

    name: str
    shape: Sequence[int | str | None]
    type: str


class _Runtime(Protocol):
    """An InferenceSession of ONNX Runtime, whose `run` is safe to call from several threads."""

    def get_inputs(self) -> Sequence[_Node]: ...

    def get_outputs(self) -> Sequence[_Node]: ...

    def run(self, outputs: Sequence[str], inputs: Mapping[str, Array]) -> Sequence[Any]: ...


class OnnxSession:
    def __init__(self, name: str, runtime: _Runtime) -> None:
        self.signature = Signature(
            [_to_tensor(node) for node in runtime.get_inputs()], [_to_tensor(node) for node in runtime.get_outputs()]
        )
        self._name = name
        self._runtime = runtime
        self._text = {tensor.name for tensor in self.signature.inputs if tensor.datatype == "BYTES"}

    def run(self, outputs: Sequence[str], inputs: Arrays) -> Sequence[Array]:
        feeds = {
            name: _to_text(array) if name in self._text else np.require(array, requirements="A") for name, array in inputs.items()
        }
        try:
            return [np.asarray(array) for array in self._runtime.run(outputs, feeds)]
        except Exception as error:
            if type(error).__name__ == "InvalidArgument":
                raise InvalidRequest(f"model '{self._name}': {first_line(error)}") from error
            raise


def _to_tensor(node: _Node) -> SessionTensor:
    dims = tuple(size if isinstance(size, int) and size >= 0 else -1 for size in node.shape)
    return SessionTensor(node.name, node.type, _DATATYPES.get(node.type), dims)


def _to_text(array: Array) -> Array:
    """Return the elements as `str`: ONNX has strings only."""
    texts = np.empty(array.size, object)
    try:
        texts[:] = [element.decode() if isinstance(element, bytes) else element for element in array.reshape(-1).tolist()]
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the model takes UTF-8 text only: {error}") from error
    return texts.reshape(array.shape)


def open_onnx(version: Version) -> OnnxSession:
    file = model_file(version, DEFAULT_FILE)
    if file.is_dir():
        file = file / DEFAULT_FILE
    try:
        import onnxruntime
    except ModuleNotFoundError:
        raise InvalidRequest("ONNX models need the package onnxruntime: install dynamo-serving[onnx]") from None
    try:
        runtime: _Runtime = onnxruntime.InferenceSession(
            str(file), _options(onnxruntime, version), providers=_providers(onnxruntime, version.config)
        )
    except DynamoError:
        raise
    except Exception as error:
        raise InvalidRequest(f"ONNX Runtime cannot load {version.version}/{file.name}: {first_line(error)}") from error
    return OnnxSession(version.name, runtime)


def _options(onnxruntime: Any, version: Version) -> Any:
    config = version.config
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    for name, attribute in (
        ("intra_op_thread_count", "intra_op_num_threads"),
        ("inter_op_thread_count", "inter_op_num_threads"),
    ):
        count = number_parameter(config, name)
        if count is not None:
            setattr(options, attribute, count)
    if number_parameter(config, "execution_mode"):
        options.execution_mode = onnxruntime.ExecutionMode.ORT_PARALLEL
    if config.optimization.HasField("graph"):
        levels = onnxruntime.GraphOptimizationLevel
        level = config.optimization.graph.level
        options.graph_optimization_level = levels.ORT_ENABLE_BASIC if level < 0 else levels.ORT_ENABLE_EXTENDED
        if level > 0:
            options.graph_optimization_level = levels.ORT_ENABLE_ALL
    for library in config.model_operations.op_library_filename:
        options.register_custom_ops_library(str(version.folder / relative_path(library)))
    return options


def _providers(onnxruntime: Any, config: ModelConfig) -> list[Any]:
    """Return CUDA for instances on a GPU, if this onnxruntime has it, and always the CPU."""
    available = set(onnxruntime.get_available_providers())
    instance = next(instances_of(config))
    providers: list[Any] = []
    if instance.kind == "GPU":
        accelerators = config.optimization.execution_accelerators.gpu_execution_accelerator
        if any(item.name == "tensorrt" for item in accelerators) and "TensorrtExecutionProvider" in available:
            providers.append(("TensorrtExecutionProvider", {"device_id": instance.device}))
        if "CUDAExecutionProvider" in available:
            providers.append(("CUDAExecutionProvider", {"device_id": instance.device}))
        elif any(group.kind == group.KIND_GPU for group in config.instance_group):
            raise InvalidRequest("instance_group requires a GPU, but this onnxruntime has no CUDA: install onnxruntime-gpu")
    return [*providers, "CPUExecutionProvider"]
