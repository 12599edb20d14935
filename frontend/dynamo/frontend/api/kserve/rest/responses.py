"""A ModelInferResponse as JSON, followed by the tensors that were requested in binary."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import orjson

from dynamo.common.errors import EngineError, InvalidRequest
from dynamo.common.http.served import Header
from dynamo.common.process.work import Work
from dynamo.common.tensors.request import parse_response
from dynamo.common.tensors.tensors import Buffer, element_count, typed_to_raw
from dynamo.frontend.api.http.exchange import JSON, Exchange
from dynamo.frontend.api.http.json_pieces import Spliced
from dynamo.frontend.api.kserve.rest.bodies import accepted_encoding, compress
from dynamo.frontend.api.kserve.rest.elements import json_pieces, number_word, to_json
from dynamo.frontend.api.kserve.rest.long_arrays import SHORT_BYTES
from dynamo.frontend.api.kserve.rest.requests import OutputForm
from dynamo.protos.inference_pb2 import InferParameter, ModelInferResponse

OutputTensor = ModelInferResponse.InferOutputTensor
_OCTETS = (b"content-type", b"application/octet-stream")
_JSON_LENGTH = b"inference-header-content-length"
_BRIEF_BYTES = 4096
"""Tensors up to this size are written together with the rest, however many there are."""
_VARIES = (b"vary", b"Accept-Encoding")


@dataclass(frozen=True, slots=True)
class ModelResponse:
    """A parsed response of a model; large tensors are views into the received bytes."""

    head: ModelInferResponse
    raws: list[Buffer]
    """The raw form of each output."""

    @classmethod
    def parse(cls, data: Buffer) -> ModelResponse:
        """Parse a serialized ModelInferResponse. Raises EngineError if it contradicts itself."""
        head, raws = parse_response(data)
        if len(raws) == len(head.outputs):
            return cls(head, list(raws))
        if raws:
            raise EngineError(f"the model responded with {len(raws)} buffers for {len(head.outputs)} outputs")
        return cls(head, [_typed(output) for output in head.outputs])

    def fields(self) -> dict[str, object]:
        """Return the fields that responses of all forms begin with."""
        head = self.head
        named = {"id": head.id} if head.id else {}
        return {**named, "model_name": head.model_name, "model_version": head.model_version}


def _typed(output: OutputTensor) -> bytes:
    try:
        return typed_to_raw(output.contents, output.datatype, element_count(output.shape))
    except InvalidRequest as error:
        raise EngineError(f"the model responded with a malformed output '{output.name}': {error}") from error


def write_response(
    response: ModelResponse, form: OutputForm, elsewhere: Collection[str] = (), long: Spliced | None = None
) -> Work[tuple[list[bytes], list[Buffer]]]:
    """Return the JSON, and the binary tensors that follow it. Raises InvalidRequest for BYTES that JSON cannot hold.

    `elsewhere` are the outputs whose data is not in the response. A response above `SHORT_BYTES` is put together in `long`.
    """
    binary: list[Buffer] = []
    outputs: list[dict[str, object]] = []
    for output, raw in zip(response.head.outputs, response.raws, strict=True):
        described: dict[str, object] = {"name": output.name, "datatype": output.datatype, "shape": list(output.shape)}
        parameters = parameters_to_json(output.parameters)
        if output.name in elsewhere:
            pass
        elif form.is_binary(output.name):
            parameters["binary_data_size"] = len(raw)
            binary.append(raw)
        else:
            described["data"] = yield from write_elements(output, raw, long)
        if parameters:
            described["parameters"] = parameters
        outputs.append(described)
    fields = response.fields()
    if response.head.parameters:
        fields["parameters"] = parameters_to_json(response.head.parameters)
    text = orjson.dumps({**fields, "outputs": outputs})
    return [text] if long is None else long.pieces(text), binary


def write_elements(output: OutputTensor, raw: Buffer, long: Spliced | None, *, as_scalar: bool = False) -> Work[orjson.Fragment]:
    """Return what stands for the elements of an output in JSON; `as_scalar`: without brackets. Raises as `to_json` does."""
    what = f"output '{output.name}'"
    if long is None or len(raw) <= SHORT_BYTES:
        text = to_json(raw, output.datatype, output.shape, what)
        text = text[1:-1] if as_scalar else text
        if long is None:
            return orjson.Fragment(text)
        yield len(text)
        return orjson.Fragment(text if len(raw) <= _BRIEF_BYTES else long.mark([text]))
    pieces = yield from json_pieces(raw, output.datatype, output.shape, what)
    return orjson.Fragment(long.mark(pieces[1:-1] if as_scalar else pieces))


async def send_response(exchange: Exchange, text: Sequence[bytes], binary: Sequence[Buffer], *, held_bytes: int = 0) -> None:
    """Send `text` and the binary tensors after it, compressed if the client accepts that.

    `held_bytes` of the text count already.
    """
    pieces: list[Buffer] = [*text, *binary]
    headers: tuple[Header, ...] = (JSON,)
    if binary:
        headers = (_OCTETS, (_JSON_LENGTH, b"%d" % sum(map(len, text))))
    if encoding := accepted_encoding(exchange.headers.get("accept-encoding", "")):
        headers = (*headers, _VARIES)
        compressed = await compress(pieces, encoding, exchange.settings.offload)
        if compressed is not None:
            pieces, headers, held_bytes = compressed, (*headers, (b"content-encoding", encoding.encode())), 0
    if len(pieces) == 1:
        await exchange.respond(bytes(pieces[0]), 200, headers)
    else:
        await exchange.respond_in_pieces(pieces, headers, held_bytes=held_bytes)


def parameters_to_json(parameters: Mapping[str, InferParameter]) -> dict[str, object]:
    fields: dict[str, object] = {}
    for key, parameter in parameters.items():
        kind = parameter.WhichOneof("parameter_choice")
        if kind is not None:
            value = getattr(parameter, kind)
            is_odd = kind == "double_param" and not math.isfinite(value)
            fields[key] = orjson.Fragment(number_word(value)) if is_odd else value
    return fields
