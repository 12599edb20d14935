"""The part of `pb_utils` about requests and responses, and the channel to the worker."""

from __future__ import annotations

import json
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Protocol, TypeAlias

import msgspec

from dynamo.worker.repository.stub.pb_tensors import (
    ErrorCode,
    MemoryType,
    Tensor,
    TritonError,
    TritonModelException,
    as_integer,
    need,
)
from dynamo.worker.repository.wire import wire
from dynamo.worker.repository.wire.wire import Parameter

Lend: TypeAlias = Callable[[int, wire.TensorHead, wire.Buffer], wire.TensorHead]
TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_START = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_END = 2
TRITONSERVER_REQUEST_RELEASE_ALL = 1
TRITONSERVER_REQUEST_RELEASE_RESCHEDULE = 2


class InferenceResponse:
    """The response to one request: tensors, or an error."""

    def __init__(
        self,
        output_tensors: Sequence[Tensor] = (),
        error: TritonError | None = None,
        parameters: Mapping[str, Parameter] | None = None,
    ) -> None:
        self._tensors = _tensors_of(output_tensors)
        if error is not None:
            need("the error of a response", error, TritonError)
        self._error = error
        self._parameters = _parameters_of(parameters)

    def output_tensors(self) -> list[Tensor]:
        return self._tensors

    def has_error(self) -> bool:
        return self._error is not None

    def error(self) -> TritonError | None:
        return self._error

    def parameters(self) -> str:
        """The parameters as JSON."""
        return json.dumps(self._parameters)

    def to_wire(self, number: int, *, final: bool, lend: Lend) -> tuple[wire.Response, list[wire.Buffer]]:
        """Return the head and the tensors that follow it. `lend` puts a tensor into shared memory if that is possible."""
        if self._error is not None:
            head = wire.Response(number=number, error=self._error.message(), code=self._error.code(), final=final)
            return head, []
        outputs: list[wire.TensorHead] = []
        raws: list[wire.Buffer] = []
        for tensor in self._tensors:
            packed, raw = wire.pack(tensor.name(), tensor.as_numpy())
            output = lend(number, packed, raw)
            outputs.append(output)
            if output.place is None:
                raws.append(raw)
        return wire.Response(number=number, outputs=tuple(outputs), final=final, parameters=self._parameters), raws


def _tensors_of(tensors: Sequence[Tensor] | None) -> list[Tensor]:
    if not isinstance(tensors, list | tuple):
        raise TypeError(f"the tensors must be list or tuple, not {type(tensors).__name__}")
    for tensor in tensors:
        need("each of the tensors", tensor, Tensor)
    return list(tensors)


def _parameters_of(parameters: Mapping[str, Parameter] | None) -> dict[str, Parameter]:
    """Return checked parameters. Raises TritonModelException for a name or value of a wrong type, or an int that is too large."""
    if parameters is None:
        return {}
    if not isinstance(parameters, dict):
        raise TritonModelException(f"Expect dict, got {type(parameters)}")
    for name, value in parameters.items():
        if not isinstance(name, str):
            raise TritonModelException(f"Expect parameters keys to have type str, found type {type(name)}")
        if not isinstance(value, bool | int | str):
            raise TritonModelException(f"Expect parameters values to have type bool/int/str, found type {type(value)}")
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            found = f"found one of {value.bit_length()} bits"
            raise TritonModelException(f"Expect parameters values of type int to be from -2**63 to 2**63 - 1, {found}")
    return dict(parameters)


class PreferredMemory:
    """Where a caller wants tensors. All tensors are in CPU memory here."""

    def __init__(self, preferred_memory_type: MemoryType, preferred_device_id: int = 0) -> None:
        need("the preferred memory type", preferred_memory_type, MemoryType)
        self.preferred_memory_type = preferred_memory_type
        self.preferred_device_id = preferred_device_id


class InferenceTrace:
    """The trace of a request, to be handed on to requests of other models, which are traced as parts of it then."""

    def __init__(self, request: int = 0) -> None:
        """`request`: its number in this process; 0: there is no trace."""
        self.request = request


