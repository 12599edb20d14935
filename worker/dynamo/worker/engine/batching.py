"""Dynamic batching: requests that arrive close together are run as one execution of the model.

Requests whose tensors agree in everything but the first dimension (and that name the same version) form a group. A free
execution slot looks at the groups, longest-waiting first, and decides, as Triton does:

1. a prefix of the group adds up to a preferred batch size: run the longest such prefix at once;
2. the batch is full, or the next request no longer fits: run what fits;
3. the first request has waited `max_queue_delay_s`, or half of what its deadline leaves it: run what is there;
4. otherwise wait for more requests.

While all slots are busy, up to `ahead` batches are formed that could not grow any more (rule 2, and rule 1 without a queue
delay), so that what runs them can begin with the next at once. Others form when a slot is free, to be as large as possible.

A cancelled request leaves the queue at once; one whose deadline passed is refused when its turn comes. When the queue is full,
new requests are refused as overload. When an execution fails, every request in it fails, as with Triton, except for
InvalidRequest: then each request runs again alone, so that only the one at fault fails.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dynamo.common.background import start
from dynamo.common.errors import DeadlineExceeded, EngineError, InvalidRequest, Overloaded
from dynamo.worker.engine.base import Context

Array: TypeAlias = NDArray[Any]
Tensors: TypeAlias = Mapping[str, Array]

log = logging.getLogger(__name__)

DEFAULT_QUEUE_SIZE = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPolicy:
    """When to run which requests together. Sizes are rows: the first dimension of the tensors, summed over requests."""

    max_batch_size: int
    preferred_batch_sizes: tuple[int, ...] = ()
    max_queue_delay_s: float = 0.0
    max_queue_size: int = DEFAULT_QUEUE_SIZE
    """Requests waiting; more are refused as overload."""
    concurrency: int = 1
    """Executions at once."""
    ahead: int = 0
    """Full batches that are handed over, besides, to wait where they are run."""

    def __post_init__(self) -> None:
        if self.max_batch_size < 1:
            raise ValueError("dynamic batching needs a max_batch_size of at least 1")
        for size in self.preferred_batch_sizes:
            if not 1 <= size <= self.max_batch_size:
                raise ValueError(f"preferred batch size {size} is not between 1 and {self.max_batch_size}")
        if self.max_queue_delay_s < 0 or self.max_queue_size < 1 or self.concurrency < 1 or self.ahead < 0:
            raise ValueError("queue delay, queue size, concurrency and ahead of dynamic batching must be positive")


class _Job:
    """A request in the queue or in execution."""

    __slots__ = ("context", "due", "enqueued_ns", "group", "inputs", "request", "response", "rows")

    def __init__(self, inputs: Tensors, rows: int, context: Context, group: _Group, delay_s: float, request: Any) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        self.inputs = inputs
        self.rows = rows
        self.context = context
        self.group = group
        self.request = request
        self.response: asyncio.Future[Any] = loop.create_future()
        self.enqueued_ns = time.perf_counter_ns()
        self.due = now + (delay_s if context.deadline is None else min(delay_s, (context.deadline - now) / 2))


class _Group:
    """Waiting requests that may share an execution, in order of arrival."""

    __slots__ = ("jobs", "key")

    def __init__(self, key: Hashable) -> None:
        self.key = key
        self.jobs: dict[_Job, None] = {}


class Batch:
    """The requests of one execution, as the model gets them."""

    __slots__ = ("_jobs", "infer_ns", "input_ns", "queue_ns", "rows")

    def __init__(self, jobs: Sequence[_Job]) -> None:
        self._jobs = jobs
        self.rows = sum(job.rows for job in jobs)
        self.input_ns = 0
        self.infer_ns = 0
        """Time spent in the model; set by what executes the batch."""
        self.queue_ns = 0
        """Time spent before it, after the batch was formed; set likewise."""

    @property
    def context(self) -> Context:
        """Of the first request."""
        return self._jobs[0].context

    @property
    def requests(self) -> list[Any]:
        """The `request` submitted with each, for a model that takes requests rather than joined tensors."""
        return [job.request for job in self._jobs]

    def inputs(self) -> Tensors:
        """Return all requests' tensors, joined along the first dimension. Several are copied: call it off the event loop."""
        start = time.perf_counter_ns()
        first = self._jobs[0].inputs
        if len(self._jobs) == 1:
            return first
        joined = {name: np.concatenate([job.inputs[name] for job in self._jobs]) for name in first}
        self.input_ns = time.perf_counter_ns() - start
        return joined


Execute: TypeAlias = Callable[[Batch], Awaitable[Tensors | list[Any]]]
"""Returns the joined outputs; or, as a list, the response to each request, where an exception fails that request."""


