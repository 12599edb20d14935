"""Parsing and building of tensor requests and responses without copying their tensor data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from google.protobuf.message import DecodeError

from dynamo.common.errors import EngineError, InvalidRequest, ModelNotFound, PayloadTooLarge, Unsupported
from dynamo.common.message_limits import MessageScanner
from dynamo.common.model_card import ModelCard, TensorSpec
from dynamo.common.protobuf_wire import BYTES, FIXED32, FIXED64, VARINT, read_varint, tag, varint
from dynamo.common.tensors import (
    Buffer,
    check_bytes,
    check_contents,
    datatype_named,
    element_count,
    expected_bytes,
    filled_fields,
)
from dynamo.protos.inference_pb2 import InferParameter, ModelInferRequest, ModelInferResponse

MAX_TENSORS = 4096
MAX_PARAMETERS = 1024
_MAX_TOP_FIELDS = 3 * MAX_TENSORS + MAX_PARAMETERS + 64
"""Fields at the top of a message: inputs, outputs, raw tensors, parameters, and a few more."""
_MAX_CACHED_SHAPES = 1024
_QUICK_BYTES = 512 * 1024
SMALL_BYTES = 16 * 1024
"""Up to this size, letting protobuf copy is faster than scanning for the tensors, and one buffer is faster than several."""

_RAW_INPUT = ModelInferRequest.DESCRIPTOR.fields_by_name["raw_input_contents"].number << 3 | BYTES
_RAW_OUTPUT = tag(ModelInferResponse, "raw_output_contents")
_RAW_OUTPUT_KEY = ModelInferResponse.DESCRIPTOR.fields_by_name["raw_output_contents"].number << 3 | BYTES


class TensorRequest(msgspec.Struct, frozen=True, gc=False):
    """A ModelInferRequest, split so that tensor data stays where it arrived."""

    raw: Buffer
    """The whole serialized message, forwarded unchanged."""
    head: ModelInferRequest
    """Everything but `raw_input_contents`, which is empty here."""
    raw_inputs: Sequence[Buffer]
    """`raw_input_contents`; views into `raw` where that is large."""

    @classmethod
    def parse(cls, data: Buffer, scanner: MessageScanner | None = None) -> TensorRequest:
        """Parse a serialized ModelInferRequest. Raises InvalidRequest if it is none, PayloadTooLarge if it has too many parts.

        `scanner` checks its parts before they are parsed, if they are large; it is needed for messages of clients.
        """
        try:
            if len(data) > SMALL_BYTES:
                pieces, raw_inputs = _split(memoryview(data), _RAW_INPUT)
                rest = data if not raw_inputs and isinstance(data, bytes) else b"".join(pieces)
                if scanner is not None and len(rest) > SMALL_BYTES:
                    scanner.check(rest)
                return cls(data, ModelInferRequest.FromString(rest), raw_inputs)
            head = ModelInferRequest.FromString(data)  # type: ignore[arg-type]  # takes any buffer
        except (DecodeError, ValueError, IndexError):
            raise InvalidRequest("the message is not a ModelInferRequest") from None
        small = head.raw_input_contents[:]
        del head.raw_input_contents[:]
        return cls(data, head, small)

    @classmethod
    def build(cls, head: ModelInferRequest, raw_inputs: Sequence[Buffer] = ()) -> TensorRequest:
        """Build a request from its parts; `head` has no `raw_input_contents`. The tensors are copied once, into the message."""
        pieces: list[Buffer] = [head.SerializeToString()]
        key = varint(_RAW_INPUT)
        for raw in raw_inputs:
            pieces += (key + varint(len(raw)), raw)
        return cls(b"".join(pieces), head, raw_inputs)

    @property
    def is_typed(self) -> bool:
        """Whether the tensors are in `contents`; then those of the responses are as well."""
        return not self.raw_inputs and any(filled_fields(tensor.contents) for tensor in self.head.inputs)

    @property
    def wants_empty_final_response(self) -> bool:
        """Whether the client wants a last, possibly empty, response that is marked as the last."""
        return _parameter(self.head, "triton_enable_empty_final_response").bool_param

    @property
    def priority(self) -> int:
        """Triton's priority: 1 is the highest, larger numbers are lower, 0 is the model's default."""
        return _whole_number(_parameter(self.head, "priority"))

    @property
    def timeout_us(self) -> int:
        """The request's timeout in microseconds; 0: none."""
        return _whole_number(_parameter(self.head, "timeout"))


