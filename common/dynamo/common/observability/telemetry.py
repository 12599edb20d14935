"""What the metrics of both processes share, under metric names that existing dashboards use.

Every object here is made by a process's `app` and passed down. Label children are looked up once per model or method and kept, so
that a request costs a few additions, and a token no more than a bisection in a local list.
"""

from __future__ import annotations

import asyncio
from collections import Counter as Totals
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal, TypeVar

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from dynamo.common.errors import Code, DynamoError
from dynamo.common.messaging.nats.connection import Connection
from dynamo.common.shared_memory.sharing import SharedMemory

M = TypeVar("M", Gauge, Counter, Histogram)

SECONDS = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
    *(1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0, 300.0, 600.0),
)
"""Upper bounds of duration buckets: 1 ms to 10 min. Few, since each is a series for each model."""

LAG_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
MAX_MODELS = 500
"""Models with a label of their own: the cap on the cardinality of metrics."""
OTHER_MODEL = "other"
"""Label of models beyond `MAX_MODELS`."""
LAG_PERIOD_S = 0.05


def make_registry() -> CollectorRegistry:
    """Make a registry with the metrics of the process and the interpreter."""
    disable_created_metrics()  # type: ignore[no-untyped-call]  # a series beside each counter, with the time at which it was made
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    return registry


def render(registry: CollectorRegistry, multiprocess_folder: str | None = None) -> tuple[bytes, str]:
    """Return the text of a scrape and its content type.

    With `multiprocess_folder`, the sum over all processes that were started with PROMETHEUS_MULTIPROC_DIR set to it.
    """
    if multiprocess_folder is not None:
        registry = CollectorRegistry()
        MultiProcessCollector(registry, path=multiprocess_folder)  # type: ignore[no-untyped-call]
        registry.register(_ProcessesCollector(Path(multiprocess_folder)))
        PlatformCollector(registry=registry)
    return generate_latest(registry), CONTENT_TYPE_LATEST


class _ProcessesCollector(Collector):
    """CPU time, memory and open files of all live processes that share a folder of metrics, added up.

    A process that ends takes its CPU time along, which Prometheus reads as a counter that was reset.
    """

    def __init__(self, folder: Path) -> None:
        # Files of gauges that count live processes only are removed when their process ends; all of us have such gauges.
        self._pids = {int(file.stem.rpartition("_")[2]) for file in folder.glob("gauge_live*.db")}

    def collect(self) -> Iterator[Metric]:
        totals: Totals[str] = Totals()
        for pid in self._pids:
            for metric in ProcessCollector(pid=lambda pid=pid: pid, registry=None).collect():  # type: ignore[misc]
                totals.update({sample.name: sample.value for sample in metric.samples})
        for name, family, help in (
            ("process_cpu_seconds_total", CounterMetricFamily, "CPU time of all processes."),
            ("process_resident_memory_bytes", GaugeMetricFamily, "Resident memory of all processes."),
            ("process_open_fds", GaugeMetricFamily, "Open file descriptors of all processes."),
        ):
            if name in totals:  # available on Linux only
                yield family(name, help, totals[name])


_ERROR_TYPES = {
    Code.INVALID_REQUEST: "validation",
    Code.PAYLOAD_TOO_LARGE: "validation",
    Code.UNAUTHENTICATED: "unauthenticated",
    Code.FORBIDDEN: "forbidden",
    Code.NOT_FOUND: "not_found",
    Code.ALREADY_EXISTS: "validation",
    Code.UNSUPPORTED: "not_implemented",
    Code.OVERLOADED: "overload",
    Code.RATE_LIMITED: "rate_limit",
    Code.UNAVAILABLE: "unavailable",
    Code.DEADLINE_EXCEEDED: "response_timeout",
    Code.CANCELLED: "cancelled",
    Code.INTERNAL: "internal",
    Code.UNKNOWN: "internal",
}


def code_of(error: BaseException) -> Code:
    """Return the code of a failure; INTERNAL for unforeseen exceptions."""
    if isinstance(error, DynamoError):
        return error.code
    return Code.CANCELLED if isinstance(error, asyncio.CancelledError) else Code.INTERNAL


def error_type(code: Code) -> str:
    """Return the metric label of a failure."""
    return _ERROR_TYPES[code]


class RuntimeMetrics:
    """Metrics that every process has: its version, and whether etcd and NATS can be reached."""

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


