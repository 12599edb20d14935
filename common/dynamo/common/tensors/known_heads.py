"""Heads of tensor requests that came before. Clients repeat them: from one request to the next only the tensor's elements differ.

A message that begins with the same bytes as an earlier one, up to its tensor, and is as long, is the same request with another
tensor. Finding it costs a comparison of these bytes instead of parsing them and looking at every field.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Generic, TypeAlias, TypeVar

from dynamo.common.tensors.request import SMALL_BYTES, TensorRequest, raw_begin
from dynamo.common.tensors.tensors import Buffer
from dynamo.protos.inference_pb2 import ModelInferRequest

T = TypeVar("T")

_MAX_HEADS: Final = 256
_MAX_ID_CHARS: Final = 128
_MAX_HEAD_BYTES: Final = 1024
_KEY_BYTES: Final = 16
"""The shortest head has so many bytes, and they hold most of the model's name."""

_Key: TypeAlias = tuple[int, bytes]
"""The size of a message, and its first bytes."""


class KnownHeads:
    """A few heads of requests with one tensor and without parameters."""

    def __init__(self) -> None:
        self._heads: dict[_Key, tuple[bytes, ModelInferRequest]] = {}
        """The bytes before the tensor, and what they mean."""
        self._missed: tuple[_Key, str] | None = None
        """Key and id of the last request that was not found and has neither parameters nor a long id."""

    def find(self, data: Buffer) -> TensorRequest | None:
        """Return a request whose head, the same object for all, came before. None: parse it."""
        size = len(data)
        known = self._heads.get((size, bytes(data[:_KEY_BYTES])))
        if known is None:
            return None
        beginning, head = known
        begin = len(beginning)
        if data[:begin] != beginning:
            return None
        return TensorRequest(data, head, [data[begin:] if size <= SMALL_BYTES else memoryview(data)[begin:]], is_known=True)

    def add(self, request: TensorRequest) -> None:
        """Remember the head of a request that was not found, if its like is likely to come again.

        That is so if the last one was of its size, model and id, and there are no parameters, which tell requests apart. Adding
        costs more than finding saves, so requests that always differ must not get here each time.
        """
        head = request.head
        if head.parameters or len(head.id) > _MAX_ID_CHARS:
            return
        missed, self._missed = self._missed, ((len(request.raw), bytes(request.raw[:_KEY_BYTES])), head.id)
        if self._missed != missed:
            return
        begin = raw_begin(request)
        if begin is None or begin > _MAX_HEAD_BYTES:
            return
        if len(self._heads) >= _MAX_HEADS:
            self._heads.clear()
        self._heads[missed[0]] = bytes(request.raw[:begin]), head


class PerHead(Generic[T]):
    """What is computed of heads, once for all requests with the same one."""

    def __init__(self, compute: Callable[[TensorRequest], T]) -> None:
        """`compute` looks at the head, and at the sizes of the tensors."""
        self._compute = compute
        self._computed: dict[int, tuple[ModelInferRequest, T]] = {}
        """By the identity of the head, which therefore has to be kept."""

    def of(self, request: TensorRequest) -> T:
        head = request.head
        known = self._computed.get(id(head))
        if known is not None:
            return known[1]
        computed = self._compute(request)
        if request.is_known:
            if len(self._computed) >= _MAX_HEADS:
                self._computed.clear()
            self._computed[id(head)] = head, computed
        return computed
