"""A KServe request in JSON, with or without binary tensors, as the ModelInferRequest that gRPC would carry.

Only the checks that JSON needs are here; all others are shared with gRPC.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import msgspec

from dynamo.common.errors import InvalidRequest
from dynamo.common.model_card import ModelCard, ModelKind, TensorSpec
from dynamo.common.tensor_request import MAX_TENSORS, TensorRequest
from dynamo.common.tensors import Buffer, datatype_named, element_count, encode_bytes, expected_bytes
from dynamo.frontend.api.http.exchange import Exchange
from dynamo.frontend.api.http.json_body import invalid
from dynamo.frontend.api.http.json_scan import check_json, scan_json
from dynamo.frontend.api.kserve.messages import TEXT_INPUTS
from dynamo.frontend.api.kserve.rest.bodies import Parts
from dynamo.frontend.api.kserve.rest.elements import to_raw
from dynamo.frontend.api.kserve.rest.json_types import as_boolean, as_string, as_unsigned
from dynamo.frontend.api.kserve.rest.long_arrays import cut_arrays
from dynamo.protos.inference_pb2 import InferParameter, ModelInferRequest, ModelInferResponse

D = TypeVar("D")
"""The type of `data`."""
T = TypeVar("T")

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


_MAX_INT64 = 2**63 - 1
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
    parts: Parts, card: ModelCard, model: str, version: str, max_depth: int, max_values: int = 1_000_000
) -> tuple[TensorRequest, OutputForm]:
    """Return the request in a body, and the form of its response. Raises InvalidRequest.

    `max_values` bounds the JSON apart from long arrays of data, as in `json_scan`. Long arrays take time: they belong in a
    thread.
    """
    if parts.is_raw:
        return _raw_request(parts.binary, card, model, version), OutputForm(usual=True)
    try:
        return _json_request(parts, model, version, max_depth, max_values)
    except UnicodeEncodeError:
        raise InvalidRequest("the body has text with half a surrogate pair, which is no character") from None


def _json_request(parts: Parts, model: str, version: str, max_depth: int, max_values: int) -> tuple[TensorRequest, OutputForm]:
    body = cut_arrays(parts.json)
    check_json(body.text, max_depth=max_depth, max_values=max_values)
    message = _decode(body.text, max_depth)
    if _may_repeat_keys(body.text, message):
        message = _decode_first(body.text)
    head = ModelInferRequest(model_name=model, model_version=version, id=message.id or "")
    usual = False
    for key, value in (message.parameters or {}).items():
        if key == "binary_data_output":
            usual = as_boolean(value, key)
        else:
            set_request_parameter(head.parameters[key], key, value)
    if len(message.inputs) > MAX_TENSORS:
        raise InvalidRequest(f"the request has {len(message.inputs)} inputs; at most {MAX_TENSORS} are allowed")
    raws: list[Buffer] = []
    position = 0
    for tensor in message.inputs:
        raw = _input(head, tensor, body.arrays, parts.binary[position:])
        position += len(raw) if raw is not None and _size(tensor) is not None else 0
        if raw is not None:
            raws.append(raw)
    if position < len(parts.binary):
        raise InvalidRequest(f"unexpected additional input data for model '{model}'")
    own: dict[str, bool] = {}
    for output in message.outputs or ():
        _output(head, output, own)
    return TensorRequest.build(head, raws), OutputForm(usual and not message.outputs, own)


def _decode(body: bytes, max_depth: int) -> InferRequest[msgspec.Raw] | InferRequest[Any]:
    try:
        decoded: InferRequest[msgspec.Raw] | InferRequest[Any] = _decoder.decode(body)
    except msgspec.ValidationError as error:
        raise invalid(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        loose = _decode_loosely(body, error, max_depth)
        try:
            return msgspec.convert(loose, InferRequest[Any])
        except msgspec.ValidationError as wrong:
            raise invalid(str(wrong)) from None
    except RecursionError:
        raise _too_deep(max_depth) from None
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


def _decode_first(body: bytes) -> InferRequest[Any]:
    """Decode JSON that `_decode` takes; of members with the same key the first counts, as in Triton."""
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
    options = exchange.settings.options
    await scan_json(body, max_depth=options.max_json_depth, max_values=options.max_json_values)
    return decode_object(body, options.max_json_depth)


def decode_object(body: bytes, max_depth: int) -> dict[str, Any]:
    """Decode a JSON object with any members, which was scanned. Raises InvalidRequest."""
    try:
        decoded = _anything.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        decoded = _decode_loosely(body, error, max_depth)
    except RecursionError:
        raise _too_deep(max_depth) from None
    if not isinstance(decoded, dict):
        raise InvalidRequest("the body must be a JSON object")
    return decoded


def _decode_loosely(body: bytes, problem: Exception, max_depth: int) -> object:
    """Decode JSON with the words NaN, Infinity and -Infinity as numbers. Raises InvalidRequest, with `problem` for other JSON."""
    if b"NaN" in body or b"Infinity" in body:
        try:
            decoded = json.loads(body.decode())
        except ValueError:
            pass
        except RecursionError:
            raise _too_deep(max_depth) from None
        else:
            return decoded
    raise InvalidRequest(f"the body is not JSON: {problem}") from None


def _too_deep(max_depth: int) -> InvalidRequest:
    return InvalidRequest(f"the body nests arrays and objects deeper than {max_depth} levels")


def _size(tensor: InputTensor[Any]) -> object:
    return tensor.parameters.get("binary_data_size") if tensor.parameters else None


def _input(
    head: ModelInferRequest, tensor: InputTensor[Any], arrays: Mapping[bytes, memoryview], left: memoryview
) -> Buffer | None:
    """Add an input to `head`, and return its data in raw form; that of a binary tensor is the beginning of `left`.

    Returns None for an input in shared memory.
    """
    what = f"input '{tensor.name[:80]}'"
    if any(abs(dim) > _MAX_INT64 for dim in tensor.shape):
        raise InvalidRequest(f"{what} has a dimension of more than 63 bits")
    into = head.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
    for key, value in (tensor.parameters or {}).items():
        if key != "binary_data_size":
            set_parameter(into.parameters[key], key, value, what)
    size = _size(tensor)
    if size is None:
        if tensor.data is not msgspec.UNSET:
            return to_raw(_uncut(tensor.data, arrays), datatype_named(tensor.datatype, what), tensor.shape, what)
        if "shared_memory_region" in into.parameters:
            return None
        if element_count(tensor.shape, what):
            raise InvalidRequest(f"{what} has no data, neither in contents nor in raw_input_contents")
        return b""
    if tensor.data is not msgspec.UNSET:
        raise InvalidRequest(f"{what} has both 'data' and 'binary_data_size'; send one of them")
    size = as_unsigned(size, "binary_data_size")
    if size > len(left):
        missing = size - len(left)
        raise InvalidRequest(f"unexpected size for {what}, expecting {missing} additional bytes for model '{head.model_name}'")
    return left[:size]


def _uncut(data: object, arrays: Mapping[bytes, memoryview]) -> object:
    """Return the long array that was cut out, if `data` stands in its place."""
    if not arrays:
        return data
    text = bytes(data) if isinstance(data, msgspec.Raw) else str(data).encode()
    return arrays.get(text, data)


def _output(head: ModelInferRequest, output: RequestedOutput, own: dict[str, bool]) -> None:
    into = head.outputs.add(name=output.name)
    what = f"output '{output.name[:80]}'"
    for key, value in (output.parameters or {}).items():
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
        case _ if isinstance(value, int) and not -_MAX_INT64 - 1 <= value <= _MAX_INT64:
            into.double_param = float(value) if abs(value) < 2**1000 else math.copysign(math.inf, value)
        case _:
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


def _raw_request(data: memoryview, card: ModelCard, model: str, version: str) -> TensorRequest:
    """Return the request whose whole body is the model's only input, described by the card."""
    spec = _only_input(card)
    what = f"input '{spec.name}'"
    kind = datatype_named(spec.datatype, what)
    batch = (1,) if card.max_batch_size > 0 and spec.shape else ()
    own = list(spec.shape[len(batch) :])
    variable = [position for position, dim in enumerate(own) if dim < 0]
    raw: Buffer = data
    if not kind.size:
        if own not in ([1], [-1]):
            raise InvalidRequest(f"{_UNNAMED} For BYTE datatype raw {what}, the model must have input shape [1]")
        own = [1]
        raw = encode_bytes([bytes(data)])
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
    return TensorRequest.build(head, [raw])


def _only_input(card: ModelCard) -> TensorSpec:
    inputs = TEXT_INPUTS if card.kind is ModelKind.LLM and not card.inputs else card.inputs
    needed = inputs if len(inputs) == 1 else tuple(spec for spec in inputs if not spec.optional)
    if len(needed) != 1:
        raise InvalidRequest(
            f"{_UNNAMED} Raw request must only have 1 input (found 1) to be deduced but got {len(inputs)} inputs in "
            f"'{card.name}' model configuration"
        )
    return needed[0]
