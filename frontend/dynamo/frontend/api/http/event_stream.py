"""A response as server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress

from dynamo.common.errors import DynamoError, Unavailable
from dynamo.common.http.served import Header, ServedRequest
from dynamo.common.process.background import start

_STREAM_HEADERS: tuple[Header, ...] = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
_KEEPALIVE = b": keepalive\n\n"
_LAST_WORD_S = 1.0
"""How long a client may take to read what is sent when the server cuts it off."""


class EventStream:
    """Server-sent events, written by one handler; comments are sent when it writes nothing for a while."""

    __slots__ = (
        "_check",
        "_has_events",
        "_headers",
        "_idle",
        "_interval_s",
        "_is_within",
        "_loop",
        "_request",
        "_timer",
        "_writing",
        "begun",
    )

    def __init__(
        self, request: ServedRequest, headers: Callable[[], tuple[Header, ...]], check: Callable[[], None], keepalive_s: float
    ) -> None:
        """`check` raises what keeps the first event, which no comment is, from being sent."""
        self.begun = False
        """The status has gone out."""
        self._request = request
        self._headers = headers
        self._check = check
        self._has_events = False
        self._interval_s = keepalive_s
        self._loop = asyncio.get_running_loop()
        self._idle = True
        """Nothing was written since the last look."""
        self._is_within = False
        """The pieces written so far end within an event, or nothing may follow them any more."""
        self._writing: asyncio.Task[None] | None = None
        self._timer = self._loop.call_later(keepalive_s, self._tick)

    async def write(self, events: bytes) -> None:
        """Send some whole events. Waits while the client is slow."""
        self._idle = False
        if not self._has_events:
            self._check()
            self._has_events = True
        if not self.begun:
            self._begin()
        await self._request.write(events)

    async def write_pieces(self, pieces: Sequence[bytes]) -> None:
        """Do what `write` does with events that are too large to be joined."""
        if self._writing is not None:
            await asyncio.wait((self._writing,))  # no comment may come between the pieces
        self._is_within = True
        for piece in pieces:
            await self.write(piece)
        self._is_within = False

    async def end(self, events: bytes) -> None:
        """Send the last events."""
        self._stop_keepalive()
        if not self.begun:  # else it may be an error before there were events
            self._check()
            self._begin()
        self._is_within = True
        await self._request.write(events, is_last=True)

    async def cut_off(self, event: Callable[[DynamoError, int], bytes]) -> None:
        """End as the server stops: with an `event` of that if one may follow what was sent, and the client reads that."""
        if self.begun and not self._is_within:
            with suppress(TimeoutError):
                async with asyncio.timeout(_LAST_WORD_S):
                    await self.end(event(Unavailable("the server stops; the response is not complete"), 503))

    def close(self) -> None:
        """Write nothing more, unless the stream has begun and ends with `end`."""
        self._stop_keepalive()
        self._headers, self._check = tuple, _pass  # the exchange's methods hold the exchange, which holds this stream

    def _stop_keepalive(self) -> None:
        self._timer.cancel()
        if self._writing is not None:
            self._writing.cancel()

    def _begin(self) -> None:
        self.begun = True
        self._request.begin(200, (*_STREAM_HEADERS, *self._headers()))

    def comment(self) -> None:
        """Send a comment, which clients ignore."""
        # It may wait for a slow client, as any write may; while it does, no other is needed.
        if not self._is_within and (self._writing is None or self._writing.done()):
            self._writing = start(self._write_comment(), "keep-alive comment")

    async def _write_comment(self) -> None:
        self._idle = False
        if not self.begun:
            self._begin()
        await self._request.write(_KEEPALIVE)

    def _tick(self) -> None:
        if self._idle:
            self.comment()
        self._idle = True
        self._timer = self._loop.call_later(self._interval_s, self._tick)


def _pass() -> None:
    """Check nothing."""
