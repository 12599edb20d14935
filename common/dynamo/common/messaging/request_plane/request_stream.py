"""One request at one instance, and its responses, as the caller follows them.

A stream ends exactly once: with END, with ERROR, with its deadline, by being cancelled, or because its instance is gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING

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
from dynamo.common.messaging.buffers import Body, Buffer
from dynamo.common.messaging.request_plane import frames
from dynamo.common.messaging.request_plane.credit import StreamCredit
from dynamo.common.messaging.request_plane.frames import BodyPieces, size_of
from dynamo.common.messaging.request_plane.instance_peer import LARGE_RESPONSE_BYTES
from dynamo.common.messaging.request_plane.limits import COPIED_AT_ONCE_BYTES, FRAME_COST
from dynamo.common.process.work import Work
from dynamo.common.shared_memory.layout import Reference

if TYPE_CHECKING:
    from dynamo.common.messaging.request_plane.client import RequestClient
    from dynamo.common.messaging.request_plane.instance_peer import InstancePeer


_NO_BODY = memoryview(b"")
_NOT_LENT = Reference(0, 0, 0)
_SMALL_CREDIT_BYTES = 64 * 1024
"""A stream with less credit than this gets it back at once if it waits for it; others when half of it is used."""
_OVERDRAFT_BYTES = 64 * 1024
"""More than an instance can send beyond its credit by mistakes of counting."""
_MOST_RETRY_AFTER_S = 3600.0
_MOST_PARTS = 1_000_000
"""Messages that a response may come in: empty ones, which no instance sends, are bounded too."""
_PART_COST = 256
"""Bytes that a part of a response takes in memory beside its own."""
_SHARES_OF_WINDOW = 4
"""What was read is counted when it is such a part of a window: counting it for each token costs more than reading the token."""


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
        "_parts_held",
        "_peer",
        "_read",
        "_responses",
        "_timer",
        "_total",
        "_unacknowledged",
        "_uncredited",
        "_upload",
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
        peer: InstancePeer,
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
        self._upload: BodyPieces | None = None
        self._allowed_upload = 0
        self._unacknowledged = 0
        self._total = len(body) if isinstance(body, bytes) else size_of(body)
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
        self._parts_held = 0
        """What the client counts for them."""
        self._over = False
        self._failure: DynamoError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

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
        self._upload = BodyPieces(body)
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
        if memory is None or self._peer.neighbour is None or self._peer.is_far:
            return frames.Open(*opening, body)
        return frames.Near(*opening, memory.arena.token, lent.unit, lent.generation, body)

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
            self._send(upload.chunk(self.id, size))
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
            self._send(frames.encode(frames.Chunk(self.id, self._upload.chunks)))

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
        # A small part is copied: else it would keep the whole message, which may be much larger.
        self._parts.append(frame.body if frame.body.nbytes >= _PART_COST else memoryview(bytes(frame.body)))
        self._parts_bytes += frame.body.nbytes
        if frame.index != len(self._parts) - 1:
            self._on_gap()
        elif self._parts_bytes > self._client.limits.max_body_bytes or len(self._parts) > _MOST_PARTS:
            self._abort(PayloadTooLarge(f"the response is larger than {self._client.limits.max_body_bytes} bytes"))
        elif not self._client.hold_parts(held := frame.body.nbytes + _PART_COST):
            most = self._client.limits.max_buffered_bytes
            self._abort(Overloaded(f"responses that are received in parts take {most} bytes already", retry_after_s=1.0))
        elif self._responses:
            self._parts_held += held
            self._uncredited += frame.body.nbytes + FRAME_COST
        else:  # the reader waits for this response, which may be larger than the window
            self._parts_held += held
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
            if self._uncredited > _OVERDRAFT_BYTES and self._is_overdrawn():
                return self._on_overdraft()
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
        if self._uncredited > _OVERDRAFT_BYTES and self._is_overdrawn():
            return self._on_overdraft()
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
        if isinstance(error, Overloaded) and 0.0 <= frame.retry_after_s <= _MOST_RETRY_AFTER_S:
            error.retry_after_s = frame.retry_after_s
        if isinstance(error, InvalidRequest):
            error.param = frame.param or None
        self.fail(error)

    def _reassembled(self, body: memoryview) -> Buffer:
        self._useful_credit = max(self._useful_credit, self._parts_bytes + body.nbytes)
        parts = self._parts
        self._drop_parts()
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _drop_parts(self) -> None:
        self._client.release_parts(self._parts_held)
        self._parts, self._parts_bytes, self._parts_held = [], 0, 0

    def _on_gap(self) -> None:
        self._abort(InstanceGone(self._peer.instance, "lost part of its response on the way", is_alive=True))

    def _is_overdrawn(self) -> bool:
        """Return whether the instance has sent clearly more than it was granted: what waits here would have no bound."""
        assert self._credit is not None
        return self._credit.used + self._read + self._uncredited > self._granted + _OVERDRAFT_BYTES

    def _on_overdraft(self) -> None:
        self._responses.clear()
        self._abort(InstanceGone(self._peer.instance, "sent more of its response than it may", is_alive=True))

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
        if self._parts:
            self._drop_parts()
        if self._useful_credit >= LARGE_RESPONSE_BYTES or self._peer.response_bytes:
            self._peer.learn(self._verb, self._useful_credit)
        self._client.forget(self, self._peer)
        self._wake()
