"""PyTorch models by the optional package `torch`: TorchScript (`model.pt`) and programs of torch.export (`model.pt2`).

A model of PyTorch has positions rather than names, so the tensors of a configuration are matched as in Triton:

1. Inputs that all have names of arguments of `forward` are those arguments.
2. Tensors of the form NAME__INDEX have the position INDEX.
3. Others have the positions of the configuration.

A `forward` with one argument, a dictionary of tensors, gets the inputs by their names.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dynamo.common.errors import EngineError, InvalidRequest
from dynamo.common.tensors.tensors import Array
from dynamo.protos.model_config_pb2 import ModelConfig
from dynamo.worker.paths import relative_path
from dynamo.worker.repository.declared.execution import Arrays, Version
from dynamo.worker.repository.declared.model_config import datatype_name, instances_of
from dynamo.worker.repository.declared.ragged import batch_inputs
from dynamo.worker.repository.declared.sequence_batching import added_tensors
from dynamo.worker.repository.sessions.session import SessionTensor, Signature, first_line, model_file, number_parameter

log = logging.getLogger(__name__)

DEFAULT_FILE, EXPORTED_FILE = "model.pt", "model.pt2"
_POSITION = re.compile(r".*__(\d{1,4})")
_DATATYPES = {
    "torch.bool": "BOOL",
    "torch.uint8": "UINT8",
    "torch.uint16": "UINT16",
    "torch.uint32": "UINT32",
    "torch.uint64": "UINT64",
    "torch.int8": "INT8",
    "torch.int16": "INT16",
    "torch.int32": "INT32",
    "torch.int64": "INT64",
    "torch.float16": "FP16",
    "torch.bfloat16": "BF16",
    "torch.float32": "FP32",
    "torch.float64": "FP64",
}


@dataclass(frozen=True, slots=True)
class _Program:
    """A model as PyTorch loads it."""

    run: Any
    arguments: Sequence[str]
    """The names of the arguments of `forward`."""
    takes_dictionary: bool = False
    inputs: Sequence[SessionTensor] | None = None
    """In the order of the arguments; None: the model does not say."""
    outputs: Sequence[SessionTensor] = ()
    """In order, without names."""


class TorchSession:
    def __init__(self, torch: Any, version: Version, program: _Program, device: str) -> None:
        """Raises InvalidRequest if the configuration's tensors cannot be matched to the model's."""
        config = version.config
        if program.inputs is None and not (config.input and config.output):
            raise InvalidRequest(
                "a TorchScript model does not say what its tensors are: the configuration needs input and output"
            )
        self._torch = torch
        self._program = program
        self._device = device
        self._flags = _ExecutionFlags.of(config)
        self._name = version.name
        self._halves = {tensor.name for tensor in config.input if tensor.data_type and datatype_name(tensor) == "BF16"}
        added_inputs, added_outputs = added_tensors(config)
        inputs = [tensor.name for tensor in config.input] or ([] if program.takes_dictionary else [*program.arguments])
        self._inputs = _in_order([*inputs, *sorted(added_inputs | batch_inputs(config).keys())], program.arguments)
        if not program.takes_dictionary and len(self._inputs) > len(program.arguments):
            raise InvalidRequest(
                f"the configuration has {len(self._inputs)} inputs; forward takes {len(program.arguments)}: "
                f"{', '.join(program.arguments)}"
            )
        outputs = [tensor.name for tensor in config.output] or [f"OUTPUT__{index}" for index in range(len(program.outputs))]
        outputs += sorted(added_outputs - set(outputs))
        self._outputs = {name: position for position, name in _in_order(outputs, ()).items()}
        self.signature = None if program.inputs is None else self._signature(program.inputs)

    def _signature(self, inputs: Sequence[SessionTensor]) -> Signature:
        """Return what the model says, under the names of the configuration."""
        names = {position: name for name, position in self._outputs.items()}
        return Signature(
            [_named(tensor, self._inputs.get(index, tensor.name)) for index, tensor in enumerate(inputs)],
            [_named(tensor, names.get(index, f"OUTPUT__{index}")) for index, tensor in enumerate(self._program.outputs)],
        )

    def run(self, outputs: Sequence[str], inputs: Arrays) -> Sequence[Array]:
        with self._flags.in_effect(self._torch):
            tensors = {name: self._to_tensor(name, array) for name, array in inputs.items()}
            if self._program.takes_dictionary:
                result = self._program.run(tensors)
            else:
                last = max(self._inputs, default=-1)
                result = self._program.run(*(tensors.get(self._inputs.get(index, "")) for index in range(last + 1)))
            return [self._to_array(name, self._output(result, name)) for name in outputs]

    def _to_tensor(self, name: str, array: Array) -> Any:
        if array.dtype == object:
            return [element.decode() if isinstance(element, bytes) else element for element in array.reshape(-1).tolist()]
        # What cannot be written to, since others read it, is copied: programs may work in place, on any of PyTorch's tensors.
        tensor = self._torch.from_numpy(np.require(array, requirements=("C", "W")))
        return tensor.to(self._device, self._torch.bfloat16 if name in self._halves else None)

    def _output(self, result: Any, name: str) -> Any:
        is_text = isinstance(result, list) and bool(result) and isinstance(result[0], str)
        results = [result] if isinstance(result, self._torch.Tensor) or is_text else result
        if self._outputs[name] >= len(results):
            raise EngineError(f"model '{self._name}' gave {len(results)} outputs, and '{name}' is not among them")
        return results[self._outputs[name]]

    def _to_array(self, name: str, value: Any) -> Array:
        if isinstance(value, self._torch.Tensor):
            value = value.detach().cpu()
            return np.asarray((value.float() if value.dtype == self._torch.bfloat16 else value).numpy())
        if isinstance(value, list) and all(isinstance(element, str) for element in value):
            return np.array([element.encode() for element in value], object)
        raise EngineError(f"model '{self._name}' gave its output '{name}' as {type(value).__name__}, which is not a tensor")


def open_torch(version: Version) -> TorchSession:
    """Load a model. Raises InvalidRequest with the reason if that fails."""
    file = _file(version)
    try:
        import torch
    except ModuleNotFoundError:
        raise InvalidRequest("PyTorch models need the package torch: install dynamo-serving[torch]") from None
    _set_threads(torch, version.config)
    device = _device(torch, version.config)
    try:
        for library in version.config.model_operations.op_library_filename:
            torch.ops.load_library(str(version.folder / relative_path(library)))
        program = _open_exported(torch, file, device) if file.suffix == ".pt2" else _open_script(torch, file, device)
    except InvalidRequest:
        raise
    except Exception as error:
        raise InvalidRequest(f"PyTorch cannot load {version.version}/{file.name}: {first_line(error)}") from error
    return TorchSession(torch, version, program, device)


def _file(version: Version) -> Path:
    exported = version.path / EXPORTED_FILE
    if version.config.default_model_filename in ("", DEFAULT_FILE) and exported.exists():
        return exported
    return model_file(version, DEFAULT_FILE)


def _open_script(torch: Any, file: Path, device: str) -> _Program:
    module = torch.jit.load(str(file), map_location=device).eval()
    arguments = module.forward.schema.arguments[1:]  # the first is the module itself
    takes_dictionary = len(arguments) == 1 and str(arguments[0].type).startswith("Dict[str, Tensor")
    return _Program(module, [argument.name for argument in arguments], takes_dictionary)


def _open_exported(torch: Any, file: Path, device: str) -> _Program:
    program = torch.export.load(str(file))
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    inputs = [_declared(str(name), values.get(name)) for name in program.graph_signature.user_inputs]
    outputs = [_declared("", values.get(name)) for name in program.graph_signature.user_outputs]
    return _Program(program.module().to(device), [tensor.name for tensor in inputs], False, inputs, outputs)


def _declared(name: str, value: Any) -> SessionTensor:
    kind = str(getattr(value, "dtype", type(value).__name__))
    dims = tuple(size if isinstance(size, int) else -1 for size in getattr(value, "shape", ()))
    return SessionTensor(name, kind, _DATATYPES.get(kind), dims)


def _named(tensor: SessionTensor, name: str) -> SessionTensor:
    return SessionTensor(name, tensor.type, tensor.datatype, tensor.dims)


def _in_order(names: Sequence[str], arguments: Sequence[str]) -> dict[int, str]:
    """Return tensors by their positions. Raises InvalidRequest if two have the same."""
    if names and set(names) <= set(arguments):
        return {arguments.index(name): name for name in names}
    positions = [_POSITION.fullmatch(name) for name in names]
    if not all(positions):
        return dict(enumerate(names))
    by_position: dict[int, str] = {}
    for name, position in zip(names, positions, strict=True):
        other = by_position.setdefault(int(position[1]) if position else 0, name)
        if other != name:
            raise InvalidRequest(f"the tensors '{other}' and '{name}' have the same position")
    return by_position


@dataclass(frozen=True, slots=True)
class _ExecutionFlags:
    """Parameters of Triton's PyTorch backend that concern executions."""

    inference: bool
    optimized: bool
    cudnn: bool
    cleaning: bool

    @classmethod
    def of(cls, config: ModelConfig) -> _ExecutionFlags:
        return cls(
            inference=_flag(config, "INFERENCE_MODE", default=True),
            optimized=not _flag(config, "DISABLE_OPTIMIZED_EXECUTION"),
            cudnn=not _flag(config, "DISABLE_CUDNN"),
            cleaning=_flag(config, "ENABLE_CACHE_CLEANING"),
        )

    @contextmanager
    def in_effect(self, torch: Any) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode() if self.inference else torch.no_grad())
            if not self.optimized:
                stack.enter_context(torch.jit.optimized_execution(False))
            if not self.cudnn:
                stack.enter_context(torch.backends.cudnn.flags(enabled=False))
            yield
        if self.cleaning and torch.cuda.is_available():
            torch.cuda.empty_cache()