def _parameter(head: ModelInferRequest, key: str) -> InferParameter:
    parameters = head.parameters
    return parameters.get(key, _NOTHING) if parameters else _NOTHING


_NOTHING = InferParameter()


def _whole_number(parameter: InferParameter) -> int:
    return parameter.int64_param or parameter.uint64_param


def _split(message: memoryview, raw_field: int) -> tuple[list[memoryview], list[memoryview]]:
    """Split a message at its top level into the entries of the field with the key `raw_field`, and the rest.

    Raises ValueError or IndexError if it is no message.
    """
    rest: list[memoryview] = []
    raws: list[memoryview] = []
    kept = position = fields = 0
    size = len(message)
    while position < size:
        fields += 1
        if fields > _MAX_TOP_FIELDS:
            raise PayloadTooLarge(f"the message has more than {_MAX_TOP_FIELDS} fields")
        start = position
        key, position = read_varint(message, position)
        wire_type = key & 7
        if wire_type == BYTES:
            length, position = read_varint(message, position)
            begin, position = position, position + length
            if key == raw_field:
                rest.append(message[kept:start])
                raws.append(message[begin:position])
                kept = position
                if len(raws) > MAX_TENSORS:
                    raise InvalidRequest(f"raw_input_contents has more than {MAX_TENSORS} entries")
        elif wire_type == VARINT:
            _, position = read_varint(message, position)
        elif wire_type == FIXED64:
            position += 8
        elif wire_type == FIXED32:
            position += 4
        else:
            raise ValueError("groups do not occur in this message")
    if position > size:
        raise ValueError("the last field is cut off")
    rest.append(message[kept:])
    return rest, raws


# Checking


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

    def count_of(self, shape: Sequence[int]) -> int:
        """Return the elements of a tensor of `shape`. Raises InvalidRequest if the declaration does not allow that shape."""
        fits = len(shape) == len(self.shape)
        if fits and (cached := self._counts.get(tuple(shape))) is not None:
            return cached
        count = element_count(shape, self.what)
        if not fits or any(want not in (-1, have) for want, have in zip(self.shape, shape, strict=True)):
            raise InvalidRequest(f"{self.what} has the shape {list(shape)}; the model takes {self.shape}")
        if len(self._counts) >= _MAX_CACHED_SHAPES:
            self._counts.clear()
        self._counts[tuple(shape)] = count
        return count


