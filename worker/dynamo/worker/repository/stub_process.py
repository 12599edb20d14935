"""The worker's side of one instance of a Python-backend model: a process, and the messages to and from it."""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
import subprocess
import sys
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from dynamo.common.background import start
from dynamo.common.errors import (
    Cancelled,
    Code,
    DynamoError,
    EngineError,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    Unavailable,
    Unsupported,
)
from dynamo.worker.repository import wire
from dynamo.worker.repository.execution import ModelRequest, ModelResult
from dynamo.worker.repository.pb_utils import TritonError

log = logging.getLogger(__name__)

MAX_UNREAD = 8192
"""Responses of one request that wait for a slow caller. A model that sends more, beyond its window, fails its request."""
MAX_UNREAD_BYTES = 256 * 2**20
_FINALIZE_S = 30.0
_MODULE = "dynamo.worker.repository.stub"

_TO_CODE = {
    Code.INVALID_REQUEST: TritonError.INVALID_ARG,
    Code.PAYLOAD_TOO_LARGE: TritonError.INVALID_ARG,
    Code.NOT_FOUND: TritonError.NOT_FOUND,
    Code.UNSUPPORTED: TritonError.UNSUPPORTED,
    Code.OVERLOADED: TritonError.UNAVAILABLE,
    Code.UNAVAILABLE: TritonError.UNAVAILABLE,
    Code.CANCELLED: TritonError.CANCELLED,
}


def to_error(text: str, code: int) -> DynamoError:
    """Return the error that callers get for a model's TritonError."""
    match code:
        case TritonError.INVALID_ARG | TritonError.ALREADY_EXISTS:
            return InvalidRequest(text)
        case TritonError.NOT_FOUND:
            error = ModelNotFound("")
            error.args = (text,)
            return error
        case TritonError.UNAVAILABLE:
            return Unavailable(text, retryable=False)
        case TritonError.UNSUPPORTED:
            return Unsupported(text)
        case TritonError.CANCELLED:
            return Cancelled(text)
        case _:
            return EngineError(text)


def to_code(error: DynamoError) -> int:
    """Return the code of TritonError for an error."""
    return _TO_CODE.get(error.code, TritonError.INTERNAL)


class ProcessDied(EngineError):
    """The process ended while it had the request."""


