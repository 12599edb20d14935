"""`dynamo_frontend_*`: how requests ended, as metrics under the names that dashboards use.

Label children are looked up once per model or method and kept, so that a request costs a handful of additions, and a token
no more than a bisection in a local list.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from dynamo.common.errors import Code, DynamoError
from dynamo.common.model_card import ModelCard
from dynamo.common.observability.tally import Amount, Tally
from dynamo.common.observability.telemetry import MAX_MODELS, OTHER_MODEL, SECONDS, code_of, error_type
from dynamo.common.scaling.demand import ArrivalTotals, PoolDemand
from dynamo.common.scaling.pool import Pool
from dynamo.frontend.security.ledger import UsageCounts

if TYPE_CHECKING:
    from dynamo.common.observability.tracing import Span


SHORT_SECONDS = (0.00001, 0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.005, 0.02, 0.1)
"""Buckets for the durations of short computations, such as choosing an instance."""
TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144)
MISPREDICTIONS = (0.1, 0.25, 0.5, 0.8, 0.9, 1.0, 1.1, 1.25, 2.0, 4.0, 10.0)
BLOCKS = (0, 1, 4, 16, 64, 256, 1024, 4096, 16384)
RATIOS = tuple(step / 10 for step in range(11))
UNKNOWN_MODEL = "unknown_model"
"""Label of names that no instance serves: clients choose them, so they may not become labels."""
MAX_KEY_MODELS = 1000
"""Pairs of an API key and a model that have metrics of their own."""
_TOKEN_BYTES = 4
_FLUSH_TOKENS = 128


class RequestType(StrEnum):
    UNARY = "unary"
    STREAM = "stream"


_REASONS = {
    Code.INVALID_REQUEST: "validation",
    Code.PAYLOAD_TOO_LARGE: "too_large",
    Code.UNAUTHENTICATED: "unauthenticated",
    Code.FORBIDDEN: "forbidden",
    Code.NOT_FOUND: "not_found",
    Code.UNSUPPORTED: "not_implemented",
    Code.OVERLOADED: "overload",
    Code.RATE_LIMITED: "rate_limit",
}
"""Why a request was refused rather than attempted, by the code of its failure."""


class FrontendMetrics:
    """`dynamo_frontend_*`. `for_model` gives the bound children of one model."""

    def __init__(self, registry: CollectorRegistry, *, max_models: int = MAX_MODELS) -> None:
        self._max_models = max_models
        self._models: dict[str, ModelMetrics] = {}
        self._registry = registry
        self.tally = Tally(registry)
        by_model = ("model",)
        by_request = ("model", "endpoint", "request_type")
        self.requests = self._counter("requests", "Requests that have ended.", (*by_request, "status", "error_type"))
        self.inflight = self._gauge("inflight_requests", "Requests that have not ended.", by_model)
        self.queued = self._gauge("queued_requests", "Requests waiting for the first part of their response.", by_model)
        self.router_queue = self._gauge("router_queue_requests", "Requests waiting while all instances are busy.", by_model)
        self.queue_refusals = self._counter(
            "router_queue_refusals", "Requests that found the router's queue full, or had no time for it.", ("model", "reason")
        )
        self.queue_wait = self._histogram(
            "router_queue_seconds",
            "In the router's queue, of requests that waited there, however they left it.",
            ("model", "priority"),
        )
        self.demand = self._counter(
            "demand_requests",
            "Requests for a pool, each once: that were placed on an instance, or refused one.",
            ("model", "role", "outcome"),
        )
        self.demand_waiting = self._gauge(
            "demand_waiting_requests", "Requests that wait for an instance of a pool, as planners are told.", ("model", "role")
        )
        self._of_pools: dict[tuple[str, str], tuple[Amount, Amount, Amount]] = {}
        self._shown: dict[Pool, PoolDemand] = {}
        """What was reported last of each pool."""
        self.ready = self._gauge("model_ready", "1 if an instance serves the model.", by_model, "livemax")
        self.duration = self._histogram("request_duration_seconds", "From arrival to the last byte.", by_model)
        self.first_token = self._histogram("time_to_first_token_seconds", "From arrival to the first token.", by_model)
        self.inter_token = self._histogram("inter_token_latency_seconds", "Between two tokens.", by_model)
        self.input_tokens = self._histogram("input_sequence_tokens", "Prompt tokens.", by_model, TOKENS)
        self.output_tokens = self._histogram("output_sequence_tokens", "Generated tokens.", by_model, TOKENS)
        self.cached_tokens = self._histogram("cached_tokens", "Prompt tokens found in a cache.", by_model, (0, *TOKENS))
        self.output_tokens_total = self._counter("output_tokens", "Generated tokens.", by_model)
        self.retries = self._counter("retries", "Requests sent to another instance before any response.", by_model)
        self.retry_reasons = self._counter(
            "retry_reasons", "Retries and moves, by what made them necessary.", ("model", "reason")
        )
        self.migrations = self._counter("model_migration", "Requests moved to another instance.", ("model", "migration_type"))
        self.cancellations = self._counter("model_cancellation", "Requests cancelled by their client.", by_request)
        self.rejected = self._counter(
            "model_rejection", "Requests refused, before or instead of an attempt.", ("model", "reason")
        )
        self.unknown_fields = self._counter(
            "unknown_fields", "Fields of requests that this server does not have, which were ignored.", ("endpoint", "field")
        )
        self.named = self._counter(
            "name_requests",
            "Requests by names of operators, by the model that each was sent to and why.",
            ("name", "model", "reason"),
        )
        self.shadows = self._counter("shadow_requests", "Copies of requests to shadow models.", ("model", "outcome"))
        self.stored = self._counter("stored_responses", "Operations on stored responses.", ("operation", "outcome"))
        self.batches = self._counter("batches", "Batches that ended here.", ("status",))
        self.batch_requests = self._counter("batch_requests", "Requests of batches that were carried out here.", ("outcome",))
        self.key_requests = self._counter("key_requests", "Requests by API keys that have ended.", ("key", "model", "status"))
        self.key_tokens = self._counter("key_tokens", "Tokens of requests by API keys.", ("key", "model", "kind"))
        self.key_media = self._counter("key_media", "Images and the like in requests by API keys.", ("key", "model"))
        self._of_keys: dict[tuple[str, str], tuple[Counter, ...]] = {}
        self.limit_processes = self._gauge(
            "limit_processes", "Frontend processes that share the limits of API keys, as this one sees it.", (), "livemin"
        )
        self.disconnected_clients = self._gauge("disconnected_clients", "Clients that left before the response was complete.", ())
        self.decisions = self._counter("router_decisions", "Instances chosen, by what decided.", ("model", "reason"))
        self.decision_time = self._histogram("router_decision_seconds", "To choose an instance.", by_model, SHORT_SECONDS)
        self.overlap = self._histogram("router_overlap_blocks", "Leading blocks the chosen instance held.", by_model, BLOCKS)
        self.tier_blocks = self._counter(
            "router_tier_blocks",
            "Blocks of prompts for models with caches beyond the GPU, by the tier of the instance that routing counted on; "
            "`none`: to be computed.",
            ("model", "tier"),
        )
        self.tier_found = self._histogram(
            "router_tier_found_ratio",
            "Share of the blocks that routing counted on at a tier that the engine found, per prompt with some.",
            ("model", "tier"),
            RATIOS,
        )
        self.left_out_blocks = self._counter(
            "router_left_out_blocks",
            "KV blocks that are not followed: instances published more than their cards allow.",
            ("model",),
        )
        self.ttft_ratio = self._histogram(
            "router_ttft_ratio", "Measured time to first token, as a multiple of the predicted one.", by_model, MISPREDICTIONS
        )
        self.hit_rate = Histogram(
            "dynamo_component_router_kv_hit_rate",
            "Share of the prompt that the chosen instance held.",
            by_model,
            registry=registry,
            buckets=RATIOS,
        )
        self.canaries = self._counter("canaries", "Tiny requests sent to idle instances.", ("model", "outcome"))
        self.circuits_open = self._gauge(
            "circuits_open", "Instances that get no requests, or only probes, because they failed too many.", by_model, "livemax"
        )
        self.circuits_opened = self._counter("circuits_opened", "Times that an instance failed too many requests.", by_model)
        self.left_out = self._gauge(
            "instances_left_out", "Instances that failed a canary and get no requests.", by_model, "livemax"
        )
        self._facts = {
            "instances": self._gauge("model_instances", "Instances registered for the model.", by_model, "livemax"),
            "total_kv_blocks": self._gauge("model_total_kv_blocks", "KV blocks of an instance.", by_model, "livemax"),
            "block_size": self._gauge("model_kv_cache_block_size", "Tokens in a KV block.", by_model, "livemax"),
            "context_length": self._gauge("model_context_length", "Tokens of prompt and response together.", by_model, "livemax"),
            "max_num_seqs": self._gauge("model_max_num_seqs", "Sequences an instance generates at once.", by_model, "livemax"),
            "max_batched_tokens": self._gauge("model_max_num_batched_tokens", "Tokens in one step.", by_model, "livemax"),
            "migration_limit": self._gauge("model_migration_limit", "Moves allowed to one request.", by_model, "livemax"),
        }

    def for_model(self, name: str) -> ModelMetrics:
        """Return the metrics of a model that is being served. Past the cap, models share the label `other`."""
        metrics = self._models.get(name)
        if metrics is None:
            label = name if len(self._models) < self._max_models else OTHER_MODEL
            metrics = self._models.get(label) or ModelMetrics(self, label)
            self._models[label] = metrics
        return metrics

    def circuit_changed(self, model: str, count: int, has_opened: bool) -> None:
        """Set how many circuits of a model are open, and count one that has just been opened."""
        label = self.for_model(model).label
        self.circuits_open.labels(label).set(count)
        self.circuits_opened.labels(label).inc(has_opened)

    def for_unknown_model(self) -> ModelMetrics:
        """Return the metrics of requests for a model that is not served."""
        return self.for_model(UNKNOWN_MODEL)

    def describe(self, card: ModelCard, *, instances: int, migration_limit: int) -> None:
        """Set the gauges that describe a model that is being served."""
        facts = {"instances": instances}
        if (llm := card.llm) is not None:
            facts |= {
                "total_kv_blocks": llm.total_blocks,
                "block_size": llm.block_size,
                "context_length": llm.context_length,
                "max_num_seqs": llm.max_num_seqs,
                "max_batched_tokens": llm.max_batched_tokens,
                "migration_limit": migration_limit,
            }
        label = self.for_model(card.name).label
        for fact, value in facts.items():
            self._facts[fact].labels(label).set(value)

    def forget(self, name: str) -> None:
        """Reset the gauges of a model that no instance serves any more; its counters stay."""
        model = self.for_model(name)
        model.ready.set(0)
        self._facts["instances"].labels(model.label).set(0)

    def refused(self, endpoint: str, error: BaseException, request_type: RequestType = RequestType.UNARY) -> None:
        """Count a request that failed at its protocol's edge, before its `RequestTimer`."""
        self.for_unknown_model().add_outcome(endpoint, request_type, code_of(error))

    def key_used(self, key: str, model: str, usage: UsageCounts) -> None:
        """Count what requests of a key used; past the cap, keys and models share the label `other`."""
        if (key, model) not in self._of_keys and len(self._of_keys) >= MAX_KEY_MODELS:
            key = model = OTHER_MODEL
        counters = self._of_keys.get((key, model))
        if counters is None:
            counters = self._of_keys[key, model] = (
                *(self.key_requests.labels(key, model, status) for status in ("success", "error")),
                *(self.key_tokens.labels(key, model, kind) for kind in ("prompt", "cached", "completion")),
                self.key_media.labels(key, model),
            )
        amounts = (
            usage.requests - usage.errors,
            usage.errors,
            usage.prompt_tokens,
            usage.cached_tokens,
            usage.completion_tokens,
            usage.media,
        )
        for counter, amount in zip(counters, amounts, strict=True):
            if amount:
                counter.inc(amount)

    def show_demand(self, demands: Iterable[PoolDemand]) -> None:
        """Show what was reported of all pools, whose totals grow from report to report."""
        before, self._shown = self._shown, {demand.pool: demand for demand in demands}
        gone = before.keys() - self._shown.keys()
        for pool, now in {**self._shown, **{pool: PoolDemand(pool, before[pool].totals) for pool in gone}}.items():
            then = before.get(pool) or PoolDemand(pool, ArrivalTotals())
            if now.totals == then.totals and now.waiting == then.waiting:
                continue
            placed, refused, waiting = self._demand_of(pool)
            placed.value += max(0, now.totals.placed - then.totals.placed)
            refused.value += max(0, now.totals.refused - then.totals.refused)
            waiting.value += now.waiting - then.waiting

    def _demand_of(self, pool: Pool) -> tuple[Amount, Amount, Amount]:
        key = self.for_model(pool.model).label, pool.role.value
        amounts = self._of_pools.get(key)
        if amounts is None:
            counters = (self.demand.labels(*key, "placed"), self.demand.labels(*key, "refused"))
            placed, refused = map(self.tally.amount, counters)
            amounts = self._of_pools[key] = placed, refused, self.tally.amount(self.demand_waiting.labels(*key))
        return amounts

    def unknown_field(self, endpoint: str, field: str) -> None:
        """Count a field of a request that was ignored. The caller bounds the number of names."""
        self.unknown_fields.labels(endpoint, field).inc()

    def sent_by_name(self, name: str, model: str, reason: str) -> None:
        """Count a request by a name of an operator; `reason` is `target` or the condition of a fallback."""
        self.named.labels(name, model, reason).inc()

    def shadowed(self, model: str, outcome: str) -> None:
        """Count a copy to a shadow model: `success`, `error` or `dropped`."""
        self.shadows.labels(model, outcome).inc()

    @contextmanager
    def stored_operation(self, operation: str) -> Iterator[None]:
        """Count an operation on stored responses, as `save`, `read`, `delete` or `cancel`, by its outcome."""
        outcome = "internal"
        try:
            yield
            outcome = "success"
        except DynamoError as error:
            outcome = error.code.value
            raise
        finally:
            self.stored.labels(operation, outcome).inc()

    def batch_ended(self, status: str) -> None:
        """Count a batch; `status` is OpenAI's."""
        self.batches.labels(status).inc()

    def batch_lines(self, *, completed: int, failed: int) -> None:
        """Count requests of a batch."""
        self.batch_requests.labels("success").inc(completed)
        self.batch_requests.labels("error").inc(failed)

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
        tally = all_models.tally
        self.inflight = tally.amount(all_models.inflight.labels(label))
        self.queued = tally.amount(all_models.queued.labels(label))
        self.ready = all_models.ready.labels(label)
        self.duration = tally.spread(all_models.duration, label)
        self.first_token = tally.spread(all_models.first_token, label)
        self.inter_token = tally.spread(all_models.inter_token, label)
        self.input_tokens = tally.spread(all_models.input_tokens, label)
        self.output_tokens = tally.spread(all_models.output_tokens, label)
        self.output_tokens_total = tally.amount(all_models.output_tokens_total.labels(label))
        self.cached_tokens = tally.spread(all_models.cached_tokens, label)
        self.retries = all_models.retries.labels(label)
        self._outcomes: dict[tuple[str, RequestType, Code | None], tuple[Amount, ...]] = {}
        self._decisions: dict[str, Amount] = {}
        self.decision_time = tally.spread(all_models.decision_time, label)
        self.overlap = tally.spread(all_models.overlap, label)
        self.ttft_ratio = tally.spread(all_models.ttft_ratio, label)
        self.hit_rate = tally.spread(all_models.hit_rate, label)

    def recovered(self, reason: str) -> None:
        """Count a retry or move. `reason` is one of a fixed set."""
        self._all.retry_reasons.labels(self.label, reason).inc()

    def migrated(self, *, ongoing: bool) -> None:
        """Count a request that went on at another instance, before (`ongoing` False) or after the first part of its response."""
        self._all.migrations.labels(self.label, "ongoing_request" if ongoing else "new_request").inc()

    def add_outcome(self, endpoint: str, request_type: RequestType, error: Code | None) -> None:
        """Count a request that has ended; `error` is None for success."""
        key = (endpoint, request_type, error)
        amounts = self._outcomes.get(key)
        if amounts is None:
            amounts = self._outcomes[key] = tuple(map(self._all.tally.amount, self._outcome(endpoint, request_type, error)))
        for amount in amounts:
            amount.value += 1

    def _outcome(self, endpoint: str, request_type: RequestType, error: Code | None) -> list[Counter]:
        requests = self._all.requests
        if error is None:
            return [requests.labels(self.label, endpoint, request_type.value, "success", "")]
        failed = requests.labels(self.label, endpoint, request_type.value, "error", error_type(error))
        reason = _REASONS.get(error)
        return [failed] if reason is None else [failed, self._all.rejected.labels(self.label, reason)]

    def decided(self, reason: str, seconds: float, overlap: tuple[int, float] | None = None) -> None:
        """Count a routing decision that took so long; `reason` is one of the router's fixed names.

        `overlap`: how many leading blocks of a prompt the chosen instance held, and which share of the prompt that was.
        """
        amount = self._decisions.get(reason)
        if amount is None:
            amount = self._decisions[reason] = self._all.tally.amount(self._all.decisions.labels(self.label, reason))
        amount.value += 1
        self.decision_time.observe(seconds)
        if overlap is not None:
            self.overlap.observe(overlap[0])
            self.hit_rate.observe(overlap[1])

    def predicted(self, predicted_s: float, seconds: float) -> None:
        """Count a first token that came after `seconds`."""
        if predicted_s > 0.0:
            self.ttft_ratio.observe(seconds / predicted_s)

    def canary(self, outcome: str) -> None:
        """Count a canary: `passed` or `failed`."""
        self._all.canaries.labels(self.label, outcome).inc()

    def set_router_queue(self, waiting: int) -> None:
        """Set how many requests wait while all instances of the model are busy."""
        self._all.router_queue.labels(self.label).set(waiting)

    def queue_waited(self, priority: int, seconds: float) -> None:
        """Count a request that has left the router's queue; its priority is shown as `high`, `normal` (0) or `low`."""
        level = "high" if priority > 0 else "low" if priority else "normal"
        self._all.queue_wait.labels(self.label, level).observe(seconds)

    def queue_refused(self, reason: str) -> None:
        """Count a request that may not wait (longer) for an instance.

        In the router's queue: `full`, `late`, `expired` or `goal`; while a model starts: `start_full` or `start_timeout`.
        """
        self._all.queue_refusals.labels(self.label, reason).inc()

    def set_left_out(self, count: int) -> None:
        """Set how many instances of the model are left out because they failed a canary."""
        self._all.left_out.labels(self.label).set(count)

    def cancelled(self, endpoint: str, request_type: RequestType) -> None:
        self._all.cancellations.labels(self.label, endpoint, request_type.value).inc()
        self._all.disconnected_clients.inc()


