"""Requests and tensors that several families send."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dynamo.protos import inference_pb2 as pb

VALUES: Mapping[str, Sequence[Any]] = {
    "BOOL": (True, False, True),
    "UINT8": (0, 7, 255),
    "UINT16": (0, 7, 65535),
    "UINT32": (0, 7, 2**32 - 1),
    "UINT64": (0, 7, 2**64 - 1),
    "INT8": (-128, 7, 127),
    "INT16": (-32768, 7, 32767),
    "INT32": (-(2**31), 7, 2**31 - 1),
    "INT64": (-(2**63), 7, 2**63 - 1),
    "FP16": (0.5, -1.25, 65504.0),
    "BF16": (0.5, -1.25, 3.0),
    "FP32": (0.1, -1.25, 3e38),
    "FP64": (0.1, -1.25, 1e300),
    "BYTES": ("", "words", "ä€𝄞"),
}
"""Three elements of each datatype, with those at the ends of its range."""

FIELDS = {
    "BOOL": "bool_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
_NUMPY = {
    **{name: np.dtype(name.lower()).newbyteorder("<") for name in VALUES if "INT" in name},
    "BOOL": np.dtype("?"),
    "FP16": np.dtype("<f2"),
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
}


def raw(datatype: str, values: Sequence[Any]) -> bytes:
    """Return elements in raw form."""
    if datatype == "BYTES":
        encoded = [value.encode() if isinstance(value, str) else value for value in values]
        return b"".join(len(value).to_bytes(4, "little") + value for value in encoded)
    if datatype == "BF16":
        return (np.array(values, "<f4").view("<u4") >> 16).astype("<u2").tobytes()
    return np.array(values, _NUMPY[datatype]).tobytes()


def elements(datatype: str, count: int) -> list[Any]:
    """Return `count` elements of a datatype."""
    values = VALUES[datatype]
    return [values[index % len(values)] for index in range(count)]


def request(model: str, *inputs: tuple[str, str, Sequence[int]], version: str = "", id: str = "") -> pb.ModelInferRequest:
    """Return a request with inputs (name, datatype, shape) and no data."""
    message = pb.ModelInferRequest(model_name=model, model_version=version, id=id)
    for name, datatype, shape in inputs:
        message.inputs.add(name=name, datatype=datatype, shape=shape)
    return message


def echo(
    datatype: str, shape: Sequence[int] = (3,), *, typed: bool = False, model: str = "", id: str = ""
) -> pb.ModelInferRequest:
    """Return a complete request to the model that returns its input."""
    message = request(model or f"echo_{datatype.lower()}", ("INPUT0", datatype, shape), id=id)
    values = elements(datatype, int(np.prod(shape, dtype=np.int64)))
    if typed:
        own = [value.encode() if isinstance(value, str) else value for value in values]
        getattr(message.inputs[0].contents, FIELDS[datatype]).extend(own)
    else:
        message.raw_input_contents.append(raw(datatype, values))
    return message


def set_parameter(into: pb.InferParameter, value: object) -> None:
    match value:
        case bool():
            into.bool_param = value
        case int() if value >= 2**63:
            into.uint64_param = value
        case int():
            into.int64_param = value
        case float():
            into.double_param = value
        case str():
            into.string_param = value
