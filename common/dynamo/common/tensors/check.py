"""Checks of tensor requests against a model card, in the order and the words of Triton, which clients and their tests know.

First what belongs to the protocol: parameters, and that each input has data. Then what belongs to the model: the names of outputs
and inputs, the batch, datatypes, shapes and sizes. Refusals of the second kind begin with the id of the request.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from dynamo.common.errors import InvalidRequest, ModelNotFound, Unsupported
from dynamo.common.model_card import ModelCard, TensorSpec
from dynamo.common.tensors.request import MAX_PARAMETERS, TensorRequest
from dynamo.common.tensors.tensors import (
    DATATYPES,
    MAX_BYTES,
    MAX_BYTES_ELEMENTS,
    MAX_DIMS,
    Buffer,
    check_range,
    datatype_named,
    element_count,
    filled_fields,
    scan_bytes,
)
from dynamo.protos.inference_pb2 import InferParameter, InferTensorContents, ModelInferRequest

EMPTY_FINAL_RESPONSE = "triton_enable_empty_final_response"
MODELS_OWN: Mapping[str, str] = {"priority": "triton_models_priority", "timeout": "triton_models_timeout"}
"""Parameters that mean something to this server, and by which name they come if they are the model's: generate has them so."""
_MAX_CACHED_SHAPES = 1024
_QUICK_BYTES = 512 * 1024
_MAX_KEPT_BYTES = 1024
"""Larger heads are not kept in memory when their request is over."""
_MAX_LISTED_DIMS = 64
"""A longer wrong shape is not listed in the error: a message of 1 MB may have a million dimensions."""
_INVALID = "<invalid>"
"""Triton's name of datatypes that do not exist."""
BATCH_NOTE = (
    "NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to be prepended to each input shape. "
    "If you want to specify the full shape including the batch dim in your input dims config, try setting max_batch_size to "
    "zero. See the model configuration docs for more info on max_batch_size."
)
_FIELD_TYPES: Mapping[str, tuple[str, ...]] = {
    "bool_contents": ("BOOL",),
    "int_contents": ("INT32", "INT8", "INT16"),
    "int64_contents": ("INT64",),
    "uint_contents": ("UINT32", "UINT8", "UINT16"),
    "uint64_contents": ("UINT64",),
    "fp32_contents": ("FP32",),
    "fp64_contents": ("FP64",),
    "bytes_contents": ("BYTES",),
}
"""The datatypes that each field of InferTensorContents holds; a tensor of another one is said to be of the first."""

InputTensor = ModelInferRequest.InferInputTensor


class _Declared:
    """One declared input, prepared for checking requests."""

    __slots__ = ("_counts", "kind", "shape", "spec", "what")

    def __init__(self, spec: TensorSpec) -> None:
        self.spec = spec
        self.what = f"input '{spec.name}'"
        self.kind = datatype_named(spec.datatype, self.what)
        self.shape = list(spec.shape)
        self._counts: dict[tuple[int, ...], int] = {}
        """Cached element counts by shape: clients repeat their shapes."""

    def count_of(self, shape: Sequence[int]) -> int | None:
        """Return the elements of a tensor of `shape`; None if the declaration does not allow that shape."""
        if len(shape) != len(self.shape):
            return None
        key = tuple(shape)
        count = self._counts.get(key)
        if count is None:
            if any(want not in (-1, have) for want, have in zip(self.shape, key, strict=True)) or min(key, default=0) < 0:
                return None
            count = element_count(key, self.what)
            if len(self._counts) >= _MAX_CACHED_SHAPES:
                self._counts.clear()
            self._counts[key] = count
        return count


