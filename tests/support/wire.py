"""Protobuf messages of few bytes per part, made by hand."""

from __future__ import annotations

from collections.abc import Callable

from dynamo.common.tensors.protobuf_wire import delimited, tag
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


def text_request(name: str, text: bytes, *, raw: bool) -> bytes:
    """A request with one text, for the language model of the engine echo."""
    tensor = Tensor(name=name, datatype="BYTES", shape=[1]).SerializeToString()
    contents = b"" if raw else delimited(tag(Tensor, "contents"), contents_of("bytes_contents", text))
    element = len(text).to_bytes(4, "little") + text
    last = delimited(tag(pb.ModelInferRequest, "raw_input_contents"), element) if raw else b""
    model = delimited(tag(pb.ModelInferRequest, "model_name"), b"echo-llm")
    return model + delimited(tag(pb.ModelInferRequest, "inputs"), tensor + contents) + last


_MIXED = "a\u00e9\u20ac\U0001f600".encode()
_MESSAGE = b'[{"role":"user","content":"%b"}]'

TEXTS: dict[str, Callable[[], bytes]] = {
    "a raw text": lambda: text_request("text_input", _MIXED * (5 * MIB), raw=True),
    "a typed text": lambda: text_request("text_input", _MIXED * (5 * MIB), raw=False),
    "a raw text within the bound": lambda: text_request("text_input", _MIXED * (16 * MIB // 10), raw=True),
    "a typed text within the bound": lambda: text_request("text_input", _MIXED * (16 * MIB // 10 - 100), raw=False),
    "a raw conversation": lambda: text_request("messages", _MESSAGE % (b"a" * (50 * MIB)), raw=True),
    "a typed conversation": lambda: text_request("messages", _MESSAGE % (b"a" * (50 * MIB)), raw=False),
}
"""Requests for text that take long to parse or to decode."""
