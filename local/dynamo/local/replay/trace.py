"""Traces in Mooncake's format: one JSON object per line.

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48, …]}

`timestamp` is in milliseconds. Each of `hash_ids` stands for 512 tokens; an equal id is an equal block after an equal prefix.
The texts of the prompts are unknown: `expand` makes each id the same 512 token ids wherever it occurs, so that
real hashing can run on them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
from numpy.typing import NDArray

from dynamo.common.errors import InvalidRequest

BLOCK_TOKENS = 512
VOCABULARY = 32_000


class Row(msgspec.Struct, frozen=True):
    """One request. Its prompt is whole blocks: `input_length`, which may end inside the last one, is not looked at."""

    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    output_length: Annotated[int, msgspec.Meta(ge=0)]
    hash_ids: Annotated[list[Annotated[int, msgspec.Meta(ge=0, le=2**62)]], msgspec.Meta(min_length=1)]
    priority: int = 0
    """Higher is more important. Mooncake's traces have none."""


def read_trace(path: Path, limit: int = 0) -> list[Row]:
    """By time; with a limit, only the first so many. Raises InvalidRequest naming what is wrong with the file."""
    decoder = msgspec.json.Decoder(Row)
    rows: list[Row] = []
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    rows.append(decoder.decode(line))
                except msgspec.MsgspecError as error:
                    raise InvalidRequest(f"trace {path}, line {number}: {error}") from error
    except OSError as error:
        raise InvalidRequest(f"trace {path} cannot be read: {error.strerror}") from error
    if not rows:
        raise InvalidRequest(f"trace {path} has no requests")
    return sorted(rows, key=lambda row: row.timestamp)[: limit or None]


def synthesise(requests: int, seed: int) -> list[Row]:
    """Conversations of some turns over one common first block; each turn repeats the last one and adds to it."""
    rng = random.Random(seed)
    rows: list[Row] = []
    next_id = 1
    conversations: list[list[int]] = []
    now_ms = 0.0
    for _ in range(requests):
        now_ms += rng.expovariate(3.4) * 1e3
        if conversations and rng.random() < 0.6:
            history = rng.choice(conversations[-200:])
        else:
            history = [0]
            conversations.append(history)
        added = 1 + int(rng.paretovariate(1.2)) % 60
        history.extend(range(next_id, next_id + added))
        next_id += added
        rows.append(Row(round(now_ms), 1 + int(rng.expovariate(1 / 340)), list(history)))
    return rows


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """A made-up workload: groups of requests whose prompts begin with the same blocks."""

    groups: int
    prefix_blocks: int
    """Blocks that the prompts of a group have in common."""
    own_blocks: int
    output_tokens: int
    """The mean; lengths are distributed exponentially."""
    skew: float
    """Exponent of Zipf's law by which requests fall to groups; 0: evenly."""
    arrivals_per_s: float

    def rows(self, requests: int, seed: int) -> list[Row]:
        """Return requests that arrive at random."""
        rng = random.Random(seed)
        weights = [1.0 / (group + 1) ** self.skew for group in range(self.groups)]
        stride = self.prefix_blocks + 1
        first_own = self.groups * stride
        rows: list[Row] = []
        now_ms = 0.0
        for number in range(requests):
            now_ms += rng.expovariate(self.arrivals_per_s) * 1e3
            group = rng.choices(range(self.groups), weights)[0]
            prefix = range(group * stride, group * stride + self.prefix_blocks)
            own = range(first_own + number * self.own_blocks, first_own + (number + 1) * self.own_blocks)
            rows.append(Row(now_ms, max(1, int(rng.expovariate(1.0 / self.output_tokens))), [*prefix, *own]))
        return rows


def expand(hash_ids: Sequence[int]) -> bytes:
    """The token ids that block ids stand for, as little-endian u32."""
    ids = np.array(hash_ids, dtype=np.uint64)[:, None] * np.uint64(BLOCK_TOKENS)
    positions = np.arange(BLOCK_TOKENS, dtype=np.uint64)
    mixed: NDArray[np.uint64] = np.add(ids, positions, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = np.bitwise_xor(mixed, np.right_shift(mixed, 29)) * np.uint64(0xBF58476D1CE4E5B9)
    tokens: NDArray[np.uint32] = np.right_shift(mixed, 32).astype(np.uint32) % np.uint32(VOCABULARY)
    return tokens.astype(np.dtype("<u4")).tobytes()
