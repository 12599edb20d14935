"""One request of a worker, counted once: its metrics, its statistics, its span and its trace."""

from __future__ import annotations

import asyncio
import logging
from time import perf_counter_ns
from types import TracebackType

from dynamo.common.errors import Code
from dynamo.common.observability.telemetry import code_of
from dynamo.common.observability.tracing import Span
from dynamo.worker.engine.base import RequestTimings
from dynamo.worker.observability.metrics import WorkerModelMetrics
from dynamo.worker.observability.request_trace import RequestTrace
from dynamo.worker.observability.statistics import VersionStatistics

log = logging.getLogger(__name__)


class RequestRecord:
    """Counts the beginning of a request when it is entered, and its end, of whatever kind, when it is left.

    The span of a request that succeeded is left open, for `spans` to add the phases of its time.
    """

    __slots__ = (
        "_decoupled",
        "_last_ns",
        "_request_bytes",
        "_responses",
        "_start_ns",
        "_statistics",
        "metrics",
        "sent_bytes",
        "span",
        "timings",
        "trace",
    )

    def __init__(
        self,
        metrics: WorkerModelMetrics,
        statistics: VersionStatistics,
        span: Span | None,
        timings: RequestTimings,
        request_bytes: int,
        start_ns: int,
        *,
        decoupled: bool,
        trace: RequestTrace | None = None,
    ) -> None:
        """`start_ns`: when the request arrived, by `perf_counter_ns`."""
        self.metrics = metrics
        self.span = span
        self.trace = trace
        self.timings = timings
        self.sent_bytes = 0
        self._statistics = statistics
        self._start_ns = self._last_ns = start_ns
        self._responses = 0
        self._decoupled = decoupled
        self._request_bytes = request_bytes

    def __enter__(self) -> RequestRecord:
        self.metrics.started(self._request_bytes)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        taken_ns = perf_counter_ns() - self._start_ns
        if self.trace is not None:
            self.trace.end(self.timings, has_failed=error is not None)
        if error is None:
            self._statistics.succeeded(taken_ns, self.timings)
            if log.isEnabledFor(logging.DEBUG):
                log.debug("request ends after %.1f ms: success", taken_ns / 1e6)
            self.metrics.succeeded(self._statistics.version, taken_ns / 1e9, self.sent_bytes, self.timings.queue_ns / 1e9)
        elif isinstance(error, asyncio.CancelledError | GeneratorExit):
            self._statistics.cancelled(taken_ns, self._responses, self.timings)
            self._fail(taken_ns, Code.CANCELLED)
        else:
            self._statistics.failed(taken_ns, self.timings, code_of(error))
            if self._decoupled:
                self._statistics.response_failed(self._responses, perf_counter_ns() - self._last_ns)
            self._fail(taken_ns, code_of(error))

    def responded(self, made_ns: int, sent_bytes: int, *, empty: bool) -> None:
        """Count a response of a decoupled model, made at `made_ns` and encoded now."""
        now = perf_counter_ns()
        self.timings.output_ns += now - made_ns
        self._statistics.responded(self._responses, made_ns - self._last_ns, now - made_ns, empty=empty)
        self._responses += 1
        self.sent_bytes += sent_bytes
        self._last_ns = now

    def _fail(self, taken_ns: int, code: Code) -> None:
        log.debug("request ends after %.1f ms: %s", taken_ns / 1e6, code)
        self.metrics.failed(self._statistics.version, taken_ns / 1e9, self.sent_bytes, code)
        if self.span is not None:
            self.span.end(code)
