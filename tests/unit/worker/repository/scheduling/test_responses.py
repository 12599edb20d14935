"""What the callers of a decoupled model may leave unread together."""

from __future__ import annotations

from contextlib import aclosing

import numpy as np

from dynamo.worker.engine.base import Context
from dynamo.worker.repository.declared.execution import ModelResult
from dynamo.worker.repository.scheduling.responses import MAX_MODEL_BYTES, ResponseStream, Unread

LARGE = ModelResult({"y": np.broadcast_to(np.float32(0), (16, 2**20))})
"""64 MiB, as it counts."""
SMALL = ModelResult({"y": np.zeros(1, np.float32)})


def make_stream(unread: Unread) -> ResponseStream:
    return ResponseStream(lambda _: None, Context("r"), unread, lambda: False)


async def test_callers_who_leave_much_unread_together_get_no_more_and_those_who_read_do() -> None:
    unread = Unread()
    slow = [make_stream(unread) for _ in range(MAX_MODEL_BYTES // 2**26)]
    for stream in slow:
        stream.add(LARGE)
    assert not any(stream.is_full for stream in slow)
    other = make_stream(unread)
    other.add(SMALL)
    assert all(stream.is_full for stream in slow)
    assert not other.is_full
    async with aclosing(slow[0].read()) as responses:
        await anext(responses)
    assert not any(stream.is_full for stream in slow), "what is read counts no more"
    slow[0].add(LARGE)
    assert slow[1].is_full
    slow[0].close()
    assert not slow[1].is_full, "nor what is dropped"
