"""Messages of others that cannot be read: one log line for many, and a count."""

from __future__ import annotations

import asyncio
import logging
from typing import TypeVar

import msgspec

from dynamo.common.messaging.buffers import Buffer

T = TypeVar("T")

log = logging.getLogger(__name__)

_QUIET_S = 10.0


class Unreadable:
    """Counts messages of one kind that cannot be read. Logs the first, and then at most one in ten seconds with the count."""

    def __init__(self, kind: str) -> None:
        self.count = 0
        self._kind = kind
        self._loop = asyncio.get_running_loop()
        self._next_line_at = float("-inf")

    def read(self, decoder: msgspec.msgpack.Decoder[T], subject: str, payload: Buffer) -> T | None:
        """Return what a message says; None, and one more is counted, if it cannot be read."""
        try:
            return decoder.decode(payload)
        except (ValueError, RecursionError) as error:
            self.drop(subject, error)
            return None

    def drop(self, subject: str, reason: Exception | str) -> None:
        """Count a message that is ignored."""
        self.count += 1
        now = self._loop.time()
        if now >= self._next_line_at:
            self._next_line_at = now + _QUIET_S
            text = str(reason) or type(reason).__name__
            log.warning("%s on %.100s was dropped, the %d. so far: %.200s", self._kind, subject, self.count, text)
