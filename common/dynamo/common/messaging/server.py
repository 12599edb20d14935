"""The instance's side of the request plane: takes requests, runs a handler for each, and sends the responses.

A request is handled once its whole body has arrived. What a handler sends shares messages with what others send to the
same caller in this event-loop turn, and leaves no faster than the caller grants. A caller that is gone (its subject
has no subscriber) has its requests cancelled.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import TypeAlias

from dynamo.common.background import awaited, running
from dynamo.common.errors import (
    DeadlineExceeded,
    DynamoError,
    InvalidRequest,
    Overloaded,
    PayloadTooLarge,
    ShuttingDown,
    Unsupported,
)
from dynamo.common.messaging import frames
from dynamo.common.messaging.connection import Connection
from dynamo.common.messaging.credit import CreditQueue
from dynamo.common.messaging.frames import Body, Buffer, Pieces, batched
from dynamo.common.messaging.limits import FRAME_COST, PlaneLimits
from dynamo.common.messaging.outbox import Outbox
from dynamo.common.messaging.unreadable import Unreadable
from dynamo.common.names import Endpoint, InstanceId
from dynamo.common.shared_memory.layout import Reference
from dynamo.common.shared_memory.neighbour import Neighbour
from dynamo.common.shared_memory.sharing import SharedMemory
from dynamo.common.steps import Steps

log = logging.getLogger(__name__)

_PER_FRAME = 1000
"""Streams named in one frame."""
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
        "_chunk_index",
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
        peer: _CallerPeer,
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
        self.cancelled = asyncio.Event()
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
        self._chunk_index = 0
        self._outgoing: deque[tuple[bool, Pieces]] = deque()
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
            if seq and self._reads_many:
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
        self._outgoing.append((last, Pieces(body)))
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
            if self._window <= 0 and not last and not self._chunk_index:
                return self._request_credit()
            while body.left and (self._chunk_index or body.left > min(self._window, most)):
                size = min(body.left, self._window, most)
                if size < min(body.left, most, _LEAST_CHUNK_BYTES):
                    return self._request_credit()
                outbox.add(frames.encode_with_body(frames.Chunk(self.id, self._chunk_index), body.take(size)))
                self._chunk_index += 1
                self._seq += 1
                self.has_sent = True
                self._window -= size + FRAME_COST
            self._outgoing.popleft()
            self._chunk_index = 0
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
        """Called once, when the server forgets the request."""
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
        """Say again how much may be sent if nothing came since the last call: either the CREDIT was lost, or a CHUNK."""
        if self.is_whole:
            return
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


class _CallerPeer:
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


class RequestServer:
    """Takes the requests of one instance. Use `serve_requests`."""

    def __init__(
        self,
        connection: Connection,
        subject: str,
        handlers: Mapping[str, Handler],
        limits: PlaneLimits,
        memory: SharedMemory | None = None,
    ) -> None:
        self.limits = limits
        self.memory = memory
        self.loop = asyncio.get_running_loop()
        self._connection = connection
        self._fit_chunks()
        self._subject = subject
        self.handlers = dict(handlers)
        """By verb; a request for another verb is refused."""
        self._peers: dict[str, _CallerPeer] = {}
        self.open_requests = 0
        self._held_bytes = 0
        self.uploads = CreditQueue(limits.budget_bytes // 2)
        self._refusal: ShuttingDown | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        self._unreadable = Unreadable("a message to an instance")
        self.steps = Steps()

    @property
    def held_bytes(self) -> int:
        """Bytes of the bodies of open requests."""
        return self._held_bytes

    @property
    def free_upload_bytes(self) -> int:
        """Credit for request bodies that no request holds."""
        return self.uploads.free_bytes

    def _fit_chunks(self) -> None:
        self.chunk_bytes = min(self.limits.chunk_bytes, self._connection.max_payload // 2)
        self.inline_bytes = min(self.chunk_bytes, frames.INLINE_BYTES)

    def refuse_new(self) -> None:
        """Refuse requests from now on, with an error that lets the caller try another instance."""
        self._refusal = ShuttingDown("the worker")

    async def drained(self) -> None:
        """Return when no request is open and all responses have been handed to the socket."""
        await self._idle.wait()
        for peer in self._peers.values():
            peer.outbox.flush()

    def on_message(self, subject: str, reply: str, payload: memoryview, no_responders: bool) -> None:
        """Handle a message of frames from a caller."""
        if no_responders:
            return self._on_caller_gone(subject)
        address = reply.rpartition(".")[0]
        try:
            message = frames.decode(payload)
        except InvalidRequest as error:
            return self._unreadable.drop(subject, error)
        peer = self._peers.get(address)
        if peer is None:
            if address.count(".") < 2:
                return self._unreadable.drop(subject, f"{reply!r} is no reply subject")
            peer = self._peers[address] = _CallerPeer(self._outbox(address), self.loop.time())
            self._share_budget(peer)
        peer.has_spoken = True
        peer.absent_since = None
        for frame in message:
            if isinstance(frame, frames.Open):
                self._on_open(peer, frame, frame.body)
            elif isinstance(frame, frames.Near):
                self._on_near(peer, frame)
            elif isinstance(frame, frames.Probe):
                open_ = [id_ for id_ in frame.streams if id_ in peer.requests]
                unknown = [id_ for id_ in frame.streams if id_ not in peer.requests]
                peer.outbox.add(frames.encode(frames.Known(open_, unknown)))
            elif isinstance(frame, frames.Chunk | frames.Credit | frames.Cancel):
                request = peer.requests.get(frame.stream)
                if request is None:
                    continue  # it is over; this frame crossed its last one
                if isinstance(frame, frames.Chunk):
                    request.on_chunk(frame)
                elif isinstance(frame, frames.Credit):
                    request.on_credit(frame)
                else:
                    request.stop()

    def _share_budget(self, peer: _CallerPeer) -> None:
        """Tell a caller how much of requests it may send without credit: all callers together half of the budget."""
        share = min(self.limits.unacknowledged_bytes, self.limits.budget_bytes // 2 // len(self._peers))
        if share != peer.max_unacknowledged:
            peer.max_unacknowledged = share
            peer.outbox.add(frames.encode(frames.Credit(frames.ALL_STREAMS, share)))

    def _outbox(self, address: str) -> Outbox:
        gone = f"{self._subject}.gone.{address.split('.')[-2]}"
        return Outbox(self._connection, address, lambda batch: gone)

    def _on_near(self, peer: _CallerPeer, frame: frames.Near) -> None:
        if frame.stream in peer.requests:
            return
        neighbour = self.memory.neighbour(frame.arena) if self.memory is not None else None
        body: memoryview | None = frame.body
        if frame.generation:
            body = None
            if self.memory is not None and neighbour is not None:
                body = self.memory.take(neighbour, Reference(frame.unit, frame.size, frame.generation))
        if body is None:
            peer.outbox.add(frames.encode(frames.Far(frame.stream)))
        else:
            self._on_open(peer, frame, body, neighbour)

    def _on_open(
        self, peer: _CallerPeer, frame: frames.RequestHead, body: memoryview, neighbour: Neighbour | None = None
    ) -> None:
        if frame.stream in peer.requests:
            return
        handler = self.handlers.get(frame.verb)
        request = Incoming(self, peer, frame, body, neighbour, handler or _unknown_verb)
        peer.requests[frame.stream] = request
        self.open_requests += 1
        self._held_bytes += frame.size
        self._idle.clear()
        if refusal := self._reason_to_refuse(frame):
            request.fail(refusal)
        elif request.is_whole:
            request.start()
        elif frame.size > frame.flight:
            self.uploads.request(request, frame.size - frame.flight)

    def _reason_to_refuse(self, frame: frames.RequestHead) -> DynamoError | None:
        limits = self.limits
        if self._refusal is not None:
            return self._refusal
        if frame.left_ms == 0:
            return DeadlineExceeded()
        if frame.size > limits.max_body_bytes:
            return PayloadTooLarge(f"the request has {frame.size} bytes; at most {limits.max_body_bytes} are allowed")
        if self.open_requests > limits.max_open_requests:
            return Overloaded(f"the instance has {limits.max_open_requests} requests open and takes no more")
        if self._held_bytes > limits.max_buffered_bytes:
            return Overloaded(f"the instance holds {limits.max_buffered_bytes} bytes of requests and takes no more")
        return None

    def forget(self, request: Incoming) -> None:
        """The request is over."""
        if request._peer.requests.pop(request.id, None) is None:
            return
        request.release()
        self.open_requests -= 1
        self._held_bytes -= request.held_bytes
        if not self.open_requests:
            self._idle.set()

    def _on_caller_gone(self, subject: str) -> None:
        """The caller has no subscription. It is gone, unless it is reconnecting, as we just did, and comes back."""
        now = self.loop.time()
        if now - self._connection.reconnected_at < self.limits.reconnect_grace_s:
            return
        client = subject.rpartition(".")[2]
        for address, peer in list(self._peers.items()):
            if address.split(".")[-2] == client:
                if peer.absent_since is None:
                    peer.absent_since = now
                elif now - peer.absent_since >= self.limits.absent_grace_s:
                    self._drop(address, peer)

    def _drop(self, address: str, peer: _CallerPeer) -> None:
        """Stop the requests of a caller that is gone."""
        self._peers.pop(address, None)
        for request in list(peer.requests.values()):
            request.stop()

    async def beat(self) -> None:
        """Tell callers, for ever, which silent requests are still being worked on or wait for credit.

        Repeats what may have been lost, and finds out which callers are gone.
        """
        while True:
            await asyncio.sleep(self.limits.beat_s)
            if not self._connection.is_connected:
                continue
            now = self.loop.time()
            for address, peer in list(self._peers.items()):
                if not peer.requests:
                    if now - peer.used_at > self.limits.peer_kept_s:
                        del self._peers[address]
                elif self._is_silent(peer):
                    log.warning("a caller has been silent for %g s; its requests are cancelled", peer.silent_s)
                    self._drop(address, peer)
                else:
                    peer.used_at = now
                    self._share_budget(peer)
                    self._beat(peer)

    def _is_silent(self, peer: _CallerPeer) -> bool:
        if peer.has_spoken:
            peer.has_spoken = False
            peer.silent_s = 0.0
        elif not self._connection.is_silent:  # else the fault may lie with this process's own connection
            peer.silent_s += self.limits.beat_s
        return peer.silent_s > self.limits.caller_gone_after_s

    def _beat(self, peer: _CallerPeer) -> None:
        silent: list[int] = []
        blocked: list[tuple[tuple[int, int, int], int]] = []
        for request in peer.requests.values():
            request.check_upload()
            if request.has_sent:
                request.has_sent = False
            elif (waiting := request.blocked) is not None:
                blocked.append(waiting)
            else:
                silent.append(request.id)
        for ids in batched(silent, _PER_FRAME):
            peer.outbox.add(frames.encode(frames.Beat(ids)))
        for some in batched(blocked, _PER_FRAME):
            peer.outbox.add(frames.encode(frames.Beat([], [waiting for waiting, _ in some], [needed for _, needed in some])))

    def on_reconnect(self) -> None:
        """Send what waited for the connection."""
        self._fit_chunks()
        for peer in self._peers.values():
            peer.max_unacknowledged = 0
            peer.outbox.flush()

    def stop_all(self) -> None:
        """End every open request with an error that lets the caller try another instance."""
        for peer in self._peers.values():
            for request in list(peer.requests.values()):
                request.fail(ShuttingDown("the worker"))
                request.stop()
            peer.outbox.flush()


async def _unknown_verb(request: Incoming) -> None:
    raise Unsupported(f"the instance does not know the request verb {request.verb[:64]!r}")


@asynccontextmanager
async def serve_requests(
    connection: Connection,
    endpoint: Endpoint,
    instance: InstanceId,
    handlers: Mapping[str, Handler],
    limits: PlaneLimits | None = None,
    memory: SharedMemory | None = None,
) -> AsyncIterator[RequestServer]:
    """Takes requests until the context is left; what is open then is refused, so leave it drained."""
    subject = endpoint.rpc_subject(instance)
    server = RequestServer(connection, subject, handlers, limits or PlaneLimits(), memory)
    requests = await connection.subscribe(subject, server.on_message)
    gone = await connection.subscribe(f"{subject}.gone.*", server.on_message)
    connection.on_reconnect(server.on_reconnect)
    try:
        async with running(server.beat(), "beats of open requests"):
            try:
                yield server
            finally:
                await requests.close()
    finally:
        server.stop_all()
        await gone.close()