class RequestChecker:
    """Checks requests against one model card. Make one per card; checking a small request takes a few microseconds."""

    __slots__ = ("_has_bytes", "_inputs", "_max_batch", "_model", "_outputs", "_required", "_versions")

    def __init__(self, card: ModelCard) -> None:
        self._model = card.name
        self._versions = frozenset(("", *card.versions))
        self._max_batch = card.max_batch_size
        self._inputs = {spec.name: _Declared(spec) for spec in card.inputs}
        self._has_bytes = any(spec.datatype == "BYTES" for spec in card.inputs)
        self._required = sum(not spec.optional for spec in card.inputs)
        self._outputs = frozenset(spec.name for spec in card.outputs)

    def is_slow(self, request: TensorRequest) -> bool:
        """Return whether `check` may take long, since it looks at many elements: then it belongs in a thread."""
        return len(request.raw) > _QUICK_BYTES and (self._has_bytes or not request.raw_inputs)

    def check(self, request: TensorRequest) -> None:
        """Check that a request fits the model.

        Raises InvalidRequest, in one sentence naming the tensor, if it does not, ModelNotFound for a version that is not served,
        and Unsupported for tensors in shared memory.
        """
        head = request.head
        if head.model_version not in self._versions:
            raise ModelNotFound(head.model_name, head.model_version)
        if head.parameters:
            check_request_parameters(head.parameters)
        inputs = head.inputs
        raws = request.raw_inputs
        if len(inputs) > len(self._inputs) or len(inputs) < self._required:
            self._explain_inputs([tensor.name for tensor in inputs])
        if raws and len(raws) != len(inputs):
            raise InvalidRequest(f"raw_input_contents has {len(raws)} entries for {len(inputs)} inputs")
        seen: dict[str, _Declared] = {}
        batch = -1
        for position, tensor in enumerate(inputs):
            name = tensor.name
            declared = self._inputs.get(name)
            if declared is None or name in seen:
                self._explain_inputs([tensor.name for tensor in inputs])
                raise AssertionError("a wrong input was explained")
            seen[name] = declared
            if tensor.parameters:
                check_tensor_parameters(tensor.parameters, declared.what)
            if tensor.datatype != declared.kind.name:
                datatype_named(tensor.datatype, declared.what)
                raise InvalidRequest(f"{declared.what} has the datatype {tensor.datatype}; the model takes {declared.kind.name}")
            shape = tensor.shape
            count = declared.count_of(shape)
            if self._max_batch:
                batch = self._check_batch(declared, shape[0], batch)
            if raws:
                if tensor.HasField("contents") and filled_fields(tensor.contents):
                    raise InvalidRequest(f"{declared.what} has contents although the request has raw_input_contents")
                _check_raw(declared, raws[position], shape, count)
            elif not tensor.HasField("contents") and count:
                raise InvalidRequest(f"{declared.what} has no data, neither in contents nor in raw_input_contents")
            else:
                check_contents(tensor.contents, declared.kind, count, declared.what)
        if len(seen) < len(self._inputs):
            self._check_missing(seen)
        if head.outputs:
            self._check_outputs(head)

    def _check_batch(self, declared: _Declared, batch: int, others: int) -> int:
        if not 1 <= batch <= self._max_batch:
            raise InvalidRequest(f"{declared.what} has a batch of {batch}; model '{self._model}' takes 1 to {self._max_batch}")
        if others not in (-1, batch):
            raise InvalidRequest(f"{declared.what} has a batch of {batch} where an input before it has {others}")
        return batch

    def _check_missing(self, seen: Mapping[str, _Declared]) -> None:
        for name, declared in self._inputs.items():
            if name not in seen and not declared.spec.optional:
                raise InvalidRequest(f"input '{name}' of model '{self._model}' is missing")

    def _explain_inputs(self, names: Sequence[str]) -> None:
        """Raises InvalidRequest for an unknown, repeated or missing input; one of these must be the case."""
        seen: dict[str, _Declared] = {}
        for name in names:
            if name not in self._inputs:
                expected = ", ".join(f"'{input}'" for input in self._inputs) or "none"
                raise InvalidRequest(f"model '{self._model}' has no input '{name[:80]}'; it has {expected}")
            if name in seen:
                raise InvalidRequest(f"input '{name}' is given twice")
            seen[name] = self._inputs[name]
        self._check_missing(seen)

    def _check_outputs(self, head: ModelInferRequest) -> None:
        seen: set[str] = set()
        for output in head.outputs:
            name = output.name
            if name not in self._outputs:
                expected = ", ".join(f"'{output}'" for output in sorted(self._outputs)) or "none"
                raise InvalidRequest(f"model '{self._model}' has no output '{name[:80]}'; it has {expected}")
            if name in seen:
                raise InvalidRequest(f"output '{name}' is requested twice")
            seen.add(name)
            if output.parameters:
                check_tensor_parameters(output.parameters, f"output '{name}'")


def check_request(request: TensorRequest, card: ModelCard) -> None:
    """Check a single request, see RequestChecker.check."""
    RequestChecker(card).check(request)


def _check_raw(declared: _Declared, raw: Buffer, shape: Sequence[int], count: int) -> None:
    kind = declared.kind
    if not kind.size:
        check_bytes(raw, count, declared.what)
        return
    if len(raw) != kind.size * count:
        needed = expected_bytes(kind, count, declared.what)
        raise InvalidRequest(
            f"{declared.what} has {len(raw)} bytes of raw data where {kind.name} of shape {list(shape)} needs {needed}"
        )


