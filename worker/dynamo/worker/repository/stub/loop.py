"""The socket of the process, and its two threads.

The main thread calls the model and reads the socket in between, so that a request passes through one thread only. While an
`execute` takes long, or waits for another model, the thread `reader` takes its place at the socket: cancellations, credit and
responses of other models arrive then.
"""

from __future__ import annotations

import itertools
import os
import select
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue

import msgspec

from dynamo.worker.repository.stub.executed import EXECUTED
from dynamo.worker.repository.stub.memory import StubMemory
from dynamo.worker.repository.stub.pb_utils import CallInProgress, InferenceRequest, InferenceResponseSender, Tensor
from dynamo.worker.repository.wire import wire

_TICK_S = 0.02
"""The reader thread takes over from an execution that lasts this long, or up to twice as long."""
_HOLD_NS = 300_000
"""While more executions wait, responses of short ones are collected for this long and sent in one system call."""
_MAX_HELD_BYTES = 16 * 1024
"""A larger response is sent at once, with those before it."""
_SWEEP_S = 1.0
_IDLE_TICKS = 50
"""After so many ticks without an execution the reader thread sleeps until the next."""


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
        self._open: dict[int, int | str] = {}
        """The correlation ids of the requests that have not ended, by their numbers."""
        self._windows: dict[int, _Window] = {}
        """Windows of requests that have sent a response through a sender, or have got credit."""
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
            self._open.pop(number, None)
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

    def call(self, head: wire.InferenceHead, inputs: Sequence[Tensor], *, decoupled: bool) -> CallInProgress:
        number = next(self._numbers)

        def cancel() -> None:
            self._calls.pop(number, None)  # without the lock: garbage collection may run this while the thread holds it
            self.send(wire.CancelRequest(number))

        def grant(total: int) -> None:
            self.send(wire.ResponseCredit(number, total))

        packed = [wire.pack(tensor.name(), tensor.as_numpy()) for tensor in inputs]
        progress = CallInProgress(cancel, grant, decoupled=decoupled)
        executed = EXECUTED.get()
        with self._lock:
            self._calls[number] = progress
            served = self._open if executed is None else [sender.number for sender in executed.senders]
            requests = tuple(each for each in served if each in self._open)
            parents = tuple(each for each in requests if head.correlation_id and self._open[each] == head.correlation_id)
        head = msgspec.structs.replace(head, number=number, inputs=tuple(head for head, _ in packed))
        is_awaited = executed is not None and executed.occupies_process
        parents = (head.trace,) if head.trace else parents
        self.send(wire.CallModel(head, decoupled, requests, is_awaited, parents), [raw for _, raw in packed])
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
                        self._open[head.number] = head.correlation_id
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


def _in_event_loop() -> bool:
    asyncio = sys.modules.get("asyncio")  # a stub does not import it, which takes a third of a start: models do that need it
    if asyncio is None:
        return False
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
