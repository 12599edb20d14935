"""Tensors of other libraries by DLPack, and ours for them.

numpy does the exchange, but has no BF16: such tensors pass through it as UINT16, and their type is written into the capsule.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from dynamo.worker.repository.wire.wire import Array

_CPU, _CUDA_HOST = 1, 3
_UINT, _BFLOAT = 1, 4
"""Type codes of DLPack."""
_NAME = b"dltensor"


class _Device(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int32), ("id", ctypes.c_int32))


class _Type(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _DlTensor(ctypes.Structure):
    """The beginning of a DLTensor, which is also that of a DLManagedTensor."""

    _fields_ = (("data", ctypes.c_void_p), ("device", _Device), ("ndim", ctypes.c_int32), ("dtype", _Type))


_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype, _pointer_of.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.restype, _is_valid.argtypes = ctypes.c_int, (ctypes.py_object, ctypes.c_char_p)


class _Capsule:
    """A capsule as numpy takes tensors."""

    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule

    def __dlpack__(self, **_: object) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return (_CPU, 0)


def from_dlpack(source: Any) -> tuple[Array, bool]:
    """Return a tensor, or a capsule, of another library as an array, and whether it is BF16; then the array is float32.

    Raises TypeError if it is neither, ValueError if it is not in the CPU's memory or numpy does not have its type.
    """
    capsule = source
    if not _is_valid(source, _NAME):
        if not hasattr(source, "__dlpack__") or not hasattr(source, "__dlpack_device__"):
            raise TypeError(f"a {type(source).__name__} is neither a DLPack capsule nor a tensor")
        if int(source.__dlpack_device__()[0]) not in (_CPU, _CUDA_HOST):
            raise ValueError("the tensor is not in the CPU's memory")
        capsule = source.__dlpack__()
    about = _DlTensor.from_address(_pointer_of(capsule, _NAME))
    if about.device.type not in (_CPU, _CUDA_HOST):
        raise ValueError("the tensor is not in the CPU's memory")
    is_bf16 = about.dtype.code == _BFLOAT
    if is_bf16:
        if about.dtype.bits != 16:
            raise ValueError(f"a BF16 tensor has 16 bits for an element, not {about.dtype.bits}")
        about.dtype.code = _UINT
    try:
        array = np.from_dlpack(_Capsule(capsule))
    except (BufferError, RuntimeError) as error:
        raise ValueError(str(error)) from error
    return (_bf16_to_float32(array) if is_bf16 else array), is_bf16


def to_dlpack(array: Array, *, is_bf16: bool) -> Any:
    """Return a capsule with the array, which is float32 if it is to become BF16. Raises BufferError for strings."""
    if is_bf16:
        capsule = _float32_to_bf16(array).__dlpack__()
        _DlTensor.from_address(_pointer_of(capsule, _NAME)).dtype.code = _BFLOAT
        return capsule
    return (array if array.flags.writeable else array.copy()).__dlpack__()


def _bf16_to_float32(bits: Array) -> Array:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _float32_to_bf16(array: Array) -> Array:
    """Round to the nearest BF16, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(array, np.float32).reshape(array.shape).view(np.uint32)
    rounded = ((bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(array), np.uint16(0x7FC0), rounded)