def _flag(config: ModelConfig, name: str, *, default: bool = False) -> bool:
    """Return a parameter that is `true` or `false`. Raises InvalidRequest for another text."""
    text = config.parameters[name].string_value.lower() if name in config.parameters else str(default).lower()
    if text not in ("true", "false"):
        raise InvalidRequest(f"the parameter {name} must be true or false, got {text[:40]!r}")
    return text == "true"


def _set_threads(torch: Any, config: ModelConfig) -> None:
    """Set the numbers of threads, which are those of the whole process, as in Triton."""
    inside, between = number_parameter(config, "INTRA_OP_THREAD_COUNT"), number_parameter(config, "INTER_OP_THREAD_COUNT")
    if inside is not None:
        torch.set_num_threads(max(1, inside))
    if between is not None and between != torch.get_num_interop_threads():
        try:
            torch.set_num_interop_threads(max(1, between))
        except RuntimeError:  # it can be set once, before the first execution
            log.warning(
                "model %s: INTER_OP_THREAD_COUNT is not acted on, since PyTorch already runs with %d",
                config.name,
                torch.get_num_interop_threads(),
            )


def _device(torch: Any, config: ModelConfig) -> str:
    instance = next(instances_of(config))
    if instance.kind == "GPU" and torch.cuda.is_available():
        return f"cuda:{instance.device}"
    if any(group.kind == group.KIND_GPU for group in config.instance_group):
        raise InvalidRequest("instance_group requires a GPU, but this PyTorch has no CUDA device")
    return "cpu"
