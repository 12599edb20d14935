"""`dynamo_component_*`: what one instance did, and how busy its engines are."""

from __future__ import annotations

import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.registry import Collector

from dynamo.common.errors import Code
from dynamo.common.generation import Summary
from dynamo.common.kv.events import KvState
from dynamo.common.kv.tiers import Tier
from dynamo.common.names import Endpoint, InstanceId
from dynamo.common.observability.tally import Tally
from dynamo.common.observability.telemetry import MAX_MODELS, OTHER_MODEL, SECONDS, LinkMetrics, SharedMemoryMetrics, error_type
from dynamo.worker.engine.base import Engine, EngineLoad, HasTiers, TensorEngine, TracksKv

_NAMES = ("dynamo_namespace", "dynamo_component", "dynamo_endpoint", "worker_id")
_BY_MODEL = (*_NAMES, "model")
_BY_OUTCOME = (*_BY_MODEL, "version", "status")
_BY_TIER = (*_BY_MODEL, "tier")
_BY_OPERATION = (*_BY_TIER, "operation")
_SUCCESS, _ERROR, _CANCELLED = _STATUSES = ("success", "error", "cancelled")
_MAX_VERSIONS = 16
"""Versions of a model over the life of a process, at most; further ones share a label, since load requests choose versions."""
OTHER_VERSION = "other"


class WorkerMetrics:
    """The metrics of one process. `for_model` returns the bound children of one model."""

    def __init__(
        self, registry: CollectorRegistry, endpoint: Endpoint, instance: InstanceId, *, max_models: int = MAX_MODELS
    ) -> None:
        self._max_models = max_models
        self._registry = registry
        self.tally = Tally(registry)
        self._labels = (endpoint.namespace, endpoint.component, endpoint.name, f"{instance:x}")
        self.requests = self._counter("requests", "Requests that have ended.", _BY_OUTCOME)
        self.inflight = self._gauge("inflight_requests", "Requests being worked on.")
        self.request_bytes = self._counter("request_bytes", "Bytes of requests.")
        self.response_bytes = self._counter("response_bytes", "Bytes of responses.")
        self.duration = self._histogram("request_duration_seconds", "From arrival to the end.", _BY_OUTCOME)
        self.queue_time = self._histogram("queue_seconds", "Of requests that succeeded: waiting for the engine.")
        self.prefill_time = self._histogram("prefill_seconds", "Of generations: computing the prompt.")
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of generations.")
        self.cached_tokens = self._counter("cached_tokens", "Prompt tokens found in the prefix cache.")
        self.output_tokens = self._counter("output_tokens", "Generated tokens.")
        self.cancellations = self._counter("cancellation", "Requests cancelled.")
        self.errors = self._counter("errors", "Requests that failed.", (*_BY_MODEL, "error_type"))
        self.mismatches = self._counter("output_mismatches", "Responses of tensor models with an output other than declared.")
        self.waiting = self._gauge("waiting_requests", "Requests waiting for the engine.")
        self.running = self._gauge("running_requests", "Requests the engine works on.")
        self.queued_tokens = self._gauge("queued_prefill_tokens", "Prompt tokens that the engine has yet to compute.")
        self.total_blocks = self._gauge("total_blocks", "Blocks of the KV cache.")
        self.active_blocks = self._gauge("active_blocks", "Blocks of the KV cache in use by running requests.")
        self.cache_usage = self._gauge("gpu_cache_usage_percent", "Used share of the KV cache, 0 to 1.")
        self.hit_rate = self._gauge("kv_cache_hit_rate", "Share of all prompt tokens found in the prefix cache, 0 to 1.")
        self.unknown_media = self._counter(
            "kv_unknown_medium_blocks",
            "Cached blocks that the engine announced on a medium that is unknown, and that are not used.",
        )
        self.tier_hits = self._counter("kv_tier_hit_blocks", "Blocks of prompts that a tier had, and no faster one.", _BY_TIER)
        self.tier_misses = self._counter(
            "kv_tier_miss_blocks", "Blocks of prompts that neither a tier had nor a faster one.", _BY_TIER
        )
        self.tier_bytes = self._counter("kv_tier_bytes", "KV read from a tier for the GPU, or written to it.", _BY_OPERATION)
        self.tier_failures = self._counter("kv_tier_failures", "Reads and writes of a tier that failed.", _BY_OPERATION)
        uptime = Gauge("dynamo_component_uptime_seconds", "Since the start of the process.", _NAMES, registry=registry)
        started = time.monotonic()
        self.tally.show(uptime.labels(*self._labels), lambda: time.monotonic() - started)
        labels = dict(zip(_NAMES, self._labels, strict=True))
        self.link = LinkMetrics(registry, "dynamo_component", labels)
        self.memory = SharedMemoryMetrics(registry, "dynamo_component", labels)
        self._models: dict[str, WorkerModelMetrics] = {}

    def include(self, collector: Collector) -> None:
        """Show the metrics of a collector beside these."""
        self._registry.register(collector)

    def for_model(self, name: str) -> WorkerModelMetrics:
        """Return the metrics of a model of this instance. Models past the cap share the label `other`, since load requests choose
        names.
        """
        label = name if name in self._models or len(self._models) < self._max_models else OTHER_MODEL
        metrics = self._models.get(label)
        if metrics is None:
            metrics = self._models[label] = WorkerModelMetrics(self, (*self._labels, label))
        return metrics

    def _counter(self, name: str, help: str, labels: tuple[str, ...] = _BY_MODEL) -> Counter:
        return Counter(f"dynamo_component_{name}", help, labels, registry=self._registry)

    def _gauge(self, name: str, help: str) -> Gauge:
        return Gauge(f"dynamo_component_{name}", help, _BY_MODEL, registry=self._registry)

    def _histogram(self, name: str, help: str, labels: tuple[str, ...] = _BY_MODEL) -> Histogram:
        return Histogram(f"dynamo_component_{name}", help, labels, registry=self._registry, buckets=SECONDS)


