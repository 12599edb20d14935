"""What the ports of a frontend say of their connections, `grpc_server_*` of their calls, and what its endpoint picker does."""

from __future__ import annotations

import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from dynamo.common.observability.tally import Amount, Tally
from dynamo.common.observability.telemetry import SECONDS

_PICKER_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.25, 1.0, 10.0)
_AGES_S = (0.1, 1, 10, 60, 600, 3600, 6 * 3600, 24 * 3600)


class ConnectionMetrics:
    """The connections of one protocol."""

    def __init__(self, connections: Gauge, open_ages: Gauge, ages: Histogram, clock: Callable[[], float]) -> None:
        self._connections = connections
        self._open_ages = open_ages
        self._ages = ages
        self._clock = clock
        self._count = 0
        self._opened_at = 0.0
        """The times at which the open ones were opened, added up."""

    def opened(self) -> None:
        self._connections.inc()
        self._count += 1
        self._opened_at += self._clock()

    def closed(self, age_s: float) -> None:
        self._connections.dec()
        self._ages.observe(age_s)
        self._count -= 1
        self._opened_at -= self._clock() - age_s

    def show(self) -> None:
        """Set the ages of those that are open. Called about once a second."""
        self._open_ages.set(self._count * self._clock() - self._opened_at if self._count else 0.0)


def connection_metrics(
    registry: CollectorRegistry, clock: Callable[[], float] = time.monotonic
) -> tuple[ConnectionMetrics, ConnectionMetrics]:
    """Return the metrics of HTTP and of gRPC. The `grpcio` server keeps its connections to itself, and counts none."""
    connections = Gauge(
        "dynamo_frontend_connections",
        "Connections that are open.",
        ("protocol",),
        registry=registry,
        multiprocess_mode="livesum",
    )
    open_ages = Gauge(
        "dynamo_frontend_open_connection_seconds",
        "Ages of the open connections, added up; by their number, the mean age.",
        ("protocol",),
        registry=registry,
        multiprocess_mode="livesum",
    )
    ages = Histogram(
        "dynamo_frontend_connection_seconds",
        "How long connections were open that are closed.",
        ("protocol",),
        registry=registry,
        buckets=_AGES_S,
    )
    http, grpc = (
        ConnectionMetrics(connections.labels(protocol), open_ages.labels(protocol), ages.labels(protocol), clock)
        for protocol in ("http", "grpc")
    )
    return http, grpc


class GrpcServerMetrics:
    """`grpc_server_*`, as the interceptors of other languages name them. `for_method` gives bound children."""

    def __init__(self, registry: CollectorRegistry) -> None:
        labels = ("grpc_type", "grpc_service", "grpc_method")
        self.tally = Tally(registry)
        self.started = Counter("grpc_server_started", "RPCs started.", labels, registry=registry)
        self.handled = Counter("grpc_server_handled", "RPCs ended.", (*labels, "grpc_code"), registry=registry)
        self.received = Counter("grpc_server_msg_received", "Messages received.", labels, registry=registry)
        self.sent = Counter("grpc_server_msg_sent", "Messages sent.", labels, registry=registry)
        self.handling = Histogram("grpc_server_handling_seconds", "Duration of RPCs.", labels, registry=registry, buckets=SECONDS)

    def for_method(self, service: str, method: str, grpc_type: str) -> GrpcMethodMetrics:
        """Return the metrics of a method; call it once per method. `grpc_type` is `unary`, `server_stream` or `bidi_stream`."""
        return GrpcMethodMetrics(self, (grpc_type, service, method))


class GrpcMethodMetrics:
    """The children of one RPC method, bound once. Calls: add to `started`, `received` and `sent`, and `handled`."""

    def __init__(self, server: GrpcServerMetrics, labels: tuple[str, str, str]) -> None:
        self._server = server
        self._labels = labels
        self._codes: dict[str, Amount] = {}
        tally = server.tally
        self.started = tally.amount(server.started.labels(*labels))
        self.received = tally.amount(server.received.labels(*labels))
        self.sent = tally.amount(server.sent.labels(*labels))
        self.duration = tally.spread(server.handling, *labels)

    def handled(self, code: str, duration_s: float) -> None:
        """`code` is the name of the status, written `OK`, `InvalidArgument`, …"""
        amount = self._codes.get(code)
        if amount is None:
            amount = self._codes[code] = self._server.tally.amount(self._server.handled.labels(*self._labels, code))
        amount.value += 1
        self.duration.observe(duration_s)


class PickerMetrics:
    """What the endpoint picker counts; the requests themselves are in the metrics of all requests."""

    def __init__(self, registry: CollectorRegistry) -> None:
        requests = Counter(
            "dynamo_frontend_picker_requests",
            "Requests of gateways by what became of them: routed by their prompt, sent where the load is least, or refused.",
            ("outcome",),
            registry=registry,
        )
        self._requests = {outcome: requests.labels(outcome) for outcome in ("routed", "least_loaded", "refused")}
        self._seconds = Histogram(
            "dynamo_frontend_picker_seconds",
            "From the end of a gateway's request to the choice of its endpoint.",
            registry=registry,
            buckets=_PICKER_SECONDS,
        )
        self._served_elsewhere = Counter(
            "dynamo_frontend_picker_served_elsewhere",
            "Responses that came from another endpoint than the picked one, as after a retry of the gateway.",
            registry=registry,
        )

    def picked(self, outcome: str, seconds: float) -> None:
        self._requests[outcome].inc()
        self._seconds.observe(seconds)

    def served_elsewhere(self) -> None:
        self._served_elsewhere.inc()
