"""The instance's side of the request plane: takes requests, runs a handler for each, and sends the responses.

A request is handled once its whole body has arrived. What a handler sends shares messages with what others send to the
same caller in this event-loop turn, and leaves no faster than the caller grants. A caller that is gone (its subject
has no subscriber) has its requests cancelled.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from dynamo.common.errors import (
    DeadlineExceeded,
    DynamoError,
    InvalidRequest,
    Overloaded,
    PayloadTooLarge,
    ShuttingDown,
    Unsupported,
)
from dynamo.common.messaging.nats.connection import Connection
from dynamo.common.messaging.request_plane import frames
from dynamo.common.messaging.request_plane.credit import CreditQueue
from dynamo.common.messaging.request_plane.frames import batched
from dynamo.common.messaging.request_plane.incoming import CallerPeer, Handler, Incoming
from dynamo.common.messaging.request_plane.limits import PlaneLimits
from dynamo.common.messaging.request_plane.outbox import Outbox
from dynamo.common.messaging.unreadable import Unreadable
from dynamo.common.names import Endpoint, InstanceId
from dynamo.common.process.background import running
from dynamo.common.process.steps import Steps
from dynamo.common.shared_memory.layout import Reference
from dynamo.common.shared_memory.neighbour import Neighbour
from dynamo.common.shared_memory.sharing import SharedMemory

log = logging.getLogger(__name__)
_PER_FRAME = 1000
"""Streams named in one frame."""


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
        self._peers: dict[str, CallerPeer] = {}
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
            peer = self._peers[address] = CallerPeer(self._outbox(address), self.loop.time())
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

    def _share_budget(self, peer: CallerPeer) -> None:
        """Tell a caller how much of requests it may send without credit: all callers together half of the budget."""
        share = min(self.limits.unacknowledged_bytes, self.limits.budget_bytes // 2 // len(self._peers))
        if share != peer.max_unacknowledged:
            peer.max_unacknowledged = share
            peer.outbox.add(frames.encode(frames.Credit(frames.ALL_STREAMS, share)))

    def _outbox(self, address: str) -> Outbox:
        gone = f"{self._subject}.gone.{address.split('.')[-2]}"
        return Outbox(self._connection, address, lambda batch: gone)

    def _on_near(self, peer: CallerPeer, frame: frames.Near) -> None:
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

    def _on_open(self, peer: CallerPeer, frame: frames.RequestHead, body: memoryview, neighbour: Neighbour | None = None) -> None:
        if frame.stream in peer.requests:
            return
        handler = self.handlers.get(frame.verb)
        request = Incoming(self, peer, frame, body, neighbour, handler or _unknown_verb)
        peer.requests[frame.stream] = request
        if not self.open_requests:
            self._idle.clear()
        self.open_requests += 1
        self._held_bytes += frame.size
        if refusal := self._reason_to_refuse(frame):
            request.fail(refusal)
        elif frame.size == body.nbytes:
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
        if request._timer is not None or request._missing or request._granted:
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

    def _drop(self, address: str, peer: CallerPeer) -> None:
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

    def _is_silent(self, peer: CallerPeer) -> bool:
        if peer.has_spoken:
            peer.has_spoken = False
            peer.silent_s = 0.0
        elif not self._connection.is_silent:  # else the fault may lie with this process's own connection
            peer.silent_s += self.limits.beat_s
        return peer.silent_s > self.limits.caller_gone_after_s

    def _beat(self, peer: CallerPeer) -> None:
        silent: list[int] = []
        blocked: list[tuple[tuple[int, int, int], int]] = []
        for request in peer.requests.values():
            if request._missing:
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
