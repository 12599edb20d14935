from __future__ import annotations

import numpy as np
import pytest

from dynamo.common.process.work import finish
from dynamo.common.tensors.classification import best_classes
from dynamo.common.tensors.tensors import Array, decode_bytes

NAN, INFINITY = float("nan"), float("inf")
RANDOM = np.random.default_rng(7)
ROWS: dict[str, Array] = {
    "many rows": RANDOM.normal(size=(3_000, 40)),
    "a long row": RANDOM.normal(size=(1, 200_000)),
    "long rows": RANDOM.normal(size=(3, 100_000)),
    "rising": np.arange(150_000.0).reshape(1, -1),
    "equal": np.zeros((1, 150_000)),
    "few values": RANDOM.integers(0, 9, size=(1, 150_000)),
    "many NaN": np.where(np.arange(150_000) % 30_000, NAN, np.arange(150_000)).reshape(1, -1),
    "infinite": np.where(np.arange(150_000) % 40_000, -INFINITY, NAN).reshape(1, -1),
}


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("count", [1, 3, 40])
def test_the_classes_are_those_of_a_stable_sort_with_nan_last(name: str, count: int) -> None:
    rows = ROWS[name]
    order = np.argsort(-rows.astype(np.float64), axis=1, kind="stable")[:, :count]
    expected = [
        f"{row[index]:{'f' if rows.dtype.kind == 'f' else ''}}:{index}"
        for row, best in zip(rows, order, strict=True)
        for index in best
    ]
    raw = finish(best_classes(rows, count, ()))
    assert [text.decode() for text in decode_bytes(raw, len(rows) * count)] == expected


@pytest.mark.parametrize("rows", [np.arange(4_000_000, dtype=np.float32).reshape(1, -1), np.zeros((8_000, 500), np.int64)])
def test_long_rows_and_many_rows_are_searched_in_steps(rows: Array) -> None:
    steps = sum(1 for _ in best_classes(rows, 1, ()))
    assert steps >= rows.size // 33_000
