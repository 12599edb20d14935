"""Tensors as KServe v2 sends them, and as numpy arrays.

A raw tensor is little-endian, row-major and unpadded. A BOOL is one byte; a BYTES element is its length as u32 followed by its
bytes. BF16 has no numpy type: it is handled as its upper 16 bits in `uint16`, with conversions from and to float32.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dynamo.common.errors import InvalidRequest
from dynamo.common.process.work import Work, finish
from dynamo.protos import model_config_pb2
from dynamo.protos.inference_pb2 import InferTensorContents

Buffer: TypeAlias = bytes | bytearray | memoryview
Array: TypeAlias = NDArray[Any]

MAX_DIMS = 16
MAX_BYTES = 2**63 - 1
"""The largest size a shape may have: that of a signed 64-bit integer."""

MAX_BYTES_ELEMENTS = 1_000_000
"""BYTES elements of one request. Each becomes an object, of 40 bytes and more, which takes 0.1 to 0.3 µs."""
LONG_BYTES = 64 * 1024
"""Raw BYTES tensors of more bytes are read in steps (`steps`): they may have a quarter as many elements."""
_LONG_COPY_BYTES = 4 << 20
"""A copy of more takes 2 ms and more, for which an event loop should not wait."""

_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class DataType:
    """One of KServe's element types."""

    name: str
    size: int
    """Bytes of an element; 0 for BYTES, whose elements carry their length."""
    dtype: np.dtype[Any]
    """Little-endian numpy type. BF16: its bits as uint16. BYTES: object."""
    field: str
    """The field of InferTensorContents that holds it; empty for FP16 and BF16, which have none and travel raw only."""
    config_type: int
    """Its number in model configurations."""


def _datatypes() -> Mapping[str, DataType]:
    config = model_config_pb2
    rows = (
        ("BOOL", 1, "?", "bool_contents", config.TYPE_BOOL),
        ("UINT8", 1, "<u1", "uint_contents", config.TYPE_UINT8),
        ("UINT16", 2, "<u2", "uint_contents", config.TYPE_UINT16),
        ("UINT32", 4, "<u4", "uint_contents", config.TYPE_UINT32),
        ("UINT64", 8, "<u8", "uint64_contents", config.TYPE_UINT64),
        ("INT8", 1, "<i1", "int_contents", config.TYPE_INT8),
        ("INT16", 2, "<i2", "int_contents", config.TYPE_INT16),
        ("INT32", 4, "<i4", "int_contents", config.TYPE_INT32),
        ("INT64", 8, "<i8", "int64_contents", config.TYPE_INT64),
        ("FP16", 2, "<f2", "", config.TYPE_FP16),
        ("BF16", 2, "<u2", "", config.TYPE_BF16),
        ("FP32", 4, "<f4", "fp32_contents", config.TYPE_FP32),
        ("FP64", 8, "<f8", "fp64_contents", config.TYPE_FP64),
        ("BYTES", 0, "O", "bytes_contents", config.TYPE_STRING),
    )
    return MappingProxyType({row[0]: DataType(row[0], row[1], np.dtype(row[2]), row[3], row[4]) for row in rows})


DATATYPES = _datatypes()
FLOATS = frozenset(("FP16", "BF16", "FP32", "FP64"))
_BY_CONFIG_TYPE = {datatype.config_type: datatype for datatype in DATATYPES.values()}
_BY_NUMPY = {datatype.dtype.newbyteorder("="): datatype for datatype in DATATYPES.values() if datatype.name != "BF16"}


def datatype_named(name: str, what: str = "a tensor") -> DataType:
    """Return the datatype called `name`. Raises InvalidRequest for an unknown one; `what` names the tensor in the message."""
    datatype = DATATYPES.get(name)
    if datatype is None:
        raise InvalidRequest(f"{what} has the unknown datatype {name[:40]!r}; expected one of {', '.join(DATATYPES)}")
    return datatype


def datatype_of_config(config_type: int) -> DataType | None:
    """Return the datatype with this number in model configurations; None for TYPE_INVALID and unknown numbers."""
    return _BY_CONFIG_TYPE.get(config_type)


def element_count(shape: Sequence[int], what: str = "a tensor") -> int:
    """Return the number of elements of a shape; 1 for the empty shape of a scalar.

    Raises InvalidRequest for more than 16 dimensions, a negative one, or a product above 63 bits (of the other dimensions, if one
    is zero).
    """
    if len(shape) > MAX_DIMS:
        raise InvalidRequest(f"{what} has {len(shape)} dimensions; at most {MAX_DIMS} are allowed")
    count = 1
    empty = False
    for dim in shape:
        if dim > 0:
            count *= dim
            if count > MAX_BYTES:
                raise InvalidRequest(f"{what} has the shape {list(shape)}, whose element count overflows 64 bits")
        elif dim < 0:
            raise InvalidRequest(f"{what} has the shape {list(shape)} with the negative dimension {dim}")
        else:
            empty = True
    return 0 if empty else count


