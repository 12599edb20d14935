"""Routing by KV cache overlap and load.

The candidate with the lowest cost is chosen; of several with the same cost, the one that got the fewest requests recently. The
cost is in seconds (`latency.py`) or in weighted blocks (`weights.py`). With a temperature above 0 the instance is drawn from the
softmax over the costs, min-max normalised.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec

from dynamo.common.discovery import Instance
from dynamo.common.errors import DynamoError
from dynamo.common.kv.events import KvSnapshot, KvUpdate, LoadReport
from dynamo.common.kv.hashes import TOKEN_BYTES, space_hash
from dynamo.common.names import InstanceId
from dynamo.frontend.config import KvCost, KvRouterOptions, check_weight
from dynamo.frontend.router.base import RouteRequest, RoutingDecision
from dynamo.frontend.router.cache.evictions import Evictions
from dynamo.frontend.router.cache.hashing import PromptHashes, RecentPrompts
from dynamo.frontend.router.cache.index import PrefixIndex
from dynamo.frontend.router.cache.predicted import PredictedIndex
from dynamo.frontend.router.cache.thinning import SPARSE
from dynamo.frontend.router.cost.goals import Demand, check_goals
from dynamo.frontend.router.cost.latency import LatencyModel, Predictions
from dynamo.frontend.router.cost.prompts import Prompt
from dynamo.frontend.router.cost.spreading import PrefixCredits, cheapest_without
from dynamo.frontend.router.cost.weights import weighted_costs
from dynamo.frontend.router.explanation import shown
from dynamo.frontend.router.loads.busy import all_busy, busy, pinned_busy
from dynamo.frontend.router.loads.instance_load import InstanceLoad, Load
from dynamo.frontend.router.loads.rows import RowCache
from dynamo.frontend.router.loads.shared_bookings import MAX_WAIT_S
from dynamo.frontend.router.loads.table import LoadTable
from dynamo.frontend.router.loads.thresholds import ThresholdTable
from dynamo.frontend.router.simple import pinned, position_of, position_of_least

_WORTH_GUESSING = 8
"""A decision is added to the predicted index if at least one in this many of the prompt's blocks is not confirmed by events of
its instance. Below that, requests that share the prefix find the instance by the confirmed blocks anyway."""

_OVERRIDDEN = {
    "overlap_score_weight": "overlap_score_weight",
    "overlap_score_credit": "overlap_score_weight",
    "prefill_load_scale": "prefill_load_scale",
    "router_temperature": "temperature",
    "ttft_goal": "ttft_goal_s",
    "itl_goal": "itl_goal_s",
}
"""Settings of one request → the options that they change."""
_WEIGHTS = frozenset({"overlap_score_weight", "prefill_load_scale"})
"""Options that only the cost by weights has: a request that changes one is routed by it."""


class _Model:
    """The index of one model, and the rows of its candidates in each table."""

    def __init__(self, loads: LoadTable, predicted: Sequence[PredictedIndex]) -> None:
        self.index = PrefixIndex()
        self.rows = RowCache(self.index)
        self.load_rows = RowCache(loads)
        self.predicted_rows = [RowCache(each.index) for each in predicted]
        self.credits = PrefixCredits()
        self.demand = Demand()
        self._evictions: dict[str, Evictions] = {}
        """By role."""
        self._latencies: dict[str, LatencyModel] = {}
        """By engine."""
        self._latency = LatencyModel(self._evictions_of(""))
        self._latency_rows: Sequence[InstanceLoad] = ()
        """The candidates whose model `_latency` is."""

    def latency(self, rows: Sequence[InstanceLoad]) -> LatencyModel:
        """Return the model of the first candidate's engine: a fleet of several engines is predicted as if all had that one."""
        if rows is not self._latency_rows:
            self._latency_rows = rows
            self._latency = self._latencies.get(rows[0].engine) or self._new_latency(rows[0].engine)
        return self._latency

    def _new_latency(self, engine: str) -> LatencyModel:
        latency = self._latencies[engine] = LatencyModel(self._evictions_of(engine))
        return latency

    def _evictions_of(self, engine: str) -> Evictions:
        """Return what instances of the role of this engine evict, whichever engine they have."""
        role = engine.rpartition(" ")[2]
        evictions = self._evictions.get(role)
        if evictions is None:
            evictions = self._evictions[role] = Evictions(lambda: len(self.index))
        return evictions

    def apply(self, engine: str, instance: InstanceId, update: KvUpdate) -> None:
        self.index.apply(instance, update)
        self._evictions_of(engine).apply(instance, update)

    def learn(self, row: InstanceLoad, report: LoadReport, now: float) -> None:
        latency = self._latencies.get(row.engine)
        if latency is not None:
            latency.report(row.instance, report, now)

    def remove_instance(self, instance: InstanceId) -> None:
        self.index.remove_instance(instance)
        for evictions in self._evictions.values():
            evictions.remove_instance(instance)
        for latency in self._latencies.values():
            latency.remove_instance(instance)


