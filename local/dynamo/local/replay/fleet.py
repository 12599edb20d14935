"""A fleet that exists in virtual time only: real routers, real hashing, real scheduling and caching; the clock is made up.

Workers publish cache events and loads as real ones do: after each step, the load at most every 50 ms.
"""

from __future__ import annotations

import heapq
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import msgspec

from dynamo.common.discovery import Instance
from dynamo.common.errors import InvalidRequest, Overloaded
from dynamo.common.kv.events import KvState, LoadReport, request_key
from dynamo.common.kv.hashes import TOKEN_BYTES, pack_hashes
from dynamo.common.model_card import LlmInfo, ModelCard, ModelKind
from dynamo.common.names import Endpoint, InstanceId
from dynamo.frontend.config import QueuePolicy, RouterMode, RouterOptions
from dynamo.frontend.router.base import Router, RouteRequest, RoutingDecision, TooLate
from dynamo.frontend.router.cache.hashing import PromptHashes
from dynamo.frontend.router.cost_terms import COST_TERMS, CostTerms
from dynamo.frontend.router.kv import KvRouter
from dynamo.frontend.router.loads.shared_bookings import SHARE_S
from dynamo.frontend.router.loads.table import LoadTable
from dynamo.frontend.router.select import make_router
from dynamo.frontend.serving.queue.fair_queue import FairQueue
from dynamo.frontend.serving.queue.queue_order import nearest_to_caches, rank_and_order
from dynamo.local.replay.config import ReplayConfig, ReplayMode
from dynamo.local.replay.figures import Figures
from dynamo.local.replay.trace import VOCABULARY, Row, expand
from dynamo.worker.engine.sim.scheduler import Scheduler, SchedulerConfig, SimSequence, StepResult
from dynamo.worker.engine.sim.tiers import BlockCache, TierConfig
from dynamo.worker.engine.sim.timing import TimingModel

_REPORT_EVERY_S = 0.05
MODEL = "trace"


@dataclass(slots=True)
class _Worker:
    """A scheduler, its published state, and when it may report again."""

    instance: Instance
    scheduler: Scheduler
    state: KvState = field(default_factory=KvState)
    stepping: bool = False
    report_due_at: float = 0.0
    accepted: list[int] = field(default_factory=list)
    accepted_before: list[int] = field(default_factory=list)
    computed_tokens: int = 0
    is_leaving: bool = False
    """It gets no more requests, and ends with its last one."""


class ReplayObserver(Protocol):
    """Is told what happens to requests, and when."""

    def placed(self, arrival: Arrival, instance: InstanceId, cached_tokens: int) -> None:
        """Take note of a request that was sent to an instance, which has so many of its prompt's tokens cached."""
        ...

    def refused(self, arrival: Arrival) -> None: ...

    def reported(self, instance: InstanceId, report: LoadReport) -> None: ...

    def ended(self, arrival: Arrival, ttft_s: float, *, is_good: bool) -> None:
        """Take note of a completed request. `is_good`: within the goals."""
        ...

    def left(self, instance: InstanceId) -> None:
        """Take note that an instance that was to leave has ended."""
        ...


@dataclass(slots=True, eq=False)
class Arrival:
    """A request that has not been placed yet."""

    number: int
    request: RouteRequest
    output_tokens: int
    router: Router
    arrived_at: float
    fleet: Replay
    rank: float
    order: tuple[float, int]

    key = ""
    """All are of one client."""

    def __lt__(self, other: object) -> bool:
        return isinstance(other, Arrival) and self.order < other.order

    def missing_tokens(self) -> int | None:
        return self.router.missing_tokens(self.request, self.fleet.instances, with_room=True)


@dataclass(slots=True)
class _Live:
    """A request on its way."""

    arrival: Arrival
    placed_at: float
    decision: RoutingDecision
    first_at: float | None = None
    last_at: float = 0.0


