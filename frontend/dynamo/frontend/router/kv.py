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
from typing import Any

import msgspec

from dynamo.common.discovery import Instance
from dynamo.common.errors import DynamoError
from dynamo.common.kv.events import KvSnapshot, KvUpdate, LoadReport
from dynamo.common.kv.hashes import TOKEN_BYTES, space_hash
from dynamo.common.names import InstanceId
from dynamo.frontend.config import KvCost, KvRouterOptions, check_weight
from dynamo.frontend.router.base import RouteRequest, RoutingDecision
from dynamo.frontend.router.cache.hashing import PromptHashes, RecentPrompts
from dynamo.frontend.router.cache.index import PrefixIndex
from dynamo.frontend.router.cache.predicted import PredictedIndex
from dynamo.frontend.router.cache.thinning import SPARSE
from dynamo.frontend.router.cost.goals import check_goals
from dynamo.frontend.router.cost.latency import LatencyModel, Predictions
from dynamo.frontend.router.cost.prompts import Prompt
from dynamo.frontend.router.cost.spreading import PrefixCredits, cheapest_without
from dynamo.frontend.router.cost.weights import weighted_costs
from dynamo.frontend.router.cost_terms import COST_TERMS, CostTerms
from dynamo.frontend.router.explanation import shown
from dynamo.frontend.router.fetch import NO_FETCH, TierCount, TierFetch
from dynamo.frontend.router.loads.busy import all_busy, busy, pinned_busy
from dynamo.frontend.router.loads.instance_load import InstanceLoad, Load
from dynamo.frontend.router.loads.shared_bookings import MAX_WAIT_S
from dynamo.frontend.router.loads.table import LoadTable
from dynamo.frontend.router.loads.thresholds import ThresholdTable
from dynamo.frontend.router.model_index import ModelIndex
from dynamo.frontend.router.simple import pinned, position_of, position_of_least
from dynamo.frontend.router.tiers import Awaited, described, with_fetched

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
        terms: CostTerms = COST_TERMS,
    ) -> None:
        self.config = config or KvRouterOptions()
        self.config = replace(self.config, cost=self.config.effective_cost)
        self.thresholds = ThresholdTable() if thresholds is None else thresholds
        self.loads = LoadTable() if loads is None else loads
        self._models: dict[str, ModelIndex] = {}
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
            self.loads.on_peer_prompt(shared.add_kept)
            self._all_predicted = [self._predicted, shared]
        self._waiting: dict[str, int] = {}
        """Predictions of prompts that wait longer than predictions live otherwise, by booking."""
        self._awaited: dict[str, Awaited] = {}
        """Bookings without a first token, of models whose instances have slow tiers."""
        self._recent = RecentPrompts()
        self._rng = rng or random.Random()
        self._clock = clock
        self._terms = terms

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

    def held_blocks(self, model: str, instance: InstanceId) -> int:
        return self.index(model).held_blocks(instance)

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
        if model.index.tiers:
            latency = model.latency(model.load_rows.rows(candidates))
            overlaps = with_fetched(overlaps, self._fetches(model, prompt, candidates, overlaps, latency))
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
        config = self._settings_of(request) if request.overrides or request.is_prefilled else self.config
        fleet = self._view(request, candidates)
        if config.cost is KvCost.WEIGHTS or not fleet.prompt.block_size:
            costed = _Costed(weighted_costs(config, fleet.prompt, fleet.loads, fleet.on_gpu), None, None, ())
        else:
            costed = self._in_seconds(request, config, fleet)
        predicted = costed.predicted
        position, reason = self._choose(request, config, fleet, costed.costs)
        cost_decides = not reason
        if predicted is not None and cost_decides and fleet.loads[position].prefill_tokens:
            position, reason = _pass_queue(request, config, fleet, predicted, costed.misses, position)
        instance, overlap = candidates[position], fleet.on_gpu.get(position, 0)
        prefill_tokens = self._book(request, config, fleet.prompt, instance.id, fleet.overlaps.get(position, 0), fleet.now)
        if predicted is not None:
            _count(request, fleet, costed, predicted, position, prefill_tokens, cost_decides=cost_decides)
        self._expect_cached(request, fleet, instance.id, position, predicted)
        fetch = self._await(request, fleet, position, predicted) if fleet.model.index.tiers else None
        reason = reason or ("kv" if overlap or (fetch is not None and fetch.fetched) else self._reason_without_overlap())
        explanation = _explain(fleet, costed, position) if explain else ()
        ttft_s = None if predicted is None else predicted.ttft_s[position]
        return RoutingDecision(instance, reason, overlap, costed.costs[position], ttft_s, explanation, fetch)

    def _settings_of(self, request: RouteRequest) -> KvRouterOptions:
        """Return the settings of a request that changes some of them, or whose prompt is computed."""
        config = _overridden(self.config, request.overrides) if request.overrides else self.config
        if request.is_prefilled and config.cost is KvCost.WEIGHTS:
            config = replace(config, prefill_load_scale=0.0)
        return config

    def _view(self, request: RouteRequest, candidates: Sequence[Instance]) -> _CandidateView:
        now = self._clock()
        prompt = self._prompt(request, candidates)
        model = self._models[request.model] if request.model in self._models else self._model(request.model)
        rows = model.load_rows.rows(candidates)
        loads = self.loads.read(rows, now)
        overlaps, confirmed = self._overlaps(model, prompt, candidates, now)
        busy_ones = busy(loads, self.thresholds.of(request.model))
        latency = model.latency(rows)
        fetches: Mapping[int, TierFetch] = {}
        on_gpu = overlaps
        if model.index.tiers and not request.is_prefilled:
            fetches = self._fetches(model, prompt, candidates, on_gpu, latency)
            overlaps = with_fetched(on_gpu, fetches)
        return _CandidateView(
            now, prompt, model, candidates, rows, loads, overlaps, on_gpu, confirmed, fetches, busy_ones, latency
        )

    def _fetches(
        self,
        model: ModelIndex,
        prompt: Prompt,
        candidates: Sequence[Instance],
        on_gpu: Mapping[int, int],
        latency: LatencyModel,
    ) -> Mapping[int, TierFetch]:
        """Return what candidates would fetch of a prompt from slow tiers, by position."""
        if not self.uses_index:
            return {}
        block_s = prompt.block_size * latency.steps.times.token
        return model.slow.fetches(prompt, candidates, model.rows.rows(candidates), on_gpu, latency.fetching, block_s)

    def _await(self, request: RouteRequest, fleet: _CandidateView, position: int, predicted: Predictions | None) -> TierFetch:
        """Return what the chosen instance fetches, and learn from when the first token comes how long that takes."""
        fetch = fleet.fetches.get(position, NO_FETCH)
        if predicted is not None and not request.is_prefilled:
            self._awaited[request.booking_id] = Awaited(
                fleet.latency.fetching, fetch, predicted.ttft_s[position], fleet.now, fleet.block_s
            )
        return fetch

    def _in_seconds(self, request: RouteRequest, config: KvRouterOptions, fleet: _CandidateView) -> _Costed:
        """Return what a request would cost each candidate. Raises Overloaded if none is predicted to reach the goals."""
        prompt, loads, overlaps, latency = fleet.prompt, fleet.loads, fleet.overlaps, fleet.latency
        predicted = latency.predict(
            prompt,
            loads,
            overlaps,
            with_fetched(fleet.confirmed, fleet.fetches),
            fleet.candidates,
            fleet.now,
            is_prefilled=request.is_prefilled,
            max_output=request.expected_output_tokens,
            learned_output=request.learned_output,
            frontends=self.loads.frontends,
            fetches=fleet.fetches,
        )
        misses: Sequence[float] = ()
        is_late = False
        if config.has_goals:
            predicted = latency.anticipated(predicted, loads, self.loads.frontends)
            misses = latency.add_misses(predicted, prompt, loads, config.ttft_goal_s, config.itl_goal_s)
            is_late = check_goals(request, config, prompt, loads, overlaps, predicted, latency, fleet.model.demand, fleet.now)
        spread: _PrefixSpread | None = None
        if overlaps and not request.is_prefilled:
            spread = _PrefixSpread.find(prompt, loads, overlaps, predicted, latency)
            if spread is not None:
                fleet.model.credits.discount(spread.prefix, predicted.costs, spread.position, spread.premium_s)
        return _Costed(predicted.costs, predicted, spread, misses, is_late)

    def _expect_cached(
        self, request: RouteRequest, fleet: _CandidateView, instance: InstanceId, position: int, predicted: Predictions | None
    ) -> None:
        """Count the blocks of a prompt as cached where it was sent, before events say so."""
        hashes = fleet.prompt.hashes
        if self._predicted is None or (len(hashes) - fleet.confirmed.get(position, 0)) * _WORTH_GUESSING < len(hashes):
            return
        wait_s = 0.0 if predicted is None else min(predicted.ttft_s[position], MAX_WAIT_S)
        decision = self._predicted.add(instance, hashes, fleet.now + wait_s)
        if wait_s > self._predicted.ttl_s:
            self._waiting[request.booking_id] = decision
        self.loads.share_prompt(instance, hashes, wait_s)

    def _reason_without_overlap(self) -> str:
        return "kv: nothing cached" if self.uses_index or not self.config.use_kv_events else "kv: caches unknown"

    def first_token(self, booking_id: str) -> None:
        self._waiting.pop(booking_id, None)
        now = self._clock()
        if self._awaited and (awaited := self._awaited.pop(booking_id, None)) is not None:
            awaited.arrived(now)
        self.loads.first_token(booking_id, now)

    def found_cached(self, request: RouteRequest, decision: RoutingDecision, tokens: int) -> Sequence[TierCount]:
        fetch, card = decision.fetch, decision.instance.card.llm
        block_size = self.config.block_size or (card.block_size if card is not None else 0)
        if fetch is None or not block_size:
            return ()
        hashes, found = request.block_hashes, tokens // block_size
        return self._model(request.model).slow.verify(decision.instance.id, hashes, decision.overlap_blocks, fetch, found)

    def finished(self, booking_id: str, error: DynamoError | None = None) -> None:
        if self._awaited:
            self._awaited.pop(booking_id, None)
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

    def _model(self, name: str) -> ModelIndex:
        if name not in self._models:
            self._models[name] = ModelIndex(self.loads, self._all_predicted, self._terms, self.config.tier_prices, self._clock)
        return self._models[name]

    def _overlaps(
        self, model: ModelIndex, prompt: Prompt, candidates: Sequence[Instance], now: float
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
        request.block_hashes = hashes
        return Prompt(tokens, block_size, hashes, tokens / block_size, shared)

    def _choose(
        self, request: RouteRequest, config: KvRouterOptions, fleet: _CandidateView, costs: Sequence[float]
    ) -> tuple[int, str]:
        """Return the position of the chosen candidate, and the reason, which is empty if the cost decided.

        Raises Overloaded if that one is busy, or all are.
        """
        if request.pinned is not None and (position := pinned(request, fleet.candidates)) is not None:
            if request.needs_room and fleet.busy is not None and fleet.busy[position]:
                raise pinned_busy(fleet.candidates[position].id, request.model)
            return position, "pinned"
        if fleet.busy is not None and any(fleet.busy):
            if all(fleet.busy):
                raise all_busy(request.model)
            costs = [math.inf if is_busy else cost for cost, is_busy in zip(costs, fleet.busy, strict=True)]
        if request.preferred is not None:
            position = position_of(request.preferred, fleet.candidates)
            if position is not None and math.isfinite(costs[position]):
                return position, "preferred"
        if config.temperature > 0.0:
            return self._draw(costs, config.temperature), ""
        least = min(costs)
        if costs.count(least) == 1:
            return costs.index(least), ""
        tied = [position for position, cost in enumerate(costs) if cost == least]
        return tied[position_of_least([fleet.rows[position].recent for position in tied], self._rng)], ""

    def _draw(self, costs: Sequence[float], temperature: float) -> int:
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
                extra_blocks += request.sequences * math.ceil(request.expected_output_tokens / prompt.block_size)
        self.loads.book(
            request.booking_id, instance, now, prefill_tokens=prefill_tokens, blocks=blocks, extra_blocks=extra_blocks
        )
        return prefill_tokens


class _CandidateView(msgspec.Struct, frozen=True, gc=False):
    """What is known of the candidates when a request is placed."""

    now: float
    prompt: Prompt
    model: ModelIndex
    candidates: Sequence[Instance]
    rows: Sequence[InstanceLoad]
    loads: Sequence[Load]
    overlaps: Mapping[int, int]
    """Blocks of the prompt that need not be computed, by position of the candidate: cached, expected to be, or fetched."""
    on_gpu: Mapping[int, int]
    """The same without what is fetched from slower tiers."""
    confirmed: Mapping[int, int]
    """The same as `on_gpu`, by events only."""
    fetches: Mapping[int, TierFetch]
    """What is fetched from slower tiers."""
    busy: Sequence[bool] | None
    """None if there is no threshold."""
    latency: LatencyModel

    @property
    def block_s(self) -> float:
        """The time to compute a block."""
        return self.prompt.block_size * self.latency.steps.times.token


class _Costed(msgspec.Struct, frozen=True, gc=False):
    """What a request would cost each candidate, by position."""

    costs: Sequence[float]
    predicted: Predictions | None
    """None if the cost is in weighted blocks."""
    spread: _PrefixSpread | None
    misses: Sequence[float]
    """What goals add to the costs; empty without goals."""
    is_late: bool = False
    """Admitted although the prompt alone takes longer than the goal."""


class _PrefixSpread(msgspec.Struct, frozen=True, gc=False):
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
    ) -> _PrefixSpread | None:
        """Return None if all instances have as much of the prompt."""
        most = max(overlaps.values())
        position = cheapest_without(predicted.costs, overlaps, most)
        if position is None:
            return None
        overlap = overlaps.get(position, 0)
        premium_s = latency.premium_s(prompt, loads[position], predicted, position, overlap, most)
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


