"""An engine as far as latencies depend on it: a batch that computes prompts in chunks and decodes, and a cache of prefixes.

Its steps take what the engine's load reports have taught. Steps that compute prompts are played one by one, and those between
them, in which the batch only decodes, all at once: a request takes few events, however long its output is.

`worker.engine.sim.scheduler` plays every step and every block; tests compare both.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict, deque
from collections.abc import Sequence

import msgspec

from dynamo.common.kv.events import NO_STEPS, LoadReport, StepTotals
from dynamo.planner.pools import Engine

_MANY = 1 << 30


class Generation(msgspec.Struct, eq=False):
    """One request on its way through an engine."""

    prompt_tokens: int
    output_tokens: int
    hashes: Sequence[int] = ()
    tokens_per_hash: int = 0
    received: int = 0
    """Prompt tokens whose KV another instance has computed."""
    computed: int = 0
    """Prompt tokens whose KV is there."""
    first_at: float = math.inf
    """When its first token was there."""
    ends_at_count: int = 0
    """The batch's count of tokens at which it has all of its own."""


class Phase(msgspec.Struct, frozen=True):
    """One step with prompts in it, or several steps that only decode."""

    begun_at: float
    steps: int
    step_s: float
    prompts: Sequence[tuple[Generation, int]] = ()
    """Which prompts are computed, and how many tokens of each."""

    @property
    def ends_at(self) -> float:
        return self.begun_at + self.steps * self.step_s


