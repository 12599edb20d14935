"""Models of the drill: one fails as it is requested to, one sends more than its caller reads."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator
from enum import IntEnum
from typing import ClassVar

from dynamo.common.tensors.tensors import Array
from dynamo.worker.engine.python import InferContext, Tensor

HANG_S = 6.0
RESPONSES = 2000


class Fault(IntEnum):
    """Values of a request's parameter `fault`."""

    RAISE = 1
    HANG = 2
    ABORT = 3


class Faulty:
    """Raises, hangs or ends its process, by the parameter `fault` of a request."""

    inputs: ClassVar = {"INPUT0": Tensor("FP32", [-1])}
    outputs: ClassVar = {"INPUT0": Tensor("FP32", [-1])}
    name = "faulty"
    concurrency = 16

    def infer(self, INPUT0: Array, context: InferContext) -> dict[str, Array]:
        match context.parameters.get("fault"):
            case Fault.RAISE:
                raise RuntimeError("the drill's model was requested to fail")
            case Fault.HANG:
                time.sleep(HANG_S)  # a thread that cannot be cancelled, as in a stuck driver
            case Fault.ABORT:
                os.abort()
        return {"INPUT0": INPUT0}


class Stream:
    """Sends its input many times."""

    inputs: ClassVar = {"INPUT0": Tensor("FP32", [-1])}
    outputs: ClassVar = {"INPUT0": Tensor("FP32", [-1])}
    name = "stream"
    decoupled = True

    async def infer(self, INPUT0: Array) -> AsyncIterator[dict[str, Array]]:
        for _ in range(RESPONSES):
            yield {"INPUT0": INPUT0}
