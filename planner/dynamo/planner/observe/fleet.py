"""The views of all pools: what is registered, what arrives, how fast engines are.

A pool is followed from its first registration on, also while it has no instance: what was learned of its engines stays.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from dynamo.common.discovery import Instance
from dynamo.common.kv.events import LoadMessage, LoadReport
from dynamo.common.model_card import ModelCard, ModelKind
from dynamo.common.names import Endpoint, InstanceId
from dynamo.common.scaling.pool import Pool
from dynamo.common.scaling.standby import Standby
from dynamo.frontend.router.cost.step_model import StepModel
from dynamo.planner.observe.cache_worth import CacheWorth
from dynamo.planner.observe.demand import PoolArrivals
from dynamo.planner.observe.startup import StartupTimes
from dynamo.planner.pools import Arrivals, Engine, InstanceView, PoolView

log = logging.getLogger(__name__)

MAX_POOLS = 512
"""Pools that are scaled. Any worker may register models that get no requests: those that had requests lately come first."""
REQUESTED_S = 600.0
SILENT_S = 3.0
"""An instance reports its load every 0.75 s, and more often while it is busy."""


@dataclass(slots=True, eq=False)
class _PoolState:
    """What is known of one pool."""

    steps: StepModel = field(default_factory=StepModel)
    startups: StartupTimes = field(default_factory=StartupTimes)
    card: ModelCard | None = None
    """The card of the instance that registered last; None: none is known."""
    endpoint: Endpoint | None = None
    """Where that registered."""
    instances: dict[InstanceId, Instance] = field(default_factory=dict)
    loads: dict[InstanceId, LoadReport] = field(default_factory=dict)
    """The last report of each instance."""
    reported_at: dict[InstanceId, float] = field(default_factory=dict)
    worth: CacheWorth = field(default_factory=CacheWorth)
    requested_at: float = -math.inf
    """When requests came last."""


class PoolWatch:
    """Everything that is known of the pools of language models. `models`: the only ones that are followed; none: all."""

    def __init__(self, models: Collection[str] = ()) -> None:
        self._models = frozenset(models)
        self._pools: dict[Pool, _PoolState] = {}
        self._by_instance: dict[tuple[InstanceId, str], _PoolState] = {}
        self._is_full = False
        """There are more pools than are scaled, which has been logged."""
        self._loop = asyncio.get_running_loop()

    def __repr__(self) -> str:
        return f"<PoolWatch of {len(self._pools)} pools>"

    # What comes in

    def registrations(self, added: Sequence[Instance], removed: Sequence[Instance]) -> None:
        """Take over what `Directory.on_registrations` says."""
        now = self._loop.time()
        changed = {(instance.id, instance.card.name) for instance in added}
        for instance in removed:
            self._remove(instance, is_replaced=(instance.id, instance.card.name) in changed)
        gone = {(instance.id, instance.card.name) for instance in removed}
        for instance in added:
            self._add(instance, now, is_new=(instance.id, instance.card.name) not in gone)

    def load(self, instance: InstanceId, message: LoadMessage) -> None:
        """Learn from a load report. Those of instances that are not registered are ignored."""
        state = self._by_instance.get((instance, message.model))
        if state is not None:
            now = self._loop.time()
            state.loads[instance] = message.report
            state.reported_at[instance] = now
            state.steps.report(instance, message.report.totals, now)

    def remember(self, pool: Pool, standby: Standby | None = None) -> None:
        """Follow a pool that need not have an instance. `standby`: what was known of it before this process."""
        state = self._state(pool)
        if state is not None and state.card is None and standby is not None:
            state.card, state.endpoint = standby.card, standby.endpoint
            state.startups.remember(standby.start_s)

    def forget(self, pool: Pool) -> None:
        """Follow a pool that has no instance no more, until one registers."""
        if not self.serves(pool):
            self._pools.pop(pool, None)

    def want(self, pool: Pool, instances: int) -> None:
        """Note that so many instances are wanted, to see how long they take to start."""
        state = self._pools.get(pool)
        if state is not None:
            state.startups.want(instances, len(state.instances), self._loop.time())

    # What is there

    def views(self, demands: Mapping[Pool, PoolArrivals], seconds: float) -> dict[Pool, PoolView]:
        """Return each pool as it is now. `demands`: what arrived in the last `seconds`."""
        now = self._loop.time()
        for pool, demand in demands.items():
            if (demand.arrivals.requests or demand.waiting) and pool in self._pools:
                self._pools[pool].requested_at = now
        views: dict[Pool, PoolView] = {}
        for pool in self.pools():
            state, known = self._pools[pool], demands.get(pool)
            state.worth.add({} if known is None else known.saved, seconds, state.instances)
            views[pool] = _view(pool, state, known, seconds, now)
        return views

    def pools(self) -> Sequence[Pool]:
        """Return those that are scaled: of too many, those with requests in the last ten minutes, then those that came first."""
        pools, after = list(self._pools), self._loop.time() - REQUESTED_S
        is_full = len(pools) > MAX_POOLS
        if is_full and not self._is_full:
            log.warning("there are %d pools, of which %d are scaled, those with requests first", len(pools), MAX_POOLS)
        self._is_full = is_full
        pools.sort(key=lambda pool: self._pools[pool].requested_at < after)
        return sorted(pools[:MAX_POOLS])

    def follows(self, pool: Pool) -> bool:
        return pool in self._pools

    def serves(self, pool: Pool) -> bool:
        """Return whether a pool has an instance."""
        return pool in self._pools and bool(self._pools[pool].instances)

    def standby(self, pool: Pool) -> Standby | None:
        """Return what there is to know to take requests for a pool without an instance; None before its first instance."""
        state = self._pools.get(pool)
        if state is None or state.card is None or state.endpoint is None:
            return None
        return Standby(card=state.card, endpoint=state.endpoint, start_s=round(state.startups.typical_s, 1))

    def reports_load(self, instance: Instance) -> bool:
        """Return whether an instance has reported its load just now."""
        state = self._by_instance.get((instance.id, instance.card.name))
        return state is not None and self._loop.time() - state.reported_at.get(instance.id, -SILENT_S) < SILENT_S

    def _state(self, pool: Pool) -> _PoolState | None:
        """Return a pool's state, a new one if it is to be followed; None if it is not."""
        if self._models and pool.model not in self._models:
            return None
        state = self._pools.get(pool)
        if state is None:
            state = self._pools[pool] = _PoolState()
        return state

    def _add(self, instance: Instance, now: float, *, is_new: bool) -> None:
        if instance.card.kind is not ModelKind.LLM:
            return
        state = self._state(Pool.of(instance.card))
        if state is None:
            return
        state.card, state.endpoint = instance.card, instance.endpoint
        state.instances[instance.id] = instance
        self._by_instance[instance.id, instance.card.name] = state
        if is_new:
            state.startups.came(now)

    def _remove(self, instance: Instance, *, is_replaced: bool) -> None:
        state = self._by_instance.pop((instance.id, instance.card.name), None)
        if state is None:
            return
        state.instances.pop(instance.id, None)
        if not is_replaced and not state.instances and len(self._pools) > MAX_POOLS and math.isinf(state.requested_at):
            del self._pools[Pool.of(instance.card)]  # one that never had a request
        if not is_replaced:
            state.loads.pop(instance.id, None)
            state.reported_at.pop(instance.id, None)
            state.steps.remove_instance(instance.id)


