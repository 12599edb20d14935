"""Elements of tensors as JSON writes them, and their raw form.

`data` is flat, or nested according to the shape; a scalar needs no array. A BOOL is true or false, BYTES are text, sent as
UTF-8. FP16 and BF16 are numbers, rounded to the nearest value; Triton refuses them in JSON. A number out of its datatype's range
is refused, not made infinite. NaN, Infinity and -Infinity are read and written as these words, as Triton and Python do, although
they are not valid JSON.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import chain
from typing import Any

import msgspec
import numpy as np
import orjson

from dynamo.common.errors import EngineError, InvalidRequest
from dynamo.common.process.work import Work, finish
from dynamo.common.tensors.tensors import (
    FLOATS,
    MAX_DIMS,
    Array,
    Buffer,
    DataType,
    bf16_to_float32,
    bytes_spans,
    datatype_named,
    element_count,
    encode_bytes,
    expected_bytes,
    float32_to_bf16,
    from_numpy,
    to_numpy,
)
from dynamo.frontend.api.http.json_body import invalid
from dynamo.frontend.api.kserve.rest.long_arrays import PIECE_BYTES
from dynamo.frontend.api.kserve.rest.long_strings import escaped

_BRACKETS = re.compile(rb"[ \t\r\n\[]*")
LONG_ELEMENTS = 1 << 13
"""Elements of any kind that are read or written in one step: a few milliseconds."""


@cache
def _form(datatype: str, depth: int) -> tuple[Any, msgspec.json.Decoder[Any]]:
    """Return the type of `data` nested `depth` deep, and a decoder for it. There are 14 datatypes and 18 depths."""
    form: Any = {"BOOL": bool, "BYTES": str}.get(datatype, float if datatype in FLOATS else int)
    for _ in range(depth):
        form = list[form]
    return form, msgspec.json.Decoder(form)


# From JSON


def to_raw(data: object, kind: DataType, shape: Sequence[int], what: str) -> Buffer:
    """Return the raw form of a tensor's `data`, given as JSON (`msgspec.Raw`) or decoded.

    Raises InvalidRequest, naming the tensor, unless these are as many elements of the datatype as the shape needs.
    """
    return encode(values_of(data, kind, shape, element_count(shape, what), what), kind, what)


def encode(values: list[Any], kind: DataType, what: str, start: int = 0) -> Buffer:
    """Return elements in raw form. `start` is the position of the first of them in the tensor."""
    if not kind.size:
        return encode_bytes(values)
    if kind.name == "BOOL":
        return bytes(values)
    array = _floats(values, kind, what, start) if kind.name in FLOATS else _integers(values, kind, what, start)
    return from_numpy(array, kind.name)[1]


def values_of(data: object, kind: DataType, shape: Sequence[int], count: int, what: str) -> list[Any]:
    """Return the elements as a flat list."""
    depth = depth_of(data, what)
    check_depth(depth, what)
    if depth == 0 and shape:
        raise InvalidRequest(f"{what} has data that is not an array")
    nested = decode(data, kind, depth, what)
    if depth == 0:
        return [nested]
    fits = depth == 1 or (depth == len(shape) and len(nested) == shape[0])
    flat: list[Any] = nested
    for level in range(1, depth):
        fits = fits and all(len(row) == shape[level] for row in flat)
        flat = list(chain.from_iterable(flat))
    if len(flat) != count:
        raise InvalidRequest(f"{what} has {len(flat)} elements in its contents where its shape needs {count}")
    if not fits and count:
        raise other_form(what, shape)
    return flat


def decode(data: object, kind: DataType, depth: int, what: str) -> Any:
    """Decode data nested `depth` deep, given as JSON or as what it was decoded to."""
    form, decoder = _form(kind.name, depth)
    try:
        if not isinstance(data, msgspec.Raw):
            return msgspec.convert(data, form)
        try:
            if kind.name in FLOATS:  # of which orjson takes no kind long
                with contextlib.suppress(orjson.JSONDecodeError):
                    return msgspec.convert(orjson.loads(memoryview(data)), form)
            return decoder.decode(data)
        except msgspec.ValidationError:
            raise
        except msgspec.DecodeError:
            text = bytes(data)
            if b"NaN" not in text and b"Infinity" not in text:
                raise
            return msgspec.convert(json.loads(text), form)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"{what} has data that is not {kind.name}: {invalid(str(error))}") from None
    except (ValueError, RecursionError) as error:
        raise no_json(what, str(error)) from None


def other_form(what: str, shape: Sequence[int]) -> InvalidRequest:
    return InvalidRequest(f"{what} has nested data whose form is not the shape {list(shape)}")


def no_json(what: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"{what} has data that is not JSON: {why}")


def depth_of(data: object, what: str) -> int:
    if isinstance(data, msgspec.Raw | memoryview):
        text = memoryview(data)[:PIECE_BYTES]
        match = _BRACKETS.match(text)
        end = match.end() if match else 0
        if end == PIECE_BYTES:
            raise no_json(what, f"it begins with {PIECE_BYTES} bytes of white space and brackets")
        return bytes(text[:end]).count(b"[")
    depth = 0
    while isinstance(data, list):
        depth += 1
        data = data[0] if data else None
    return depth


def check_depth(depth: int, what: str) -> None:
    if depth > max(1, MAX_DIMS):
        raise InvalidRequest(f"{what} has data nested {depth} deep; at most {MAX_DIMS} is allowed")


def _integers(values: list[int], kind: DataType, what: str, start: int) -> Array:
    limits = np.iinfo(kind.dtype)
    try:
        array = np.array(values, np.uint64 if kind.name == "UINT64" else np.int64)
    except OverflowError:
        position = next(position for position, value in enumerate(values) if not limits.min <= value <= limits.max)
        raise _outside(what, str(values[position]), start + position, kind) from None
    if kind.size < 8:
        outside = (array < limits.min) | (array > limits.max)
        if outside.any():
            position = int(outside.argmax())
            raise _outside(what, str(array[position]), start + position, kind)
    return array.astype(kind.dtype, copy=False)


def _floats(values: list[float], kind: DataType, what: str, start: int) -> Array:
    array = np.array(values, np.float64)
    if kind.name == "FP64":
        return array
    with np.errstate(over="ignore"):
        narrow: Array = array.astype(np.float16 if kind.name == "FP16" else np.float32)
    rounded: Array = narrow
    if kind.name == "BF16":
        rounded = float32_to_bf16(narrow)
        narrow = bf16_to_float32(rounded)
    outside = np.isinf(narrow) & np.isfinite(array)
    if outside.any():
        position = int(outside.argmax())
        raise _outside(what, str(array[position]), start + position, kind)
    return rounded


def _outside(what: str, value: str, position: int, kind: DataType) -> InvalidRequest:
    shown = value if len(value) <= 40 else value[:39] + "…"
    return InvalidRequest(f"{what} has the value {shown} at {position}, outside the range of {kind.name}")


# To JSON


def to_json(raw: Buffer, datatype: str, shape: Sequence[int], what: str) -> bytes:
    """Return a raw tensor as a flat JSON array.

    Raises EngineError if it does not match its datatype and shape, InvalidRequest for BYTES that are not UTF-8.
    """
    kind, count = _checked(raw, datatype, shape, what)
    if kind.size and count <= _STEP_ELEMENTS:
        return _numbers(raw, kind, count)
    return b"".join(finish(json_pieces(raw, datatype, shape, what)))


def json_pieces(raw: Buffer, datatype: str, shape: Sequence[int], what: str) -> Work[list[bytes]]:
    """Return a raw tensor as a flat JSON array in pieces; the first and the last are the brackets. Raises as `to_json` does."""
    kind, count = _checked(raw, datatype, shape, what)
    written = _numbers_of(raw, kind, count) if kind.size else _strings_of(raw, count, what)
    texts = [b"["]
    for text in written:
        yield len(text)
        texts.append(text)
    texts.append(b"]")
    return texts


def _checked(raw: Buffer, datatype: str, shape: Sequence[int], what: str) -> tuple[DataType, int]:
    """Return datatype and number of elements of a tensor. Raises EngineError if it does not have the size that these need."""
    try:
        kind, count = datatype_named(datatype, what), element_count(shape, what)
        needed = expected_bytes(kind, count, what)
    except InvalidRequest as error:
        raise _malformed(error) from error
    if kind.size and len(raw) != needed:
        raise EngineError(
            f"the model responded with a malformed tensor: {what} has {len(raw)} bytes where {kind.name} of shape {list(shape)}"
            f" needs {needed}"
        )
    return kind, count


def _malformed(error: InvalidRequest) -> EngineError:
    return EngineError(f"the model responded with a malformed tensor: {error}")


_STEP_ELEMENTS = 1 << 14
"""Numbers that are written in one step: about a millisecond."""


def _numbers_of(raw: Buffer, kind: DataType, count: int) -> Iterator[bytes]:
    """Yield the numbers of a tensor, with commas."""
    view = memoryview(raw)
    for start in range(0, count, _STEP_ELEMENTS):
        elements = min(_STEP_ELEMENTS, count - start)
        text = _numbers(view[start * kind.size : (start + elements) * kind.size], kind, elements)[1:-1]
        yield b"," + text if start else text


def _strings_of(raw: Buffer, count: int, what: str) -> Iterator[bytes]:
    """Yield the elements of BYTES, with commas."""
    view = memoryview(raw)
    group: list[bytes] = []
    position = group_bytes = 0
    for begin, end in _spans_of(raw, count, what):
        is_long = end - begin > PIECE_BYTES
        if is_long or len(group) == LONG_ELEMENTS or group_bytes > PIECE_BYTES:
            yield _strings(group, what, position)
            position += len(group)
            group, group_bytes = [], 0
        if is_long:
            yield b"," if position else b""
            yield from _long_string(view[begin:end], what, position)
            position += 1
        else:
            group.append(bytes(view[begin:end]))
            group_bytes += end - begin
    yield _strings(group, what, position)


def _strings(elements: Sequence[bytes], what: str, start: int) -> bytes:
    text = orjson.dumps(_texts(elements, what, start))[1:-1]
    return b"," + text if start and text else text


def _spans_of(raw: Buffer, count: int, what: str) -> Iterator[tuple[int, int]]:
    try:
        yield from bytes_spans(raw, count, what)
    except InvalidRequest as error:
        raise _malformed(error) from error


def _long_string(element: Buffer, what: str, position: int) -> Iterator[bytes]:
    try:
        yield from escaped(element)
    except UnicodeDecodeError:
        raise _no_text(what, position) from None


def _numbers(raw: Buffer, kind: DataType, count: int) -> bytes:
    """Return some numbers as a JSON array."""
    array: Array = to_numpy(raw, kind.name, (count,)) if kind.name == "BOOL" else np.ndarray((count,), kind.dtype, raw)
    if kind.name == "BF16":
        array = bf16_to_float32(array)
    text = orjson.dumps(array, option=orjson.OPT_SERIALIZE_NUMPY)
    return _with_words(text, array) if kind.name in FLOATS else text


def _texts(elements: Sequence[bytes], what: str, start: int) -> list[str]:
    try:
        return [element.decode() for element in elements]
    except UnicodeDecodeError:
        position = next(position for position, element in enumerate(elements) if not _is_text(element))
        raise _no_text(what, start + position) from None


def _no_text(what: str, position: int) -> InvalidRequest:
    return InvalidRequest(f"{what} is not UTF-8 at element {position}; request it with 'binary_data'")


def _is_text(element: bytes) -> bool:
    try:
        element.decode()
    except UnicodeDecodeError:
        return False
    return True


def _with_words(text: bytes, array: Array) -> bytes:
    """Return `text` with the `null` of each number that is not finite replaced by its word."""
    odd = array[~np.isfinite(array)]
    if not odd.size:
        return text
    words = [number_word(value) for value in odd.tolist()]
    return b"".join(chain.from_iterable(zip(text.split(b"null"), [*words, b""], strict=True)))


def number_word(value: float) -> bytes:
    """Return the word for a number that is not finite."""
    return b"NaN" if value != value else b"Infinity" if value > 0 else b"-Infinity"
