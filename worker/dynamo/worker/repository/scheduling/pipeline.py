"""The requests of one model on their way through its processes.

A process gets its next executions before it is idle, as many as it needs to stay busy for about two milliseconds. Requests of a
model that takes longer wait here for the first process that is idle. When one execution takes much longer than usual, those
behind it are withdrawn and wait here again. A process that dies fails only the executions that have begun; the others go to
another process.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from time import perf_counter_ns
from typing import TYPE_CHECKING

from dynamo.common.errors import Unavailable
from dynamo.worker.engine.base import Context
from dynamo.worker.repository.declared.execution import ModelRequest
from dynamo.worker.repository.scheduling.responses import Responses, ResponseStream, SingleResponse, Unread

if TYPE_CHECKING:
    from dynamo.worker.repository.python.stub_process import StubProcess


class NoProcess(Unavailable):
    """No process of the model is alive. The request has not begun."""


class Execution:
    """Requests for one call of `execute`, until their responses are read and it has returned."""

    __slots__ = (
        "_at_end",
        "has_ended",
        "infer_ns",
        "is_retry",
        "is_streamed",
        "number",
        "numbers",
        "process",
        "requests",
        "responses",
        "sent_ns",
    )

    def __init__(self, requests: Sequence[ModelRequest], *, is_retry: bool = False) -> None:
        self.requests = list(requests)
        self.is_retry = is_retry
        self.is_streamed = False
        """Whether there may be several responses to each request."""
        self._at_end: tuple[Callable[[], None], ...] = ()
        self.has_ended = False
        """Whether no process runs it or will run it; responses may come later."""
        self.responses: list[Responses] = []
        self.process: StubProcess | None = None
        """None: it waits for one."""
        self.number = 0
        self.numbers: list[int] = []
        """Numbers of the requests in the process; empty before one has them."""
        self.sent_ns = 0
        self.infer_ns = 0
        """How long `execute` ran; 0 if it has not returned."""

    def at_end(self, callback: Callable[[], None]) -> None:
        """Call back once, when no process runs it or will run it; that may be long after its callers have left."""
        self._at_end += (callback,)

    def add_stream(self, context: Context, unread: Unread, is_awaited: Callable[[], bool]) -> ResponseStream:
        """Return where the responses to the next request go. `is_awaited`: whether others wait for the end of this execution."""

        def grant(total: int) -> None:
            if self.process is not None:
                self.process.grant(self.numbers[self.responses.index(stream)], total)

        stream = ResponseStream(grant, context, unread, is_awaited)
        self.responses.append(stream)
        return stream

    def drop(self, index: int) -> None:
        """Forget a request, whose caller has left."""
        del self.requests[index]
        del self.responses[index]
        del self.numbers[index : index + 1]

    def end(self) -> None:
        """Note that no process runs it or will run it."""
        self.has_ended = True
        callbacks, self._at_end = self._at_end, ()
        for callback in callbacks:
            callback()

    def fail(self, error: Unavailable) -> None:
        for responses in self.responses:
            responses.add(error)


class Pipeline:
    """Gives executions to the processes of one model."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._loop = asyncio.get_running_loop()
        self.queued: Callable[[], int] = lambda: self.waiting
        """Returns how many requests wait for the model, here or before."""
        self.has_slots = False
        """Whether some of these may wait until the responses of another one have ended."""
        self._unread = Unread()
        self._waiting: OrderedDict[Execution, None] = OrderedDict()
        self._processes: list[StubProcess] = []
        self._has_process = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Pipeline of {self._model}, waiting={len(self._waiting)}, processes={self._processes}>"

    @property
    def processes(self) -> Sequence[StubProcess]:
        """The processes that are alive."""
        return tuple(self._processes)

    @property
    def waiting(self) -> int:
        """Requests that no process has yet."""
        return sum(len(execution.requests) for execution in tuple(self._waiting))

    async def has_process(self) -> None:
        """Return when a process is alive."""
        await self._has_process.wait()

    def add(self, process: StubProcess) -> None:
        """Use a process that is ready. Calls `remove` when it ends."""
        if process.is_alive:
            self._processes.append(process)
            self._has_process.set()
            process.serve(self._give, self._take_back, self._remove)
            self._give()

    def of_one_response(
        self, requests: Sequence[ModelRequest], *, is_retry: bool = False
    ) -> tuple[Execution, list[SingleResponse]]:
        """Return an execution, to be submitted, of requests with one response each."""
        execution = Execution(requests, is_retry=is_retry)
        responses = [SingleResponse(self._model, self._loop, request.context) for request in requests]
        execution.responses += responses
        return execution, responses

    def of_many_responses(
        self, requests: Sequence[ModelRequest], *, is_retry: bool = False
    ) -> tuple[Execution, list[ResponseStream]]:
        """Return an execution, to be submitted, of requests with any number of responses each."""
        execution = Execution(requests, is_retry=is_retry)
        execution.is_streamed = True

        def is_awaited() -> bool:
            return (self.has_slots or not execution.has_ended) and self.queued() > 0

        return execution, [execution.add_stream(request.context, self._unread, is_awaited) for request in requests]

    def submit(self, execution: Execution, give_back: Callable[[], None]) -> None:
        """Run an execution as soon as a process has room. Raises NoProcess. `give_back` is called at its end, in any case."""
        execution.at_end(give_back)
        if not self._processes:
            execution.end()
            raise self._no_process()
        self._waiting[execution] = None
        self._give()

    def leave(self, execution: Execution) -> None:
        """The caller wants no more responses. An execution that waits here is dropped; otherwise the model is notified.

        One whose process waits for other models ends here: they may need what it holds until its end.
        """
        for responses in execution.responses:
            responses.close()
        if execution.process is not None:
            execution.process.forget(execution.numbers)
            if not execution.process.has_calls:
                return
        else:
            self._waiting.pop(execution, None)
        execution.end()

    def leave_one(self, execution: Execution, stream: ResponseStream) -> None:
        """The caller of one request wants no more responses. Those of the others go on."""
        if len(execution.responses) == 1:
            return self.leave(execution)
        stream.close()
        index = execution.responses.index(stream)
        if execution.process is not None:
            execution.process.forget(execution.numbers[index : index + 1])
        execution.drop(index)

    def _give(self) -> None:
        while self._waiting:
            process = self._least_loaded()
            if process is None:
                return
            execution, _ = self._waiting.popitem(last=False)
            execution.process = process
            execution.sent_ns = perf_counter_ns()
            process.execute(execution)

    def _least_loaded(self) -> StubProcess | None:
        """Return the process with the least executions, of those that have room for one more."""
        best: StubProcess | None = None
        for process in self._processes:
            if process.has_room and (best is None or process.load < best.load):
                best = process
        return best

    def _take_back(self, unbegun: Sequence[Execution]) -> None:
        """Give executions that a process has not begun to another one, before those that wait."""
        for execution in reversed(unbegun):
            execution.process = None
            self._waiting[execution] = None
            self._waiting.move_to_end(execution, last=False)
        if self._processes:
            return self._give()
        while self._waiting:
            self._waiting.popitem()[0].fail(self._no_process())

    def _remove(self, process: StubProcess) -> None:
        self._processes.remove(process)
        if not self._processes:
            self._has_process.clear()

    def _no_process(self) -> NoProcess:
        return NoProcess(f"the processes of model '{self._model}' have died and are being started again")
