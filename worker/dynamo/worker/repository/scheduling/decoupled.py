"""A request of a decoupled model on its way: it waits for its batch, and then its caller reads the responses.

request = DecoupledRequest(model_request)
try:
    ...                                          # until the model's instance has called `begin`
    async for response in request.read(): ...
finally:
    request.leave()
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import Protocol, runtime_checkable

from dynamo.worker.repository.declared.execution import ModelRequest, ModelResult
from dynamo.worker.repository.scheduling.pipeline import Execution, Pipeline
from dynamo.worker.repository.scheduling.responses import ResponseStream


class DecoupledRequest:
    """One request, which a batch may hold beside others."""

    __slots__ = ("_begun", "_has_left", "_on_reschedule", "_submitted_ns", "request")

    def __init__(self, request: ModelRequest, on_reschedule: Callable[[], None] | None = None) -> None:
        """`on_reschedule` is called when the model wants the request again, perhaps before its responses have been read."""
        self.request = request
        self._on_reschedule = on_reschedule
        self._begun: tuple[Pipeline, Execution, ResponseStream] | None = None
        self._submitted_ns = 0
        self._has_left = False

    def __repr__(self) -> str:
        return f"<DecoupledRequest {self.request.id!r}, begun={self._begun is not None}, has_left={self._has_left}>"

    @property
    def has_ended(self) -> bool:
        """Whether the model has done with it; perhaps not all responses are read."""
        return self._begun is not None and self._begun[2].has_ended

    def begin(self, pipeline: Pipeline, execution: Execution, stream: ResponseStream) -> None:
        """Note where the responses of the request come, whose execution was submitted just now."""
        self._begun = pipeline, execution, stream
        self._submitted_ns = time.perf_counter_ns()
        stream.on_reschedule = self._on_reschedule
        if self._has_left:
            pipeline.leave_one(execution, stream)

    async def read(self) -> AsyncGenerator[ModelResult, None]:
        """Yield the responses of the request, which has begun. Raises the error that ended it."""
        assert self._begun is not None
        try:
            async with aclosing(self._begun[2].read()) as responses:
                async for response in responses:
                    yield response
        finally:
            self.leave()

    def leave(self) -> None:
        """The caller wants no more responses. May be called again."""
        if self._has_left:
            return
        self._has_left = True
        if self._begun is not None:
            pipeline, execution, stream = self._begun
            pipeline.leave_one(execution, stream)
            # From when it was sent: `execute` may return long before the last response, or after it.
            count_time(self.request, self._submitted_ns, execution.sent_ns)


@runtime_checkable
class StreamsBatches(Protocol):
    """What a decoupled model has, and an instance of one."""

    def stream(self, request: ModelRequest, begun: AsyncIterator[ModelResult] | None = None) -> AsyncIterator[ModelResult]:
        """Run a request by itself; or, if a batch has begun it, yield the responses of that. Raises DynamoError."""
        ...

    def watch_queue(self, waiting: Callable[[], int], *, has_slots: bool = False) -> None:
        """Have `waiting` return how many requests wait, from now on: callers who read slowly do not hold these up.

        `has_slots`: requests may wait for the last response of another one, and not for the end of its `execute` alone.
        """
        ...

    async def stream_all(self, requests: Sequence[DecoupledRequest], on_begun: Callable[[], None]) -> None:
        """Run requests in one call of the model, in this order, and return when that has returned. Raises DynamoError.

        `on_begun` is called when the responses can be read.
        """
        ...


def count_time(request: ModelRequest, submitted_ns: int, sent_ns: int, ran_ns: int = 0) -> None:
    """Count as the model's time `ran_ns`, or if that is 0 the time since a request was sent to it; the rest as queueing."""
    now = time.perf_counter_ns()
    infer_ns = ran_ns or (now - sent_ns if sent_ns else 0)
    timings = request.context.timings
    timings.infer_ns += infer_ns
    timings.queue_ns += now - submitted_ns - infer_ns
