"""`dynamo_planner_*`: what the planner sees and wants. Names are those of NVIDIA Dynamo's planner where they mean the same."""

from __future__ import annotations

import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge

from dynamo.common.model_card import Role
from dynamo.planner.process.state import DecisionMade, PlannerState, PoolState

_BY_POOL = ("model", "role")
_BY_MODEL = ("model",)


class PlannerMetrics:
    """The metrics of one planner process. `gpus_of` returns how many GPUs an instance of a model has."""

    def __init__(
        self,
        registry: CollectorRegistry,
        gpus_of: Callable[[str], int] = lambda model: 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._registry = registry
        self._gpus_of = gpus_of
        self._clock = clock
        self._shown_at = clock()
        self.leader = self._gauge("is_leader", "1 of the planner that decides, 0 of those that stand by.", ())
        self.holding = self._gauge("holding", "1 while targets are left as they are, as without NATS or etcd.", ())
        self.carried_out = self._gauge("executor_up", "1 while what is decided can be carried out.", ())
        own = (self.leader, self.holding, self.carried_out)
        self.target = self._gauge("target_instances", "Instances that a pool is to have.")
        self.instances = self._gauge("instances", "Instances of a pool that serve.")
        self.needed = self._gauge("needed_instances", "Instances that the forecast needs, before bounds.")
        self.missing = self._gauge("missing_instances", "Instances that were wanted so long ago that they will hardly come.")
        self.arrivals = self._gauge("observed_requests_per_second", "Requests that arrive, waiting and refused ones included.")
        self.forecast = self._gauge(
            "predicted_requests_per_second", "The most that are expected until a new instance could serve."
        )
        self.refused = self._gauge("refused_requests_per_second", "Requests that got no instance.")
        self.waiting = self._gauge("waiting_requests", "Requests that wait for an instance.")
        self.work = self._gauge("engine_seconds", "Work that is forecast, in seconds of one engine for each second.")
        self.goodput = self._gauge("goodput_share", "Share of requests expected to reach the goals; -1: no what-if has said.")
        self.ratio = self._gauge("ttft_ratio", "Observed time to first token over the predicted one; 0: not known.")
        self.startup = self._gauge(
            "startup_seconds", "From the decision that wants an instance until it serves; 0: not seen yet."
        )
        self.unreachable = self._gauge("unreachable_goals", "1 of a pool whose goals no number of instances reaches.")
        self.prefill = self._gauge("num_prefill_replicas", "Prefill instances that serve.", _BY_MODEL)
        self.decode = self._gauge("num_decode_replicas", "Decode instances that serve, or aggregated ones.", _BY_MODEL)
        self.predicted_prefill = self._gauge("predicted_num_prefill_replicas", "Prefill instances wanted.", _BY_MODEL)
        self.predicted_decode = self._gauge("predicted_num_decode_replicas", "Decode or aggregated instances wanted.", _BY_MODEL)
        self.gpu_seconds = Counter(
            "dynamo_planner_gpu_seconds", "Seconds of GPUs of the instances that served.", _BY_MODEL, registry=registry
        )
        self.changes = Counter("dynamo_planner_scaling_events", "Changes of targets.", (*_BY_POOL, "by"), registry=registry)
        self.failures = Counter(
            "dynamo_planner_executor_failures", "Rounds whose targets were not carried out.", registry=registry
        )
        help_ = "Times that load reports came faster than they could be handled, and were not followed for a while."
        self.load_reports_dropped = Counter("dynamo_planner_load_reports_dropped", help_, registry=registry)
        self._unreadable = Counter(
            "dynamo_planner_unreadable_messages", "Messages that were ignored.", ("kind",), registry=registry
        )
        self._counted = {"demand": 0, "load": 0}
        self._of_pools = [gauge for gauge in vars(self).values() if isinstance(gauge, Gauge) and gauge not in own]

    def show(self, state: PlannerState) -> None:
        """Show what a round found. Pools are shown by the leader alone, so that sums and maxima over all planners are right."""
        now = self._clock()
        elapsed_s, self._shown_at = now - self._shown_at, now
        self.leader.set(state.is_leader)
        self.holding.set(bool(state.holding))
        self.carried_out.set(not state.executor_error)
        self.failures.inc(bool(state.executor_error))
        if not state.is_leader:
            for gauge in self._of_pools:
                gauge.clear()
            return
        for pool in state.pools:
            self._show(pool, elapsed_s)

    def changed(self, made: DecisionMade) -> None:
        """Count a change of a target."""
        self.changes.labels(made.model, made.role.value, made.by).inc()

    def unreadable(self, kind: str, total: int) -> None:
        """Let the count of ignored messages follow."""
        self._unreadable.labels(kind).inc(total - self._counted[kind])
        self._counted[kind] = total

    def _show(self, pool: PoolState, elapsed_s: float) -> None:
        labels = (pool.model, pool.role.value)
        for gauge, value in (
            (self.target, pool.target),
            (self.instances, pool.instances),
            (self.needed, pool.needed),
            (self.missing, pool.missing),
            (self.arrivals, pool.arrivals_per_s),
            (self.forecast, pool.forecast_per_s),
            (self.refused, pool.refused_per_s),
            (self.waiting, pool.waiting),
            (self.work, pool.engine_seconds),
            (self.goodput, -1.0 if pool.goodput_share is None else pool.goodput_share),
            (self.ratio, pool.ttft_ratio),
            (self.startup, pool.startup_s),
            (self.unreachable, bool(pool.warning)),
        ):
            gauge.labels(*labels).set(value)
        serving, wanted = (
            (self.prefill, self.predicted_prefill) if pool.role is Role.PREFILL else (self.decode, self.predicted_decode)
        )
        serving.labels(pool.model).set(pool.instances)
        wanted.labels(pool.model).set(pool.target)
        self.gpu_seconds.labels(pool.model).inc(pool.instances * self._gpus_of(pool.model) * elapsed_s)

    def _gauge(self, name: str, help: str, labels: tuple[str, ...] = _BY_POOL) -> Gauge:
        return Gauge(f"dynamo_planner_{name}", help, labels, registry=self._registry)
