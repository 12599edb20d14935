"""Metrics under the names that dashboards of the field know, and W3C trace context.

Every object here is made by a process's `app` and handed down. Label children are looked up once per model or method and
kept, so that a request costs a handful of increments, and a token no more than a bisection in a local list.
"""

from __future__ import annotations

import re
import secrets
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.multiprocess import MultiProcessCollector

from dynamo.common.errors import Code
from dynamo.common.names import Endpoint, InstanceId

SECONDS = (
    *(0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75),
    *(1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0),
)
"""Upper bounds of duration buckets: 1 ms to 10 min."""
TOKENS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)

OTHER_MODEL = "other"
"""Label of models past the cardinality cap."""
UNKNOWN_MODEL = "unknown_model"
"""Label of names that no instance serves: clients choose them, so they may not become labels."""

_FLUSH_TOKENS = 128


def make_registry() -> CollectorRegistry:
    """A registry with the metrics of the process and the interpreter."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    return registry


def render(registry: CollectorRegistry, multiprocess_folder: str | None = None) -> tuple[bytes, str]:
    """The text of a scrape and its content type.

    With `multiprocess_folder`, the sum over all processes that were started with PROMETHEUS_MULTIPROC_DIR set to it.
    """
    if multiprocess_folder is not None:
        registry = CollectorRegistry()
        MultiProcessCollector(registry, path=multiprocess_folder)  # type: ignore[no-untyped-call]
    return generate_latest(registry), CONTENT_TYPE_LATEST


class RequestType(StrEnum):
    UNARY = "unary"
    STREAM = "stream"


_ERROR_TYPES = {
    Code.INVALID_REQUEST: "validation",
    Code.PAYLOAD_TOO_LARGE: "validation",
    Code.UNAUTHENTICATED: "unauthenticated",
    Code.FORBIDDEN: "forbidden",
    Code.NOT_FOUND: "not_found",
    Code.UNSUPPORTED: "not_implemented",
    Code.OVERLOADED: "overload",
    Code.UNAVAILABLE: "unavailable",
    Code.DEADLINE_EXCEEDED: "response_timeout",
    Code.CANCELLED: "cancelled",
    Code.INTERNAL: "internal",
}


class RuntimeMetrics:
    """What every process has: its version, and whether etcd and NATS can be reached."""

    def __init__(self, registry: CollectorRegistry, *, role: str, version: str) -> None:
        info = Gauge("dynamo_runtime_info", "Always 1.", ("role", "version"), registry=registry, multiprocess_mode="livemax")
        info.labels(role, version).set(1)
        self.etcd_stale = Gauge(
            "dynamo_runtime_etcd_stale",
            "1 while etcd cannot be reached and the last known view is used.",
            registry=registry,
            multiprocess_mode="livemax",
        )
        self.nats_connected = Gauge(
            "dynamo_runtime_nats_connected",
            "1 while connected to NATS.",
            registry=registry,
            multiprocess_mode="livemin",
        )


class FrontendMetrics:
    """`dynamo_frontend_*`. `for_model` gives the bound children of one model."""

    def __init__(self, registry: CollectorRegistry, *, max_models: int = 500) -> None:
        self._max_models = max_models
        self._models: dict[str, ModelMetrics] = {}
        self._registry = registry
        by_model = ("model",)
        by_request = ("model", "endpoint", "request_type")
        self.requests = self._counter("requests", "Requests answered.", (*by_request, "status", "error_type"))
        self.inflight = self._gauge("inflight_requests", "Requests being answered.", by_model)
        self.queued = self._gauge("queued_requests", "Requests waiting for their first answer.", by_model)
        self.ready = self._gauge("model_ready", "1 if an instance serves the model.", by_model, "livemax")
        self.duration = self._histogram("request_duration_seconds", "From arrival to the last byte.", by_model)
        self.first_token = self._histogram("time_to_first_token_seconds", "From arrival to the first token.", by_model)
        self.inter_token = self._histogram("inter_token_latency_seconds", "Between two tokens.", by_model)
        self.input_tokens = self._histogram("input_sequence_tokens", "Prompt tokens.", by_model, TOKENS)
        self.output_tokens = self._histogram("output_sequence_tokens", "Generated tokens.", by_model, TOKENS)
        self.cached_tokens = self._histogram("cached_tokens", "Prompt tokens found in a cache.", by_model, (0, *TOKENS))
        self.output_tokens_total = self._counter("output_tokens", "Generated tokens.", by_model)
        self.retries = self._counter("retries", "Requests sent to another instance before their first answer.", by_model)
        self.migrations = self._counter("model_migration", "Requests moved to another instance.", ("model", "migration_type"))
        self.cancellations = self._counter("model_cancellation", "Requests cancelled by their client.", by_request)
        self.rejected = self._counter("model_rejection", "Requests refused to protect others.", ("model", "reason"))
        self.disconnected_clients = self._gauge("disconnected_clients", "Clients that left before their answer.", ())

    def for_model(self, name: str) -> ModelMetrics:
        """Of a model that is being served. Past the cap, models share the label `other`."""
        found = self._models.get(name)
        if found is None:
            label = name if len(self._models) < self._max_models else OTHER_MODEL
            found = self._models.get(label) or ModelMetrics(self, label)
            self._models[label] = found
        return found

    def for_unknown_model(self) -> ModelMetrics:
        """For requests that name a model nobody serves."""
        return self.for_model(UNKNOWN_MODEL)

    def forget(self, name: str) -> None:
        """No instance serves this model any more: its gauge says so; its counters stay."""
        self.for_model(name).ready.set(0)

    def _counter(self, name: str, help: str, labels: Sequence[str]) -> Counter:
        return Counter(f"dynamo_frontend_{name}", help, labels, registry=self._registry)

    def _gauge(self, name: str, help: str, labels: Sequence[str], mode: str = "livesum") -> Gauge:
        return Gauge(f"dynamo_frontend_{name}", help, labels, registry=self._registry, multiprocess_mode=mode)  # type: ignore[arg-type]

    def _histogram(self, name: str, help: str, labels: Sequence[str], buckets: Sequence[float] = SECONDS) -> Histogram:
        return Histogram(f"dynamo_frontend_{name}", help, labels, registry=self._registry, buckets=buckets)


class ModelMetrics:
    """The children of one model, bound once."""

    def __init__(self, all_models: FrontendMetrics, label: str) -> None:
        self.label = label
        self._all = all_models
        self.inflight = all_models.inflight.labels(label)
        self.queued = all_models.queued.labels(label)
        self.ready = all_models.ready.labels(label)
        self.duration = all_models.duration.labels(label)
        self.first_token = all_models.first_token.labels(label)
        self.inter_token = all_models.inter_token.labels(label)
        self.input_tokens = all_models.input_tokens.labels(label)
        self.output_tokens = all_models.output_tokens.labels(label)
        self.output_tokens_total = all_models.output_tokens_total.labels(label)
        self.cached_tokens = all_models.cached_tokens.labels(label)
        self.retries = all_models.retries.labels(label)
        self._outcomes: dict[tuple[str, RequestType, Code | None], Counter] = {}

    def start(self, endpoint: str, request_type: RequestType, clock: Callable[[], float] = time.monotonic) -> Request:
        """A request has arrived. `endpoint` is one of the API's own names (`tensor`, `completions`, …), never a client's."""
        return Request(self, endpoint, request_type, clock)

    def migrated(self, *, ongoing: bool) -> None:
        """A request went on at another instance, before (`ongoing` False) or after its first answer."""
        self._all.migrations.labels(self.label, "ongoing_request" if ongoing else "new_request").inc()

    def rejected(self, reason: str) -> None:
        """A request was refused to protect others; `reason` is one of ours, never a client's text."""
        self._all.rejected.labels(self.label, reason).inc()

    def outcome(self, endpoint: str, request_type: RequestType, error: Code | None) -> Counter:
        key = (endpoint, request_type, error)
        counter = self._outcomes.get(key)
        if counter is None:
            status = "success" if error is None else "error"
            error_type = "" if error is None else _ERROR_TYPES[error]
            counter = self._all.requests.labels(self.label, endpoint, request_type.value, status, error_type)
            self._outcomes[key] = counter
        return counter

    def cancelled(self, endpoint: str, request_type: RequestType) -> None:
        self._all.cancellations.labels(self.label, endpoint, request_type.value).inc()
        self._all.disconnected_clients.inc()


