"""The process of one instance of a Python-backend model: `python -m dynamo.worker.repository.stub FD`.

The main thread calls the model; another one reads the socket, so that cancellations and responses of other models arrive while
`execute` runs. The process ends when the worker does: the socket is closed then.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import itertools
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any

import msgspec

from dynamo.worker.repository import pb_utils, wire
from dynamo.worker.repository.pb_utils import CallInProgress, InferenceRequest, InferenceResponse, InferenceResponseSender, Tensor


@dataclass(slots=True)
class _Window:
    """How many responses to a request were sent, and how many may be sent in total."""

    sent: int = 0
    allowed: int = wire.RESPONSE_WINDOW


class Stub:
    """The model's end of the socket. Any thread may send."""

    def __init__(self, connection: socket.socket) -> None:
        self.orders: SimpleQueue[tuple[wire.Message, list[bytearray]]] = SimpleQueue()
        """Messages for the main thread."""
        self.model_folder = ""
        self._connection = connection
        self._sending = threading.Lock()
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._calls: dict[int, CallInProgress] = {}
        self._pending: dict[int, Future[wire.Response]] = {}
        self._open: dict[int, _Window] = {}
        self._cancelled: set[int] = set()
        self._credit = threading.Condition(self._lock)
        """Notified when a window grows or a request is cancelled."""

    # Channel

    def send(self, message: wire.Message, buffers: Sequence[wire.Buffer] = ()) -> None:
        pieces = wire.encode(message, buffers)
        with self._sending:
            for piece in pieces:
                self._connection.sendall(piece)

    def opened(self, number: int) -> None:
        with self._lock:
            self._open[number] = _Window()

    def over(self, number: int) -> None:
        with self._lock:
            self._open.pop(number, None)
            self._cancelled.discard(number)
            self._credit.notify_all()

    def is_cancelled(self, number: int) -> bool:
        return number in self._cancelled

    def wait_for_credit(self, number: int) -> None:
        """Return when the caller of a request has room for a response, or has left. Does not block an event loop."""
        with self._credit:
            window = self._open.get(number)
            if window is None:
                return
            if not _in_event_loop():
                self._credit.wait_for(
                    lambda: window.sent < window.allowed or number in self._cancelled or number not in self._open
                )
            window.sent += 1

    def call(self, head: wire.RequestHead, inputs: Sequence[Tensor]) -> CallInProgress:
        number = next(self._numbers)

        def cancel() -> None:
            with self._lock:
                self._calls.pop(number, None)
            self.send(wire.CancelRequest(number))

        packed = [wire.pack(tensor.name(), tensor.as_numpy()) for tensor in inputs]
        progress = CallInProgress(cancel)
        with self._lock:
            self._calls[number] = progress
        head = msgspec.structs.replace(head, number=number, inputs=tuple(head for head, _ in packed))
        self.send(wire.CallModel(head), [raw for _, raw in packed])
        return progress

    def control(self, control: wire.Control) -> wire.Response:
        number = next(self._numbers)
        future: Future[wire.Response] = Future()
        with self._lock:
            self._pending[number] = future
        self.send(msgspec.structs.replace(control, number=number))
        return future.result()

    # Reading

    def read_all(self) -> None:
        """Read until the worker closes the socket; then end the process, whatever the model is doing."""
        try:
            while True:
                message, raws = self._read()
                match message:
                    case wire.CancelRequest():
                        with self._lock:
                            if message.number in self._open:
                                self._cancelled.add(message.number)
                                self._credit.notify_all()
                    case wire.ResponseCredit():
                        with self._lock:
                            if (window := self._open.get(message.number)) is not None:
                                window.allowed = max(window.allowed, message.total)
                                self._credit.notify_all()
                    case wire.Response():
                        self._deliver(message, raws)
                    case _:
                        if isinstance(message, wire.Execute):
                            for head in message.requests:
                                self.opened(head.number)
                        self.orders.put((message, raws))
        except (EOFError, OSError):
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)

    def _deliver(self, head: wire.Response, raws: list[bytearray]) -> None:
        with self._lock:
            future = self._pending.pop(head.number, None)
            call = self._calls.pop(head.number, None) if head.final else self._calls.get(head.number)
        if future is not None:
            future.set_result(head)
        elif call is not None:
            call.add(head, _to_tensors(head.outputs, raws))

    def _read(self) -> tuple[wire.Message, list[bytearray]]:
        (length,) = wire.LENGTH.unpack(self._exactly(wire.LENGTH.size))
        message = wire.decode(self._exactly(length))
        return message, [self._exactly(tensor.size) for tensor in wire.tensors_of(message)]

    def _exactly(self, size: int) -> bytearray:
        data = bytearray(size)
        view, position = memoryview(data), 0
        while position < size:
            count = self._connection.recv_into(view[position:])
            if not count:
                raise EOFError
            position += count
        return data


def _to_tensors(heads: Sequence[wire.TensorHead], raws: Sequence[bytearray]) -> list[Tensor]:
    return [Tensor(head.name, wire.unpack(head, raw)) for head, raw in zip(heads, raws, strict=True)]