class WhatIfEngine:
    """One instance. Its owner calls `finish` when a phase ends, and then `begin`."""

    def __init__(self, engine: Engine) -> None:
        self._times = engine.times
        self._block_size = engine.block_size or 16
        self._total_blocks = engine.total_blocks or _MANY
        self._most_running = engine.max_num_seqs or _MANY
        self._budget = engine.max_batched_tokens or _MANY
        self._waiting: deque[Generation] = deque()
        self._prefilling: deque[Generation] = deque()
        self._decoding: list[tuple[int, int, Generation]] = []
        """A heap by the count of tokens at which each ends."""
        self._count = 0
        """Tokens that each sequence of the batch has got so far, had it been there from the beginning."""
        self._order = 0
        self._blocks = 0
        """Blocks that running requests hold."""
        self._cache: OrderedDict[int, int] = OrderedDict()
        """Hash → its blocks, least recently used first."""
        self._cached_blocks = 0
        self.phase: Phase | None = None
        self.totals = NO_STEPS
        self.stored: list[int] = []
        """Hashes that were added since the owner took them."""
        self.removed: list[int] = []

    def __repr__(self) -> str:
        return f"<WhatIfEngine, {len(self._waiting)} wait, {len(self._prefilling)} prefill, {len(self._decoding)} decode>"

    @property
    def is_busy(self) -> bool:
        return bool(self._waiting or self._prefilling or self._decoding)

    def report(self) -> LoadReport:
        queued = sum(each.prompt_tokens - each.computed for each in self._prefilling)
        return LoadReport(
            waiting=len(self._waiting),
            running=len(self._prefilling) + len(self._decoding),
            active_blocks=self._blocks,
            total_blocks=0 if self._total_blocks == _MANY else self._total_blocks,
            queued_prefill_tokens=queued + sum(each.prompt_tokens - each.received for each in self._waiting),
            totals=self.totals,
        )

    def add(self, generation: Generation) -> None:
        self._waiting.append(generation)

    def remember(self, hashes: Sequence[int], tokens_per_hash: int) -> None:
        """Put a prompt into the cache, as if it had been computed before."""
        self._put(hashes, tokens_per_hash)
        self._trim()

    def begin(self, now: float) -> Phase | None:
        """Begin the next phase and return it; None if there is nothing to do. None may be going on."""
        decoding = len(self._decoding)
        budget = self._budget - decoding
        prompts: list[tuple[Generation, int]] = []
        position = 0
        while budget > 0 and (position < len(self._prefilling) or self._admit()):
            generation = self._prefilling[position]
            position += 1
            tokens = min(budget, generation.prompt_tokens - generation.computed)
            prompts.append((generation, tokens))
            budget -= tokens
        times = self._times
        step_s = times.step_s(decoding, self._blocks) + times.token * sum(tokens for _, tokens in prompts)
        if prompts:
            self.phase = Phase(now, 1, step_s, prompts)
        elif decoding:
            self.phase = Phase(now, self._decoding[0][0] - self._count, step_s)
        else:
            self.phase = None
        return self.phase

    def interrupt(self, now: float) -> Phase | None:
        """End the phase with the step that goes on, so that a new request can join. Return it; None if there is none."""
        phase = self.phase
        if phase is None or phase.prompts:
            return phase
        steps = min(phase.steps, max(1, math.ceil((now - phase.begun_at) / phase.step_s))) if phase.step_s else 1
        self.phase = Phase(phase.begun_at, steps, phase.step_s)
        return self.phase

    def finish(self) -> tuple[list[Generation], list[Generation]]:
        """End the phase. Return the requests that got their first token, and those that are complete."""
        phase, self.phase = self.phase, None
        assert phase is not None
        now = phase.ends_at
        decoding, blocks = len(self._decoding), self._blocks
        self._count += phase.steps
        done: list[Generation] = []
        while self._decoding and self._decoding[0][0] <= self._count:
            done.append(heapq.heappop(self._decoding)[2])
        first: list[Generation] = []
        for generation, tokens in phase.prompts:
            generation.computed += tokens
            self._store(generation)
            if generation.computed < generation.prompt_tokens:
                continue
            self._prefilling.remove(generation)
            generation.first_at = now
            first.append(generation)
            if generation.output_tokens <= 1:
                done.append(generation)
            else:
                generation.ends_at_count = self._count + generation.output_tokens - 1
                self._order += 1
                heapq.heappush(self._decoding, (generation.ends_at_count, self._order, generation))
        for generation in done:
            self._blocks -= self._blocks_of(generation)
        self._trim()
        self.totals += StepTotals(
            steps=phase.steps,
            seconds=phase.steps * phase.step_s,
            prefill_tokens=sum(tokens for _, tokens in phase.prompts),
            sequences=phase.steps * decoding,
            blocks=phase.steps * blocks,
            finished=len(done),
            generated=sum(generation.output_tokens for generation in done),
        )
        return first, done

    def _admit(self) -> bool:
        """Admit the next request if the batch and the blocks have room for it; return whether it was. One alone always has."""
        if not self._waiting:
            return False
        generation = self._waiting[0]
        running = len(self._prefilling) + len(self._decoding)
        blocks = self._blocks_of(generation)
        if running and (running >= self._most_running or self._blocks + blocks > self._total_blocks):
            return False
        self._waiting.popleft()
        self._blocks += blocks
        self._prefilling.append(generation)
        hits = 0
        for each in generation.hashes:
            if each not in self._cache:
                break
            self._cache.move_to_end(each)
            hits += 1
        # The last token is always computed, or there would be no next one.
        generation.computed = min(max(hits * generation.tokens_per_hash, generation.received), generation.prompt_tokens - 1)
        return True

    def _blocks_of(self, generation: Generation) -> int:
        return -(-(generation.prompt_tokens + generation.output_tokens) // self._block_size)

    def _store(self, generation: Generation) -> None:
        """Put the hashes of what is computed of a prompt into the cache."""
        if generation.hashes:
            self._put(generation.hashes[: generation.computed // generation.tokens_per_hash], generation.tokens_per_hash)

    def _put(self, hashes: Sequence[int], tokens_per_hash: int) -> None:
        each_blocks = max(1, tokens_per_hash // self._block_size)
        for each in hashes:
            if each in self._cache:
                self._cache.move_to_end(each)
            else:
                self._cache[each] = each_blocks
                self._cached_blocks += each_blocks
                self.stored.append(each)

    def _trim(self) -> None:
        """Evict what was used longest ago until the rest fits; what running requests hold counts once, in the cache."""
        while self._cached_blocks > self._total_blocks and self._cache:
            each, blocks = self._cache.popitem(last=False)
            self._cached_blocks -= blocks
            self.removed.append(each)