def _pass_queue(
    request: RouteRequest,
    config: KvRouterOptions,
    fleet: _CandidateView,
    predicted: Predictions,
    misses: Sequence[float],
    cheapest: int,
) -> tuple[int, str]:
    """Return where a request goes if prompts wait at the cheapest candidate, and the reason, which is empty if it stays there."""
    if request.is_prefilled or config.temperature != 0.0:
        return cheapest, ""
    prompt, loads, overlaps = fleet.prompt, fleet.loads, fleet.overlaps
    position = fleet.latency.shorter_queue(prompt, loads, overlaps, predicted, cheapest, misses, fleet.busy)
    return position, "" if position == cheapest else "kv: shorter queue"


def _count(
    request: RouteRequest,
    fleet: _CandidateView,
    costed: _Costed,
    predicted: Predictions,
    position: int,
    prefill_tokens: int,
    *,
    cost_decides: bool,
) -> None:
    """Count a placement for the predictions of later ones."""
    fleet.latency.traffic.add(prefill_tokens)
    if costed.misses:
        fleet.model.demand.place(request.priority, prefill_tokens, fleet.now, is_late=costed.is_late)
    if costed.spread is not None and cost_decides:
        costed.spread.settle(fleet.model.credits, position, costed.costs[position], predicted.idle)


