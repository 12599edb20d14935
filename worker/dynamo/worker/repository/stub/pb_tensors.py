"""The part of `pb_utils` about tensors, their datatypes, and errors."""

from __future__ import annotations

import operator
import struct
from enum import Enum, IntEnum
from typing import Any, SupportsIndex

import numpy as np

from dynamo.worker.repository.stub import dlpack
from dynamo.worker.repository.wire import wire
from dynamo.worker.repository.wire.wire import Array


class Enumeration(IntEnum):
    """Shown by its name, as the enumerations of Triton's module are."""

    __str__ = Enum.__str__


class MemoryType(Enumeration):
    TRITONSERVER_MEMORY_GPU = 0
    TRITONSERVER_MEMORY_CPU = 1


TRITONSERVER_MEMORY_GPU = MemoryType.TRITONSERVER_MEMORY_GPU
TRITONSERVER_MEMORY_CPU = MemoryType.TRITONSERVER_MEMORY_CPU
TRITON_STRING_TO_NUMPY: dict[str, Any] = {
    "TYPE_BOOL": bool,
    "TYPE_UINT8": np.uint8,
    "TYPE_UINT16": np.uint16,
    "TYPE_UINT32": np.uint32,
    "TYPE_UINT64": np.uint64,
    "TYPE_INT8": np.int8,
    "TYPE_INT16": np.int16,
    "TYPE_INT32": np.int32,
    "TYPE_INT64": np.int64,
    "TYPE_FP16": np.float16,
    "TYPE_FP32": np.float32,
    "TYPE_FP64": np.float64,
    "TYPE_STRING": np.object_,
}
_BF16 = "TYPE_BF16"
_NUMPY_TO_TRITON_STRING = {np.dtype(kind): text for text, kind in TRITON_STRING_TO_NUMPY.items()}


class TritonModelException(Exception):
    """Raised by a model, or by this module, for a request or configuration that cannot be used."""


class ErrorCode(Enumeration):
    UNKNOWN = 0
    INTERNAL = 1
    NOT_FOUND = 2
    INVALID_ARG = 3
    UNAVAILABLE = 4
    UNSUPPORTED = 5
    ALREADY_EXISTS = 6
    CANCELLED = 7


def need(what: str, value: object, kind: type | tuple[type, ...]) -> None:
    """Raise TypeError, as Triton's classes do for an argument of a wrong type."""
    if not isinstance(value, kind):
        kinds = kind if isinstance(kind, tuple) else (kind,)
        raise TypeError(f"{what} must be {' or '.join(one.__name__ for one in kinds)}, not {type(value).__name__}")


def as_integer(what: str, value: SupportsIndex) -> int:
    """Return an integer, also one of numpy. Raises TypeError for anything else."""
    if not isinstance(value, SupportsIndex):
        raise TypeError(f"{what} must be an integer, not {type(value).__name__}")
    return operator.index(value)


class TritonError:
    """The error of a request: a message and a code."""

    UNKNOWN = ErrorCode.UNKNOWN
    INTERNAL = ErrorCode.INTERNAL
    NOT_FOUND = ErrorCode.NOT_FOUND
    INVALID_ARG = ErrorCode.INVALID_ARG
    UNAVAILABLE = ErrorCode.UNAVAILABLE
    UNSUPPORTED = ErrorCode.UNSUPPORTED
    ALREADY_EXISTS = ErrorCode.ALREADY_EXISTS
    CANCELLED = ErrorCode.CANCELLED

    def __init__(self, message: str, code: ErrorCode = ErrorCode.INTERNAL) -> None:
        need("the message of a TritonError", message, str)
        need("the code of a TritonError", code, ErrorCode)
        self._message = message
        self._code = code

    def message(self) -> str:
        return self._message

    def code(self) -> ErrorCode:
        return self._code

    def __repr__(self) -> str:
        return f"TritonError({self._message!r}, code={self._code!r})"