class ModelProcess:
    """Carries out the worker's messages on the main thread."""

    def __init__(self, stub: Stub) -> None:
        self._stub = stub
        self._class: Any = None
        self._model: Any = None
        self._decoupled = False
        self._loop: asyncio.AbstractEventLoop | None = None
        """Runs `async` executes; created for the first one."""

    def run(self) -> None:
        while True:
            order, raws = self._stub.orders.get()
            match order:
                case wire.Start():
                    self._report(partial(self._start, order))
                case wire.Complete():
                    self._report(partial(self._complete, order.config))
                case wire.Initialize():
                    self._report(partial(self._initialize, order))
                case wire.Execute():
                    self._execute(order, raws)
                case wire.Finalize():
                    self._report(self._finalize)
                case _:
                    raise RuntimeError(f"the worker sent a {type(order).__name__}")

    def _report(self, step: Callable[[], str | None]) -> None:
        try:
            ready = wire.Ready(config=step() or "")
        except BaseException as error:
            traceback.print_exc()
            ready = wire.Ready(error=_text(error))
        self._stub.send(ready)

    def _start(self, order: wire.Start) -> None:
        self._stub.model_folder = os.path.dirname(order.file)
        sys.path[:0] = order.paths
        spec = importlib.util.spec_from_file_location("model", order.file)
        if spec is None or spec.loader is None:
            raise ImportError(f"{order.file} is not a Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules["model"] = module
        spec.loader.exec_module(module)
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
        self._model = self._class()
        self._decoupled = order.decoupled
        if hasattr(self._model, "initialize"):
            self._model.initialize(dict(order.arguments))

    def _finalize(self) -> None:
        if self._model is not None and hasattr(self._model, "finalize"):
            self._model.finalize()

    # Requests

    def _execute(self, order: wire.Execute, raws: Sequence[bytearray]) -> None:
        requests, senders = [], []
        position = 0
        for head in order.requests:
            count = len(head.inputs)
            sender = InferenceResponseSender(head.number, self._stub)
            senders.append(sender)
            requests.append(InferenceRequest.arrived(head, _to_tensors(head.inputs, raws[position : position + count]), sender))
            position += count
        try:
            returned = self._model.execute(requests)
        except BaseException as error:  # whatever it raises is the request's failure, not the end of the process
            return self._failed(order.number, senders, error)
        if inspect.isawaitable(returned):
            self._follow(order.number, senders, returned)
        else:
            self._returned(order.number, senders, returned)

    def _follow(self, number: int, senders: Sequence[InferenceResponseSender], work: Any) -> None:
        """Await an `async` execute. For a decoupled model the next one may run beside it."""

        async def run() -> None:
            try:
                returned = await work
            except BaseException as error:
                self._failed(number, senders, error)
            else:
                self._returned(number, senders, returned)

        future = asyncio.run_coroutine_threadsafe(run(), self._event_loop())
        if self._decoupled:
            self._stub.send(wire.Done(number))
        else:
            future.result()

    def _event_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=_run_forever, args=(self._loop,), name="execute", daemon=True).start()
        return self._loop

    def _returned(self, number: int, senders: Sequence[InferenceResponseSender], returned: Any) -> None:
        try:
            self._send_returned(senders, returned)
        except BaseException as error:
            return self._failed(number, senders, error)
        self._stub.send(wire.Done(number))

    def _send_returned(self, senders: Sequence[InferenceResponseSender], returned: Any) -> None:
        if returned is None and (self._decoupled or all(sender.taken for sender in senders)):
            return
        if self._decoupled:
            raise pb_utils.TritonModelException("execute of a decoupled model must return None and use response senders")
        if not isinstance(returned, list | tuple) or len(returned) != len(senders):
            what = f"{len(returned)} responses" if isinstance(returned, list | tuple) else f"a {type(returned).__name__}"
            raise pb_utils.TritonModelException(f"execute returned {what} for {len(senders)} requests")
        for sender, response in zip(senders, returned, strict=True):
            if response is None and sender.taken:
                continue
            if not isinstance(response, InferenceResponse):
                raise pb_utils.TritonModelException(
                    f"execute returned a {type(response).__name__} instead of an InferenceResponse"
                )
            sender.send(response, pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def _failed(self, number: int, senders: Sequence[InferenceResponseSender], error: BaseException) -> None:
        traceback.print_exception(error)
        for sender in senders:
            sender.fail(_text(error))
        self._stub.send(wire.Done(number, _text(error)))


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


def _text(error: BaseException) -> str:
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the worker, which lets requests finish
    stub = Stub(socket.socket(fileno=int(sys.argv[1])))
    pb_utils.attach(stub)
    for name in ("triton_python_backend_utils", "c_python_backend_utils"):
        sys.modules[name] = pb_utils
    threading.Thread(target=stub.read_all, name="worker", daemon=True).start()
    ModelProcess(stub).run()


if __name__ == "__main__":
    main()