_RESERVED: Mapping[str, tuple[str, ...]] = {
    "sequence_id": ("int64_param", "string_param", "uint64_param"),
    "sequence_start": ("bool_param",),
    "sequence_end": ("bool_param",),
    "priority": ("int64_param", "uint64_param"),
    "timeout": ("int64_param", "uint64_param"),
    "triton_enable_empty_final_response": ("bool_param",),
}
"""Request parameters with a defined meaning, and the kinds each may have."""

_REFUSED = frozenset(("headers", "binary_data_output"))
"""Reserved names without a meaning over gRPC."""

_SHARED_MEMORY = frozenset(("shared_memory_region", "shared_memory_offset", "shared_memory_byte_size"))


def check_request_parameters(parameters: Mapping[str, InferParameter]) -> None:
    """Raises InvalidRequest for a parameter without value, or a reserved one that is misused."""
    _check_number_of(parameters, "the request")
    for key, parameter in parameters.items():
        kind = parameter.WhichOneof("parameter_choice")
        if kind is None:
            raise InvalidRequest(f"parameter '{key}' has no value")
        allowed = _RESERVED.get(key)
        if allowed is None:
            if key in _REFUSED or key.startswith("triton_"):
                raise InvalidRequest(f"parameter '{key}' is reserved and cannot be set")
        elif kind not in allowed:
            raise InvalidRequest(f"parameter '{key}' must be given as {' or '.join(allowed)}, not as {kind}")
        elif parameter.int64_param < 0 and key != "sequence_id":
            raise InvalidRequest(f"parameter '{key}' is {parameter.int64_param}; it must not be negative")


def check_tensor_parameters(parameters: Mapping[str, InferParameter], what: str) -> None:
    """Check the parameters of one input or requested output. Raises InvalidRequest, and Unsupported for shared memory."""
    _check_number_of(parameters, what)
    for key, parameter in parameters.items():
        kind = parameter.WhichOneof("parameter_choice")
        if kind is None:
            raise InvalidRequest(f"parameter '{key}' of {what} has no value")
        if key in _SHARED_MEMORY:
            raise Unsupported(f"{what} refers to shared memory, which this server does not read")
        if key == "classification" and (kind != "int64_param" or parameter.int64_param < 1):
            raise InvalidRequest(f"parameter 'classification' of {what} must be a positive int64_param")


def _check_number_of(parameters: Mapping[str, InferParameter], what: str) -> None:
    if len(parameters) > MAX_PARAMETERS:
        raise InvalidRequest(f"{what} has {len(parameters)} parameters; at most {MAX_PARAMETERS} are allowed")


# Responses


def build_response(head: ModelInferResponse, raw_outputs: Sequence[Buffer] = ()) -> list[Buffer]:
    """Return a serialized ModelInferResponse in pieces to be written in order; tensors above 16 KiB are not copied.

    `head` is everything but `raw_output_contents`; `raw_outputs` has one entry per entry of `head.outputs`, or is empty.
    """
    pieces: list[Buffer] = [head.SerializeToString()]
    size = 0
    for raw in raw_outputs:
        size += len(raw)
        pieces += (_RAW_OUTPUT + varint(len(raw)), raw)
    return [b"".join(pieces)] if size <= SMALL_BYTES else pieces


def parse_response(data: Buffer) -> tuple[ModelInferResponse, Sequence[Buffer]]:
    """Undo `build_response`: return the head, and the raw outputs, as views into `data` if that is large.

    Raises EngineError if `data` is no ModelInferResponse.
    """
    try:
        if len(data) > SMALL_BYTES:
            pieces, raw_outputs = _split(memoryview(data), _RAW_OUTPUT_KEY)
            return ModelInferResponse.FromString(b"".join(pieces)), raw_outputs
        head = ModelInferResponse.FromString(data)  # type: ignore[arg-type]  # takes any buffer
    except (DecodeError, InvalidRequest, ValueError, IndexError):
        raise EngineError("the model's response is not a ModelInferResponse") from None
    small = head.raw_output_contents[:]
    del head.raw_output_contents[:]
    return head, small