class RequestChecker:
    """Checks requests against one model card. Make one per card; checking a small request takes a few microseconds."""

    __slots__ = ("_has_bytes", "_inputs", "_max_batch", "_model", "_outputs", "_passed", "_required", "_versions")

    def __init__(self, card: ModelCard) -> None:
        self._model = card.name
        self._versions = frozenset(("", *card.versions))
        self._max_batch = card.max_batch_size
        self._inputs = {spec.name: _Declared(spec) for spec in card.inputs}
        self._has_bytes = any(spec.datatype == "BYTES" for spec in card.inputs)
        self._required = sum(not spec.optional for spec in card.inputs)
        self._outputs = frozenset(spec.name for spec in card.outputs)
        self._passed: tuple[ModelInferRequest, int] | None = None
        """The last head that passed, which the next requests may share (`KnownHeads`), and the size of its message."""

    def is_slow(self, request: TensorRequest) -> bool:
        """Return whether `check` may take long, since it looks at many elements: then it belongs in a thread."""
        return len(request.raw) > _QUICK_BYTES and (self._has_bytes or not request.raw_inputs)

    def check(self, request: TensorRequest) -> None:
        """Check that a request fits the model.

        Raises InvalidRequest, in one sentence naming the tensor, if it does not, ModelNotFound for a version that is not served,
        and Unsupported for tensors in shared memory, which the protocol's edge replaces before.
        """
        head, size, passed = request.head, len(request.raw), self._passed
        if passed is not None and head is passed[0] and size == passed[1]:
            return  # it differs in the elements of its tensor alone
        if head.model_version not in self._versions:
            raise ModelNotFound(head.model_name, head.model_version)
        if head.parameters:
            check_request_parameters(head.parameters)
        if len(head.inputs) > 1:
            self._check_repeated(head, "input", [tensor.name for tensor in head.inputs])
        self._check_data(request)
        if head.outputs:
            self._check_outputs(head)
        self._check_inputs(request)
        if not self._has_bytes and len(request.raw_inputs) == 1 and size - len(request.raw_inputs[0]) <= _MAX_KEPT_BYTES:
            self._passed = head, size

    def _check_repeated(self, head: ModelInferRequest, kind: str, names: Sequence[str]) -> None:
        if len(set(names)) == len(names):
            return
        seen: set[str] = set()
        for name in names:
            if name in seen:
                raise _refusal(head, f"{kind} '{name}' already exists in request")
            seen.add(name)

    def _check_data(self, request: TensorRequest) -> None:
        """Check that each input has data, in one form; that the data is right is checked later."""
        raws = len(request.raw_inputs)
        inputs = request.head.inputs
        for position, tensor in enumerate(inputs):
            if tensor.parameters:
                check_tensor_parameters(tensor.parameters, f"input '{tensor.name}'")
            if tensor.HasField("contents"):
                if raws:
                    raise InvalidRequest(
                        f"contents field must not be specified when using raw_input_contents for '{tensor.name}' for model "
                        f"'{self._model}'"
                    )
                self._check_fields(tensor)
            elif position >= raws:
                raise InvalidRequest(
                    f"unable to find data for input tensor '{tensor.name}' for model '{self._model}' in request."
                )
        if raws > len(inputs):
            raise InvalidRequest(f"raw_input_contents has {raws} entries for {len(inputs)} inputs")

    def _check_fields(self, tensor: InputTensor) -> None:
        filled = filled_fields(tensor.contents)
        datatype = tensor.datatype
        for position, field in enumerate(filled):
            about = f"unexpected explicit tensor data for input tensor '{tensor.name}' for model '{self._model}'"
            if position:
                raise InvalidRequest(f"{about}, binary data was already supplied.")
            if datatype not in _FIELD_TYPES[field]:
                wanted = datatype if datatype in DATATYPES else _INVALID
                raise InvalidRequest(f"{about} of type '{_FIELD_TYPES[field][0]}', expected datatype '{wanted}'")

    def _check_outputs(self, head: ModelInferRequest) -> None:
        self._check_repeated(head, "output", [output.name for output in head.outputs])
        for output in head.outputs:
            if output.parameters:
                check_tensor_parameters(output.parameters, f"output '{output.name}'")
        for output in head.outputs:
            if output.name not in self._outputs:
                raise InvalidRequest(f"unexpected inference output '{output.name}' for model '{self._model}'")

    def _check_inputs(self, request: TensorRequest) -> None:
        head = request.head
        inputs = head.inputs
        if not self._required <= len(inputs) <= len(self._inputs):
            raise self._wrong_number(head)
        if self._max_batch:
            self._check_batch(head)
        raws = request.raw_inputs
        strings = 0
        for position, tensor in enumerate(inputs):
            declared = self._inputs.get(tensor.name)
            if declared is None:
                raise self._unknown_input(tensor.name)
            if tensor.datatype != declared.kind.name:
                given = tensor.datatype if tensor.datatype in DATATYPES else _INVALID
                raise _refusal(
                    head,
                    f"inference input '{tensor.name}' data-type is '{given}', but model '{self._model}' expects "
                    f"'{declared.kind.name}'",
                )
            shape = tensor.shape
            count = declared.count_of(shape)
            if count is None:
                raise self._wrong_shape(request, position, declared)
            if not declared.kind.size:
                strings += count
                if strings > MAX_BYTES_ELEMENTS:
                    raise _too_many_strings(head, strings)
            if raws:
                self._check_size(head, tensor, declared, raws[position], count)
            else:
                self._check_contents(head, tensor, declared, count)
        if len(inputs) < len(self._inputs):
            self._check_required(head)

    def _check_batch(self, head: ModelInferRequest) -> None:
        batch = -1
        for tensor in head.inputs:
            if tensor.name not in self._inputs:
                raise self._unknown_input(tensor.name)
            shape = tensor.shape
            if not shape:
                raise _refusal(head, f"input '{tensor.name}' has no shape but model requires batch dimension for '{self._model}'")
            if batch == -1:
                batch = shape[0]
            elif shape[0] != batch:
                raise _refusal(head, f"input '{tensor.name}' batch size does not match other inputs for '{self._model}'")
        if batch > self._max_batch:
            raise _refusal(head, f"inference request batch-size must be <= {self._max_batch} for '{self._model}'")

    def _unknown_input(self, name: str) -> InvalidRequest:
        return InvalidRequest(f"unexpected inference input '{name}' for model '{self._model}'")

    def _wrong_number(self, head: ModelInferRequest) -> InvalidRequest:
        names = [tensor.name for tensor in reversed(head.inputs)]  # in the order in which Triton lists them
        missing = [name for name, declared in self._inputs.items() if not declared.spec.optional and name not in names]
        most = len(self._inputs)
        expected = f"{most} inputs but" if most == self._required else f"number of inputs between {self._required} and {most} but"
        return _refusal(
            head,
            f"expected {expected} got {len(names)} inputs for model '{self._model}'. Got input(s) {_listed(names)}, but missing "
            f"required input(s) {_listed(missing)}. Please provide all required input(s).",
        )

    def _wrong_shape(self, request: TensorRequest, position: int, declared: _Declared) -> InvalidRequest:
        head = request.head
        tensor = head.inputs[position]
        name, shape = tensor.name, tensor.shape
        if len(shape) > _MAX_LISTED_DIMS:
            return _refusal(head, f"input '{name}' has {len(shape)} dimensions; at most {MAX_DIMS} are allowed")
        own = shape[1:] if self._max_batch else shape
        fits = len(shape) == len(declared.shape)
        if fits and -1 in own:
            return _refusal(
                head,
                f"All input dimensions should be specified for input '{name}' for model '{self._model}', got {_dims(shape)}",
            )
        if fits and min(shape) < 0:
            size = declared.kind.size or 1
            raws = request.raw_inputs
            given = len(raws[position]) if raws else size * len(_elements(tensor.contents))
            return self._wrong_size(head, name, size * math.prod(shape), given)
        return _refusal(
            head,
            f"unexpected shape for input '{name}' for model '{self._model}'. Expected {_dims(declared.shape)}, got {_dims(shape)}"
            f". {BATCH_NOTE if self._max_batch else ''}",
        )

    def _wrong_size(self, head: ModelInferRequest, name: str, expected: int, size: int) -> InvalidRequest:
        return _refusal(
            head, f"input byte size mismatch for input '{name}' for model '{self._model}'. Expected {expected}, got {size}"
        )

    def _check_size(self, head: ModelInferRequest, tensor: InputTensor, declared: _Declared, raw: Buffer, count: int) -> None:
        size = declared.kind.size
        if not size:
            self._check_bytes(head, tensor, raw, count)
        elif len(raw) != size * count or size * count > MAX_BYTES:
            raise self._wrong_size(head, tensor.name, size * count, len(raw))
        elif self._max_batch and not tensor.shape[0]:
            raise self._wrong_size(head, tensor.name, size * element_count(tensor.shape[1:]), len(raw))

    def _check_contents(self, head: ModelInferRequest, tensor: InputTensor, declared: _Declared, count: int) -> None:
        kind = declared.kind
        elements = _elements(tensor.contents)
        if kind.size:
            if len(elements) != count or (self._max_batch and not tensor.shape[0]):
                raise self._wrong_size(head, tensor.name, kind.size * count, kind.size * len(elements))
            check_range(elements, kind, declared.what)
        elif len(elements) != count:
            raise self._wrong_elements(head, tensor.name, len(elements), count)

    def _check_bytes(self, head: ModelInferRequest, tensor: InputTensor, raw: Buffer, count: int) -> None:
        if self._max_batch and not tensor.shape[0]:
            raise self._wrong_elements(head, tensor.name, 0, element_count(tensor.shape[1:]))
        scanned = scan_bytes(raw, count)
        if scanned.lengthless_bytes:
            raise _refusal(
                head,
                f"incomplete string length indicator for inference input '{tensor.name}' for model '{self._model}', expecting 4 "
                f"bytes but only {scanned.lengthless_bytes} bytes available. Please make sure the string length indicator is in "
                "one buffer.",
            )
        if scanned.elements != count:
            raise self._wrong_elements(head, tensor.name, scanned.elements, count)
        if scanned.wanted > scanned.available:
            raise InvalidRequest(
                f"incomplete string data for inference input '{tensor.name}', expecting string of length {scanned.wanted} but "
                f"only {scanned.available} bytes available"
            )

    def _wrong_elements(self, head: ModelInferRequest, name: str, elements: int, count: int) -> InvalidRequest:
        if elements > count:
            return _refusal(
                head,
                f"unexpected number of string elements {count + 1} for inference input '{name}' for model '{self._model}', "
                f"expecting {count}",
            )
        return _refusal(
            head, f"expected {count} string elements for inference input '{name}' for model '{self._model}', got {elements}"
        )

    def _check_required(self, head: ModelInferRequest) -> None:
        names = {tensor.name for tensor in head.inputs}
        if any(not declared.spec.optional and name not in names for name, declared in self._inputs.items()):
            raise self._wrong_number(head)


