"""Elements of tensors as JSON writes them, and their raw form.

`data` is flat, or nested according to the shape; a scalar needs no array. A BOOL is true, false, 1 or 0, BYTES are text, sent as
UTF-8. FP16 and BF16 are numbers, rounded to the nearest value; Triton refuses them in JSON. A number out of its datatype's range
is refused, not made infinite. NaN, Infinity and -Infinity are read and written as these words, as Triton and Python do, although
they are not valid JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import chain
from typing import Annotated, Any

import msgspec
import numpy as np
import orjson

from dynamo.common.errors import EngineError, InvalidRequest
from dynamo.common.tensors import (
    MAX_DIMS,
    Array,
    Buffer,
    DataType,
    bf16_to_float32,
    datatype_named,
    decode_bytes,
    element_count,
    encode_bytes,
    float32_to_bf16,
    from_numpy,
    to_numpy,
)
from dynamo.frontend.api.http.json_body import invalid
from dynamo.frontend.api.kserve.rest.long_arrays import pieces

_BRACKETS = re.compile(rb"[ \t\r\n\[]*")
_FLAG = bool | Annotated[int, msgspec.Meta(ge=0, le=1)]


@cache
def _form(datatype: str, depth: int) -> tuple[Any, msgspec.json.Decoder[Any]]:
    """Return the type of `data` nested `depth` deep, and a decoder for it. There are 14 datatypes and 18 depths."""
    form: Any = {"BOOL": _FLAG, "BYTES": str}.get(datatype, float if datatype in _FLOATS else int)
    for _ in range(depth):
        form = list[form]
    return form, msgspec.json.Decoder(form)


_FLOATS = frozenset(("FP16", "BF16", "FP32", "FP64"))


# From JSON


def to_raw(data: object, kind: DataType, shape: Sequence[int], what: str) -> Buffer:
    """Return the raw form of a tensor's `data`, given as JSON (`msgspec.Raw`) or decoded.

    Raises InvalidRequest, naming the tensor, unless these are as many elements of the datatype as the shape needs.
    """
    count = element_count(shape, what)
    if isinstance(data, memoryview):
        return _long_to_raw(data, kind, shape, count, what)
    return _encode(_values(data, kind, shape, count, what), kind, what)


def _encode(values: list[Any], kind: DataType, what: str, start: int = 0) -> Buffer:
    """Return elements in raw form. `start` is the position of the first of them in the tensor."""
    if not kind.size:
        return encode_bytes(values)
    if kind.name == "BOOL":
        return bytes(values)
    array = _floats(values, kind, what, start) if kind.name in _FLOATS else _integers(values, kind, what, start)
    return from_numpy(array, kind.name)[1]


def _long_to_raw(array: memoryview, kind: DataType, shape: Sequence[int], count: int, what: str) -> bytes:
    """Do what `to_raw` does in many small steps, between which other threads run. `array` is JSON."""
    depth = _depth(array)
    if depth > max(1, MAX_DIMS):
        raise InvalidRequest(f"{what} has data nested {depth} deep; at most {MAX_DIMS} is allowed")
    raws: list[Buffer] = []
    total = 0
    nested = _Nested(kind, shape, what)
    for values in nested.values(array, depth, shape if depth > 1 else ()):
        raws.append(_encode(values, kind, what, total))
        total += len(values)
        if total > count:
            raise InvalidRequest(f"{what} has more elements in its contents than the {count} that its shape needs")
    if total != count:
        raise InvalidRequest(f"{what} has {total} elements in its contents where its shape needs {count}")
    if count and not (nested.fits and depth in (1, len(shape))):
        raise _other_form(what, shape)
    return b"".join(raws)


class _Nested:
    """Decodes a long array in pieces."""

    def __init__(self, kind: DataType, shape: Sequence[int], what: str) -> None:
        self._kind = kind
        self._shape = shape
        self._what = what
        self.fits = True
        """Whether all arrays that were decoded have the lengths that the shape says."""

    def values(self, array: memoryview, depth: int, shape: Sequence[int]) -> Iterator[list[Any]]:
        """Yield the elements, flat. `shape` is that of the array; empty: any number of elements."""
        length = 0
        for piece, is_long in pieces(array):
            if is_long and depth > 1:
                row = bytes(piece).strip()
                if not (row.startswith(b"[") and row.endswith(b"]")):
                    raise _no_json(self._what, "an array was expected")
                yield from self.values(memoryview(row), depth - 1, shape[1:])
                length += 1
                continue
            rows = _decode(msgspec.Raw(b"[" + bytes(piece) + b"]"), self._kind, depth, self._what)
            if not rows and length:
                raise _no_json(self._what, "trailing comma in array")
            length += len(rows)
            if shape and length > shape[0]:
                raise _other_form(self._what, self._shape)
            for level in range(1, depth):
                if level < len(shape):
                    self.fits = self.fits and all(len(row) == shape[level] for row in rows)
                rows = list(chain.from_iterable(rows))
            yield rows
        self.fits = self.fits and (not shape or length == shape[0])


def _values(data: object, kind: DataType, shape: Sequence[int], count: int, what: str) -> list[Any]:
    """Return the elements as a flat list."""
    depth = _depth(data)
    if depth > max(1, MAX_DIMS):
        raise InvalidRequest(f"{what} has data nested {depth} deep; at most {MAX_DIMS} is allowed")
    if depth == 0 and shape:
        raise InvalidRequest(f"{what} has data that is not an array")
    nested = _decode(data, kind, depth, what)
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
        raise _other_form(what, shape)
    return flat


def _decode(data: object, kind: DataType, depth: int, what: str) -> Any:
    """Decode data nested `depth` deep, given as JSON or as what it was decoded to."""
    form, decoder = _form(kind.name, depth)
    try:
        if not isinstance(data, msgspec.Raw):
            return msgspec.convert(data, form)
        try:
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
        raise _no_json(what, str(error)) from None


def _other_form(what: str, shape: Sequence[int]) -> InvalidRequest:
    return InvalidRequest(f"{what} has nested data whose form is not the shape {list(shape)}")


def _no_json(what: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"{what} has data that is not JSON: {why}")


def _depth(data: object) -> int:
    if isinstance(data, msgspec.Raw | memoryview):
        text = memoryview(data)
        match = _BRACKETS.match(text)
        return bytes(text[: match.end()]).count(b"[") if match else 0
    depth = 0
    while isinstance(data, list):
        depth += 1
        data = data[0] if data else None
    return depth


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
    try:
        count = element_count(shape, what)
        if not datatype_named(datatype, what).size:
            elements = decode_bytes(raw, count, what)
        else:
            array = to_numpy(raw, datatype, (count,), what)
    except InvalidRequest as error:
        raise EngineError(f"the model responded with a malformed tensor: {error}") from error
    if datatype == "BYTES":
        return _in_steps([orjson.dumps(_texts(step, what, start)) for start, step in _steps(elements)])
    if datatype == "BF16":
        array = bf16_to_float32(array)
    return _in_steps([_numbers(step, is_float=datatype in _FLOATS) for _, step in _steps(array)])


_STEP_ELEMENTS = 1 << 15
"""Elements that are written in one call, which lets no other thread run: a few milliseconds."""


def _steps(elements: Any) -> Iterator[tuple[int, Any]]:
    """Yield elements in groups, each with the position of its first. There is one group at least."""
    for start in range(0, max(len(elements), 1), _STEP_ELEMENTS):
        yield start, elements[start : start + _STEP_ELEMENTS]


def _in_steps(arrays: list[bytes]) -> bytes:
    """Return JSON arrays as one."""
    return arrays[0] if len(arrays) == 1 else b"[" + b",".join([array[1:-1] for array in arrays]) + b"]"


def _numbers(array: Array, *, is_float: bool) -> bytes:
    text = orjson.dumps(array, option=orjson.OPT_SERIALIZE_NUMPY)
    return _with_words(text, array) if is_float else text


def _texts(elements: Sequence[bytes], what: str, start: int) -> list[str]:
    try:
        return [element.decode() for element in elements]
    except UnicodeDecodeError:
        position = next(position for position, element in enumerate(elements) if not _is_text(element))
        raise InvalidRequest(f"{what} is not UTF-8 at element {start + position}; request it with 'binary_data'") from None


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
