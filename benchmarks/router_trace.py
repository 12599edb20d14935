"""Replays a trace of requests against simulated workers in virtual time, for several router modes side by side.

    python benchmarks/router_trace.py TRACE.jsonl --modes round-robin kv --workers 8 --blocks 5000 --block-size 512

The trace has the format of Mooncake's: one JSON object per line with `timestamp` (ms), `output_length` (tokens) and `hash_ids`
(ids of 512-token blocks; an equal id is an equal block after an equal prefix). Each id is expanded to 512 token ids, always the
same, so that real hashing, routing, scheduling and caching run; only the clock and the tokens are made up. Without a trace a
small one of the same shape is synthesised.

Workers tell routers about their caches and loads as real ones do: after each step, the load at most every 50 ms.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from dynamo.common.discovery import Instance
from dynamo.common.errors import Overloaded
from dynamo.common.kv.events import KvState, LoadReport, request_key
from dynamo.common.kv.hashes import pack_hashes
from dynamo.common.model_card import LlmInfo, ModelCard, ModelKind
from dynamo.common.names import Endpoint, InstanceId
from dynamo.frontend.router.balance import LoadRouter, least_loaded, power_of_two
from dynamo.frontend.router.base import Router, RouteRequest
from dynamo.frontend.router.hashing import PromptHashes
from dynamo.frontend.router.kv import KvRouter, KvRouterConfig
from dynamo.frontend.router.load import BookingEvent, LoadTable, Thresholds
from dynamo.frontend.router.simple import RandomChoice, RoundRobin
from dynamo.worker.engine.sim.scheduler import Scheduler, SchedulerConfig, StepResult
from dynamo.worker.engine.sim.scheduler import Sequence as SimSequence
from dynamo.worker.engine.sim.timing import TimingModel

TRACE_BLOCK_TOKENS = 512
VOCABULARY = 32_000
REPORT_EVERY_S = 0.05
MODEL = "trace"
MODES = ("round-robin", "random", "least-loaded", "power-of-two", "kv", "kv-approximate")


class Row(msgspec.Struct):
    """One request of a trace."""

    timestamp: float
    output_length: int
    hash_ids: list[int]
    input_length: int = 0


def read_trace(path: Path, limit: int) -> list[Row]:
    decoder = msgspec.json.Decoder(Row)
    with path.open("rb") as lines:
        rows = [decoder.decode(line) for line in lines if line.strip()]
    return sorted(rows, key=lambda row: row.timestamp)[: limit or None]


def synthesise(requests: int, seed: int) -> list[Row]:
    """Conversations of some turns over one common first block; each turn repeats the last one and adds to it."""
    rng = random.Random(seed)
    rows: list[Row] = []
    fresh = iter(range(1, 1 << 60))
    conversations: list[list[int]] = []
    now = 0.0
    for _ in range(requests):
        now += rng.expovariate(3.4) * 1e3
        if conversations and rng.random() < 0.6:
            history = rng.choice(conversations[-200:])
        else:
            history = [0]
            conversations.append(history)
        history.extend(next(fresh) for _ in range(1 + int(rng.paretovariate(1.2)) % 60))
        rows.append(Row(now, 1 + int(rng.expovariate(1 / 340)), list(history)))
    return rows


def expand(hash_ids: Sequence[int]) -> bytes:
    """The token ids that block ids stand for, as little-endian u32."""
    ids = np.array(hash_ids, dtype=np.uint64)[:, None] * np.uint64(TRACE_BLOCK_TOKENS)
    positions = np.arange(TRACE_BLOCK_TOKENS, dtype=np.uint64)
    mixed: NDArray[np.uint64] = np.add(ids, positions, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = np.bitwise_xor(mixed, np.right_shift(mixed, 29)) * np.uint64(0xBF58476D1CE4E5B9)
    tokens: NDArray[np.uint32] = np.right_shift(mixed, 32).astype(np.uint32) % np.uint32(VOCABULARY)
    return tokens.astype(np.dtype("<u4")).tobytes()


@dataclass
class Worker:
    """A simulated worker: scheduler, its published state, and when it may report again."""

    instance: Instance
    scheduler: Scheduler
    state: KvState = field(default_factory=KvState)
    stepping: bool = False
    report_due_at: float = 0.0
    accepted: list[int] = field(default_factory=list)
    accepted_before: list[int] = field(default_factory=list)
    computed_tokens: int = 0


@dataclass
class Figures:
    """What one replay measured."""

    requests: int = 0
    rejected: int = 0
    prompt_blocks: int = 0
    hit_tokens: int = 0
    preempted: int = 0
    ttft_s: array[float] = field(default_factory=lambda: array("d"))
    itl_s: array[float] = field(default_factory=lambda: array("f"))
    good: int = 0
    """Requests answered within the goals for TTFT and mean ITL."""
    computed_tokens: list[int] = field(default_factory=list)
    """Prompt tokens computed, per worker."""
    virtual_s: float = 0.0
    wall_s: float = 0.0
    pick_s: array[float] = field(default_factory=lambda: array("d"))


@dataclass
class Live:
    """A request on its way."""

    request_id: str
    router: Router
    worker: Worker
    arrived_at: float
    last_at: float = 0.0
    first_at: float = 0.0


class Replay:
    """One mode over one trace."""

    def __init__(self, rows: Sequence[Row], mode: str, options: argparse.Namespace) -> None:
        self.rows = rows
        self.options = options
        self.now = 0.0
        self.figures = Figures(requests=len(rows))
        timing = TimingModel(speedup=options.speedup)
        if options.timing_table:
            timing = TimingModel.load(options.timing_table, options.speedup)
        config = SchedulerConfig(
            block_size=options.block_size,
            total_blocks=options.blocks,
            max_num_seqs=options.max_num_seqs,
            max_batched_tokens=options.max_batched_tokens,
            vocabulary=VOCABULARY,
            timing=timing,
        )
        llm = LlmInfo(context_length=1 << 20, tokenizer="", block_size=options.block_size, total_blocks=options.blocks)
        card = ModelCard(name=MODEL, kind=ModelKind.LLM, llm=llm)
        self.workers = [
            Worker(
                Instance(id=InstanceId(number + 1), endpoint=Endpoint(), subject="", card=card, started_at=0.0),
                Scheduler(config),
            )
            for number in range(options.workers)
        ]
        self.by_instance = {worker.instance.id: worker for worker in self.workers}
        self.instances = tuple(worker.instance for worker in self.workers)
        self.routers = [self._router(mode, number) for number in range(options.frontends)]
        self.live: dict[SimSequence, Live] = {}

    def _router(self, mode: str, number: int) -> Router:
        options, rng, clock = self.options, random.Random(self.options.seed + number), lambda: self.now
        thresholds = Thresholds(
            active_decode_blocks=options.active_decode_blocks_threshold,
            active_prefill_tokens=options.active_prefill_tokens_threshold,
        )
        share: Callable[[BookingEvent], None] | None = self._share if options.replica_sync else None
        loads = LoadTable(f"frontend-{number}", share)
        match mode:
            case "round-robin":
                return RoundRobin(rng)
            case "random":
                return RandomChoice(rng)
            case "least-loaded":
                return LoadRouter(mode, least_loaded, thresholds, loads, rng=rng, clock=clock)
            case "power-of-two":
                return LoadRouter(mode, power_of_two, thresholds, loads, rng=rng, clock=clock)
            case _:
                config = KvRouterConfig(
                    overlap_score_weight=options.overlap_score_weight,
                    prefill_load_scale=options.prefill_load_scale,
                    temperature=options.router_temperature,
                    kv_full_penalty=options.kv_full_penalty,
                    use_kv_events=mode == "kv",
                )
                return KvRouter(config, thresholds, loads, rng=rng, clock=clock)

    def _share(self, event: BookingEvent) -> None:
        for router in self.routers:
            if isinstance(router, KvRouter | LoadRouter):
                router.loads.apply(event, self.now)

    def run(self) -> Figures:
        start = time.perf_counter()
        events: list[tuple[float, int, Worker, StepResult]] = []
        order = 0
        arrivals = iter(enumerate(self.rows))
        arrival = next(arrivals, None)
        while arrival is not None or events:
            arrives_at = arrival[1].timestamp / 1e3 / self.options.rate if arrival is not None else float("inf")
            if arrival is not None and (not events or arrives_at <= events[0][0]):
                self.now = arrives_at
                worker = self._arrive(*arrival)
                arrival = next(arrivals, None)
            else:
                self.now, _, worker, result = heapq.heappop(events)
                worker.stepping = False
                self._finish_step(worker, result)
            if worker is not None and not worker.stepping and worker.scheduler.busy:
                worker.stepping = True
                result = worker.scheduler.step(self.now)
                order += 1
                heapq.heappush(events, (self.now + result.duration_s, order, worker, result))
        figures = self.figures
        figures.virtual_s = self.now
        figures.wall_s = time.perf_counter() - start
        figures.computed_tokens = [worker.computed_tokens for worker in self.workers]
        return figures

    def _arrive(self, number: int, row: Row) -> Worker | None:
        """Routes a request; None if it was rejected."""
        prompt = expand(row.hash_ids)
        router = self.routers[number % len(self.routers)]
        hashes = PromptHashes.of(prompt, self.options.block_size)
        request = RouteRequest(
            model=MODEL, request_id=str(number), prompt=prompt, expected_output_tokens=row.output_length, hashes=hashes
        )
        self.figures.prompt_blocks += len(hashes.values)
        begin = time.perf_counter()
        try:
            choice = router.pick(request, self.instances)
        except Overloaded:
            self.figures.rejected += 1
            return None
        self.figures.pick_s.append(time.perf_counter() - begin)
        worker = self.by_instance[choice.instance.id]
        sequence = SimSequence(prompt=prompt, hashes=list(hashes.values), limit=max(1, row.output_length))
        self.live[sequence] = Live(request.request_id, router, worker, self.now)
        worker.accepted.append(request_key(request.request_id))
        worker.scheduler.add(sequence, self.now)
        return worker

    def _finish_step(self, worker: Worker, result: StepResult) -> None:
        now, figures, live = self.now, self.figures, self.live
        worker.computed_tokens += result.prefill_tokens
        figures.preempted += result.preempted
        for sequence, _ in result.emitted:
            request = live[sequence]
            if request.last_at:
                figures.itl_s.append(now - request.last_at)
            else:
                request.first_at = now
                figures.ttft_s.append(now - request.arrived_at)
                figures.hit_tokens += sequence.cached_tokens
                request.router.first_token(request.request_id)
            request.last_at = now
        for sequence in result.finished:
            request = live.pop(sequence)
            request.router.finished(request.request_id)
            itl_s = (request.last_at - request.first_at) / max(1, sequence.generated - 1)
            goals = self.options
            figures.good += request.first_at - request.arrived_at <= goals.ttft_goal and itl_s <= goals.itl_goal
        if result.removed:
            worker.state.remove(result.removed)
        if result.stored:
            worker.state.store(result.stored)
        update = worker.state.take_update()
        if update is not None:
            for router in self.routers:
                if isinstance(router, KvRouter):
                    router.apply(MODEL, worker.instance.id, update)
        if now >= worker.report_due_at or not worker.scheduler.busy:
            self._report(worker)

    def _report(self, worker: Worker) -> None:
        scheduler = worker.scheduler
        worker.report_due_at = self.now + REPORT_EVERY_S
        report = LoadReport(
            waiting=scheduler.waiting,
            running=len(scheduler.running),
            active_blocks=scheduler.blocks.active,
            total_blocks=scheduler.blocks.total,
            queued_prefill_tokens=scheduler.queued_prefill_tokens,
            kv_number=worker.state.number,
            accepted=pack_hashes(worker.accepted_before + worker.accepted),
        )
        worker.accepted_before, worker.accepted = worker.accepted, []
        for router in self.routers:
            if isinstance(router, KvRouter | LoadRouter):
                router.loads.report(worker.instance.id, report, self.now)


def percentiles_ms(values: array[float], *shares: float) -> list[float]:
    data: NDArray[np.float64] = np.array(values, dtype=np.float64)
    return [float(np.percentile(data, share)) * 1e3 for share in shares] if len(data) else [0.0] * len(shares)


def summary(figures: Figures, block_size: int) -> dict[str, float]:
    mean = sum(figures.computed_tokens) / len(figures.computed_tokens)
    ttft, itl, pick = (percentiles_ms(values, 50, 90, 99) for values in (figures.ttft_s, figures.itl_s, figures.pick_s))
    return {
        "block_hit_rate": figures.hit_tokens / block_size / max(1, figures.prompt_blocks),
        "imbalance": max(figures.computed_tokens) / mean if mean else 1.0,
        "ttft_p50_ms": ttft[0],
        "ttft_p90_ms": ttft[1],
        "ttft_p99_ms": ttft[2],
        "itl_p50_ms": itl[0],
        "itl_p99_ms": itl[2],
        "rejected_share": figures.rejected / figures.requests,
        "goodput_rps": figures.good / figures.virtual_s if figures.virtual_s else 0.0,
        "offered_rps": figures.requests / figures.virtual_s if figures.virtual_s else 0.0,
        "preempted": figures.preempted,
        "pick_p50_us": pick[0] * 1e3,
        "pick_p99_us": pick[2] * 1e3,
        "wall_s": figures.wall_s,
    }


def table(results: dict[str, dict[str, float]]) -> Iterator[str]:
    columns = [
        ("hit %", "block_hit_rate", 100.0), ("imbalance", "imbalance", 1.0), ("TTFT p50 ms", "ttft_p50_ms", 1.0),
        ("p90", "ttft_p90_ms", 1.0), ("p99", "ttft_p99_ms", 1.0), ("ITL p50 ms", "itl_p50_ms", 1.0), ("p99", "itl_p99_ms", 1.0),
        ("rejected %", "rejected_share", 100.0), ("goodput/s", "goodput_rps", 1.0), ("offered/s", "offered_rps", 1.0),
        ("preempted", "preempted", 1.0), ("pick p99 µs", "pick_p99_us", 1.0),
    ]  # fmt: skip
    yield "| mode | " + " | ".join(title for title, _, _ in columns) + " |"
    yield "|---" * (len(columns) + 1) + "|"
    for mode, figures in results.items():
        yield f"| {mode} | " + " | ".join(f"{figures[key] * scale:.4g}" for _, key, scale in columns) + " |"


def main() -> None:
    kv = KvRouterConfig()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("trace", nargs="?", type=Path)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["round-robin", "least-loaded", "kv"])
    parser.add_argument("--requests", type=int, default=0, help="only the first so many; 0: all")
    parser.add_argument("--rate", type=float, default=1.0, help="how much faster than in the trace requests arrive")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--frontends", type=int, default=1, help="requests are dealt to so many routers in turn")
    parser.add_argument("--replica-sync", action="store_true")
    parser.add_argument("--blocks", type=int, default=5000)
    parser.add_argument("--block-size", type=int, default=512)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--max-batched-tokens", type=int, default=8192)
    parser.add_argument("--speedup", type=float, default=1.0)
    parser.add_argument("--timing-table", type=Path)
    parser.add_argument("--overlap-score-weight", type=float, default=kv.overlap_score_weight)
    parser.add_argument("--prefill-load-scale", type=float, default=kv.prefill_load_scale)
    parser.add_argument("--router-temperature", type=float, default=0.0)
    parser.add_argument("--kv-full-penalty", type=float, default=kv.kv_full_penalty)
    parser.add_argument("--active-decode-blocks-threshold", type=float)
    parser.add_argument("--active-prefill-tokens-threshold", type=int)
    parser.add_argument("--ttft-goal", type=float, default=10.0, help="seconds")
    parser.add_argument("--itl-goal", type=float, default=0.1, help="seconds, mean over a request")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    options = parser.parse_args()
    rows = read_trace(options.trace, options.requests) if options.trace else synthesise(options.requests or 1000, options.seed)
    results = {mode: summary(Replay(rows, mode, options).run(), options.block_size) for mode in options.modes}
    if options.json:
        print(json.dumps(results))
    else:
        print("\n".join(table(results)))


if __name__ == "__main__":
    main()