class Request:
    """The measurements of one request. `finish` exactly once, on every path."""

    __slots__ = (
        *("_clock", "_endpoint", "_gap_sum", "_gaps", "_last", "_metrics", "_output", "_pending", "_queued", "_started"),
        "_type",
    )

    def __init__(self, metrics: ModelMetrics, endpoint: str, request_type: RequestType, clock: Callable[[], float]) -> None:
        self._metrics = metrics
        self._endpoint = endpoint
        self._type = request_type
        self._clock = clock
        self._started = clock()
        self._last = 0.0
        self._output = 0
        self._gaps: list[int] | None = None
        self._gap_sum = 0.0
        self._pending = 0
        self._queued = True
        metrics.inflight.inc()
        metrics.queued.inc()

    def answered(self) -> None:
        """The first part of the answer is there; `tokens` says so too."""
        if self._queued:
            self._queued = False
            self._metrics.queued.dec()

    def tokens(self, count: int) -> None:
        """`count` tokens (at least 1) have arrived together; the time since the last ones is shared among them."""
        now = self._clock()
        if self._output == 0:
            self.answered()
            self._metrics.first_token.observe(now - self._started)
            count_gaps, gap = count - 1, 0.0
        else:
            count_gaps, gap = count, (now - self._last) / count
        self._output += count
        self._last = now
        if count_gaps:
            self._add_gaps(gap, count_gaps)

    def finish(
        self, error: Code | None = None, *, input_tokens: int = 0, output_tokens: int | None = None, cached_tokens: int = 0
    ) -> None:
        """The last byte went out, or the request failed. `output_tokens` counts where `tokens` was not called."""
        metrics = self._metrics
        self.answered()
        self._flush_gaps()
        metrics.inflight.dec()
        metrics.duration.observe(self._clock() - self._started)
        metrics.outcome(self._endpoint, self._type, error).inc()
        if error is Code.CANCELLED:
            metrics.cancelled(self._endpoint, self._type)
        output = self._output if output_tokens is None else output_tokens
        if input_tokens:
            metrics.input_tokens.observe(input_tokens)
            metrics.cached_tokens.observe(cached_tokens)
        if output:
            metrics.output_tokens.observe(output)
            metrics.output_tokens_total.inc(output)

    def _add_gaps(self, gap: float, count: int) -> None:
        """Collected here and added in bulk: an `observe` per token would cost more than forwarding the token."""
        if self._gaps is None:
            self._gaps = [0] * (len(SECONDS) + 1)
        self._gaps[bisect_left(SECONDS, gap)] += count
        self._gap_sum += gap * count
        self._pending += count
        if self._pending >= _FLUSH_TOKENS:
            self._flush_gaps()

    def _flush_gaps(self) -> None:
        if self._gaps is not None:
            observe_many(self._metrics.inter_token, self._gaps, self._gap_sum)
            self._gaps = None
            self._gap_sum = 0.0
            self._pending = 0