def _refusal(head: ModelInferRequest, sentence: str) -> InvalidRequest:
    return InvalidRequest(f"[request id: {head.id[:200] or '<id_unknown>'}] {sentence}")


def _too_many_strings(head: ModelInferRequest, strings: int) -> InvalidRequest:
    return _refusal(head, f"the request has {strings} or more BYTES elements; at most {MAX_BYTES_ELEMENTS} are allowed")


def _elements(contents: InferTensorContents) -> Sequence[int]:
    filled = filled_fields(contents)
    return getattr(contents, filled[0]) if filled else ()


def _dims(shape: Sequence[int]) -> str:
    return f"[{','.join(map(str, shape))}]"


def _listed(names: Sequence[str]) -> str:
    return "[" + ",".join(f"'{name}'" for name in names) + "]"


# Parameters

_RESERVED: Mapping[str, tuple[str, ...]] = {
    "sequence_id": ("int64_param", "string_param"),
    "sequence_start": ("bool_param",),
    "sequence_end": ("bool_param",),
    "priority": ("int64_param", "uint64_param"),
    "timeout": ("int64_param",),
    EMPTY_FINAL_RESPONSE: ("bool_param",),
}
"""Request parameters with a defined meaning, and the kinds each may have."""
_MAX_SEQUENCE_ID_BYTES = 128
_FREE = frozenset(("int64_param", "bool_param", "string_param", "double_param"))
"""The kinds of all other parameters."""
SHARED_MEMORY = frozenset(("shared_memory_region", "shared_memory_offset", "shared_memory_byte_size"))


