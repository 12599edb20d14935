"""Batches frames: all that one event-loop turn has for one peer leaves as one NATS message."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from dynamo.common.messaging.connection import Connection
from dynamo.common.messaging.frames import Buffer, message_head

_MARGIN_BYTES = 4096
"""Of the server's `max_payload`, left for what it counts besides our frames."""


class Opening(Protocol):
    """A request that is encoded only when it leaves: it may wait for a connection, and be cancelled before it gets one."""

    def encoded(self, batch: int) -> list[Buffer] | None:
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
        self._most_bytes = connection.max_payload - _MARGIN_BYTES
        self._batch = 0
        self._waiting: list[Opening | list[Buffer] | bytes] = []
        self._scheduled = False

    def add(self, frame: Opening | list[Buffer] | bytes) -> None:
        """Queues one frame: encoded, in pieces, or to be encoded when it leaves."""
        self._waiting.append(frame)
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self.flush)

    def flush(self) -> None:
        """Sends what waits. Without a connection it stays; call again when there is one."""
        self._scheduled = False
        if not self._waiting or not self._connection.is_connected:
            return
        waiting, self._waiting = self._waiting, []
        self._batch += 1
        pieces: list[Buffer] = []
        frames = size = 0
        for frame in waiting:
            encoded: list[Buffer] | bytes | None
            encoded = frame if isinstance(frame, bytes | list) else frame.encoded(self._batch)
            if encoded is None:
                continue
            length = len(encoded) if isinstance(encoded, bytes) else sum(map(len, encoded))
            if size and size + length > self._most_bytes:
                self._send(frames, pieces)
                pieces, frames, size = [], 0, 0
            if isinstance(encoded, bytes):
                pieces.append(encoded)
            else:
                pieces.extend(encoded)
            frames += 1
            size += length
        if frames:
            self._send(frames, pieces)

    def _send(self, frames: int, pieces: list[Buffer]) -> None:
        self._connection.publish_nowait(self.subject, [message_head(frames), *pieces], self._reply(self._batch))
