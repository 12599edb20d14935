"""Models that go wrong, each in its own way."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dynamo.worker.engine.python import InferContext, InvalidRequest, Tensor


class Faulty:
    """`how` says what to do."""

    inputs = {"how": Tensor("BYTES", [1])}  # noqa: RUF012
    outputs = {"y": Tensor("INT32", [2])}  # noqa: RUF012

    def infer(self, how: NDArray[np.object_], context: InferContext) -> dict[str, Any]:
        match how[0].decode():
            case "raise":
                raise ValueError("the model broke")
            case "refuse":
                raise InvalidRequest("the model does not like this")
            case "shape":
                return {"y": np.zeros(5, np.int32)}
            case "name":
                return {"z": np.zeros(2, np.int32)}
            case "type":
                return {"y": "hello"}
            case _:
                return {"y": np.array([1, 2], np.int32)}
