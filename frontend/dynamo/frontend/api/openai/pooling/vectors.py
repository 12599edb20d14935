"""Rows of floating-point numbers: read from the response of a model and written as JSON, in steps."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from dynamo.common.errors import EngineError, InvalidRequest
from dynamo.common.process.work import Work
from dynamo.common.tensors.request import parse_response
from dynamo.common.tensors.tensors import FLOATS, Array, Buffer, bf16_to_float32, element_count, to_numpy, typed_to_raw
from dynamo.frontend.api.http.json_pieces import Spliced
from dynamo.frontend.serving.prompt_tokens import tokens_in

Vectors: TypeAlias = NDArray[np.float32]
"""One row per text."""

BRIEF_BYTES = 64 * 1024
"""A response of this size is read and written at once."""
_WRITTEN = 3 << 12
"""Numbers written in one step, of which base64 makes whole groups: about a millisecond."""
_CONVERTED = 1 << 20
"""Numbers converted in one step: a few milliseconds."""
_GROUP_BYTES = 64 * 1024
"""Short rows are sent together."""


def from_tensors(encoded: Buffer, count: int) -> Work[tuple[Vectors, int]]:
    """Decode a ModelInferResponse: a float32 vector per text, shape (count, dimensions), and the number of tokens or 0.

    Raises EngineError if the response does not have that form.
    """
    head, raws = parse_response(encoded)
    vectors: Vectors | None = None
    tokens = tokens_in(head, raws)
    try:
        for index, output in enumerate(head.outputs):
            elements = element_count(output.shape)
            if output.datatype in FLOATS and vectors is None:
                raw = raws[index] if index < len(raws) else typed_to_raw(output.contents, output.datatype, elements)
                vectors = yield from _converted(to_numpy(raw, output.datatype, (elements,)), output.datatype)
                vectors = vectors.reshape(count, -1)
    except (InvalidRequest, ValueError) as error:
        raise EngineError(f"the model's response does not have one vector per text: {error}") from None
    if vectors is None or vectors.shape[1] == 0:
        raise EngineError("the model's response has no vectors")
    return vectors, tokens


def _converted(array: Array, datatype: str) -> Work[Vectors]:
    if datatype == "FP32":
        return array
    yield array.size * 4
    vector = np.empty(array.size, np.float32)
    for begin in range(0, array.size, _CONVERTED):
        part = array[begin : begin + _CONVERTED]
        vector[begin : begin + _CONVERTED] = bf16_to_float32(part) if datatype == "BF16" else part
        yield 0
    return vector


def rows_to_json(
    rows: Iterable[NDArray[np.float32]], describe: Callable[[int, Any], msgspec.Struct], *, packed: bool = False
) -> Work[list[bytes]]:
    """Return the pieces of a JSON array with an object for each row.

    `describe` gets the position of a row and what stands for its numbers: an array or, if `packed`, their base64.
    """
    pieces: list[bytes] = [b"["]
    group: list[bytes] = []
    group_bytes = 0
    for index, row in enumerate(rows):
        numbers: list[bytes] = []
        for begin in range(0, len(row), _WRITTEN):
            text = _numbers(row[begin : begin + _WRITTEN], packed=packed)
            yield len(text)
            numbers.append(b"," + text if begin and not packed else text)
        object_ = Spliced()
        mark = object_.mark((b'"', *numbers, b'"') if packed else (b"[", *numbers, b"]"))
        group += (b"," if index else b"", *object_.pieces(msgspec.json.encode(describe(index, msgspec.Raw(mark)))))
        group_bytes += sum(map(len, numbers))
        if len(numbers) > 1:
            pieces += group
            group, group_bytes = [], 0
        elif group_bytes > _GROUP_BYTES:
            pieces.append(b"".join(group))
            group, group_bytes = [], 0
    return [*pieces, *group, b"]"]


def _numbers(row: NDArray[np.float32], *, packed: bool) -> bytes:
    return base64.b64encode(row.astype("<f4").tobytes()) if packed else msgspec.json.encode(row.tolist())[1:-1]


def with_rows(rows: list[bytes], describe: Callable[[Any], msgspec.Struct]) -> list[bytes]:
    """Return the pieces of a response. `describe` gets what stands for its rows, as `rows_to_json` has written them."""
    response = Spliced()
    return response.pieces(msgspec.json.encode(describe(msgspec.Raw(response.mark(rows)))))
