"""Connections between processes and the simulated nats-server, as TCP has them: in order, until they are cut.

Each direction of a connection has a latency drawn from the seed. A *held* process (a blackholed link) sends and receives nothing,
and its bytes arrive when it is released, as TCP would send them again. A *narrow* one has a bounded bandwidth.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextvars import copy_context
from random import Random
from typing import Any, Protocol, cast

from tests.simulation.clock import Process, SimulatedLoop, current_process

_WRITE_HIGH_BYTES = 64 * 1024


class Acceptor(Protocol):
    """A server in the network."""

    def accepts(self) -> bool:
        """Return whether a connection can be made now."""
        ...

    def connected(self, end: ServerEnd) -> None:
        """A client has connected."""
        ...


class Pipe:
    """One direction of a connection: bytes arrive in order, each after the latency that holds when it is sent."""

    def __init__(
        self, network: Network, process: Process | None, deliver: Callable[[bytes], None], end: Callable[[], None]
    ) -> None:
        self._network = network
        self._process = process
        self._deliver = deliver
        self._end = end
        self._arrival = 0.0
        self._waiting: deque[bytes | None] = deque()
        """Sent and not delivered; None is the end."""
        self._due = 0
        """How many of those that wait may be delivered as soon as the link lets them."""
        self.is_cut = False
        self.bytes = 0
        self.reads_per_s: float | None = None
        """Bytes that the receiver takes; None: as many as come."""

    def send(self, data: bytes | None) -> None:
        """Put bytes, or the end of all, on the way."""
        if self.is_cut:
            return
        loop, network = self._network.loop, self._network
        self.bytes += len(data or b"")
        delay = network.latency(len(data or b""), self._process)
        self._arrival = max(self._arrival, loop.time() + delay)
        if self.reads_per_s is not None:
            self._arrival += len(data or b"") / self.reads_per_s
        self._waiting.append(data)
        loop.call_at(self._arrival, self._arrived, context=network.context)

    def cut(self) -> None:
        """Lose what is on the way."""
        self.is_cut = True
        self._waiting.clear()
        self._due = self.bytes = 0

    def flush(self) -> None:
        """Deliver what has arrived and was held."""
        while self._due and not self.is_cut and not self._network.is_held(self._process):
            self._due -= 1
            data = self._waiting.popleft()
            if data is None:
                self._end()
            else:
                self.bytes -= len(data)
                self._deliver(data)

    def _arrived(self) -> None:
        if not self.is_cut:
            self._due += 1
            self.flush()


class ServerEnd:
    """A connection as the server sees it. `on_data` and `on_end` are the server's to set, in `Acceptor.connected`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.on_data: Callable[[bytes], None] = lambda data: None
        self.on_end: Callable[[], None] = lambda: None

    @property
    def process(self) -> Process:
        return self._connection.process

    @property
    def unread_bytes(self) -> int:
        """Bytes sent to the client and not taken by it yet."""
        return self._connection.down.bytes

    def write(self, data: bytes) -> None:
        self._connection.down.send(data)

    def throttle(self, reads_per_s: float | None) -> None:
        """Let the client take so many bytes from now on, as one that is busy; None: no bound."""
        self._connection.down.reads_per_s = reads_per_s

    def close(self) -> None:
        """Close in order: what was written before arrives."""
        self._connection.down.send(None)


class Connection:
    """A connection between a client's protocol and a server."""

    def __init__(self, network: Network, process: Process, protocol: asyncio.BaseProtocol) -> None:
        self.network = network
        self.process = process
        self.protocol = protocol
        self.is_open = True
        self.server = ServerEnd(self)
        self.up = Pipe(network, process, lambda data: self.server.on_data(data), lambda: self._server_end())
        self.down = Pipe(network, process, self._received, lambda: self._client_end(None))
        self.transport = ClientTransport(self)

    def in_process(self, callback: Callable[..., object], *args: object) -> None:
        """Call the client's protocol, in its process."""
        self.network.loop.call_soon(callback, *args, context=self.process.context)

    def reset(self) -> None:
        """Cut the connection: both sides notice at once, what is on the way is lost."""
        if self.is_open:
            self._server_end()
            self._client_end(ConnectionResetError("reset by the simulation"))

    def abort(self) -> None:
        """The client gives up: the server learns of it when its link lets that through."""
        if self.network.keeps_half_open and self.is_open and self.network.is_held(self.process):
            self.down.cut()
            self.in_process(self.transport.lost, ConnectionResetError("aborted"))
            self.drop_client()
        else:
            self.reset()

    def drop_client(self) -> None:
        """The client's process is dead: the server notices a little later."""
        self.up.send(None)

    def _server_end(self) -> None:
        if self.is_open:
            self.is_open = False
            self.server.on_end()
            self.up.cut()
            self.network.connections.pop(self, None)
            if not self.down.is_cut:
                self._client_end(None)

    def _client_end(self, error: Exception | None) -> None:
        if not self.down.is_cut:
            self.down.cut()
            self.in_process(self.transport.lost, error)
            if self.is_open:
                self.is_open = False
                self.server.on_end()
                self.up.cut()
                self.network.connections.pop(self, None)

    def _received(self, data: bytes) -> None:
        self.in_process(self.transport.received, data)


