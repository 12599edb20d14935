"""The worker's side of one instance of a Python-backend model: a process, and the messages to and from it."""

from __future__ import annotations

import asyncio
import itertools
import logging
import mmap
import os
import socket
import subprocess
from collections.abc import Callable, Collection, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dynamo.common.errors import Cancelled, DynamoError, EngineError, InvalidRequest, Overloaded
from dynamo.common.process.background import start
from dynamo.common.shared_memory.sharing import SharedMemory
from dynamo.worker.engine.base import Caller, Context
from dynamo.worker.repository.declared.execution import ModelResult
from dynamo.worker.repository.python.call_window import CallWindow
from dynamo.worker.repository.python.codes import to_code, to_error
from dynamo.worker.repository.python.environments import OWN, Interpreter
from dynamo.worker.repository.python.process_memory import ProcessMemory
from dynamo.worker.repository.python.process_requests import to_wire, without_body
from dynamo.worker.repository.scheduling.pipeline import Execution
from dynamo.worker.repository.scheduling.responses import ProcessDied, Rescheduled, Responses
from dynamo.worker.repository.wire import wire
from dynamo.worker.repository.wire.calls import MAX_CALLS, CallMemory, context_of_call, owner_of
from dynamo.worker.repository.wire.link import Link
from dynamo.worker.repository.wire.raw_tensors import RawTensors
from dynamo.worker.traces.trace import Trace

log = logging.getLogger(__name__)
_FINALIZE_S = 30.0
_AHEAD_NS = 2_000_000
"""Executions are sent to a process before it is idle if those that it has take no longer than this together."""
_MOST_AHEAD = 16
_PATIENCE_S = 0.05
"""What a process has not begun is withdrawn if no execution has returned for so long, or for up to twice as long."""
_QUIET_S = 0.01
"""After this time, withdrawn executions are taken back: process and worker have seen what the other wrote into shared words."""


@dataclass(frozen=True, slots=True)
class CallHandlers:
    """Serve the calls and queries of a model, as tasks, which are cancelled when the process ends, and its metrics."""

    call: Callable[[StubProcess, wire.CallModel, Sequence[memoryview], Context], Coroutine[None, None, None]]
    control: Callable[[StubProcess, wire.Control], Coroutine[None, None, None]]
    measure: Callable[[wire.MetricOrder], float]
    """Carry out an order about a metric, and return its value. Raises InvalidRequest."""
    memory: CallMemory
    """What the calls of all models hold."""


@dataclass(frozen=True, slots=True)
class _OpenCall:
    """A call or query of the model."""

    task: asyncio.Task[None]
    requests: set[int]
    """Requests for which it is made, and whose callers have not left; empty from the beginning if it is for none."""


