"""What models of Triton's Python backend import as `triton_python_backend_utils`.

The stub process puts this module into `sys.modules` under that name. The names, arguments and meanings are those that such
models are written against; what stands behind them is the worker's socket, `Channel`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import operator
import struct
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from enum import Enum, IntEnum
from queue import SimpleQueue
from typing import Any, Protocol, SupportsIndex, TypeAlias

import msgspec
import numpy as np

from dynamo.worker.repository import dlpack, wire
from dynamo.worker.repository.wire import Array, Parameter

Lend: TypeAlias = Callable[[int, wire.TensorHead, wire.Buffer], wire.TensorHead]

TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_START = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_END = 2
TRITONSERVER_REQUEST_RELEASE_ALL = 1
TRITONSERVER_REQUEST_RELEASE_RESCHEDULE = 2


class _Enumeration(IntEnum):
    """Shown by its name, as the enumerations of Triton's module are."""

    __str__ = Enum.__str__


class MemoryType(_Enumeration):
    TRITONSERVER_MEMORY_GPU = 0
    TRITONSERVER_MEMORY_CPU = 1


TRITONSERVER_MEMORY_GPU = MemoryType.TRITONSERVER_MEMORY_GPU
TRITONSERVER_MEMORY_CPU = MemoryType.TRITONSERVER_MEMORY_CPU

TRITON_STRING_TO_NUMPY: dict[str, Any] = {
    "TYPE_BOOL": bool,
    "TYPE_UINT8": np.uint8,
    "TYPE_UINT16": np.uint16,
    "TYPE_UINT32": np.uint32,
    "TYPE_UINT64": np.uint64,
    "TYPE_INT8": np.int8,
    "TYPE_INT16": np.int16,
    "TYPE_INT32": np.int32,
    "TYPE_INT64": np.int64,
    "TYPE_FP16": np.float16,
    "TYPE_FP32": np.float32,
    "TYPE_FP64": np.float64,
    "TYPE_STRING": np.object_,
}
_BF16 = "TYPE_BF16"
_NUMPY_TO_TRITON_STRING = {np.dtype(kind): text for text, kind in TRITON_STRING_TO_NUMPY.items()}


class TritonModelException(Exception):
    """Raised by a model, or by this module, for a request or configuration that cannot be used."""


class ErrorCode(_Enumeration):
    UNKNOWN = 0
    INTERNAL = 1
    NOT_FOUND = 2
    INVALID_ARG = 3
    UNAVAILABLE = 4
    UNSUPPORTED = 5
    ALREADY_EXISTS = 6
    CANCELLED = 7


def _need(what: str, value: object, kind: type | tuple[type, ...]) -> None:
    """Raise TypeError, as Triton's classes do for an argument of a wrong type."""
    if not isinstance(value, kind):
        kinds = kind if isinstance(kind, tuple) else (kind,)
        raise TypeError(f"{what} must be {' or '.join(one.__name__ for one in kinds)}, not {type(value).__name__}")


def _integer(what: str, value: SupportsIndex) -> int:
    """Return an integer, also one of numpy. Raises TypeError for anything else."""
    if not isinstance(value, SupportsIndex):
        raise TypeError(f"{what} must be an integer, not {type(value).__name__}")
    return operator.index(value)


class TritonError:
    """The error of a request: a message and a code."""

    UNKNOWN = ErrorCode.UNKNOWN
    INTERNAL = ErrorCode.INTERNAL
    NOT_FOUND = ErrorCode.NOT_FOUND
    INVALID_ARG = ErrorCode.INVALID_ARG
    UNAVAILABLE = ErrorCode.UNAVAILABLE
    UNSUPPORTED = ErrorCode.UNSUPPORTED
    ALREADY_EXISTS = ErrorCode.ALREADY_EXISTS
    CANCELLED = ErrorCode.CANCELLED

    def __init__(self, message: str, code: ErrorCode = ErrorCode.INTERNAL) -> None:
        _need("the message of a TritonError", message, str)
        _need("the code of a TritonError", code, ErrorCode)
        self._message = message
        self._code = code

    def message(self) -> str:
        return self._message

    def code(self) -> ErrorCode:
        return self._code

    def __repr__(self) -> str:
        return f"TritonError({self._message!r}, code={self._code!r})"


