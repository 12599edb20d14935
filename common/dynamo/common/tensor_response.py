"""Responses of engines in the form that their requests want: which outputs, raw or typed, classified or not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from dynamo.common.errors import EngineError, InvalidRequest
from dynamo.common.model_card import ModelCard
from dynamo.common.tensor_request import TensorRequest, build_response
from dynamo.common.tensors import (
    DATATYPES,
    Buffer,
    bf16_to_float32,
    check_bytes,
    datatype_named,
    element_count,
    encode_bytes,
    expected_bytes,
    raw_to_typed,
    to_numpy,
    typed_to_raw,
)
from dynamo.protos.inference_pb2 import ModelInferResponse

OutputTensor = ModelInferResponse.InferOutputTensor

FINAL_RESPONSE = "triton_final_response"
"""The parameter of a response that says whether it is the last of its request."""


class ResponseForm(msgspec.Struct, frozen=True):
    """The form of all responses to one request. Made once per request."""

    model: str
    version: str
    id: str
    wanted: tuple[str, ...]
    """Requested outputs, in the order of the response; empty: all, in the engine's order."""
    typed: bool
    """Outputs go into `contents`. A response with an FP16 or BF16 output, which has no such form, is raw as a whole."""
    top: Mapping[str, int]
    """Outputs to be classified, each with the number of classes to return."""
    card: ModelCard

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
        return cls(head.model_name, version, head.id, wanted, request.is_typed, top, card)

    def encode(self, head: ModelInferResponse, raw_outputs: Sequence[Buffer] = ()) -> list[Buffer]:
        """Return a serialized ModelInferResponse in pieces, see `build_response`.

        `head` has outputs (name, datatype, shape), parameters if any, and typed contents if `raw_outputs` is empty; it is
        modified. Raises EngineError if the response contradicts itself or the request.
        """
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
        head.model_name = self.model
        head.model_version = self.version
        head.id = self.id
        if self.typed and all(DATATYPES[output.datatype].field for output in outputs):
            for output, raw in zip(outputs, raws, strict=True):
                output.contents.CopyFrom(raw_to_typed(raw, output.datatype, element_count(output.shape)))
            return build_response(head)
        return build_response(head, raws)

    def encode_final(self) -> list[Buffer]:
        """Return the empty response that marks the end of the responses, for clients that want one."""
        head = ModelInferResponse(model_name=self.model, model_version=self.version, id=self.id)
        head.parameters[FINAL_RESPONSE].bool_param = True
        return build_response(head)

    def _select(self, head: ModelInferResponse, raws: Sequence[Buffer]) -> list[Buffer]:
        """Keep only the requested outputs in `head`, and return their buffers."""
        if not self.top and [output.name for output in head.outputs] == list(self.wanted):
            return list(raws)
        by_name = {output.name: (output, raw) for output, raw in zip(head.outputs, raws, strict=True)}
        kept: list[OutputTensor] = []
        kept_raws: list[Buffer] = []
        for name in self.wanted:
            if name not in by_name:
                continue  # as Triton does
            output, raw = by_name[name]
            if name in self.top:
                output, raw = self._classify(output, raw)
            kept.append(output)
            kept_raws.append(raw)
        kept = [OutputTensor.FromString(output.SerializeToString()) for output in kept]  # deleting empties the originals
        del head.outputs[:]
        head.outputs.extend(kept)
        return kept_raws

    def _classify(self, output: OutputTensor, raw: Buffer) -> tuple[OutputTensor, bytes]:
        """Return the highest values of each row as BYTES `value:index` or `value:index:label`, best first, ties by index."""
        if output.datatype in ("BYTES", "BOOL"):
            raise InvalidRequest(f"output '{output.name}' is {output.datatype} and cannot be classified")
        values = to_numpy(raw, output.datatype, output.shape)
        if output.datatype == "BF16":
            values = bf16_to_float32(values)
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
