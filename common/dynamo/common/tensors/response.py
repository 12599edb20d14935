"""Responses of engines in the form that their requests want: which outputs, classified or not. Tensors are always raw."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

from dynamo.common.errors import EngineError, InvalidRequest
from dynamo.common.model_card import ModelCard
from dynamo.common.process.work import Work, finish
from dynamo.common.tensors.classification import MAX_CLASSES, best_classes
from dynamo.common.tensors.protobuf_wire import delimited, tag
from dynamo.common.tensors.request import TensorRequest, join_response
from dynamo.common.tensors.tensors import (
    LONG_BYTES,
    Array,
    Buffer,
    check_bytes,
    datatype_named,
    element_count,
    expected_bytes,
    to_numpy,
    typed_to_raw,
)
from dynamo.protos.inference_pb2 import ModelInferResponse

_UNCLASSIFIABLE = frozenset(("BYTES", "BOOL", "FP16", "BF16"))

OutputTensor = ModelInferResponse.InferOutputTensor

_MODEL_NAME, _MODEL_VERSION, _ID = (tag(ModelInferResponse, name) for name in ("model_name", "model_version", "id"))

FINAL_RESPONSE = "triton_final_response"
"""The parameter of a response that says whether it is the last of its request."""


class ResponseForm(msgspec.Struct, frozen=True):
    """The form of all responses to one request. Made once per request."""

    wanted: tuple[str, ...]
    """Requested outputs; empty: all. Responses have them in the engine's order."""
    top: Mapping[str, int]
    """Outputs to be classified, each with the number of classes to return."""
    card: ModelCard
    names: bytes
    """Model, version and id, serialized."""
    may_be_slow: bool
    """Whether `is_slow` may be true of a response."""

    @classmethod
    def of(cls, request: TensorRequest, card: ModelCard) -> ResponseForm:
        """Return the form that `request`, which passed its checks, wants."""
        head = request.head
        wanted: tuple[str, ...] = ()
        top: dict[str, int] = {}
        if head.outputs:
            wanted = tuple(output.name for output in head.outputs)
            for output in head.outputs:
                if "classification" in output.parameters:
                    top[output.name] = output.parameters["classification"].int64_param
        version = head.model_version or card.versions[-1]
        fields = (_MODEL_NAME, head.model_name), (_MODEL_VERSION, version), (_ID, head.id)
        names = b"".join([delimited(key, text.encode()) for key, text in fields if text])
        return cls(wanted, top, card, names, bool(top) or any(spec.datatype == "BYTES" for spec in card.outputs))

    def is_slow(self, raw_outputs: Sequence[Buffer]) -> bool:
        """Return whether a response takes so long that it is to be encoded in steps."""
        return bool(self.top) or (self.may_be_slow and sum(map(len, raw_outputs)) > LONG_BYTES)

    def encode(self, head: ModelInferResponse, raw_outputs: Sequence[Buffer] = (), encoded: bytes = b"") -> list[Buffer]:
        """Return a serialized ModelInferResponse in pieces, see `build_response`.

        `head` has outputs (name, datatype, shape), parameters if any, and typed contents if `raw_outputs` is empty. It is
        modified unless `encoded` is given: `head`, serialized, with which `raw_outputs` are known to agree.
        Raises EngineError if the response contradicts itself or the request, InvalidRequest if it cannot be classified as the
        request wants.
        """
        if encoded and self._takes_all(head):
            return join_response(encoded + self.names, raw_outputs)
        head, raws, strings = _checked(head, raw_outputs, encoded)
        if strings or self.top or self.wanted:
            raws = finish(self._complete(head, raws, strings))
        return join_response(head.SerializeToString() + self.names, raws)

    def encode_in_steps(
        self, head: ModelInferResponse, raw_outputs: Sequence[Buffer] = (), encoded: bytes = b""
    ) -> Work[list[Buffer]]:
        """Do the same as `encode`, for what `is_slow`."""
        if encoded and self._takes_all(head):
            return join_response(encoded + self.names, raw_outputs)
        head, raws, strings = _checked(head, raw_outputs, encoded)
        raws = yield from self._complete(head, raws, strings)
        return join_response(head.SerializeToString() + self.names, raws)

    def encode_final(self) -> list[Buffer]:
        """Return the empty response that marks the end of the responses, for clients that want one."""
        head = ModelInferResponse()
        head.parameters[FINAL_RESPONSE].bool_param = True
        return join_response(head.SerializeToString() + self.names)

    def _takes_all(self, head: ModelInferResponse) -> bool:
        """Return whether the outputs are sent as they are."""
        return not self.top and (not self.wanted or all(output.name in self.wanted for output in head.outputs))

    def _complete(
        self, head: ModelInferResponse, raws: Sequence[Buffer], strings: Sequence[tuple[OutputTensor, Buffer]]
    ) -> Work[Sequence[Buffer]]:
        """Check `strings`, keep only the requested outputs in `head`, in the engine's order and classified, and return their
        buffers.
        """
        for output, raw in strings:
            yield from _check_bytes(output, raw)
        if self._takes_all(head):
            return raws
        kept: list[OutputTensor] = []
        kept_raws: list[Buffer] = []
        left = MAX_CLASSES
        for output, raw in zip(head.outputs, raws, strict=True):
            if output.name not in self.wanted:
                continue
            if output.name in self.top:
                rows, shape = self._rows(output, raw)
                left -= math.prod(shape)
                if left < 0:
                    raise InvalidRequest(
                        f"'classification' of output '{output.name}' wants {self.top[output.name]} classes of {rows.shape[1]} "
                        f"for {len(rows)} rows; a response has at most {MAX_CLASSES} classes, in all outputs together"
                    )
                raw = yield from best_classes(rows, shape[-1], self._labels(output.name))
                output = OutputTensor(name=output.name, datatype="BYTES", shape=shape)
            kept.append(OutputTensor.FromString(output.SerializeToString()))  # deleting empties the originals
            kept_raws.append(raw)
        del head.outputs[:]
        head.outputs.extend(kept)
        return kept_raws

    def _rows(self, output: OutputTensor, raw: Buffer) -> tuple[Array, Sequence[int]]:
        """Return the values to be classified, in two dimensions, and the shape of the classes."""
        if output.datatype in _UNCLASSIFIABLE:
            raise InvalidRequest(f"class result not available for output due to unsupported type '{output.datatype}'")
        values = to_numpy(raw, output.datatype, output.shape)
        batched = self.card.max_batch_size > 0 and values.ndim > 0
        rows = values.reshape(values.shape[0], -1) if batched and values.size else values.reshape(1, -1)
        count = min(self.top[output.name], rows.shape[1])
        return rows, (rows.shape[0], count) if batched else (count,)

    def _labels(self, name: str) -> Sequence[str]:
        return next((spec.labels for spec in self.card.outputs if spec.name == name), ())


