"""A KServe request in JSON, with or without binary tensors, as the ModelInferRequest that gRPC would carry.

Only the checks that JSON needs are here; all others are shared with gRPC.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Generic, TypeVar, cast

import msgspec

from dynamo.common.errors import InvalidRequest, PayloadTooLarge
from dynamo.common.model_card import ModelCard, ModelKind, TensorSpec
from dynamo.common.process.work import Work, finish
from dynamo.common.tensors.request import MAX_PARAMETERS, TensorRequest, check_number
from dynamo.common.tensors.tensors import (
    MAX_DIMS,
    Buffer,
    DataType,
    datatype_named,
    element_count,
    expected_bytes,
)
from dynamo.frontend.api.http.exchange import Exchange
from dynamo.frontend.api.http.json_body import invalid, scan_body
from dynamo.frontend.api.http.json_scan import scan_steps, too_deep
from dynamo.frontend.api.kserve.messages import TEXT_INPUTS
from dynamo.frontend.api.kserve.rest.bodies import Parts
from dynamo.frontend.api.kserve.rest.elements import LONG_ELEMENTS, to_raw
from dynamo.frontend.api.kserve.rest.json_types import as_boolean, as_string, as_unsigned
from dynamo.frontend.api.kserve.rest.long_arrays import INFER_DEPTH, PIECE_BYTES, SHORT_BYTES, CutBody, cut_arrays
from dynamo.frontend.api.kserve.rest.long_tensors import LongTensor, long_tensor
from dynamo.frontend.config import HttpOptions
from dynamo.protos.inference_pb2 import InferParameter, ModelInferRequest, ModelInferResponse

D = TypeVar("D")
"""The type of `data`."""

Parameters = Mapping[str, Any]
"""Parameters by name; values of any JSON type until `set_parameter` has checked them."""


class InputTensor(msgspec.Struct, Generic[D]):
    """An input with either `data` or, if it follows the JSON in binary, the parameter `binary_data_size`."""

    name: str
    shape: list[int]
    datatype: str
    parameters: dict[str, Any] | None = None
    data: D | msgspec.UnsetType = msgspec.UNSET


class RequestedOutput(msgspec.Struct):
    """A requested output; the parameter `binary_data` requests it in binary."""

    name: str
    parameters: dict[str, Any] | None = None


class InferRequest(msgspec.Struct, Generic[D]):
    """The JSON of a request. Unknown fields are ignored, as in protobuf."""

    inputs: list[InputTensor[D]]
    id: str | None = None
    parameters: dict[str, Any] | None = None
    outputs: list[RequestedOutput] | None = None


_shapes = msgspec.json.Decoder(list[int])
_MAX_SHAPE_CHARS = 16 * 1024
_MAX_INT64 = 2**63 - 1
_DECODED_BYTES = 8 * PIECE_BYTES
"""Numbers of one piece of a tensor, which are there between two steps."""
_COPIED_BYTES = 2**20
"""Copied in one step, below a millisecond."""
_FEW_VALUES = 10_000
_VALUE_BYTES = 32
"""Memory that a decoded value takes, as `json_scan` counts values."""
_SLOW_VALUES = 150_000
"""Python's own decoder takes up to 200 ns for each."""
_decoder = msgspec.json.Decoder(InferRequest[msgspec.Raw])
_anything = msgspec.json.Decoder()


@dataclass(frozen=True, slots=True)
class OutputForm:
    """The outputs that the client wants as binary tensors."""

    usual: bool = False
    """The default of outputs that do not say."""
    own: Mapping[str, bool] = field(default_factory=dict)

    def is_binary(self, output: str) -> bool:
        return self.own.get(output, self.usual)

    def all_binary(self, head: ModelInferResponse) -> bool:
        """Return whether no output is written as JSON."""
        return all(self.is_binary(output.name) for output in head.outputs)


