"""One call: its messages, its handler's task, and the context that the handler gets.

1. The handler of a unary call starts when its message is there, and takes it as an argument. Where callers must show credentials,
   it starts with the headers and takes a `PendingMessage`: until it reads that, the client may send no more than HTTP/2's
   smallest window, and nothing of it is examined.
2. The size of a message is checked when its prefix has come. It is counted against the capacity as it comes, in steps that grow
   with it, and against the share of its key until it is complete. What is wrong with a message (`_problem`) is raised where the
   handler reads it, so that refusals have one form and are counted.
3. Messages that the handler has not read are counted against the capacity, and close the stream's window.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from time import monotonic
from typing import Any, Final, NoReturn

import grpc
import grpc.aio

from dynamo.common.errors import DynamoError, InvalidRequest, PayloadTooLarge, Unsupported, release
from dynamo.common.process.background import awaited
from dynamo.common.tensors.tensors import Buffer
from dynamo.frontend.api.rpc.handlers import PendingMessage
from dynamo.frontend.api.rpc.http2.call_host import CallHost
from dynamo.frontend.api.rpc.http2.frames import DataSink
from dynamo.frontend.api.rpc.http2.headers import ACCEPTED_ENCODINGS, CallHeaders, Metadata
from dynamo.frontend.api.rpc.http2.messages import (
    DEFLATE,
    GZIP,
    STEP_BYTES,
    CorruptMessage,
    EarlyBytes,
    MessageMemory,
    MessageReader,
    deflate_steps,
    inflated,
)
from dynamo.frontend.api.rpc.http2.method import CallCancelled, GrpcMethod
from dynamo.frontend.api.rpc.http2.sender import Outgoing
from dynamo.frontend.api.rpc.http2.windows import Pace, ReceiveWindow
from dynamo.frontend.api.statuses import grpc_status, public_message, retry_after_s
from dynamo.frontend.config import GrpcCompression
from dynamo.frontend.security.keys import key_name

_log = logging.getLogger(__name__)
_UNCOUNTED_BYTES: Final = 1024
"""Messages of unary calls up to this size, health checks among them, do not depend on the capacity."""
_LONGEST_STEP_BYTES: Final = 2**20
"""A message that arrives counts for twice what has come of it, or this much more, if that is less."""
_MESSAGE_BYTES: Final = 128
"""What a message in the queue of a stream takes besides its content."""
_UNCOUNTED_METADATA_BYTES: Final = 8 * 1024
"""Headers that take more count until the call is over: a few bytes may name a long entry of HPACK's table many times."""
_ARRIVAL_S: Final = 10.0
_UNREAD_S: Final = 300.0
"""Periods over which the least pace applies to a message that is due, and to a response."""


