"""Protobuf messages of few bytes per part, made by hand."""

from __future__ import annotations

from collections.abc import Callable

from dynamo.common.protobuf_wire import delimited, tag
from dynamo.protos import inference_pb2 as pb

Tensor = pb.ModelInferRequest.InferInputTensor
MIB = 2**20
UNKNOWN = bytes((15 << 3, 0))


def tensor_with(contents: bytes) -> bytes:
    return delimited(tag(pb.ModelInferRequest, "inputs"), delimited(tag(Tensor, "contents"), contents))


def contents_of(field: str, payload: bytes) -> bytes:
    return delimited(tag(pb.InferTensorContents, field), payload)


BOMBS: dict[str, Callable[[], bytes]] = {
    "empty inputs": lambda: delimited(tag(pb.ModelInferRequest, "inputs"), b"") * (30 * MIB),
    "unknown fields": lambda: UNKNOWN * (30 * MIB),
    "unknown fields of an input": lambda: delimited(tag(pb.ModelInferRequest, "inputs"), UNKNOWN * (30 * MIB)),
    "empty parameters": lambda: delimited(tag(pb.ModelInferRequest, "parameters"), b"") * (30 * MIB),
    "empty strings": lambda: tensor_with(contents_of("bytes_contents", b"") * (30 * MIB)),
    "packed integers": lambda: tensor_with(contents_of("int_contents", bytes(60 * MIB))),
    "packed booleans": lambda: tensor_with(contents_of("bool_contents", bytes(60 * MIB))),
    "unpacked integers": lambda: tensor_with(b"\x10\x00" * (30 * MIB)),
    "dimensions": lambda: delimited(tag(pb.ModelInferRequest, "inputs"), delimited(tag(Tensor, "shape"), bytes(60 * MIB))),
    "a long name": lambda: delimited(tag(pb.ModelInferRequest, "model_name"), b"a" * (60 * MIB)),
}