def observe_many(histogram: Histogram, counts: Sequence[int], total: float) -> None:
    """Adds observations that were sorted into `histogram`'s buckets already; `total` is their sum."""
    for bucket, count in zip(histogram._buckets, counts, strict=True):
        if count:
            bucket.inc(count)
    histogram._sum.inc(total)


class GrpcServerMetrics:
    """`grpc_server_*`, as the interceptors of other languages name them. `for_method` gives bound children."""

    def __init__(self, registry: CollectorRegistry) -> None:
        labels = ("grpc_type", "grpc_service", "grpc_method")
        self.started = Counter("grpc_server_started", "RPCs started.", labels, registry=registry)
        self.handled = Counter("grpc_server_handled", "RPCs ended.", (*labels, "grpc_code"), registry=registry)
        self.received = Counter("grpc_server_msg_received", "Messages received.", labels, registry=registry)
        self.sent = Counter("grpc_server_msg_sent", "Messages sent.", labels, registry=registry)
        self.handling = Histogram("grpc_server_handling_seconds", "Duration of RPCs.", labels, registry=registry, buckets=SECONDS)

    def for_method(self, service: str, method: str, grpc_type: str) -> GrpcMethodMetrics:
        """To call once per method of the service, at start. `grpc_type` is `unary` or `bidi_stream`."""
        return GrpcMethodMetrics(self, (grpc_type, service, method))


class GrpcMethodMetrics:
    """The children of one RPC method, bound once. Calls: `started`, `received` and `sent` per message, `handled`."""

    def __init__(self, server: GrpcServerMetrics, labels: tuple[str, str, str]) -> None:
        self._handled = server.handled
        self._labels = labels
        self._codes: dict[str, Counter] = {}
        self._duration = server.handling.labels(*labels)
        self.started = server.started.labels(*labels).inc
        self.received = server.received.labels(*labels).inc
        self.sent = server.sent.labels(*labels).inc

    def handled(self, code: str, duration_s: float) -> None:
        """`code` is the name of the status, written `OK`, `InvalidArgument`, …"""
        counter = self._codes.get(code)
        if counter is None:
            counter = self._codes[code] = self._handled.labels(*self._labels, code)
        counter.inc()
        self._duration.observe(duration_s)


