"""What models of Triton's Python backend import as `triton_python_backend_utils`.

The stub process puts this module into `sys.modules` under that name. The names, arguments and meanings are those that such
models are written against; what stands behind them is the worker's socket, `Channel`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import struct
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from enum import IntEnum
from queue import SimpleQueue
from typing import Any, Protocol, TypeAlias

import msgspec
import numpy as np

from dynamo.worker.repository import wire
from dynamo.worker.repository.wire import Array, Parameter

Lend: TypeAlias = Callable[[int, wire.TensorHead, wire.Buffer], wire.TensorHead]

TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_START = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_END = 2
TRITONSERVER_REQUEST_RELEASE_ALL = 1
TRITONSERVER_MEMORY_CPU = 0
TRITONSERVER_MEMORY_CPU_PINNED = 1
TRITONSERVER_MEMORY_GPU = 2

TRITON_STRING_TO_NUMPY: dict[str, Any] = {
    "TYPE_BOOL": np.bool_,
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
_NUMPY_TO_TRITON_STRING = {np.dtype(kind): text for text, kind in TRITON_STRING_TO_NUMPY.items()}


class TritonModelException(Exception):
    """Raised by a model, or by this module, for a request or configuration that cannot be used."""


class TritonError:
    """The error of a request: a message and a code."""

    UNKNOWN = 0
    INTERNAL = 1
    NOT_FOUND = 2
    INVALID_ARG = 3
    UNAVAILABLE = 4
    UNSUPPORTED = 5
    ALREADY_EXISTS = 6
    CANCELLED = 7

    def __init__(self, message: str, code: int = INTERNAL) -> None:
        self._message = str(message)
        self._code = code

    def message(self) -> str:
        return self._message

    def code(self) -> int:
        return self._code

    def __str__(self) -> str:
        return self._message

    def __repr__(self) -> str:
        return f"TritonError({self._message!r}, code={self._code})"


class Tensor:
    """A named array."""

    def __init__(self, name: str, array: Any) -> None:
        self._name = name
        self._array: Array = np.asarray(array)
        if self._array.dtype.kind in "SU":
            self._array = self._array.astype(np.object_)
        self._datatype = datatype_of(name, self._array)

    @classmethod
    def from_dlpack(cls, name: str, tensor: Any) -> Tensor:
        """Make a tensor from one of another library in CPU memory."""
        if not hasattr(tensor, "__dlpack__"):
            raise TritonModelException("from_dlpack takes an object with __dlpack__, not a bare capsule")
        return cls(name, np.from_dlpack(tensor))

    def to_dlpack(self) -> Any:
        return self.__dlpack__()

    def __dlpack__(self, *, stream: object = None) -> Any:
        array = self._array if self._array.flags.writeable else self._array.copy()
        return array.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> Array:
        return self._array

    def triton_dtype(self) -> int:
        """The number of the datatype in model configurations."""
        return list(TRITON_STRING_TO_NUMPY).index(self._datatype) + 1

    def shape(self) -> list[int]:
        return list(self._array.shape)

    def is_cpu(self) -> bool:
        return True


def datatype_of(name: str, array: Array) -> str:
    """Return the datatype of an array as configurations name it. Raises TritonModelException if there is none."""
    text = _NUMPY_TO_TRITON_STRING.get(array.dtype)
    if text is None:
        raise TritonModelException(f"tensor '{name}' is an array of {array.dtype}, which has no datatype")
    return text


class InferenceResponse:
    """The response to one request: tensors, or an error."""

    def __init__(
        self,
        output_tensors: Sequence[Tensor] = (),
        error: TritonError | None = None,
        parameters: Mapping[str, Parameter] | str | None = None,
    ) -> None:
        for tensor in output_tensors:
            if not isinstance(tensor, Tensor):
                raise TritonModelException(f"an output must be a Tensor, not a {type(tensor).__name__}")
        if error is not None and not isinstance(error, TritonError):
            raise TritonModelException(f"an error must be a TritonError, not a {type(error).__name__}")
        self._tensors = list(output_tensors)
        self._error = error
        self._parameters = dict(json.loads(parameters) if isinstance(parameters, str) else parameters or {})

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
        packed = [wire.pack(tensor.name(), tensor.as_numpy()) for tensor in self._tensors]
        outputs = tuple(lend(number, head, raw) for head, raw in packed)
        raws = [raw for head, (_, raw) in zip(outputs, packed, strict=True) if head.place is None]
        return wire.Response(number=number, outputs=outputs, final=final, parameters=self._parameters), raws


class PreferredMemory:
    """Where a caller wants tensors. All tensors are in CPU memory here."""

    def __init__(self, preferred_memory_type: int, preferred_device_id: int = 0) -> None:
        self.preferred_memory_type = preferred_memory_type
        self.preferred_device_id = preferred_device_id


class InferenceRequest:
    """A request to this model, or one to another model of this worker."""

    def __init__(
        self,
        request_id: str = "",
        correlation_id: int | str = 0,
        inputs: Sequence[Tensor] = (),
        requested_output_names: Sequence[str] = (),
        model_name: str = "",
        model_version: int = -1,
        flags: int = 0,
        timeout: int = 0,
        preferred_memory: PreferredMemory | None = None,
        trace: object = None,
        parameters: Mapping[str, Parameter] | str | None = None,
    ) -> None:
        self._inputs = list(inputs)
        self._preferred_memory = preferred_memory
        self._trace = trace
        self._head = wire.RequestHead(
            number=0,
            model=model_name,
            version="" if int(model_version) < 1 else str(model_version),
            request_id=request_id,
            correlation_id=correlation_id,
            flags=flags,
            timeout_us=timeout,
            parameters=dict(json.loads(parameters) if isinstance(parameters, str) else parameters or {}),
            outputs=tuple(requested_output_names),
        )
        self._sender: InferenceResponseSender | None = None

    @classmethod
    def arrived(cls, head: wire.RequestHead, inputs: Sequence[Tensor], sender: InferenceResponseSender) -> InferenceRequest:
        request = cls.__new__(cls)  # one for each request of a client: its head is there already
        request._inputs, request._head, request._sender = list(inputs), head, sender
        request._preferred_memory = request._trace = None
        return request

    def inputs(self) -> list[Tensor]:
        return self._inputs

    def request_id(self) -> str:
        return self._head.request_id

    def correlation_id(self) -> int | str:
        return self._head.correlation_id

    def requested_output_names(self) -> list[str]:
        return list(self._head.outputs)

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
        """The parameters as JSON."""
        return json.dumps(self._head.parameters)

    def preferred_memory(self) -> PreferredMemory | None:
        return self._preferred_memory

    def trace(self) -> object:
        return self._trace

    def is_cancelled(self) -> bool:
        return self._sender is not None and self._sender.is_cancelled()

    def get_response_sender(self) -> InferenceResponseSender:
        if self._sender is None:
            raise TritonModelException("only a request that came from outside has a response sender")
        self._sender.taken = True
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
        if not self._head.model:
            raise TritonModelException("a request to another model needs its model_name")
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
        if head.final and not tensors and head.error is None:
            raise StopIteration
        self._read += 1
        if self._read % (wire.RESPONSE_WINDOW // 2) == 0 and not self._ended:
            self._call.grant(self._read + wire.RESPONSE_WINDOW)
        return _to_response(head, tensors)

    def __del__(self) -> None:
        if not self._ended:
            self._call.cancel()


def _to_response(head: wire.Response, tensors: list[Tensor]) -> InferenceResponse:
    error = None if head.error is None else TritonError(head.error, head.code)
    return InferenceResponse(tensors, error, head.parameters)


class InferenceResponseSender:
    """Sends the responses of one request, from any thread."""

    def __init__(self, number: int, channel: Channel) -> None:
        self.taken = False
        """Whether the model responds through the sender, rather than by the return value of `execute`."""
        self._number = number
        self._channel = channel
        self._closed = False
        self._lock = threading.Lock()

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        """Send a response. `flags` is TRITONSERVER_RESPONSE_COMPLETE_FINAL with, or after, the last one.

        Blocks while the caller has many responses to read, except on an event loop.
        """
        final = bool(flags & TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        if response is None and not final:
            raise TritonModelException("send needs a response, or the flag TRITONSERVER_RESPONSE_COMPLETE_FINAL")
        if not final:
            self._channel.wait_for_credit(self._number)  # before the lock, which `fail` must get
        with self._lock:
            self._channel.send(*self._prepare(response, final=final))

    def finish(self, response: InferenceResponse) -> tuple[wire.Response, list[wire.Buffer]]:
        """Return the last response as a message, which the caller sends."""
        with self._lock:
            return self._prepare(response, final=True)

    def _prepare(self, response: InferenceResponse | None, *, final: bool) -> tuple[wire.Response, list[wire.Buffer]]:
        if self._closed:
            raise TritonModelException("the last response to this request has been sent already")
        message = (response or InferenceResponse()).to_wire(self._number, final=final, lend=self._channel.lend)
        self._closed = final
        if final:
            self._channel.over(self._number)
        return message

    def fail(self, message: str, code: int = TritonError.INTERNAL) -> None:
        """End the request with an error, unless it has ended."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._channel.over(self._number)
                self._channel.send(wire.Response(number=self._number, error=message, code=code))

    def is_cancelled(self) -> bool:
        return self._channel.is_cancelled(self._number)


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

    def control(self, control: wire.Control) -> wire.Response: ...

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


