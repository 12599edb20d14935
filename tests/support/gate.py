"""A model whose responses a test holds back."""

from __future__ import annotations

import os
from pathlib import Path
from typing import ClassVar

from dynamo.common.tensors.tensors import Array
from dynamo.worker.engine.python import InferContext, Tensor

GATE = ("--model", f"{__file__}:Gate")
"""The flags of a worker that serves it, as the model `gate`."""


class Gate:
    """Echoes, as soon as the FIFO that the parameter `until` names is opened for writing."""

    inputs: ClassVar = {"INPUT0": Tensor("FP32", [-1])}
    outputs: ClassVar = {"INPUT0": Tensor("FP32", [-1])}
    name = "gate"

    def infer(self, INPUT0: Array, context: InferContext) -> dict[str, Array]:
        os.close(os.open(str(context.parameters["until"]), os.O_RDONLY))
        return {"INPUT0": INPUT0}


def open_gate(fifo: Path) -> None:
    """Let the request that waits for `fifo` go on. Raises OSError if there is none."""
    os.close(os.open(fifo, os.O_WRONLY | os.O_NONBLOCK))