def read_request(
    parts: Parts, card: ModelCard, model: str, version: str, bounds: HttpOptions
) -> Work[tuple[TensorRequest, OutputForm]]:
    """Return the request in a body, and the form of its response. Raises InvalidRequest, PayloadTooLarge."""
    if parts.is_raw:
        head, raw = _raw_request(parts.binary, card, model, version)
        return (yield from assembled(head, [raw], bounds)), OutputForm(usual=True)
    try:
        return (yield from _json_request(parts, model, version, bounds))
    except UnicodeEncodeError:
        raise InvalidRequest("the body has text with half a surrogate pair, which is no character") from None


def _json_request(parts: Parts, model: str, version: str, bounds: HttpOptions) -> Work[tuple[TensorRequest, OutputForm]]:
    is_short = len(parts.json) <= SHORT_BYTES
    body = CutBody(parts.json, {}) if is_short else (yield from cut_arrays(parts.json, INFER_DEPTH))
    values = yield from checked_json(body.text, bounds)
    message = _decode(body.text, values, bounds)
    if not is_short:
        yield _DECODED_BYTES
    if _may_repeat_keys(body.text, message):
        message = _decode_first(body.text, values)
    head = ModelInferRequest(model_name=model, model_version=version, id=message.id or "")
    usual = False
    for key, value in _parameters(message.parameters, "the request") if message.parameters else ():
        if key == "binary_data_output":
            usual = as_boolean(value, key)
        else:
            set_request_parameter(head.parameters[key], key, value)
    check_number(message.inputs, "inputs")
    raws: list[Buffer | LongTensor] = []
    position = 0
    for tensor in message.inputs:
        raw = _input(head, tensor, body, parts.binary[position:])
        if isinstance(raw, LongArray):
            raws.append((yield from long_tensor(raw.data, raw.kind, tensor.shape, raw.what)))
        elif raw is not None:
            position += len(raw) if _size(tensor) is not None else 0
            raws.append(raw)
        if not is_short:
            yield 0
    if position < len(parts.binary):
        raise InvalidRequest(f"unexpected additional input data for model '{model}'")
    own: dict[str, bool] = {}
    if message.outputs:
        check_number(message.outputs, "outputs")
        for output in message.outputs:
            _output(head, output, own)
    request = yield from assembled(head, raws, bounds)
    return request, OutputForm(usual and not message.outputs, own)


def checked_json(text: bytes, bounds: HttpOptions) -> Work[int]:
    """Check a body without its long arrays, before it is decoded. Return how many values it has at most."""
    if len(text) > bounds.max_json_bytes:
        most = bounds.max_json_bytes
        raise PayloadTooLarge(f"the body has {len(text)} bytes beside long arrays of data; at most {most} are allowed")
    values = yield from scan_steps(text, bounds.max_json_depth, bounds.max_json_values)
    if values > _FEW_VALUES:
        yield values * _VALUE_BYTES
    return values


def assembled(head: ModelInferRequest, raws: Sequence[Buffer | LongTensor], bounds: HttpOptions) -> Work[TensorRequest]:
    """Return the request with these tensors. Raises PayloadTooLarge, and InvalidRequest as the pieces of tensors do."""
    buffers = [raw for raw in raws if not isinstance(raw, LongTensor)]
    if len(buffers) == len(raws) and sum(map(len, buffers)) <= _COPIED_BYTES:
        return TensorRequest.build(head, buffers)
    sizes = [raw.size_bytes if isinstance(raw, LongTensor) else len(raw) for raw in raws]
    size = sum(sizes)
    if size > bounds.max_body_bytes:
        raise PayloadTooLarge(f"the tensors have {size} bytes in binary; at most {bounds.max_body_bytes} are allowed")
    yield size
    request, tensors = TensorRequest.with_room(head, sizes)
    for raw, tensor in zip(raws, tensors, strict=True):
        position = 0
        for piece in raw.pieces if isinstance(raw, LongTensor) else _parts_of(raw):
            tensor[position : position + len(piece)] = piece
            position += len(piece)
            yield 0
    return request


