"""The process of one instance of a Python-backend model.

`python -m dynamo.worker.repository.stub SOCKET PROGRESS`, two descriptors.

The main thread calls the model and reads the socket in between, so that a request passes through one thread only. While an
`execute` takes long, or waits for another model, the thread `reader` takes its place at the socket: cancellations, credit and
responses of other models arrive then. The process ends when the worker does: the socket is closed then.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import itertools
import json
import mmap
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from types import ModuleType
from typing import Any

import msgspec

from dynamo.worker.repository import pb_utils, wire
from dynamo.worker.repository.pb_utils import CallInProgress, InferenceRequest, InferenceResponse, InferenceResponseSender, Tensor
from dynamo.worker.repository.stub_memory import StubMemory

_TICK_S = 0.02
"""The reader thread takes over from an execution that lasts this long, or up to twice as long."""
_HOLD_NS = 300_000
"""While more executions wait, responses of short ones are collected for this long and sent in one system call."""
_MAX_HELD_BYTES = 16 * 1024
"""A larger response is sent at once, with those before it."""
_SWEEP_S = 1.0
_IDLE_TICKS = 50
"""After so many ticks without an execution the reader thread sleeps until the next."""


@dataclass(frozen=True, slots=True)
class _Executed:
    """What code that an `execute` runs needs to know of it; no more, since tasks of the model keep it."""

    senders: Sequence[InferenceResponseSender]
    """The senders of its requests."""
    occupies_process: bool = True
    """No other one begins before it has returned."""


_EXECUTED: ContextVar[_Executed | None] = ContextVar("executed", default=None)
"""None in a thread that the model started. It cannot be passed: the code in between is the model's."""


@dataclass(slots=True)
class _Window:
    """How many responses to a request were sent, and how many may be sent in total."""

    sent: int = 0
    allowed: int = wire.RESPONSE_WINDOW