class LogLevel(IntEnum):
    INFO = 0
    WARNING = 1
    ERROR = 2
    VERBOSE = 3


class Logger:
    """Writes to the worker's log."""

    INFO = LogLevel.INFO
    WARNING = LogLevel.WARNING
    ERROR = LogLevel.ERROR
    VERBOSE = LogLevel.VERBOSE

    @staticmethod
    def log(message: str, level: int = LogLevel.INFO) -> None:
        levels = {LogLevel.WARNING: logging.WARNING, LogLevel.ERROR: logging.ERROR, LogLevel.VERBOSE: logging.DEBUG}
        channel().send(wire.Log(levels.get(LogLevel(level), logging.INFO), str(message)))

    @staticmethod
    def log_info(message: str) -> None:
        Logger.log(message, LogLevel.INFO)

    @staticmethod
    def log_warn(message: str) -> None:
        Logger.log(message, LogLevel.WARNING)

    @staticmethod
    def log_error(message: str) -> None:
        Logger.log(message, LogLevel.ERROR)

    @staticmethod
    def log_verbose(message: str) -> None:
        Logger.log(message, LogLevel.VERBOSE)


class ModelConfig:
    """A configuration as `auto_complete_config` receives it."""

    def __init__(self, config: str) -> None:
        self._config: dict[str, Any] = json.loads(config)

    def as_dict(self) -> dict[str, Any]:
        return json.loads(json.dumps(self._config))  # type: ignore[no-any-return]

    def add_input(self, tensor: Mapping[str, Any]) -> None:
        self._add("input", tensor)

    def add_output(self, tensor: Mapping[str, Any]) -> None:
        self._add("output", tensor)

    def set_max_batch_size(self, size: int) -> None:
        self._config["max_batch_size"] = max(size, self._config.get("max_batch_size") or 0)

    def set_dynamic_batching(self) -> None:
        for other in ("sequence_batching", "ensemble_scheduling"):
            if self._config.get(other):
                raise ValueError(f"the configuration of model '{self._config.get('name')}' has {other} already")
        self._config.setdefault("dynamic_batching", {})

    def set_model_transaction_policy(self, policy: Mapping[str, bool]) -> None:
        unknown = sorted(set(policy) - {"decoupled"})
        if unknown:
            raise ValueError(f"the transaction policy has no {unknown[0]!r}")
        given = (self._config.get("model_transaction_policy") or {}).get("decoupled", False)
        self._config["model_transaction_policy"] = {"decoupled": bool(given or policy.get("decoupled"))}

    def _add(self, kind: str, tensor: Mapping[str, Any]) -> None:
        unknown = sorted(set(tensor) - {"name", "data_type", "dims", "optional"})
        if unknown:
            raise ValueError(f"an {kind} has no property {unknown[0]!r}")
        if not tensor.get("name"):
            raise ValueError(f"an {kind} needs a name")
        for declared in self._config.setdefault(kind, []):
            if declared["name"] == tensor["name"]:
                return self._agree(kind, declared, tensor)
        self._config[kind].append(dict(tensor))

    def _agree(self, kind: str, declared: dict[str, Any], tensor: Mapping[str, Any]) -> None:
        for key in ("data_type", "dims"):
            given = tensor.get(key)
            if declared.get(key) in (None, [], "TYPE_INVALID"):
                declared[key] = given
            elif given is not None and _plain(declared[key]) != _plain(given):
                raise ValueError(f"{kind} '{tensor['name']}' has the {key} {declared[key]}; the model expects {given}")