class LinkMetrics:
    """A process's connections to NATS, the requests that are open, and the event loop that serves them.

    `prefix` begins the names; `labels` are the same for all of them. What is measured of each connection has its purpose as a
    further label, `connection`.
    """

    def __init__(self, registry: CollectorRegistry, prefix: str, labels: Mapping[str, str] | None = None) -> None:
        self._registry = registry
        self._prefix = prefix
        self._labels = labels or {}
        of_connection = (*self._labels, "connection")
        help_ = "Since the last byte from NATS, which is pinged every few seconds."
        self._silence = Gauge(
            f"{prefix}_nats_silence_seconds", help_, of_connection, registry=registry, multiprocess_mode="livemax"
        )
        self._streams = self._gauge("open_streams", "Requests that are open on the connection to NATS.", "livesum")
        self._credit = self._gauge("free_credit_bytes", "Bytes that peers may yet be allowed to send at once.", "livemin")
        help_ = "Times a connection to NATS came back."
        self._reconnects = Counter(f"{prefix}_nats_reconnects", help_, of_connection, registry=registry)
        self._connections: list[tuple[Connection, Gauge]] = []
        help_ = "How late the event loop ran a timer: all requests of the process waited for so long."
        lag = Histogram(f"{prefix}_event_loop_lag_seconds", help_, tuple(self._labels), registry=registry, buckets=LAG_SECONDS)
        self._lag = _child(lag, self._labels)

    def follow(self, connection: str, nats: Connection) -> None:
        """Measure a connection, which is used for `connection`: `requests` or `events`."""
        labels = {**self._labels, "connection": connection}
        self._connections.append((nats, self._silence.labels(**labels)))
        nats.on_reconnect(self._reconnects.labels(**labels).inc)

    def show(self, now: float, *, open_streams: int, free_credit_bytes: int) -> None:
        """Set the gauges. `now` is the time on the event loop's clock."""
        for nats, silence in self._connections:
            silence.set(max(0.0, now - nats.last_read_at))
        self._streams.set(open_streams)
        self._credit.set(free_credit_bytes)

    async def measure_lag(self) -> None:
        """Observe the lag of the running event loop until cancelled."""
        clock = asyncio.get_running_loop().time
        while True:
            due = clock() + LAG_PERIOD_S
            await asyncio.sleep(LAG_PERIOD_S)
            self._lag.observe(max(0.0, clock() - due))

    def _gauge(self, name: str, help: str, mode: Literal["livemax", "livemin", "livesum"]) -> Gauge:
        gauge = Gauge(f"{self._prefix}_{name}", help, tuple(self._labels), registry=self._registry, multiprocess_mode=mode)
        return _child(gauge, self._labels)


def _child(metric: M, labels: Mapping[str, str]) -> M:
    """Return the series of a metric that has these labels, or none."""
    return metric.labels(**labels) if labels else metric


class SharedMemoryMetrics:
    """Bodies by reference between this process and others of its host. `prefix` and `labels` as in LinkMetrics."""

    def __init__(self, registry: CollectorRegistry, prefix: str, labels: Mapping[str, str] | None = None) -> None:
        self._labels = labels or {}
        names = tuple(self._labels)
        begin = f"{prefix}_shared_memory"
        help_ = "Bytes of bodies that were `lent` to other processes of the host, and `taken` from them, in shared memory."
        self._bytes = Counter(f"{begin}_bytes", help_, (*names, "direction"), registry=registry)
        help_ = "Times that bodies travelled through NATS although the peer shares memory, or claims to."
        self._fallbacks = Counter(f"{begin}_fallbacks", help_, (*names, "reason"), registry=registry)
        help_ = "Bytes of this process's arena that are lent."
        self._used = Gauge(f"{begin}_used_bytes", help_, names, registry=registry, multiprocess_mode="livesum")
        help_ = "Size of this process's arena."
        self._capacity = Gauge(f"{begin}_capacity_bytes", help_, names, registry=registry, multiprocess_mode="livesum")
        self._shown: dict[tuple[Counter, str], int] = {}

    def show(self, memory: SharedMemory | None) -> None:
        """Set the gauges, and let the counters follow; None: the process has no shared memory."""
        if memory is None:
            return
        self._follow(self._bytes, "direction", memory.bytes)
        self._follow(self._fallbacks, "reason", memory.fallbacks)
        _child(self._used, self._labels).set(memory.used_bytes)
        _child(self._capacity, self._labels).set(memory.capacity_bytes)

    def _follow(self, counter: Counter, label: str, totals: Mapping[str, int]) -> None:
        for value, total in totals.items():
            counter.labels(**self._labels, **{label: value}).inc(total - self._shown.get((counter, value), 0))
            self._shown[counter, value] = total