class Tensor:
    """A named array."""

    def __init__(self, name: str, array: Array) -> None:
        self._name = _tensor_name(name)
        _need(f"the value of tensor '{name}'", array, np.ndarray)
        datatype_of(array)
        self._array: Array = np.asarray(array, order="C")
        self._is_bf16 = False

    @classmethod
    def received(cls, name: str, array: Array, *, is_bf16: bool = False) -> Tensor:
        """Make a tensor of an array that needs no check."""
        tensor = cls.__new__(cls)
        tensor._name, tensor._array, tensor._is_bf16 = name, array, is_bf16
        return tensor

    @property
    def _datatype(self) -> str:
        return _BF16 if self._is_bf16 else datatype_of(self._array)

    @classmethod
    def from_dlpack(cls, name: str, tensor: Any) -> Tensor:
        """Make a tensor from a DLPack capsule, or a tensor of another library, in the CPU's memory. BF16 becomes float32."""
        _tensor_name(name)
        try:
            array, is_bf16 = dlpack.from_dlpack(tensor)
        except TypeError as error:
            raise TritonModelException(
                "Provided tensor is not supported. Tensor must be a DLPack capsule or have `__dlpack__` and `__dlpack_device__` "
                f"attributes: {error}"
            ) from error
        except ValueError as error:
            raise TritonModelException(f"tensor '{name}' cannot be read by DLPack: {error}") from error
        array = np.asarray(array, order="C")
        datatype_of(array)
        return cls.received(name, array, is_bf16=is_bf16)

    def to_dlpack(self) -> Any:
        return self.__dlpack__()

    def __dlpack__(self, *, stream: object = None) -> Any:
        if self._datatype == "TYPE_STRING":
            raise TritonModelException("DLPack does not have support for string tensors.")
        return dlpack.to_dlpack(self._array, is_bf16=self._is_bf16)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> Array:
        """Return the array. That of a BF16 tensor is float32."""
        return self._array

    def triton_dtype(self) -> int:
        """The number of the datatype in model configurations."""
        return (*TRITON_STRING_TO_NUMPY, _BF16).index(self._datatype) + 1

    def shape(self) -> list[int]:
        return list(self._array.shape)

    def is_cpu(self) -> bool:
        return True


def _tensor_name(name: str) -> str:
    _need("the name of a tensor", name, str)
    if not name:
        raise TritonModelException("Tensor name cannot be an empty string.")
    return name


def datatype_of(array: Array) -> str:
    """Return the datatype of an array as configurations name it. Raises TritonModelException if there is none."""
    text = "TYPE_STRING" if array.dtype.kind == "S" else _NUMPY_TO_TRITON_STRING.get(array.dtype)
    if text is None:
        raise TritonModelException("NumPy dtype is not supported.")
    return text


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
            _need("the error of a response", error, TritonError)
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
        _need("each of the tensors", tensor, Tensor)
    return list(tensors)


def _parameters_of(parameters: Mapping[str, Parameter] | None) -> dict[str, Parameter]:
    """Return checked parameters. Raises TritonModelException for a name or value of a wrong type."""
    if parameters is None:
        return {}
    if not isinstance(parameters, dict):
        raise TritonModelException(f"Expect dict, got {type(parameters)}")
    for name, value in parameters.items():
        if not isinstance(name, str):
            raise TritonModelException(f"Expect parameters keys to have type str, found type {type(name)}")
        if not isinstance(value, bool | int | str):
            raise TritonModelException(f"Expect parameters values to have type bool/int/str, found type {type(value)}")
    return dict(parameters)


