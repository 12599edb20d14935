"""Dynamic batching: requests that arrive close together are run as one execution of the model.

Batches are composed as by Triton, whose sources define the rules. Requests wait in a queue (`request_queue`). While there is room
for one more batch, the requests of the queue are added up in its order, those whose tensors differ from the first ones in more
than the first dimension are passed over, and of the others

1. a prefix that makes a preferred size forms a batch, unless one of them has waited `max_queue_delay_s`;
2. what precedes the request that would exceed the largest preferred size does, if nothing makes a preferred size;
3. all do, if they reach that size, if the next one does not fit, if another one differs, or if they have waited long enough;
4. otherwise they wait for more.

There is room for two batches behind each execution, so that what arrives meanwhile can join the last of them, and the one after
it can be handed over before the model is idle (`ahead`). With a delay, batches behind an execution that have waited for it are
run together if they fit. With queue policies a batch is only formed when it can be run at once, since requests that left the
queue no longer give way.

Two things differ from Triton: requests of another shape are passed over rather than end the batch, and a request with a deadline
waits for company no longer than half of what the deadline leaves it.

A cancelled request leaves at once; one whose deadline passed is refused when its turn comes. When an execution fails, each
request in it runs again alone, so that only those at fault fail: with Triton all would, and one caller could fail the others'.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dynamo.common.errors import DeadlineExceeded, EngineError, InvalidRequest
from dynamo.common.process.background import Tasks
from dynamo.worker.engine.base import Context, count_execution
from dynamo.worker.engine.batching_settings import Batching
from dynamo.worker.engine.request_queue import NO_OPTIONS, Queued, QueueOptions, RequestQueue

Array: TypeAlias = NDArray[Any]
Tensors: TypeAlias = Mapping[str, Array]

log = logging.getLogger(__name__)

_FORMED_PER_SLOT = 2
"""Batches that may be formed while an execution runs, as in Triton."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPolicy:
    """When to run which requests together. Sizes are rows: the first dimension of the tensors, summed over requests."""

    max_batch_size: int
    batching: Batching = field(default_factory=Batching)
    ragged_inputs: frozenset[str] = frozenset()
    """Inputs that requests of one batch may have in different shapes."""
    concurrency: int = 1
    """Executions at once."""
    ahead: int = 0
    """Batches that cannot grow and are handed over, besides, to wait where they are run."""

    def __post_init__(self) -> None:
        if self.max_batch_size < 1:
            raise ValueError("dynamic batching needs a max_batch_size of at least 1")
        for size in self.batching.preferred_batch_size:
            if not 1 <= size <= self.max_batch_size:
                raise ValueError(f"preferred batch size {size} is not between 1 and {self.max_batch_size}")
        if self.batching.max_queue_delay_us < 0 or self.concurrency < 1 or self.ahead < 0:
            raise ValueError("dynamic batching needs a concurrency of at least 1, and neither queue delay nor ahead below 0")


class _BatchedRequest(Queued):
    """A request in the queue or in execution."""

    __slots__ = ("context", "due", "enqueued_ns", "formed", "inputs", "key", "request", "response", "rows")

    def __init__(self, inputs: Tensors, rows: int, context: Context, key: Hashable, delay_s: float, request: Any) -> None:
        super().__init__()
        loop = asyncio.get_running_loop()
        now = loop.time()
        self.inputs = inputs
        self.rows = rows
        self.context = context
        self.key = key
        self.request = request
        self.formed: _Formed | None = None
        """The batch in which it waits for its execution."""
        self.response: asyncio.Future[Any] = loop.create_future()
        self.enqueued_ns = time.perf_counter_ns()
        self.due = now + (delay_s if context.deadline is None else min(delay_s, (context.deadline - now) / 2))


class _Formed:
    """Requests that are to be run together."""

    __slots__ = ("jobs", "rows")

    def __init__(self) -> None:
        self.jobs: dict[_BatchedRequest, None] = {}
        self.rows = 0

    @property
    def key(self) -> Hashable:
        return next(iter(self.jobs)).key

    def add(self, jobs: Iterable[_BatchedRequest]) -> None:
        for job in jobs:
            self.jobs[job] = None
            self.rows += job.rows
            job.formed = self

    def remove(self, job: _BatchedRequest) -> None:
        del self.jobs[job]
        self.rows -= job.rows
        job.formed = None