class Tensor:
    """A named array."""

    def __init__(self, name: str, array: Array) -> None:
        self._name = _tensor_name(name)
        need(f"the value of tensor '{name}'", array, np.ndarray)
        datatype_of(array)
        self._array: Array = np.asarray(array, order="C")
        self._is_bf16 = False

    @classmethod
    def received(cls, name: str, array: Array, *, is_bf16: bool = False) -> Tensor:
        """Make a tensor of an array that needs no check."""
        tensor = cls.__new__(cls)
        tensor._name, tensor._array, tensor._is_bf16 = name, array, is_bf16
        return tensor

    @property
    def _datatype(self) -> str:
        return _BF16 if self._is_bf16 else datatype_of(self._array)

    @classmethod
    def from_dlpack(cls, name: str, tensor: Any) -> Tensor:
        """Make a tensor from a DLPack capsule, or a tensor of another library, in the CPU's memory. BF16 becomes float32."""
        _tensor_name(name)
        try:
            array, is_bf16 = dlpack.from_dlpack(tensor)
        except TypeError as error:
            raise TritonModelException(
                "Provided tensor is not supported. Tensor must be a DLPack capsule or have `__dlpack__` and `__dlpack_device__` "
                f"attributes: {error}"
            ) from error
        except ValueError as error:
            raise TritonModelException(f"tensor '{name}' cannot be read by DLPack: {error}") from error
        array = np.asarray(array, order="C")
        datatype_of(array)
        return cls.received(name, array, is_bf16=is_bf16)

    def to_dlpack(self) -> Any:
        return self.__dlpack__()

    def __dlpack__(self, *, stream: object = None) -> Any:
        if self._datatype == "TYPE_STRING":
            raise TritonModelException("DLPack does not have support for string tensors.")
        return dlpack.to_dlpack(self._array, is_bf16=self._is_bf16)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> Array:
        """Return the array. That of a BF16 tensor is float32."""
        return self._array

    def triton_dtype(self) -> int:
        """The number of the datatype in model configurations."""
        return (*TRITON_STRING_TO_NUMPY, _BF16).index(self._datatype) + 1

    def shape(self) -> list[int]:
        return list(self._array.shape)

    def is_cpu(self) -> bool:
        return True


def _tensor_name(name: str) -> str:
    need("the name of a tensor", name, str)
    if not name:
        raise TritonModelException("Tensor name cannot be an empty string.")
    return name


def datatype_of(array: Array) -> str:
    """Return the datatype of an array as configurations name it. Raises TritonModelException if there is none."""
    text = "TYPE_STRING" if array.dtype.kind == "S" else _NUMPY_TO_TRITON_STRING.get(array.dtype)
    if text is None:
        raise TritonModelException("NumPy dtype is not supported.")
    return text


def triton_string_to_numpy(triton_type_string: str) -> Any:
    """Return the numpy type of `TYPE_FP32` and the like."""
    return TRITON_STRING_TO_NUMPY[triton_type_string]


def triton_to_numpy_type(data_type: int) -> Any:
    """Return the numpy type of a datatype's number in configurations; None if there is none."""
    return _NUMPY_BY_NUMBER.get(data_type)


def numpy_to_triton_type(data_type: Any) -> int | None:
    """Return the number in configurations of a numpy type's datatype; None if there is none."""
    dtype = np.dtype(data_type)
    return next(
        (number for number, kind in _NUMPY_BY_NUMBER.items() if np.dtype(kind) == dtype), 13 if dtype.kind == "S" else None
    )


_NUMPY_BY_NUMBER = {
    number: np.bool_ if kind is bool else kind for number, kind in enumerate(TRITON_STRING_TO_NUMPY.values(), start=1)
}


def serialize_byte_tensor(input_tensor: Array) -> bytes | tuple[()] | None:
    """Return strings or bytes with length prefixes; None for an array of another type, and () for an empty one."""
    if input_tensor.size == 0:
        return ()
    if input_tensor.dtype.kind not in "OS":
        return None
    return bytes(wire.pack("", input_tensor)[1])


def deserialize_bytes_tensor(encoded_tensor: bytes) -> Array:
    """Return the elements, which are `bytes`, of what `serialize_byte_tensor` gave. Raises struct.error if it is cut."""
    elements: list[bytes] = []
    position = 0
    while position < len(encoded_tensor):
        (length,) = struct.unpack_from("<I", encoded_tensor, position)
        elements += struct.unpack_from(f"<{length}s", encoded_tensor, position + 4)
        position += 4 + length
    array = np.empty(len(elements), dtype=np.object_)
    array[:] = elements
    return array