class Stub:
    """The model's end of the socket. Any thread may send."""

    def __init__(self, connection: socket.socket) -> None:
        self.model_folder = ""
        self.instance_name = ""
        self._connection = connection
        self._readable = select.poll()
        """Waits for a message. A receiving call would also wake up whenever the worker has read what was sent."""
        self._readable.register(connection, select.POLLIN)
        self._sending = threading.Lock()
        self._held: list[wire.Buffer] = []
        """Encoded messages of `send_soon`."""
        self._held_since_ns = 0
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._calls: dict[int, CallInProgress] = {}
        self._pending: dict[int, Future[wire.Response]] = {}
        self._open: set[int] = set()
        """The requests that have not ended."""
        self._windows: dict[int, _Window] = {}
        """Of those that have sent a response through a sender, or have got credit."""
        self._cancelled: set[int] = set()
        self._credit = threading.Condition(self._lock)
        """Notified when a window grows or a request is cancelled."""
        self._messages = wire.MessageReader()
        self._memory: StubMemory | None = None
        self._released: deque[int] = deque()
        """Executions whose inputs in shared memory are not read any more, and of which the worker was not notified."""
        self._is_released_beside = False
        """Another thread than the main thread has added to them."""
        self._main = threading.get_ident()
        self._orders: deque[tuple[wire.Message, list[memoryview]]] = deque()
        """Messages for the main thread."""
        self._reading = threading.Lock()
        """Held by the thread that reads the socket."""
        self._wakes: SimpleQueue[bool] = SimpleQueue()
        """Wakes the reader thread: True if it has to read at once."""
        self._turns: SimpleQueue[None] = SimpleQueue()
        """Wakes the main thread, which waits for the reader thread."""
        self._main_waits = False
        self._reader_sleeps = True
        self._begun = 0
        """How many times the main thread has begun to execute."""
        self._is_executing = False

    # Channel

    def send(self, message: wire.Message, buffers: Sequence[wire.Buffer] = ()) -> None:
        pieces = wire.encode(message, buffers)
        with self._sending:
            self._held += pieces
            self._send_held()

    def send_soon(self, message: wire.Message, buffers: Sequence[wire.Buffer] = ()) -> None:
        """Send together with the responses of the next executions, if these wait and are short. For the main thread."""
        pieces = wire.encode(message, buffers)
        with self._sending:
            if sum(map(len, pieces)) > _MAX_HELD_BYTES:
                self._held += pieces
                return self._send_held()
            if not self._held:
                self._held_since_ns = time.perf_counter_ns()
            self._held.append(b"".join(pieces))  # a model may write to its arrays again

    def flush(self) -> None:
        with self._sending:
            self._send_held()

    def _send_held(self) -> None:
        pieces, self._held = self._held, []
        if self._released:
            executions = []
            while self._released:
                executions.append(self._released.popleft())
            pieces += wire.encode(wire.Released(tuple(executions)))
        self._send_all(pieces)

    def _send_all(self, pieces: list[wire.Buffer]) -> None:
        for first in range(0, len(pieces), wire.MAX_PIECES):
            some = pieces[first : first + wire.MAX_PIECES]
            sent = self._connection.sendmsg(some)
            for piece in some:
                if sent < len(piece):
                    self._connection.sendall(memoryview(piece)[sent:])
                sent = max(0, sent - len(piece))

    def over(self, number: int) -> None:
        with self._lock:
            self._open.discard(number)
            self._cancelled.discard(number)
            if self._windows.pop(number, None) is not None:
                self._credit.notify_all()
        if self._memory is not None:
            self._memory.forget_room(number)

    def is_cancelled(self, number: int) -> bool:
        return number in self._cancelled

    def is_unwanted(self, order: wire.Execute) -> bool:
        """Return whether all requests were cancelled."""
        return bool(self._cancelled) and all(head.number in self._cancelled for head in order.requests)

    def use_memory(self, settings: wire.Memory) -> None:
        """Offer the worker outputs in shared memory, and read inputs there."""
        self._memory = StubMemory(settings, self.released)
        if token := self._memory.output_arena():
            self.send(wire.OpenArena(token))
        if self._memory.open_room():
            self.send(wire.ArenaOpened(settings.reader))

    def lend(self, number: int, head: wire.TensorHead, raw: wire.Buffer) -> wire.TensorHead:
        return head if self._memory is None else self._memory.lend(number, head, raw)

    def requests_of(
        self,
        order: wire.Execute,
        raws: Sequence[memoryview],
        senders: Sequence[InferenceResponseSender],
        bf16: Collection[str] = (),
    ) -> list[InferenceRequest]:
        """Return the requests as arguments of `execute`. `bf16`: the inputs that are float32 here, and BF16 outside."""
        shared: dict[tuple[int, str], memoryview] = {}
        if self._memory is not None and wire.has_places(order):
            shared = self._memory.take(order.number, order.requests)
        requests, position = [], 0
        for head, sender in zip(order.requests, senders, strict=True):
            those = raws[position : position + len(head.inputs)]
            if shared:
                those = [shared.get((head.number, tensor.name), raw) for tensor, raw in zip(head.inputs, those, strict=True)]
            requests.append(InferenceRequest.arrived(head, _to_tensors(head.inputs, those, bf16), sender))
            position += len(head.inputs)
        return requests

    def released(self, execution: int) -> None:
        """Have the main thread, with what it sends next and before it waits, or the reader thread notify the worker."""
        self._released.append(execution)
        if threading.get_ident() != self._main:
            self._is_released_beside = True
            self._wakes.put(False)

    def wait_for_credit(self, number: int) -> None:
        """Return when the caller of a request has room for a response, or has left. Does not block an event loop."""
        with self._credit:
            if number not in self._open:
                return
            window = self._windows.setdefault(number, _Window())
            if window.sent >= window.allowed and not _in_event_loop():
                self.read_beside()
                self._credit.wait_for(
                    lambda: window.sent < window.allowed or number in self._cancelled or number not in self._open
                )
            window.sent += 1

    def call(self, head: wire.RequestHead, inputs: Sequence[Tensor], *, decoupled: bool) -> CallInProgress:
        number = next(self._numbers)

        def cancel() -> None:
            self._calls.pop(number, None)  # without the lock: garbage collection may run this while the thread holds it
            self.send(wire.CancelRequest(number))

        def grant(total: int) -> None:
            self.send(wire.ResponseCredit(number, total))

        packed = [wire.pack(tensor.name(), tensor.as_numpy()) for tensor in inputs]
        progress = CallInProgress(cancel, grant, decoupled=decoupled)
        executed = _EXECUTED.get()
        with self._lock:
            self._calls[number] = progress
            served = self._open if executed is None else self._open.intersection([sender.number for sender in executed.senders])
            requests = tuple(served)
        head = msgspec.structs.replace(head, number=number, inputs=tuple(head for head, _ in packed))
        is_awaited = executed is not None and executed.occupies_process
        self.send(wire.CallModel(head, decoupled, requests, is_awaited), [raw for _, raw in packed])
        self.read_beside()
        return progress

    def control(self, control: wire.Control | wire.MetricOrder) -> wire.Response:
        number = next(self._numbers)
        future: Future[wire.Response] = Future()
        with self._lock:
            self._pending[number] = future
        self.send(msgspec.structs.replace(control, number=number))
        self.read_beside()
        return future.result()

    # Reading

    def next_order(self) -> tuple[wire.Message, list[memoryview]]:
        """Return the next message for the main thread, which reads the socket itself unless the reader thread does."""
        if self._orders:
            if self._held and time.perf_counter_ns() - self._held_since_ns > _HOLD_NS:
                self.flush()
        elif self._held or self._released:
            self.flush()
        while not self._orders:
            if self._reading.acquire(blocking=False):
                try:
                    self._receive()
                finally:
                    self._reading.release()
            else:
                self._main_waits = True
                if not self._orders:
                    self._turns.get()
                self._main_waits = False
        return self._orders.popleft()

    def order_at_hand(self) -> tuple[wire.Message, list[memoryview]] | None:
        """Return the next message for the main thread if it has come."""
        if not self._orders and self._reading.acquire(blocking=False):
            try:
                if self._readable.poll(0):
                    self._receive()
            finally:
                self._reading.release()
        if self._orders:
            return self._orders.popleft()
        self.flush()
        return None

    def begin_execution(self) -> None:
        """The main thread does not read until `end_execution`; the reader thread does if that takes long."""
        self._begun += 1
        self._is_executing = True
        if self._reader_sleeps:
            self._reader_sleeps = False
            self._wakes.put(False)

    def end_execution(self) -> None:
        self._is_executing = False

    def read_beside(self) -> None:
        """Have the reader thread read while the main thread executes, because a thread of the model waits for a message."""
        if self._is_executing and not self._reading.locked():
            self._wakes.put(True)

    def read_for_main(self) -> None:
        """Read the socket whenever an execution takes long. Runs in the reader thread, for ever."""
        begun, idle_ticks, sweep_at = 0, 0, 0.0
        while True:
            try:
                is_urgent = self._wakes.get(timeout=self._pause_s())
            except Empty:
                is_urgent = False
            if self._is_released_beside:
                self._is_released_beside = False
                self.flush()
            if self._memory is not None and time.monotonic() >= sweep_at:
                self._memory.sweep()
                sweep_at = time.monotonic() + _SWEEP_S
            idle_ticks = idle_ticks + 1 if begun == self._begun and not self._is_executing else 0
            if self._is_executing and (is_urgent or begun == self._begun):
                self.flush()
                self._read_until_main_waits()
            elif idle_ticks > _IDLE_TICKS:
                self._reader_sleeps = True
            begun = self._begun

    def _pause_s(self) -> float | None:
        """Return how long the reader thread waits for something to do."""
        if not self._reader_sleeps:
            return _TICK_S
        return None if self._memory is None or self._memory.is_idle else _SWEEP_S

    def _read_until_main_waits(self) -> None:
        if not self._reading.acquire(blocking=False):
            return  # the main thread reads again
        try:
            while not self._main_waits:
                self._receive()
        finally:
            self._reading.release()
        self._turns.put(None)

    def _receive(self) -> None:
        """Read from the socket once. Ends the process, whatever the model is doing, if the worker has ended."""
        try:
            self._readable.poll()
            count = self._connection.recv_into(self._messages.space())
        except OSError:
            count = 0
        if not count:
            if self._memory is not None:
                self._memory.remove()
            os._exit(0)
        try:
            for message, raws in self._messages.advance(count):
                self._take(message, raws)
        except BaseException:
            traceback.print_exc()
            os._exit(1)

    def _take(self, message: wire.Message, raws: list[memoryview]) -> None:
        match message:
            case wire.Execute():
                with self._lock:
                    for head in message.requests:
                        self._open.add(head.number)
                        if head.room is not None and self._memory is not None:
                            self._memory.offer_room(head.number, head.room)
                self._orders.append((message, raws))
            case wire.CancelRequest():
                with self._lock:
                    if message.number in self._open:
                        self._cancelled.add(message.number)
                        self._credit.notify_all()
            case wire.ResponseCredit():
                with self._lock:
                    if message.number in self._open:
                        window = self._windows.setdefault(message.number, _Window())
                        window.allowed = max(window.allowed, message.total)
                        self._credit.notify_all()
            case wire.Response():
                self._deliver(message, raws)
            case wire.OpenArena():
                if self._memory is not None and self._memory.open(message.arena):
                    self.send(wire.ArenaOpened(message.arena))
            case wire.ArenaOpened():
                if self._memory is not None:
                    self._memory.outputs_are_read()
            case _:
                self._orders.append((message, raws))

    def _deliver(self, head: wire.Response, raws: list[memoryview]) -> None:
        with self._lock:
            future = self._pending.pop(head.number, None)
            call = self._calls.pop(head.number, None) if head.final else self._calls.get(head.number)
        if future is not None:
            future.set_result(head)
        elif call is not None:
            call.add(head, _to_tensors(head.outputs, raws))


