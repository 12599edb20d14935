"""A decoupled model: one request, many responses, over ModelStreamInfer.

`Countdown` counts from `start` down to zero and declares itself in Triton's `config.pbtxt` form, in the file `countdown.pbtxt`
beside this one. `Words` sends a text back word by word and is declared in YAML, in `words.yaml`.

    dynamo-worker --model examples/countdown.py:Countdown --model examples/countdown.py:Words
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dynamo.worker.engine.python import InferContext, InvalidRequest

MOST = 1000


class Countdown:
    """Answers 3, 2, 1, 0 to 3. The request parameter `pause_ms` slows it down."""

    config = "countdown.pbtxt"

    async def infer(self, start: NDArray[np.int32], context: InferContext) -> AsyncIterator[dict[str, Any]]:
        first = int(start[0])
        if not 0 <= first <= MOST:
            raise InvalidRequest(f"start is {first}; it must be between 0 and {MOST}")
        pause_s = float(context.parameters.get("pause_ms", 0)) / 1000
        for left in range(first, -1, -1):
            yield {"left": [left], "done": [left == 0]}
            await asyncio.sleep(pause_s)


class Words:
    """Answers a text with its words, one at a time; with nothing to an empty text."""

    config = "words.yaml"

    def infer(self, text: NDArray[np.object_]) -> Iterator[dict[str, Any]]:
        for word in text[0].decode().split():
            yield {"word": [word]}
