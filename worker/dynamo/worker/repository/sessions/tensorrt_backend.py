"""Engines of TensorRT 10 or later (`model.plan`), by the optional packages `tensorrt` and `cuda-python`. Needs a GPU."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from dynamo.common.errors import DynamoError, EngineError, InvalidRequest
from dynamo.common.tensors.tensors import Array
from dynamo.protos.model_config_pb2 import ModelConfig
from dynamo.worker.repository.declared.execution import Arrays, Version
from dynamo.worker.repository.declared.model_config import instances_of
from dynamo.worker.repository.sessions.session import SessionTensor, Signature, first_line, model_file

log = logging.getLogger(__name__)

DEFAULT_FILE = "model.plan"
_DATATYPES = {
    "BOOL": "BOOL",
    "UINT8": "UINT8",
    "INT8": "INT8",
    "INT32": "INT32",
    "INT64": "INT64",
    "HALF": "FP16",
    "FLOAT": "FP32",
}


class _Cuda:
    """The calls of CUDA's runtime that are needed, on one device."""

    def __init__(self, runtime: Any, device: int) -> None:
        self._runtime = runtime
        self._device = device

    def use(self) -> None:
        """Let this thread use the device."""
        self._call("cudaSetDevice", self._device)

    def stream(self) -> Any:
        return self._call("cudaStreamCreate")

    @contextmanager
    def memory(self, size: int, stream: Any) -> Iterator[int]:
        address = int(self._call("cudaMallocAsync", max(1, size), stream))
        try:
            yield address
        finally:
            self._call("cudaFreeAsync", address, stream)

    def upload(self, address: int, array: Array, stream: Any) -> None:
        kind = self._runtime.cudaMemcpyKind.cudaMemcpyHostToDevice
        self._call("cudaMemcpyAsync", address, array.ctypes.data, array.nbytes, kind, stream)

    def download(self, array: Array, address: int, stream: Any) -> None:
        kind = self._runtime.cudaMemcpyKind.cudaMemcpyDeviceToHost
        self._call("cudaMemcpyAsync", array.ctypes.data, address, array.nbytes, kind, stream)

    def wait(self, stream: Any) -> None:
        self._call("cudaStreamSynchronize", stream)

    def _call(self, name: str, *arguments: Any) -> Any:
        status, *results = getattr(self._runtime, name)(*arguments)
        if int(status):
            raise EngineError(f"{name} failed with status {int(status)}")
        return results[0] if results else None


class TensorRtSession:
    def __init__(self, version: Version, tensorrt: Any, engine: Any, cuda: _Cuda) -> None:
        """Raises InvalidRequest for a configuration that the engine does not have."""
        self._name = version.name
        self._profile = _profile(version.config, engine)
        self._engine = engine
        self._cuda = cuda
        names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
        inputs = [each for each in names if engine.get_tensor_mode(each) == tensorrt.TensorIOMode.INPUT]
        self._outputs = [each for each in names if each not in inputs]
        self._dtypes = {each: np.dtype(tensorrt.nptype(engine.get_tensor_dtype(each))) for each in names if self._datatype(each)}
        self.signature = Signature([self._tensor(each) for each in inputs], [self._tensor(each) for each in self._outputs])
        self._lanes = threading.local()
        """Each thread has an execution context and a stream of its own."""

    def _open_lane(self) -> tuple[Any, Any]:
        context, stream = self._engine.create_execution_context(), self._cuda.stream()
        if self._profile:
            context.set_optimization_profile_async(self._profile, stream)
        return context, stream

    def _datatype(self, name: str) -> str | None:
        return _DATATYPES.get(self._engine.get_tensor_dtype(name).name)

    def _tensor(self, name: str) -> SessionTensor:
        kind = self._engine.get_tensor_dtype(name).name
        return SessionTensor(name, kind, self._datatype(name), tuple(self._engine.get_tensor_shape(name)))

    def run(self, outputs: Sequence[str], inputs: Arrays) -> Sequence[Array]:
        self._cuda.use()
        if not hasattr(self._lanes, "own"):
            self._lanes.own = self._open_lane()
        context, stream = self._lanes.own
        with ExitStack() as memory:
            held = [
                np.ascontiguousarray(array, self._dtypes[name]) for name, array in inputs.items()
            ]  # until the copies are made
            for name, array in zip(inputs, held, strict=True):
                if not context.set_input_shape(name, array.shape):
                    raise InvalidRequest(
                        f"model '{self._name}': the engine does not take input '{name}' in shape {list(array.shape)}"
                    )
                address = memory.enter_context(self._cuda.memory(array.nbytes, stream))
                self._cuda.upload(address, array, stream)
                context.set_tensor_address(name, address)
            results: dict[str, Array] = {}
            addresses: dict[str, int] = {}
            for name in self._outputs:
                shape = tuple(context.get_tensor_shape(name))
                if any(size < 0 for size in shape):
                    raise EngineError(
                        f"model '{self._name}': the shape of output '{name}' depends on data, which is not supported"
                    )
                results[name] = np.empty(shape, self._dtypes[name])
                addresses[name] = memory.enter_context(self._cuda.memory(results[name].nbytes, stream))
                context.set_tensor_address(name, addresses[name])
            if not context.execute_async_v3(stream):
                raise EngineError(f"model '{self._name}' failed: TensorRT could not run it")
            for name in outputs:
                self._cuda.download(results[name], addresses[name], stream)
            self._cuda.wait(stream)
        return [results[name] for name in outputs]


