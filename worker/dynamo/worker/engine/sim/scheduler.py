"""What one simulated engine rank does in each step: a continuous batch over paged blocks, as vLLM schedules it.

Each step has a budget of tokens. In this order it goes to

    1. running sequences, oldest first: one token each that decodes, a chunk of prompt each that prefills
    2. waiting sequences, most important first, while the batch, the blocks and the budget have room for them

A sequence that needs a block when there is none preempts the least important running one, which gives all its blocks back and
starts over with what it has generated as part of its prompt. `Scheduler.step` is plain computation in the caller's time: a replay
runs it in virtual time, `SimEngine` in real time.
"""

from __future__ import annotations

import heapq
import math
from array import array
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import numpy as np

from dynamo.common.errors import InvalidRequest
from dynamo.common.generation import FinishReason, pack_tokens
from dynamo.common.kv.hashes import TOKEN_BYTES, sequence_hashes
from dynamo.worker.engine.sim.blocks import BlockManager
from dynamo.worker.engine.sim.timing import TimingModel
from dynamo.worker.engine.sim.tokens import START, advance, advance_all, next_token


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
    eos_token: int | None = None
    """A token that ends a generation, unless the request ignores it."""
    mean_output_tokens: int = 0
    """On average after so many tokens `eos_token` comes; 0: never."""
    kv_transfer_tokens_per_s: float = 0.0
    """How fast a decode instance fetches a prompt's KV blocks; 0: at once."""
    timing: TimingModel = field(default_factory=TimingModel)

    def __post_init__(self) -> None:
        for name in ("block_size", "total_blocks", "max_num_seqs", "max_batched_tokens", "vocabulary"):
            if getattr(self, name) < 1:
                raise InvalidRequest(f"{name} of the simulated engine must be at least 1")


class Sequence:
    """One choice of one request, on its way through the scheduler. Made by `Scheduler.add`."""

    __slots__ = (
        "_block_size", "_eos_every", "arrived_at", "cached_tokens", "computed", "done", "eos", "fetched", "finish_reason",
        "first_token_at", "generated", "hashes", "held", "length", "limit", "min_tokens", "order", "pending", "preempted", "priority",
        "private", "prompt_tokens", "queued_s", "ready_at", "seed", "space", "state", "stop_token", "stop_tokens",
    )  # fmt: skip

    def __init__(
        self,
        prompt: bytes,
        hashes: Items[int],
        config: SchedulerConfig,
        *,
        space: int | None = None,
        limit: int,
        seed: int = 0,
        min_tokens: int = 0,
        stop_tokens: frozenset[int] = frozenset(),
        ignore_eos: bool = False,
        priority: int = 0,
        fetched: bool = False,
    ) -> None:
        """`prompt`: token ids as little-endian u32. `hashes`: its sequence hashes. `limit`: how many tokens to generate at most.

        `space`: what first blocks are chained to (`space_hash`). `fetched`: the KV of the prompt comes from another instance.
        """
        tokens = np.frombuffer(prompt, dtype="<u4")
        self._block_size = config.block_size
        self._eos_every = 0 if ignore_eos or config.eos_token is None else config.mean_output_tokens
        self.eos = config.eos_token or 0
        self.prompt_tokens = len(tokens)
        self.length = len(tokens)
        """Tokens of prompt and output."""
        self.state = advance_all(START, tokens)
        self.hashes = list(hashes)
        """Of the full blocks of prompt and output."""
        self.pending: array[int] = array("I", prompt[len(self.hashes) * config.block_size * TOKEN_BYTES :])
        """Tokens after the last full block."""
        self.space = space
        self.limit = limit
        self.seed = seed
        self.min_tokens = min_tokens
        self.stop_tokens = stop_tokens
        self.priority = priority
        self.fetched = fetched
        self.order = 0
        self.computed = 0
        """Leading tokens whose KV is there."""
        self.held: list[int] = []
        """Sequence hashes of the blocks referenced in the cache."""
        self.private = 0
        self.generated = 0
        self.cached_tokens = 0
        """Prompt tokens found in the cache when first scheduled."""
        self.ready_at = 0.0
        """When its KV blocks will have been fetched."""
        self.arrived_at = 0.0
        self.queued_s: float | None = None
        """How long it waited before it was first scheduled."""
        self.first_token_at: float | None = None
        self.preempted = 0
        self.finish_reason: FinishReason | None = None
        self.stop_token: int | None = None
        self.done = False
        """Finished, or aborted."""

    def generate(self) -> int | None:
        """The next token; None if a stop token came instead. Sets `finish_reason` at the end."""
        if self._eos_every and next_token(self.state, ~self.seed & 0xFFFFFFFF, self._eos_every) == 0:
            token = self.eos
            stops = self.generated >= self.min_tokens
        else:
            raise NotImplementedError
        return token if not stops else None


@dataclass(slots=True)
class StepResult:
    """What one step did. It takes effect for others `duration_s` after the step began."""

    duration_s: float = 0.0
    prefill_tokens: int = 0
    decoding: int = 0
    emitted: list[tuple[Sequence, int]] = field(default_factory=list)
    """Each sequence that has a new token, with the token. Not those that ended by a stop token."""
    finished: list[Sequence] = field(default_factory=list)
    preempted: int = 0
    stored: Items[int] = ()
    """Sequence hashes of blocks that are cached from now on."""
    removed: Items[int] = ()
    """Sequence hashes of blocks that are not any more. Never one of `stored`… unless it came and went within the step."""
