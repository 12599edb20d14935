"""Messages between a worker and the process of a Python-backend model, over a socket of their own.

A message is a prefix with the sizes of its head and its body, a msgpack head, and the body: the tensors that the head names, in
order. Body and tensors begin at multiples of 8 bytes. This module is imported by the model's process too, which may hold any
libraries in any versions: numpy and msgspec are all it needs.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]
Buffer: TypeAlias = bytes | bytearray | memoryview
Parameter: TypeAlias = bool | int | float | str

MAX_HEAD_BYTES = 64 * 2**20
MAX_PIECES = 512
"""Buffers in one system call; the limit of Linux is 1024."""
BEGUN, WITHDRAWN = 0, 1
"""Words of the memory that a worker and a process share: the number of the last execution that the process has begun, and of
the last that it must not begin any more. The process writes the first and then reads the second, the worker does the reverse.
"""
RESPONSE_WINDOW = 256
"""Responses to one request, or to one call of a model, that may be sent before any has been read."""

COUNTED_BYTES = 16 * 1024
"""A body of so many bytes is read only if the receiver has memory for it."""
HEAD_BYTES = 4096
"""Left free at the beginning of an `OutputMemory`, for the head of the message that the worker makes of the outputs."""

_PREFIX = struct.Struct("<IQ")
_LENGTH = struct.Struct("<I")
_ALIGNMENT = 8
_SCRATCH_BYTES = 128 * 1024
_PADDING = tuple(bytes(count) for count in range(_ALIGNMENT))

NUMPY: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype("?"),
    "UINT8": np.dtype("<u1"),
    "UINT16": np.dtype("<u2"),
    "UINT32": np.dtype("<u4"),
    "UINT64": np.dtype("<u8"),
    "INT8": np.dtype("<i1"),
    "INT16": np.dtype("<i2"),
    "INT32": np.dtype("<i4"),
    "INT64": np.dtype("<i8"),
    "FP16": np.dtype("<f2"),
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
    "BYTES": np.dtype("O"),
}
_DATATYPES = {dtype: name for name, dtype in NUMPY.items()}


class Place(msgspec.Struct, frozen=True, array_like=True):
    """Where a tensor lies in shared memory."""

    arena: str
    """The token of the arena."""
    position: int
    """Its offset in the file; of an output in the arena of its process: the first unit of its region."""
    generation: int = 0
    """Generation of the region of an output in the arena of its process."""


class OutputMemory(msgspec.Struct, frozen=True, array_like=True):
    """Memory of the worker's arena for the outputs of one response: `HEAD_BYTES`, and then each output after its `gap`."""

    position: int
    """Its offset in the file."""
    size: int


class TensorHead(msgspec.Struct, frozen=True, array_like=True):
    """A tensor whose `size` bytes follow the head, unless they lie somewhere else."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    size: int
    place: Place | None = None


class InferenceHead(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One inference request."""

    number: int
    """Assigned by the worker for a request, by the model for a call of another model."""
    model: str = ""
    version: str = ""
    request_id: str = ""
    correlation_id: int | str = 0
    flags: int = 0
    priority: int = 0
    timeout_us: int = 0
    parameters: dict[str, Parameter] = {}
    outputs: tuple[str, ...] = ()
    inputs: tuple[TensorHead, ...] = ()
    room: OutputMemory | None = None
    trace: int = 0
    """Number of the request in whose trace a call of another model has its own trace; 0: in none."""


class Memory(msgspec.Struct, frozen=True):
    """What a process may use of shared memory."""

    directory: str
    capacity_bytes: int
    least_bytes: int
    """Smaller tensors follow their heads."""
    reader: str
    """The token of the arena of the worker, which reads the outputs."""


class Start(msgspec.Struct, frozen=True, tag=True):
    """To the model: load the code of `file`. The response is Ready."""

    file: str
    paths: tuple[str, ...]
    memory: Memory | None = None


class Complete(msgspec.Struct, frozen=True, tag=True):
    """To the model: complete this configuration. The response is Ready."""

    config: str


class Initialize(msgspec.Struct, frozen=True, tag=True):
    """To the model: call `initialize` with these arguments. The response is Ready."""

    arguments: dict[str, str]
    decoupled: bool


