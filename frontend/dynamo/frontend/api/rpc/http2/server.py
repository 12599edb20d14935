"""A gRPC port on the event loop: its listener, its connections, and how it stops.

server = Http2Server(options, operations, capacity)
await server.listen(listener, tls)
await server.stop(grace_s=30)
"""

from __future__ import annotations

import asyncio
import random
import socket
import ssl
from collections.abc import Iterable
from contextlib import suppress
from time import monotonic
from typing import Final

import grpc

from dynamo.common.http.accepting import Descriptors, TlsListener, close_listener, raise_open_files
from dynamo.common.http.server import ConnectionObserver
from dynamo.common.process.background import start
from dynamo.common.process.steps import Steps
from dynamo.common.process.turns import LoopTurns
from dynamo.common.shared_memory.sharing import SharedMemory
from dynamo.frontend.api.capacity import Capacity
from dynamo.frontend.api.declaration import LITTLE_BYTES, NAME_BYTES, Reads
from dynamo.frontend.api.rpc.http2.call import GrpcCall
from dynamo.frontend.api.rpc.http2.connection import Http2Connection
from dynamo.frontend.api.rpc.http2.deadlines import Deadlines, Ending
from dynamo.frontend.api.rpc.http2.messages import MessageMemory, PlainMemory
from dynamo.frontend.api.rpc.http2.method import GrpcMethod
from dynamo.frontend.api.rpc.http2.windows import CONNECTION_WINDOW_BYTES, GUARDED_WINDOW_BYTES, RESETS_PER_S, STREAM_WINDOW_BYTES
from dynamo.frontend.api.rpc.operation import GrpcOperation
from dynamo.frontend.config import GrpcOptions, OverloadStatus
from dynamo.frontend.security.keys import key_name

_CHECK_S: Final = 1.0
_BACKLOG: Final = 2048
_READ_BYTES: Final = 256 * 1024
_LAST_WRITES_S: Final = 2.0
"""For clients to take the last responses, after the last call has ended."""
_AGE_SPREAD: Final = 0.1
"""Connections that were opened together do not reach their greatest age together."""


