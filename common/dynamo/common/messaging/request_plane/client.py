"""The caller's side of the request plane: opens streams to instances and follows them to their end.

A stream ends exactly once: with END, with ERROR, with its deadline, by being cancelled, or because its instance is gone. An
instance counts as gone when nats-server reports no subscriber on its subject, when it does not respond to probes, when it no
longer knows the stream, or when part of its response is lost. Nothing is retried here: `dispatcher` decides where a request goes
next.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from itertools import islice, zip_longest

from dynamo.common.errors import InstanceGone, InvalidRequest, PayloadTooLarge
from dynamo.common.messaging.buffers import Body
from dynamo.common.messaging.nats.connection import Connection
from dynamo.common.messaging.request_plane import frames
from dynamo.common.messaging.request_plane.credit import ResponseCredits
from dynamo.common.messaging.request_plane.frames import INLINE_BYTES, batched
from dynamo.common.messaging.request_plane.instance_peer import InstancePeer
from dynamo.common.messaging.request_plane.limits import PlaneLimits
from dynamo.common.messaging.request_plane.outbox import Outbox
from dynamo.common.messaging.request_plane.request_stream import RequestStream
from dynamo.common.messaging.unreadable import Unreadable
from dynamo.common.names import InstanceId, responses_prefix
from dynamo.common.process.background import running
from dynamo.common.process.work import Work
from dynamo.common.shared_memory.layout import Reference
from dynamo.common.shared_memory.sharing import SharedMemory

_NO_HEADERS: dict[str, str] = {}
_PER_FRAME = 1000
"""Streams named in one frame. No instance names more, so what a frame names beyond is not looked at."""
_WITNESSES = 3
"""So many other instances are probed before one is taken for gone."""
_WITHOUT_WITNESSES = 3
"""If none of them responds either, the time until then is so many times as long."""


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
        self._peers: dict[InstanceId, InstancePeer] = {}
        self._peers_by_subject: dict[str, InstancePeer] = {}
        self._streams: dict[int, RequestStream] = {}
        self._last = 0
        self._copies: deque[tuple[RequestStream, Work[Reference | None]]] = deque()
        """Bodies that are being copied; a turn of the event loop copies a part of one."""
        self.credits = ResponseCredits(limits)
        self.parts_bytes = 0
        """What parts of responses take in memory that are incomplete."""

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
            peer = self._peers[instance] = self._peers_by_subject[f"{self.prefix}.{instance:x}"] = InstancePeer(
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

    def hold_parts(self, size_bytes: int) -> bool:
        """Count parts of a response that is incomplete; return False, and count nothing, if all together take too much."""
        if self.parts_bytes + size_bytes > self.limits.max_buffered_bytes:
            return False
        self.parts_bytes += size_bytes
        return True

    def release_parts(self, size_bytes: int) -> None:
        """The response is complete, or dropped."""
        self.parts_bytes -= size_bytes

    def forget(self, stream: RequestStream, peer: InstancePeer) -> None:
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
                    peer.note_unknown(frame.stream)
            elif isinstance(frame, frames.Many):
                if stream := streams.get(frame.stream):
                    stream.last_frame_at = now
                    stream.on_many(frame)
                else:
                    peer.note_unknown(frame.stream)
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
                        peer.note_unknown(frame.stream)
                    continue
                stream.last_frame_at = now
                if isinstance(frame, frames.Chunk):
                    stream.on_chunk(frame)
                elif isinstance(frame, frames.Credit):
                    stream.on_credit(frame)
                else:
                    stream.on_error(frame)

    def _on_lent(self, peer: InstancePeer, frame: frames.Lent) -> None:
        """Take the region, even if the stream is over: so it returns to the instance."""
        stream = peer.streams.get(frame.stream)
        if stream is None:
            peer.note_unknown(frame.stream)
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

    def _on_beat(self, peer: InstancePeer, frame: frames.Beat) -> None:
        for id_ in islice(frame.streams, _PER_FRAME):
            if stream := peer.streams.get(id_):
                stream.last_frame_at = self.now
                stream.acknowledge()
            else:
                peer.note_unknown(id_)
        blocked = frame.blocked[:_PER_FRAME]
        for (id_, granted, seq), needed in zip_longest(blocked, frame.needed[: len(blocked)]):
            if stream := peer.streams.get(id_):
                stream.last_frame_at = self.now
                # An instance of an older version does not say how much it needs.
                stream.on_blocked(granted, seq, granted + self.limits.kept_credit_bytes if needed is None else needed)
            else:
                peer.note_unknown(id_)

    def _on_known(self, peer: InstancePeer, frame: frames.Known) -> None:
        for id_ in islice(frame.streams, _PER_FRAME):
            if stream := peer.streams.get(id_):
                stream.last_frame_at = self.now
            else:
                peer.note_unknown(id_)
        for id_ in islice(frame.unknown, _PER_FRAME):  # its last frame would have come before this one
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
    def _probe_absent(peer: InstancePeer) -> None:
        """The time is over that an instance without subscription has to come back."""
        if peer.absent_until is not None and peer.streams:
            peer.outbox.add(frames.encode(frames.Probe([])))

    def _fail_streams(self, peer: InstancePeer, why: str, unsent_since: int | None = None) -> None:
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

    def _check(self, peer: InstancePeer, interval_s: float) -> None:
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

    def _probe(self, peer: InstancePeer, silent: list[int], interval_s: float) -> None:
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

    def _is_alone(self, peer: InstancePeer) -> bool:
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

    def _forget_peer(self, peer: InstancePeer) -> None:
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