class Batch:
    """The requests of one execution, as the model gets them."""

    __slots__ = ("_jobs", "infer_ns", "input_ns", "is_handed_over", "queue_ns", "rows")

    def __init__(self, jobs: Sequence[_BatchedRequest]) -> None:
        self._jobs = jobs
        self.rows = sum(job.rows for job in jobs)
        self.input_ns = 0
        self.infer_ns = 0
        """Time spent in the model; set by what executes the batch."""
        self.queue_ns = 0
        """Time spent before it, after the batch was formed; set likewise."""
        self.is_handed_over = False

    @property
    def context(self) -> Context:
        """The context of the first request."""
        return self._jobs[0].context

    @property
    def requests(self) -> list[Any]:
        """The `request` submitted with each, for a model that takes requests rather than joined tensors."""
        return [job.request for job in self._jobs]

    @property
    def is_abandoned(self) -> bool:
        """Whether the callers of all requests have left, so that to execute it is of no use. Safe to call on any thread."""
        return all(job.response.done() for job in self._jobs)

    def hand_over(self) -> None:
        """Return from `submit` now, with the `request` submitted: its caller goes on by itself, and counts the time.

        The execution keeps its slot until it ends.
        """
        self.is_handed_over = True
        _count_execution(self._jobs, self.rows)
        for job in self._jobs:
            if not job.response.done():
                job.response.set_result(job.request)

    def inputs(self) -> Tensors:
        """Return all requests' tensors, joined along the first dimension. Several are copied: call it off the event loop."""
        start = time.perf_counter_ns()
        first = self._jobs[0].inputs
        if len(self._jobs) == 1:
            return first
        joined = {name: np.concatenate([job.inputs[name] for job in self._jobs]) for name in first}
        self.input_ns = time.perf_counter_ns() - start
        return joined


def rows_of(inputs: Tensors) -> int:
    """Return the batch size of a request. Raises InvalidRequest if its inputs differ in it."""
    rows = {array.shape[0] if array.ndim else 0 for array in inputs.values()}
    if len(rows) != 1:
        raise InvalidRequest("the inputs of the request differ in their first dimension, the batch")
    return rows.pop()


Execute: TypeAlias = Callable[[Batch], Awaitable[Tensors | list[Any]]]
"""Returns the joined outputs; or, as a list, the response to each request, where an exception fails that request."""


