"""Responses of engines in the form that their requests want: which outputs, classified or not. Tensors are always raw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from dynamo.common.errors import EngineError, InvalidRequest
from dynamo.common.model_card import ModelCard
from dynamo.common.protobuf_wire import delimited, tag
from dynamo.common.tensor_request import TensorRequest, join_response
from dynamo.common.tensors import (
    Buffer,
    check_bytes,
    datatype_named,
    element_count,
    encode_bytes,
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
        return cls(wanted, top, card, names)

    def encode(self, head: ModelInferResponse, raw_outputs: Sequence[Buffer] = (), encoded: bytes = b"") -> list[Buffer]:
        """Return a serialized ModelInferResponse in pieces, see `build_response`.

        `head` has outputs (name, datatype, shape), parameters if any, and typed contents if `raw_outputs` is empty. It is
        modified unless `encoded` is given: `head`, serialized, with which `raw_outputs` are known to agree.
        Raises EngineError if the response contradicts itself or the request.
        """
        if encoded:
            if not self.top and (not self.wanted or all(output.name in self.wanted for output in head.outputs)):
                return join_response(encoded + self.names, raw_outputs)
            head = ModelInferResponse.FromString(encoded)
        outputs = head.outputs
        typed_contents = bool(outputs) and not raw_outputs
        raws = [_to_raw(output) for output in outputs] if typed_contents else list(raw_outputs)
        if len(raws) != len(outputs):
            raise EngineError(f"the model responded with {len(raws)} buffers for {len(outputs)} outputs")
        for output, raw in zip(outputs, raws, strict=True):
            _check(output, raw)
        if typed_contents:
            for output in outputs:
                output.ClearField("contents")
        if self.wanted and outputs:
            raws = self._select(head, raws)
        return join_response(head.SerializeToString() + self.names, raws)

    def encode_final(self) -> list[Buffer]:
        """Return the empty response that marks the end of the responses, for clients that want one."""
        head = ModelInferResponse()
        head.parameters[FINAL_RESPONSE].bool_param = True
        return join_response(head.SerializeToString() + self.names)

    def _select(self, head: ModelInferResponse, raws: Sequence[Buffer]) -> list[Buffer]:
        """Keep only the requested outputs in `head`, in the engine's order, and return their buffers."""
        if not self.top and all(output.name in self.wanted for output in head.outputs):
            return list(raws)
        kept: list[OutputTensor] = []
        kept_raws: list[Buffer] = []
        for output, raw in zip(head.outputs, raws, strict=True):
            if output.name in self.wanted:
                classified = self._classify(output, raw) if output.name in self.top else (output, raw)
                kept.append(OutputTensor.FromString(classified[0].SerializeToString()))  # deleting empties the originals
                kept_raws.append(classified[1])
        del head.outputs[:]
        head.outputs.extend(kept)
        return kept_raws

    def _classify(self, output: OutputTensor, raw: Buffer) -> tuple[OutputTensor, bytes]:
        """Return the highest values of each row as BYTES `value:index` or `value:index:label`, best first, ties by index."""
        if output.datatype in _UNCLASSIFIABLE:
            raise InvalidRequest(f"class result not available for output due to unsupported type '{output.datatype}'")
        values = to_numpy(raw, output.datatype, output.shape)
        batched = self.card.max_batch_size > 0 and values.ndim > 0
        rows = values.reshape(values.shape[0], -1) if batched and values.size else values.reshape(1, -1)
        count = min(self.top[output.name], rows.shape[1])
        labels = next((spec.labels for spec in self.card.outputs if spec.name == output.name), ())
        order = np.argsort(-rows.astype(np.float64), axis=1, kind="stable")[:, :count]
        texts = [_class_text(row[index], int(index), labels) for row, best in zip(rows, order, strict=True) for index in best]
        shape = [rows.shape[0], count] if batched else [count]
        return OutputTensor(name=output.name, datatype="BYTES", shape=shape), encode_bytes(texts)


def _class_text(value: np.generic, index: int, labels: Sequence[str]) -> str:
    number = f"{value:f}" if isinstance(value, np.floating) else f"{value}"
    return f"{number}:{index}:{labels[index]}" if index < len(labels) else f"{number}:{index}"


def _check(output: OutputTensor, raw: Buffer) -> None:
    """Raises EngineError unless `raw` is what the output's datatype and shape say."""
    try:
        kind = datatype_named(output.datatype)
        count = element_count(output.shape)
        if not kind.size:
            check_bytes(raw, count)
        elif len(raw) != expected_bytes(kind, count):
            raise InvalidRequest(
                f"it has {len(raw)} bytes where {kind.name} of shape {list(output.shape)} needs {kind.size * count}"
            )
    except InvalidRequest as error:
        raise EngineError(f"the model responded with a malformed output '{output.name}': {error}") from error


def _to_raw(output: OutputTensor) -> bytes:
    try:
        return typed_to_raw(output.contents, output.datatype, element_count(output.shape))
    except InvalidRequest as error:
        raise EngineError(f"the model responded with a malformed output '{output.name}': {error}") from error