class KvRouter:
    """Chooses the instance with the lowest cost, which weighs the cached part of the prompt against the load."""

    def __init__(
        self,
        config: KvRouterOptions | None = None,
        thresholds: ThresholdTable | None = None,
        loads: LoadTable | None = None,
        *,
        rng: random.Random | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config or KvRouterOptions()
        self.config = replace(self.config, cost=self.config.effective_cost)
        self.thresholds = ThresholdTable() if thresholds is None else thresholds
        self.loads = LoadTable() if loads is None else loads
        self._models: dict[str, _Model] = {}
        self.loads.on_report(self._learn)
        self.uses_index = self.config.use_kv_events
        self._predicted: PredictedIndex | None = None
        """By this router's decisions."""
        self._all_predicted: list[PredictedIndex] = []
        """Predictions by the decisions of this router, then by those of other frontends."""
        ttl_s = self.config.speculative_ttl_s if self.config.use_kv_events else self.config.ttl_s
        if ttl_s > 0.0:
            size, ratio = self.config.max_tree_size, self.config.prune_target_ratio
            self._predicted = PredictedIndex(ttl_s, size, ratio)
            shared = PredictedIndex(ttl_s, size, ratio, SPARSE)
            self.loads.on_sibling_prompt(shared.add_kept)
            self._all_predicted = [self._predicted, shared]
        self._waiting: dict[str, int] = {}
        """Predictions of prompts that wait longer than predictions live otherwise, by booking."""
        self._recent = RecentPrompts()
        self._rng = rng or random.Random()
        self._clock = clock

    def __repr__(self) -> str:
        return f"<KvRouter models={sorted(self._models)} {self.loads!r} predicted={self._predicted!r}>"

    # KV events

    def index(self, model: str) -> PrefixIndex:
        """Return the index of the blocks that the instances of a model hold, by their events."""
        return self._model(model).index

    def apply(self, model: str, instance: InstanceId, update: KvUpdate) -> None:
        self._model(model).apply(self.loads.engine_of(instance), instance, update)

    def replace(self, model: str, instance: InstanceId, snapshot: KvSnapshot) -> None:
        self.index(model).replace(instance, snapshot)

    def set_current(self, is_current: bool) -> None:
        """Use the indexes, or, while they are out of date, only what this process itself knows of loads and prompts."""
        self.uses_index = is_current and self.config.use_kv_events

    # Routing

    def prompt_hashes(self, request: RouteRequest, candidates: Sequence[Instance]) -> PromptHashes | None:
        return PromptHashes(request.prompt, self._block_size(candidates), space_hash(request.adapter, request.cache_salt))

    def missing_tokens(self, request: RouteRequest, candidates: Sequence[Instance], *, with_room: bool = False) -> int | None:
        prompt = self._prompt(request, candidates)
        if not prompt.block_size:
            return None
        model, now = self._model(request.model), self._clock()
        overlaps, _ = self._overlaps(model, prompt, candidates, now)
        if with_room:
            busy_ones = busy(self.loads.read(model.load_rows.rows(candidates), now), self.thresholds.of(request.model))
            if busy_ones is None or all(busy_ones):
                return None
            overlaps = {position: blocks for position, blocks in overlaps.items() if not busy_ones[position]}
        overlap = max(overlaps.values(), default=0)
        if overlap and overlap == len(prompt.hashes):
            return 0
        return prompt.tokens - overlap * prompt.block_size

    def pick(self, request: RouteRequest, candidates: Sequence[Instance], *, explain: bool = False) -> RoutingDecision:
        config = _overridden(self.config, request.overrides) if request.overrides else self.config
        if request.is_prefilled and config.cost is KvCost.WEIGHTS:
            config = replace(config, prefill_load_scale=0.0)
        now = self._clock()
        prompt = self._prompt(request, candidates)
        hashes = prompt.hashes
        model = self._model(request.model)
        rows = model.load_rows.rows(candidates)
        loads = self.loads.read(rows, now)
        overlaps, confirmed = self._overlaps(model, prompt, candidates, now)
        predicted: Predictions | None = None
        spread: _Spread | None = None
        misses: Sequence[float] = ()
        latency = model.latency(rows)
        if config.cost is KvCost.WEIGHTS or not prompt.block_size:
            costs = weighted_costs(config, prompt, loads, overlaps)
        else:
            predicted = latency.predict(
                prompt,
                loads,
                overlaps,
                confirmed,
                candidates,
                now,
                is_prefilled=request.is_prefilled,
                max_output=request.expected_output_tokens,
                frontends=self.loads.frontends,
            )
            costs = predicted.costs
            if config.has_goals:
                latency.anticipate(loads, self.loads.frontends)
                misses = latency.add_misses(predicted, prompt, loads, config.ttft_goal_s, config.itl_goal_s)
                check_goals(request, config, prompt, loads, overlaps, predicted, latency, model.demand, now)
            if overlaps and not request.is_prefilled:
                spread = _Spread.find(prompt, loads, overlaps, predicted, latency)
                if spread is not None:
                    model.credits.discount(spread.prefix, costs, spread.position, spread.premium_s)
        busy_ones = busy(loads, self.thresholds.of(request.model))
        position = None if request.pinned is None else pinned(request, candidates)
        if position is not None:
            if request.needs_room and busy_ones is not None and busy_ones[position]:
                raise pinned_busy(candidates[position].id, request.model)
            reason = "pinned"
        else:
            position, reason = self._choose(request, candidates, rows, config, costs, busy_ones)
        cost_decides = not reason
        may_move = cost_decides and not request.is_prefilled and config.temperature == 0.0
        if predicted is not None and may_move and loads[position].prefill_tokens:
            cheapest = position
            position = latency.shorter_queue(prompt, loads, overlaps, predicted, cheapest, misses, busy_ones)
            reason = "" if position == cheapest else "kv: shorter queue"
        instance, overlap = candidates[position], overlaps.get(position, 0)
        prefill_tokens = self._book(request, config, prompt, instance.id, overlap, now)
        if predicted is not None:
            latency.placed(prefill_tokens)
            if config.has_goals:
                model.demand.place(request.priority, prefill_tokens, now)
            if spread is not None and cost_decides:
                spread.settle(model.credits, position, costs[position], latency.idle)
        if self._predicted is not None and (len(hashes) - confirmed.get(position, 0)) * _WORTH_GUESSING >= len(hashes):
            wait_s = 0.0 if predicted is None else min(predicted.ttft_s[position], MAX_WAIT_S)
            decision = self._predicted.add(instance.id, hashes, now + wait_s)
            if wait_s > self._predicted.ttl_s:
                self._waiting[request.booking_id] = decision
            self.loads.share_prompt(instance.id, hashes, wait_s)
        explanation: Sequence[Mapping[str, float | int | str]] = ()
        if explain:
            latencies = None if predicted is None else partial(_latencies, prompt, loads, predicted, latency)
            explanation = _explain(candidates, overlaps, loads, costs, position, busy_ones, latencies)
        reason = reason or ("kv" if overlap else self._reason_without_overlap())
        ttft_s = None if predicted is None else predicted.ttft_s[position]
        return RoutingDecision(instance, reason, overlap, costs[position], ttft_s, explanation)

    def _reason_without_overlap(self) -> str:
        return "kv: nothing cached" if self.uses_index or not self.config.use_kv_events else "kv: caches unknown"

    def first_token(self, booking_id: str) -> None:
        self._waiting.pop(booking_id, None)
        self.loads.first_token(booking_id, self._clock())

    def finished(self, booking_id: str, error: DynamoError | None = None) -> None:
        decision = self._waiting.pop(booking_id, None)
        if decision is not None and error is not None and self._predicted is not None:
            self._predicted.forget(decision)
        self.loads.finished(booking_id)

    def removed(self, instance: InstanceId) -> None:
        self.loads.remove_instance(instance)
        for model in self._models.values():
            model.remove_instance(instance)
        for predicted in self._all_predicted:
            predicted.remove_instance(instance)

    def _learn(self, row: InstanceLoad, model: str, report: LoadReport, now: float) -> None:
        if model in self._models:
            self._models[model].learn(row, report, now)

    def _model(self, name: str) -> _Model:
        if name not in self._models:
            self._models[name] = _Model(self.loads, self._all_predicted)
        return self._models[name]

    def _overlaps(
        self, model: _Model, prompt: Prompt, candidates: Sequence[Instance], now: float
    ) -> tuple[Mapping[int, int], Mapping[int, int]]:
        """Return two maps of overlaps in blocks by position of the candidate: confirmed or predicted, whichever is longer, and
        confirmed by events only."""
        confirmed: dict[int, int] = {}
        if self.uses_index:
            match = model.index.match(prompt.hashes, prompt.shared)
            if match.groups:
                confirmed = match.by_position(model.rows.rows(candidates))
        overlaps = confirmed
        for predicted, rows in zip(self._all_predicted, model.predicted_rows, strict=True):
            if len(predicted) and (match := predicted.match(prompt.hashes, now)).groups:
                guessed = match.by_position(rows.rows(candidates))
                overlaps = overlaps | {
                    position: blocks for position, blocks in guessed.items() if blocks > overlaps.get(position, 0)
                }
        return overlaps, confirmed

    def _block_size(self, candidates: Sequence[Instance]) -> int:
        """Return the tokens per block of the first candidate. Instances with other block sizes share no hashes with it."""
        if self.config.block_size:
            return self.config.block_size
        llm = candidates[0].card.llm
        return llm.block_size if llm is not None else 0

    def _prompt(self, request: RouteRequest, candidates: Sequence[Instance]) -> Prompt:
        tokens, block_size = len(request.prompt) // TOKEN_BYTES, self._block_size(candidates)
        if not block_size:
            return Prompt(tokens, 0, (), 0.0, 0)
        computed = request.hashes
        if computed is not None and computed.block_size == block_size:
            hashes, shared = computed.values, 0
        else:
            hashes, shared = self._recent.hashes(request.prompt, block_size, space_hash(request.adapter, request.cache_salt))
        return Prompt(tokens, block_size, hashes, tokens / block_size, shared)

    def _choose(
        self,
        request: RouteRequest,
        candidates: Sequence[Instance],
        rows: Sequence[InstanceLoad],
        config: KvRouterOptions,
        costs: list[float],
        busy_ones: Sequence[bool] | None,
    ) -> tuple[int, str]:
        """Return the position of the chosen candidate, and the reason, which is empty if the cost decided.

        Raises Overloaded if all are busy.
        """
        if busy_ones is not None and any(busy_ones):
            if all(busy_ones):
                raise all_busy(request.model)
            costs = [math.inf if is_busy else cost for cost, is_busy in zip(costs, busy_ones, strict=True)]
        if request.preferred is not None:
            position = position_of(request.preferred, candidates)
            if position is not None and math.isfinite(costs[position]):
                return position, "preferred"
        if config.temperature > 0.0:
            return self._draw(costs, config.temperature), ""
        least = min(costs)
        if costs.count(least) == 1:
            return costs.index(least), ""
        tied = [position for position, cost in enumerate(costs) if cost == least]
        return tied[position_of_least([rows[position].recent for position in tied], self._rng)], ""

    def _draw(self, costs: list[float], temperature: float) -> int:
        least = min(costs)
        spread = max(cost for cost in costs if math.isfinite(cost)) - least or 1.0
        weights = [math.exp((least - cost) / spread / temperature) for cost in costs]  # of one that is busy: 0
        return self._rng.choices(range(len(costs)), weights)[0]

    def _book(
        self, request: RouteRequest, config: KvRouterOptions, prompt: Prompt, instance: InstanceId, overlap: int, now: float
    ) -> int:
        """Book the request. Return how many tokens of its prompt the instance has to compute."""
        # An engine computes at least the last token of a prompt that it has cached completely.
        prefill_tokens = max(prompt.tokens - overlap * prompt.block_size, min(prompt.tokens, 1))
        if request.is_prefilled:
            prefill_tokens = 0
        blocks: Sequence[int] = ()
        extra_blocks = 0
        if config.track_active_blocks and prompt.block_size:
            blocks = prompt.hashes
            extra_blocks = math.ceil(prompt.blocks) - len(blocks)
            if not config.assume_kv_reuse:
                extra_blocks += len(blocks)
                blocks = ()
            if config.track_output_blocks:
                extra_blocks += math.ceil(request.expected_output_tokens / prompt.block_size)
        self.loads.book(
            request.booking_id, instance, now, prefill_tokens=prefill_tokens, blocks=blocks, extra_blocks=extra_blocks
        )
        return prefill_tokens


class _Spread(msgspec.Struct, frozen=True, gc=False):
    """The instance that a prefix would spread to next."""

    prefix: int
    """The hash of its last block."""
    position: int
    premium_s: float
    least_s: float
    """What the request would cost there if the prefix were cached."""

    @classmethod
    def find(
        cls,
        prompt: Prompt,
        loads: Sequence[Load],
        overlaps: Mapping[int, int],
        predicted: Predictions,
        latency: LatencyModel,
    ) -> _Spread | None:
        """Return None if all instances have as much of the prompt."""
        most = max(overlaps.values())
        position = cheapest_without(predicted.costs, overlaps, most)
        if position is None:
            return None
        overlap = overlaps.get(position, 0)
        premium_s = latency.premium_s(prompt, loads[position], predicted.ttft_s[position], overlap, most)
        return cls(prompt.hashes[most - 1], position, premium_s, predicted.costs[position] - premium_s)

    def settle(self, credits: PrefixCredits, position: int, cost_s: float, idle: float) -> None:
        """Record where the request went, at which cost. `idle`: the share of their time that instances compute no prompts."""
        if position == self.position:
            credits.buy(self.prefix, self.premium_s)
        elif cost_s > self.least_s:
            credits.rent(self.prefix, cost_s - self.least_s, idle)


def _overridden(config: KvRouterOptions, overrides: Mapping[str, float]) -> KvRouterOptions:
    """Return the settings of a request that changes some of them. Names of other settings are left to other routers."""
    changed: dict[str, Any] = {
        _OVERRIDDEN[name]: check_weight(name, value) for name, value in overrides.items() if name in _OVERRIDDEN
    }
    if not _WEIGHTS.isdisjoint(changed):
        changed["cost"] = KvCost.WEIGHTS
    return replace(config, **changed)


def _explain(
    candidates: Sequence[Instance],
    overlaps: Mapping[int, int],
    loads: Sequence[Load],
    costs: Sequence[float],
    chosen: int,
    busy_ones: Sequence[bool] | None,
    latencies: Callable[[int], Mapping[str, float]] | None,
) -> list[Mapping[str, float | int | str]]:
    return [
        {
            "instance": f"{candidates[position].id:x}",
            "cost": round(costs[position], 6),
            "overlap_blocks": overlaps.get(position, 0),
            "prefill_tokens": loads[position].prefill_tokens,
            "decode_blocks": loads[position].decode_blocks,
            "kv_usage": round(loads[position].usage, 4),
            "requests": loads[position].requests,
            **({"busy": True} if busy_ones is not None and busy_ones[position] else {}),
            **({} if latencies is None else latencies(position)),
        }
        for position in shown(costs, chosen)
    ]


def _latencies(
    prompt: Prompt, loads: Sequence[Load], predicted: Predictions, latency: LatencyModel, position: int
) -> Mapping[str, float]:
    """Return the predicted latencies on a candidate."""
    itl_s = latency.itl_s(prompt, loads[position], latency.prefilling)
    return {"ttft_ms": round(predicted.ttft_s[position] * 1e3, 1), "itl_ms": round(itl_s * 1e3, 2)}