class Batcher:
    """Queues the requests of one model and runs them in batches through `execute`, from `start()` to `close()`."""

    def __init__(self, policy: BatchPolicy, execute: Execute) -> None:
        self._policy = policy
        self._execute = execute
        self._preferred = frozenset(policy.batching.preferred_batch_size or (policy.max_batch_size,))
        self._max_preferred = max(self._preferred)
        self._delay_s = policy.batching.max_queue_delay_us / 1e6
        policies = policy.batching.policies
        self._is_plain = policies.is_plain
        self._queue: RequestQueue[_BatchedRequest] = RequestQueue(policies, self._wake, lambda job, error: _fail([job], error))
        self._formed: deque[_Formed] = deque()
        """Batches that wait for an execution, in order."""
        self._growing: _Formed | None = None
        """The last of them, if requests may join it."""
        self._executions = Tasks()
        self._running: list[list[_BatchedRequest]] = []
        """The requests of each execution that has not ended."""
        self._next_turn: asyncio.Handle | None = None
        self._next_due: asyncio.TimerHandle | None = None
        self._is_open = False

    @property
    def waiting(self) -> int:
        """Requests that have not begun."""
        return len(self._queue) + sum(len(formed.jobs) for formed in self._formed)

    def start(self) -> None:
        self._is_open = True
        self._wake()

    async def close(self) -> None:
        """Stop. Requests that still wait are cancelled, and those in execution, even if it has not taken its first step."""
        self._is_open = False
        for handle in (self._next_turn, self._next_due):
            if handle is not None:
                handle.cancel()
        running = [job for jobs in self._running for job in jobs]
        await self._executions.close()
        for job in (*running, *self._take_all()):
            job.response.cancel()

    async def submit(
        self,
        inputs: Tensors,
        rows: int,
        context: Context,
        version: str = "",
        request: Any = None,
        options: QueueOptions = NO_OPTIONS,
    ) -> Any:
        """Return the model's outputs for `inputs`, whose arrays all have `rows` as their first dimension.

        The outputs are views into those of the whole batch, or what `execute` gave for this `request`. Raises InvalidRequest for
        more rows than a batch may have, Overloaded, QueueTimeout, DeadlineExceeded, and whatever the execution raised.
        """
        if rows > self._policy.max_batch_size:
            raise InvalidRequest(f"the request has a batch size of {rows}; the model takes at most {self._policy.max_batch_size}")
        ragged = self._policy.ragged_inputs
        key = (version, *[(name, array.dtype.char, name in ragged or array.shape[1:]) for name, array in inputs.items()])
        job = _BatchedRequest(inputs, rows, context, key, self._delay_s, request)
        self._queue.add(job, options)
        self._wake()
        try:
            return await job.response
        finally:
            self._withdraw(job)

    def _withdraw(self, job: _BatchedRequest) -> None:
        """Take back a request that has not begun; others may be waiting behind it."""
        if job.line is not None:
            self._queue.remove(job)
            self._wake()
        elif job.formed is not None:
            formed = job.formed
            formed.remove(job)
            if not formed.jobs:
                self._formed.remove(formed)
                self._growing = None if formed is self._growing else self._growing
            self._wake()

    # Forming batches

    def _wake(self) -> None:
        """Look at the queue once what arrives together is there."""
        if self._is_open and self._next_turn is None:
            self._next_turn = asyncio.get_running_loop().call_soon(self._advance)

    def _advance(self) -> None:
        """Form and run batches for as long as there is room and the queue has some."""
        self._next_turn = None
        if self._next_due is not None:
            self._next_due.cancel()
            self._next_due = None
        try:
            while self._run_next() or self._form():
                pass
        except Exception:  # a defect of this module: callers that wait get an error, and the next request is served
            log.exception("the next batch could not be chosen")
            _fail(self._take_all(), EngineError("requests could not be batched"))

    def _take_all(self) -> list[_BatchedRequest]:
        """Take out all requests that have not begun."""
        jobs = [*(job for formed in self._formed for job in formed.jobs), *self._queue]
        for job in jobs:
            job.formed = None
            self._queue.remove(job)
        self._formed.clear()
        self._growing = None
        return jobs

    def _form(self) -> bool:
        """Move requests from the queue to a batch, or close a batch for which the next is too large. Return whether it did."""
        if not self._queue or not self._has_room():
            return False
        jobs, can_grow = self._choose(asyncio.get_running_loop().time())
        growing = self._growing
        if not jobs:
            self._growing = growing if can_grow else None
            return not can_grow
        if growing is None:
            growing = _Formed()
            self._formed.append(growing)
        for job in jobs:
            self._queue.remove(job)
        growing.add(jobs)
        self._growing = growing if can_grow and growing.rows < self._policy.max_batch_size else None
        return True

    def _has_room(self) -> bool:
        slots = self._policy.concurrency
        if not self._is_plain:
            return len(self._running) < slots and not self._formed
        return len(self._formed) + max(0, len(self._running) - slots) < _FORMED_PER_SLOT * slots

    def _choose(self, now: float) -> tuple[list[_BatchedRequest], bool]:
        """Return the requests that should join the growing batch or form a new one, and whether more may join them.

        These are the numbered rules of this module. If none should yet, look again when the first of them is due.
        """
        growing = self._growing
        rows = 0 if growing is None else growing.rows
        key = None if growing is None else growing.key
        jobs: list[_BatchedRequest] = []
        preferred = 0
        can_grow = True
        is_full = has_others = False
        for job in self._queue:
            if key is None:
                key = job.key
            elif job.key != key:
                has_others = True
                continue
            elif not preferred and rows + job.rows > self._max_preferred:
                preferred, can_grow = len(jobs), False
            if rows + job.rows > self._policy.max_batch_size:
                is_full = True
                break
            jobs.append(job)
            rows += job.rows
            if rows in self._preferred:
                preferred = len(jobs)
        if not jobs:
            return [], not is_full
        delay_s = self._delay_s
        due = min(job.due for job in jobs)
        is_late = delay_s > 0 and now >= due
        if preferred and not is_late:
            return jobs[:preferred], can_grow and delay_s > 0
        if is_full or rows >= self._max_preferred:
            return jobs, False
        if has_others or is_late or not delay_s:
            return jobs, can_grow
        self._next_due = asyncio.get_running_loop().call_at(due, self._wake)
        return [], True

    # Executions

    def _run_next(self) -> bool:
        """Run the first batch, if there is a slot for it. Return whether it left."""
        if not self._formed or not self._has_slot(self._formed[0]):
            return False
        first = self._formed[0]
        now = asyncio.get_running_loop().time()
        while len(self._formed) > 1 and self._can_join(self._formed[1], first, now):
            first.add(self._formed[1].jobs)
            del self._formed[1]
        late = [job for job in first.jobs if job.context.deadline is not None and now >= job.context.deadline]
        self._formed.popleft()
        if not self._formed:
            self._growing = None
        for job in first.jobs:
            job.formed = None
        _fail(late, DeadlineExceeded())
        jobs = [job for job in first.jobs if not job.response.done()]  # done: late, or cancelled in this turn of the event loop
        if jobs:
            self._running.append(jobs)
            self._executions.start(self._run_in_slot(jobs), "a batch")
        return True

    def _has_slot(self, formed: _Formed) -> bool:
        running = len(self._running)
        if running < self._policy.concurrency:
            return True
        if running >= self._policy.concurrency + self._policy.ahead or formed is self._growing:
            return False
        return formed.rows == self._policy.max_batch_size or not self._delay_s

    def _can_join(self, formed: _Formed, first: _Formed, now: float) -> bool:
        """Whether a batch is run with the one before it, because it has waited for that as long as requests wait for company."""
        if not self._delay_s or now < min(job.due for job in formed.jobs):
            return False
        return first.rows + formed.rows <= self._policy.max_batch_size and first.key == formed.key

    async def _run_in_slot(self, jobs: list[_BatchedRequest]) -> None:
        try:
            await self._run(jobs)
        finally:
            self._running.remove(jobs)
            self._wake()

    async def _run(self, jobs: list[_BatchedRequest]) -> None:
        batch = Batch(jobs)
        start = time.perf_counter_ns()
        for job in jobs:
            job.context.timings.queue_ns = start - job.enqueued_ns
        try:
            outputs = await self._execute(batch)
            split_start = time.perf_counter_ns()
            parts = outputs if isinstance(outputs, list) else _split(outputs, jobs, batch.rows)
            if len(parts) != len(jobs):
                raise EngineError(f"the model gave {len(parts)} responses to {len(jobs)} requests")
        except Exception as error:
            if len(jobs) > 1 and not batch.is_handed_over:
                for job in jobs:
                    if not job.response.done():
                        await self._run([job])
                return
            self._account(jobs, batch, 0)
            _fail(jobs, error)
        except asyncio.CancelledError:
            if not self._is_open:
                raise
            # This slot was not cancelled, so the model did it: a future or an executor of its own was cancelled.
            self._account(jobs, batch, 0)
            _fail(jobs, EngineError("the model cancelled its own execution"))
        except BaseException as error:  # SystemExit, for one: the model's own end is not that of its worker
            log.exception("an execution of the model failed")
            self._account(jobs, batch, 0)
            _fail(jobs, EngineError(f"the model raised {type(error).__name__}"))
        else:
            self._account(jobs, batch, time.perf_counter_ns() - split_start)
            for job, part in zip(jobs, parts, strict=True):  # of equal length, see above
                if isinstance(part, Exception):
                    _fail([job], part)
                elif not job.response.done():
                    job.response.set_result(part)

    @staticmethod
    def _account(jobs: Sequence[_BatchedRequest], batch: Batch, output_ns: int) -> None:
        """Record in each request how long it took, and in one of them that it counts as the execution in the statistics."""
        if batch.is_handed_over:
            return
        for job in jobs:
            timings = job.context.timings
            timings.queue_ns += batch.queue_ns
            timings.input_ns += batch.input_ns
            timings.infer_ns = batch.infer_ns
            timings.output_ns = output_ns
        _count_execution(jobs, batch.rows)


def _count_execution(jobs: Sequence[_BatchedRequest], rows: int) -> None:
    count_execution([(job.context.timings, not job.response.done()) for job in jobs], rows)


def _fail(jobs: Sequence[_BatchedRequest], error: Exception) -> None:
    for job in jobs:
        if not job.response.done():
            job.response.set_exception(error)


def _split(outputs: Tensors, jobs: Sequence[_BatchedRequest], rows: int) -> list[Any]:
    for name, array in outputs.items():
        if not array.ndim or array.shape[0] != rows:
            raise EngineError(f"output '{name}' has shape {list(array.shape)}; its first dimension must be {rows}")
    if len(jobs) == 1:
        return [outputs]
    parts: list[Tensors] = []
    first_row = 0
    for job in jobs:
        parts.append({name: array[first_row : first_row + job.rows] for name, array in outputs.items()})
        first_row += job.rows
    return parts