def _parts_of(raw: Buffer) -> Iterator[Buffer]:
    view = memoryview(raw)
    for begin in range(0, len(view), _COPIED_BYTES):
        yield view[begin : begin + _COPIED_BYTES]


def _parameters(parameters: Mapping[str, Any], what: str) -> Iterable[tuple[str, Any]]:
    if len(parameters) > MAX_PARAMETERS:
        raise InvalidRequest(f"{what} has {len(parameters)} parameters; at most {MAX_PARAMETERS} are allowed")
    return parameters.items()


def _decode(body: bytes, values: int, bounds: HttpOptions) -> InferRequest[msgspec.Raw] | InferRequest[Any]:
    try:
        decoded: InferRequest[msgspec.Raw] | InferRequest[Any] = _decoder.decode(body)
    except msgspec.ValidationError as error:
        raise invalid(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        loose = _decode_loosely(body, values, error, bounds)
        try:
            return msgspec.convert(loose, InferRequest[Any])
        except msgspec.ValidationError as wrong:
            raise invalid(str(wrong)) from None
    except RecursionError:
        raise too_deep(bounds.max_json_depth) from None
    return decoded


def _may_repeat_keys(text: bytes, message: InferRequest[Any]) -> bool:
    """Return whether an object may have a key twice. Texts that look like keys make it so, too."""
    inputs, outputs = len(message.inputs), len(message.outputs or ())
    most = {
        b'"id"': 1,
        b'"inputs"': 1,
        b'"outputs"': 1,
        b'"data"': inputs,
        b'"shape"': inputs,
        b'"datatype"': inputs,
        b'"name"': inputs + outputs,
        b'"parameters"': 1 + inputs + outputs,
    }
    return any(text.count(key) > number for key, number in most.items())


def _decode_first(body: bytes, values: int) -> InferRequest[Any]:
    """Decode JSON that `_decode` takes; of members with the same key the first counts, as in Triton."""
    _check_slow(values, "members that may be there twice")
    try:
        return msgspec.convert(json.loads(body.decode(), object_pairs_hook=_first_members), InferRequest[Any])
    except msgspec.ValidationError as wrong:
        raise invalid(str(wrong)) from None
    except (ValueError, RecursionError) as wrong:  # inside of data, which was not decoded before
        raise InvalidRequest(f"the body is not JSON: {wrong}") from None


def _first_members(members: list[tuple[str, Any]]) -> dict[str, Any]:
    return dict(reversed(members))


async def read_object(exchange: Exchange, body: bytes) -> dict[str, Any]:
    """Decode a JSON object with any members, in steps if it is long. Raises InvalidRequest."""
    work = object_of(body, exchange.settings.options)
    if len(body) > SHORT_BYTES:
        return await exchange.in_steps(work)
    await scan_body(exchange, body)
    return finish(work)


def object_of(body: bytes, bounds: HttpOptions) -> Work[dict[str, Any]]:
    """Return a JSON object with any members. Raises InvalidRequest."""
    values = yield from checked_json(body, bounds)
    try:
        decoded = _anything.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        decoded = _decode_loosely(body, values, error, bounds)
    except RecursionError:
        raise too_deep(bounds.max_json_depth) from None
    yield 0
    if not isinstance(decoded, dict):
        raise InvalidRequest("the body must be a JSON object")
    return decoded


def _decode_loosely(body: bytes, values: int, problem: Exception, bounds: HttpOptions) -> object:
    """Decode JSON with the words NaN, Infinity and -Infinity as numbers. Raises InvalidRequest, with `problem` for other JSON."""
    if b"NaN" in body or b"Infinity" in body:
        _check_slow(values, "numbers such as NaN")
        try:
            decoded = json.loads(body.decode())
        except ValueError:
            pass
        except RecursionError:
            raise too_deep(bounds.max_json_depth) from None
        else:
            return decoded
    raise InvalidRequest(f"the body is not JSON: {problem}") from None


def _check_slow(values: int, why: str) -> None:
    if values > _SLOW_VALUES:
        raise InvalidRequest(f"the body has too many values beside the data of tensors for one with {why}")


def _size(tensor: InputTensor[Any]) -> object:
    return tensor.parameters.get("binary_data_size") if tensor.parameters else None


@dataclass(frozen=True, slots=True)
class LongArray:
    """Data of a tensor that is to be decoded in steps."""

    data: memoryview | list[Any]
    kind: DataType
    what: str


def _input(head: ModelInferRequest, tensor: InputTensor[Any], body: CutBody, left: memoryview) -> Buffer | LongArray | None:
    """Add an input to `head`, and return its data in raw form; that of a binary tensor is the beginning of `left`.

    Returns None for an input in shared memory.
    """
    what = f"input '{tensor.name[:80]}'"
    shape = _shape(body.restored(tensor.shape), what)
    into = head.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=shape)
    for key, value in _parameters(tensor.parameters, what) if tensor.parameters else ():
        if key != "binary_data_size":
            set_parameter(into.parameters[key], key, value, what)
    size = _size(tensor)
    if size is None:
        if tensor.data is not msgspec.UNSET:
            kind, data = datatype_named(tensor.datatype, what), body.restored(tensor.data)
            if isinstance(data, memoryview) or (isinstance(data, list) and len(data) > LONG_ELEMENTS):
                return LongArray(data, kind, what)
            return to_raw(data, kind, shape, what)
        if "shared_memory_region" in into.parameters:
            return None
        if element_count(shape, what):
            raise InvalidRequest(f"{what} has no data, neither in contents nor in raw_input_contents")
        return b""
    if tensor.data is not msgspec.UNSET:
        raise InvalidRequest(f"{what} has both 'data' and 'binary_data_size'; send one of them")
    size = as_unsigned(size, "binary_data_size")
    if size > len(left):
        missing = size - len(left)
        raise InvalidRequest(f"unexpected size for {what}, expecting {missing} additional bytes for model '{head.model_name}'")
    return left[:size]