class Execute(msgspec.Struct, frozen=True, tag=True):
    """To the model: requests for one call of `execute`. The response is a Response for each, in Done or before or after it.

    Executions are numbered in the order in which they are sent and begin.
    """

    number: int
    requests: tuple[InferenceHead, ...]
    is_retry: bool = False
    """A process died while it had these requests. Responses that wait to be sent are sent before they begin."""


class CancelRequest(msgspec.Struct, frozen=True, tag=True):
    """To the model: this request was cancelled. From the model: cancel this call."""

    number: int


class ResponseCredit(msgspec.Struct, frozen=True, tag=True):
    """To the model: it may send `total` responses to this request, counted from the first.

    From the model: the worker may send as many to this call.
    """

    number: int
    total: int


class OpenArena(msgspec.Struct, frozen=True, tag=True):
    """In both directions: tensors may lie in this arena, if the receiver can open it. The response is ArenaOpened."""

    arena: str


class ArenaOpened(msgspec.Struct, frozen=True, tag=True):
    """In both directions: the sender can read tensors of this arena. An arena that it cannot open gets no response."""

    arena: str


class Released(msgspec.Struct, frozen=True, tag=True):
    """From the model: nothing refers to the inputs in shared memory of these executions any more."""

    executions: tuple[int, ...]


class Finalize(msgspec.Struct, frozen=True, tag=True):
    """To the model: finalize. The response is Ready."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """From the model: done, or the error."""

    config: str = ""
    error: str = ""


RAISED = -1
"""As the code of an error, beside Triton's: `execute` raised, so that all its requests fail with what one may have caused."""


class Response(msgspec.Struct, frozen=True, tag=True, kw_only=True, omit_defaults=True):
    """From the model: a response to a request. To the model: a response to its call of another model."""

    number: int
    outputs: tuple[TensorHead, ...] = ()
    error: str | None = None
    code: int = 0
    final: bool = True
    only_ends: bool = False
    """This is no response: it says that the one before was the last."""
    parameters: dict[str, Parameter] = {}


class Done(msgspec.Struct, frozen=True, tag=True, kw_only=True, omit_defaults=True):
    """From the model: `execute` has returned these responses, or raised; or it was not called."""

    number: int
    responses: tuple[Response, ...] = ()
    infer_ns: int = 0
    """How long `execute` ran; 0 if it was not called: all requests were cancelled, or the execution was withdrawn."""
    is_withdrawn: bool = False
    rescheduled: tuple[int, ...] = ()
    """The requests of an iterative sequence that the model wants once more. They end here without a last response."""


class CallModel(msgspec.Struct, frozen=True, tag=True):
    """From the model: run this request on another model of the worker."""

    request: InferenceHead
    decoupled: bool = False
    """The model takes any number of responses."""
    requests: tuple[int, ...] = ()
    """The open requests for which it is made, if any is: those of the `execute` that makes it; for a thread of the model, all."""
    is_awaited: bool = False
    """An `execute` has made it, so the process does nothing else until it has ended."""
    parents: tuple[int, ...] = ()
    """Whose owner it has: of the request whose trace it is given, or else those with its correlation id; empty: none has."""
    refusal: str = ""
    """Why the worker, which sets this, has not read its inputs."""


class Control(msgspec.Struct, frozen=True, tag=True, kw_only=True, omit_defaults=True):
    """From the model: query or change the repository. The reply is a Response."""

    number: int
    verb: str
    """`ready`, `load` or `unload`."""
    model: str
    version: str = ""
    config: str = ""
    files: dict[str, bytes] = {}
    dependents: bool = False


class MetricOrder(msgspec.Struct, frozen=True, tag=True, kw_only=True, omit_defaults=True):
    """From the model: declare, change or read a metric of its own. Those with a number get a Response."""

    number: int = 0
    verb: str
    """`family`, `series` or `value`, which have a number; `increment`, `set` or `observe`."""
    family: str
    kind: str = ""
    """Kind of a family: `counter`, `gauge` or `histogram`."""
    description: str = ""
    labels: tuple[tuple[str, str], ...] = ()
    """Labels of a series, in order."""
    buckets: tuple[float, ...] = ()
    amount: float = 0.0


class Log(msgspec.Struct, frozen=True, tag=True):
    level: int
    """A level of the module `logging`."""
    text: str


Message: TypeAlias = (
    Start
    | Complete
    | Initialize
    | Execute
    | CancelRequest
    | ResponseCredit
    | OpenArena
    | ArenaOpened
    | Released
    | Finalize
    | Ready
    | Response
    | Done
    | CallModel
    | Control
    | MetricOrder
    | Log
)
_DECODER: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
_ENCODER = msgspec.msgpack.Encoder()