class ClientTransport(asyncio.Transport):
    """A connection as the client sees it."""

    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self._connection = connection
        self._protocol = connection.protocol
        self._is_closing = False
        self._is_lost = False
        self._high = _WRITE_HIGH_BYTES
        self._is_paused = False

    def write(self, data: Any) -> None:
        if not self._is_closing and not self._is_lost:
            self._connection.up.send(bytes(data))
            if self._connection.up.bytes > self._high and not self._is_paused:
                self._is_paused = True
                cast(asyncio.Protocol, self._protocol).pause_writing()
                self._watch()

    def writelines(self, list_of_data: Any) -> None:
        self.write(b"".join(list_of_data))

    def _watch(self) -> None:
        """Resume writing when the network has taken enough."""
        if not self._is_lost and self._connection.up.bytes > self._high // 4:
            self._connection.network.loop.call_later(0.005, self._watch, context=self._connection.process.context)
        elif self._is_paused:
            self._is_paused = False
            cast(asyncio.Protocol, self._protocol).resume_writing()

    def received(self, data: bytes) -> None:
        """Hand bytes to the protocol."""
        if self._is_lost:
            return
        if isinstance(self._protocol, asyncio.BufferedProtocol):
            view = memoryview(data)
            while view.nbytes:
                room = memoryview(self._protocol.get_buffer(-1))
                size = min(room.nbytes, view.nbytes)
                room[:size] = view[:size]
                self._protocol.buffer_updated(size)
                view = view[size:]
        else:
            cast(asyncio.Protocol, self._protocol).data_received(data)

    def lost(self, error: Exception | None) -> None:
        """Tell the protocol that the connection is gone."""
        if not self._is_lost:
            self._is_closing = self._is_lost = True
            if error is None:
                cast(asyncio.Protocol, self._protocol).eof_received()
            self._protocol.connection_lost(error)

    def close(self) -> None:
        """As sockets do: what was written leaves first; while the link is held, that takes as long as it does."""
        if not self._is_closing:
            self._is_closing = True
            self._connection.up.send(None)

    def abort(self) -> None:
        if not self._is_lost:
            self._is_closing = True
            self._connection.abort()

    def is_closing(self) -> bool:
        return self._is_closing

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = high or _WRITE_HIGH_BYTES

    def get_write_buffer_size(self) -> int:
        return self._connection.up.bytes

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._protocol

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol


class Network:
    """All connections of a history, and what is wrong with them."""

    def __init__(self, loop: SimulatedLoop, rng: Random) -> None:
        self.loop = loop
        self.connections: dict[Connection, None] = {}
        self.servers: dict[tuple[str, int], Acceptor] = {}
        self.context = copy_context()
        self.slow_s = 0.0
        """Added to every latency at the most."""
        self.keeps_half_open = False
        """Whether a server does not notice that a client gave up while the client's link is held."""
        self._rng = rng
        self._held: set[Process] = set()
        self._narrow: dict[Process, float] = {}
        loop.connect = self.open

    def latency(self, size: int, process: Process | None) -> float:
        """Return how long bytes are on the way that are sent now."""
        rate = self._narrow.get(process) if process is not None else None
        return 0.0002 + self._rng.random() * (0.0005 + self.slow_s) + (size / rate if rate else 0.0)

    def is_held(self, process: Process | None) -> bool:
        return process in self._held

    def hold(self, process: Process) -> None:
        """Let nothing through to and from `process`."""
        self._held.add(process)

    def release(self, process: Process) -> None:
        self._held.discard(process)
        for connection in [each for each in self.connections if each.process is process]:
            connection.up.flush()
            connection.down.flush()

    def narrow(self, process: Process, bytes_per_s: float | None) -> None:
        """Bound the bandwidth of `process`; None: no bound."""
        if bytes_per_s is None:
            self._narrow.pop(process, None)
        else:
            self._narrow[process] = bytes_per_s

    def reset(self, process: Process) -> None:
        """Cut every connection of `process`."""
        for connection in [each for each in self.connections if each.process is process]:
            connection.reset()

    def process_died(self, process: Process) -> None:
        for connection in [each for each in self.connections if each.process is process]:
            connection.drop_client()

    async def open(self, host: str, port: int, factory: Callable[[], asyncio.BaseProtocol]) -> tuple[ClientTransport, Any]:
        """Connect the current process, as `loop.create_connection` does."""
        process = current_process()
        assert process is not None
        await asyncio.sleep(self.latency(0, process))
        server = self.servers.get((host, port))
        while self.is_held(process):  # a SYN that is lost is sent again
            await asyncio.sleep(0.2)
        if server is None or not server.accepts():
            raise ConnectionRefusedError(f"{host}:{port} refuses connections")
        connection = Connection(self, process, factory())
        self.connections[connection] = None
        connection.protocol.connection_made(connection.transport)
        self.loop.call_soon(server.connected, connection.server, context=self.context)
        return connection.transport, connection.protocol
