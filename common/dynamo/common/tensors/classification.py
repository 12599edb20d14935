"""The classification extension: an output as the highest values of each row, by text, worked out in steps (`steps`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dynamo.common.process.work import Work
from dynamo.common.tensors.tensors import Array, encode_bytes

MAX_CLASSES = 10_000
"""In all outputs of a response. Each is a text, which takes about 2 µs and 100 bytes."""
_STEP_ELEMENTS = 1 << 15
"""Elements that are sorted or searched in one step, about 3 ms."""
_STEP_CLASSES = 1 << 10


def best_classes(rows: Array, count: int, labels: Sequence[str]) -> Work[bytes]:
    """Return the `count` highest values of each row as BYTES `value:index` or `value:index:label`, best first, ties by index.

    `rows` are numbers in two dimensions, of which the second is at least `count`. NaN is below all others.
    """
    texts: list[str] = []
    height = max(1, _STEP_ELEMENTS // max(1, rows.shape[1]))
    for start in range(0, len(rows), height):
        block = rows[start : start + height]
        if block.size <= _STEP_ELEMENTS:
            order = np.argsort(_descending(block), axis=1, kind="stable")[:, :count]
        else:
            order = (yield from _order_of_long(block[0], count)).reshape(1, -1)
        yield 0
        values = np.take_along_axis(block, order, axis=1).reshape(-1)
        indices = order.reshape(-1)
        for first in range(0, len(values), _STEP_CLASSES):
            few = slice(first, first + _STEP_CLASSES)
            texts += [_class_text(*pair, labels) for pair in zip(values[few].tolist(), indices[few].tolist(), strict=True)]
            yield 0
    return encode_bytes(texts)


def _order_of_long(row: Array, count: int) -> Work[Array]:
    """Return the indices of the `count` highest values. At most `count` of those that were searched are kept."""
    keys = np.empty(0)
    indices = np.empty(0, np.int64)
    for start in range(0, len(row), _STEP_ELEMENTS):
        more = _descending(row[start : start + _STEP_ELEMENTS])
        places = np.arange(len(more)) if len(keys) < count else np.flatnonzero(_is_less(more, keys.max()))
        if len(places):
            keys = np.concatenate((keys, more[places]))
            indices = np.concatenate((indices, places + start))
            if len(keys) > count:
                kept = _lowest(keys, count)
                keys, indices = keys[kept], indices[kept]
        yield 0
    best: Array = indices[np.argsort(keys, kind="stable")]
    return best


def _lowest(keys: Array, count: int) -> Array:
    """Return the places of the `count` lowest keys in their order; of equal ones, the first."""
    last = np.partition(keys, count - 1)[count - 1]
    less = np.flatnonzero(_is_less(keys, last))
    equal = np.flatnonzero(np.isnan(keys) if np.isnan(last) else keys == last)[: count - len(less)]
    return np.sort(np.concatenate((less, equal)))


def _is_less(keys: Array, key: float) -> Array:
    """As numpy sorts: NaN is above all others."""
    return ~np.isnan(keys) if np.isnan(key) else keys < key


def _descending(values: Array) -> Array:
    return -values.astype(np.float64)


def _class_text(value: float, index: int, labels: Sequence[str]) -> str:
    number = f"{value:f}" if isinstance(value, float) else f"{value}"
    return f"{number}:{index}:{labels[index]}" if index < len(labels) else f"{number}:{index}"
