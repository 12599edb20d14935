"""Outcomes and times of the requests of each model version: the numbers of `ModelStatistics`.

Counting is a few integer additions per request; the message is built only when it is requested. The counts:

- `success`, `fail`: requests that succeeded, or ended with an error; from arrival to the end. A cancelled request is neither:
  it counts under `response_stats[index of the response it was waiting for].cancel`.
- `queue`, `compute_input`, `compute_infer`, `compute_output`: one count per successful request, as engines report it.
- `cache_hit`, `cache_miss`: lookups in the response cache. A hit is a success with a queue, and is not computed.
- `inference_count` counts rows of successful requests, `execution_count` runs of the model; a batch of several requests is one
  run. Their ratio is the average batch size.
- `response_stats` holds one entry per index of a response of decoupled models, which may send many.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple

from dynamo.common.errors import Code
from dynamo.protos.inference_pb2 import (
    InferBatchStatistics,
    InferResponseStatistics,
    InferStatistics,
    ModelStatistics,
    StatisticDuration,
)
from dynamo.worker.engine.base import RequestTimings

MAX_LATENCIES = 4096
"""Requests of a version whose latencies are kept."""
MAX_RESPONSE_INDEX = 255
"""Responses of one request beyond this index are counted under it, so that an endless stream cannot fill the memory."""


class Failure(StrEnum):
    """Why a request failed, as in Triton's metrics."""

    REJECTED = "REJECTED"
    """Refused by a queue, or timed out in it."""
    BACKEND = "BACKEND"
    """The model failed."""
    OTHER = "OTHER"


_REASONS = {
    Code.OVERLOADED: Failure.REJECTED,
    Code.UNAVAILABLE: Failure.REJECTED,
    Code.DEADLINE_EXCEEDED: Failure.REJECTED,
    Code.INTERNAL: Failure.BACKEND,
}


class Latencies(NamedTuple):
    """The times of one request, in microseconds."""

    ended_s: float
    """On the monotonic clock."""
    request: float
    queue: float
    compute_input: float
    compute_infer: float
    compute_output: float

    @classmethod
    def of(cls, total_ns: int, timings: RequestTimings, infer_ns: int) -> Latencies:
        return cls(
            time.monotonic(),
            total_ns / 1000,
            timings.queue_ns / 1000,
            timings.input_ns / 1000,
            infer_ns / 1000,
            timings.output_ns / 1000,
        )


class Duration:
    """How often something happened and its total time in nanoseconds."""

    __slots__ = ("count", "ns")

    def __init__(self) -> None:
        self.count = 0
        self.ns = 0

    def add(self, ns: int) -> None:
        self.count += 1
        self.ns += ns

    def to_message(self) -> StatisticDuration:
        return StatisticDuration(count=self.count, ns=self.ns)


class _Compute:
    """Times of input, inference and output over many requests or executions."""

    __slots__ = ("count", "infer_ns", "input_ns", "output_ns")

    def __init__(self) -> None:
        self.count = 0
        self.input_ns = 0
        self.infer_ns = 0
        self.output_ns = 0

    def total(self, ns: int) -> StatisticDuration:
        """Return `ns` as the total time of all of them."""
        return StatisticDuration(count=self.count, ns=ns)


class _ResponseDurations:
    """The n-th responses of all requests."""

    __slots__ = ("cancel", "empty", "fail", "infer", "output", "success")

    def __init__(self) -> None:
        self.infer = Duration()
        self.output = Duration()
        self.success = Duration()
        self.fail = Duration()
        self.empty = Duration()
        self.cancel = Duration()