def expected_bytes(datatype: DataType, count: int, what: str = "a tensor") -> int:
    """Return the size of `count` elements of a fixed-size datatype. Raises InvalidRequest above 63 bits."""
    total = datatype.size * count
    if total > MAX_BYTES:
        raise InvalidRequest(f"{what} has {count} elements of {datatype.name}, whose size overflows 64 bits")
    return total


# BYTES


def encode_bytes(elements: Iterable[bytes | str]) -> bytes:
    """Return BYTES elements in raw form, text as UTF-8. Raises InvalidRequest for other types and elements of 4 GiB and more."""
    pieces: list[bytes] = []
    for element in elements:
        data = element.encode() if isinstance(element, str) else element
        if not isinstance(data, bytes):
            raise InvalidRequest(f"a BYTES element is a {type(element).__name__}; it must be bytes or str")
        if len(data) > 0xFFFFFFFF:
            raise InvalidRequest(f"a BYTES element has {len(data)} bytes; its length must fit 32 bits")
        pieces += (_LENGTH.pack(len(data)), data)
    return b"".join(pieces)


def encode_bytes_in_steps(array: Array, datatype: str = "") -> Work[tuple[str, Buffer]]:
    """Do the same as `from_numpy` with an array of BYTES, in steps."""
    elements = array.reshape(-1)
    name, _ = from_numpy(elements[:0], datatype)  # raises if it is not BYTES that are wanted
    parts: list[bytes] = []
    for start in range(0, elements.size, _STEP_OBJECTS):
        parts.append(encode_bytes(elements[start : start + _STEP_OBJECTS].tolist()))
        yield 0
    raw = np.empty(sum(map(len, parts)), np.uint8).data  # a bytearray would be cleared at once
    position = 0
    for part in parts:
        raw[position : position + len(part)] = part
        position += len(part)
        yield 0
    return name, raw


def takes_long_to_encode(array: Array, datatype: str) -> bool:
    """Return whether `from_numpy` makes many objects or copies much of an array of more than `LONG_BYTES`."""
    if array.dtype.kind in "OSU":
        return True
    return array.nbytes > _LONG_COPY_BYTES and not (array.flags.c_contiguous and array.dtype == DATATYPES[datatype].dtype)


def decode_bytes(raw: Buffer, count: int, what: str = "a tensor") -> list[bytes]:
    """Return the `count` elements of a raw BYTES tensor. Raises InvalidRequest if `raw` is not exactly that."""
    if uniform := _uniform_length(raw, count):
        data = bytes(raw)
        return [data[start + 4 : start + uniform] for start in range(0, len(data), uniform)]
    return [bytes(raw[start:end]) for start, end in bytes_spans(raw, count, what)]


def bytes_array(raw: Buffer, count: int, what: str = "a tensor") -> Work[Array]:
    """Return the elements of a raw BYTES tensor as `decode_bytes` does, as an array of objects in one dimension, in steps."""
    if count > len(raw) // _LENGTH.size:
        yield from check_bytes(raw, count, what)  # raises, before memory for `count` elements is taken
    array = np.empty(count, object)
    uniform = _uniform_length(raw, count)
    spans = iter(() if uniform else bytes_spans(raw, count, what))
    for start in range(0, count, _STEP_OBJECTS):
        stop = min(count, start + _STEP_OBJECTS)
        if uniform:
            array[start:stop] = decode_bytes(raw[start * uniform : stop * uniform], stop - start)
        else:
            array[start:stop] = [bytes(raw[begin:end]) for begin, end in itertools.islice(spans, stop - start)]
        yield 0
    for _ in spans:
        pass  # raises if there is more
    return array


@dataclass(frozen=True, slots=True)
class ScannedBytes:
    """What a raw BYTES tensor holds."""

    elements: int
    """Elements that begin, up to one more than were expected."""
    wanted: int = 0
    """The length of the last element."""
    available: int = 0
    """The bytes that follow that length, if they are fewer than `wanted`."""
    lengthless_bytes: int = 0
    """Left where the length of another element should be."""


