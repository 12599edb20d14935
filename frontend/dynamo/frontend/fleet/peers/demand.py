"""Reports the demand for each pool to planners; `common.scaling.demand` says what a report holds.

A report goes out every `REPORT_EVERY_S`, also one without pools, so that planners know which frontends are there. Prompts are
described by their hashes here rather than where they arrive, and in steps beside the requests that are served.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

from dynamo.common.kv.hashes import TOKEN_BYTES, pack_hashes, sequence_hashes, space_hash
from dynamo.common.process.background import running
from dynamo.common.scaling.demand import (
    MAX_SAMPLE_TOKENS,
    MAX_SAMPLES,
    REPORT_EVERY_S,
    ArrivalSample,
    ArrivalTotals,
    DemandReport,
    PoolDemand,
    demand_subject,
    thin_hashes,
)
from dynamo.common.scaling.pool import Pool
from dynamo.frontend.fleet.peers.exchange import PeerBus, Topic
from dynamo.frontend.router.cache.hashing import LONG_PROMPT_BYTES, PromptHashes
from dynamo.frontend.router.demand import Arrived, DemandTable, PoolCounts, WaitingRequests

_MOST = 1 << 53
_LONGEST = 1e9
"""Readers refuse larger numbers."""
_POOL_BYTES = 400
_SAMPLE_BYTES = 64
_SAVED_BYTES = 20
_MESSAGE_MARGIN_BYTES = 1024
_TURN_BYTES = 8192 * TOKEN_BYTES
"""Prompts that are hashed before other tasks have their turns."""
_NONE = WaitingRequests(0)

WaitingByPool = Callable[[], Mapping[Pool, WaitingRequests]]
"""Returns how many requests wait for each pool that some wait for."""


class DemandBus(PeerBus, Protocol):
    @property
    def max_payload(self) -> int: ...


class DemandGauges(Protocol):
    """Where the last report is shown."""

    def show_demand(self, demands: Iterable[PoolDemand]) -> None: ...


class DemandReporter:
    """Makes the reports of one process."""

    def __init__(self, origin: str, table: DemandTable, waiting: WaitingByPool, rng: random.Random | None = None) -> None:
        self._origin = origin
        self._table = table
        self._waiting = waiting
        self._rng = rng or random.Random()

    async def report(self) -> list[PoolDemand]:
        """Return the demand for all pools that have had a request, with samples of what arrived since the last call."""
        now, waiting = self._table.clock(), self._waiting()
        for pool in waiting:
            self._table.of(pool.model, pool.role)
        taken = [(counts, *counts.take_samples()) for counts in self._table.pools.values()]
        demands: list[PoolDemand] = []
        for counts, arrived, samples in self._limited(taken):
            described = await _described(samples, arrived, now) if samples else ()
            demands.append(_demand(counts, waiting.get(counts.pool, _NONE), described))
        return demands

    def _limited(self, taken: Sequence[tuple[PoolCounts, int, list[Arrived]]]) -> Iterator[tuple[PoolCounts, int, list[Arrived]]]:
        """Yield the same with at most `MAX_SAMPLES` samples together: of each pool by its share, and one at least."""
        total, left = sum(arrived for _, arrived, _ in taken), MAX_SAMPLES
        for counts, arrived, samples in sorted(taken, key=_arrived, reverse=True):
            count = min(len(samples), max(1, MAX_SAMPLES * arrived // total), left) if samples else 0
            left -= count
            yield counts, arrived, samples if count == len(samples) else self._rng.sample(samples, count)

    def messages(self, demands: Sequence[PoolDemand], max_bytes: int) -> Iterator[DemandReport]:
        """Yield reports that fit into messages of so many bytes, at least one."""
        part: list[PoolDemand] = []
        size = _MESSAGE_MARGIN_BYTES
        for demand in demands:
            needed = _size(demand)
            if part and size + needed > max_bytes:
                yield DemandReport(self._origin, tuple(part))
                part, size = [], _MESSAGE_MARGIN_BYTES
            part.append(demand)
            size += needed
        yield DemandReport(self._origin, tuple(part))


def _arrived(taken: tuple[PoolCounts, int, list[Arrived]]) -> int:
    return taken[1]


def _size(demand: PoolDemand) -> int:
    """Return the most bytes that the demand for a pool takes in a message."""
    sample_bytes = sum(_SAMPLE_BYTES + len(sample.hashes) for sample in demand.samples)
    return _POOL_BYTES + len(demand.pool.model) + _SAVED_BYTES * len(demand.saved) + sample_bytes


def _demand(counts: PoolCounts, waiting: WaitingRequests, samples: tuple[ArrivalSample, ...]) -> PoolDemand:
    totals = ArrivalTotals(
        counts.placed,
        min(counts.placed_tokens, _MOST),
        min(counts.computed_tokens, _MOST),
        min(counts.output_tokens, _MOST),
        counts.refused,
        min(counts.refused_tokens, _MOST),
    )
    ratio = min(counts.ttft_ratio(), _LONGEST)
    saved = counts.take_saved()
    return PoolDemand(counts.pool, totals, waiting.requests, waiting.missing_tokens, ratio, samples, saved)


async def _described(samples: Sequence[Arrived], arrived: int, now: float) -> tuple[ArrivalSample, ...]:
    """Describe requests that stand for all that arrived, the earliest first."""
    weight, hashed_bytes = arrived / len(samples), 0
    described = []
    for at, prompt, limit, priority, adapter, salt, block_size, known, output in sorted(samples, key=_at):
        blocks = len(prompt) // (block_size * TOKEN_BYTES) if block_size else 0
        hashes: Sequence[int] = known if blocks else ()
        if len(hashes) != blocks and len(prompt) < LONG_PROMPT_BYTES:
            hashes = sequence_hashes(prompt, block_size, space_hash(adapter, salt))
            hashed_bytes += len(prompt)
        elif len(hashes) != blocks:
            hashes = await _hashed(prompt, block_size, space_hash(adapter, salt))
        if hashed_bytes >= _TURN_BYTES:
            hashed_bytes = 0
            await asyncio.sleep(0)
        stride, thinned = thin_hashes(hashes)
        described.append(
            ArrivalSample(
                min(max(0.0, now - at), _LONGEST),
                weight,
                min(len(prompt) // TOKEN_BYTES, MAX_SAMPLE_TOKENS),
                min(limit, _MOST),
                priority,
                min(stride * block_size, MAX_SAMPLE_TOKENS),
                pack_hashes(thinned),
                min(round(output), _MOST),
            )
        )
    return tuple(described)


def _at(sample: Arrived) -> float:
    return sample[0]


async def _hashed(prompt: bytes, block_size: int, parent: int | None) -> list[int]:
    hashes = PromptHashes(prompt, block_size, parent)
    for _ in hashes.steps():
        await asyncio.sleep(0)
    return hashes.values


@asynccontextmanager
async def reported_demand(
    bus: DemandBus, namespace: str, origin: str, table: DemandTable, waiting: WaitingByPool, gauges: DemandGauges
) -> AsyncIterator[None]:
    """Report the demand that `table` counts while the body runs."""
    reporter = DemandReporter(origin, table, waiting)
    topic = Topic(bus, demand_subject(namespace), DemandReport, origin, "a report of demand")

    async def report() -> None:
        while True:
            await asyncio.sleep(REPORT_EVERY_S)
            demands = await reporter.report()
            for message in reporter.messages(demands, bus.max_payload):
                topic.publish(message)
            gauges.show_demand(demands)

    async with running(report(), "demand"):
        yield
