"""A request that an instance takes, its body complete, and the way back to its caller."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeAlias

from dynamo.common.errors import DeadlineExceeded, DynamoError, InvalidRequest, Overloaded, ShuttingDown
from dynamo.common.messaging.buffers import Body, Buffer
from dynamo.common.messaging.request_plane import frames
from dynamo.common.messaging.request_plane.frames import BodyPieces
from dynamo.common.messaging.request_plane.limits import FRAME_COST
from dynamo.common.messaging.request_plane.outbox import Outbox
from dynamo.common.process.background import awaited
from dynamo.common.process.lazy_event import LazyEvent
from dynamo.common.shared_memory.layout import Reference
from dynamo.common.shared_memory.neighbour import Neighbour

if TYPE_CHECKING:
    from dynamo.common.messaging.request_plane.server import RequestServer


log = logging.getLogger(__name__)
_LEAST_CHUNK_BYTES = 12 * 1024
"""A window smaller than this is not worth a chunk, since the caller grants more, unless it holds all that is left."""
_MAX_PARAM_CHARS = 200
_NEVER = 1 << 63
_MAX_LOANS = 4
"""So many responses of a stream may lie in shared memory; those after them need credit."""


class Incoming:
    """One request, its body complete, and the way back to its caller."""

    __slots__ = (
        "_allowed",
        "_allowed_body",
        "_ended",
        "_flight",
        "_granted",
        "_handler",
        "_last",
        "_last_batch",
        "_last_body",
        "_last_bytes",
        "_last_head",
        "_last_seq",
        "_least_lent_bytes",
        "_lent_seq",
        "_loans",
        "_missing",
        "_neighbour",
        "_outgoing",
        "_parts",
        "_peer",
        "_reads_many",
        "_requested",
        "_room",
        "_seq",
        "_server",
        "_stalled",
        "_task",
        "_timer",
        "_window",
        "body",
        "cancelled",
        "deadline",
        "has_sent",
        "headers",
        "held_bytes",
        "id",
        "request_id",
        "verb",
    )

    def __init__(
        self,
        server: RequestServer,
        peer: CallerPeer,
        frame: frames.RequestHead,
        body: memoryview,
        neighbour: Neighbour | None,
        handler: Handler,
    ) -> None:
        loop = server.loop
        self.id = frame.stream
        self.verb = frame.verb
        self.headers = frame.headers
        self.request_id = frame.headers.get("request-id", "")
        self.deadline = None if frame.left_ms < 0 else loop.time() + frame.left_ms / 1000
        """Absolute, on the event loop's clock; None: none."""
        self.body: Buffer = body
        self.cancelled = LazyEvent()
        """Set when the caller left or the deadline passed; the handler's task is cancelled as well."""
        self.has_sent = False
        """Something was sent since the last BEAT."""
        self._server = server
        self._peer = peer
        self._handler = handler
        self.held_bytes = frame.size
        """Bytes of the whole body."""
        self._parts: list[memoryview] = []
        self._missing = frame.size - body.nbytes
        self._flight = frame.flight - body.nbytes
        self._neighbour = neighbour
        """The caller's arena, if it shares memory with this process."""
        memory = server.memory
        self._least_lent_bytes = _NEVER if memory is None or neighbour is None else memory.least_bytes
        """Size of the smallest body that is sent by reference."""
        self._loans: list[int] = []
        """Generations of the regions that hold responses of a stream."""
        self._lent_seq = 0
        """The number of the DATA frame that ends the last of these: as the first one in a MANY frame it would end nothing."""
        self._stalled = False
        self._granted = 0
        self._allowed_body = frame.flight
        self._allowed = frame.window
        self._window = frame.window
        self._requested = 0
        """The total of credit that was last requested of the caller."""
        self._reads_many = frames.READS_MANY in frame.headers
        self._last: list[Buffer] = []
        """The last DATA frame, or the MANY frame that it has become; not the first of the stream, which waits for no other."""
        self._last_batch = -1
        """The outbox's `batch` when that frame was put there; the frame is there until it changes."""
        self._last_seq = 0
        self._last_body = b""
        """The body of the first response in that frame."""
        self._last_bytes = 0
        self._last_head = b""
        """The beginning of a MANY frame, up to the number of responses."""
        self._seq = 0
        self._outgoing: deque[tuple[bool, BodyPieces]] = deque()
        self._room: asyncio.Future[None] | None = None
        self._ended = False
        self._task: asyncio.Task[None] | None = None
        self._timer = None if self.deadline is None else loop.call_at(self.deadline, self._expire)

    # responding

    def send_nowait(self, body: Body) -> bool:
        """Queue one response. False if the caller has no room for it yet: `await ready()` before the next."""
        if self._outgoing or self._ended:
            self._queue(False, body)
            return False
        size = len(body) if isinstance(body, bytes) else frames.size_of(body)
        if size >= self._least_lent_bytes and self._may_lend() and self._lend(body, size):
            body, size = b"", 0
        cost = size + FRAME_COST
        if cost > self._window or cost > self._server.chunk_bytes:
            self._queue(False, body)
            return not self._outgoing
        self._window -= cost
        self.has_sent = True
        seq = self._seq
        self._seq = seq + 1
        outbox = self._peer.outbox
        frame: list[Buffer]
        if size <= frames.INLINE_BYTES and isinstance(body, bytes):  # the short way of most responses
            if self._last_batch == outbox.batch and self._gather(seq, body):
                return True
            frame = [frames.encode(frames.Data(self.id, seq, body))]  # type: ignore[arg-type]
            if seq and self._reads_many and seq != self._lent_seq:
                self._last, self._last_seq, self._last_body, self._last_bytes = frame, seq, body, size
                self._last_batch = outbox.batch
        else:
            frame = frames.encode_with_body(frames.Data(self.id, seq), body)
        outbox.add(frame, patient=seq > 0)
        return True

    def _gather(self, seq: int, body: bytes) -> bool:
        """Add a response to the frame with those before it, which is still in the outbox. Return False if it needs its own."""
        last = self._last
        count = max(1, len(last) - 1)
        self._last_bytes += len(body)
        if seq != self._last_seq + count or count == frames.MOST_GATHERED or self._last_bytes > frames.INLINE_BYTES:
            return False
        if count == 1:
            last.append(frames.encode_body(self._last_body))
            self._last_head = frames.encode(frames.Many(self.id, self._last_seq, []))[:-1]  # without the byte "empty list"
        last[0] = self._last_head + frames.LIST_HEADS[count + 1]
        last.append(frames.encode_body(body))
        return True

    async def ready(self) -> None:
        """Waits until everything queued has left."""
        while self._outgoing:
            self._room = self._server.loop.create_future()
            try:
                await self._room
            finally:
                self._room = None

    def end(self, body: Body = b"") -> None:
        """Send the last frame: the trailer of a stream, or the response of a unary request. Nothing may be sent after it."""
        if self._ended:
            raise RuntimeError("the request has ended already")
        self._ended = True
        size = len(body) if isinstance(body, bytes) else frames.size_of(body)
        if size >= self._least_lent_bytes and not self._outgoing and self._lend(body, size):
            body, size = b"", 0
        if self._outgoing or size > self._server.inline_bytes or size + FRAME_COST > self._window:
            self._queue(True, body)
            return
        whole = body if isinstance(body, bytes) else frames.joined(body) if size else b""
        self._server.forget(self)
        frame = frames.encode(frames.End(self.id, self._seq, whole))  # type: ignore[arg-type]
        self._peer.outbox.add(frame, at_once=not self._server.open_requests)

    async def lend_in_steps(self, body: Body, *, last: bool = False) -> Body:
        """Copy a large response to where the caller can read it, beside other work. Return what `send_nowait`, or `end` for the
        `last` one, is to send of it at once: nothing, or the whole body if the caller cannot read it there.
        """
        memory, neighbour, size = self._server.memory, self._neighbour, frames.size_of(body)
        if memory is None or neighbour is None or self._outgoing or not (last or self._may_lend()):
            return body
        lent = await self._server.steps.run(memory.lend_in_steps(body, size, neighbour))
        if lent is None:
            return body
        self._announce(lent, size)
        return b""

    def _lend(self, body: Body, size: int) -> bool:
        """Send a body of `size` bytes by reference. Return False if there is no room."""
        memory = self._server.memory
        if memory is None or self._neighbour is None:
            return False
        lent = memory.lend(body, size, self._neighbour)
        if lent is None:
            return False
        self._announce(lent, size)
        return True

    def _announce(self, lent: Reference, size: int) -> None:
        self._peer.outbox.lead(frames.encode(frames.Lent(self.id, 0, lent.unit, size, lent.generation)))
        self._loans.append(lent.generation)
        self._seq += 1
        self._lent_seq = self._seq
        self._window -= FRAME_COST

    def _may_lend(self) -> bool:
        """Return whether a further response of this stream may lie in shared memory."""
        memory = self._server.memory
        if self._loans and memory is not None:  # those that the caller has not released
            self._loans = [generation for generation in self._loans if memory.arena.is_lent(generation)]
        return self._window > 2 * FRAME_COST and len(self._loans) < _MAX_LOANS

    def _queue(self, last: bool, body: Body) -> None:
        if self._ended and not last:
            raise RuntimeError("the request has ended already")
        self._outgoing.append((last, BodyPieces(body)))
        self._pump()

    def on_credit(self, frame: frames.Credit) -> None:
        self._window += frame.total - self._allowed
        self._allowed = frame.total
        self._pump()

    def _pump(self) -> None:
        """Send as much of the queue as the window allows. END needs no room for the frame, only for its body."""
        outbox, most = self._peer.outbox, self._server.chunk_bytes
        while self._outgoing:
            last, body = self._outgoing[0]
            if self._window <= 0 and not last and not body.chunks:
                return self._request_credit()
            while body.left and (body.chunks or body.left > min(self._window, most)):
                size = min(body.left, self._window, most)
                if size < min(body.left, most, _LEAST_CHUNK_BYTES):
                    return self._request_credit()
                outbox.add(body.chunk(self.id, size))
                self._seq += 1
                self.has_sent = True
                self._window -= size + FRAME_COST
            self._outgoing.popleft()
            self._window -= body.left + FRAME_COST
            kind = frames.End if last else frames.Data
            patient = self._seq > 0 and not last
            outbox.add(frames.encode_with_body(kind(self.id, self._seq), body.take(body.left)), patient=patient)
            self._seq += 1
            self.has_sent = True
            if last:
                self._server.forget(self)
        if self._room is not None and not self._room.done():
            self._room.set_result(None)

    @property
    def _needed(self) -> int:
        """The total of credit with which everything that waits can be sent."""
        chunk = self._server.chunk_bytes
        waiting = sum(body.left + FRAME_COST * (1 + body.left // chunk) for _, body in self._outgoing)
        return self._allowed - self._window + waiting

    def _request_credit(self) -> None:
        """Send how much credit is needed if it is more than was requested before."""
        needed = self._needed
        if needed > self._requested:
            self._requested = needed
            self._peer.outbox.add(frames.encode(frames.Beat([], [self._blocked], [needed])))

    def fail(self, error: DynamoError) -> None:
        """Send the last frame of a request that failed."""
        retry_after_s = error.retry_after_s if isinstance(error, Overloaded) else 1.0
        text, max_chars = str(error), self._server.limits.max_error_chars
        if len(text) > max_chars:  # it may quote the request
            text = text[: max_chars - 1] + "…"
        param = (error.param or "")[:_MAX_PARAM_CHARS] if isinstance(error, InvalidRequest) else ""
        frame = frames.Error(self.id, error.code.value, text, error.retryable, retry_after_s, param)
        self._peer.outbox.add(frames.encode(frame))
        self._ended = True
        self._outgoing.clear()
        self._server.forget(self)

    # running

    def on_chunk(self, frame: frames.Chunk) -> None:
        if self.is_whole and not frame.body.nbytes:
            return  # the response to a CREDIT that was repeated while the rest of the body was on its way
        self._parts = self._parts or [memoryview(self.body)]
        if self.is_whole or frame.index != len(self._parts) - 1 or frame.body.nbytes > self._missing:
            return self._lose()
        if not frame.body.nbytes:
            return  # the caller says that it has sent all before this, and it has come
        self._stalled = False
        self._parts.append(frame.body)
        self._missing -= frame.body.nbytes
        ungranted = min(frame.body.nbytes, self._flight)
        self._flight -= ungranted
        used = min(frame.body.nbytes - ungranted, self._granted)
        self._granted -= used
        self._server.uploads.release(used)
        if not self._missing:
            self.body = b"".join(self._parts)
            self._parts.clear()
            self.start()

    @property
    def is_whole(self) -> bool:
        return not self._missing

    def start(self) -> None:
        self._task = awaited(self._run())  # the request keeps it, and `_run` turns every failure into an ERROR frame

    async def _run(self) -> None:
        try:
            await self._handler(self)
            if not self._ended:
                self.end()
        except asyncio.CancelledError:
            if not self.cancelled.is_set():
                self.fail(ShuttingDown("the worker"))
        except DynamoError as error:
            if self._ended and not self._outgoing:
                log.warning("request %s (%s) failed after its last frame: %s", self.request_id, self.verb, error)
            else:
                self.fail(error)
        except BaseException:  # a model may raise SystemExit, which is not the worker's end
            log.exception("request %s (%s) failed", self.request_id, self.verb)
            if not self._ended or self._outgoing:
                self.fail(DynamoError("internal error"))

    def _expire(self) -> None:
        self.fail(DeadlineExceeded())
        self.stop()

    def _lose(self) -> None:
        """End the request, whether or not its handler runs: a part of it was lost on the way."""
        self._peer.outbox.add(frames.encode(frames.Error(self.id, frames.LOST, "part of the request was lost", True, 1.0)))
        self.stop()

    def stop(self) -> None:
        """End the handler within one step. Sends nothing to the caller."""
        self.cancelled.set()
        self._ended = True
        self._outgoing.clear()
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()
            self._task = None  # if it has not begun, it keeps the frame of `_run`, and so this request
        self._server.forget(self)

    def release(self) -> None:
        """Called once, when the server forgets a request that has a deadline, an incomplete body or credit left."""
        if self._timer is not None:
            self._timer.cancel()
        if self._missing or self._granted:
            granted, self._granted = self._granted, 0
            self._server.uploads.forget(self, granted)

    def grant(self, size: int) -> None:
        """Let the caller send `size` more bytes of the body."""
        self._granted += size
        self._allowed_body += size
        self._send_credit()

    def _send_credit(self) -> None:
        self._peer.outbox.add(frames.encode(frames.Credit(self.id, self._allowed_body)))
        self.has_sent = True

    def check_upload(self) -> None:
        """Say again how much may be sent if nothing came since the last call: either the CREDIT was lost, or a CHUNK.

        For a request whose body is not complete.
        """
        if self._stalled:
            self._send_credit()
        self._stalled = True

    @property
    def _blocked(self) -> tuple[int, int, int]:
        return self.id, self._allowed, self._seq

    @property
    def blocked(self) -> tuple[tuple[int, int, int], int] | None:
        """What BEAT says of a request that waits for credit, and how much it needs; None if it does not wait."""
        return (self._blocked, self._needed) if self._outgoing else None


Handler: TypeAlias = Callable[[Incoming], Awaitable[None]]


class CallerPeer:
    """A caller as this instance knows it."""

    __slots__ = ("absent_since", "has_spoken", "max_unacknowledged", "outbox", "requests", "silent_s", "used_at")

    def __init__(self, outbox: Outbox, now: float) -> None:
        self.outbox = outbox
        self.max_unacknowledged = 0
        """Bytes of requests that it may send without credit, as last sent to it; 0 if that was not sent or may be lost."""
        self.used_at = now
        """When it last had a request."""
        self.requests: dict[int, Incoming] = {}
        self.has_spoken = True
        """It sent something since the last BEAT."""
        self.silent_s = 0.0
        """How long it has sent nothing, while this process was able to receive it."""
        self.absent_since: float | None = None
        """When nats-server first reported that it has no subscription; None after its next frame."""