class InferenceRequest:
    """A request to this model, or one to another model of this worker."""

    def __init__(
        self,
        request_id: str = "",
        correlation_id: int | str = 0,
        inputs: Sequence[Tensor] | None = None,
        requested_output_names: Sequence[str] | None = None,
        model_name: str | None = None,
        model_version: int = -1,
        flags: int = 0,
        timeout: int = 0,
        preferred_memory: PreferredMemory | None = None,
        trace: InferenceTrace | None = None,
        parameters: Mapping[str, Parameter] | None = None,
    ) -> None:
        need("the request_id of a request", request_id, str)
        need("the model_name of a request", model_name, str)
        need("the requested_output_names", requested_output_names, (list, tuple, set, frozenset))
        for name in requested_output_names or ():
            need("each of the requested_output_names", name, str)
        if not isinstance(correlation_id, int | str):
            raise TritonModelException("Correlation ID must be integer or string")
        if isinstance(correlation_id, int) and correlation_id < 0:
            raise TritonModelException(f"Correlation ID must not be negative, got {correlation_id}")
        if preferred_memory is not None:
            need("the preferred memory", preferred_memory, PreferredMemory)
        if trace is not None:
            need("the trace of a request", trace, InferenceTrace)
        self._inputs = _tensors_of(inputs)
        self._preferred_memory = preferred_memory
        self._head = wire.InferenceHead(
            number=0,
            model=model_name or "",
            version="" if (version := as_integer("the model_version of a request", model_version)) < 1 else str(version),
            request_id=request_id,
            correlation_id=correlation_id,
            flags=as_integer("the flags of a request", flags),
            timeout_us=as_integer("the timeout of a request", timeout),
            parameters=_parameters_of(parameters),
            outputs=tuple(requested_output_names or ()),
            trace=0 if trace is None else trace.request,
        )
        self._sender: InferenceResponseSender | None = None
        self._release_flags = TRITONSERVER_REQUEST_RELEASE_ALL

    @classmethod
    def arrived(cls, head: wire.InferenceHead, inputs: Sequence[Tensor], sender: InferenceResponseSender) -> InferenceRequest:
        request = cls.__new__(cls)  # one for each request of a client: its head is there already
        request._inputs, request._head, request._sender = list(inputs), head, sender
        request._preferred_memory = None
        request._release_flags = TRITONSERVER_REQUEST_RELEASE_ALL
        return request

    def inputs(self) -> list[Tensor]:
        return self._inputs

    def request_id(self) -> str:
        return self._head.request_id

    def correlation_id(self) -> int | str:
        return self._head.correlation_id

    def requested_output_names(self) -> set[str]:
        """Return the names of the outputs that the caller wants; all if it named none."""
        return set(self._head.outputs or (self._sender.outputs if self._sender is not None else ()))

    def model_name(self) -> str:
        return self._head.model

    def model_version(self) -> int:
        return int(self._head.version or -1)

    def flags(self) -> int:
        return self._head.flags

    def set_flags(self, flags: int) -> None:
        self._head = msgspec.structs.replace(self._head, flags=flags)

    def priority(self) -> int:
        return self._head.priority

    def timeout(self) -> int:
        """The timeout in microseconds; 0: none."""
        return self._head.timeout_us

    def parameters(self) -> str:
        """The parameters as JSON; compact in a request that has arrived, as its text comes from the server there."""
        return json.dumps(self._head.parameters, separators=None if self._sender is None else (",", ":"))

    def preferred_memory(self) -> PreferredMemory | None:
        return self._preferred_memory

    def trace(self) -> InferenceTrace:
        return InferenceTrace(self._head.trace if self._sender is None else self._head.number)

    def set_release_flags(self, flags: int) -> None:
        """With TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, `execute` gets the request again; it returns None for it now."""
        need("the release flags", flags, int)
        self._release_flags = flags

    @property
    def is_rescheduled(self) -> bool:
        return self._release_flags == TRITONSERVER_REQUEST_RELEASE_RESCHEDULE

    def reschedules(self) -> bool:
        """Return whether `execute` gets the request again, which it then has to demand anew."""
        is_rescheduled = self.is_rescheduled
        self._release_flags = TRITONSERVER_REQUEST_RELEASE_ALL
        return is_rescheduled

    def is_cancelled(self) -> bool:
        return self._sender is not None and self._sender.is_cancelled()

    def get_response_sender(self) -> InferenceResponseSender:
        sender = self.sender
        sender.taken = True
        return sender

    @property
    def sender(self) -> InferenceResponseSender:
        if self._sender is None:
            raise TritonModelException("only a request that came from outside has a response sender")
        return self._sender

    def exec(self, decoupled: bool = False) -> InferenceResponse | Iterator[InferenceResponse]:
        """Run the request on another model and return its response, or an iterator over its responses if `decoupled`. Blocks."""
        call = self._call(decoupled)
        return iter(call) if decoupled else call.only()

    async def async_exec(self, decoupled: bool = False) -> InferenceResponse | Iterator[InferenceResponse]:
        """Do the same as `exec` in `async` code."""
        call = self._call(decoupled)
        if decoupled:
            return iter(call)
        return await call.awaited()

    def _call(self, decoupled: bool) -> CallInProgress:
        return channel().call(self._head, self._inputs, decoupled=decoupled)