class RequestTimer:
    """The measurements of one request. `finish` exactly once, on every path."""

    __slots__ = (
        *("_clock", "_endpoint", "_gap_sum", "_gaps", "_last", "_metrics", "_pending", "_queued", "_span", "_started", "_type"),
        "output_tokens",
    )

    def __init__(
        self,
        metrics: ModelMetrics,
        endpoint: str,
        request_type: RequestType,
        span: Span | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin a request. `endpoint` is one of the API's own names (`tensor`, `completions`, …), never a client's.

        `span` is the request's part in a trace, which ends with it; None if it is not traced.
        """
        self._metrics = metrics
        self._endpoint = endpoint
        self._type = request_type
        self._clock = clock
        self._started = clock()
        self._last = 0.0
        self.output_tokens = 0
        """As `tokens` has counted them, or the engine reports at the end."""
        self._gaps: list[int] | None = None
        self._gap_sum = 0.0
        self._pending = 0
        self._queued = True
        self._span = span
        metrics.inflight.value += 1
        metrics.queued.value += 1

    def responded(self) -> None:
        """The first part of the response has arrived; `tokens` implies it."""
        if self._queued:
            self._queued = False
            self._metrics.queued.value -= 1

    def tokens(self, count: int) -> None:
        """`count` tokens (at least 1) have arrived together; the time since the last ones is shared among them."""
        now = self._clock()
        if self.output_tokens == 0:
            self.responded()
            self._metrics.first_token.observe(now - self._started)
            if self._span is not None:
                self._span.event("first token")
            count_gaps, gap = count - 1, 0.0
        else:
            count_gaps, gap = count, (now - self._last) / count
        self.output_tokens += count
        self._last = now
        if not count_gaps:
            return
        # Collected here and added in bulk: an `observe` per token would cost more than forwarding the token.
        if self._gaps is None:
            self._gaps = [0] * (len(SECONDS) + 1)
        self._gaps[bisect_left(SECONDS, gap)] += count_gaps
        self._gap_sum += gap * count_gaps
        self._pending += count_gaps
        if self._pending >= _FLUSH_TOKENS:
            self._flush_gaps()

    def finish(self, error: BaseException | None = None, *, input_tokens: int = 0, cached_tokens: int = 0) -> None:
        """End the request, with success or with `error`."""
        metrics = self._metrics
        code = None if error is None else code_of(error)
        if self._queued:
            self.responded()
        if self._gaps is not None:
            self._flush_gaps()
        metrics.inflight.value -= 1
        metrics.duration.observe(self._clock() - self._started)
        metrics.add_outcome(self._endpoint, self._type, code)
        if code is Code.CANCELLED:
            metrics.cancelled(self._endpoint, self._type)
        output = self.output_tokens
        if input_tokens:
            metrics.input_tokens.observe(input_tokens)
            metrics.cached_tokens.observe(cached_tokens)
        if output:
            metrics.output_tokens.observe(output)
            metrics.output_tokens_total.value += output
        if self._span is not None:
            if input_tokens or output:
                self._span.set({"dynamo.prompt_tokens": input_tokens, "dynamo.output_tokens": output})
            self._span.end(code)

    def _flush_gaps(self) -> None:
        if self._gaps is not None:
            self._metrics.inter_token.add(self._gaps, self._gap_sum)
            self._gaps = None
            self._gap_sum = 0.0
            self._pending = 0


class EventMetrics:
    """How this process keeps up with what the fleet publishes: KV events, load reports, bookings."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._lag = Gauge(
            "dynamo_frontend_events_lag_seconds",
            "How old KV events and load reports are when they are handled.",
            registry=registry,
            multiprocess_mode="livemax",
        )
        self._dropped = Gauge(
            "dynamo_frontend_events_dropped",
            "1 while KV events and load reports are not followed, since they came faster than they could be handled.",
            registry=registry,
            multiprocess_mode="livemax",
        )
        self._drops = Counter(
            "dynamo_frontend_events_drops", "Times the process stopped following KV events and load reports.", registry=registry
        )

    def show(self, *, lag_s: float, is_dropped: bool) -> None:
        """Set the gauges."""
        self._lag.set(lag_s)
        self._dropped.set(is_dropped)

    def dropped(self) -> None:
        """Count that events are no longer followed."""
        self._drops.inc()
