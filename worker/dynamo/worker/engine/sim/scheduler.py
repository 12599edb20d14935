"""What one simulated engine rank does in each step: a continuous batch over paged blocks, as vLLM schedules it.

Each step has a budget of tokens. In this order it goes to

    1. running sequences, most important and oldest first: one token for each that decodes, a chunk of prompt for each that
       prefills
    2. waiting sequences, likewise, while the batch, the blocks and the budget have room for them

A sequence that needs a block when there is none preempts the last running one, which gives its blocks back and starts over, with
what it has generated as part of its prompt. `Scheduler.step` is plain computation in the caller's time: a replay runs it in
virtual time, `SimEngine` in real time.
"""

from __future__ import annotations

import heapq
from array import array
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter

import msgspec
import numpy as np

from dynamo.common.errors import InvalidRequest
from dynamo.common.generation import FinishReason
from dynamo.common.kv.events import NO_STEPS, StepTotals
from dynamo.common.kv.hashes import TOKEN_BYTES, sequence_hashes
from dynamo.common.kv.tiers import Tier
from dynamo.worker.engine.base import TierTotals
from dynamo.worker.engine.sim.blocks import BlockManager
from dynamo.worker.engine.sim.tiers import BlockCache, ChangedTier, TierConfig, Tiers
from dynamo.worker.engine.sim.timing import TimingModel
from dynamo.worker.engine.sim.tokens import START, advance, advance_all, next_token, next_token_and_state

_turn = attrgetter("turn")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    block_size: int = 16
    total_blocks: int = 16_384
    max_num_seqs: int = 256
    max_batched_tokens: int = 8_192
    watermark: float = 0.01
    """Share of the blocks that admitting a sequence must leave free, so that running ones can grow."""
    prefix_caching: bool = True
    vocabulary: int = 32_000
    """Tokens below this are generated."""
    eos_token: int | None = None
    mean_output_tokens: int = 0
    """After so many tokens on average `eos_token` ends a generation; 0: never."""
    kv_transfer_tokens_per_s: float = 0.0
    """How fast KV blocks of a prompt are fetched from another instance; 0: at once."""
    timing: TimingModel = field(default_factory=TimingModel)
    tiers: TierConfig = field(default_factory=TierConfig)

    def __post_init__(self) -> None:
        for name in ("block_size", "total_blocks", "max_num_seqs", "max_batched_tokens", "vocabulary"):
            if getattr(self, name) < 1:
                raise InvalidRequest(f"{name} of the simulated engine must be at least 1")


_NO_TOKENS = array("I")
_POLL_S = 0.005
"""While sequences only wait for blocks that are being fetched, new ones are looked for so often."""


class SimSequence(msgspec.Struct, eq=False, kw_only=True):
    """One choice of one request, on its way through the scheduler."""

    prompt: bytes
    """Token ids as little-endian u32."""
    hashes: list[int]
    """Sequence hashes of the full blocks of prompt and, growing, output. Empty without prefix caching."""
    limit: int
    """Tokens to generate at most."""
    space: int | None = None
    """What first blocks are chained to, see `space_hash`."""
    seed: int = 0
    min_tokens: int = 0
    stop_tokens: frozenset[int] = frozenset()
    ignore_eos: bool = False
    priority: int = 0
    """Higher is more important."""
    fetched: bool = False
    """The KV of the prompt comes from another instance."""
    script: Sequence[int] = ()
    """The tokens to generate; empty: they are invented."""

    # From here on, the scheduler's.
    length: int = 0
    """Tokens of prompt and output."""
    generated: int = 0
    computed: int = 0
    """Leading tokens whose KV is there, or being fetched."""
    cached_tokens: int = 0
    """Prompt tokens found in the cache when it was first scheduled."""
    turn: tuple[int, int] = (0, 0)
    """Sequences with lower ones run first: the most important sequences, then the oldest."""
    arrived_at: float = 0.0
    scheduled_at: float | None = None
    """When it was first scheduled."""
    prefilled_at: float | None = None
    """When its first token was there."""
    ready_at: float = 0.0
    """When its KV will have been fetched."""
    preempted: int = 0
    finish_reason: FinishReason | None = None
    stop_token: int | None = None
    done: bool = False
    """Finished, or aborted."""
    committed: int = 0
    """Leading blocks that are referenced in the cache."""
    private: int = 0
    """Its other blocks, which are not in the cache."""
    state: int = START
    pending: array[int] = _NO_TOKENS
    """Tokens after the last full block."""