class CallInProgress:
    """The responses of another model. The channel creates it and calls `add`.

    `grant` gives the worker credit as the responses are read: it is called with the number that may be sent in total.
    """

    def __init__(self, cancel: Callable[[], None], grant: Callable[[int], None], *, decoupled: bool) -> None:
        self.cancel = cancel
        self.grant = grant
        self._responses: SimpleQueue[tuple[wire.Response, list[Tensor]]] = SimpleQueue()
        self._first: Future[InferenceResponse] = Future()
        self._decoupled = decoupled

    def add(self, head: wire.Response, tensors: list[Tensor]) -> None:
        if self._decoupled:
            self._responses.put((head, tensors))
        elif not self._first.done():
            self._first.set_result(_to_response(head, tensors))
        elif not head.final:
            self.cancel()  # the caller wants one response

    def only(self) -> InferenceResponse:
        return self._first.result()

    def awaited(self) -> Awaitable[InferenceResponse]:
        import asyncio  # who awaits has imported it

        return asyncio.wrap_future(self._first)

    def next(self) -> tuple[wire.Response, list[Tensor]]:
        """Return the next response of a decoupled call. Blocks."""
        return self._responses.get()

    def __iter__(self) -> Iterator[InferenceResponse]:
        return ResponseIterator(self)