def encode(message: Message, buffers: Iterable[Buffer] = ()) -> list[Buffer]:
    """Return the pieces of a message, to be written at once."""
    head = _ENCODER.encode(message)
    body: list[Buffer] = []
    body_bytes = 0
    for buffer in buffers:
        padding = -len(buffer) % _ALIGNMENT
        body += (buffer, _PADDING[padding])
        body_bytes += len(buffer) + padding
    prefix = _PREFIX.pack(len(head), body_bytes)
    if not body_bytes:
        return [prefix + head]
    return [prefix + head + _PADDING[-(_PREFIX.size + len(head)) % _ALIGNMENT], *body]


def decode(head: Buffer) -> Message:
    """Decode the head of a message. Raises msgspec.MsgspecError."""
    return _DECODER.decode(head)


def has_places(order: Execute) -> bool:
    """Return whether inputs lie in shared memory."""
    return any(tensor.place is not None for request in order.requests for tensor in request.inputs)


def gap(size: int) -> int:
    """Return the bytes between an output of `size` bytes and the one before it: those of a key and a length in protobuf."""
    return 1 + max(1, -(-size.bit_length() // 7))


def tensors_of(message: Message) -> Sequence[TensorHead]:
    """Return the tensors of a message, in order."""
    match message:
        case Execute():
            return [tensor for request in message.requests for tensor in request.inputs]
        case Done():
            return [tensor for response in message.responses for tensor in response.outputs]
        case CallModel():
            return message.request.inputs
        case Response():
            return message.outputs
        case _:
            return ()


Admit: TypeAlias = Callable[["Message", int], tuple["Message", memoryview | None]]
"""Returns the message and memory for its body of so many bytes, or None and the message that takes its place, without a body."""


def admit_all(message: Message, size: int) -> tuple[Message, memoryview | None]:
    return message, memoryview(bytearray(size))


class MessageReader:
    """Cuts the bytes that a socket receives into messages.

    Small messages are read many at once. The body of one that is larger than the buffer gets memory of its own, where its tensors
    stay. `admit` provides that of bodies from `COUNTED_BYTES` on; a body that gets none is read into nothing.
    """

    def __init__(self, admit: Admit = admit_all) -> None:
        self._admit = admit
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
        self._filled = 0
        """Bytes in `_scratch`, or in the body of `_large`."""
        self._large: tuple[Message, memoryview] | None = None
        """A message, and the memory of its body."""
        self._unwanted = 0
        """Bytes of a body that come next and are dropped."""

    def close(self) -> None:
        """Let go of the buffer and of `admit`; nothing is read any more."""
        self._admit, self._scratch, self._large = admit_all, memoryview(b""), None

    def space(self) -> memoryview:
        """Return the buffer for the next bytes of the socket. It is never empty."""
        return (self._scratch if self._large is None else self._large[1])[self._filled :]

    def advance(self, count: int) -> list[tuple[Message, list[memoryview]]]:
        """Return the messages that are whole after `count` more bytes, with their tensors, which are writable.

        Raises ValueError for bytes that are not a message.
        """
        self._filled += count
        if self._large is not None:
            return self._take_large(self._large)
        messages: list[tuple[Message, list[memoryview]]] = []
        position = needed = 0
        if self._unwanted:
            position = min(self._unwanted, self._filled)
            self._unwanted -= position
        while self._filled - position >= _PREFIX.size:
            head_bytes, body_bytes = _PREFIX.unpack_from(self._scratch, position)
            begin, end = _extent(head_bytes, body_bytes)
            is_whole = position + end <= self._filled
            if not is_whole and (end <= _SCRATCH_BYTES or position + begin > self._filled):
                needed = begin
                break
            message = decode(self._scratch[position + _PREFIX.size : position + _PREFIX.size + head_bytes])
            if is_whole and body_bytes < COUNTED_BYTES:
                body = memoryview(bytearray(self._scratch[position + begin : position + end])) if body_bytes else _NOTHING
                messages.append((message, _cut(message, body)))
                position += end
                continue
            admit = self._admit if body_bytes >= COUNTED_BYTES else admit_all
            message, memory = admit(message, body_bytes)
            came = self._scratch[position + begin : min(position + end, self._filled)]
            position += begin + len(came)
            if memory is None:
                self._unwanted = body_bytes - len(came)
                messages.append((message, []))
                continue
            memory[: len(came)] = came
            if not is_whole:
                self._large, self._filled = (message, memory), len(came)
                return messages
            messages.append((message, _cut(message, memory)))
        self._move_to_front(position, needed)
        return messages

    def _take_large(self, large: tuple[Message, memoryview]) -> list[tuple[Message, list[memoryview]]]:
        message, body = large
        if self._filled < len(body):
            return []
        self._large, self._filled = None, 0
        return [(message, _cut(message, body))]

    def _move_to_front(self, position: int, needed: int) -> None:
        """Keep what follows `position` where a head of `needed` bytes fits."""
        if position == self._filled and len(self._scratch) == _SCRATCH_BYTES:  # nearly always
            self._filled = 0
            return
        left = self._scratch[position : self._filled]
        size = max(_SCRATCH_BYTES, needed, len(left) + 1)
        if not position and size <= len(self._scratch):
            return
        if size != len(self._scratch):
            self._scratch = memoryview(bytearray(size))
        self._scratch[: len(left)] = bytes(left)
        self._filled = len(left)


_NOTHING = memoryview(bytearray())


def _extent(head_bytes: int, body_bytes: int) -> tuple[int, int]:
    """Return where the body of a message begins and ends."""
    if head_bytes > MAX_HEAD_BYTES:
        raise ValueError(f"the head of a message has {head_bytes} bytes")
    begin = _PREFIX.size + head_bytes
    if body_bytes:
        begin += -begin % _ALIGNMENT
    return begin, begin + body_bytes


def _cut(message: Message, body: memoryview) -> list[memoryview]:
    tensors, position = [], 0
    for tensor in tensors_of(message):
        if tensor.place is not None:
            tensors.append(_NOTHING)
            continue
        tensors.append(body[position : position + tensor.size])
        position += tensor.size + -tensor.size % _ALIGNMENT
    if position != len(body):
        raise ValueError(f"the tensors of a message have {position} bytes, its body {len(body)}")
    return tensors


def pack(name: str, array: Array) -> tuple[TensorHead, Buffer]:
    """Return a tensor's head and its bytes, without a copy where possible. Raises ValueError for a dtype without a datatype."""
    if array.dtype.kind in "OSU":
        datatype = "BYTES"
        raw: Buffer = _encode_bytes(array)
    else:
        datatype = datatype_of(name, array)
        contiguous = np.ascontiguousarray(array, NUMPY[datatype])
        raw = np.frombuffer(contiguous, np.uint8).data if contiguous.size else b""
    return TensorHead(name, datatype, tuple(array.shape), len(raw)), raw


def datatype_of(name: str, array: Array) -> str:
    """Return the datatype of an array of numbers. Raises ValueError if there is none."""
    datatype = _DATATYPES.get(array.dtype) or _DATATYPES.get(array.dtype.newbyteorder("<"))
    if datatype is None:
        raise ValueError(f"tensor '{name}' is an array of {array.dtype}, for which there is no datatype")
    return datatype


def unpack(tensor: TensorHead, raw: Buffer) -> Array:
    """Return an aligned array of the tensor's shape; it is writable if `raw` is. BYTES become an object array of `bytes`."""
    if tensor.datatype == "BYTES":
        return _decode_bytes(raw, tensor.shape)
    array: Array = np.ndarray(tensor.shape, NUMPY[tensor.datatype], raw)
    if array.nbytes != len(raw):
        raise ValueError(f"tensor '{tensor.name}' of shape {list(tensor.shape)} has {len(raw)} bytes")
    return array if array.flags.aligned else array.copy()


def _encode_bytes(array: Array) -> bytes:
    parts: list[bytes] = []
    for element in array.reshape(-1).tolist():
        data = element if isinstance(element, bytes) else str(element).encode()
        parts += (_LENGTH.pack(len(data)), data)
    return b"".join(parts)


def _decode_bytes(raw: Buffer, shape: tuple[int, ...]) -> Array:
    elements: list[bytes] = []
    data = bytes(raw)  # whose slices cost less than copies of those of a view
    unpack, position, size = _LENGTH.unpack_from, 0, len(data)
    while position < size:
        begin = position + _LENGTH.size
        position = begin + unpack(data, position)[0]
        elements.append(data[begin:position])
    array = np.empty(len(elements), object)
    array[:] = elements
    return array.reshape(shape)
