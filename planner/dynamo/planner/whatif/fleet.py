"""A fleet of simulated engines behind the real router, in virtual time."""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from dataclasses import replace

import msgspec

from dynamo.common.discovery import Instance
from dynamo.common.errors import Overloaded
from dynamo.common.kv.events import KvState, StepTotals
from dynamo.common.kv.hashes import TOKEN_BYTES
from dynamo.common.model_card import LlmInfo, ModelCard, ModelKind
from dynamo.common.names import Endpoint, InstanceId
from dynamo.frontend.config import RouterOptions
from dynamo.frontend.router.base import RouteRequest
from dynamo.frontend.router.cache.hashing import PromptHashes
from dynamo.frontend.router.kv import KvRouter
from dynamo.frontend.router.loads.table import LoadTable
from dynamo.frontend.router.select import make_router
from dynamo.planner.pools import Engine, Goals
from dynamo.planner.whatif.engine import Generation, WhatIfEngine

_MODEL = "what-if"
_REPORT_EVERY_S = 0.05
_LESSONS = ((1, 0, 0), (1, 1024, 0), (1, 0, 8), (2, 512, 4), (4, 4096, 32), (1, 64, 16))
"""Steps, prompt tokens and sequences of load reports that teach the router how long steps take before the first request."""


class WhatIfRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One arrival."""

    at: float
    prompt_tokens: int
    output_tokens: int
    """What it generates; the router does not know."""
    max_output: int = 0
    """The limit that the router knows; 0: none."""
    priority: int = 0
    tokens_per_hash: int = 0
    hashes: Sequence[int] = ()
    is_prefilled: bool = False
    """Another instance has computed its prompt."""


class Tried(msgspec.Struct, frozen=True):
    """How many of the requests that count reached both goals."""

    requests: int
    good: int

    @property
    def share(self) -> float:
        return self.good / self.requests if self.requests else 1.0


class _Live(msgspec.Struct):
    number: int
    request: WhatIfRequest


class WhatIfFleet:
    """Tries one number of instances, with empty caches."""

    def __init__(self, instances: int, engine: Engine, options: RouterOptions, seed: int = 0) -> None:
        self._now = 0.0
        self._engine = engine
        self._engines: dict[InstanceId, WhatIfEngine] = {}
        self._states: dict[InstanceId, KvState] = {}
        self._report_due_at: dict[InstanceId, float] = {}
        self._loads = LoadTable("what-if")
        self._router = make_router(options, self._loads, lambda: self._now, rng=random.Random(seed))
        self._instances: tuple[Instance, ...] = ()
        self._block_size = 0
        """Tokens between two hashes, which is what a block is for the router here."""
        for number in range(instances):
            self._add(InstanceId(number + 1))
        self._phases: list[tuple[float, int, InstanceId]] = []
        self._phase_count = 0
        self._current: dict[InstanceId, int] = {}
        """The number of the phase that goes on; others were interrupted."""
        self._live: dict[Generation, _Live] = {}

    def run(self, arrivals: Sequence[WhatIfRequest], goals: Goals, count_from: float, play_from: float = 0.0) -> Tried:
        """Return how the requests fared that arrive at `count_from` or later. All have as many tokens per hash, or no hashes.

        Those before `play_from` fill the caches: they are placed, as they would be under load, and not played.
        """
        self._block_size = max((each.tokens_per_hash for each in arrivals), default=0)
        self._set_cards()
        self._teach()
        counted = sum(each.at >= count_from for each in arrivals)
        good = 0
        position = self._fill_caches(arrivals, play_from)
        while position < len(arrivals) or self._phases:
            if position < len(arrivals) and (not self._phases or arrivals[position].at <= self._phases[0][0]):
                self._now = arrivals[position].at
                self._arrive(position, arrivals[position])
                position += 1
                continue
            self._now, number, instance = heapq.heappop(self._phases)
            if self._current.get(instance) == number:
                good += self._end_phase(instance, goals, count_from)
        return Tried(counted, good)

    def _add(self, instance: InstanceId) -> None:
        self._engines[instance] = WhatIfEngine(self._engine)
        self._states[instance] = KvState()
        self._report_due_at[instance] = 0.0

    def _set_cards(self) -> None:
        llm = LlmInfo(
            context_length=1 << 30, tokenizer="", block_size=self._block_size, total_blocks=self._engine.total_blocks or 1 << 20
        )
        card = ModelCard(name=_MODEL, kind=ModelKind.LLM, llm=llm)
        self._instances = tuple(
            Instance(id=instance, endpoint=Endpoint(), subject="", card=card, started_at=0.0) for instance in self._engines
        )

    def _teach(self) -> None:
        """Let the router learn the time of steps, as if the fleet had run for a while."""
        first, times = self._instances[0].id, self._engine.times
        self._loads.rows(self._instances)
        totals = self._engines[first].totals
        for steps, prefill, sequences in _LESSONS * 4:
            seconds = times.window_s(steps, prefill, sequences, 0)
            totals += StepTotals(steps=steps, seconds=seconds, prefill_tokens=prefill, sequences=sequences)
            self._engines[first].totals = totals
            self._loads.report(first, self._engines[first].report(), self._now, _MODEL)

    def _fill_caches(self, arrivals: Sequence[WhatIfRequest], until: float) -> int:
        """Place the requests that arrive before `until`. Return how many these are.

        Each instance computes one prompt after the other and generates all outputs beside each other. Without that load, all
        prompts with something in common would go to one instance, whose cache does not hold them.
        """
        times, free_at = self._engine.times, dict.fromkeys(self._engines, 0.0)
        ends: list[tuple[float, bool, str]] = []
        """When a booked request gets its first token, or has ended."""
        number = 0
        while number < len(arrivals) and arrivals[number].at < until:
            request, booking_id = arrivals[number], f"before {number}"
            while ends and ends[0][0] <= request.at:
                self._now, has_ended, booked = heapq.heappop(ends)
                (self._router.finished if has_ended else self._router.first_token)(booked)
            self._now = request.at
            number += 1
            try:
                choice = self._router.pick(self._route(booking_id, request), self._instances)
            except Overloaded:
                continue
            instance = choice.instance.id
            missing = request.prompt_tokens - choice.overlap_blocks * self._block_size
            free_at[instance] = first_at = max(free_at[instance], self._now) + times.base + times.token * missing
            step_s = times.step_s(len(ends) / len(free_at), 0.0)
            heapq.heappush(ends, (first_at, False, booking_id))
            heapq.heappush(ends, (first_at + step_s * request.output_tokens, True, booking_id))
            self._engines[instance].remember(request.hashes, request.tokens_per_hash)
            self._publish_blocks(instance, self._engines[instance])
        for _, has_ended, booked in ends:
            if has_ended:
                self._router.finished(booked)
        return number

    def _route(self, booking_id: str, request: WhatIfRequest) -> RouteRequest:
        return RouteRequest(
            model=_MODEL,
            booking_id=booking_id,
            prompt=bytes(request.prompt_tokens * TOKEN_BYTES),
            expected_output_tokens=request.max_output,
            priority=request.priority,
            is_prefilled=request.is_prefilled,
            hashes=PromptHashes.from_values(list(request.hashes), self._block_size),
        )

    def _arrive(self, number: int, request: WhatIfRequest) -> None:
        try:
            choice = self._router.pick(self._route(str(number), request), self._instances)
        except Overloaded:
            return
        instance = choice.instance.id
        engine = self._engines[instance]
        generation = Generation(request.prompt_tokens, max(1, request.output_tokens), request.hashes, request.tokens_per_hash)
        if request.is_prefilled:
            generation.received = request.prompt_tokens - 1
        self._live[generation] = _Live(number, request)
        engine.add(generation)
        if engine.phase is None:
            self._begin(instance)
        elif not engine.phase.prompts:
            ends_at = engine.phase.ends_at
            phase = engine.interrupt(self._now)
            if phase is not None and phase.ends_at < ends_at:
                self._schedule(instance, phase.ends_at)

    def _begin(self, instance: InstanceId) -> None:
        phase = self._engines[instance].begin(self._now)
        if phase is None:
            self._current.pop(instance, None)
        else:
            self._schedule(instance, phase.ends_at)

    def _schedule(self, instance: InstanceId, at: float) -> None:
        self._phase_count += 1
        self._current[instance] = self._phase_count
        heapq.heappush(self._phases, (at, self._phase_count, instance))

    def _end_phase(self, instance: InstanceId, goals: Goals, count_from: float) -> int:
        """End the phase of an instance, and begin its next one. Return how many requests were completed within the goals."""
        engine, good = self._engines[instance], 0
        first, done = engine.finish()
        for generation in first:
            self._router.first_token(str(self._live[generation].number))
        for generation in done:
            live = self._live.pop(generation)
            self._router.finished(str(live.number))
            good += live.request.at >= count_from and self._is_good(generation, live.request, goals)
        self._publish(instance, engine)
        self._begin(instance)
        return good

    def _is_good(self, generation: Generation, request: WhatIfRequest, goals: Goals) -> bool:
        if goals.ttft_s is not None and generation.first_at - request.at > goals.ttft_s:
            return False
        itl_s = (self._now - generation.first_at) / max(1, generation.output_tokens - 1)
        return goals.itl_s is None or itl_s <= goals.itl_s

    def _publish(self, instance: InstanceId, engine: WhatIfEngine) -> None:
        self._publish_blocks(instance, engine)
        if self._now >= self._report_due_at[instance] or not engine.is_busy:
            self._report_due_at[instance] = self._now + _REPORT_EVERY_S
            self._loads.report(instance, engine.report(), self._now, _MODEL)

    def _publish_blocks(self, instance: InstanceId, engine: WhatIfEngine) -> None:
        state, router = self._states[instance], self._router
        if isinstance(router, KvRouter) and (engine.stored or engine.removed):
            state.remove(engine.removed)
            state.store(engine.stored)
            update = state.take_update()
            if update is not None:
                router.apply(_MODEL, instance, update)
        engine.stored, engine.removed = [], []


def without_goals(options: RouterOptions) -> RouterOptions:
    """Return options with which the router refuses no request."""
    return replace(options, kv=replace(options.kv, ttft_goal_s=None, itl_goal_s=None))
