"""The caller's side of the request plane: opens streams to instances and follows them to their end.

A stream ends exactly once: with END, with ERROR, with its deadline, by being cancelled, or because its instance is gone. An
instance counts as gone when nats-server reports no subscriber on its subject, when it does not respond to probes, when it no
longer knows the stream, or when part of its response is lost. Nothing is retried here: `dispatch` decides where a request goes
next.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from itertools import zip_longest
from types import TracebackType

from dynamo.common.background import running
from dynamo.common.errors import (
    Cancelled,
    DeadlineExceeded,
    DynamoError,
    EngineError,
    InstanceGone,
    InvalidRequest,
    Overloaded,
    PayloadTooLarge,
    from_wire,
)
from dynamo.common.messaging import frames
from dynamo.common.messaging.connection import Connection
from dynamo.common.messaging.credit import ResponseCredits, StreamCredit
from dynamo.common.messaging.frames import INLINE_BYTES, Body, Buffer, Pieces, batched, size_of
from dynamo.common.messaging.limits import COPIED_AT_ONCE_BYTES, FRAME_COST, PlaneLimits
from dynamo.common.messaging.outbox import Outbox
from dynamo.common.messaging.unreadable import Unreadable
from dynamo.common.names import InstanceId, responses_prefix
from dynamo.common.shared_memory.layout import Reference
from dynamo.common.shared_memory.neighbour import Neighbour
from dynamo.common.shared_memory.sharing import SharedMemory
from dynamo.common.work import Work

log = logging.getLogger(__name__)

_NO_HEADERS: dict[str, str] = {}
_NO_BODY = memoryview(b"")
_NOT_LENT = Reference(0, 0, 0)
_PER_FRAME = 1000
"""Streams named in one frame."""
_LARGE_RESPONSE_BYTES = 256
"""Smaller ones fit into windows."""
_SMALL_CREDIT_BYTES = 64 * 1024
"""A stream with less credit than this gets it back at once if it waits for it; others when half of it is used."""
_SHARES_OF_WINDOW = 4
"""What was read is counted when it is such a part of a window: counting it for each token costs more than reading the token."""
_WITNESSES = 3
"""So many other instances are probed before one is taken for gone."""
_WITHOUT_WITNESSES = 3
"""If none of them responds either, the time until then is so many times as long."""


class RequestStream:
    """One request at one instance, and its responses.

    As a context manager it cancels the request when it is left before the end.
    """

    __slots__ = (
        "_allowed_upload",
        "_body",
        "_client",
        "_copied",
        "_credit",
        "_expected",
        "_failure",
        "_granted",
        "_headers",
        "_is_short",
        "_least_read",
        "_lent",
        "_needed",
        "_over",
        "_parts",
        "_parts_bytes",
        "_peer",
        "_read",
        "_responses",
        "_timer",
        "_total",
        "_unacknowledged",
        "_uncredited",
        "_upload",
        "_upload_index",
        "_useful_credit",
        "_verb",
        "_waiter",
        "_was_copied",
        "batch",
        "deadline",
        "id",
        "last_frame_at",
        "started",
        "trailer",
    )

    def __init__(
        self,
        client: RequestClient,
        peer: _InstancePeer,
        id_: int,
        verb: str,
        body: Body,
        headers: Mapping[str, str],
        deadline: float | None,
    ) -> None:
        self.id = id_
        self.deadline = deadline
        self.started = False
        """A DATA or END frame was delivered: from here on the request must not be repeated elsewhere."""
        self.trailer: Buffer = b""
        """Body of END."""
        self.batch = -1
        self.last_frame_at = client.now
        self._client = client
        self._peer = peer
        self._verb = verb
        self._headers = headers if isinstance(headers, dict) else dict(headers)
        self._body = body
        self._lent = 0
        """Generation of the region that holds the body; 0: none does."""
        self._was_copied = False
        """The body is, or was, being copied in steps."""
        self._copied: Reference | None = None
        """The copy of the body, until the request leaves."""
        self._upload: Pieces | None = None
        self._upload_index = 0
        self._allowed_upload = 0
        self._unacknowledged = 0
        self._total = size_of(body)
        self._credit: StreamCredit | None = None
        """None before it is sent."""
        self._granted = 0
        """How much of what the credit allows OPEN and CREDIT have granted."""
        self._needed = 0
        """The total of credit with which everything that waits at the instance can be sent."""
        self._is_short = False
        """The instance has requested credit up to `_needed`, and nothing was borrowed since."""
        self._useful_credit = 0
        """As large as the largest response, or as what was borrowed: a later stream can begin with so much."""
        self._uncredited = 0
        """Bytes that wait to be read."""
        self._read = 0
        """Bytes that were read, and that `_consumed` has not counted yet."""
        self._least_read = 0
        """So many are worth counting while the instance waits for nothing and nothing is borrowed, which others could use."""
        self._expected = 0
        self._responses: list[Buffer] = []
        self._parts: list[memoryview] = []
        self._parts_bytes = 0
        self._over = False
        self._failure: DynamoError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def instance(self) -> InstanceId:
        return self._peer.instance

    async def read(self) -> list[Buffer]:
        """Return all responses since the last call, at least one, or an empty list after END. Raises as the stream failed."""
        while not self._responses:
            if self._over:
                if self._failure is not None:
                    raise self._failure
                return []
            self._waiter = waiter = self._client.loop.create_future()
            await waiter
        responses, self._responses = self._responses, []
        self._read += self._uncredited
        self._uncredited = 0
        if not self._over and (self._read >= self._least_read or self._is_short or self._needed > self._granted):
            self._consumed(0)
            self._request_credit()
        return responses

    async def result(self) -> Buffer:
        """Return the response of a unary request. Raises as the stream failed; EngineError for several responses."""
        while not self._over:
            self._waiter = waiter = self._client.loop.create_future()
            await waiter
        if self._failure is not None:
            raise self._failure
        if self._responses:
            raise EngineError("the engine gave several responses to a request that takes one")
        return self.trailer

    def cancel(self) -> None:
        """End the stream and tell the instance to stop. Does nothing after the end."""
        if not self._over:
            self._send(frames.encode(frames.Cancel(self.id)))
            self.fail(Cancelled())

    async def __aenter__(self) -> RequestStream:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.cancel()

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    # sending

    def encoded(self, batch: int) -> list[Buffer] | bytes | None:
        """The OPEN frame (see outbox.Opening)."""
        if self._over:
            return None
        if self._total > COPIED_AT_ONCE_BYTES and self._is_copied_first():
            return None
        client, limits = self._client, self._client.limits
        self.batch = batch
        self.last_frame_at = client.now = client.loop.time()
        left_ms = -1 if self.deadline is None else max(0, int((self.deadline - client.now) * 1000))
        total, body = self._total, self._body
        self._credit = StreamCredit(client.credits, self._peer.response_bytes.get(self._verb, 0))
        self._granted = self._credit.allowed
        self._least_read = 0 if self._credit.borrowed else self._credit.window // _SHARES_OF_WINDOW
        if client.memory is not None and total >= client.memory.least_bytes and (lent := self._lend()) is not None:
            return self._checked(frames.encode(self._opening(left_ms, total, lent)), 0)
        flight = min(total, limits.first_flight_bytes, max(0, self._peer.max_unacknowledged - self._peer.unacknowledged))
        self._unacknowledged = self._allowed_upload = flight
        self._peer.unacknowledged += flight
        if flight == total <= client.inline_bytes and isinstance(body, bytes):  # most requests take this short way
            return self._checked(frames.encode(self._opening(left_ms, flight, body=memoryview(body))), total)
        self._upload = Pieces(body)
        first = self._upload.take(min(flight, client.chunk_bytes))
        frame = self._opening(left_ms, flight)
        if self._checked(frames.encode(frame), 0) is None:
            return None
        if flight > client.chunk_bytes:
            client.loop.call_soon(self._send_chunks)
        return frames.encode_with_body(frame, first)

    def _opening(
        self, left_ms: int, flight: int, lent: Reference = _NOT_LENT, *, body: memoryview = _NO_BODY
    ) -> frames.Open | frames.Near:
        memory = self._client.memory
        opening = (self.id, self._verb, self._headers, left_ms, self._total, flight, self._granted)
        if memory is None or self._peer.near is None:
            return frames.Open(*opening, body)
        return frames.Near(*opening, memory.token, lent.unit, lent.generation, body)

    def _lend(self) -> Reference | None:
        """Put the body where the instance can read it. None if that is far away, or there is no room."""
        memory, near = self._client.memory, self._peer.near
        if memory is None or near is None:
            return None
        if self._total > COPIED_AT_ONCE_BYTES:
            reference, self._copied = self._copied, None
            return reference
        reference = memory.lend(self._body, self._total, near)
        if reference is not None:
            self._lent = reference.generation
        return reference

    def _is_copied_first(self) -> bool:
        """Begin to copy a large body to where the instance can read it. Return whether the request leaves when that is done."""
        memory, near = self._client.memory, self._peer.near
        if self._was_copied or memory is None or near is None:
            return False
        self._was_copied = True
        self._client.copy(self, memory.lend_in_steps(self._body, self._total, near))
        return True

    def copy(self, steps: Work[Reference | None]) -> bool:
        """Copy a part of the body. Return whether more is to be copied."""
        if self._over:
            steps.close()
            return False
        self.last_frame_at = self._client.loop.time()  # it is not the instance that is silent
        try:
            next(steps)
        except StopIteration as end:
            self._copied = end.value
            self._lent = 0 if self._copied is None else self._copied.generation
            self._peer.outbox.add(self)
            return False
        return True

    def _settle(self) -> None:
        """Let the region of the body be freed: the request does not need it any more."""
        lent, self._lent = self._lent, 0
        if lent and self._client.memory is not None:
            self._client.memory.arena.settle(lent)

    def _checked(self, head: bytes, body_bytes: int) -> bytes | None:
        """Return an encoded OPEN with so many bytes of body if its headers are not too large; else fail."""
        size, limit = len(head) - body_bytes, self._client.limits.max_head_bytes
        if size <= limit:
            return head
        self.fail(InvalidRequest(f"the headers of the request have {size} bytes; at most {limit} are allowed"))
        return None

    def _send_chunks(self) -> bool:
        """Send as much of the body as may be sent. Return whether there was anything to send."""
        upload, has_sent = self._upload, False
        while upload is not None and not self._over:
            size = min(upload.left, self._client.chunk_bytes, self._allowed_upload - (self._total - upload.left))
            if size <= 0:
                break
            self._send(frames.encode_with_body(frames.Chunk(self.id, self._upload_index), upload.take(size)))
            self._upload_index += 1
            has_sent = True
        return has_sent

    def _send(self, frame: bytes | list[Buffer]) -> None:
        self._peer.outbox.add(frame)

    # receiving

    def acknowledge(self) -> None:
        """The instance has seen the first flight of the body."""
        if self._unacknowledged:
            self._peer.unacknowledged -= self._unacknowledged
            self._unacknowledged = 0

    def on_credit(self, frame: frames.Credit) -> None:
        self.acknowledge()
        self._allowed_upload = max(self._allowed_upload, frame.total)
        if not self._send_chunks() and self._upload is not None:  # it waits for what has been sent: is that lost?
            self._send(frames.encode(frames.Chunk(self.id, self._upload_index)))

    def on_far(self) -> None:
        """The instance cannot read what is lent to it: send the request again, and the body with it."""
        if not self._lent or self._credit is None:
            return  # a duplicate, or the body was not lent
        self._peer.is_far = True
        self._settle()
        self._credit.close(self)
        self._peer.outbox.add(self)

    def on_lent(self, frame: frames.Lent, body: memoryview) -> None:
        self._expected += 1
        self._parts.append(body)
        if frame.index != len(self._parts) - 1:
            self._on_gap()
        elif body.nbytes > self._client.limits.max_body_bytes:
            self._abort(PayloadTooLarge(f"the response is larger than {self._client.limits.max_body_bytes} bytes"))
        else:
            self._uncredited += FRAME_COST

    def on_unreadable(self) -> None:
        """What the instance has lent cannot be read."""
        self._peer.is_far = True
        self._on_gap()

    def on_chunk(self, frame: frames.Chunk) -> None:
        self._expected += 1
        self._parts.append(frame.body)
        self._parts_bytes += frame.body.nbytes
        if frame.index != len(self._parts) - 1:
            self._on_gap()
        elif self._parts_bytes > self._client.limits.max_body_bytes:
            self._abort(PayloadTooLarge(f"the response is larger than {self._client.limits.max_body_bytes} bytes"))
        elif self._responses:
            self._uncredited += frame.body.nbytes + FRAME_COST
        else:  # the reader waits for this response, which may be larger than the window
            self._consumed(frame.body.nbytes + FRAME_COST)
            self._request_credit()

    def on_data(self, frame: frames.Data) -> None:
        if self._unacknowledged:
            self.acknowledge()
        if frame.seq != self._expected:
            return self._on_gap()
        self._expected += 1
        self.started = True
        if self._parts:
            self._consumed(FRAME_COST)
            self._responses.append(self._reassembled(frame.body))
        else:
            self._uncredited += frame.body.nbytes + FRAME_COST
            self._useful_credit = max(self._useful_credit, frame.body.nbytes)
            self._responses.append(frame.body)
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            if not waiter.done():
                waiter.set_result(None)

    def on_many(self, frame: frames.Many) -> None:
        if self._unacknowledged:
            self.acknowledge()
        if frame.seq != self._expected or self._parts or not frame.bodies:
            return self._on_gap()
        sizes = list(map(len, frame.bodies))
        self._expected += len(sizes)
        self._uncredited += sum(sizes) + len(sizes) * FRAME_COST
        self._useful_credit = max(self._useful_credit, *sizes)
        self.started = True
        self._responses += frame.bodies
        if self._waiter is not None:
            self._wake()

    def on_end(self, frame: frames.End) -> None:
        if frame.seq != self._expected:
            return self._on_gap()
        self.started = True
        if self._parts:
            self.trailer = self._reassembled(frame.body)
        else:
            self.trailer = body = frame.body
            self._useful_credit = max(self._useful_credit, body.nbytes)
        self._finish()

    def on_error(self, frame: frames.Error) -> None:
        if frame.code == frames.LOST:
            return self.fail(InstanceGone(self._peer.instance, "got only a part of the request", is_alive=True, was_held=False))
        error = from_wire(frame.code, frame.message, frame.retryable)
        if isinstance(error, Overloaded):
            error.retry_after_s = frame.retry_after_s
        if isinstance(error, InvalidRequest):
            error.param = frame.param or None
        self.fail(error)

    def _reassembled(self, body: memoryview) -> Buffer:
        self._useful_credit = max(self._useful_credit, self._parts_bytes + body.nbytes)
        if not self._parts:
            return body
        parts, self._parts, self._parts_bytes = self._parts, [], 0
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _on_gap(self) -> None:
        self._abort(InstanceGone(self._peer.instance, "lost part of its response on the way", is_alive=True))

    def _abort(self, error: DynamoError) -> None:
        self._send(frames.encode(frames.Cancel(self.id)))
        self.fail(error)

    def _consumed(self, size: int) -> None:
        """Let the instance send more in place of `size` bytes and what was read, as far as the budget goes, in few frames."""
        credit = self._credit
        assert credit is not None
        credit.use(size + self._read)
        self._read = 0
        self._least_read = 0 if credit.borrowed else credit.window // _SHARES_OF_WINDOW
        owed = credit.allowed - self._granted
        if owed and (owed * 2 >= credit.bytes or (self._needed > self._granted and credit.bytes < _SMALL_CREDIT_BYTES)):
            self.send_credit()

    def on_blocked(self, granted: int, seq: int, needed: int) -> None:
        """The instance waits for credit: frames are lost, or the last CREDIT is, or it needs more, or the reader is slow."""
        if seq != self._expected:
            return self._on_gap()
        if needed > self._needed:
            self._needed, self._is_short = needed, True
            self._consumed(0)
        elif self._credit is not None and granted < self._credit.allowed:
            self.send_credit()
        self._request_credit()

    def _request_credit(self) -> None:
        """Borrow what the instance waits for, but not for a reader that has not read the last response."""
        credit = self._credit
        if not self._is_short or self._responses or credit is None:
            return
        size, kept = self._needed - credit.allowed, self._client.limits.kept_credit_bytes
        if credit.borrowed >= kept >= size:
            self._is_short = size > 0  # it gets that back as it is read; if others need it, the next reading borrows
            return
        self._is_short = False
        on_demand = self._client.credits.on_demand
        if on_demand.is_plentiful and self.started:  # it reads: enough that the next responses need not wait
            size = max(size, kept - credit.borrowed)
        if size > 0:
            on_demand.request(self, size)

    def grant(self, size: int) -> None:
        """Let the instance send `size` bytes that were borrowed."""
        assert self._credit is not None
        self._credit.borrowed += size
        self._least_read = 0
        self._useful_credit = max(self._useful_credit, self._credit.borrowed)
        self.send_credit()

    def send_credit(self) -> None:
        """Tells the instance how much it may have sent by now."""
        assert self._credit is not None
        self._granted = self._credit.allowed
        self._send(frames.encode(frames.Credit(self.id, self._granted)))

    def on_reconnect(self) -> None:
        """The connection was lost and is back: the last frames, in either direction, may be lost."""
        if self.batch >= 0:
            self.last_frame_at = float("-inf")  # so that it is probed

    def expire(self) -> None:
        """The deadline has passed."""
        self._abort(DeadlineExceeded())

    def fail(self, error: DynamoError) -> None:
        """Ends the stream with `error`, if it has not ended."""
        if not self._over:
            self._failure = error
            self._finish()

    def _finish(self) -> None:
        self._over = True
        if self._unacknowledged:
            self.acknowledge()
        if self._lent:
            self._settle()
        if self._timer is not None:
            self._timer.cancel()
        if self._credit is not None:
            self._credit.close(self)
        if self._useful_credit >= _LARGE_RESPONSE_BYTES or self._peer.response_bytes:
            self._peer.learn(self._verb, self._useful_credit)
        self._client.forget(self, self._peer)
        self._wake()


class _InstancePeer:
    """An instance as this client knows it."""

    __slots__ = (
        "absent_batch",
        "absent_until",
        "instance",
        "is_far",
        "is_suspect",
        "last_frame_at",
        "max_unacknowledged",
        "neighbour",
        "outbox",
        "overdue_s",
        "probed_at",
        "response_bytes",
        "streams",
        "unacknowledged",
        "unknown",
        "used_at",
    )

    def __init__(
        self, instance: InstanceId, outbox: Outbox, neighbour: Neighbour | None, max_unacknowledged: int, now: float
    ) -> None:
        self.instance = instance
        self.outbox = outbox
        self.neighbour = neighbour
        """Its arena, if it shares memory with this process."""
        self.is_far = False
        """It could not read what was lent to it, or the other way round: nothing more is lent in either direction."""
        self.streams: dict[int, RequestStream] = {}
        self.response_bytes: dict[str, int] = {}
        """How much credit the last streams could have begun with, by verb, where that is more than a window."""
        self.max_unacknowledged = max_unacknowledged
        """How much of requests may be sent without credit, and `unacknowledged`: how much is."""
        self.unacknowledged = 0
        self.used_at = now
        """When it last had a stream."""
        self.last_frame_at = float("-inf")
        """When its last frame came."""
        self.probed_at: float | None = None
        """When the first probe was sent since its last frame."""
        self.overdue_s = 0.0
        """How long a response has been overdue, while this process was able to receive it."""
        self.absent_until: float | None = None
        """Until when it may subscribe again, after nats-server reported it without subscription; None after its next frame."""
        self.absent_batch = 0
        """The batch for which nats-server reported it."""
        self.is_suspect = False
        """A stream failed because it is gone; no frame has come since."""
        self.unknown: set[int] = set()
        """Streams that it still works on and that are over here."""

    @property
    def near(self) -> Neighbour | None:
        """Its arena, if bodies may be lent."""
        return None if self.is_far else self.neighbour

    def learn(self, verb: str, size: int) -> None:
        """Expect a stream of `verb` to need `size` bytes of credit; where that varies, the larger number."""
        expected = max(size, self.response_bytes.get(verb, 0) // 2)
        if expected >= _LARGE_RESPONSE_BYTES:
            self.response_bytes[verb] = expected
        else:
            self.response_bytes.pop(verb, None)

    def record_frame(self, now: float) -> None:
        self.last_frame_at = now
        self.probed_at = self.absent_until = None
        self.overdue_s = 0.0


class RequestClient:
    """Opens streams. One per process; use `open_client`."""

    def __init__(self, connection: Connection, namespace: str, limits: PlaneLimits, memory: SharedMemory | None = None) -> None:
        self.limits = limits
        self.memory = memory
        self.loop = asyncio.get_running_loop()
        self.now = self.loop.time()
        """The loop's clock, read once per message rather than once per frame."""
        self.prefix = responses_prefix(namespace, secrets.token_hex(8))
        self._connection = connection
        self._fit_chunks()
        self._unreadable = Unreadable("a message of an instance")
        self._on_sign_of_life: list[Callable[[InstanceId], None]] = []
        self._peers: dict[InstanceId, _InstancePeer] = {}
        self._peers_by_subject: dict[str, _InstancePeer] = {}
        self._streams: dict[int, RequestStream] = {}
        self._last = 0
        self._copies: deque[tuple[RequestStream, Work[Reference | None]]] = deque()
        """Bodies that are being copied; a turn of the event loop copies a part of one."""
        self.credits = ResponseCredits(limits)

    @property
    def open_streams(self) -> int:
        return len(self._streams)

    @property
    def free_budget_bytes(self) -> int:
        """Credit for responses without a stream."""
        return self.credits.free_bytes

    @property
    def unacknowledged_bytes(self) -> int:
        """Bytes of requests that instances have not reacted to yet."""
        return sum(peer.unacknowledged for peer in self._peers.values())

    def open(
        self,
        instance: InstanceId,
        subject: str,
        verb: str,
        body: Body,
        *,
        headers: Mapping[str, str] = _NO_HEADERS,
        deadline: float | None = None,
        arena: str = "",
    ) -> RequestStream:
        """Sends a request to `instance`. Waits for nothing: without a connection the request leaves when there is one.

        `deadline` is absolute, on the event loop's clock; `arena` is the token of the instance's arena, if it has one.
        Raises PayloadTooLarge.
        """
        self._last += 1
        peer = self._peers.get(instance)
        if peer is None:
            outbox = Outbox(self._connection, subject, f"{self.prefix}.{instance:x}.{{}}".format)
            neighbour = self.memory.neighbour(arena) if self.memory is not None and arena else None
            peer = self._peers[instance] = self._peers_by_subject[f"{self.prefix}.{instance:x}"] = _InstancePeer(
                instance, outbox, neighbour, self.limits.first_unacknowledged_bytes, self.now
            )
        stream = RequestStream(self, peer, self._last, verb, body, headers, deadline)
        if stream._total > self.limits.max_body_bytes:
            raise PayloadTooLarge(f"the request has {stream._total} bytes; at most {self.limits.max_body_bytes} are allowed")
        self._streams[stream.id] = peer.streams[stream.id] = stream
        if deadline is not None:
            stream._timer = self.loop.call_at(deadline, stream.expire)
        peer.outbox.add(stream, at_once=len(self._streams) == 1)
        return stream

    def copy(self, stream: RequestStream, steps: Work[Reference | None]) -> None:
        """Copy the body of a stream in steps, fairly with other bodies."""
        self._copies.append((stream, steps))
        if len(self._copies) == 1:
            self.loop.call_soon(self._copy_part)

    def _copy_part(self) -> None:
        stream, steps = self._copies[0]
        is_unfinished = stream.copy(steps)
        self._copies.popleft()
        if is_unfinished:
            self._copies.append((stream, steps))
        if self._copies:
            self.loop.call_soon(self._copy_part)

    def forget(self, stream: RequestStream, peer: _InstancePeer) -> None:
        self._streams.pop(stream.id, None)
        peer.streams.pop(stream.id, None)

    def on_sign_of_life(self, callback: Callable[[InstanceId], None]) -> None:
        """Call `callback`, synchronously, when an instance that was taken for gone sends something after all."""
        self._on_sign_of_life.append(callback)

    def on_message(self, subject: str, reply: str, payload: memoryview, no_responders: bool) -> None:
        """Handle a message of responses."""
        if no_responders:
            return self._on_no_responders(subject)
        try:
            message = frames.decode(payload)
        except InvalidRequest as error:
            return self._unreadable.drop(subject, error)
        self.now = now = self.loop.time()
        peer = self._peers_by_subject.get(subject)
        if peer is None:
            return  # it had no streams for a long time
        peer.record_frame(now)
        if peer.is_suspect:
            peer.is_suspect = False
            for callback in self._on_sign_of_life:
                callback(peer.instance)
        streams = peer.streams
        for frame in message:
            if isinstance(frame, frames.Data):
                if stream := streams.get(frame.stream):
                    stream.last_frame_at = now
                    stream.on_data(frame)
                else:
                    peer.unknown.add(frame.stream)
            elif isinstance(frame, frames.Many):
                if stream := streams.get(frame.stream):
                    stream.last_frame_at = now
                    stream.on_many(frame)
                else:
                    peer.unknown.add(frame.stream)
            elif isinstance(frame, frames.End):
                if stream := streams.get(frame.stream):
                    stream.on_end(frame)
            elif isinstance(frame, frames.Lent):
                self._on_lent(peer, frame)
            elif isinstance(frame, frames.Far):
                if stream := streams.get(frame.stream):
                    stream.on_far()
            elif isinstance(frame, frames.Beat):
                self._on_beat(peer, frame)
            elif isinstance(frame, frames.Known):
                self._on_known(peer, frame)
            elif isinstance(frame, frames.Chunk | frames.Credit | frames.Error):
                stream = streams.get(frame.stream)
                if frame.stream == frames.ALL_STREAMS:
                    if isinstance(frame, frames.Credit):
                        peer.max_unacknowledged = min(frame.total, self.limits.unacknowledged_bytes)
                    continue
                if stream is None:
                    if not isinstance(frame, frames.Error):
                        peer.unknown.add(frame.stream)
                    continue
                stream.last_frame_at = now
                if isinstance(frame, frames.Chunk):
                    stream.on_chunk(frame)
                elif isinstance(frame, frames.Credit):
                    stream.on_credit(frame)
                else:
                    stream.on_error(frame)

    def _on_lent(self, peer: _InstancePeer, frame: frames.Lent) -> None:
        """Take the region, even if the stream is over: so it returns to the instance."""
        stream = peer.streams.get(frame.stream)
        if stream is None:
            peer.unknown.add(frame.stream)
        else:
            stream.last_frame_at = self.now
        body = None
        if self.memory is not None and peer.neighbour is not None:
            body = self.memory.take(peer.neighbour, Reference(frame.unit, frame.size, frame.generation))
        if stream is not None:
            if body is None:
                stream.on_unreadable()
            else:
                stream.on_lent(frame, body)

    def _on_beat(self, peer: _InstancePeer, frame: frames.Beat) -> None:
        for id_ in frame.streams:
            if stream := peer.streams.get(id_):
                stream.last_frame_at = self.now
                stream.acknowledge()
            else:
                peer.unknown.add(id_)
        for (id_, granted, seq), needed in zip_longest(frame.blocked, frame.needed[: len(frame.blocked)]):
            if stream := peer.streams.get(id_):
                stream.last_frame_at = self.now
                # An instance of an older version does not say how much it needs.
                stream.on_blocked(granted, seq, granted + self.limits.kept_credit_bytes if needed is None else needed)
            else:
                peer.unknown.add(id_)

    def _on_known(self, peer: _InstancePeer, frame: frames.Known) -> None:
        for id_ in frame.streams:
            if stream := peer.streams.get(id_):
                stream.last_frame_at = self.now
            else:
                peer.unknown.add(id_)
        for id_ in frame.unknown:  # its last frame would have come before this one
            if stream := peer.streams.get(id_):
                stream.fail(InstanceGone(peer.instance, "does not know the request any more", is_alive=True))

    def _on_no_responders(self, subject: str) -> None:
        """The instance has no subscription: nothing in that batch ran. It may be reconnecting, or we just did."""
        peer = self._peers_by_subject.get(subject.rpartition(".")[0])
        if peer is None:
            return
        now = self.loop.time()
        batch = int(subject.rpartition(".")[2])
        unsent = [stream for stream in peer.streams.values() if stream.batch == batch]
        has_responded = peer.last_frame_at > float("-inf")
        for stream in unsent:
            stream.fail(InstanceGone(peer.instance, "is gone", was_held=False, has_responded=has_responded))
        peer.is_suspect = peer.is_suspect or bool(unsent)
        if peer.absent_until is None:
            peer.absent_until, peer.absent_batch = now + self.limits.absent_grace_s, batch
            self.loop.call_at(peer.absent_until, self._probe_absent, peer)
        elif now >= peer.absent_until:
            self._fail_streams(peer, "is gone", unsent_since=peer.absent_batch)

    @staticmethod
    def _probe_absent(peer: _InstancePeer) -> None:
        """The time is over that an instance without subscription has to come back."""
        if peer.absent_until is not None and peer.streams:
            peer.outbox.add(frames.encode(frames.Probe([])))

    def _fail_streams(self, peer: _InstancePeer, why: str, unsent_since: int | None = None) -> None:
        """Fail all streams of an instance. `unsent_since`: the first batch that certainly did not reach it.

        They are cancelled, too: an instance that only hung must not run requests that were retried elsewhere meanwhile.
        """
        peer.is_suspect = peer.is_suspect or bool(peer.streams)
        for stream in list(peer.streams.values()):
            was_held = stream.batch >= 0 and (unsent_since is None or stream.batch < unsent_since)
            stream._abort(InstanceGone(peer.instance, why, was_held=was_held))

    async def watch(self) -> None:
        """Probe silent streams and repeat what may have been lost, for ever."""
        interval_s = self.limits.probe_after_s / 4
        while True:
            await asyncio.sleep(interval_s)
            if self._connection.is_connected:
                self.now = self.loop.time()
                for peer in list(self._peers.values()):
                    self._check(peer, interval_s)

    def _check(self, peer: _InstancePeer, interval_s: float) -> None:
        if peer.unknown:  # a CANCEL was lost, or is still on its way
            for id_ in peer.unknown:
                peer.outbox.add(frames.encode(frames.Cancel(id_)))
            peer.unknown.clear()
        if peer.streams:
            peer.used_at = self.now
        elif self.now - peer.used_at > self.limits.peer_kept_s:
            return self._forget_peer(peer)
        silent_before = self.now - self.limits.probe_after_s
        silent = [id_ for id_, stream in peer.streams.items() if stream.batch >= 0 and stream.last_frame_at < silent_before]
        if silent or peer.is_suspect or peer.absent_until is not None or peer.probed_at is not None:
            self._probe(peer, silent, interval_s)
        elif peer.streams and self.now - peer.outbox.flushed_at > self.limits.keepalive_s:
            peer.outbox.add(frames.encode(frames.Probe([])))

    def _probe(self, peer: _InstancePeer, silent: list[int], interval_s: float) -> None:
        if peer.probed_at is None:
            peer.probed_at = self.now
        elif not self._connection.is_silent:  # else the fault may lie with this process's own connection
            peer.overdue_s += interval_s
            if peer.streams and peer.overdue_s > self.limits.gone_after_s and self._is_alone(peer):
                return self._fail_streams(peer, "does not respond any more")
        for id_ in silent:
            peer.streams[id_].send_credit()  # the instance may be waiting for one that was lost
        for ids in batched(silent, _PER_FRAME) if silent else ([],):
            peer.outbox.add(frames.encode(frames.Probe(ids)))

    def _is_alone(self, peer: _InstancePeer) -> bool:
        """Return whether an instance that does not respond counts as gone: others respond, or none did for a long time."""
        assert peer.probed_at is not None
        others = [
            other for other in self._peers.values() if other is not peer and not other.is_suspect and other.absent_until is None
        ]
        if not others or peer.overdue_s > _WITHOUT_WITNESSES * self.limits.gone_after_s:
            return True
        if any(other.last_frame_at > peer.probed_at for other in others):
            return True
        for other in others[:_WITNESSES]:
            other.outbox.add(frames.encode(frames.Probe([])))
        return False

    def _forget_peer(self, peer: _InstancePeer) -> None:
        self._peers.pop(peer.instance)
        self._peers_by_subject.pop(f"{self.prefix}.{peer.instance:x}")
        peer.outbox.flush()

    def _fit_chunks(self) -> None:
        self.chunk_bytes = min(self.limits.chunk_bytes, self._connection.max_payload // 2)
        self.inline_bytes = min(self.chunk_bytes, INLINE_BYTES)

    def on_reconnect(self) -> None:
        """Send what waited for the connection, and probe everything that was under way when it was lost."""
        self._fit_chunks()
        self.now = self.loop.time()
        for peer in list(self._peers.values()):
            peer.probed_at = peer.absent_until = None
            peer.overdue_s = 0.0
            for stream in list(peer.streams.values()):
                stream.on_reconnect()
            peer.outbox.flush()
            self._check(peer, 0.0)


@asynccontextmanager
async def open_client(
    connection: Connection, namespace: str, limits: PlaneLimits | None = None, memory: SharedMemory | None = None
) -> AsyncIterator[RequestClient]:
    """Open a client. Leaving the context ends all its streams."""
    client = RequestClient(connection, namespace, limits or PlaneLimits(), memory)
    subscription = await connection.subscribe(f"{client.prefix}.>", client.on_message)
    connection.on_reconnect(client.on_reconnect)
    try:
        async with running(client.watch(), "probes of silent instances"):
            yield client
    finally:
        for stream in list(client._streams.values()):
            stream.cancel()
        for peer in client._peers.values():
            peer.outbox.flush()
        await subscription.close()
