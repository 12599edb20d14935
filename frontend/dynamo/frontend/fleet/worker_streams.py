"""Streams of JetStream that workers write, made by frontends: the login that makes a stream says what else is copied into it.

So the login of workers needs no permission to make any. A worker that may make them does so as well, and one that may not waits.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Protocol

from dynamo.common.errors import Unavailable
from dynamo.common.messaging.nats.connection import Connection
from dynamo.common.process.background import running

log = logging.getLogger(__name__)

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 10.0
_CHECK_S = 60.0
"""An operator may delete a stream while NATS goes on."""


class JetStreamStore(Protocol):
    """A stream or a bucket; `messaging.jetstream.store.FileStore` and `messaging.jetstream.kv_stream.KvStream` are two."""

    async def ensure(self) -> object:
        """Make it unless it exists. Raises Unavailable."""
        ...


class WorkerStreams:
    """Makes streams, and makes them again in a NATS that lost its data."""

    def __init__(self, streams: Sequence[JetStreamStore]) -> None:
        self._streams = streams
        self._reconnected = asyncio.Event()

    def look_again(self) -> None:
        """There is a new connection, perhaps to a NATS without data."""
        self._reconnected.set()

    async def keep(self) -> None:
        """Look for the streams at once, after each reconnect and every minute, until cancelled."""
        pause_s = _FIRST_PAUSE_S
        while True:
            self._reconnected.clear()
            try:
                for stream in self._streams:
                    await stream.ensure()
            except Unavailable as error:
                if pause_s == _FIRST_PAUSE_S:
                    log.warning("what workers store in JetStream has no stream yet; retrying: %s", error)
                await self._pause(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            else:
                pause_s = _FIRST_PAUSE_S
                await self._pause(_CHECK_S)

    async def _pause(self, pause_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self._reconnected.wait()


@asynccontextmanager
async def open_worker_streams(nats: Connection, streams: Sequence[JetStreamStore]) -> AsyncIterator[None]:
    """Make `streams` while the body runs. Does not wait for that."""
    worker_streams = WorkerStreams(streams)
    nats.on_reconnect(worker_streams.look_again)
    async with running(worker_streams.keep(), "streams of workers"):
        yield
