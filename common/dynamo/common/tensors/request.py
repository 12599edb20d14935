"""Parsing and building of tensor requests and responses without copying their tensor data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized
from itertools import accumulate

import msgspec
import numpy as np
from google.protobuf.message import DecodeError

from dynamo.common.errors import EngineError, InvalidRequest, PayloadTooLarge
from dynamo.common.tensors.message_limits import MessageLimits, MessageScanner
from dynamo.common.tensors.protobuf_wire import BYTES, FIXED32, FIXED64, VARINT, delimited, read_varint, tag, varint
from dynamo.common.tensors.tensors import Buffer
from dynamo.protos.inference_pb2 import InferParameter, ModelInferRequest, ModelInferResponse

SEQUENCE_OWNER = "sequence-owner"
"""The header that says whose sequence a request with a `sequence_id` is part of: the name of an API key. No other joins it."""
SEVERAL_OWNERS = "\0"
"""Begins the owner of a request that may be of several keys. No key's name has it."""
MAX_TENSORS = 4096
MAX_PARAMETERS = 1024
_FEW_TENSORS_BYTES = 2 * MAX_TENSORS
"""A message of this size has no more than `MAX_TENSORS` inputs or outputs: each takes two bytes at least."""
_MAX_TOP_FIELDS = 3 * MAX_TENSORS + MAX_PARAMETERS + 64
"""Fields at the top of a message: inputs, outputs, raw tensors, parameters, and a few more."""
SMALL_BYTES = 16 * 1024
"""Up to this size, letting protobuf copy is faster than scanning for the tensors, and one buffer is faster than several."""

_RAW_INPUT = ModelInferRequest.DESCRIPTOR.fields_by_name["raw_input_contents"].number << 3 | BYTES
_MODEL_NAME = tag(ModelInferRequest, "model_name")
_NO_PRIORITY = ModelInferRequest(parameters={"priority": InferParameter(int64_param=0)}).SerializeToString()
"""A message with the priority 0. Appended to a request, it counts: of a parameter that occurs twice, the last one does."""
_RAW_OUTPUT = tag(ModelInferResponse, "raw_output_contents")
_response_scanner = MessageScanner(ModelInferResponse, MessageLimits(max_message_fields=65_536, max_packed_integers=65_536))
"""For a response apart from raw tensors: workers send no others."""
_RAW_OUTPUT_KEY = ModelInferResponse.DESCRIPTOR.fields_by_name["raw_output_contents"].number << 3 | BYTES


class TensorRequest(msgspec.Struct, frozen=True, gc=False):
    """A ModelInferRequest, split so that tensor data stays where it arrived."""

    raw: Buffer
    """The whole serialized message, forwarded unchanged."""
    head: ModelInferRequest
    """Everything but `raw_input_contents`, which is empty here."""
    raw_inputs: Sequence[Buffer]
    """`raw_input_contents`; views into `raw` where that is large."""
    is_known: bool = False
    """Whether `head` is one object for all requests that begin with the same bytes, so that it must not be changed."""

    @classmethod
    def parse(cls, data: Buffer, scanner: MessageScanner | None = None) -> TensorRequest:
        """Parse a serialized ModelInferRequest. Raises InvalidRequest if it is none, PayloadTooLarge if it has too many parts.

        `scanner` checks its parts before they are parsed, if they are large; it is needed for messages of clients, the tensors of
        which are counted, too.
        """
        try:
            if len(data) > SMALL_BYTES:
                pieces, raw_inputs = _split(memoryview(data), _RAW_INPUT)
                if scanner is not None:
                    scanner.check_size(sum(map(len, pieces)))
                rest = data if not raw_inputs and isinstance(data, bytes) else b"".join(pieces)
                if scanner is not None and len(rest) > SMALL_BYTES:
                    scanner.check(rest)
                head = ModelInferRequest.FromString(rest)
                if scanner is not None:
                    check_tensors(head)
                return cls(data, head, raw_inputs)
            head = ModelInferRequest.FromString(data)  # type: ignore[arg-type]  # takes any buffer
        except (DecodeError, ValueError, IndexError):
            raise InvalidRequest("the message is not a ModelInferRequest") from None
        if scanner is not None and len(data) > _FEW_TENSORS_BYTES:
            check_tensors(head)
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

    @classmethod
    def with_room(cls, head: ModelInferRequest, sizes: Sequence[int]) -> tuple[TensorRequest, Iterator[memoryview]]:
        """Return a request with memory for tensors of these sizes, and where each of them is to be written, one after the other.

        The memory is uninitialised, and what lies between tensors is written with them: its first use takes a while.
        """
        keys = [head.SerializeToString(), *(varint(_RAW_INPUT) + varint(size) for size in sizes)]
        message = np.empty(sum(map(len, keys)) + sum(sizes), np.uint8).data  # uninitialised, which no bytearray is
        begins = list(accumulate((len(key) + size for key, size in zip(keys, (0, *sizes), strict=True)), initial=0))
        message[: begins[1]] = keys[0]
        tensors = [message[end - size : end] for end, size in zip(begins[2:], sizes, strict=True)]

        def rooms() -> Iterator[memoryview]:
            for key, begin, tensor in zip(keys[1:], begins[1:], tensors, strict=False):
                message[begin : begin + len(key)] = key
                yield tensor

        return cls(message, head, tensors), rooms()

    def renamed(self, model: str) -> TensorRequest:
        """Return the same request to another model. The message is copied unless it has this name already."""
        if self.head.model_name == model:
            return self
        head = ModelInferRequest()
        head.CopyFrom(self.head)
        head.model_name = model
        # Of a field that occurs twice, the last one counts.
        return TensorRequest(b"".join((self.raw, delimited(_MODEL_NAME, model.encode()))), head, self.raw_inputs)

    def without_priority(self) -> Sequence[Buffer]:
        """Return the pieces of the message of the same request with the model's default priority."""
        return self.raw, _NO_PRIORITY

    @property
    def wants_empty_final_response(self) -> bool:
        """Whether the client wants a last, possibly empty, response that is marked as the last."""
        return _parameter(self.head, "triton_enable_empty_final_response").bool_param

    @property
    def priority(self) -> int:
        """Triton's priority: 1 is the highest, larger numbers are lower, 0 is the model's default."""
        return _whole_number(_parameter(self.head, "priority"))

    @property
    def sequence(self) -> str:
        """The id of the sequence that the request is part of; empty: none."""
        id = _parameter(self.head, "sequence_id")
        return id.string_param or str(_whole_number(id) or "")