class ResponseStream:
    """The responses to one request, filled by the process and read by the caller.

    `grant` gives the model credit as the caller reads: it is called with the number of responses that may be sent in total.
    """

    def __init__(self, grant: Callable[[int], None]) -> None:
        self._items: deque[ModelResult | DynamoError | None] = deque()
        """None marks the end."""
        self._unread_bytes = 0
        self._taken = 0
        self._grant = grant
        self._added = asyncio.Event()
        self._closed = False

    def __repr__(self) -> str:
        return f"<ResponseStream, unread={len(self._items)}, unread_bytes={self._unread_bytes}, taken={self._taken}>"

    @property
    def is_full(self) -> bool:
        """Whether the caller has left so much unread that no further response is kept."""
        return len(self._items) >= MAX_UNREAD or self._unread_bytes > MAX_UNREAD_BYTES

    def add(self, item: ModelResult | DynamoError | None) -> None:
        """Add a response, an error, or None at the end."""
        if not self._closed:
            self._items.append(item)
            if isinstance(item, ModelResult):
                self._unread_bytes += _size_of(item)
            self._added.set()

    def close(self) -> None:
        """Drop the responses: the caller has left."""
        self._closed = True
        self._items.clear()

    async def read(self) -> AsyncGenerator[ModelResult, None]:
        """Yield the responses. Raises the error that ended the request."""
        while True:
            while not self._items:
                self._added.clear()
                await self._added.wait()
            item = self._items.popleft()
            if item is None:
                return
            if isinstance(item, DynamoError):
                raise item
            self._unread_bytes -= _size_of(item)
            self._taken += 1
            if self._taken % (wire.RESPONSE_WINDOW // 2) == 0:
                self._grant(self._taken + wire.RESPONSE_WINDOW)
            yield item


def _size_of(response: ModelResult) -> int:
    return sum(array.nbytes for array in response.outputs.values())


@dataclass(frozen=True, slots=True)
class CallHandlers:
    """Serve the calls and queries of a model. Both run as tasks, which are cancelled when the process ends."""

    call: Callable[[StubProcess, wire.RequestHead, Sequence[bytes]], Awaitable[None]]
    control: Callable[[StubProcess, wire.Control], Awaitable[None]]


class StubProcess:
    """One process of a model; see `open_stub`. `closed` is set when the process has ended."""

    def __init__(
        self,
        name: str,
        process: subprocess.Popen[bytes],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        handlers: CallHandlers,
    ) -> None:
        self.closed = asyncio.Event()
        self._name = name
        self._process = process
        self._reader = reader
        self._writer = writer
        self._handlers = handlers
        self._numbers = itertools.count(1)
        self._ready: asyncio.Future[wire.Ready] | None = None
        self._streams: dict[int, ResponseStream] = {}
        self._executions: dict[int, asyncio.Future[None]] = {}
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._reading = start(self._read_all(), f"stub of {name}")

    def __repr__(self) -> str:
        state = f"alive={self.is_alive}, streams={len(self._streams)}, calls={len(self._calls)}"
        return f"<StubProcess {self._process.pid} of {self._name}, {state}>"

    @property
    def is_alive(self) -> bool:
        return not self.closed.is_set()

    # Orders

    async def start(self, file: Path, folder: Path) -> None:
        """Load the model's code. Raises EngineError with the model's error."""
        await self._order(wire.Start(str(file), (str(file.parent), str(folder))))

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
        self._reading.cancel()
        await asyncio.wait((self._reading,))
        self._writer.close()
        self._process.kill()  # nothing happens if it has ended
        self.closed.set()
        await asyncio.to_thread(self._process.wait)

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

    def execute(
        self, requests: Sequence[ModelRequest], model: str
    ) -> tuple[list[int], list[ResponseStream], asyncio.Future[None]]:
        """Send requests for one call of `execute`. Return their numbers, their responses, and a future of the call's end."""
        if not self.is_alive:
            raise Unavailable(f"the process of model '{self._name}' has just ended")
        heads, buffers, sinks = [], [], []
        for request in requests:
            head, raws = _to_wire(next(self._numbers), request, model)
            heads.append(head)
            buffers += raws
            sinks.append(ResponseStream(partial(self._grant, head.number)))
        for head, sink in zip(heads, sinks, strict=True):
            self._streams[head.number] = sink
        execution = next(self._numbers)
        over = self._executions[execution] = asyncio.get_running_loop().create_future()
        self.send(wire.Execute(execution, tuple(heads)), buffers)
        return [head.number for head in heads], sinks, over

    def forget(self, number: int) -> None:
        """Drop a request. If it has not ended, the model is notified of the cancellation."""
        sink = self._streams.pop(number, None)
        if sink is not None:
            sink.close()
            if self.is_alive:
                self.send(wire.CancelRequest(number))

    def _grant(self, number: int, total: int) -> None:
        if number in self._streams:
            self.send(wire.ResponseCredit(number, total))

    def send(self, message: wire.Message, buffers: Sequence[wire.Buffer] = ()) -> None:
        if self.is_alive:
            self._writer.writelines(wire.encode(message, buffers))

    # Reading

    async def _read_all(self) -> None:
        why = "has ended"
        try:
            while True:
                self._take(*await self._read())
        except (asyncio.IncompleteReadError, ConnectionError):
            status = await asyncio.to_thread(self._process.wait)
            why = f"has ended with status {status}"
        except asyncio.CancelledError:
            raise
        except Exception as error:
            why = f"sent what cannot be read: {error}"
            log.exception("the process of model '%s' %s", self._name, why)
        finally:
            self._fail_all(why)

    async def _read(self) -> tuple[wire.Message, list[bytes]]:
        (length,) = wire.LENGTH.unpack(await self._reader.readexactly(wire.LENGTH.size))
        message = wire.decode(await self._reader.readexactly(length))
        return message, [await self._reader.readexactly(tensor.size) for tensor in wire.tensors_of(message)]

    def _take(self, message: wire.Message, raws: list[bytes]) -> None:
        match message:
            case wire.Response():
                self._deliver(message, raws)
            case wire.Done():
                over = self._executions.pop(message.number, None)
                if over is not None and not over.done():
                    over.set_result(None)
            case wire.Ready():
                if self._ready is not None and not self._ready.done():
                    self._ready.set_result(message)
            case wire.CallModel():
                self._begin(message.request.number, self._handlers.call(self, message.request, raws))
            case wire.Control():
                self._begin(message.number, self._handlers.control(self, message))
            case wire.CancelRequest():
                task = self._calls.get(message.number)
                if task is not None:
                    task.cancel()
            case wire.Log():
                log.log(message.level, "%s: %s", self._name, message.text)
            case _:
                raise ValueError(f"unexpected message {type(message).__name__}")

    def _deliver(self, head: wire.Response, raws: list[bytes]) -> None:
        sink = self._streams.get(head.number)
        if sink is None:
            return
        if sink.is_full and not head.final:
            sink.add(Overloaded(f"the caller reads the responses of model '{self._name}' too slowly"))
            del self._streams[head.number]
            self.send(wire.CancelRequest(head.number))
            return
        if head.error is not None:
            sink.add(to_error(head.error, head.code))
        elif head.outputs or not head.final:
            sink.add(ModelResult(_to_arrays(head.outputs, raws), head.parameters))
        if head.final:
            self._streams.pop(head.number, None)
            sink.add(None)

    def _begin(self, number: int, work: Awaitable[None]) -> None:
        async def run() -> None:
            try:
                await work
            finally:
                self._calls.pop(number, None)

        self._calls[number] = start(run(), f"a call of model '{self._name}'")

    def _fail_all(self, why: str) -> None:
        self.closed.set()
        text = f"the process of model '{self._name}' {why}"
        for sink in self._streams.values():
            sink.add(ProcessDied(text))
        self._streams.clear()
        for done in self._executions.values():
            if not done.done():
                done.set_result(None)
        self._executions.clear()
        if self._ready is not None and not self._ready.done():
            self._ready.set_result(wire.Ready(error=text))
        for task in self._calls.values():
            task.cancel()


def _to_wire(number: int, request: ModelRequest, model: str) -> tuple[wire.RequestHead, list[wire.Buffer]]:
    packed = [wire.pack(name, array) for name, array in request.inputs.items()]
    parameters = dict(request.parameters)
    correlation_id = parameters.pop("sequence_id", 0)
    flags = int(bool(parameters.pop("sequence_start", False))) | 2 * int(bool(parameters.pop("sequence_end", False)))
    head = wire.RequestHead(
        number=number,
        model=model,
        version=request.context.version,
        request_id=request.context.request_id,
        correlation_id=correlation_id if isinstance(correlation_id, int | str) else 0,
        flags=flags,
        priority=_whole(parameters.pop("priority", 0)),
        timeout_us=_whole(parameters.pop("timeout", 0)),
        parameters=parameters,
        outputs=tuple(request.outputs),
        inputs=tuple(head for head, _ in packed),
    )
    return head, [raw for _, raw in packed]


def _whole(value: object) -> int:
    return value if isinstance(value, int) else 0


def _to_arrays(heads: Sequence[wire.TensorHead], raws: Sequence[bytes]) -> dict[str, wire.Array]:
    return {head.name: wire.unpack(head, raw) for head, raw in zip(heads, raws, strict=True)}


async def open_stub(name: str, handlers: CallHandlers) -> StubProcess:
    """Start a process for one instance of the model `name`. The model is not loaded yet."""
    ours, theirs = socket.socketpair()
    try:
        # Not by asyncio, whose loop forks: the fork handlers of gRPC crash a process that has other threads. Popen does not.
        process = subprocess.Popen(  # noqa: ASYNC220, S603
            [sys.executable, "-P", "-m", _MODULE, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,  # Ctrl-C is for the worker, which lets requests finish first
        )
        reader, writer = await asyncio.open_connection(sock=ours, limit=1024 * 1024)
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    return StubProcess(name, process, reader, writer, handlers)