class Http2Server:
    """A port that is being served."""

    def __init__(
        self,
        options: GrpcOptions,
        operations: Iterable[GrpcOperation],
        capacity: Capacity,
        *,
        guarded: bool = False,
        memory: SharedMemory | None = None,
        overload: OverloadStatus = OverloadStatus.UNAVAILABLE,
        observer: ConnectionObserver | None = None,
        descriptors: Descriptors | None = None,
        resets_per_s: float = RESETS_PER_S,
    ) -> None:
        """`guarded`: handlers check their caller before they read, so that messages are taken only after that.

        `memory`: where large messages are received, so that they need not be copied for workers of this host.
        `descriptors` are shared with the other servers of the process. `resets_per_s` may a connection's client make.
        """
        self.options = options
        self.resets_per_s = resets_per_s
        self.capacity = capacity
        self.overload = overload
        self.inflating = Steps(owner=key_name.get)
        self._memory = memory
        self._observer = observer
        self.methods = _methods(operations, options, guarded=guarded)
        self.connection_window_bytes = options.initial_connection_window_size or CONNECTION_WINDOW_BYTES
        window = options.initial_stream_window_size or STREAM_WINDOW_BYTES
        self.stream_window_bytes = min(window, GUARDED_WINDOW_BYTES) if guarded else window
        self.read_memory = memoryview(bytearray(max(_READ_BYTES, 2 * options.max_metadata_bytes)))
        self.port = 0
        self._loop = asyncio.get_running_loop()
        self.deadlines = Deadlines(self._loop, _expired)
        self.turns = LoopTurns(self._loop.call_soon)
        self._descriptors = descriptors or Descriptors(raise_open_files())
        self._handshakes: set[Http2Connection] = set()
        """Connections whose TLS handshakes have not ended."""
        self.connections: dict[Http2Connection, float] = {}
        """With the time at which they were opened."""
        self._empty = asyncio.Event()
        """There are no connections."""
        self._empty.set()
        self.calls: set[GrpcCall] = set()
        """Calls whose handlers run."""
        self._listener: asyncio.Server | TlsListener[Http2Connection] | None = None
        self._checks: asyncio.Task[None] | None = None
        self._is_stopping = False
        self._stopped = False
        """No connection is served any more."""

    async def listen(self, listener: socket.socket, tls: ssl.SSLContext | None) -> None:
        self.port = listener.getsockname()[1]
        if tls is not None:
            listener.listen(_BACKLOG)
            self._listener = TlsListener(listener, tls, self._accepted, self._failed)
        else:
            self._listener = await self._loop.create_server(lambda: Http2Connection(self), sock=listener, backlog=_BACKLOG)
        self._checks = start(self._check(), "checks of gRPC connections")

    async def _check(self) -> None:
        while True:
            await asyncio.sleep(_CHECK_S)
            now = monotonic()
            for connection in list(self.connections):
                connection.check(now)

    async def stop(self, grace_s: float | None) -> None:
        """Stop accepting calls, let running ones finish for `grace_s` seconds, then end them. Idempotent."""
        if self._is_stopping:
            return
        self._is_stopping = True
        if self._listener is not None:
            await close_listener(self._listener)
        for connection in list(self.connections):
            connection.start_draining()
        if grace_s:
            with suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    await self._empty.wait()
        await self._end_calls()
        with suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WRITES_S if grace_s else 0):
                await self._empty.wait()
        self._stopped = True
        for connection in list(self.connections):
            connection.abort()
        if self._checks is not None:
            self._checks.cancel()
        self.deadlines.close()

    async def _end_calls(self) -> None:
        tasks = [call.task for call in self.calls if call.task is not None]
        for call in list(self.calls):
            call.end(grpc.StatusCode.UNAVAILABLE, "the server is shutting down")
        if tasks:
            await asyncio.wait(tasks)

    # Called by the listener

    def _accepted(self) -> Http2Connection | None:
        if not self._has_room():
            return None
        connection = Http2Connection(self)
        self._handshakes.add(connection)
        return connection

    def _failed(self, connection: Http2Connection) -> None:
        if connection in self._handshakes:
            self._handshakes.remove(connection)
            self._descriptors.give_back()

    def _has_room(self) -> bool:
        return len(self.connections) + len(self._handshakes) < self.options.max_connections and self._descriptors.take()

    # Called by connections

    def allocate(self, size: int) -> MessageMemory:
        """Return memory for a message, shared with workers if there is room."""
        room = None if self._memory is None else self._memory.room(size)
        return PlainMemory(size) if room is None else room

    def max_age_s(self) -> float:
        """Return the age at which a new connection is drained: at once if the server stops meanwhile."""
        if self._is_stopping:
            return 0.0
        age_s = self.options.max_connection_age_s
        return float("inf") if age_s is None else age_s * random.uniform(1 - _AGE_SPREAD, 1 + _AGE_SPREAD)

    def opened(self, connection: Http2Connection) -> bool:
        """Count a new connection; False if there are too many, or the server has stopped, as it may during a handshake."""
        if connection in self._handshakes:
            self._handshakes.remove(connection)
        elif not self._has_room():
            return False
        self.connections[connection] = self._loop.time()
        self._empty.clear()
        if self._observer is not None:
            self._observer.opened()
        return not self._stopped

    def closed(self, connection: Http2Connection) -> None:
        opened_at = self.connections.pop(connection, None)
        if opened_at is not None:
            self._descriptors.give_back()
            if self._observer is not None:
                self._observer.closed(self._loop.time() - opened_at)
        if not self.connections:
            self._empty.set()

    def call_started(self, call: GrpcCall) -> None:
        self.calls.add(call)

    def call_done(self, call: GrpcCall) -> None:
        self.calls.discard(call)


def _expired(call: Ending) -> None:
    assert isinstance(call, GrpcCall), "only calls have deadlines here"
    call.end(grpc.StatusCode.DEADLINE_EXCEEDED, "the deadline of the call has passed")


def _methods(operations: Iterable[GrpcOperation], options: GrpcOptions, *, guarded: bool) -> dict[bytes, GrpcMethod]:
    return {
        operation.path.encode(): GrpcMethod(
            handle=operation.handle,
            reads_stream=operation.reads_stream,
            writes_stream=operation.writes_stream,
            reads_late=guarded,
            max_message_bytes=_message_limit(operation.declared.reads, options),
        )
        for operation in operations
    }


def _message_limit(reads: Reads, options: GrpcOptions) -> int:
    """Return the largest message of a method."""
    match reads:
        case Reads.NAME:
            return NAME_BYTES
        case Reads.LITTLE:
            return min(LITTLE_BYTES, options.max_message_bytes)
        case _:
            return options.max_message_bytes