class PreferredMemory:
    """Where a caller wants tensors. All tensors are in CPU memory here."""

    def __init__(self, preferred_memory_type: MemoryType, preferred_device_id: int = 0) -> None:
        _need("the preferred memory type", preferred_memory_type, MemoryType)
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
        _need("the request_id of a request", request_id, str)
        _need("the model_name of a request", model_name, str)
        _need("the requested_output_names", requested_output_names, (list, tuple, set, frozenset))
        for name in requested_output_names or ():
            _need("each of the requested_output_names", name, str)
        if not isinstance(correlation_id, int | str):
            raise TritonModelException("Correlation ID must be integer or string")
        if isinstance(correlation_id, int) and correlation_id < 0:
            raise TritonModelException(f"Correlation ID must not be negative, got {correlation_id}")
        if preferred_memory is not None:
            _need("the preferred memory", preferred_memory, PreferredMemory)
        if trace is not None:
            _need("the trace of a request", trace, InferenceTrace)
        self._inputs = _tensors_of(inputs)
        self._preferred_memory = preferred_memory
        self._head = wire.RequestHead(
            number=0,
            model=model_name or "",
            version="" if (version := _integer("the model_version of a request", model_version)) < 1 else str(version),
            request_id=request_id,
            correlation_id=correlation_id,
            flags=_integer("the flags of a request", flags),
            timeout_us=_integer("the timeout of a request", timeout),
            parameters=_parameters_of(parameters),
            outputs=tuple(requested_output_names or ()),
            trace=0 if trace is None else trace.request,
        )
        self._sender: InferenceResponseSender | None = None
        self._release_flags = TRITONSERVER_REQUEST_RELEASE_ALL

    @classmethod
    def arrived(cls, head: wire.RequestHead, inputs: Sequence[Tensor], sender: InferenceResponseSender) -> InferenceRequest:
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
        _need("the release flags", flags, int)
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
            _need("a response", response, InferenceResponse)
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

    def fail(self, message: str, code: int = TritonError.INTERNAL) -> None:
        """End the request with an error, unless it has ended."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._channel.over(self.number)
                self._channel.send(wire.Response(number=self.number, error=message, code=code))

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

    def call(self, head: wire.RequestHead, inputs: Sequence[Tensor], *, decoupled: bool) -> CallInProgress: ...

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


class Logger:
    """Writes to the worker's log."""

    class LogLevel(_Enumeration):
        INFO = 0
        WARNING = 1
        ERROR = 2
        VERBOSE = 3

    INFO = LogLevel.INFO
    WARNING = LogLevel.WARNING
    ERROR = LogLevel.ERROR
    VERBOSE = LogLevel.VERBOSE

    @staticmethod
    def log(message: str, level: LogLevel = LogLevel.INFO) -> None:
        _need("a log message", message, str)
        _need("the log level", level, Logger.LogLevel)
        channel().send(wire.Log(_LOG_LEVELS[level], message))

    @staticmethod
    def log_info(message: str) -> None:
        Logger.log(message, Logger.INFO)

    @staticmethod
    def log_warn(message: str) -> None:
        Logger.log(message, Logger.WARNING)

    @staticmethod
    def log_error(message: str) -> None:
        Logger.log(message, Logger.ERROR)

    @staticmethod
    def log_verbose(message: str) -> None:
        Logger.log(message, Logger.VERBOSE)


_LOG_LEVELS = {
    Logger.INFO: logging.INFO,
    Logger.WARNING: logging.WARNING,
    Logger.ERROR: logging.ERROR,
    Logger.VERBOSE: logging.DEBUG,
}


class MetricKind(_Enumeration):
    COUNTER = 0
    GAUGE = 1
    HISTOGRAM = 2