class VersionStatistics:
    """The counts of one version of a model."""

    def __init__(self, name: str, version: str, tags: Mapping[str, str] | None = None) -> None:
        """`tags`: become labels of its metrics."""
        self.name = name
        self.version = version
        self.tags = tags or {}
        self.inferences = 0
        self.executions = 0
        self.fail = Duration()
        self.failures = dict.fromkeys(Failure, 0)
        """Failed requests by cause, without cancelled ones."""
        self.latencies: deque[Latencies] | None = None
        """Latencies of the newest requests that succeeded; None: they are not kept."""
        self._success = Duration()
        self._queue = Duration()
        self._cache_hit = Duration()
        self._cache_miss = Duration()
        self._computed = _Compute()
        self._last_inference_ms = 0
        self._batches: dict[int, _Compute] = {}
        self._responses: dict[int, _ResponseDurations] = {}

    def keep_latencies(self) -> None:
        """Keep the latencies of requests from now on."""
        self.latencies = deque(maxlen=MAX_LATENCIES)

    def succeeded(self, total_ns: int, timings: RequestTimings) -> None:
        """Count a request that succeeded, `total_ns` after it arrived."""
        success, queue = self._success, self._queue
        success.count += 1
        success.ns += total_ns
        rest_ns = total_ns - timings.queue_ns - timings.input_ns - timings.output_ns
        infer_ns = timings.infer_ns or max(0, rest_ns)
        if self.latencies is not None:
            self.latencies.append(Latencies.of(total_ns, timings, infer_ns))
        queue.count += 1
        queue.ns += timings.queue_ns
        self._last_inference_ms = time.time_ns() // 1_000_000
        if timings.cache_hit_ns or timings.cache_miss_ns:
            self._looked_up(timings)
        if timings.cache_hit_ns:
            return
        computed = self._computed
        computed.count += 1
        computed.input_ns += timings.input_ns
        computed.infer_ns += infer_ns
        computed.output_ns += timings.output_ns
        self.inferences += timings.rows
        if timings.batched:
            self.executed(timings)
        else:
            self._execution(timings.rows, timings.input_ns, infer_ns, timings.output_ns)

    def warmed_up(self, total_ns: int, timings: RequestTimings) -> None:
        """Count the execution of a warm-up, which is no inference of a client."""
        rest_ns = max(0, total_ns - timings.queue_ns - timings.input_ns - timings.output_ns)
        if timings.batched:
            self.executed(timings)
        else:
            self._execution(timings.rows, timings.input_ns, timings.infer_ns or rest_ns, timings.output_ns)

    def failed(self, total_ns: int, timings: RequestTimings, code: Code) -> None:
        """Count a request that ended with an error of this code."""
        self.fail.add(total_ns)
        self.failures[_REASONS.get(code, Failure.OTHER)] += 1
        self._looked_up(timings)
        if timings.batched:
            self.executed(timings)

    def cancelled(self, waited_ns: int, responses: int, timings: RequestTimings) -> None:
        """Count a request whose caller left or deadline passed after `responses` responses; `waited_ns` after it arrived."""
        self._response(responses).cancel.add(waited_ns)
        if timings.batched:
            self.executed(timings)

    def _looked_up(self, timings: RequestTimings) -> None:
        """Count the lookup in the response cache, if there was one."""
        if timings.cache_hit_ns:
            self._cache_hit.add(timings.cache_hit_ns)
        elif timings.cache_miss_ns:
            self._cache_miss.add(timings.cache_miss_ns)

    def executed(self, timings: RequestTimings) -> None:
        """Count the execution that a request is accounted for, if any: it ran, however the request ended."""
        if timings.execution_rows:
            self._execution(timings.execution_rows, timings.input_ns, timings.infer_ns, timings.output_ns)

    def responded(self, index: int, infer_ns: int, output_ns: int, *, empty: bool = False) -> None:
        """Count response number `index` (from 0) of a decoupled request; `infer_ns` is the time since the one before it."""
        response = self._response(index)
        if empty:
            response.empty.add(infer_ns + output_ns)
            return
        response.infer.add(infer_ns)
        response.output.add(output_ns)
        response.success.add(infer_ns + output_ns)

    def response_failed(self, index: int, ns: int) -> None:
        """Count a decoupled request that failed before its response number `index`."""
        self._response(index).fail.add(ns)

    @property
    def cancellations(self) -> int:
        """How many requests were cancelled."""
        return sum(response.cancel.count for response in tuple(self._responses.values()))

    def inference(self) -> InferStatistics:
        """Return the counts and times of all requests. Safe to call on any thread."""
        computed = self._computed
        return InferStatistics(
            success=self._success.to_message(),
            fail=self.fail.to_message(),
            queue=self._queue.to_message(),
            compute_input=computed.total(computed.input_ns),
            compute_infer=computed.total(computed.infer_ns),
            compute_output=computed.total(computed.output_ns),
            cache_hit=self._cache_hit.to_message(),
            cache_miss=self._cache_miss.to_message(),
        )

    def to_message(self) -> ModelStatistics:
        return ModelStatistics(
            name=self.name,
            version=self.version,
            last_inference=self._last_inference_ms,
            inference_count=self.inferences,
            execution_count=self.executions,
            inference_stats=self.inference(),
            batch_stats=[
                InferBatchStatistics(
                    batch_size=size,
                    compute_input=batch.total(batch.input_ns),
                    compute_infer=batch.total(batch.infer_ns),
                    compute_output=batch.total(batch.output_ns),
                )
                for size, batch in sorted(self._batches.items())
            ],
            response_stats={
                str(index): InferResponseStatistics(
                    compute_infer=response.infer.to_message(),
                    compute_output=response.output.to_message(),
                    success=response.success.to_message(),
                    fail=response.fail.to_message(),
                    empty_response=response.empty.to_message(),
                    cancel=response.cancel.to_message(),
                )
                for index, response in sorted(self._responses.items())
            },
        )

    def _execution(self, rows: int, input_ns: int, infer_ns: int, output_ns: int) -> None:
        self.executions += 1
        batch = self._batches.get(rows)
        if batch is None:
            batch = self._batches[rows] = _Compute()
        batch.count += 1
        batch.input_ns += input_ns
        batch.infer_ns += infer_ns
        batch.output_ns += output_ns

    def _response(self, index: int) -> _ResponseDurations:
        index = min(index, MAX_RESPONSE_INDEX)
        response = self._responses.get(index)
        if response is None:
            response = self._responses[index] = _ResponseDurations()
        return response