def _view(pool: Pool, state: _PoolState, demand: PoolArrivals | None, seconds: float, now: float) -> PoolView:
    if demand is None:
        demand = PoolArrivals(arrivals=Arrivals(seconds=seconds))
    return PoolView(
        pool=pool,
        now=now,
        arrivals=demand.arrivals,
        engine=_engine(state),
        instances=tuple(_instance_view(id, state) for id in sorted(state.instances)),
        waiting=demand.waiting,
        waiting_tokens=demand.waiting_tokens,
        ttft_ratio=demand.ttft_ratio,
        samples=demand.samples,
        startup_s=state.startups.typical_s,
    )


def _engine(state: _PoolState) -> Engine:
    llm = None if state.card is None else state.card.llm
    if llm is None:
        return Engine(times=state.steps.times, observations=state.steps.observations)
    return Engine(
        times=state.steps.times,
        observations=state.steps.observations,
        block_size=llm.block_size,
        total_blocks=llm.total_blocks,
        max_num_seqs=llm.max_num_seqs,
        max_batched_tokens=llm.max_batched_tokens,
    )


def _instance_view(id: InstanceId, state: _PoolState) -> InstanceView:
    worth_s = state.worth.tokens_per_s(id) * state.steps.times.token
    report = state.loads.get(id)
    if report is None:
        return InstanceView(id=id, cache_worth_s=worth_s)
    requests = report.running + report.waiting
    return InstanceView(id=id, requests=requests, queued_tokens=report.queued_prefill_tokens, cache_worth_s=worth_s)
