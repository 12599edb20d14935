"""The caller's side of the request plane: opens streams to instances and follows them to their end.

A stream ends exactly once: with END, with ERROR, with its deadline, by being cancelled, or because its instance is gone. An
instance counts as gone when nats-server reports no subscriber on its subject, when it answers no probe, or when it no
longer knows the stream, or when part of its response is lost. Nothing is
retried here: `dispatch` decides where a request goes next.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
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
from dynamo.common.messaging.frames import INLINE_BYTES, Body, Buffer, Pieces, size_of
from dynamo.common.messaging.limits import FRAME_COST, PlaneLimits
from dynamo.common.messaging.outbox import Outbox
from dynamo.common.names import InstanceId, responses_prefix

log = logging.getLogger(__name__)

_NO_HEADERS: dict[str, str] = {}
_MOST_GIVEN_UP = 1024


class RequestStream:
    """One request at one instance, and its responses.

    As a context manager it cancels the request when it is left before the end.
    """

    __slots__ = (
        "_allowed",
        "_body",
        "_client",
        "_expected",
        "_failure",
        "_granted",
        "_headers",
        "_over",
        "_owed",
        "_parts",
        "_parts_bytes",
        "_peer",
        "_responses",
        "_timer",
        "_total",
        "_unacknowledged",
        "_uncredited",
        "_upload",
        "_upload_index",
        "_verb",
        "_waiter",
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
        self._upload: Pieces | None = None
        self._upload_index = 0
        self._unacknowledged = 0
        self._total = size_of(body)
        self._granted = 0
        self._allowed = 0
        self._uncredited = 0
        self._owed = 0
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
            await self._changed()
        responses, self._responses = self._responses, []
        if not self._over:
            self._consumed(self._uncredited)
        self._uncredited = 0
        return responses

    async def result(self) -> Buffer:
        """Return the response of a unary request. Raises as the stream failed; EngineError for several responses."""
        while not self._over:
            await self._changed()
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

    def _changed(self) -> asyncio.Future[None]:
        """Done when something has happened."""
        self._waiter = waiter = self._client.loop.create_future()
        return waiter

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    # sending

    def encoded(self, batch: int) -> list[Buffer] | bytes | None:
        """The OPEN frame (see outbox.Opening)."""
        if self._over:
            return None
        client, limits = self._client, self._client.limits
        self.batch = batch
        self.last_frame_at = client.now = client.loop.time()
        left_ms = -1 if self.deadline is None else max(0, int((self.deadline - client.now) * 1000))
        total, body = self._total, self._body
        flight = min(total, limits.first_flight_bytes, max(0, limits.unacknowledged_bytes - self._peer.unacknowledged))
        self._granted = self._allowed = client.grant()
        self._unacknowledged = flight
        self._peer.unacknowledged += flight
        if flight == total <= client.inline_bytes and isinstance(body, bytes):  # most requests take this short way
            whole = memoryview(body)
            return frames.encode(frames.Open(self.id, self._verb, self._headers, left_ms, total, flight, self._granted, whole))
        self._upload = Pieces(body)
        first = self._upload.take(min(flight, client.chunk_bytes))
        frame = frames.Open(self.id, self._verb, self._headers, left_ms, total, flight, self._granted)
        if flight > client.chunk_bytes:
            client.loop.call_soon(self._send_chunks, flight)
        return frames.encode_with_body(frame, first)

    def _send_chunks(self, allowed: int) -> None:
        """Sends of the body what may be sent when `allowed` bytes of it may."""
        upload = self._upload
        if upload is None:  # all of it went with the first frame
            return
        while not self._over:
            size = min(upload.left, self._client.chunk_bytes, allowed - (self._total - upload.left))
            if size <= 0:
                return
            self._send(frames.encode_with_body(frames.Chunk(self.id, self._upload_index), upload.take(size)))
            self._upload_index += 1

    def _send(self, frame: bytes | list[Buffer]) -> None:
        self._peer.outbox.add(frame)

    # receiving

    def _acknowledge(self) -> None:
        """The instance has seen the first flight of the body."""
        if self._unacknowledged:
            self._peer.unacknowledged -= self._unacknowledged
            self._unacknowledged = 0

    def on_credit(self, frame: frames.Credit) -> None:
        self._acknowledge()
        self._send_chunks(frame.total)

    def on_chunk(self, frame: frames.Chunk) -> None:
        self._parts.append(frame.body)
        self._parts_bytes += frame.body.nbytes
        if frame.index != len(self._parts) - 1:
            self._on_gap()
        elif self._parts_bytes > self._client.limits.max_body_bytes:
            self._abort(PayloadTooLarge(f"the response is larger than {self._client.limits.max_body_bytes} bytes"))
        else:
            self._consumed(frame.body.nbytes + FRAME_COST)

    def on_data(self, frame: frames.Data) -> None:
        if self._unacknowledged:
            self._acknowledge()
        if frame.seq != self._expected:
            return self._on_gap()
        self._expected += 1
        self.started = True
        if self._parts:
            self._consumed(FRAME_COST)
            self._responses.append(self._reassembled(frame.body))
        else:
            self._uncredited += frame.body.nbytes + FRAME_COST
            self._responses.append(frame.body)
        if self._waiter is not None:
            self._wake()

    def on_end(self, frame: frames.End) -> None:
        if frame.seq != self._expected:
            return self._on_gap()
        self.started = True
        self.trailer = self._reassembled(frame.body)
        self._finish()

    def on_error(self, frame: frames.Error) -> None:
        error = from_wire(frame.code, frame.message, frame.retryable)
        if isinstance(error, Overloaded):
            error.retry_after_s = frame.retry_after_s
        self.fail(error)

    def _reassembled(self, body: memoryview) -> Buffer:
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
        """Room for `size` more bytes goes back to the instance, in few frames rather than many."""
        self._owed += size
        self._allowed += size
        if self._owed * 4 >= self._granted:
            self.send_credit()

    def send_credit(self) -> None:
        """Tells the instance how much it may have sent by now."""
        self._owed = 0
        self._send(frames.encode(frames.Credit(self.id, self._allowed)))

    def on_reconnect(self) -> None:
        """The connection was lost and is back: the last frames, in either direction, may be lost."""
        if self.batch < 0:
            return
        self.last_frame_at = float("-inf")  # probed at the next check
        if not self.started and self._total > self._client.chunk_bytes:
            why = "lost the connection while the request was on its way"
            self._abort(InstanceGone(self._peer.instance, why, is_alive=True, was_held=False))

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
        self._acknowledge()
        if self._timer is not None:
            self._timer.cancel()
        self._client.forget(self, self._peer, self._granted)
        self._wake()


class _InstancePeer:
    """An instance as this client knows it."""

    __slots__ = ("instance", "outbox", "probed_at", "streams", "unacknowledged")

    def __init__(self, instance: InstanceId, outbox: Outbox) -> None:
        self.instance = instance
        self.outbox = outbox
        self.streams: dict[int, RequestStream] = {}
        self.unacknowledged = 0
        self.probed_at: float | None = None
        """When the first probe left that has not been answered."""


class RequestClient:
    """Opens streams. One per process; use `open_client`."""

    def __init__(self, connection: Connection, namespace: str, limits: PlaneLimits) -> None:
        self.limits = limits
        self.loop = asyncio.get_running_loop()
        self.now = self.loop.time()
        """The loop's clock, read once per message rather than once per frame."""
        self.chunk_bytes = min(limits.chunk_bytes, connection.max_payload // 2)
        self.inline_bytes = min(self.chunk_bytes, INLINE_BYTES)
        self.prefix = responses_prefix(namespace, secrets.token_hex(8))
        self._connection = connection
        self._peers: dict[InstanceId, _InstancePeer] = {}
        self._streams: dict[int, RequestStream] = {}
        self._given_up: dict[InstanceId, None] = {}
        """Instances that were taken for dead, the last `_MOST_GIVEN_UP` of them."""
        self._on_sign_of_life: list[Callable[[InstanceId], None]] = []
        self._last = 0
        self._budget = limits.budget_bytes

    @property
    def open_streams(self) -> int:
        return len(self._streams)

    @property
    def free_budget_bytes(self) -> int:
        """Credit for answers that no stream holds."""
        return self._budget

    def open(
        self,
        instance: InstanceId,
        subject: str,
        verb: str,
        body: Body,
        *,
        headers: Mapping[str, str] = _NO_HEADERS,
        deadline: float | None = None,
    ) -> RequestStream:
        """Sends a request to `instance`. Waits for nothing: without a connection the request leaves when there is one.

        `deadline` is absolute, on the event loop's clock. Raises PayloadTooLarge.
        """
        self._last += 1
        peer = self._peers.get(instance)
        if peer is None:
            peer = self._peers[instance] = _InstancePeer(
                instance, Outbox(self._connection, subject, f"{self.prefix}.{instance:x}.{{}}".format)
            )
        stream = RequestStream(self, peer, self._last, verb, body, headers, deadline)
        if stream._total > self.limits.max_body_bytes:
            raise PayloadTooLarge(f"the request has {stream._total} bytes; at most {self.limits.max_body_bytes} are allowed")
        self._streams[stream.id] = peer.streams[stream.id] = stream
        if deadline is not None:
            stream._timer = self.loop.call_at(deadline, stream.expire)
        peer.outbox.add(stream)
        return stream

    def grant(self) -> int:
        """Take the first window of a response out of the budget."""
        window = min(self.limits.window_bytes, max(self.limits.window_floor_bytes, self._budget // 4))
        self._budget -= window
        return window

    def forget(self, stream: RequestStream, peer: _InstancePeer, granted: int) -> None:
        self._budget += granted
        self._streams.pop(stream.id, None)
        peer.streams.pop(stream.id, None)

    def fail_instance(self, instance: InstanceId, gone_since: int | None = None) -> None:
        """Fail every stream of an instance, and forget it. `gone_since`: the first batch that certainly did not reach it."""
        peer = self._peers.pop(instance, None)
        self._given_up[instance] = None
        if len(self._given_up) > _MOST_GIVEN_UP:
            self._given_up.pop(next(iter(self._given_up)))
        if peer is not None:
            for stream in list(peer.streams.values()):
                was_held = stream.batch >= 0 and (gone_since is None or stream.batch < gone_since)
                stream.fail(InstanceGone(instance, "is gone", was_held=was_held))

    def _abandon_instance(self, peer: _InstancePeer) -> None:
        """As `fail_instance`, for an instance that may only hang: when it wakes, it must not do what others have done by then."""
        for stream in list(peer.streams.values()):
            stream._abort(InstanceGone(peer.instance, "does not respond any more", was_held=stream.batch >= 0))
        self.fail_instance(peer.instance)

    def on_message(self, subject: str, reply: str, payload: memoryview, no_responders: bool) -> None:
        """Handle a message of responses."""
        if no_responders:
            return self._on_no_responders(subject)
        try:
            message = frames.decode(payload)
        except InvalidRequest as error:
            log.warning("a response on %s was dropped: %s", subject, error)
            return
        self.now = now = self.loop.time()
        if self._given_up:
            self._note_sign_of_life(subject)
        streams = self._streams
        for frame in message:
            if isinstance(frame, frames.Data):
                if stream := streams.get(frame.stream):
                    stream.last_frame_at = now
                    stream.on_data(frame)
            elif isinstance(frame, frames.End):
                if stream := streams.get(frame.stream):
                    stream.on_end(frame)
            elif isinstance(frame, frames.Beat):
                for id_ in frame.streams:
                    if stream := streams.get(id_):
                        stream.last_frame_at = now
            elif isinstance(frame, frames.Known):
                self._on_known(subject, frame)
            elif stream := streams.get(frame.stream) if not isinstance(frame, frames.Probe) else None:
                stream.last_frame_at = now
                if isinstance(frame, frames.Chunk):
                    stream.on_chunk(frame)
                elif isinstance(frame, frames.Credit):
                    stream.on_credit(frame)
                elif isinstance(frame, frames.Error):
                    stream.on_error(frame)

    def on_sign_of_life(self, callback: Callable[[InstanceId], None]) -> None:
        """Call `callback`, synchronously, when an instance that was given up sends something after all."""
        self._on_sign_of_life.append(callback)

    def _note_sign_of_life(self, subject: str) -> None:
        try:
            instance = InstanceId(int(subject.rsplit(".", 1)[1], 16))
        except ValueError:  # not of an instance
            return
        if instance in self._given_up:
            del self._given_up[instance]
            for callback in self._on_sign_of_life:
                callback(instance)

    def _on_no_responders(self, subject: str) -> None:
        """The instance has no subscription: nothing in that batch ran. It may be reconnecting, as we just did."""
        instance = InstanceId(int(subject.split(".")[-2], 16))
        peer = self._peers.get(instance)
        if peer is None:
            return
        batch = int(subject.rsplit(".", 1)[1])
        for stream in [stream for stream in peer.streams.values() if stream.batch == batch]:
            stream.fail(InstanceGone(instance, "is gone", was_held=False))
        if not self._in_grace():
            self.fail_instance(instance, batch)

    def _in_grace(self) -> bool:
        return self.loop.time() - self._connection.reconnected_at < self.limits.reconnect_grace_s

    def _on_known(self, subject: str, frame: frames.Known) -> None:
        peer = self._peers.get(InstanceId(int(subject.rsplit(".", 1)[1], 16)))
        if peer is None or peer.probed_at is None:
            return
        peer.probed_at = None
        for id_ in frame.streams:
            if stream := peer.streams.get(id_):
                stream.last_frame_at = self.now
        for id_ in frame.unknown:  # its last word would have come before this one
            if stream := peer.streams.get(id_):
                stream.fail(InstanceGone(peer.instance, "does not know the request any more", is_alive=True))

    async def watch(self) -> None:
        """Probe silent streams, for ever."""
        interval = self.limits.probe_after_s / 4
        while True:
            await asyncio.sleep(interval)
            if self._connection.is_connected:
                self.now = self.loop.time()
                for peer in list(self._peers.values()):
                    self._check(peer)

    def _check(self, peer: _InstancePeer) -> None:
        if not peer.streams:
            self._peers.pop(peer.instance)
            peer.outbox.flush()
            return
        silent_before = self.now - self.limits.probe_after_s
        silent = [id_ for id_, stream in peer.streams.items() if stream.batch >= 0 and stream.last_frame_at < silent_before]
        if not silent:
            peer.probed_at = None
            return
        if peer.probed_at is None:
            peer.probed_at = self.now
        elif self.now - peer.probed_at > self.limits.gone_after_s and not self._in_grace():
            self._abandon_instance(peer)
            return
        for id_ in silent:
            peer.streams[id_].send_credit()  # the instance may be waiting for one that was lost
        peer.outbox.add(frames.encode(frames.Probe(silent)))

    def on_reconnect(self) -> None:
        """Send what waited for the connection, and probe everything that was under way when it was lost."""
        for peer in list(self._peers.values()):
            peer.probed_at = None
            for stream in list(peer.streams.values()):
                stream.on_reconnect()
            peer.outbox.flush()


@asynccontextmanager
async def open_client(connection: Connection, namespace: str, limits: PlaneLimits | None = None) -> AsyncIterator[RequestClient]:
    """Open a client. Leaving the context ends all its streams."""
    client = RequestClient(connection, namespace, limits or PlaneLimits())
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
