"""One request of a worker: counted once, in its metrics and its statistics, and kept by its sinks, if it has any.

Sinks are its span and its trace in Triton's format. Both have the phases of its time from `phases_of`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from itertools import accumulate, pairwise
from time import perf_counter_ns
from typing import NamedTuple

from dynamo.common.errors import Code
from dynamo.common.generation import Summary
from dynamo.common.observability.telemetry import code_of
from dynamo.common.tensors.request import TensorRequest
from dynamo.worker.engine.base import RequestTimings, TensorResponse
from dynamo.worker.observability.metrics import WorkerModelMetrics
from dynamo.worker.observability.statistics import VersionStatistics

log = logging.getLogger(__name__)


class Phase(NamedTuple):
    """A part of a request's time, in nanoseconds since the request began."""

    name: str
    start_ns: int
    end_ns: int


def phases_of(timings: RequestTimings, taken_ns: int, summary: Summary | None = None) -> Sequence[Phase]:
    """Return the phases of a request, in their order, none of which ends after `taken_ns`. `summary`: of a generation."""
    queue_ns, input_ns, output_ns = timings.queue_ns, timings.input_ns, timings.output_ns
    if summary is not None:
        durations = {"queue": queue_ns, "prefill": int(summary.prefill_ms * 1e6), "decode": taken_ns}
    else:
        infer_ns = timings.infer_ns or max(0, taken_ns - queue_ns - input_ns - output_ns)
        durations = {"queue": queue_ns, "input": input_ns, "infer": infer_ns, "output": output_ns}
    times = [min(ns, taken_ns) for ns in accumulate(durations.values(), initial=0)]
    return [Phase(name, start, end) for name, (start, end) in zip(durations, pairwise(times), strict=True)]


class RequestSink:
    """Keeps one request of a client in a format of its own. This base keeps no tensors."""

    def request(self, request: TensorRequest) -> None:
        """Keep the inputs."""

    def response(self, response: TensorResponse) -> None:
        """Keep the outputs of a response."""

    def end(self, timings: RequestTimings, summary: Summary | None, error: Code | None) -> None:
        """Keep the phases and the end. `summary`: of a generation; `error`: of a request that failed."""
        raise NotImplementedError


class RequestRecord:
    """Counts the beginning of a request when it is made, and its end by `succeed` or `fail`, of which one is called, once."""

    __slots__ = (
        "_decoupled",
        "_is_logged",
        "_last_ns",
        "_metrics",
        "_responses",
        "_start_ns",
        "_statistics",
        "_timings",
        "sent_bytes",
        "sinks",
    )

    def __init__(
        self,
        metrics: WorkerModelMetrics,
        statistics: VersionStatistics,
        sinks: tuple[RequestSink, ...],
        timings: RequestTimings,
        request_bytes: int,
        start_ns: int,
        *,
        decoupled: bool,
    ) -> None:
        """`start_ns`: when the request arrived, by `perf_counter_ns`."""
        metrics.started(request_bytes)
        self._is_logged = log.isEnabledFor(logging.DEBUG)
        if self._is_logged:
            log.debug("request begins")
        self.sinks = sinks
        self.sent_bytes = 0
        self._metrics = metrics
        self._statistics = statistics
        self._timings = timings
        self._start_ns = self._last_ns = start_ns
        self._responses = 0
        self._decoupled = decoupled

    def succeed(self, summary: Summary | None = None) -> None:
        """Count a request that succeeded. `summary`: of a generation."""
        taken_ns = perf_counter_ns() - self._start_ns
        statistics, timings = self._statistics, self._timings
        if summary is not None:
            timings.queue_ns = int(summary.queue_ms * 1e6)
        statistics.succeeded(taken_ns, timings)
        if self._is_logged:
            log.debug("request ends after %.1f ms: success", taken_ns / 1e6)
        self._metrics.succeeded(statistics.version, taken_ns / 1e9, self.sent_bytes, timings.queue_ns / 1e9, summary)
        for sink in self.sinks:
            sink.end(timings, summary, None)

    def fail(self, error: BaseException) -> None:
        """Count a request that failed or was cancelled."""
        taken_ns = perf_counter_ns() - self._start_ns
        if isinstance(error, asyncio.CancelledError | GeneratorExit):
            code = Code.CANCELLED
            self._statistics.cancelled(taken_ns, self._responses, self._timings)
        else:
            code = code_of(error)
            self._statistics.failed(taken_ns, self._timings, code)
            if self._decoupled:
                self._statistics.response_failed(self._responses, perf_counter_ns() - self._last_ns)
        if self._is_logged:
            log.debug("request ends after %.1f ms: %s", taken_ns / 1e6, code)
        self._metrics.failed(self._statistics.version, taken_ns / 1e9, self.sent_bytes, code)
        for sink in self.sinks:
            sink.end(self._timings, None, code)

    def request(self, request: TensorRequest) -> None:
        """Tell the sinks of the inputs."""
        for sink in self.sinks:
            sink.request(request)

    def response(self, response: TensorResponse) -> None:
        """Tell the sinks of the outputs of a response."""
        for sink in self.sinks:
            sink.response(response)

    def responded(self, made_ns: int, sent_bytes: int, *, empty: bool) -> None:
        """Count a response of a decoupled model, made at `made_ns` and encoded now."""
        now = perf_counter_ns()
        self._timings.output_ns += now - made_ns
        self._statistics.responded(self._responses, made_ns - self._last_ns, now - made_ns, empty=empty)
        self._responses += 1
        self.sent_bytes += sent_bytes
        self._last_ns = now
