"""Sequence batching: the requests of one sequence run in order, on one instance of the model, which may keep a state for them.

A sequence begins with a request that has the flag START and takes a *slot* of an instance until a request with END, or until no
request came for a while. Sequences that find no slot wait for one. Strategies, as in Triton:

- *direct*: an instance has a slot for each row of a batch, and a sequence keeps its row. Rows below the highest that has a
  request, and that have none themselves, are filled with requests that are not READY.
- *oldest*: an instance has `max_candidate_sequences` slots, and batches hold the requests that have waited longest.

A batch may wait for more requests, up to `max_queue_delay_microseconds` from when the first of them came: with *direct* until
`minimum_slot_utilization` of the slots have one, with *oldest* until they make a preferred size.

An *iterative* sequence (`iterative_sequence`) is begun by a request without an id, and consists of it alone: the model gets the
request again, in batches with those of other sequences, for as long as it releases it with RESCHEDULE.

Owners, which are API keys, share the slots: a free one is for a sequence of the owner that has the fewest. If none is free, an
owner that has two more than the one that waits gives up its sequence that has been without a request for longest. An owner that
is alone may have all slots. No sequence is given up that has a request, unless the other has waited for `_PATIENCE_S`: then it is
the last to begin of those whose request does not run yet, or has all its responses, which its caller does not read.

A sequence ends with the process of its instance. Requests of a sequence that is not known here are refused in a way that makes
frontends try other workers.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import suppress
from functools import partial
from math import inf
from pathlib import Path
from typing import TypeAlias

import msgspec
import numpy as np

from dynamo.common.errors import DynamoError, EngineError, InvalidRequest, Overloaded
from dynamo.common.process.background import Tasks
from dynamo.common.tensors.request import SEQUENCE_OWNER, SEVERAL_OWNERS
from dynamo.common.tensors.tensors import Array
from dynamo.protos.model_config_pb2 import ModelConfig
from dynamo.worker.engine.base import count_execution
from dynamo.worker.repository.declared.execution import ModelRequest, ModelResult, SequenceInstance, closing
from dynamo.worker.repository.declared.sequence_batching import ControlInputs, SequenceSettings, States
from dynamo.worker.repository.scheduling.decoupled import DecoupledRequest, StreamsBatches
from dynamo.worker.repository.scheduling.pipeline import NoProcess
from dynamo.worker.repository.scheduling.response_order import ResponseOrder
from dynamo.worker.repository.scheduling.responses import ProcessDied, Rescheduled
from dynamo.worker.repository.scheduling.sequence_request import SequenceRequest

log = logging.getLogger(__name__)

SequenceId: TypeAlias = int | str
_Key: TypeAlias = tuple[bool, str, SequenceId]
"""Whether it is implicit, owner and id: equal ids of different owners are different sequences, never on one instance at once."""
_PATIENCE_S = 2.0
"""An owner that has a request for each of its sequences at all times keeps others from a slot for so long, and one batch."""
_MOST_UNREAD_TURNS = 64
"""A rescheduled request waits for its caller to read the responses of so many calls of the model."""


class UnknownSequence(InvalidRequest):
    """The sequence has not begun here, or has ended. It may be known to another worker."""

    retryable = True


class _Sequence:
    __slots__ = ("begun", "expiry", "has_end", "id", "is_implicit", "is_running", "jobs", "lane", "owner", "state", "turn")

    def __init__(self, id: SequenceId, owner: str, *, is_implicit: bool) -> None:
        self.id = id
        self.owner = owner
        """The API key that has begun it; empty: none."""
        self.is_implicit = is_implicit
        """Begun by a request without an id, whose sequence no other request joins, whatever id it has."""
        self.jobs: deque[SequenceRequest] = deque()
        """Requests that wait, in order."""
        self.lane: _Lane | None = None
        """None: it waits for a slot, or has ended."""
        self.state: dict[str, Array] = {}
        self.is_running = False
        self.begun = asyncio.get_running_loop().time()
        self.turn: DecoupledRequest | None = None
        self.has_end = False
        """The last request of the sequence has come."""
        self.expiry: asyncio.TimerHandle | None = None

    @property
    def key(self) -> _Key:
        return self.is_implicit, self.owner, self.id

    @property
    def may_end(self) -> bool:
        """Whether the model does not run a request of it."""
        return not self.is_running or (self.turn is not None and self.turn.has_ended)

    @property
    def idle_until(self) -> float:
        """When it ends unless a request comes; infinite if it has one."""
        return inf if self.expiry is None or self.expiry.cancelled() else self.expiry.when()


_Row: TypeAlias = tuple[_Sequence, SequenceRequest] | None
"""A row of a batch; None: without a request."""


class _Lane:
    """An instance and its slots."""

    __slots__ = ("instance", "is_busy", "order", "slots", "timer")

    def __init__(self, instance: SequenceInstance, settings: SequenceSettings) -> None:
        self.instance = instance
        self.slots: list[_Sequence | None] = [None] * settings.slots
        self.order = ResponseOrder() if settings.is_ordered else None
        """Order of the responses of a decoupled model; None: as they come. Responses of other models come as their batches do."""
        self.is_busy = False
        self.timer: asyncio.TimerHandle | None = None
        """Runs when the first request has waited long enough for others."""

    @property
    def free(self) -> int:
        return self.slots.count(None)

    def has_namesake(self, id: SequenceId, owner: str) -> bool:
        """Return whether a sequence of another owner has this id here, where the model may keep a state by id."""
        return any(other is not None and other.id == id and other.owner != owner for other in self.slots)

    def ready(self) -> list[tuple[int, _Sequence]]:
        """Return the slots whose sequences have a request to run."""
        return [
            (slot, sequence)
            for slot, sequence in enumerate(self.slots)
            if sequence is not None and sequence.jobs and not sequence.is_running
        ]


class SequenceModel:
    """One version of a model with sequence batching."""

    def __init__(self, config: ModelConfig, instances: Sequence[SequenceInstance], folder: Path) -> None:
        """Raises InvalidRequest for controls or states that contradict themselves. `folder` holds files of initial states."""
        self._settings = SequenceSettings(config)
        self._name = config.name
        self._max_batch_size = config.max_batch_size
        self._is_decoupled = config.model_transaction_policy.decoupled and all(
            isinstance(instance, StreamsBatches) for instance in instances
        )
        self._ids = itertools.count(1)
        """Ids for iterative sequences whose requests bring none."""
        for instance in instances:
            if isinstance(instance, StreamsBatches):
                instance.watch_queue(lambda: self.waiting, has_slots=True)
        self._controls = ControlInputs(config)
        self._states = States(config, folder)
        self._lanes = [_Lane(instance, self._settings) for instance in instances]
        self._sequences: dict[_Key, _Sequence] = {}
        self._backlog: dict[str, deque[_Sequence]] = {}
        """Sequences that wait for a slot, in order, by owner."""
        self._held: Counter[str] = Counter()
        """How many slots the sequences of each owner have."""
        self._running = Tasks()
        self._look: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<SequenceModel {self._name}, sequences={len(self._sequences)}, waiting={sum(map(len, self._backlog.values()))}>"

    @property
    def waiting(self) -> int:
        return sum(len(sequence.jobs) for sequence in tuple(self._sequences.values()))

    async def respond(self, request: ModelRequest) -> ModelResult:
        sequence, job = self._admit(request)
        try:
            outcome = await job.outcomes.get()
        finally:
            self._leave(sequence, job)
        if isinstance(outcome, DynamoError):
            raise outcome
        if isinstance(outcome, DecoupledRequest):
            raise EngineError(f"model '{self._name}' gave no single response")
        return outcome

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelResult]:
        if not self._is_decoupled:
            yield await self.respond(request)
            return
        sequence, job = self._admit(request)
        try:
            while True:
                outcome = await job.outcomes.get()
                if isinstance(outcome, DynamoError):
                    raise outcome
                assert isinstance(outcome, DecoupledRequest)
                with suppress(Rescheduled):
                    async with closing(self._read(sequence, outcome)) as responses:
                        async for response in responses:
                            yield response
                    return
                self._has_read(sequence, job, outcome)
        finally:
            self._leave(sequence, job)

    async def _read(self, sequence: _Sequence, turn: DecoupledRequest) -> AsyncIterator[ModelResult]:
        """Yield the responses of one call of the model. Raises Rescheduled if it wants the request again."""
        lane = sequence.lane
        order = None if lane is None else lane.order
        responses = turn.read()
        try:
            async with closing(responses if order is None else order.ordered(responses)) as ordered:
                async for response in ordered:
                    yield response
        except (ProcessDied, NoProcess):
            if sequence.lane is not None:  # else the slots have other sequences by now
                self._lose(sequence.lane)
            raise

    async def close(self) -> None:
        for sequence in list(self._sequences.values()):
            self._end(sequence)
        for lane in self._lanes:
            _stop_timer(lane)
        await self._running.finish()
        await asyncio.gather(*(lane.instance.close() for lane in self._lanes))

    # Requests on their way

    def _admit(self, request: ModelRequest) -> tuple[_Sequence, SequenceRequest]:
        id = request.parameters.get("sequence_id", 0)
        owner = request.context.headers.get(SEQUENCE_OWNER, "")
        is_implicit = self._settings.is_iterative and not id
        if is_implicit:
            id = next(id for id in self._ids if not self._is_taken(id, owner))
            request = msgspec.structs.replace(request, parameters={**request.parameters, "sequence_start": True})
        if not isinstance(id, int | str) or not id:
            raise InvalidRequest(f"inference request to model '{self._name}' must specify a non-zero or non-empty correlation ID")
        if owner.startswith(SEVERAL_OWNERS) and not is_implicit:
            raise InvalidRequest(f"sequence {id} may be of several keys: make the call with trace=request.trace() of its request")
        if self._max_batch_size and any(array.shape[:1] != (1,) for array in request.inputs.values()):
            raise InvalidRequest(
                f"inference request to model '{self._name}' must specify batch-size 1 due to requirements of sequence batcher"
            )
        job = SequenceRequest(request)
        sequence = self._sequences.get((is_implicit, owner, id))
        if sequence is None or sequence.has_end:
            if not job.starts:
                raise UnknownSequence(
                    f"inference request for sequence {id} to model '{self._name}' must specify the START flag on the first "
                    "request of the sequence"
                )
            if all(lane.has_namesake(id, owner) for lane in self._lanes):
                raise Overloaded(f"sequence id {id} of model '{self._name}' is in use on all instances; try again, or another id")
            sequence = _Sequence(id, owner, is_implicit=is_implicit)
            self._sequences[sequence.key] = sequence
            self._backlog.setdefault(owner, deque()).append(sequence)
        if sequence.expiry is not None:
            sequence.expiry.cancel()
        sequence.has_end = job.ends
        self._enqueue(sequence, job)
        self._advance()
        return sequence, job

    def _is_taken(self, id: int, owner: str) -> bool:
        return (False, owner, id) in self._sequences or any(lane.has_namesake(id, owner) for lane in self._lanes)

    def _enqueue(self, sequence: _Sequence, job: SequenceRequest) -> None:
        job.enqueued_ns = time.perf_counter_ns()
        job.due = asyncio.get_running_loop().time() + self._settings.delay_s
        sequence.jobs.append(job)

    def _reschedule(self, sequence: _Sequence, job: SequenceRequest) -> None:
        """Have a request that the model has released wait for its next turn, as one in the middle of its sequence."""
        sequence.is_running = job.is_running = False
        job.starts = job.ends = False
        if job.has_left or sequence.lane is None:
            job.give(EngineError(f"sequence {sequence.id} of model '{self._name}' has ended"))
            self._end(sequence)
        elif len(job.turns) < _MOST_UNREAD_TURNS:
            self._enqueue(sequence, job)
        else:
            job.is_held = True

    def _has_read(self, sequence: _Sequence, job: SequenceRequest, turn: DecoupledRequest) -> None:
        job.turns.remove(turn)
        if job.is_held:
            job.is_held = False
            self._reschedule(sequence, job)
            self._advance()

    def _leave(self, sequence: _Sequence, job: SequenceRequest) -> None:
        """The caller of a request wants no more responses, or there are none."""
        job.has_left = True
        for turn in job.turns:
            turn.leave()
        if job in sequence.jobs:
            sequence.jobs.remove(job)
            sequence.has_end = sequence.has_end and not job.ends
            if job.starts or self._settings.is_iterative:
                self._end(sequence)
            else:
                self._await_next(sequence)
        elif job.is_running or job.is_held:
            self._finished(sequence, job)
        self._advance()

    def _advance(self) -> None:
        """Give free slots to sequences that wait, and have idle instances run what is there."""
        if self._backlog:
            self._place_backlog()
        for lane in self._lanes:
            if not lane.is_busy and (batch := self._choose(lane)):
                lane.is_busy = True
                self._running.start(self._run(lane, batch), f"a batch of sequences of {self._name}")

    def _place_backlog(self) -> None:
        while (placement := self._next_placement()) is not None:
            sequence, lane = placement
            self._leave_backlog(sequence)
            sequence.lane = lane
            lane.slots[lane.slots.index(None)] = sequence
            self._held[sequence.owner] += 1
        if self._backlog and (self._look is None or self._look.when() <= asyncio.get_running_loop().time()):
            self._look = asyncio.get_running_loop().call_later(_PATIENCE_S, self._advance)

    def _next_placement(self) -> tuple[_Sequence, _Lane] | None:
        """Return the sequence that gets the next slot, and the instance where that is free; None: none of them can have one."""
        is_full = not any(lane.free for lane in self._lanes)
        for owner in sorted(self._backlog, key=self._held.__getitem__):
            if not is_full:
                for sequence in self._backlog[owner]:
                    if (lane := self._lane_for(sequence)) is not None:
                        return sequence, lane
                continue
            given_up = self._to_give_up_for(owner)
            if given_up is None or (lane := given_up.lane) is None:
                continue
            for sequence in self._backlog[owner]:
                if not lane.has_namesake(sequence.id, owner):
                    self._end(given_up)
                    return sequence, lane
        return None

    def _to_give_up_for(self, owner: str) -> _Sequence | None:
        """Return the sequence that has been idle for longest of the owner with the most slots, if that is left with more."""
        enough = self._held[owner] + 2
        if max(self._held.values(), default=0) < enough:
            return None
        slots = [sequence for lane in self._lanes for sequence in lane.slots if sequence is not None]
        slots = [sequence for sequence in slots if self._held[sequence.owner] >= enough and sequence.may_end]
        idle = [sequence for sequence in slots if sequence.idle_until < inf]
        if not idle and asyncio.get_running_loop().time() - self._backlog[owner][0].begun >= _PATIENCE_S:
            return max(slots, key=lambda sequence: (self._held[sequence.owner], sequence.begun), default=None)
        return min(idle, key=lambda sequence: (-self._held[sequence.owner], sequence.idle_until), default=None)

    def _leave_backlog(self, sequence: _Sequence) -> None:
        waiting = self._backlog[sequence.owner]
        waiting.remove(sequence)
        if not waiting:
            del self._backlog[sequence.owner]

    def _lane_for(self, sequence: _Sequence) -> _Lane | None:
        """Return the instance with the most free slots that may have it."""
        lanes = [lane for lane in self._lanes if lane.free and not lane.has_namesake(sequence.id, sequence.owner)]
        return max(lanes, key=lambda lane: lane.free, default=None)

    def _choose(self, lane: _Lane) -> list[_Row]:
        """Return the rows of the next batch of an instance. Marks its sequences as running."""
        ready = lane.ready()
        _stop_timer(lane)
        if not ready:
            return []
        if not self._settings.is_direct:
            ready = sorted(ready, key=lambda entry: entry[1].jobs[0].enqueued_ns)[: max(1, self._max_batch_size)]
            ready = [(row, sequence) for row, (_, sequence) in enumerate(ready)]
        if self._settings.delay_s:
            due = min(sequence.jobs[0].due for _, sequence in ready)
            loop = asyncio.get_running_loop()
            if loop.time() < due:
                ready = ready[: self._without_delay(len(ready))]
            if not ready:
                lane.timer = loop.call_at(due, self._advance)
                return []
        rows: list[_Row] = [None] * (1 + max(row for row, _ in ready))
        for row, sequence in ready:
            sequence.is_running, sequence.turn = True, None
            rows[row] = (sequence, sequence.jobs.popleft())
        return rows

    def _without_delay(self, ready: int) -> int:
        """Return how many of the requests that are ready run before the delay is over."""
        if self._settings.is_direct:
            return ready if ready >= self._settings.enough else 0
        if ready >= max(self._settings.preferred, default=self._max_batch_size):
            return ready
        return max((size for size in self._settings.preferred if size <= ready), default=0)

    async def _run(self, lane: _Lane, rows: Sequence[_Row]) -> None:
        begun_ns = time.perf_counter_ns()
        requests = list(self._requests(rows))
        results: Sequence[ModelResult | DynamoError | None]
        try:
            if self._is_decoupled:
                await self._stream_batch(lane.instance, rows, requests)
                results = [None] * len(rows)
            else:
                results = await lane.instance.respond_all(requests)
                _count_execution(rows)
        except DynamoError as error:
            results = [error] * len(rows)
        except Exception as error:  # a defect of this module or of a backend: callers get an error, and the instance goes on
            log.exception("a batch of sequences of model '%s' failed unforeseen", self._name)
            results = [EngineError(f"model '{self._name}' failed: {type(error).__name__}")] * len(rows)
        ran_ns = time.perf_counter_ns() - begun_ns
        died = False
        for row, result in zip(rows, results, strict=True):
            if row is None or result is None:
                continue
            sequence, job = row
            timings = job.request.context.timings
            timings.queue_ns += begun_ns - job.enqueued_ns
            timings.infer_ns += ran_ns
            died = died or isinstance(result, ProcessDied | NoProcess)
            if isinstance(result, Rescheduled):
                self._reschedule(sequence, job)
                continue
            if isinstance(result, ModelResult):
                sequence.state = self._states.after(result)
            job.give(result)
            self._finished(sequence, job)
        lane.is_busy = False
        if died:
            self._lose(lane)
        self._advance()

    async def _stream_batch(self, instance: SequenceInstance, rows: Sequence[_Row], requests: Sequence[ModelRequest]) -> None:
        """Run a batch of a decoupled model; return when `execute` has. Raises DynamoError if it does not begin."""
        assert isinstance(instance, StreamsBatches)
        turns = [
            DecoupledRequest(request, None if row is None else partial(self._rescheduled, *row))
            for row, request in zip(rows, requests, strict=True)
        ]
        try:
            await instance.stream_all(turns, partial(self._begun, rows, turns))
        finally:
            for row, turn in zip(rows, turns, strict=True):
                if row is None:
                    turn.leave()

    def _begun(self, rows: Sequence[_Row], turns: Sequence[DecoupledRequest]) -> None:
        now = time.perf_counter_ns()
        _count_execution(rows)
        for row, turn in zip(rows, turns, strict=True):
            if row is None:
                continue
            sequence, job = row
            job.request.context.timings.queue_ns += now - job.enqueued_ns
            if job.has_left:
                turn.leave()
                self._finished(sequence, job)
                continue
            job.is_running, sequence.turn = True, turn
            job.turns.append(turn)
            job.give(turn)

    def _rescheduled(self, sequence: _Sequence, job: SequenceRequest) -> None:
        self._reschedule(sequence, job)
        asyncio.get_running_loop().call_soon(self._advance)  # when the others of its batch are there, too

    def _requests(self, rows: Sequence[_Row]) -> Iterator[ModelRequest]:
        template = next(row for row in rows if row is not None)[1].request
        for row in rows:
            yield self._empty_row(template) if row is None else self._prepared(*row)

    def _prepared(self, sequence: _Sequence, job: SequenceRequest) -> ModelRequest:
        """Return a request with its control inputs and the state of its sequence."""
        if job.starts:
            sequence.state = self._states.initial()
        controls = self._controls.of(sequence.id, starts=job.starts, ends=job.ends)
        inputs = {**job.request.inputs, **controls, **sequence.state}
        if not self._settings.is_iterative:
            return msgspec.structs.replace(job.request, inputs=inputs)
        place = {"sequence_id": sequence.id, "sequence_start": job.starts, "sequence_end": job.ends}
        return msgspec.structs.replace(job.request, inputs=inputs, parameters={**job.request.parameters, **place})

    def _empty_row(self, template: ModelRequest) -> ModelRequest:
        inputs = {name: np.full_like(array, b"" if array.dtype.kind == "O" else 0) for name, array in template.inputs.items()}
        inputs |= self._controls.of_empty_row() | self._states.initial()
        return msgspec.structs.replace(template, inputs=inputs, parameters={}, id="")

    def _finished(self, sequence: _Sequence, job: SequenceRequest) -> None:
        sequence.is_running = job.is_running = job.is_held = False
        if job.ends or (self._settings.is_iterative and not sequence.jobs):
            self._end(sequence)
        else:
            self._await_next(sequence)

    def _await_next(self, sequence: _Sequence) -> None:
        """End a sequence that has no request and gets none for a while; at once if it has not got its first turn."""
        if sequence.jobs or sequence.is_running:
            return
        if sequence.lane is None:
            self._end(sequence)
        else:
            sequence.expiry = asyncio.get_running_loop().call_later(self._settings.idle_s, self._expire, sequence)

    def _expire(self, sequence: _Sequence) -> None:
        if not sequence.jobs and not sequence.is_running:
            self._end(sequence)
            self._advance()

    def _end(self, sequence: _Sequence) -> None:
        """Free the slot of a sequence, whose requests that still wait are refused."""
        if sequence.expiry is not None:
            sequence.expiry.cancel()
        if sequence.lane is not None:
            sequence.lane.slots[sequence.lane.slots.index(sequence)] = None
            sequence.lane = None
            self._held[sequence.owner] -= 1
            if not self._held[sequence.owner]:
                del self._held[sequence.owner]
        elif sequence in self._backlog.get(sequence.owner, ()):
            self._leave_backlog(sequence)
        if self._sequences.get(sequence.key) is sequence:
            del self._sequences[sequence.key]
        while sequence.jobs:
            sequence.jobs.popleft().give(EngineError(f"sequence {sequence.id} of model '{self._name}' has ended"))

    def _lose(self, lane: _Lane) -> None:
        """The process of an instance has ended, and with it what it knew of its sequences. Those that it has not got yet stay."""
        for sequence in tuple(lane.slots):
            if sequence is not None and (sequence.is_running or not (sequence.jobs and sequence.jobs[0].starts)):
                self._end(sequence)


def _stop_timer(lane: _Lane) -> None:
    if lane.timer is not None:
        lane.timer.cancel()
        lane.timer = None


def _count_execution(rows: Sequence[_Row]) -> None:
    jobs = [row[1] for row in rows if row is not None]
    count_execution([(job.request.context.timings, not job.has_left) for job in jobs], len(rows))