class MetricFamily:
    """Metrics of one name, which the worker shows at `/metrics`. Those of the same name and kind are one family."""

    COUNTER = MetricKind.COUNTER
    GAUGE = MetricKind.GAUGE
    HISTOGRAM = MetricKind.HISTOGRAM

    def __init__(self, name: str, description: str, kind: MetricKind) -> None:
        _need("the name of a MetricFamily", name, str)
        _need("the description of a MetricFamily", description, str)
        _need("the kind of a MetricFamily", kind, MetricKind)
        self._name = name
        self._kind = kind
        order = wire.MetricOrder(verb="family", family=name, kind=kind.name.lower(), description=description)
        _ordered(order, "Error when creating MetricFamily")

    def Metric(self, labels: Mapping[str, str] | None = None, buckets: Sequence[float] | None = None) -> Metric:
        """Return the metric of this family with these labels, which all instances of a model share."""
        if buckets is not None and self._kind is not MetricKind.HISTOGRAM:
            raise TritonModelException("Failed to create metric. Unexpected buckets found.")
        if buckets is None and self._kind is MetricKind.HISTOGRAM:
            raise TritonModelException("Failed to create metric. Missing required buckets.")
        return Metric(self._name, self._kind, labels or {}, buckets or ())

    def __repr__(self) -> str:
        return f"MetricFamily({self._name!r}, kind={self._kind!r})"


class Metric:
    """One series of a family; made by `MetricFamily.Metric`."""

    def __init__(self, family: str, kind: MetricKind, labels: Mapping[str, str], buckets: Sequence[float]) -> None:
        what = "Error when creating Metric"
        if not all(isinstance(value, str) for value in labels.values()):
            raise _refused(what, "attempt to access JSON non-string as string")
        self._family = family
        self._kind = kind
        self._labels = tuple(sorted((str(name), value) for name, value in labels.items()))
        limits = tuple(float(limit) for limit in buckets)
        _ordered(wire.MetricOrder(verb="series", family=family, labels=self._labels, buckets=limits), what)

    def __repr__(self) -> str:
        return f"Metric({self._family!r}, kind={self._kind!r}, labels={dict(self._labels)!r})"

    def increment(self, value: float) -> None:
        """Add to a counter or gauge; less than 0 to a gauge only."""
        what = "Failed to increment metric value"
        self._need_kind("Increment", what, MetricKind.COUNTER, MetricKind.GAUGE)
        value = _number(value)
        if self._kind is MetricKind.COUNTER and value < 0:
            raise _refused(what, "TRITONSERVER_METRIC_KIND_COUNTER can only be incremented monotonically by non-negative values.")
        self._change("increment", value)

    def set(self, value: float) -> None:
        """Set a gauge."""
        self._need_kind("Set", "Failed to set metric value", MetricKind.GAUGE)
        self._change("set", value)

    def observe(self, value: float) -> None:
        """Count an observation of a histogram."""
        self._need_kind("Observe", "Failed to observe metric value", MetricKind.HISTOGRAM)
        self._change("observe", value)

    def value(self) -> float:
        """Return the value of a counter or gauge, to which all instances of the model contribute."""
        what = "Failed to get metric value"
        self._need_kind("Value", what, MetricKind.COUNTER, MetricKind.GAUGE)
        order = wire.MetricOrder(verb="value", family=self._family, labels=self._labels)
        return float(_ordered(order, what).parameters["value"])

    def _need_kind(self, operation: str, what: str, *kinds: MetricKind) -> None:
        if self._kind not in kinds:
            raise _refused(what, f"TRITONSERVER_METRIC_KIND_{self._kind.name} does not support {operation}")

    def _change(self, verb: str, value: float) -> None:
        amount = _number(value)
        channel().send(wire.MetricOrder(verb=verb, family=self._family, labels=self._labels, amount=amount))


def _number(value: float) -> float:
    """Return a number, also one of numpy, as a float. Raises TypeError for text, which `float` would parse."""
    if isinstance(value, str | bytes):
        raise TypeError(f"the value of a metric must be a number, not {type(value).__name__}")
    return float(value)


def _ordered(order: wire.Control | wire.MetricOrder, what: str) -> wire.Response:
    """Return the worker's response. Raises TritonModelException, beginning with `what`."""
    response = channel().control(order)
    if response.error is not None:
        raise _refused(what, response.error)
    return response


