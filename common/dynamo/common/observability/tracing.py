"""Traces: W3C context across processes, and spans that OpenTelemetry exports.

    async with open_tracing(options, "dynamo-frontend") as tracing:      # None: tracing is disabled
        span = None if tracing is None else tracing.begin("infer", headers)    # None: this request is not sampled
        if span is not None:
            headers = span.headers(headers)                              # for the next process
            ...
            span.end()

Without `--otlp-endpoint` nothing of OpenTelemetry is imported and a request costs a comparison with None; the context of callers
is passed on all the same. A request whose context is marked as sampled is always traced, one marked as not sampled never; of the
requests without a context, the share `--trace-sample-ratio` is traced.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dynamo.common import logs
from dynamo.common.config import ConfigError, project_version
from dynamo.common.errors import Code
from dynamo.common.options import TraceOptions

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span as OtelSpan
    from opentelemetry.trace import Tracer

Attributes = Mapping[str, str | int | float | bool]

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_FLUSH_S = 5.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TraceContext:
    """One span of a W3C trace."""

    trace_id: str
    """32 hexadecimal digits."""
    span_id: str
    """16 hexadecimal digits."""
    sampled: bool = False
    state: str = ""
    """`tracestate`, passed on unchanged."""

    @classmethod
    def parse(cls, traceparent: str, tracestate: str = "") -> TraceContext | None:
        """Parse the headers; None if `traceparent` is invalid, since a caller's mistake there must not fail its request."""
        match = _TRACEPARENT.fullmatch(traceparent.strip().lower()) if len(traceparent) <= 256 else None
        if match is None:
            return None
        number, trace_id, span_id, flags, more = match.groups()
        if number == "ff" or (number == "00" and more) or not trace_id.strip("0") or not span_id.strip("0"):
            return None
        return cls(trace_id, span_id, bool(int(flags, 16) & 1), tracestate[:512])

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{'01' if self.sampled else '00'}"


def context_of(headers: Mapping[str, str]) -> TraceContext | None:
    """Return the caller's context, if the headers hold a valid one, and add it to the log lines of this task."""
    traceparent = headers.get("traceparent")
    if not traceparent:
        return None
    context = TraceContext.parse(traceparent, headers.get("tracestate", ""))
    if context is not None:
        logs.trace_id.set(context.trace_id)
    return context


class Span:
    """A span of the work on a request, started when it was made. Call `end` exactly once."""

    __slots__ = ("_span", "_tracing", "context", "started_ns")

    def __init__(self, tracing: Tracing, span: OtelSpan, context: TraceContext, started_ns: int) -> None:
        self._tracing = tracing
        self._span = span
        self.context = context
        self.started_ns = started_ns
        """Unix time."""

    def headers(self, headers: Mapping[str, str]) -> dict[str, str]:
        """Return `headers` with this span as the parent of the next process's spans."""
        return {**headers, "traceparent": self.context.traceparent}

    def set(self, attributes: Attributes) -> None:
        self._span.set_attributes(attributes)

    def event(self, name: str) -> None:
        """Add an event at the current time."""
        self._span.add_event(name)

    def child(self, name: str, started_ns: int, ended_ns: int, attributes: Attributes | None = None) -> None:
        """Add a child span that has ended already; Unix times in nanoseconds."""
        self._tracing.start(name, self.context, started_ns, attributes, inside=True).end(ended_ns)

    def end(self, error: Code | None = None) -> None:
        """End the span; `error` is the code of the failure, if it failed."""
        if error is not None:
            self._tracing.mark_failed(self._span, error)
        self._span.end()


class Tracing:
    """Makes spans. One per process; use `open_tracing`."""

    def __init__(self, tracer: Tracer, sample_ratio: float) -> None:
        from opentelemetry import trace

        self._api = trace
        self._tracer = tracer
        self._ratio = sample_ratio

    def begin(
        self, name: str, headers: Mapping[str, str], attributes: Attributes | None = None, *, always: bool = False
    ) -> Span | None:
        """Start the span of a request with these headers; None if it is not sampled. `always`: sample it in any case."""
        parent = context_of(headers)
        sampled = always or (parent.sampled if parent is not None else self._ratio >= 1 or random.random() < self._ratio)
        if not sampled:
            return None
        started_ns = time.time_ns()
        span = self.start(name, parent, started_ns, attributes)
        made = span.get_span_context()
        context = TraceContext(f"{made.trace_id:032x}", f"{made.span_id:016x}", True, parent.state if parent is not None else "")
        logs.trace_id.set(context.trace_id)
        return Span(self, span, context, started_ns)

    def start(
        self,
        name: str,
        parent: TraceContext | None,
        started_ns: int,
        attributes: Attributes | None,
        *,
        inside: bool = False,
    ) -> OtelSpan:
        """Start an OpenTelemetry span: internal if `inside`, else that of a request from outside this process."""
        api = self._api
        context = None
        if parent is not None:
            outer = api.SpanContext(
                int(parent.trace_id, 16),
                int(parent.span_id, 16),
                is_remote=not inside,
                trace_flags=api.TraceFlags(api.TraceFlags.SAMPLED),
            )
            context = api.set_span_in_context(api.NonRecordingSpan(outer))
        kind = api.SpanKind.INTERNAL if inside else api.SpanKind.SERVER
        return self._tracer.start_span(name, context, kind, attributes, start_time=started_ns)

    def mark_failed(self, span: OtelSpan, error: Code) -> None:
        span.set_attribute("error.type", error.value)
        if error is not Code.CANCELLED:
            span.set_status(self._api.StatusCode.ERROR, error.value)


@asynccontextmanager
async def open_tracing(
    options: TraceOptions, service: str, attributes: Attributes | None = None
) -> AsyncIterator[Tracing | None]:
    """Export spans until the context is left, pending ones within some seconds. Yields None if no endpoint is configured.

    `attributes` describe the process. Raises ConfigError if the extra `otel` is not installed.
    """
    if options.otlp_endpoint is None:
        yield None
        return
    exporter = _exporter(options)
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.sampling import ALWAYS_ON

    about = {"service.name": service, "service.version": project_version(), **(attributes or {})}
    provider = TracerProvider(sampler=ALWAYS_ON, resource=Resource(about), shutdown_on_exit=False)
    # Its queue is bounded: when the collector is away, spans are dropped and requests go on.
    processor = BatchSpanProcessor(exporter, max_queue_size=8192, schedule_delay_millis=1000)
    provider.add_span_processor(processor)
    logging.getLogger("opentelemetry").setLevel(logging.ERROR)  # it retries by itself, with a warning each time
    _log.info(
        "traces go to %s, %g%% of the requests that come without a context", options.otlp_endpoint, options.sample_ratio * 100
    )
    try:
        yield Tracing(provider.get_tracer("dynamo"), options.sample_ratio)
    finally:
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, provider.force_flush, int(_FLUSH_S * 1000))
        await loop.run_in_executor(None, provider.shutdown)


def _exporter(options: TraceOptions) -> SpanExporter:
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise ConfigError("--otlp-endpoint needs OpenTelemetry: install the extra `otel`") from error
    endpoint = options.otlp_endpoint
    assert endpoint is not None
    return OTLPSpanExporter(endpoint=endpoint, insecure=not endpoint.startswith("https://"), timeout=_FLUSH_S)
