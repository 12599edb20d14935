"""Tensors in the form in which messages carry them, for models that pass them on rather than look at them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

from dynamo.common.tensors.tensors import datatype_of_array
from dynamo.worker.repository.wire import wire
from dynamo.worker.repository.wire.wire import Array, Buffer, TensorHead

Kind: TypeAlias = tuple[tuple[str, str, tuple[int, ...], int], ...]


class RawTensors(Mapping[str, Array]):
    """Tensors by name. They become arrays, all together, when one of them is looked at."""

    __slots__ = ("_arrays", "_kind", "heads", "raws")

    def __init__(self, heads: Sequence[TensorHead], raws: Sequence[Buffer]) -> None:
        """`heads` say what each of `raws` is; places in them are ignored."""
        self.heads = heads
        self.raws = raws
        self._arrays: dict[str, Array] | None = None
        self._kind: Kind | None = None

    def __repr__(self) -> str:
        return f"<RawTensors {[head.name for head in self.heads]}>"

    @property
    def kind(self) -> Kind:
        """What is equal for tensors that differ in their elements alone."""
        if self._kind is None:
            self._kind = tuple([(head.name, head.datatype, head.shape, head.size) for head in self.heads])
        return self._kind

    @property
    def arrays(self) -> dict[str, Array]:
        """Raises ValueError for a tensor that does not have the size of its shape."""
        if self._arrays is None:
            self._arrays = {head.name: wire.unpack(head, raw) for head, raw in zip(self.heads, self.raws, strict=True)}
        return self._arrays

    def __getitem__(self, name: str) -> Array:
        return self.arrays[name]

    def __contains__(self, name: object) -> bool:
        return any(head.name == name for head in self.heads)

    def __iter__(self) -> Iterator[str]:
        return iter(self.arrays)

    def __len__(self) -> int:
        return len(self.heads)


def forms_of(tensors: Mapping[str, Array]) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Yield name, datatype and shape of each tensor. None of those that can say so becomes an array."""
    if isinstance(tensors, RawTensors):
        for head in tensors.heads:
            yield head.name, head.datatype, head.shape
    else:
        for name, array in tensors.items():
            yield name, datatype_of_array(array).name, array.shape


def pack(tensors: Mapping[str, Array]) -> tuple[Sequence[TensorHead], Sequence[Buffer]]:
    """Return the heads of tensors and their bytes, without a copy where possible.

    Raises ValueError for a dtype without a datatype.
    """
    if isinstance(tensors, RawTensors):
        return [_elsewhere(head) for head in tensors.heads], tensors.raws
    packed = [wire.pack(name, array) for name, array in tensors.items()]
    return [head for head, _ in packed], [raw for _, raw in packed]


def _elsewhere(head: TensorHead) -> TensorHead:
    """Return the head without the place of the tensor where it came from."""
    return head if head.place is None else TensorHead(head.name, head.datatype, head.shape, head.size)