def _plain(value: Any) -> Any:
    return [int(item) for item in value] if isinstance(value, list | tuple) else value


def get_input_tensor_by_name(inference_request: InferenceRequest, name: str) -> Tensor | None:
    return next((tensor for tensor in inference_request.inputs() if tensor.name() == name), None)


def get_output_tensor_by_name(inference_response: InferenceResponse, name: str) -> Tensor | None:
    return next((tensor for tensor in inference_response.output_tensors() if tensor.name() == name), None)


def get_input_config_by_name(model_config: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    return next((dict(tensor) for tensor in model_config.get("input", ()) if tensor["name"] == name), None)


def get_output_config_by_name(model_config: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    return next((dict(tensor) for tensor in model_config.get("output", ()) if tensor["name"] == name), None)


def using_decoupled_model_transaction_policy(model_config: Mapping[str, Any]) -> bool:
    return bool((model_config.get("model_transaction_policy") or {}).get("decoupled", False))


def triton_string_to_numpy(triton_type_string: str) -> Any:
    """Return the numpy type of `TYPE_FP32` and the like."""
    return TRITON_STRING_TO_NUMPY[triton_type_string]


def triton_to_numpy_type(data_type: int) -> Any:
    """Return the numpy type of a datatype's number in configurations."""
    return list(TRITON_STRING_TO_NUMPY.values())[data_type - 1]


def numpy_to_triton_type(data_type: Any) -> int:
    for number, kind in enumerate(TRITON_STRING_TO_NUMPY.values(), start=1):
        if np.dtype(kind) == np.dtype(data_type):
            return number
    raise TritonModelException(f"numpy's {data_type} has no datatype")


def serialize_byte_tensor(input_tensor: Array) -> Array | None:
    """Return strings or bytes with length prefixes, as an array of one `bytes` element."""
    if input_tensor.size == 0:
        return np.empty([0], dtype=np.object_)
    if input_tensor.dtype.kind not in "OSU":
        return None
    _, raw = wire.pack("", input_tensor)
    return np.asarray(bytes(raw), dtype=np.object_)


def deserialize_bytes_tensor(encoded_tensor: bytes) -> Array:
    """Return the elements of a tensor in the form of `serialize_byte_tensor` as an array of one dimension."""
    elements: list[bytes] = []
    position = 0
    while position < len(encoded_tensor):
        (length,) = struct.unpack_from("<I", encoded_tensor, position)
        elements.append(bytes(encoded_tensor[position + 4 : position + 4 + length]))
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
    _order(wire.Control(number=0, verb="load", model=model_name, config=config, files=dict(files or {})))


def unload_model(model_name: str, unload_dependents: bool = False) -> None:
    _order(wire.Control(number=0, verb="unload", model=model_name, dependents=unload_dependents))


def _order(control: wire.Control) -> None:
    response = channel().control(control)
    if response.error is not None:
        raise TritonModelException(response.error)