class _Outcome:
    """Requests of one version of a model that ended with one status."""

    __slots__ = ("duration", "requests")

    def __init__(self, worker: WorkerMetrics, labels: tuple[str, ...]) -> None:
        self.requests = worker.tally.amount(worker.requests.labels(*labels))
        self.duration = worker.tally.spread(worker.duration, *labels)


class WorkerModelMetrics:
    """The children of one model of an instance, bound once."""

    def __init__(self, worker: WorkerMetrics, labels: tuple[str, ...]) -> None:
        self._worker = worker
        self._labels = labels
        tally = worker.tally
        self._outcomes: dict[tuple[str, str], _Outcome] = {}
        """By version and status."""
        self._inflight = tally.amount(worker.inflight.labels(*labels))
        self._request_bytes = tally.amount(worker.request_bytes.labels(*labels))
        self._response_bytes = tally.amount(worker.response_bytes.labels(*labels))
        self._queue_time = tally.spread(worker.queue_time, *labels)
        self._cancellations = tally.amount(worker.cancellations.labels(*labels))
        self._mismatches = tally.amount(worker.mismatches.labels(*labels))
        self._generations: _Generations | None = None

    def output_mismatch(self) -> None:
        """Count a response with an output other than declared."""
        self._mismatches.value += 1

    def show(self, version: str) -> None:
        """Show a version before it has had requests, so that the rates of its first ones are right."""
        for status in _STATUSES:
            self._outcome(version, status)

    def started(self, request_bytes: int) -> None:
        self._inflight.value += 1
        self._request_bytes.value += request_bytes

    def succeeded(
        self, version: str, duration_s: float, response_bytes: int, queue_s: float, summary: Summary | None = None
    ) -> None:
        """Count the end of a request: this, or `failed`, exactly once for each `started`. `summary`: of a generation."""
        self._ended(version, _SUCCESS, duration_s, response_bytes)
        self._queue_time.observe(queue_s)
        generations = self._generations
        if summary is not None and generations is not None:
            generations.prefill_time.observe(summary.prefill_ms / 1000)
            generations.output.value += summary.output_tokens
            generations.prompt.value += summary.prompt_tokens
            generations.cached.value += summary.cached_tokens
            generations.prompt_ever += summary.prompt_tokens
            generations.cached_ever += summary.cached_tokens

    def failed(self, version: str, duration_s: float, response_bytes: int, error: Code) -> None:
        if error is Code.CANCELLED:
            self._ended(version, _CANCELLED, duration_s, response_bytes)
            self._cancellations.value += 1
        else:
            self._ended(version, _ERROR, duration_s, response_bytes)
            self._worker.errors.labels(*self._labels, error_type(error)).inc()

    def _ended(self, version: str, status: str, duration_s: float, response_bytes: int) -> None:
        outcome = self._outcomes.get((version, status)) or self._outcome(version, status)
        outcome.requests.value += 1
        outcome.duration.observe(duration_s)
        self._inflight.value -= 1
        self._response_bytes.value += response_bytes

    def _outcome(self, version: str, status: str) -> _Outcome:
        known = {version for version, _ in self._outcomes}
        label = version if version in known or len(known) < _MAX_VERSIONS else OTHER_VERSION
        outcome = self._outcomes.get((label, status))
        if outcome is None:
            outcome = self._outcomes[label, status] = _Outcome(self._worker, (*self._labels, label, status))
        return outcome

    def follow(self, engine: Engine | TensorEngine) -> None:
        """Export the load of an engine that reports one. It is read at each scrape."""
        if isinstance(engine, Engine):
            self._show_load(engine.load)
            self._generations = _Generations(self._worker, self._labels)
        if isinstance(engine, TracksKv):
            self._show_unknown_media(engine.kv)

        if isinstance(engine, HasTiers):
            for tier in engine.tiers():
                self._show_tier(tier, engine)

    def _show_unknown_media(self, kv: KvState) -> None:
        worker = self._worker
        worker.tally.show_total(worker.unknown_media.labels(*self._labels), lambda: kv.unknown)

    def _show_tier(self, tier: Tier, engine: HasTiers) -> None:
        worker, labels, show = self._worker, (*self._labels, tier.value), self._worker.tally.show_total
        show(worker.tier_hits.labels(*labels), lambda: engine.tiers()[tier].hits)
        show(worker.tier_misses.labels(*labels), lambda: engine.tiers()[tier].misses)
        show(worker.tier_bytes.labels(*labels, "read"), lambda: engine.tiers()[tier].read_bytes)
        show(worker.tier_bytes.labels(*labels, "write"), lambda: engine.tiers()[tier].written_bytes)
        show(worker.tier_failures.labels(*labels, "read"), lambda: engine.tiers()[tier].failed_reads)
        show(worker.tier_failures.labels(*labels, "write"), lambda: engine.tiers()[tier].failed_writes)

    def _show_load(self, load: Callable[[], EngineLoad]) -> None:
        worker, labels, show = self._worker, self._labels, self._worker.tally.show
        show(worker.waiting.labels(*labels), lambda: load().waiting)
        show(worker.running.labels(*labels), lambda: load().running)
        show(worker.queued_tokens.labels(*labels), lambda: load().queued_prefill_tokens)
        show(worker.total_blocks.labels(*labels), lambda: load().total_blocks)
        show(worker.active_blocks.labels(*labels), lambda: load().active_blocks)
        show(worker.cache_usage.labels(*labels), lambda: _share(load().active_blocks, load().total_blocks))


class _Generations:
    """The children that only language models have."""

    def __init__(self, worker: WorkerMetrics, labels: tuple[str, ...]) -> None:
        tally = worker.tally
        self.prefill_time = tally.spread(worker.prefill_time, *labels)
        self.output = tally.amount(worker.output_tokens.labels(*labels))
        self.prompt = tally.amount(worker.prompt_tokens.labels(*labels))
        self.cached = tally.amount(worker.cached_tokens.labels(*labels))
        self.prompt_ever = self.cached_ever = 0
        tally.show(worker.hit_rate.labels(*labels), lambda: _share(self.cached_ever, self.prompt_ever))


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