def _shape(shape: object, what: str) -> list[int]:
    """Return a shape, as decoded or as text. One of some thousand dimensions is refused later, in the words of the model."""
    if isinstance(shape, memoryview) and len(shape) > _MAX_SHAPE_CHARS:
        raise InvalidRequest(f"{what} has far too many dimensions; at most {MAX_DIMS} are allowed")
    try:
        dims = _shapes.decode(shape) if isinstance(shape, memoryview) else cast(list[int], shape)
    except msgspec.MsgspecError as error:
        raise InvalidRequest(f"{what} has an invalid shape: {error}") from None
    if any(abs(dim) > _MAX_INT64 for dim in dims):
        raise InvalidRequest(f"{what} has a dimension of more than 63 bits")
    return dims


def _output(head: ModelInferRequest, output: RequestedOutput, own: dict[str, bool]) -> None:
    into = head.outputs.add(name=output.name)
    what = f"output '{output.name[:80]}'"
    for key, value in _parameters(output.parameters, what) if output.parameters else ():
        if key == "binary_data":
            own[output.name] = as_boolean(value, key)
        elif key == "classification" and value == 0 and value is not False:
            continue  # over HTTP it means none
        else:
            set_parameter(into.parameters[key], key, value, what)


def set_request_parameter(into: InferParameter, key: str, value: object) -> None:
    """Set a parameter of the request. Raises InvalidRequest for a wrong type or a reserved name."""
    match key:
        case "sequence_id":
            if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
                return set_parameter(into, key, min(value, _MAX_INT64))
            into.string_param = as_string(value, key)
        case "sequence_start" | "sequence_end":
            into.bool_param = as_boolean(value, key)
        case "priority" | "timeout":
            into.int64_param = min(as_unsigned(value, key), _MAX_INT64)
        case _ if key.startswith("triton_"):
            raise InvalidRequest(
                "parameter keys starting with 'triton_' are reserved for Triton usage and should not be specified."
            )
        case _:
            set_model_parameter(into, key, value)