class Replay:
    """One mode over one trace. Raises InvalidRequest for a timing table that cannot be used."""

    def __init__(
        self,
        rows: Sequence[Row],
        mode: ReplayMode,
        config: ReplayConfig,
        terms: CostTerms = COST_TERMS,
        observer: ReplayObserver | None = None,
    ) -> None:
        self._rows = rows
        self._config = config
        self.now = 0.0
        self.figures = Figures(requests=len(rows))
        self._observer = observer
        self._factory = _WorkerFactory(config)
        self._workers: dict[InstanceId, _Worker] = {}
        self.instances: tuple[Instance, ...] = ()
        """The instances that get requests."""
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._timer_count = 0
        self._live: dict[SimSequence, _Live] = {}
        self._steps: list[tuple[float, int, _Worker, StepResult]] = []
        self._step_count = 0
        self._queues = [FairQueue[Arrival]() for _ in range(config.frontends)]
        for _ in range(config.workers):
            self.add_worker()
        self._choose = nearest_to_caches if config.queue.policy is QueuePolicy.PREFIX else None
        options = router_options(config.router, mode)
        self.load_tables = [LoadTable(f"frontend-{number}") for number in range(config.frontends)]
        """The loads of all instances, as each frontend knows them."""
        self._share_due_at = math.inf
        if options.replica_sync:
            for table in self.load_tables:
                table.on_unshared(self._share_soon)
        self._routers = [
            make_router(options, table, lambda: self.now, rng=random.Random(config.seed + number), terms=terms)
            for number, table in enumerate(self.load_tables)
        ]

    def run(self) -> Figures:
        """Run until every request of the trace is completed or rejected."""
        start = time.perf_counter()
        arrivals = iter(enumerate(self._rows))
        arrival = next(arrivals, None)
        while arrival is not None or self._steps or (self._timers and self.waiting):
            arrives_at = arrival[1].timestamp / 1e3 / self._config.rate if arrival is not None else math.inf
            steps_at = self._steps[0][0] if self._steps else math.inf
            if self._timers and self._timers[0][0] < min(arrives_at, steps_at):
                self.now, _, call = heapq.heappop(self._timers)
                call()
            elif arrival is not None and arrives_at <= steps_at:
                self.now = self.figures.arrivals_s = arrives_at
                self._share()
                self._arrive(*arrival)
                arrival = next(arrivals, None)
            else:
                self.now, _, worker, result = heapq.heappop(self._steps)
                worker.stepping = False
                self._finish_step(worker, result)
                self._start_step(worker)
                for queue in self._queues:
                    self._serve(queue)
        figures = self.figures
        figures.rejected += self.waiting  # for which there is no room in an idle fleet
        figures.virtual_s = self.now
        figures.wall_s = time.perf_counter() - start
        figures.instance_s = self.now * len(self._workers)
        figures.computed_tokens += [worker.computed_tokens for worker in self._workers.values()]
        return figures

    @property
    def waiting(self) -> int:
        """How many requests wait for an instance."""
        return sum(len(queue) for queue in self._queues)

    @property
    def waiting_tokens(self) -> int:
        """The prompt tokens of these."""
        return sum(len(arrival.request.prompt) // TOKEN_BYTES for queue in self._queues for arrival in queue)

    def requests_of(self, instance: InstanceId) -> tuple[int, int]:
        """Return how many requests run or wait at an instance, and the prompt tokens that it has still to compute."""
        scheduler = self._workers[instance].scheduler
        return len(scheduler.running) + scheduler.waiting, scheduler.queued_prefill_tokens

    def at(self, when: float, call: Callable[[], None]) -> None:
        """Call a function at a time of the replay."""
        self._timer_count += 1
        heapq.heappush(self._timers, (when, self._timer_count, call))

    def add_worker(self) -> InstanceId:
        """Start a worker with an empty cache, which gets requests at once."""
        worker = self._factory.make()
        self._workers[worker.instance.id] = worker
        self.instances = (*self.instances, worker.instance)
        for queue in self._queues:
            self._serve(queue)
        return worker.instance.id

    def end_worker(self, instance: InstanceId) -> None:
        """Send no more requests to a worker, which ends when it has completed those that it has."""
        self._workers[instance].is_leaving = True
        self.instances = tuple(each for each in self.instances if each.id != instance)
        self._remove_if_done(self._workers[instance])

    def _remove_if_done(self, worker: _Worker) -> None:
        if not worker.is_leaving or worker.scheduler.busy or worker.stepping:
            return
        instance = worker.instance.id
        del self._workers[instance]
        self.figures.computed_tokens.append(worker.computed_tokens)
        for table in self.load_tables:
            table.remove_instance(instance)
        for router in self._routers:
            router.removed(instance)
        if self._observer is not None:
            self._observer.left(instance)

    def _share_soon(self) -> None:
        self._share_due_at = min(self._share_due_at, self.now + SHARE_S)

    def _share(self) -> None:
        """Publish the bookings of each frontend to the others, if that is due."""
        if self._share_due_at > self.now:
            return
        self._share_due_at = math.inf
        for sender in self.load_tables:
            for message in sender.take_unshared(len(self._workers) + len(self._rows)):
                for table in self.load_tables:
                    if table is not sender:
                        table.apply(message, self.now, self._workers.__contains__)

    def _start_step(self, worker: _Worker) -> None:
        if not worker.stepping and worker.scheduler.busy:
            worker.stepping = True
            result = worker.scheduler.step(self.now)
            self._step_count += 1
            heapq.heappush(self._steps, (self.now + result.duration_s, self._step_count, worker, result))

    def _arrive(self, number: int, row: Row) -> None:
        prompt = expand(row.hash_ids)
        router = self._routers[number % len(self._routers)]
        hashes = PromptHashes.of(prompt, self._config.block_size)
        request = RouteRequest(
            model=MODEL,
            booking_id=str(number),
            prompt=prompt,
            expected_output_tokens=row.output_length,
            priority=row.priority,
            hashes=hashes,
        )
        tokens = len(row.hash_ids) * self._config.block_size + row.output_length
        rank, order = rank_and_order(self._config.queue.policy, row.priority, tokens, number)
        arrival = Arrival(number, request, row.output_length, router, self.now, self, rank, order)
        queue = self._queues[number % len(self._queues)]
        if not queue and self._place(arrival):
            return
        if len(queue) < self._config.queue.size:
            queue.push(arrival)
            self._serve(queue)
        else:
            self._refuse(arrival)

    def _refuse(self, arrival: Arrival) -> None:
        self.figures.rejected += 1
        if self._observer is not None:
            self._observer.refused(arrival)

    def _serve(self, queue: FairQueue[Arrival]) -> None:
        """Place requests in line until one finds no room."""
        while (first := queue.next()) is not None:
            arrival = queue.pop(first, self._choose)
            if not self._place(arrival):
                queue.push(arrival)
                return

    def _place(self, arrival: Arrival) -> bool:
        """Route a request. Return whether it is over with it: False if it may wait in the queue."""
        if not self.instances:
            return False
        router, figures = arrival.router, self.figures
        request = msgspec.structs.replace(arrival.request, waited_s=self.now - arrival.arrived_at)
        begin = time.thread_time()
        try:
            choice = router.pick(request, self.instances)
        except TooLate:
            self._refuse(arrival)
            return True
        except Overloaded:
            return False
        figures.pick_s.append(time.thread_time() - begin)
        worker = self._workers[choice.instance.id]
        assert request.hashes is not None
        hashes = list(request.hashes.values)
        sequence = SimSequence(prompt=request.prompt, hashes=hashes, limit=max(1, arrival.output_tokens))
        try:
            worker.scheduler.add(sequence, self.now)
        except InvalidRequest:
            router.finished(request.booking_id)
            self._refuse(arrival)
            return True
        self._live[sequence] = _Live(arrival, self.now, choice)
        if self._observer is not None:
            self._observer.placed(arrival, choice.instance.id, choice.overlap_blocks * self._config.block_size)
        figures.prompt_blocks += len(hashes)
        worker.accepted.append(request_key(request.booking_id))
        self._start_step(worker)
        return True

    def _finish_step(self, worker: _Worker, result: StepResult) -> None:
        worker.computed_tokens += result.prefill_tokens
        self.figures.preempted += result.preempted
        for sequence, _ in result.emitted:
            self._emit(sequence)
        for sequence in result.finished:
            self._end(sequence)
        if result.removed:
            worker.state.remove(result.removed)
        if result.stored:
            worker.state.store(result.stored)
        for tier, removed, stored in result.tiers if self._config.tier_events else ():
            worker.state.remove(removed, tier=tier)
            worker.state.store(stored, tier=tier)
        update = worker.state.take_update()
        if update is not None:
            for router in self._routers:
                if isinstance(router, KvRouter):
                    router.apply(MODEL, worker.instance.id, update)
        if self.now >= worker.report_due_at or not worker.scheduler.busy:
            self._report(worker)
        self._remove_if_done(worker)

    def _emit(self, sequence: SimSequence) -> None:
        request, now, figures = self._live[sequence], self.now, self.figures
        if request.first_at is None:
            request.first_at = now
            ttft_s = now - request.arrival.arrived_at
            figures.ttft_s.append(ttft_s)
            predicted_s = request.decision.ttft_s
            if predicted_s is not None:
                measured_s = now - request.placed_at
                figures.ttft_error_s.append(abs(predicted_s - measured_s))
                if predicted_s > 0.0:
                    figures.ttft_ratio.append(measured_s / predicted_s)
            figures.hit_blocks += sequence.cached_tokens // self._config.block_size
            request.arrival.router.first_token(request.arrival.request.booking_id)
        else:
            figures.itl_s.append(now - request.last_at)
        request.last_at = now

    def _end(self, sequence: SimSequence) -> None:
        request, figures = self._live.pop(sequence), self.figures
        arrival = request.arrival
        if request.decision.fetch is not None:
            arrival.router.found_cached(arrival.request, request.decision, sequence.cached_tokens)
        arrival.router.finished(arrival.request.booking_id)
        if request.first_at is not None:
            figures.e2e_s.append(request.last_at - arrival.arrived_at)
            figures.output_tokens += sequence.generated
            itl_s = (request.last_at - request.first_at) / max(1, sequence.generated - 1)
            ttft_s = request.first_at - arrival.arrived_at
            is_good = ttft_s <= self._config.ttft_goal_s and itl_s <= self._config.itl_goal_s
            if is_good:
                figures.good[arrival.request.priority] += 1
            if self._observer is not None:
                self._observer.ended(arrival, ttft_s, is_good=is_good)

    def _report(self, worker: _Worker) -> None:
        scheduler = worker.scheduler
        worker.report_due_at = self.now + _REPORT_EVERY_S
        report = LoadReport(
            waiting=scheduler.waiting,
            running=len(scheduler.running),
            active_blocks=scheduler.blocks.active,
            total_blocks=scheduler.blocks.total,
            queued_prefill_tokens=scheduler.queued_prefill_tokens,
            kv_number=worker.state.number,
            totals=scheduler.totals,
            accepted=pack_hashes(worker.accepted_before + worker.accepted),
        )
        worker.accepted_before, worker.accepted = worker.accepted, []
        for table in self.load_tables:
            table.report(worker.instance.id, report, self.now, MODEL)
        if self._observer is not None:
            self._observer.reported(worker.instance.id, report)


def router_options(options: RouterOptions, mode: ReplayMode) -> RouterOptions:
    """Return `options` with this mode of the router."""
    if mode is ReplayMode.KV_APPROXIMATE:
        return replace(options, mode=RouterMode.KV, kv=replace(options.kv, use_kv_events=False))
    return replace(options, mode=RouterMode(mode.value))


class _WorkerFactory:
    """Makes workers, each with an empty cache."""

    def __init__(self, config: ReplayConfig) -> None:
        """Raises InvalidRequest for a timing table that cannot be used."""
        timing = TimingModel(speedup=config.speedup)
        if config.timing is not None:
            timing = TimingModel.load(config.timing, config.speedup)
        self._scheduling = SchedulerConfig(
            block_size=config.block_size,
            total_blocks=config.blocks,
            max_num_seqs=config.max_num_seqs,
            max_batched_tokens=config.max_batched_tokens,
            vocabulary=VOCABULARY,
            timing=timing,
            tiers=TierConfig(
                cpu_blocks=config.cpu_blocks,
                cpu_tokens_per_s=config.cpu_fetch,
                disk_blocks=config.disk_blocks,
                disk_tokens_per_s=config.disk_fetch,
                shared_blocks=config.shared_blocks,
                shared_tokens_per_s=config.shared_fetch,
            ),
        )
        self._store = BlockCache(config.shared_blocks)
        llm = LlmInfo(context_length=1 << 20, tokenizer="", block_size=config.block_size, total_blocks=config.blocks)
        self._card = ModelCard(name=MODEL, kind=ModelKind.LLM, llm=llm)
        self._made = 0

    def make(self) -> _Worker:
        self._made += 1
        instance = Instance(id=InstanceId(self._made), endpoint=Endpoint(), subject="", card=self._card, started_at=0.0)
        return _Worker(instance, Scheduler(self._scheduling, self._store))
