"""What the KV router knows of one model: its caches, its rows in each table, and how long its engines take."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from dynamo.common.kv.events import KvUpdate, LoadReport
from dynamo.common.kv.tiers import Tier
from dynamo.common.names import InstanceId
from dynamo.frontend.router.cache.evictions import Evictions
from dynamo.frontend.router.cache.index import PrefixIndex
from dynamo.frontend.router.cache.predicted import PredictedIndex
from dynamo.frontend.router.cost.goals import Demand
from dynamo.frontend.router.cost.latency import LatencyModel
from dynamo.frontend.router.cost.spreading import PrefixCredits
from dynamo.frontend.router.cost_terms import CostTerms
from dynamo.frontend.router.loads.instance_load import InstanceLoad
from dynamo.frontend.router.loads.rows import RowCache
from dynamo.frontend.router.loads.table import LoadTable
from dynamo.frontend.router.tiers import SlowTiers


class ModelIndex:
    """The index of one model, and the rows of its candidates in each table."""

    def __init__(
        self,
        loads: LoadTable,
        predicted: Sequence[PredictedIndex],
        terms: CostTerms,
        prices: Mapping[Tier, float],
        clock: Callable[[], float],
    ) -> None:
        self._terms = terms
        self._prices = prices
        self.index = PrefixIndex()
        self.slow = SlowTiers(self.index, clock)
        self.rows = RowCache(self.index)
        self.load_rows = RowCache(loads)
        self.predicted_rows = [RowCache(each.index) for each in predicted]
        self.credits = PrefixCredits(terms)
        self.demand = Demand()
        self._evictions: dict[str, Evictions] = {}
        """By role."""
        self._latencies: dict[str, LatencyModel] = {}
        """By engine."""
        self._latency = LatencyModel(self._evictions_of(""), terms, prices)
        self._latency_rows: Sequence[InstanceLoad] = ()
        """The candidates whose model `_latency` is."""

    def latency(self, rows: Sequence[InstanceLoad]) -> LatencyModel:
        """Return the model of the first candidate's engine: a fleet of several engines is predicted as if all had that one."""
        if rows is not self._latency_rows:
            self._latency_rows = rows
            self._latency = self._latencies.get(rows[0].engine) or self._new_latency(rows[0].engine)
        return self._latency

    def _new_latency(self, engine: str) -> LatencyModel:
        latency = self._latencies[engine] = LatencyModel(self._evictions_of(engine), self._terms, self._prices)
        return latency

    def _evictions_of(self, engine: str) -> Evictions:
        """Return what instances of the role of this engine evict, whichever engine they have."""
        role = engine.rpartition(" ")[2]
        evictions = self._evictions.get(role)
        if evictions is None:
            evictions = self._evictions[role] = Evictions(lambda: len(self.index), self._terms)
        return evictions

    def apply(self, engine: str, instance: InstanceId, update: KvUpdate) -> None:
        self.index.apply(instance, update)
        if self.index.tiers:
            self.slow.apply(instance, update)
            self._evictions_of(engine).apply(instance, update, partial(self.index.is_kept, instance))
        else:
            self._evictions_of(engine).apply(instance, update)

    def learn(self, row: InstanceLoad, report: LoadReport, now: float) -> None:
        latency = self._latencies.get(row.engine)
        if latency is not None:
            latency.report(row.instance, report, now)

    def remove_instance(self, instance: InstanceId) -> None:
        self.index.remove_instance(instance)
        self.slow.remove_instance(instance)
        for evictions in self._evictions.values():
            evictions.remove_instance(instance)
        for latency in self._latencies.values():
            latency.remove_instance(instance)