def check_request_parameters(parameters: Mapping[str, InferParameter], *, more: Collection[str] = ()) -> None:
    """Raises InvalidRequest for a parameter of a wrong kind or with a reserved name, Unsupported for the id of a sequence that is
    too long. `more` names kinds that are accepted in addition to Triton's.
    """
    _check_number_of(parameters, "the request")
    for key, parameter in parameters.items():
        kind = parameter.WhichOneof("parameter_choice") or ""
        allowed = _RESERVED.get(key)
        if allowed is not None:
            if kind not in allowed:
                raise InvalidRequest(f"invalid value type for '{key}' parameter, expected {' or '.join(allowed)}.")
            if key == "priority" and parameter.int64_param < 0:
                raise InvalidRequest("invalid value for 'priority', expected value >= 0.")
            if key == "sequence_id" and len(parameter.string_param.encode()) > _MAX_SEQUENCE_ID_BYTES:
                raise Unsupported(f"string correlation ID cannot be longer than {_MAX_SEQUENCE_ID_BYTES} characters")
        elif key.startswith("triton_") and key not in MODELS_OWN.values():
            raise InvalidRequest(
                "parameter keys starting with 'triton_' are reserved for Triton usage. Only the following keys starting with "
                f"'triton_' are allowed: {EMPTY_FINAL_RESPONSE}"
            )
        elif kind not in _FREE and kind not in more:
            raise InvalidRequest(f"invalid value type for '{key}' parameter, expected int64_param, bool_param, or string_param.")


def check_tensor_parameters(parameters: Mapping[str, InferParameter], what: str) -> None:
    """Check the parameters of one input or requested output. Raises InvalidRequest, and Unsupported for shared memory."""
    _check_number_of(parameters, what)
    if not SHARED_MEMORY.isdisjoint(parameters):
        raise Unsupported(f"{what} refers to shared memory, which this server does not read")
    if (classes := parameters.get("classification")) is not None:
        if classes.WhichOneof("parameter_choice") != "int64_param":
            raise InvalidRequest("invalid value type for 'classification' parameter, expected int64_param")
        if classes.int64_param < 1:
            raise InvalidRequest("invalid value for 'classification' parameter, expected >= 0")


def _check_number_of(parameters: Mapping[str, InferParameter], what: str) -> None:
    if len(parameters) > MAX_PARAMETERS:
        raise InvalidRequest(f"{what} has {len(parameters)} parameters; at most {MAX_PARAMETERS} are allowed")