def _to_tensors(heads: Sequence[wire.TensorHead], raws: Sequence[memoryview], bf16: Collection[str] = ()) -> list[Tensor]:
    return [
        Tensor.received(head.name, wire.unpack(head, raw), is_bf16=head.name in bf16)
        for head, raw in zip(heads, raws, strict=True)
    ]


class _WrongReturn(pb_utils.TritonModelException):
    """What `execute` returned is not what was expected."""


class ModelProcess:
    """Carries out the worker's messages on the main thread."""

    def __init__(self, stub: Stub, progress: memoryview) -> None:
        """`progress`: words that are shared with the worker, see `wire.BEGUN`."""
        self._stub = stub
        self._progress = progress
        self._class: Any = None
        self._model: Any = None
        self._name = ""
        """Of the instance."""
        self._outputs: Sequence[str] = ()
        """The names of all outputs of the model."""
        self._bf16: Collection[str] = ()
        """The names of its BF16 inputs."""
        self._decoupled = False
        self._is_iterative = False
        """The worker reschedules requests: they belong to iterative sequences."""
        self._rescheduled: deque[list[InferenceRequest]] = deque()
        """Requests for which `execute` is called again."""
        self._loop: asyncio.AbstractEventLoop | None = None
        """Runs `async` executes; created for the first one."""

    def run(self) -> None:
        while True:
            if self._rescheduled:
                self._execute_again(self._rescheduled.popleft())
            following = self._stub.order_at_hand() if self._rescheduled else self._stub.next_order()
            if following is None:
                continue
            order, raws = following
            match order:
                case wire.Execute():
                    self._execute(order, raws)
                case wire.Start():
                    self._report(partial(self._start, order))
                case wire.Complete():
                    self._report(partial(self._complete, order.config))
                case wire.Initialize():
                    self._report(partial(self._initialize, order))
                case wire.Finalize():
                    self._report(self._finalize)
                case _:
                    raise RuntimeError(f"the worker sent a {type(order).__name__}")

    def _report(self, step: Callable[[], str | None]) -> None:
        self._stub.begin_execution()  # the model may call other models here, too
        try:
            ready = wire.Ready(config=step() or "")
        except BaseException as error:
            traceback.print_exc()
            ready = wire.Ready(error=_text(error))
        finally:
            self._stub.end_execution()
        self._stub.send(ready)

    def _start(self, order: wire.Start) -> None:
        if order.memory is not None:
            self._stub.use_memory(order.memory)
        self._stub.model_folder = os.path.dirname(order.file)
        sys.path += order.paths
        module = _import(order.file, order.paths[-1])
        self._class = getattr(module, "TritonPythonModel", None)
        if self._class is None:
            raise ImportError(f"{order.file} has no class TritonPythonModel")
        if not callable(getattr(self._class, "execute", None)):
            raise ImportError(f"TritonPythonModel of {order.file} has no method execute")

    def _complete(self, config: str) -> str:
        hook = getattr(self._class, "auto_complete_config", None)
        if hook is None:
            return ""
        config_before = pb_utils.ModelConfig(config)
        completed = hook(config_before)
        return msgspec.json.encode((completed if completed is not None else config_before).as_dict()).decode()

    def _initialize(self, order: wire.Initialize) -> None:
        config = json.loads(order.arguments["model_config"])
        self._name = self._stub.instance_name = order.arguments["model_instance_name"]
        self._outputs = [output["name"] for output in config["output"]]
        self._bf16 = {tensor["name"] for tensor in config["input"] if tensor["data_type"] == "TYPE_BF16"}
        self._model = self._class()
        self._decoupled = order.decoupled
        self._is_iterative = config.get("sequence_batching", {}).get("iterative_sequence", False)
        if hasattr(self._model, "initialize"):
            self._model.initialize(dict(order.arguments))

    def _finalize(self) -> None:
        if self._model is not None and hasattr(self._model, "finalize"):
            self._model.finalize()

    # Requests

    def _execute(self, order: wire.Execute, raws: Sequence[memoryview]) -> None:
        if self._stub.is_unwanted(order):
            return self._skip(order, wire.Done(number=order.number))
        if order.is_retry:
            self._stub.flush()
        self._progress[wire.BEGUN] = order.number
        if order.number <= self._progress[wire.WITHDRAWN]:
            return self._skip(order, wire.Done(number=order.number, is_withdrawn=True))
        senders = [
            InferenceResponseSender(head.number, self._stub, self._outputs, decoupled=self._decoupled) for head in order.requests
        ]
        call = _Call(order.number, senders)
        self._stub.begin_execution()
        try:
            try:
                requests = self._stub.requests_of(order, raws, senders, self._bf16)
            except BaseException as error:
                return self._failed(call, error)
            self._call_model(call, requests)
        finally:
            self._stub.end_execution()

    def _skip(self, order: wire.Execute, done: wire.Done) -> None:
        for head in order.requests:
            self._stub.over(head.number)
        if wire.has_places(order):
            self._stub.released(order.number)
        self._stub.send_soon(done)

    def _execute_again(self, requests: list[InferenceRequest]) -> None:
        wanted = [request for request in requests if not request.sender.dropped_if_cancelled()]
        if wanted:
            self._stub.begin_execution()
            try:
                self._call_model(_Call(0, [request.sender for request in wanted]), wanted)
            finally:
                self._stub.end_execution()

    def _call_model(self, call: _Call, requests: list[InferenceRequest]) -> None:
        call.requests = requests
        _EXECUTED.set(_Executed(call.senders))
        try:
            returned = self._model.execute(requests)
        except BaseException as error:  # whatever it raises is the request's failure, not the end of the process
            return self._failed(call, error)
        if isinstance(returned, list) or not inspect.isawaitable(returned):
            self._returned(call, returned)
        else:
            self._follow(call, returned)

    def _follow(self, call: _Call, work: Any) -> None:
        """Await an `async` execute. For a decoupled model the next one may run beside it."""

        async def run() -> None:
            try:
                returned = await work
            except BaseException as error:
                self._failed(call, error)
            else:
                self._returned(call, returned)

        if self._decoupled:
            _EXECUTED.set(_Executed(call.senders, occupies_process=False))
        future = asyncio.run_coroutine_threadsafe(run(), self._event_loop())
        if self._decoupled:
            self._send_done(call)
        else:
            future.result()

    def _event_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=_run_forever, args=(self._loop,), name="execute", daemon=True).start()
        return self._loop

    def _returned(self, call: _Call, returned: Any) -> None:
        try:
            self._finish(call, returned)
        except BaseException as error:
            return self._failed(call, error)
        again = [request for request in call.requests if request.reschedules()]
        if self._is_iterative:
            call.rescheduled = tuple(number for request in again if (number := request.sender.released()))
            return self._send_done(call)
        self._send_done(call)
        if again:
            if self._decoupled and threading.current_thread() is not threading.main_thread():
                self._call_model(_Call(0, [request.sender for request in again]), again)
            else:
                self._rescheduled.append(again)

    def _finish(self, call: _Call, returned: Any) -> None:
        """Collect the responses that `execute` returned."""
        senders = call.senders
        if returned is None and (self._decoupled or all(map(_may_be_none, senders, call.requests))):
            return
        if self._decoupled:
            raise _WrongReturn("execute of a decoupled model must return None and use response senders")
        if not isinstance(returned, list | tuple):
            raise _WrongReturn(f"Expected a list in the execute return, found type '{type(returned)}'.")
        if len(returned) != len(senders):
            raise _WrongReturn(
                "Number of InferenceResponse objects do not match the number of InferenceRequest objects. "
                f"InferenceRequest(s) size is:{len(senders)}, and InferenceResponse(s) size is:{len(returned)}"
            )
        for sender, request, response in zip(senders, call.requests, returned, strict=True):
            if response is None and _may_be_none(sender, request):
                continue
            if not isinstance(response, InferenceResponse):
                raise _WrongReturn(
                    f"Expected an 'InferenceResponse' object in the execute function return list, found type '{type(response)}'."
                )
            head, raws = sender.finish(response)
            call.responses.append(head)
            call.buffers += raws

    def _failed(self, call: _Call, error: BaseException) -> None:
        traceback.print_exception(error)
        text = f"Failed to process the request(s) for model '{self._name}', message: {_text(error)}"
        for sender in call.senders:
            sender.fail(text)
        self._send_done(call)

    def _send_done(self, call: _Call) -> None:
        infer_ns = time.perf_counter_ns() - call.start_ns
        send = self._stub.send if self._decoupled else self._stub.send_soon
        done = wire.Done(number=call.number, responses=tuple(call.responses), infer_ns=infer_ns, rescheduled=call.rescheduled)
        send(done, call.buffers)