class StepResult(msgspec.Struct, eq=False):
    """What one step did. It takes effect for others `duration_s` after the step began."""

    duration_s: float = 0.0
    prefill_tokens: int = 0
    decoding: int = 0
    emitted: list[tuple[SimSequence, int]] = []
    """Each sequence that has a new token, with the token. A stop token is none."""
    finished: list[SimSequence] = []
    preempted: int = 0
    removed: Sequence[int] = ()
    """Sequence hashes of blocks that were evicted."""
    stored: Sequence[int] = ()
    """Sequence hashes of blocks that were computed or fetched, after the evictions."""
    tiers: Sequence[ChangedTier] = ()
    """What changed in tiers beside the GPU."""


class Scheduler:
    """One rank of a simulated engine. Not for several threads."""

    def __init__(self, config: SchedulerConfig, store: BlockCache | None = None) -> None:
        """`store`: the one that all instances share, if there is one; otherwise it has one of its own."""
        self.config = config
        self.tiers = Tiers(config.tiers, config.block_size, config.timing.speedup, store) if config.tiers else None
        """The caches beside the GPU."""
        self.blocks = BlockManager(config.total_blocks, None if self.tiers is None else self.tiers.evicted)
        self._gpu_totals = TierTotals()
        self.running: list[SimSequence] = []
        """Most important first, then oldest first."""
        self._waiting: list[tuple[tuple[int, int], SimSequence]] = []
        """A heap of (turn, sequence)."""
        self.totals = NO_STEPS
        """The steps that took time."""
        self._order = 0
        self._keep_free = int(config.watermark * config.total_blocks)

    def __repr__(self) -> str:
        return f"<Scheduler, waiting={self.waiting}, running={len(self.running)}, {self.blocks}>"

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def busy(self) -> bool:
        """There is something to do in a step."""
        return bool(self.running or self._waiting)

    @property
    def queued_prefill_tokens(self) -> int:
        """Prompt tokens of accepted sequences that are still to be computed."""
        queued = sum(sequence.length for _, sequence in self._waiting)
        return queued + sum(sequence.length - sequence.computed for sequence in self.running if not sequence.generated)

    @property
    def tier_totals(self) -> dict[Tier, TierTotals]:
        """What each tier did, the GPU's cache first."""
        return {Tier.GPU: self._gpu_totals, **({} if self.tiers is None else self.tiers.totals)}

    def clear(self) -> None:
        """Drop what is cached in GPU and host memory and not used by a sequence. No step reports that."""
        self.blocks.clear()
        self.blocks.removed.clear()
        if self.tiers is not None:
            self.tiers.clear()
            self.tiers.take_changes()

    def add(self, sequence: SimSequence, now: float) -> None:
        """Queue a sequence. Raises InvalidRequest if it can never run."""
        config = self.config
        tokens = np.frombuffer(sequence.prompt, dtype="<u4")
        count = len(tokens)
        capacity = config.total_blocks * config.block_size
        if not count:
            raise InvalidRequest("the prompt is empty")
        if count >= capacity:
            raise InvalidRequest(f"the prompt of {count} tokens does not fit into the KV cache of {capacity} tokens")
        sequence.limit = min(sequence.limit, capacity - count)
        sequence.length = count
        sequence.state = advance_all(START, tokens)
        sequence.pending = array("I", sequence.prompt[len(sequence.hashes) * config.block_size * TOKEN_BYTES :])
        sequence.arrived_at = now
        sequence.turn = (-sequence.priority, self._order)
        self._order += 1
        heapq.heappush(self._waiting, (sequence.turn, sequence))

    def abort(self, sequence: SimSequence) -> None:
        """Remove a sequence, waiting or running. Does nothing if it is done."""
        if sequence.done:
            return
        sequence.done = True
        if sequence in self.running:
            self.running.remove(sequence)
            self._release(sequence)
        else:
            self._waiting.remove((sequence.turn, sequence))
            heapq.heapify(self._waiting)

    def step(self, now: float) -> StepResult:
        """Schedule and compute one batch."""
        result = StepResult()
        batch: list[tuple[SimSequence, int]] = []
        budget = self._schedule_running(now, result, batch)
        if not result.preempted:
            self._admit(now, budget, batch)
        for sequence, tokens in batch:
            if tokens == 1 and sequence.generated:
                result.decoding += 1
            else:
                result.prefill_tokens += tokens
        if batch:
            result.duration_s = self.config.timing.step_s(result.prefill_tokens, result.decoding)
        elif self.running:
            result.duration_s = max(0.0, min(_POLL_S, min(sequence.ready_at for sequence in self.running) - now))
        blocks = self.blocks
        active_blocks = blocks.active
        self._compute(batch, now + result.duration_s, result)
        if batch and result.duration_s:
            self._count(result, active_blocks)
        if blocks.removed:
            result.removed, blocks.removed = blocks.removed, []
        if blocks.stored:
            result.stored, blocks.stored = blocks.stored, []
        if self.tiers is not None:
            self.tiers.computed(result.stored)
            result.tiers = self.tiers.take_changes()
        return result

    def _count(self, result: StepResult, blocks: int) -> None:
        self.totals += StepTotals(
            steps=1,
            seconds=result.duration_s,
            prefill_tokens=result.prefill_tokens,
            sequences=result.decoding,
            blocks=blocks,
            finished=len(result.finished),
            generated=sum(sequence.generated for sequence in result.finished),
        )

    def _schedule_running(self, now: float, result: StepResult, batch: list[tuple[SimSequence, int]]) -> int:
        """Schedule the running sequences. Return the rest of the token budget."""
        block_size, running = self.config.block_size, self.running
        budget = self.config.max_batched_tokens
        position = 0
        while position < len(running) and budget:
            sequence = running[position]
            position += 1
            if sequence.ready_at > now:
                continue
            tokens = sequence.length - sequence.computed
            if tokens > budget:
                tokens = budget
            missing = sequence.computed + tokens - (sequence.committed + sequence.private) * block_size
            if missing > 0 and not self._grow(sequence, -(-missing // block_size), result):
                break
            budget -= tokens
            batch.append((sequence, tokens))
        return budget

    def _grow(self, sequence: SimSequence, blocks: int, result: StepResult) -> bool:
        """Give a running sequence more blocks, preempting from the end. Return False if it was preempted itself."""
        while not self.blocks.grow(blocks):
            last = self.running.pop()
            self._release(last)
            last.preempted += 1
            result.preempted += 1
            heapq.heappush(self._waiting, (last.turn, last))
            if last is sequence:
                return False
        sequence.private += blocks
        return True

    def _admit(self, now: float, budget: int, batch: list[tuple[SimSequence, int]]) -> None:
        config, waiting, tiers = self.config, self._waiting, self.tiers
        while waiting and budget and len(self.running) < config.max_num_seqs:
            sequence = waiting[0][1]
            # The last token is always computed, or there would be no next one.
            wanted = sequence.hashes[: (sequence.length - 1) // config.block_size]
            hit = self.blocks.cached_prefix(wanted)
            more = -(-sequence.length // config.block_size) - hit
            found = () if tiers is None or sequence.fetched else tiers.find(wanted[hit:])
            if not self.blocks.take(sequence.hashes[:hit], more, keep_free=self._keep_free if self.running else 0):
                return
            heapq.heappop(waiting)
            sequence.committed, sequence.private = hit, more
            sequence.computed = hit * config.block_size
            self._gpu_totals.hits += hit
            self._gpu_totals.misses += len(wanted) - hit
            if tiers is not None and found:
                fetched, read_at = tiers.read(found, len(wanted) - hit, now)
                sequence.computed += fetched * config.block_size
                sequence.ready_at = max(tiers.ready_at(wanted[:hit], now), read_at)
                self._commit(sequence)
            if sequence.scheduled_at is None:
                sequence.scheduled_at = now
                sequence.cached_tokens = sequence.computed
            insort(self.running, sequence, key=_turn)
            if sequence.fetched and not sequence.preempted:
                if config.kv_transfer_tokens_per_s:
                    sequence.ready_at = now + (sequence.length - sequence.computed) / config.kv_transfer_tokens_per_s
                sequence.computed = sequence.length - 1
                self._commit(sequence)
            if sequence.ready_at > now:
                continue
            tokens = min(sequence.length - sequence.computed, budget)
            budget -= tokens
            batch.append((sequence, tokens))

    def _compute(self, batch: list[tuple[SimSequence, int]], done_at: float, result: StepResult) -> None:
        block_size, vocabulary = self.config.block_size, self.config.vocabulary
        may_end = self.config.mean_output_tokens > 0
        emitted = result.emitted
        for sequence, tokens in batch:
            before = sequence.computed
            sequence.computed = computed = before + tokens
            if computed // block_size != before // block_size:
                self._commit(sequence)
            if computed < sequence.length:
                continue
            if sequence.prefilled_at is None:
                sequence.prefilled_at = done_at
            if sequence.script or may_end:
                token = self._next_token(sequence)
                state = advance(sequence.state, token)
            else:
                token, state = next_token_and_state(sequence.state, sequence.seed, vocabulary)
            if token in sequence.stop_tokens and sequence.generated >= sequence.min_tokens:
                sequence.stop_token = token
                sequence.finish_reason = FinishReason.STOP
            else:
                sequence.state = state
                sequence.generated += 1
                sequence.length += 1
                pending = sequence.pending
                pending.append(token)
                if len(pending) == block_size:
                    self._hash_pending(sequence)
                emitted.append((sequence, token))
                if sequence.generated == len(sequence.script):
                    sequence.finish_reason = FinishReason.STOP
                elif sequence.generated < sequence.limit:
                    continue
                else:
                    sequence.finish_reason = FinishReason.LENGTH
            sequence.done = True
            self._release(sequence)
            result.finished.append(sequence)
        if result.finished:
            self.running = [sequence for sequence in self.running if not sequence.done]

    def _next_token(self, sequence: SimSequence) -> int:
        if sequence.script:
            return sequence.script[sequence.generated]
        config = self.config
        eos, mean = config.eos_token, config.mean_output_tokens
        may_end = mean and not sequence.ignore_eos and sequence.generated >= sequence.min_tokens
        # Drawn by the sequence so far, like any token: it ends at the same place wherever it goes on.
        if eos is not None and may_end and next_token(sequence.state, ~sequence.seed, mean) == 0:
            return eos
        return next_token(sequence.state, sequence.seed, config.vocabulary)

    def _hash_pending(self, sequence: SimSequence) -> None:
        """Hash the tokens after the last full block, which have become a full one."""
        if self.config.prefix_caching:
            parent = sequence.hashes[-1] if sequence.hashes else sequence.space
            sequence.hashes += sequence_hashes(memoryview(sequence.pending).cast("B"), self.config.block_size, parent)
        sequence.pending = array("I")

    def _commit(self, sequence: SimSequence) -> None:
        """Put the blocks that became full into the cache."""
        if not self.config.prefix_caching:
            return
        full = sequence.hashes[sequence.committed : sequence.computed // self.config.block_size]
        self.blocks.commit(full)
        sequence.committed += len(full)
        sequence.private -= len(full)

    def _release(self, sequence: SimSequence) -> None:
        self.blocks.give_back(sequence.hashes[: sequence.committed], sequence.private)
        sequence.committed = sequence.private = sequence.computed = 0