def scan_bytes(raw: Buffer, count: int) -> ScannedBytes:
    """Scan a raw BYTES tensor that should hold `count` elements. Copies nothing."""
    if _uniform_length(raw, count):
        return ScannedBytes(count)
    size = len(raw)
    unpack = _LENGTH.unpack_from
    position = elements = 0
    while position < size:
        left = size - position
        if left < _LENGTH.size:
            return ScannedBytes(elements, lengthless_bytes=left)
        elements += 1
        if elements > count:
            break
        length = unpack(raw, position)[0]
        position += _LENGTH.size + length
        if position > size:
            return ScannedBytes(elements, length, left - _LENGTH.size)
    return ScannedBytes(elements)


def check_bytes(raw: Buffer, count: int, what: str = "a tensor") -> Work[None]:
    """Raise InvalidRequest if `raw` is not exactly `count` length-prefixed elements. Copies nothing."""
    if not _uniform_length(raw, count):
        for index, _ in enumerate(bytes_spans(raw, count, what)):
            if not index % _STEP_OBJECTS:
                yield 0


def _uniform_length(raw: Buffer, count: int) -> int:
    """Return the bytes of each element with its prefix if all have the same length, else 0: a fast path for many equal ones."""
    size = len(raw)
    if count < 16 or size % count or size // count < 4:
        return 0
    each = size // count
    lengths = np.ndarray((count,), "<u4", buffer=raw, strides=(each,))
    return each if bool((lengths == each - 4).all()) else 0


def bytes_spans(raw: Buffer, count: int, what: str = "a tensor") -> Iterable[tuple[int, int]]:
    """Yield start and end of each element of a raw BYTES tensor. Raises InvalidRequest if it does not have `count` of them."""
    size = len(raw)
    unpack = _LENGTH.unpack_from
    position = index = 0
    while position < size:
        if index == count:
            raise InvalidRequest(f"{what} has {size - position} bytes left over after its {count} BYTES elements")
        if size - position < 4:
            raise InvalidRequest(f"{what} ends inside the length of BYTES element {index}")
        start = position + 4
        position = start + unpack(raw, position)[0]
        if position > size:
            raise InvalidRequest(
                f"{what} has a BYTES element {index} of {position - start} bytes, but only {size - start} bytes follow its length"
            )
        yield start, position
        index += 1
    if index != count:
        raise InvalidRequest(f"{what} has {index} BYTES elements where its shape needs {count}")


# BF16


def bf16_to_float32(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Convert BF16 values, given as uint16, exactly."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def float32_to_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Convert to BF16 as uint16, rounded to nearest, ties to even. A NaN keeps the upper bits of its payload."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).reshape(values.shape)
    with np.errstate(over="ignore"):
        rounded = ((bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))) >> 16).astype(np.uint16)
    # Rounding could carry a NaN into the exponent's overflow, and cutting could turn it into infinity.
    quiet = ((bits >> 16) | np.uint32(0x40)).astype(np.uint16)
    return np.where(np.isnan(values), quiet, rounded)


# numpy


def to_numpy(raw: Buffer, datatype: str, shape: Sequence[int], what: str = "a tensor") -> Array:
    """Return a raw tensor as an array of `shape`, read-only and without a copy wherever the datatype allows.

    BYTES become an object array of `bytes` (copied), BF16 an array of its bits as uint16; a BOOL is true for any non-zero byte.
    Raises InvalidRequest if the data does not have the size that the shape needs.
    """
    kind = datatype_named(datatype, what)
    count = element_count(shape, what)
    if not kind.size:
        return finish(bytes_array(raw, count, what)).reshape(shape)
    needed = expected_bytes(kind, count, what)
    if len(raw) != needed:
        raise InvalidRequest(f"{what} has {len(raw)} bytes where {kind.name} of shape {list(shape)} needs {needed}")
    if count == 0:
        return np.empty(shape, kind.dtype)
    if kind.name == "BOOL":
        octets = np.frombuffer(raw, np.uint8)
        flags = octets != 0 if octets.max() > 1 else octets.view(np.bool_)
        return flags.reshape(shape)
    return _read_only(np.ndarray(shape, kind.dtype, raw))


def _read_only(array: Array) -> Array:
    array.flags.writeable = False
    return array


def datatype_of_array(array: Array) -> DataType:
    """Return the datatype an array is sent as. Raises InvalidRequest if there is none for its dtype."""
    if (common := _BY_NUMPY.get(array.dtype)) is not None:
        return common
    if array.dtype.kind in "OSU":
        return DATATYPES["BYTES"]
    if array.dtype.name == "bfloat16":  # from the package ml_dtypes, which is not needed here
        return DATATYPES["BF16"]
    datatype = _BY_NUMPY.get(array.dtype.newbyteorder("="))
    if datatype is None:
        raise InvalidRequest(f"an array of {array.dtype} cannot be sent; there is no such datatype")
    return datatype