class Batcher:
    """Queues the requests of one model and runs them in batches through `execute`, between `start()` and `close()`."""

    def __init__(self, policy: BatchPolicy, execute: Execute) -> None:
        self._policy = policy
        self._execute = execute
        self._preferred = frozenset(policy.preferred_batch_sizes)
        self._groups: dict[Hashable, _Group] = {}
        self._waiting = 0
        self._changed = asyncio.Event()
        self._choosing = asyncio.Lock()
        self._slots: list[asyncio.Task[None]] = []
        self._running = 0
        self._is_closed = False

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return self._waiting

    def start(self) -> None:
        count = self._policy.concurrency + self._policy.ahead
        self._slots = [start(self._run_slot(), f"batching slot {number}") for number in range(count)]

    async def close(self) -> None:
        """Stop. Requests that still wait are cancelled."""
        self._is_closed = True
        for slot in self._slots:
            slot.cancel()
        await asyncio.gather(*self._slots, return_exceptions=True)
        for group in list(self._groups.values()):
            for job in group.jobs:
                job.response.cancel()

    async def submit(self, inputs: Tensors, rows: int, context: Context, version: str = "", request: Any = None) -> Any:
        """Return the model's outputs for `inputs`, whose arrays all have `rows` as their first dimension.

        The outputs are views into those of the whole batch, or what `execute` gave for this `request`. Raises InvalidRequest for
        more rows than a batch may have, Overloaded, DeadlineExceeded, and whatever the execution raised.
        """
        if rows > self._policy.max_batch_size:
            raise InvalidRequest(f"the request has a batch size of {rows}; the model takes at most {self._policy.max_batch_size}")
        if self._waiting >= self._policy.max_queue_size:
            raise Overloaded(f"{self._waiting} requests are waiting for the model already")
        key = (version, *((name, array.dtype.char, array.shape[1:]) for name, array in inputs.items()))
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = _Group(key)
        job = _Job(inputs, rows, context, group, self._policy.max_queue_delay_s, request)
        group.jobs[job] = None
        self._waiting += 1
        self._changed.set()
        try:
            return await job.response
        finally:
            self._remove(job)

    def _remove(self, job: _Job) -> None:
        """Take a request out of the queue, if it is still there."""
        if job not in job.group.jobs:
            return
        del job.group.jobs[job]
        self._waiting -= 1
        if not job.group.jobs:
            del self._groups[job.group.key]
        self._changed.set()

    async def _run_slot(self) -> None:
        while True:
            try:
                async with self._choosing:
                    jobs = await self._next_jobs()
            except Exception:  # a defect of this module: callers that wait get an error, and the next request finds a slot again
                log.exception("the next batch could not be chosen")
                self._fail_waiting(EngineError("requests could not be batched"))
                continue
            self._running += 1
            try:
                await self._run(jobs)
            finally:
                self._running -= 1
                self._changed.set()

    def _fail_waiting(self, error: EngineError) -> None:
        for group in list(self._groups.values()):
            waiting = list(group.jobs)
            _fail(waiting, error)
            for job in waiting:
                self._remove(job)

    async def _next_jobs(self) -> list[_Job]:
        """Wait until there is something to run, and take it from the queue."""
        loop = asyncio.get_running_loop()
        while True:
            self._changed.clear()
            now = loop.time()
            is_busy = self._running >= self._policy.concurrency
            due = None
            for group in sorted(self._groups.values(), key=lambda group: next(iter(group.jobs)).enqueued_ns):
                if count := self._ready(group, now, is_busy=is_busy):
                    if jobs := self._take(group, count, now):
                        return jobs
                    break
                head_due = next(iter(group.jobs)).due
                if not is_busy:
                    due = head_due if due is None else min(due, head_due)
            else:
                await self._change_until(due)

    async def _change_until(self, when: float | None) -> None:
        try:
            async with asyncio.timeout_at(when):
                await self._changed.wait()
        except TimeoutError:
            return

    def _ready(self, group: _Group, now: float, *, is_busy: bool) -> int:
        """Return how many of the group's first requests should run now, 0 to wait: the numbered rules of this module."""
        rows = count = preferred = 0
        full = False
        for job in group.jobs:
            if rows + job.rows > self._policy.max_batch_size:
                full = True
                break
            rows += job.rows
            count += 1
            if rows in self._preferred:
                preferred = count
        full = full or rows == self._policy.max_batch_size
        if is_busy and not full and (not preferred or self._policy.max_queue_delay_s):
            return 0
        if preferred:
            return preferred
        return count if full or now >= next(iter(group.jobs)).due else 0

    def _take(self, group: _Group, count: int, now: float) -> list[_Job]:
        """Remove the first `count` requests; return those that are not too late."""
        taken = list(islice(group.jobs, count))
        jobs = []
        for job in taken:
            is_late = job.context.deadline is not None and now >= job.context.deadline
            self._remove(job)
            if is_late:
                if not job.response.done():
                    job.response.set_exception(DeadlineExceeded())
            elif not job.response.done():  # done: cancelled in this very turn of the event loop
                jobs.append(job)
        return jobs

    async def _run(self, jobs: list[_Job]) -> None:
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
        except InvalidRequest as error:
            if len(jobs) > 1:
                for job in jobs:
                    if not job.response.done():
                        await self._run([job])
                return
            self._account(jobs, batch, 0)
            _fail(jobs, error)
        except Exception as error:
            self._account(jobs, batch, 0)
            _fail(jobs, error)
        except asyncio.CancelledError:
            if self._is_closed:
                for job in jobs:
                    job.response.cancel()
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
    def _account(jobs: Sequence[_Job], batch: Batch, output_ns: int) -> None:
        """Record in each request how long it took, and in one of them that it counts as the execution in the statistics."""
        for job in jobs:
            timings = job.context.timings
            timings.batched = True
            timings.queue_ns += batch.queue_ns
            timings.input_ns += batch.input_ns
            timings.infer_ns = batch.infer_ns
            timings.output_ns = output_ns
        # One whose caller has left is counted already, so a request that still waits must count as the execution.
        leader = next((job for job in jobs if not job.response.done()), jobs[0])
        leader.context.timings.execution_rows = batch.rows


def _fail(jobs: Sequence[_Job], error: Exception) -> None:
    for job in jobs:
        if not job.response.done():
            job.response.set_exception(error)


def _split(outputs: Tensors, jobs: Sequence[_Job], rows: int) -> list[Any]:
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
