"""Batches frames: what one event-loop turn has for one peer shares NATS messages.

A message leaves at the end of the turn, or earlier with as many urgent frames as half of the last turn had, `FRAMES` at least,
then with twice as many and so on: the peer begins with them while the turn goes on. With one message a turn, however long,
frontend and workers would wait for each other; with one for each few frames, 64 short responses would cost 32 messages. A frame
beside which nothing else is under way, such as the only request of a process, waits for nothing.

A *patient* frame, such as any but the first token of a stream, may also wait a moment: if the last message to this peer left less
than `PATIENCE_S` ago, it leaves when that time is over, together with what has come by then. So a token of an engine that takes
longer for each leaves at once, and those of a faster one share messages, which cost both sides more than tokens do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from dynamo.common.messaging.buffers import Buffer
from dynamo.common.messaging.nats.connection import Connection
from dynamo.common.messaging.request_plane.frames import message_head

FRAMES = 4
"""With more, 16 clients wait longer; with fewer, messages cost more than is gained (`benchmarks.kserve`, 2026-11-21)."""
PATIENCE_S = 0.001
_MARGIN_BYTES = 4096
"""Bytes of nats-server's `max_payload` that frames leave free, for all else that it counts."""


class Opening(Protocol):
    """A request that is encoded only when it leaves: it may wait for a connection, and be cancelled before it gets one."""

    def encoded(self, batch: int) -> list[Buffer] | bytes | None:
        """Its frame, with what is left of its deadline now; None if it need not leave any more."""
        ...


class Outbox:
    """Frames waiting for the end of the event-loop turn, or for the connection to come back.

    What can pile up here is bounded by the credits of the streams it belongs to.
    """

    def __init__(self, connection: Connection, subject: str, reply: Callable[[int], str]) -> None:
        self.subject = subject
        self._connection = connection
        self._reply = reply
        self._loop = asyncio.get_running_loop()

        self.batch = 0
        """How many times frames have left: what lies here leaves when it changes."""
        self._waiting: list[Opening | list[Buffer] | bytes] = []
        self._urgent = 0
        """How many of them count towards `_most_urgent`: all but patient ones and those that `lead` has added."""
        self._in_turn = 0
        """How many have counted in this turn."""
        self._most_urgent = FRAMES
        """With so many a message leaves before the end of the turn."""
        self._scheduled = False
        self._timer: asyncio.TimerHandle | None = None
        self.flushed_at = float("-inf")
        """When the last message left."""

    def add(self, frame: Opening | list[Buffer] | bytes, *, patient: bool = False, at_once: bool = False) -> None:
        """Queues one frame: encoded, in pieces, or to be encoded when it leaves.

        `at_once`: nothing else is under way that could share its message. A patient frame leaves no earlier than its turn ends.
        """
        self._waiting.append(frame)
        if at_once:
            return self.flush()
        if not patient:
            self._urgent += 1
            self._in_turn += 1
            if self._urgent >= self._most_urgent:
                self._most_urgent *= 2
                self.flush()
        if self._scheduled:
            return
        if patient:
            if self._timer is not None:
                return
            due = self.flushed_at + PATIENCE_S
            if due > self._loop.time():
                self._timer = self._loop.call_at(due, self.flush)
                return
        self._scheduled = True
        self._loop.call_soon(self._end_turn)

    def lead(self, frame: list[Buffer] | bytes) -> None:
        """Queues a frame that belongs to the next one, which follows now: both leave together, and count as one."""
        self._waiting.append(frame)

    def _end_turn(self) -> None:
        self._scheduled = False
        self._most_urgent = max(FRAMES, self._in_turn // 2)
        self._in_turn = 0
        self.flush()

    def flush(self) -> None:
        """Sends what waits. Without a connection it stays; call again when there is one."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._waiting or not self._connection.is_connected:
            return
        waiting, self._waiting = self._waiting, []
        self._urgent = 0
        self.batch = batch = self.batch + 1  # encoding a request may fail it, which may add and flush frames of others
        self.flushed_at = self._loop.time()
        pieces: list[Buffer] = []
        frames = size = 0
        for frame in waiting:
            encoded: list[Buffer] | bytes | None
            encoded = frame if isinstance(frame, bytes | list) else frame.encoded(batch)
            if encoded is None:
                continue
            length = len(encoded) if isinstance(encoded, bytes) else sum(map(len, encoded))
            if size and size + length > self._connection.max_payload - _MARGIN_BYTES:
                self._send(batch, frames, pieces)
                pieces, frames, size = [], 0, 0
            if isinstance(encoded, bytes):
                pieces.append(encoded)
            else:
                pieces.extend(encoded)
            frames += 1
            size += length
        if frames:
            self._send(batch, frames, pieces)

    def _send(self, batch: int, frames: int, pieces: list[Buffer]) -> None:
        self._connection.publish_nowait(self.subject, [message_head(frames), *pieces], self._reply(batch))