def from_numpy(array: Array, datatype: str = "") -> tuple[str, Buffer]:
    """Return datatype and raw form of an array. The buffer is a view of the array if its memory is already in that form.

    `datatype`, if given, must fit: BF16 takes float32 (rounded) or uint16 (the bits). Raises InvalidRequest otherwise. Numpy
    text (`U`) becomes UTF-8, and fixed-length bytes (`S`) have lost their trailing zero bytes already: use object arrays.
    """
    kind = datatype_of_array(array)
    if datatype == "BF16" and kind.name != "BF16":
        if kind.name not in ("FP32", "UINT16"):
            raise InvalidRequest(f"an array of {array.dtype} cannot be sent as BF16; give float32, or the bits as uint16")
        bits = float32_to_bf16(array) if kind.name == "FP32" else array
        return "BF16", _memory(bits, DATATYPES["BF16"].dtype)
    if datatype and datatype != kind.name:
        raise InvalidRequest(f"an array of {array.dtype} is {kind.name} and cannot be sent as {datatype}")
    if kind.name == "BYTES":
        return "BYTES", encode_bytes(array.reshape(-1).tolist())
    return kind.name, _memory(array, array.dtype if kind.name == "BF16" else kind.dtype)


def _memory(array: Array, dtype: np.dtype[Any]) -> Buffer:
    return octets_of(np.ascontiguousarray(array, dtype))


def octets_of(array: Array) -> Buffer:
    """Return the bytes of an array of numbers that is contiguous, where they lie."""
    return np.frombuffer(array, np.uint8).data if array.size else b""


# Typed contents


def filled_fields(contents: InferTensorContents) -> list[str]:
    """Return the names of the fields of `contents` that hold elements."""
    return [descriptor.name for descriptor, _ in contents.ListFields()]


def typed_to_raw(contents: InferTensorContents, datatype: str, count: int, what: str = "a tensor") -> bytes:
    """Return typed contents in raw form.

    Raises InvalidRequest if another field than the datatype's is filled, the number of elements is not `count`, or a value is
    outside the datatype's range.
    """
    kind = datatype_named(datatype, what)
    check_contents(contents, kind, count, what)
    elements = getattr(contents, kind.field) if kind.field else ()
    if not kind.size:
        return encode_bytes(elements)
    return np.fromiter(elements, kind.dtype, count).tobytes()


def check_contents(contents: InferTensorContents, kind: DataType, count: int, what: str = "a tensor") -> None:
    """Raises InvalidRequest if `contents` are not `count` elements of `kind`, in the right field and each in range."""
    filled = filled_fields(contents)
    if filled and not kind.field:
        raise InvalidRequest(f"{what} is {kind.name}, which has no typed contents; send it in raw_input_contents")
    if len(filled) > 1:
        raise InvalidRequest(f"{what} fills {' and '.join(filled)}; a tensor has its elements in one field")
    if filled and filled[0] != kind.field:
        raise InvalidRequest(f"{what} is {kind.name} and belongs in {kind.field}, not in {filled[0]}")
    elements = getattr(contents, kind.field) if filled else ()
    if len(elements) != count:
        raise InvalidRequest(f"{what} has {len(elements)} elements in its contents where its shape needs {count}")
    check_range(elements, kind, what)


def check_range(elements: Sequence[int], kind: DataType, what: str) -> None:
    """Raises InvalidRequest for an element that its field of InferTensorContents can hold and its datatype cannot."""
    limits = _NARROW.get(kind.name)
    if limits is None:
        return
    low, high = limits
    for start in range(0, len(elements), _STEP_ELEMENTS):
        values = np.array(elements[start : start + _STEP_ELEMENTS], np.int64)
        outside = (values < low) | (values > high)
        if outside.any():
            offset = int(outside.argmax())
            raise InvalidRequest(f"{what} has the value {values[offset]} at {start + offset}, outside the range of {kind.name}")


_STEP_ELEMENTS = 1 << 15
"""Elements converted in one call of numpy, which lets no other thread run: about 2 ms."""
_STEP_OBJECTS = 1 << 13
"""Elements of BYTES that are read in one step: about 2 ms."""
_NARROW = {"UINT8": (0, 2**8 - 1), "UINT16": (0, 2**16 - 1), "INT8": (-(2**7), 2**7 - 1), "INT16": (-(2**15), 2**15 - 1)}
"""Datatypes whose field in InferTensorContents is wider than they are."""