def set_model_parameter(into: InferParameter, key: str, value: object) -> None:
    """Set a parameter of the request that is the model's: an integer beyond 63 bits is a float. Raises InvalidRequest."""
    if isinstance(value, int) and not -_MAX_INT64 - 1 <= value <= _MAX_INT64:
        into.double_param = float(value) if abs(value) < 2**1000 else math.copysign(math.inf, value)
    else:
        set_parameter(into, key, value)


def set_parameter(into: InferParameter, key: str, value: object, what: str = "") -> None:
    """Set a parameter of the request, or of the tensor `what`. Raises InvalidRequest for values that protobuf cannot hold."""
    match value:
        case bool():
            into.bool_param = value
        case int() if -(2**63) <= value < 2**63:
            into.int64_param = value
        case int() if 0 <= value < 2**64:
            into.uint64_param = value
        case float():
            into.double_param = value
        case str():
            into.string_param = value
        case _:
            if not what and not isinstance(value, int):
                raise InvalidRequest(
                    f"parameter '{key[:200]}' has invalid type. It should be either 'int', 'bool', or 'string'.", param=key[:80]
                )
            of = f" of {what}" if what else ""
            why = "a number of at most 64 bits" if isinstance(value, int) else "a string, a number, true or false"
            raise InvalidRequest(f"parameter '{key[:80]}'{of} must be {why}")


# Raw requests

_UNNAMED = "[request id: <id_unknown>]"
"""How Triton's words begin about a request without an id, which a raw one is."""


def _raw_request(data: memoryview, card: ModelCard, model: str, version: str) -> tuple[ModelInferRequest, Buffer | LongTensor]:
    """Return the request whose whole body is the model's only input, described by the card."""
    spec = _only_input(card)
    what = f"input '{spec.name}'"
    kind = datatype_named(spec.datatype, what)
    batch = (1,) if card.max_batch_size > 0 and spec.shape else ()
    own = list(spec.shape[len(batch) :])
    variable = [position for position, dim in enumerate(own) if dim < 0]
    raw: Buffer | LongTensor = data
    if not kind.size:
        if own not in ([1], [-1]):
            raise InvalidRequest(f"{_UNNAMED} For BYTE datatype raw {what}, the model must have input shape [1]")
        own = [1]
        raw = LongTensor(4 + len(data), chain((len(data).to_bytes(4, "little"),), _parts_of(data)))
    elif len(variable) > 1:
        raise InvalidRequest(f"{what} has the shape {own}; a raw request can have one variable dimension")
    elif variable:
        own[variable[0]] = 1
        each = expected_bytes(kind, element_count(own, what), what)
        own[variable[0]] = len(data) // each if each else 0
    if kind.size and (expected := expected_bytes(kind, element_count(own, what), what)) != len(data):
        raise InvalidRequest(
            f"{_UNNAMED} input byte size mismatch for input 'raw_input' for model '{model}'. Expected {expected}, got {len(data)}"
        )
    head = ModelInferRequest(model_name=model, model_version=version)
    head.inputs.add(name=spec.name, datatype=spec.datatype, shape=(*batch, *own))
    return head, raw


def _only_input(card: ModelCard) -> TensorSpec:
    inputs = TEXT_INPUTS if card.kind is ModelKind.LLM and not card.inputs else card.inputs
    needed = inputs if len(inputs) == 1 else tuple(spec for spec in inputs if not spec.optional)
    if len(needed) != 1:
        raise InvalidRequest(
            f"{_UNNAMED} Raw request must only have 1 input (found 1) to be deduced but got {len(inputs)} inputs in "
            f"'{card.name}' model configuration"
        )
    return needed[0]