class ResponseIterator:
    """The responses to a decoupled call. Dropping it early, even unread, cancels the call."""

    def __init__(self, call: CallInProgress) -> None:
        self._call = call
        self._read = 0
        self._ended = False

    def __iter__(self) -> ResponseIterator:
        return self

    def __next__(self) -> InferenceResponse:
        if self._ended:
            raise StopIteration
        head, tensors = self._call.next()
        self._ended = head.final
        self._read += 1
        if self._read % (wire.RESPONSE_WINDOW // 2) == 0 and not self._ended:
            self._call.grant(self._read + wire.RESPONSE_WINDOW)
        return _to_response(head, tensors)

    def __del__(self) -> None:
        if not self._ended:
            self._call.cancel()


def _to_response(head: wire.Response, tensors: list[Tensor]) -> InferenceResponse:
    error = None if head.error is None else TritonError(head.error, ErrorCode(head.code))
    return InferenceResponse(tensors, error, head.parameters)


class InferenceResponseSender:
    """Sends the responses of one request, from any thread."""

    def __init__(self, number: int, channel: Channel, outputs: Sequence[str] = (), *, decoupled: bool = True) -> None:
        """`outputs`: the names of all outputs of the model."""
        self.taken = False
        """Whether the model responds through the sender, rather than by the return value of `execute`."""
        self.outputs = outputs
        self.number = number
        """The number of the request."""
        self._channel = channel
        self._decoupled = decoupled
        self._has_responded = False
        self._closed = False
        self._lock = threading.Lock()

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        """Send a response. `flags` is TRITONSERVER_RESPONSE_COMPLETE_FINAL with, or after, the last one.

        Blocks while the caller has many responses to read, except on an event loop.
        """
        if response is not None:
            need("a response", response, InferenceResponse)
        if flags not in (0, TRITONSERVER_RESPONSE_COMPLETE_FINAL):
            raise TritonModelException("Unable to send response. Unsupported flag provided.")
        final = flags == TRITONSERVER_RESPONSE_COMPLETE_FINAL
        if response is None and not final:
            raise TritonModelException("Inference Response object must be provided when the response flags is set to zero.")
        if not final:
            self._channel.wait_for_credit(self.number)  # before the lock, which `fail` must get
        with self._lock:
            self._channel.send(*self._prepare(response, final=final))

    def finish(self, response: InferenceResponse) -> tuple[wire.Response, list[wire.Buffer]]:
        """Return the last response as a message, which the caller sends."""
        with self._lock:
            return self._prepare(response, final=True)

    def _prepare(self, response: InferenceResponse | None, *, final: bool) -> tuple[wire.Response, list[wire.Buffer]]:
        if self._closed:
            raise TritonModelException("Unable to send response. Response sender has been closed.")
        message: tuple[wire.Response, list[wire.Buffer]]
        if response is not None:
            message = response.to_wire(self.number, final=final, lend=self._channel.lend)
        elif self._decoupled or self._has_responded:
            message = wire.Response(number=self.number, only_ends=True), []
        else:
            raise TritonModelException(
                "Unable to send response. Non-decoupled model cannot send complete final before sending a response."
            )
        self._has_responded = True
        self._closed = final
        if final:
            self._channel.over(self.number)
        return message

    def fail(self, message: str) -> None:
        """End the request with an error, unless it has ended."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._channel.over(self.number)
                self._channel.send(wire.Response(number=self.number, error=message, code=wire.RAISED))

    def is_cancelled(self) -> bool:
        return self._channel.is_cancelled(self.number)

    def released(self) -> int:
        """Close without a last response; return the number of the request, 0 if it has ended."""
        with self._lock:
            if self._closed:
                return 0
            self._closed = True
            self._channel.over(self.number)
        return self.number

    def dropped_if_cancelled(self) -> bool:
        """Return whether the caller has left. Then nothing more can be sent."""
        if not self.is_cancelled():
            return False
        with self._lock:
            self._closed = True
            self._channel.over(self.number)
        return True


class Channel(Protocol):
    """The connection to the worker."""

    def send(self, message: wire.Message, buffers: Sequence[wire.Buffer] = ()) -> None: ...

    def lend(self, number: int, head: wire.TensorHead, raw: wire.Buffer) -> wire.TensorHead:
        """Return the head of an output of this request as it is, or with the place in shared memory to which it was copied."""
        ...

    def over(self, number: int) -> None:
        """The last response to this request is about to be sent."""
        ...

    def is_cancelled(self, number: int) -> bool: ...

    def wait_for_credit(self, number: int) -> None:
        """Return when the caller of this request has room for a response, or has left."""
        ...

    def call(self, head: wire.InferenceHead, inputs: Sequence[Tensor], *, decoupled: bool) -> CallInProgress: ...

    def control(self, control: wire.Control | wire.MetricOrder) -> wire.Response: ...

    @property
    def instance_name(self) -> str: ...

    @property
    def model_folder(self) -> str: ...


_CHANNEL: list[Channel] = []
"""The process's only channel. Models reach it through functions of this module, so it cannot be passed to them."""


def attach(channel: Channel) -> None:
    """Set the channel. Called once, by the stub."""
    _CHANNEL[:] = [channel]


def channel() -> Channel:
    if not _CHANNEL:
        raise TritonModelException("this works only in a model that a worker runs")
    return _CHANNEL[0]