def _refused(what: str, why: str) -> TritonModelException:
    instance = channel().instance_name
    return TritonModelException(f"{what}: Failed to process the request for model '{instance}', message: {why}")


for _kind in (
    *(TritonModelException, TritonError, ErrorCode, Tensor, InferenceResponse, InferenceRequest, InferenceTrace),
    *(PreferredMemory, MemoryType, InferenceResponseSender, ResponseIterator, Logger, Logger.LogLevel),
    *(MetricFamily, Metric, MetricKind),
):
    _kind.__module__ = "c_python_backend_utils"  # under which Triton shows and pickles them
ErrorCode.__name__ = "__ErrorCode"


class ModelConfig:
    """A configuration as `auto_complete_config` receives it. What it refuses is a ValueError in Triton's words."""

    def __init__(self, config: str) -> None:
        self._config: dict[str, Any] = json.loads(config)
        self._where = f"auto-complete-config function for model '{self._config.get('name', '')}'"

    def as_dict(self) -> dict[str, Any]:
        return self._config

    def add_input(self, tensor: Mapping[str, Any]) -> None:
        self._add("input", tensor, ("name", "data_type", "dims", "optional"))

    def add_output(self, tensor: Mapping[str, Any]) -> None:
        self._add("output", tensor, ("name", "data_type", "dims"))

    def set_max_batch_size(self, size: int) -> None:
        given = self._config.get("max_batch_size") or 0
        if given > size:
            raise ValueError(
                f"configuration specified max_batch_size {given}, but in {self._where} specified max_batch_size {size}"
            )
        self._config["max_batch_size"] = size

    def set_dynamic_batching(self) -> None:
        for other in ("sequence_batching", "ensemble_scheduling"):
            if other in self._config:
                raise ValueError(
                    f"Configuration specified scheduling_choice as '{other}', but {self._where} tries to set scheduling_choice "
                    "as 'dynamic_batching'"
                )
        self._config.setdefault("dynamic_batching", {})

    def set_model_transaction_policy(self, policy: Mapping[str, bool]) -> None:
        if set(policy) - {"decoupled"}:
            raise ValueError(f"model transaction property in {self._where} contains property other than 'decoupled'.")
        given = self._config.setdefault("model_transaction_policy", {})
        if "decoupled" in policy:
            if given.get("decoupled", policy["decoupled"]) != policy["decoupled"]:
                raise ValueError(
                    f"trying to change decoupled property in auto-complete-config for model '{self._config.get('name', '')}', "
                    f"which is already set to '{given['decoupled']}'."
                )
            given["decoupled"] = policy["decoupled"]

    def _add(self, kind: str, tensor: Mapping[str, Any], properties: Sequence[str]) -> None:
        named = f"{kind} '{tensor['name']}'" if "name" in tensor else kind
        if set(tensor) - set(properties):
            texts = [f"'{name}'" for name in properties]
            listed = f"{', '.join(texts[:-1])} and {texts[-1]}"
            raise ValueError(f"{named} in {self._where} contains property other than {listed}.")
        for name in ("name", "data_type", "dims"):
            if name not in tensor:
                raise ValueError(f"{named} in {self._where} is missing '{name}' property.")
        for declared in self._config.setdefault(kind, []):
            if declared["name"] == tensor["name"]:
                return self._agree(kind, declared, tensor)
        self._config[kind].append(dict(tensor))

    def _agree(self, kind: str, declared: dict[str, Any], tensor: Mapping[str, Any]) -> None:
        model = self._config.get("name", "")
        if declared.get("data_type", "TYPE_INVALID") not in ("TYPE_INVALID", tensor["data_type"]):
            raise ValueError(
                f"unable to load model '{model}', configuration expects datatype {declared['data_type']} for {kind} "
                f"'{tensor['name']}', model provides {tensor['data_type']}"
            )
        for key in ("dims", "optional"):
            given = declared.get(key)
            differs = (
                given and _plain(given) != _plain(tensor[key]) if key == "dims" else given not in (None, tensor.get(key, given))
            )
            if differs:
                raise ValueError(
                    f"model '{model}', tensor '{tensor['name']}': the model expects {key} {tensor[key]} but the model "
                    f"configuration specifies {key} {given}"
                )
        declared.update(tensor)


