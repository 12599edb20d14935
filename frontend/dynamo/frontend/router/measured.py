"""A router that reports the time and the outcome of its decisions, counts the demand, and explains what is to be explained."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from dynamo.common.discovery import Instance
from dynamo.common.errors import DynamoError, Overloaded
from dynamo.common.kv.hashes import TOKEN_BYTES
from dynamo.common.scaling.demand import MAX_SAMPLES
from dynamo.frontend.router.base import Router, RouteRequest, RouterWrapper, RoutingDecision
from dynamo.frontend.router.demand import INCREMENT, MODULUS, MULTIPLIER, RATIOS, DemandTable, PoolCounts
from dynamo.frontend.router.explain import DecisionLog
from dynamo.frontend.router.fetch import TierCount


class Observer(Protocol):
    """Receives measurements: a registry of metrics, or a benchmark's lists."""

    def picked(self, request: RouteRequest, decision: RoutingDecision, seconds: float) -> None:
        """Record a decision and how long it took, hashing included unless it was done before."""
        ...

    def refused(self, request: RouteRequest) -> None:
        """Record that all instances were busy."""
        ...

    def found_cached(self, model: str, counts: Sequence[TierCount]) -> None:
        """Record what routing counted on in caches, and what the engine found, by tier."""
        ...

    def predicted(self, model: str, predicted_s: float, seconds: float) -> None:
        """Record the time from a decision to the first token, which the router had predicted."""
        ...


class MeasuredRouter(RouterWrapper):
    """Wraps a router, reports every decision to an observer, and has some explained in a log."""

    def __init__(
        self,
        router: Router,
        observer: Observer,
        decisions: DecisionLog | None = None,
        clock: Callable[[], float] = time.perf_counter,
        demand: DemandTable | None = None,
    ) -> None:
        """`demand` has the same clock."""
        super().__init__(router)
        self._observer = observer
        self._decisions = decisions or DecisionLog()
        self._clock = clock
        self._demand = demand or DemandTable(clock)
        self._pools = self._demand.pools
        self._predictions: dict[str, tuple[str, float, float, PoolCounts]] = {}
        """Bookings without a first token: the model, the predicted TTFT, when the decision was made, and counts of the pool."""

    def pick(self, request: RouteRequest, candidates: Sequence[Instance], *, explain: bool = False) -> RoutingDecision:
        decisions = self._decisions
        explain = explain or request.explanation is not None or (decisions.is_watched and decisions.wants_next())
        start = self._clock()
        try:
            decision = self.inner.pick(request, candidates, explain=explain)
        except Overloaded:
            self._observer.refused(request)
            raise
        end = self._clock()
        self._observer.picked(request, decision, end - start)
        if explain:
            decisions.add(request, decision, len(candidates))
        card = decision.instance.card
        try:
            counts = self._pools[card.name, card.role]
        except KeyError:
            counts = self._demand.of(card.name, card.role)
        if decision.ttft_s is not None:
            self._predictions[request.booking_id] = (request.model, decision.ttft_s, end, counts)
        if request.is_counted:
            return decision
        # From here on without calls, since every request comes here: see `PoolCounts`.
        request.is_counted = True
        counts.placed += 1
        if prompt := request.prompt:
            llm = card.llm
            block_size = 0 if llm is None else llm.block_size
            tokens = len(prompt) // TOKEN_BYTES
            if not request.is_prefilled:
                computed = tokens
                cached = decision.overlap_blocks * block_size
                if decision.fetch is not None:
                    cached += decision.fetch.fetched * block_size
                if cached:
                    # An instance may have blocks of another size than those that were looked for, or say so.
                    cached = cached if cached < tokens else tokens
                    computed -= cached
                    saved, instance = counts.saved, decision.instance.id
                    saved[instance] = saved.get(instance, 0) + cached
                counts.computed_tokens += computed if computed > 0 else 1
            counts.placed_tokens += tokens
            counts.output_tokens += request.expected_output_tokens
            position = counts.arrived
            counts.arrived = arrived = position + 1
            if position >= MAX_SAMPLES:
                counts.seed = seed = (counts.seed * MULTIPLIER + INCREMENT) % MODULUS
                position = (seed >> 32) % arrived
            if position < MAX_SAMPLES:
                limit, salt = request.expected_output_tokens, request.cache_salt
                at, adapter, hashes = end - request.waited_s, request.adapter, request.block_hashes
                output = request.learned_output
                counts.samples[position] = at, prompt, limit, request.priority, adapter, salt, block_size, hashes, output
        return decision

    def first_token(self, booking_id: str) -> None:
        prediction = self._predictions.pop(booking_id, None)
        if prediction is not None:
            model, predicted_s, decided_at, counts = prediction
            seconds = self._clock() - decided_at
            self._observer.predicted(model, predicted_s, seconds)
            if predicted_s > 0.0:
                counts.ratios[counts.compared % RATIOS] = seconds / predicted_s
                counts.compared += 1
        self.inner.first_token(booking_id)

    def found_cached(self, request: RouteRequest, decision: RoutingDecision, tokens: int) -> Sequence[TierCount]:
        counts = self.inner.found_cached(request, decision, tokens)
        if counts:
            self._observer.found_cached(request.model, counts)
        return counts

    def finished(self, booking_id: str, error: DynamoError | None = None) -> None:
        self._predictions.pop(booking_id, None)
        self.inner.finished(booking_id, error)