def check_tensors(head: ModelInferRequest) -> None:
    """Raise InvalidRequest if a request has more inputs, or wants more outputs, than any may."""
    check_number(head.inputs, "inputs")
    check_number(head.outputs, "outputs")


def check_number(tensors: Sized, what: str) -> None:
    """Raise InvalidRequest if a request has more tensors of a kind than any may."""
    if len(tensors) > MAX_TENSORS:
        raise InvalidRequest(f"the request has {len(tensors)} {what}; at most {MAX_TENSORS} are allowed")


def raw_begin(request: TensorRequest) -> int | None:
    """Return where the only raw tensor of a parsed request begins in its message, if nothing follows it; else None.

    None, too, if the message has an unknown field that is a group: protobuf skips these, and they are not split here.
    """
    if len(request.raw_inputs) != 1:
        return None
    try:
        rest, raws = _split(memoryview(request.raw), _RAW_INPUT)
    except ValueError:
        return None
    return None if rest[-1].nbytes else len(request.raw) - raws[0].nbytes


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


# Responses


def build_response(head: ModelInferResponse, raw_outputs: Sequence[Buffer] = ()) -> list[Buffer]:
    """Return a serialized ModelInferResponse in pieces to be written in order; tensors above 16 KiB are not copied.

    `head` is everything but `raw_output_contents`; `raw_outputs` has one entry per entry of `head.outputs`, or is empty.
    """
    return join_response(head.SerializeToString(), raw_outputs)


def join_response(head: bytes, raw_outputs: Sequence[Buffer] = ()) -> list[Buffer]:
    """Do the same as `build_response` with a head that is serialized already."""
    pieces: list[Buffer] = [head]
    size = 0
    for raw in raw_outputs:
        size += len(raw)
        pieces += (_RAW_OUTPUT + varint(len(raw)), raw)
    return [b"".join(pieces)] if size <= SMALL_BYTES else pieces


def parse_response(data: Buffer) -> tuple[ModelInferResponse, Sequence[Buffer]]:
    """Undo `build_response`: return the head, and the raw outputs, as views into `data` if that is large.

    Raises EngineError if `data` is no ModelInferResponse, or has too many fields or typed elements beside its raw tensors.
    """
    try:
        if len(data) > SMALL_BYTES:
            pieces, raw_outputs = _split(memoryview(data), _RAW_OUTPUT_KEY)
            rest = b"".join(pieces)
            if len(rest) > SMALL_BYTES:
                _response_scanner.check(rest)
            return ModelInferResponse.FromString(rest), raw_outputs
        head = ModelInferResponse.FromString(data)  # type: ignore[arg-type]  # takes any buffer
    except PayloadTooLarge as error:
        raise EngineError(f"the model's response cannot be read: {error}") from None
    except (DecodeError, InvalidRequest, ValueError, IndexError):
        raise EngineError("the model's response is not a ModelInferResponse") from None
    small = head.raw_output_contents[:]
    del head.raw_output_contents[:]
    return head, small