class GrpcCall:
    """One call. Handlers use it as a `grpc.aio.ServicerContext`, of which it has what they need."""

    __slots__ = (
        "__weakref__",
        "_arrival",
        "_arriving_bytes",
        "_code",
        "_details",
        "_held_bytes",
        "_host",
        "_key",
        "_metadata_bytes",
        "_method",
        "_pace",
        "_problem",
        "_queue",
        "_queued_bytes",
        "_reader",
        "_sink",
        "_trailing",
        "content_bytes",
        "deadline",
        "headers",
        "is_cancelled",
        "is_half_closed",
        "out",
        "stream",
        "task",
        "window",
    )  # fmt: skip

    def __init__(self, host: CallHost, stream: int, headers: CallHeaders, method: GrpcMethod, out: Outgoing, window: int) -> None:
        self.stream = stream
        self.headers = headers
        self.out = out
        self.window = ReceiveWindow(window)
        self.task: asyncio.Task[None] | None = None
        """The handler's task, once it has started."""
        self.deadline: float | None = None
        """On the clock of `time.monotonic`, which is the event loop's as well."""
        self.is_half_closed = False
        """The client has sent all."""
        self.is_cancelled = False
        """The caller waits for no response any more."""
        self.content_bytes = 0
        """Received in DATA frames."""
        self._host = host
        self._method = method
        self._reader = MessageReader(self)
        self._sink: DataSink = self._reader
        self._queue: deque[tuple[Buffer, bool]] = deque()
        """Messages to be read, and whether they are compressed."""
        self._queued_bytes = 0
        self._held_bytes = 0
        """Bytes of messages that are counted against the capacity."""
        self._arriving_bytes = 0
        """Bytes of `_held_bytes` that belong to a message which is incomplete."""
        self._metadata_bytes = 0  # that are counted
        self._key = ""  # of the caller, once the handler has accepted it
        self._pace: Pace | None = None
        """Pace at which the message that is due arrives; None before the first check that sees it."""
        self._arrival: asyncio.Future[None] | None = None
        self._problem: DynamoError | None = None
        self._code: grpc.StatusCode | None = None
        self._details = ""
        self._trailing: Metadata = ()

    def __repr__(self) -> str:
        return f"<Call {self.headers.path!r} on stream {self.stream} of {self._host.peer}>"

    @property
    def is_over(self) -> bool:
        return self.out.is_over

    # Called by the connection

    def open(self) -> None:
        """Start the handler, if it does not wait for a message. The call is over if there is no room for its headers."""
        method, size = self._method, self.headers.size_bytes
        if size > _UNCOUNTED_METADATA_BYTES:
            try:
                self._host.capacity.hold(size)
            except DynamoError as error:
                return self.end(grpc_status(error, self._host.overload), public_message(error))
            self._metadata_bytes = size
        if method.reads_late:
            self._sink = EarlyBytes()
        if method.reads_stream:
            self._start(None)
        elif method.reads_late:
            self._start(self._pending_message())

    def data_begun(self, content: int, *, ends: bool) -> DataSink:
        """Return where `content` bytes of data go."""
        self.content_bytes += content
        if not ends and self._is_accepted:
            self._grant(content)
        return self._sink

    def half_close(self) -> None:
        """The client has sent all."""
        self.is_half_closed = True
        if not self._is_accepted:
            return  # `_accept` comes back here
        if not self._reader.is_between_messages and self._problem is None:
            self._reader.drop()
            self._drop_parts()
            self._refuse(InvalidRequest("the call ended within a message"))
        elif self.task is None:
            self._refuse(Unsupported("the call has no message"))
        self._wake()

    def cancel(self) -> None:
        """The caller waits for no response: send nothing more, and end the handler."""
        self.is_cancelled = True
        self._host.sender.drop(self.out)
        self._stop()

    def end(self, status: grpc.StatusCode, text: str) -> None:
        """Fail the call from outside of its handler, which is ended."""
        if not self.out.is_over:
            self._host.sender.fail(self.out, status.value[0], text, ())
        self._stop()

    def is_stuck(self, now: float) -> bool:
        """Return whether a message arrives too slowly. Called about once a second."""
        if not self._awaits_message:
            self._pace = None
        elif self._pace is None:
            self._pace = Pace(self._reader.total, now, _ARRIVAL_S)
        else:
            return self._pace.is_too_slow(self._reader.total, now)
        return False

    def is_unread(self, now: float) -> bool:
        """Return whether the client reads the response too slowly. Called about once a second."""
        out = self.out
        if not out.pieces:
            return False
        if out.pace is None:
            out.pace = Pace(out.sent_bytes, now, _UNREAD_S)
        return out.pace.is_too_slow(out.sent_bytes, now)

    @property
    def _awaits_message(self) -> bool:
        """Whether the client has to send: the rest of a message that has begun, or the only one of a unary call."""
        if self.is_half_closed or self.out.is_over or not self._is_accepted or self._problem is not None:
            return False
        if not self._reader.is_between_messages:
            return True
        is_reading = self._arrival is not None and not self._arrival.done()
        return not self._method.reads_stream and (self.task is None or is_reading)

    def _stop(self) -> None:
        self._reader.drop()
        self._queue.clear()
        self._parts_over()
        self._release(self._held_bytes)
        if self.task is None:
            self._over()
        else:
            self.task.cancel()

    def _over(self) -> None:
        self._host.capacity.release(self._metadata_bytes)
        self._metadata_bytes = 0
        self._host.call_done(self)

    # Called by the reader of messages

    def admit_message(self, size: int, *, is_complete: bool) -> bool:
        limit = self._method.max_message_bytes
        if size > limit:
            return self._refuse(PayloadTooLarge(f"the message has {size} bytes; messages are limited to {limit}"))
        if self._method.reads_stream:
            counted = size + _MESSAGE_BYTES
        elif self._queue or (self.task is not None and not self._method.reads_late):
            return self._refuse_further_message()
        else:
            counted = size if size > _UNCOUNTED_BYTES else 0
        try:
            if is_complete:
                self._host.capacity.hold(counted)
                self._held_bytes += counted
            else:
                self._host.capacity.check_hold(counted)
        except DynamoError as error:
            return self._refuse(error)
        return True

    def admit_part(self, received: int, size: int) -> int:
        counted = admitted = min(size, received + max(_UNCOUNTED_BYTES, min(received, _LONGEST_STEP_BYTES)))
        if self._method.reads_stream:
            counted += _MESSAGE_BYTES
        elif size <= _UNCOUNTED_BYTES:
            return size
        more = counted - self._arriving_bytes
        try:
            self._host.capacity.hold_waiting(self._key, more, self._arriving_bytes)
        except DynamoError as error:
            self._drop_parts()
            self._refuse(error)
            return 0
        self._held_bytes += more
        self._arriving_bytes += more
        return admitted

    def _drop_parts(self) -> None:
        held = self._arriving_bytes
        self._parts_over()
        self._release(held)

    def _parts_over(self) -> None:
        if self._arriving_bytes:
            self._host.capacity.waiting_over(self._key, self._arriving_bytes)
            self._arriving_bytes = 0

    def _refuse_further_message(self) -> bool:
        """End a unary call that has a second message, as gRPC's table of statuses has it: its handler may run already."""
        self.end(grpc.StatusCode.UNIMPLEMENTED, "the call has more than one message")
        return False

    def message_memory(self, size: int) -> MessageMemory:
        if more := self.window.grant(size):
            self._host.grant(self.stream, more)
        return self._host.allocate(size)

    def message_received(self, message: Buffer, *, is_compressed: bool) -> None:
        self._pace = None
        if self._arriving_bytes:
            self._parts_over()
        if self.task is None and not is_compressed:
            return self._start(message)
        self._queue.append((message, is_compressed))
        self._queued_bytes += len(message) + _MESSAGE_BYTES
        if self.task is None:
            self._start(self._pending_message())
        self._wake()

    def refuse_flag(self, flag: int) -> None:
        self._refuse(InvalidRequest(f"a message begins with the flag {flag}; it must be 0 or 1"))

    def _refuse(self, problem: DynamoError) -> bool:
        if self._problem is None:
            self._problem = problem
        if self.task is None:
            self._start(self._pending_message())
        self._wake()
        return False

    # The handler

    def _pending_message(self) -> PendingMessage:
        return PendingMessage(self, self._has_message)

    def _start(self, request: Buffer | PendingMessage | None) -> None:
        self.task = task = awaited(self._run(request))
        self._host.call_started(self)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        try:
            if (error := task.exception()) is not None:
                _log.error("the call %r failed", self, exc_info=error)
        except asyncio.CancelledError as error:
            release(error)  # as in `_run`, which was not entered
        self._reader.drop()
        if self._arriving_bytes:
            self._parts_over()
        self._release(self._held_bytes)
        self._over()

    async def _run(self, request: Buffer | PendingMessage | None) -> None:
        sender, method = self._host.sender, self._method
        try:
            if not method.reads_stream and not isinstance(request, PendingMessage):
                self._release(self._held_bytes)  # from here on the handler counts the message
            response = await method.handle(request, self)  # type: ignore[arg-type]  # it has what handlers use
            del request
            if self.out.is_over:
                return  # the handler has not minded that it was cancelled
            if method.writes_stream:
                sender.finish(self.out, 0, "", self._trailing)
            elif encoding := self._response_encoding():
                await self._respond_deflated(response, encoding)
            else:
                sender.respond(self.out, response, self._trailing)
            if self.out.pieces:
                await self._drained()
        except grpc.aio.AbortError as error:
            release(error)
            self._fail(self._code or grpc.StatusCode.UNKNOWN, self._details, self._trailing)
        except DynamoError as error:
            release(error)
            pause_s = retry_after_s(error)
            metadata = () if pause_s is None else (("retry-after", f"{pause_s:g}"),)
            self._fail(grpc_status(error, self._host.overload), public_message(error), metadata)
        except CallCancelled as error:
            release(error)
        except Exception:
            if not self.is_cancelled:
                _log.exception("the handler of %r failed", self)
            self._fail(grpc.StatusCode.INTERNAL, "internal error")
        except asyncio.CancelledError as error:
            # Kept by the task, which this call keeps, the error would keep the message until the garbage collector runs.
            release(error)
            self._fail(grpc.StatusCode.CANCELLED, "the call was cancelled")

    def _fail(self, status: grpc.StatusCode, text: str, metadata: Metadata = ()) -> None:
        if not self.out.is_over:
            self._host.sender.fail(self.out, status.value[0], text, metadata)

    async def _respond_deflated(self, response: Buffer, encoding: str) -> None:
        """Send a response compressed, if that makes it smaller."""
        deflated = await self._deflate(response, encoding)
        is_compressed = len(deflated) < len(response)
        message = deflated if is_compressed else response
        self._host.sender.respond(self.out, message, self._trailing, is_compressed=is_compressed)

    async def _drained(self) -> None:
        """Return when all that was sent has left for the transport, or will not be sent."""
        out = self.out
        while out.pieces:
            out.drained = asyncio.get_running_loop().create_future()
            await out.drained

    def _response_encoding(self) -> str:
        """Return the configured encoding if the client accepts it, else the other one if it does, else none."""
        configured = self._host.options.compression
        if configured is GrpcCompression.NONE:
            return ""
        if not self.out.encoding:
            preferred = (GZIP, DEFLATE) if configured is GrpcCompression.GZIP else (DEFLATE, GZIP)
            self.out.encoding = next((encoding for encoding in preferred if encoding in self.headers.accepts), "")
        return self.out.encoding

    async def _deflate(self, message: Buffer, encoding: str) -> bytes:
        pieces: list[bytes] = []
        for piece in deflate_steps(message, encoding):
            pieces.append(piece)
            if len(message) > STEP_BYTES:
                await asyncio.sleep(0)
        return b"".join(pieces)

    async def _inflate(self, message: Buffer) -> Buffer:
        """Raises DynamoError."""
        encoding, capacity = self.headers.encoding, self._host.capacity
        if encoding == "identity":
            raise InvalidRequest("a message is marked as compressed, but the call has no grpc-encoding")
        if encoding not in (GZIP, DEFLATE):
            raise Unsupported(f"grpc-encoding {encoding[:40]!r} is not supported; it must be one of {ACCEPTED_ENCODINGS}")
        held = 0

        def hold(size_bytes: int) -> None:
            nonlocal held
            capacity.hold_waiting(self._key, size_bytes, held)
            held += size_bytes

        try:
            return await self._host.inflating.run(inflated(message, encoding, self._method.max_message_bytes), hold)
        except CorruptMessage as error:
            raise InvalidRequest(f"a message cannot be decompressed: {error}") from None
        finally:
            capacity.waiting_over(self._key, held)
            capacity.release(held)

    # Messages of the client

    @property
    def _is_accepted(self) -> bool:
        return self._sink is self._reader

    def _accept(self) -> None:
        """Examine what has come, and let the client send more: the handler has accepted the caller."""
        early = self._sink
        if not isinstance(early, EarlyBytes):
            return
        self._key = self.out.key = key_name.get()
        self._sink = early.target = self._reader
        self._reader.feed(memoryview(early.kept))
        early.kept = bytearray()
        if self.is_half_closed:
            self.half_close()
        else:
            self._grant(0)

    def _grant(self, content: int) -> None:
        """Let the client send, after the next `content` bytes, as much as may be unread, or what is missing of a message."""
        wanted = max(self._host.stream_window_bytes - self._queued_bytes, self._reader.missing) - content
        if not self.is_half_closed and not self.out.is_over and (more := self.window.grant(wanted)):
            self._host.grant(self.stream, more)

    def _release(self, size: int) -> None:
        self._host.capacity.release(size)
        self._held_bytes -= size

    def _wake(self) -> None:
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    def _has_message(self) -> bool:
        self._accept()
        return bool(self._queue)

    async def read(self) -> Any:
        """Return the next message, `grpc.aio.EOF` after the last. Raises DynamoError for a message that cannot be taken."""
        self._accept()
        while not self._queue:
            if self._problem is not None:
                problem, self._problem = self._problem, None
                raise problem
            if self.is_half_closed:
                return grpc.aio.EOF
            self._arrival = asyncio.get_running_loop().create_future()
            await self._arrival
        message, is_compressed = self._queue.popleft()
        self._queued_bytes -= len(message) + _MESSAGE_BYTES
        if self._method.reads_stream:
            self._release(len(message) + _MESSAGE_BYTES)
            self._grant(0)
        else:
            self._release(self._held_bytes)
        return await self._inflate(message) if is_compressed else message

    # The rest of the context

    async def write(self, message: Buffer) -> None:
        """Send a message of a stream, and return when the client's windows have taken it. Raises CallCancelled."""
        out = self.out
        if out.is_over:
            raise CallCancelled("the client has left the call")
        encoding = self._response_encoding()
        deflated = await self._deflate(message, encoding) if encoding else message
        is_compressed = len(deflated) < len(message)
        self._host.sender.send(out, deflated if is_compressed else message, is_compressed=is_compressed)
        await self._drained()

    def invocation_metadata(self) -> Metadata:
        return self.headers.metadata

    def set_trailing_metadata(self, metadata: Metadata) -> None:
        self._trailing = metadata

    def time_remaining(self) -> float | None:
        return None if self.deadline is None else max(0.0, self.deadline - monotonic())

    def peer(self) -> str:
        return self._host.peer

    def code(self) -> grpc.StatusCode | None:
        """Return the status that the call was aborted with."""
        return self._code

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Metadata = ()) -> NoReturn:
        """End the call with a status. Raises AbortError, which the handler lets through."""
        self._code, self._details = code, details
        self._trailing = tuple(trailing_metadata) or self._trailing
        raise grpc.aio.AbortError(details)