def _explain(fleet: _CandidateView, costed: _Costed, chosen: int) -> list[Mapping[str, float | int | str]]:
    return [
        {
            "instance": f"{fleet.candidates[position].id:x}",
            "cost": round(costed.costs[position], 6),
            "overlap_blocks": fleet.on_gpu.get(position, 0),
            **(described(fleet.fetches[position], fleet.latency.fetching, fleet.block_s) if position in fleet.fetches else {}),
            "prefill_tokens": fleet.loads[position].prefill_tokens,
            "decode_blocks": fleet.loads[position].decode_blocks,
            "kv_usage": round(fleet.loads[position].usage, 4),
            "requests": fleet.loads[position].requests,
            **({"busy": True} if fleet.busy is not None and fleet.busy[position] else {}),
            **({} if costed.predicted is None else _latencies(fleet, costed.predicted, position)),
        }
        for position in shown(costed.costs, chosen)
    ]


def _latencies(fleet: _CandidateView, predicted: Predictions, position: int) -> Mapping[str, float]:
    """Return the predicted latencies on a candidate."""
    itl_s = fleet.latency.itl_s(fleet.prompt, fleet.loads[position], predicted.prefilling)
    return {"ttft_ms": round(predicted.ttft_s[position] * 1e3, 1), "itl_ms": round(itl_s * 1e3, 2)}