def _checked(
    head: ModelInferResponse, raw_outputs: Sequence[Buffer], encoded: bytes
) -> tuple[ModelInferResponse, Sequence[Buffer], Sequence[tuple[OutputTensor, Buffer]]]:
    """Return head and raw outputs of a response, without contents in the head, and the BYTES, which are still to be checked.

    Raises EngineError if the response contradicts itself.
    """
    if encoded:
        head = ModelInferResponse.FromString(encoded)
    outputs = head.outputs
    typed_contents = bool(outputs) and not raw_outputs
    raws = [_to_raw(output) for output in outputs] if typed_contents else raw_outputs
    if len(raws) != len(outputs):
        raise EngineError(f"the model responded with {len(raws)} buffers for {len(outputs)} outputs")
    strings: list[tuple[OutputTensor, Buffer]] = []
    for output, raw in zip(outputs, raws, strict=True):  # no comprehension, which is a call more
        if not _check(output, raw):
            strings.append((output, raw))
    if typed_contents:
        for output in outputs:
            output.ClearField("contents")
    return head, raws, strings


def _check(output: OutputTensor, raw: Buffer) -> bool:
    """Return whether `raw` is what datatype and shape say; false for BYTES, where that takes longer. Raises EngineError."""
    try:
        kind = datatype_named(output.datatype)
        count = element_count(output.shape)
        if kind.size and len(raw) != expected_bytes(kind, count):
            raise InvalidRequest(
                f"it has {len(raw)} bytes where {kind.name} of shape {list(output.shape)} needs {kind.size * count}"
            )
    except InvalidRequest as error:
        raise _malformed(output, error) from error
    return kind.size > 0


def _check_bytes(output: OutputTensor, raw: Buffer) -> Work[None]:
    try:
        yield from check_bytes(raw, element_count(output.shape))
    except InvalidRequest as error:
        raise _malformed(output, error) from error


def _malformed(output: OutputTensor, error: InvalidRequest) -> EngineError:
    return EngineError(f"the model responded with a malformed output '{output.name}': {error}")


def _to_raw(output: OutputTensor) -> bytes:
    try:
        return typed_to_raw(output.contents, output.datatype, element_count(output.shape))
    except InvalidRequest as error:
        raise _malformed(output, error) from error