ModelConfig.__module__ = "triton_python_backend_utils"


def _plain(value: Any) -> Any:
    return [int(item) for item in value]


def get_input_tensor_by_name(inference_request: InferenceRequest, name: str) -> Tensor | None:
    return next((tensor for tensor in inference_request.inputs() if tensor.name() == name), None)


def get_output_tensor_by_name(inference_response: InferenceResponse, name: str) -> Tensor | None:
    return next((tensor for tensor in inference_response.output_tensors() if tensor.name() == name), None)


def get_input_config_by_name(model_config: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    return next((tensor for tensor in model_config.get("input", ()) if tensor["name"] == name), None)


def get_output_config_by_name(model_config: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    return next((tensor for tensor in model_config.get("output", ()) if tensor["name"] == name), None)


def using_decoupled_model_transaction_policy(model_config: Mapping[str, Any]) -> bool:
    return bool((model_config.get("model_transaction_policy") or {}).get("decoupled", False))


def triton_string_to_numpy(triton_type_string: str) -> Any:
    """Return the numpy type of `TYPE_FP32` and the like."""
    return TRITON_STRING_TO_NUMPY[triton_type_string]


def triton_to_numpy_type(data_type: int) -> Any:
    """Return the numpy type of a datatype's number in configurations; None if there is none."""
    return _NUMPY_BY_NUMBER.get(data_type)


def numpy_to_triton_type(data_type: Any) -> int | None:
    """Return the number in configurations of a numpy type's datatype; None if there is none."""
    dtype = np.dtype(data_type)
    return next(
        (number for number, kind in _NUMPY_BY_NUMBER.items() if np.dtype(kind) == dtype), 13 if dtype.kind == "S" else None
    )


_NUMPY_BY_NUMBER = {
    number: np.bool_ if kind is bool else kind for number, kind in enumerate(TRITON_STRING_TO_NUMPY.values(), start=1)
}


def serialize_byte_tensor(input_tensor: Array) -> bytes | tuple[()] | None:
    """Return strings or bytes with length prefixes; None for an array of another type, and () for an empty one."""
    if input_tensor.size == 0:
        return ()
    if input_tensor.dtype.kind not in "OS":
        return None
    return bytes(wire.pack("", input_tensor)[1])


def deserialize_bytes_tensor(encoded_tensor: bytes) -> Array:
    """Return the elements, which are `bytes`, of what `serialize_byte_tensor` gave. Raises struct.error if it is cut."""
    elements: list[bytes] = []
    position = 0
    while position < len(encoded_tensor):
        (length,) = struct.unpack_from("<I", encoded_tensor, position)
        elements += struct.unpack_from(f"<{length}s", encoded_tensor, position + 4)
        position += 4 + length
    array = np.empty(len(elements), dtype=np.object_)
    array[:] = elements
    return array


def get_model_dir() -> str:
    """Return the folder of the model's version."""
    return channel().model_folder


def is_model_ready(model_name: str, model_version: str = "") -> bool:
    """Return whether another model of this worker can be called."""
    response = channel().control(wire.Control(number=0, verb="ready", model=model_name, version=str(model_version)))
    return response.error is None and bool(response.parameters.get("ready"))


def load_model(model_name: str, config: str = "", files: Mapping[str, bytes] | None = None) -> None:
    """Load a model of this worker's repository; needs the explicit mode."""
    order = wire.Control(number=0, verb="load", model=model_name, config=config, files=dict(files or {}))
    _ordered(order, "Failed to load model")


def unload_model(model_name: str, unload_dependents: bool = False) -> None:
    order = wire.Control(number=0, verb="unload", model=model_name, dependents=unload_dependents)
    _ordered(order, "Failed to unload model")