def open_tensorrt(version: Version) -> TensorRtSession:
    """Load an engine. Raises InvalidRequest with the reason if that fails."""
    file = model_file(version, DEFAULT_FILE)
    try:
        import tensorrt
        from cuda.bindings import runtime
    except ImportError as error:
        needed = "tensorrt" if error.name == "tensorrt" else "cuda-python"
        raise InvalidRequest(
            f"TensorRT models need a GPU and the packages tensorrt and cuda-python: {needed} is missing"
        ) from None
    _check_formats(version.config)
    log.warning("model %s: the tensorrt backend is experimental, never run on a GPU", version.name)
    cuda = _Cuda(runtime, _device(version.config))
    try:
        cuda.use()
        engine = tensorrt.Runtime(tensorrt.Logger(tensorrt.Logger.WARNING)).deserialize_cuda_engine(file.read_bytes())
        if engine is None:
            raise InvalidRequest(f"TensorRT cannot load {version.version}/{file.name}: it is for another TensorRT or another GPU")
        return TensorRtSession(version, tensorrt, engine, cuda)
    except InvalidRequest:
        raise
    except DynamoError as error:
        raise InvalidRequest(f"TensorRT cannot load {version.version}/{file.name}: {error}") from error
    except Exception as error:
        raise InvalidRequest(f"TensorRT cannot load {version.version}/{file.name}: {first_line(error)}") from error


def _profile(config: ModelConfig, engine: Any) -> int:
    """Return the optimization profile that a configuration names, or the first. Raises InvalidRequest."""
    names = next((list(group.profile) for group in config.instance_group if group.profile), ["0"])
    if len(names) > 1 or not names[0].isdecimal() or int(names[0]) >= engine.num_optimization_profiles:
        count = engine.num_optimization_profiles
        raise InvalidRequest(f"instance_group.profile must be one number below {count}, got {', '.join(names)[:100]}")
    return int(names[0])


def _check_formats(config: ModelConfig) -> None:
    """Raises InvalidRequest for a tensor whose elements do not lie in a row."""
    tensors = [tensor.name for tensor in config.input if tensor.is_non_linear_format_io]
    tensors += [tensor.name for tensor in config.output if tensor.is_non_linear_format_io]
    if tensors:
        raise InvalidRequest(f"tensor '{tensors[0]}' has is_non_linear_format_io, which is not supported")


def _device(config: ModelConfig) -> int:
    """Return the GPU of a model. Raises InvalidRequest if it has none."""
    instance = next(instances_of(config))
    if instance.kind != "GPU":
        raise InvalidRequest("instance_group has no GPU, and the backend tensorrt needs one")
    return instance.device