@dataclass(slots=True)
class _Call:
    """One call of `execute`, and the responses that it returned."""

    number: int
    """Of the execution; 0 if the worker takes it to be over."""
    senders: Sequence[InferenceResponseSender]
    requests: Sequence[InferenceRequest] = ()
    start_ns: int = field(default_factory=time.perf_counter_ns)
    responses: list[wire.Response] = field(default_factory=list)
    rescheduled: tuple[int, ...] = ()
    """The requests that the worker reschedules."""
    buffers: list[wire.Buffer] = field(default_factory=list)


def _may_be_none(sender: InferenceResponseSender, request: InferenceRequest) -> bool:
    """Return whether `execute` may return None in place of the response to a request."""
    return sender.taken or request.is_rescheduled


def _in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _run_forever(loop: asyncio.AbstractEventLoop) -> None:
    """Run the loop of `async` executes. SystemExit of a task of the model ends it, and the process with it."""
    try:
        loop.run_forever()
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def _import(file: str, folder: str) -> ModuleType:
    """Import a model's file by its place in the model's folder, such as `1.model`, so that its relative imports work."""
    # Python compares seconds and sizes: a file that is changed within a second would be what was compiled before.
    sys.dont_write_bytecode = True
    name = os.path.splitext(os.path.relpath(file, folder))[0].replace(os.sep, ".")
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _text(error: BaseException) -> str:
    """Return an error as the caller may see it, with its type unless it is one of this module."""
    text = str(error)
    if isinstance(error, _WrongReturn):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the worker, which lets requests finish
    stub = Stub(socket.socket(fileno=int(sys.argv[1])))
    progress = memoryview(mmap.mmap(int(sys.argv[2]), mmap.PAGESIZE)).cast("Q")
    pb_utils.attach(stub)
    for name in ("triton_python_backend_utils", "c_python_backend_utils"):
        sys.modules[name] = pb_utils
    threading.Thread(target=stub.read_for_main, name="reader", daemon=True).start()
    ModelProcess(stub, progress).run()


if __name__ == "__main__":
    main()