class WorkerMetrics:
    """`dynamo_component_*` of one instance."""

    def __init__(self, registry: CollectorRegistry, endpoint: Endpoint, instance: InstanceId) -> None:
        self._labels = (endpoint.namespace, endpoint.component, endpoint.name, f"{instance:x}")
        names = ("dynamo_namespace", "dynamo_component", "dynamo_endpoint", "worker_id")
        by_model = (*names, "model")
        prefix = "dynamo_component_"
        self.requests = Counter(f"{prefix}requests", "Requests taken.", by_model, registry=registry)
        self.inflight = Gauge(f"{prefix}inflight_requests", "Requests being worked on.", by_model, registry=registry)
        self.request_bytes = Counter(f"{prefix}request_bytes", "Bytes of requests.", by_model, registry=registry)
        self.response_bytes = Counter(f"{prefix}response_bytes", "Bytes of answers.", by_model, registry=registry)
        self.duration = Histogram(
            f"{prefix}request_duration_seconds", "From arrival to the end.", by_model, registry=registry, buckets=SECONDS
        )
        self.cancellations = Counter(f"{prefix}cancellation", "Requests cancelled.", by_model, registry=registry)
        self.errors = Counter(f"{prefix}errors", "Requests that failed.", (*by_model, "error_type"), registry=registry)
        uptime = Gauge(f"{prefix}uptime_seconds", "Since the start of the process.", names, registry=registry)
        started = time.monotonic()
        uptime.labels(*self._labels).set_function(lambda: time.monotonic() - started)
        self._models: dict[str, WorkerModelMetrics] = {}

    def for_model(self, name: str) -> WorkerModelMetrics:
        """Of a model that this instance serves."""
        if name not in self._models:
            self._models[name] = WorkerModelMetrics(self, (*self._labels, name))
        return self._models[name]


class WorkerModelMetrics:
    """The children of one model of an instance, bound once."""

    def __init__(self, worker: WorkerMetrics, labels: tuple[str, ...]) -> None:
        self._errors = worker.errors
        self._labels = labels
        self._requests = worker.requests.labels(*labels)
        self._inflight = worker.inflight.labels(*labels)
        self._request_bytes = worker.request_bytes.labels(*labels)
        self._response_bytes = worker.response_bytes.labels(*labels)
        self._duration = worker.duration.labels(*labels)
        self._cancellations = worker.cancellations.labels(*labels)

    def started(self, request_bytes: int) -> None:
        self._requests.inc()
        self._inflight.inc()
        self._request_bytes.inc(request_bytes)

    def finished(self, duration_s: float, response_bytes: int, error: Code | None = None) -> None:
        """Exactly once for each `started`."""
        self._inflight.dec()
        self._duration.observe(duration_s)
        self._response_bytes.inc(response_bytes)
        if error is Code.CANCELLED:
            self._cancellations.inc()
        elif error is not None:
            self._errors.labels(*self._labels, _ERROR_TYPES[error]).inc()


# --- trace context ---------------------------------------------------------------------------------------------------

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


@dataclass(frozen=True, slots=True)
class TraceContext:
    """One span of a W3C trace."""

    trace_id: str
    """32 hexadecimal digits."""
    span_id: str
    """16 hexadecimal digits."""
    sampled: bool = False
    state: str = ""
    """`tracestate`, passed on as it came."""

    @classmethod
    def parse(cls, traceparent: str, tracestate: str = "") -> TraceContext | None:
        """None for what is not a valid `traceparent`: a caller's mistake there must not fail its request."""
        match = _TRACEPARENT.fullmatch(traceparent.strip().lower()) if len(traceparent) <= 256 else None
        if match is None:
            return None
        number, trace_id, span_id, flags, more = match.groups()
        if number == "ff" or (number == "00" and more) or not trace_id.strip("0") or not span_id.strip("0"):
            return None
        return cls(trace_id, span_id, bool(int(flags, 16) & 1), tracestate[:512])

    @classmethod
    def new(cls, *, sampled: bool = False) -> TraceContext:
        return cls(secrets.token_hex(16), secrets.token_hex(8), sampled)

    def child(self) -> TraceContext:
        """A new span of the same trace."""
        return replace(self, span_id=secrets.token_hex(8))

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{'01' if self.sampled else '00'}"