class StubProcess:
    """One process of a model; see `open_stub`. `closed` is set when the process has ended."""

    def __init__(
        self,
        name: str,
        process: subprocess.Popen[bytes],
        connection: socket.socket,
        progress: mmap.mmap,
        handlers: CallHandlers,
        memory: SharedMemory | None,
    ) -> None:
        self.closed = asyncio.Event()
        self._name = name
        self._process = process
        self._shared = progress
        self._progress = memoryview(progress).cast("Q")
        """Words that are shared with the process, see `wire.BEGUN`, until it has ended."""
        self._handlers = handlers
        self._numbers = itertools.count(1)
        self._ready: asyncio.Future[wire.Ready] | None = None
        self._responses: dict[int, Responses] = {}
        """By the number of the request."""
        self._executions: dict[int, Execution] = {}
        """Executions that have not returned, in order, by number."""
        self._usual_ns = 0
        """How long an execution takes, lately."""
        self._is_late = False
        """What it had not begun was withdrawn, and nothing has returned since."""
        self._watch: asyncio.TimerHandle | None = None
        self._on_room: Callable[[], None] = _nothing
        self._on_return: Callable[[Sequence[Execution]], None] = _drop
        self._on_death: Callable[[StubProcess], None] = _drop
        self._calls: dict[int, _OpenCall] = {}
        self._windows: dict[int, CallWindow] = {}
        """Windows of the calls that run, by their numbers."""
        self._memory = None if memory is None else ProcessMemory(memory, self.send)
        self._link = Link(connection, self._take, self._on_end, self._admit)
        self._ending: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        state = f"alive={self.is_alive}, load={self.load}, requests={len(self._responses)}, calls={len(self._calls)}"
        return f"<StubProcess {self.pid} of {self._name}, {state}>"

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return not self.closed.is_set()

    @property
    def has_calls(self) -> bool:
        """Whether the model waits for other models."""
        return bool(self._calls)

    @property
    def load(self) -> int:
        """Executions that have not returned."""
        return len(self._executions)

    @property
    def has_room(self) -> bool:
        """Whether another execution may be sent: the process is idle, or it will be very soon."""
        load = len(self._executions)
        return not self._is_late and (not load or (load < _MOST_AHEAD and 0 < load * self._usual_ns <= _AHEAD_NS))

    def serve(
        self,
        on_room: Callable[[], None],
        on_return: Callable[[Sequence[Execution]], None],
        on_death: Callable[[StubProcess], None],
    ) -> None:
        """Have `on_room` called when an execution has returned, `on_return` with those that come back unbegun, and `on_death`."""
        self._on_room, self._on_return, self._on_death = on_room, on_return, on_death

    # Orders

    async def start(self, file: Path, folder: Path) -> None:
        """Load the model's code. Raises EngineError with the model's error."""
        memory = None if self._memory is None else self._memory.settings
        await self._order(wire.Start(str(file), (str(file.parent), str(folder)), memory))

    async def complete(self, config: str) -> str:
        """Return the configuration as completed by `auto_complete_config`; empty if the model has no such method."""
        return (await self._order(wire.Complete(config))).config

    async def initialize(self, arguments: dict[str, str], *, decoupled: bool) -> None:
        await self._order(wire.Initialize(arguments, decoupled))

    async def close(self) -> None:
        """Let the model finalize, within a time limit, and end the process."""
        if self.is_alive:
            try:
                async with asyncio.timeout(_FINALIZE_S):
                    await self._order(wire.Finalize())
            except (DynamoError, TimeoutError) as error:
                log.warning("model '%s' did not finalize: %s", self._name, str(error) or "it took too long")
        await self.end()

    async def end(self) -> None:
        """End the process now."""
        self._link.close()
        self._process.kill()  # nothing happens if it has ended
        await asyncio.to_thread(self._process.wait)
        if self._ending is not None:
            await self._ending
        self._fail_all("was ended")

    async def _order(self, order: wire.Message) -> wire.Ready:
        if not self.is_alive:
            raise EngineError(f"the process of model '{self._name}' has ended")
        future: asyncio.Future[wire.Ready] = asyncio.get_running_loop().create_future()
        self._ready = future
        self.send(order)
        ready = await future
        if ready.error:
            raise EngineError(ready.error)
        return ready

    # Requests

    def execute(self, execution: Execution) -> None:
        """Send requests for one call of `execute`."""
        heads: list[wire.InferenceHead] = []
        buffers: list[wire.Buffer] = []
        is_placed = False
        for request, responses in zip(execution.requests, execution.responses, strict=True):
            head, raws = to_wire(next(self._numbers), request, self._name, self._memory, has_room=not execution.is_streamed)
            heads.append(head)
            buffers += raws
            is_placed = is_placed or len(raws) < len(head.inputs)
            self._responses[head.number] = responses
        execution.number = next(self._numbers)
        execution.numbers = [head.number for head in heads]
        self._executions[execution.number] = execution
        if self._memory is not None and is_placed:
            self._memory.keep(execution.number, [request.inputs for request in execution.requests])
        self.send(wire.Execute(execution.number, tuple(heads), execution.is_retry), buffers)
        if self._watch is None:
            self._watch_oldest()

    def _watch_oldest(self) -> None:
        oldest = next(iter(self._executions))
        self._watch = asyncio.get_running_loop().call_later(_PATIENCE_S, self._check_oldest, oldest)

    def _check_oldest(self, oldest: int) -> None:
        """Withdraw what has not begun if `oldest` has not returned since it was the oldest execution."""
        self._watch = None
        if not self.is_alive or not self._executions:
            return
        if oldest not in self._executions:
            return self._watch_oldest()
        self._is_late = True
        newest = next(reversed(self._executions))
        self._progress[wire.WITHDRAWN] = newest
        asyncio.get_running_loop().call_later(_QUIET_S, self._take_back, newest)

    def _take_back(self, newest: int) -> None:
        """Return the executions up to `newest` that have not begun. They do not begin any more."""
        if self.is_alive:
            begun = self._progress[wire.BEGUN]
            self._return_unbegun([execution for execution in self._executions.values() if begun < execution.number <= newest])

    def _return_unbegun(self, unbegun: Sequence[Execution]) -> None:
        for execution in unbegun:
            del self._executions[execution.number]
            if self._memory is not None:
                self._memory.release([execution.number])
                self._memory.take_back(execution.numbers)
        wanted = [execution for execution in unbegun if self._is_wanted(execution)]
        for execution in unbegun:
            for number in execution.numbers:
                self._responses.pop(number, None)
            if execution not in wanted:
                execution.end()
        self._on_return(wanted)

    def _is_wanted(self, execution: Execution) -> bool:
        """Return whether the caller of any request of it still waits for responses."""
        return not self._responses.keys().isdisjoint(execution.numbers)

    def forget(self, numbers: Sequence[int]) -> None:
        """Drop the responses to requests of an execution. The model is notified of those that have not ended."""
        for number in numbers:
            responses = self._responses.get(number)
            if responses is not None:
                responses.close()
                self._cancel(number)

    def _cancel(self, number: int) -> None:
        """Notify the model that responses to a request are not wanted, and cancel the calls that were made for it alone."""
        del self._responses[number]
        self.send(wire.CancelRequest(number))
        for call in self._calls.values():
            if number in call.requests:
                call.requests.remove(number)
                if not call.requests:
                    call.task.cancel()

    def grant(self, number: int, total: int) -> None:
        """Let the model send `total` responses to a request, counted from the first."""
        if number in self._responses:
            self.send(wire.ResponseCredit(number, total))

    def trace_of(self, number: int) -> Trace | None:
        """Return the trace of an open request; None if it has none."""
        responses = self._responses.get(number)
        return None if responses is None else responses.context.trace

    def send(self, message: wire.Message, buffers: Sequence[wire.Buffer] = ()) -> None:
        self._link.send(wire.encode(message, buffers))

    async def send_in_time(self, message: wire.Message, buffers: Sequence[wire.Buffer] = ()) -> None:
        """Send, no faster than the process reads."""
        self.send(message, buffers)
        await self._link.ready()

    @contextmanager
    def call_window(self, number: int) -> Iterator[CallWindow]:
        """Give the window of a call, which grows as the model reads."""
        window = self._windows[number] = CallWindow()
        try:
            yield window
        finally:
            del self._windows[number]

    # Reading

    def _on_end(self, why: str) -> None:
        self._ending = start(self._end_after_socket(why), f"end of a process of {self._name}")

    async def _end_after_socket(self, why: str) -> None:
        if why:
            self._process.kill()
        status = await asyncio.to_thread(self._process.wait)
        self._fail_all(why or f"has ended with status {status}")

    def _admit(self, message: wire.Message, size: int) -> tuple[wire.Message, memoryview | None]:
        """Return memory for the body of a message; None, and what takes the place of the message, if calls hold too much."""
        if not self._is_of_call(message):
            return wire.admit_all(message, size)
        try:
            return message, self._handlers.memory.allocate(size, wire.tensors_of(message))
        except Overloaded as error:
            return without_body(message, error), None

    def _is_of_call(self, message: wire.Message) -> bool:
        match message:
            case wire.CallModel():
                return True
            case wire.Response():
                return self._is_called(message)
            case wire.Done():
                return any(map(self._is_called, message.responses))
            case _:
                return False

    def _is_called(self, response: wire.Response) -> bool:
        """Return whether a response is one to another model."""
        responses = self._responses.get(response.number)
        return responses is not None and bool(responses.context.callers)

    def _take(self, message: wire.Message, raws: list[memoryview]) -> None:
        match message:
            case wire.Response():
                self._deliver(message, raws)
            case wire.Done():
                self._return(message, raws)
            case wire.Ready():
                if self._ready is not None and not self._ready.done():
                    self._ready.set_result(message)
            case wire.CallModel():
                self._begin_call(message, raws)
            case wire.Control():
                self._begin(message.number, self._handlers.control(self, message))
            case wire.MetricOrder():
                self._measure(message)
            case wire.CancelRequest():
                call = self._calls.get(message.number)
                if call is not None:
                    call.task.cancel()
            case wire.ResponseCredit():
                window = self._windows.get(message.number)
                if window is not None:
                    window.grow(message.total)
            case wire.Released() if self._memory is not None:
                self._memory.release(message.executions)
            case wire.OpenArena() if self._memory is not None:
                self._memory.open_outputs(message.arena)
            case wire.ArenaOpened() if self._memory is not None:
                self._memory.opened(message.arena)
            case wire.Log():
                log.log(message.level, "%s: %s", self._name, message.text)
            case _:
                raise ValueError(f"unexpected message {type(message).__name__}")

    def _measure(self, order: wire.MetricOrder) -> None:
        try:
            response = wire.Response(number=order.number, parameters={"value": self._handlers.measure(order)})
        except InvalidRequest as error:
            response = wire.Response(number=order.number, error=str(error))
        if order.number:
            self.send(response)
        elif response.error is not None:
            log.warning("%s: a metric cannot be changed: %s", self._name, response.error)

    def _return(self, done: wire.Done, raws: Sequence[memoryview]) -> None:
        self._is_late = False
        execution = self._executions.get(done.number)
        if execution is not None and done.is_withdrawn:
            return self._return_unbegun([execution])
        if execution is not None:
            del self._executions[done.number]
            execution.end()
            execution.infer_ns = done.infer_ns
            if self._memory is not None and not done.infer_ns:
                self._memory.take_back(execution.numbers)
        if done.infer_ns:
            self._usual_ns += (done.infer_ns - self._usual_ns) // (8 if self._usual_ns else 1)
        if self._memory is not None:
            self._memory.take_back(done.rescheduled)  # each comes back under a new number, with room of its own
        for number in done.rescheduled:
            rescheduled = self._responses.pop(number, None)
            if rescheduled is not None:
                rescheduled.add(Rescheduled("the model released the request to get it again"))
        position = 0
        for response in done.responses:
            count = len(response.outputs)
            self._deliver(response, raws[position : position + count])
            position += count
        self._on_room()

    def _deliver(self, head: wire.Response, raws: Sequence[memoryview]) -> None:
        responses = self._responses.get(head.number)
        outputs = self._outputs_of(head, raws)  # also for a caller that has left: reading them releases their memory
        if responses is None:
            return
        if responses.is_full and not head.final:
            responses.add(Overloaded(f"the caller reads the responses of model '{self._name}' too slowly"))
            return self._cancel(head.number)
        if head.error is not None:
            responses.add(to_error(head.error, head.code))
        elif not head.only_ends:
            responses.add(ModelResult(outputs, head.parameters, head.final))
        if head.final:
            del self._responses[head.number]
            responses.add(None)

    def _outputs_of(self, head: wire.Response, raws: Sequence[memoryview]) -> RawTensors:
        if self._memory is not None:
            raws = self._memory.views(head.number, head.outputs, raws)
            if head.final:
                self._memory.responded(head.number, head.outputs)
        return RawTensors(head.outputs, raws)

    def _begin_call(self, message: wire.CallModel, raws: Sequence[memoryview]) -> None:
        call, requests = message.request, set(message.requests)
        if message.refusal:
            return self._refuse(call.number, Overloaded(message.refusal))
        outer = [self._responses[number].context for number in requests if number in self._responses]
        if requests and not outer:
            return self._refuse(call.number, Cancelled("the request was cancelled"))
        if len(self._calls) >= MAX_CALLS:
            most = f"model '{self._name}' has {MAX_CALLS} calls of other models in one process, which is the most at once"
            return self._refuse(call.number, Overloaded(most))
        caller = Caller(self._name, self if message.is_awaited else None)
        parents = [self._responses[number].context for number in message.parents if number in self._responses]
        owner = owner_of(parents if message.parents else outer) if requests or message.parents else ""
        context = context_of_call(call.request_id, call.version, outer, caller, owner)
        context.trace = self.trace_of(call.trace)
        self._begin(call.number, self._handlers.call(self, message, raws, context), requests)

    def _refuse(self, call: int, error: DynamoError) -> None:
        self.send(wire.Response(number=call, error=str(error), code=to_code(error)))

    def _begin(self, number: int, work: Coroutine[None, None, None], requests: Collection[int] = ()) -> None:
        def ended(task: asyncio.Task[None]) -> None:
            del self._calls[number]
            if task.cancelled():  # perhaps before it had begun; the model waits for it unless it cancelled it
                self._refuse(number, Cancelled("the request was cancelled"))

        task = start(work, f"a call of model '{self._name}'")
        self._calls[number] = _OpenCall(task, set(requests))
        task.add_done_callback(ended)

    def _fail_all(self, why: str) -> None:
        """The process has ended: return executions that have not begun, and fail the other requests."""
        if self.closed.is_set():
            return
        self.closed.set()
        text = f"the process of model '{self._name}' {why}"
        unbegun = self._take_unbegun()
        for responses in self._responses.values():
            responses.add(ProcessDied(text))
        self._responses.clear()
        for execution in self._executions.values():
            if execution not in unbegun:
                execution.end()
        self._executions.clear()
        if self._memory is not None:
            self._memory.close()
        self._progress.release()
        self._shared.close()  # and its descriptor
        if self._ready is not None and not self._ready.done():
            self._ready.set_result(wire.Ready(error=text))
        for call in self._calls.values():
            call.task.cancel()
        if self._watch is not None:
            self._watch.cancel()
        on_death, on_return = self._on_death, self._on_return
        self.serve(_nothing, _drop, _drop)
        on_death(self)
        on_return(unbegun)

    def _take_unbegun(self) -> list[Execution]:
        """Return the executions that have not begun, without the first if no other request can have ended the process."""
        newest = self._progress[wire.BEGUN]
        unbegun = [execution for number, execution in self._executions.items() if number > newest]
        has_begun = len(unbegun) < len(self._executions)
        unbegun = [execution for execution in unbegun if self._is_wanted(execution)]
        numbers = {number for execution in unbegun for number in execution.numbers}
        if not has_begun and numbers.issuperset(self._responses):
            for number in unbegun.pop(0).numbers if unbegun else ():
                numbers.discard(number)
        for number in numbers:
            self._responses.pop(number, None)
        return unbegun


def _nothing() -> None:
    """Stand in for `on_room` until `serve` sets it."""


def _drop(_: object) -> None:
    """Stand in for the others: the process has no executions then."""


async def open_stub(
    name: str, handlers: CallHandlers, memory: SharedMemory | None = None, interpreter: Interpreter = OWN
) -> StubProcess:
    """Start a process for one instance of the model `name`. The model is not loaded yet.

    Large tensors of frontends on this host, and large outputs, lie in `memory` if that is given.
    """
    ours, theirs = socket.socketpair()
    shared = os.memfd_create("progress")
    try:
        os.ftruncate(shared, mmap.PAGESIZE)
        progress = mmap.mmap(shared, mmap.PAGESIZE)
        passed = (theirs.fileno(), shared)
        # Not by asyncio, whose loop forks: the fork handlers of gRPC crash a process that has other threads. Popen does not.
        process = subprocess.Popen(  # noqa: ASYNC220, S603
            [*interpreter.command, *map(str, passed)],
            env=interpreter.variables,
            stdin=subprocess.DEVNULL,
            pass_fds=passed,
            start_new_session=True,  # Ctrl-C is for the worker, which lets requests finish first
        )
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
        os.close(shared)
    return StubProcess(name, process, ours, progress, handlers, memory)
