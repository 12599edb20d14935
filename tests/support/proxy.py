"""A TCP proxy that misbehaves on demand: cuts, stalls, delays or throttles what passes through it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from types import TracebackType

_READ_BYTES = 65_536
HOST = "127.0.0.1"


class Proxy:
    """Forwards 127.0.0.1:`port` to another port of this machine.

    Every setting acts at once, on the open connections too, and in both directions.
    """

    def __init__(self, upstream_port: int) -> None:
        self.upstream_port = upstream_port
        self.port = 0
        self.delay_s = 0.0
        """Added to every piece of data on its way."""
        self.bytes_per_s: float | None = None
        self._refusing = False
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Proxy:
        self._server = await asyncio.start_server(self._serve, HOST, 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._server is not None:
            self._server.close()
        await self.cut()

    @property
    def open_connections(self) -> int:
        return len(self._connections)

    async def cut(self) -> None:
        """Ends all open connections with a reset. New ones are taken, unless `refuse` was called."""
        connections = list(self._connections)
        for connection in connections:
            connection.cancel()
        await asyncio.gather(*connections, return_exceptions=True)

    async def refuse(self) -> None:
        """Ends all open connections, and every new one as soon as it is made."""
        self._refusing = True
        await self.cut()

    def blackhole(self) -> None:
        """Half open: connections stay, new ones are taken, but nothing passes until `heal`; then what is stuck goes on."""
        self._flowing.clear()

    def heal(self) -> None:
        """Ends `refuse`, `blackhole`, delay and throttle."""
        self._refusing = False
        self.delay_s = 0.0
        self.bytes_per_s = None
        self._flowing.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._refusing:
            writer.transport.abort()
            return
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        up_writer: asyncio.StreamWriter | None = None
        try:
            up_reader, up_writer = await asyncio.open_connection(HOST, self.upstream_port)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._pump(reader, up_writer))
                tasks.create_task(self._pump(up_reader, writer))
        except* (OSError, asyncio.CancelledError):
            pass  # one side is gone, or `cut`: the other side learns it below
        finally:
            self._connections.discard(task)
            writer.transport.abort()
            if up_writer is not None:
                up_writer.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(_READ_BYTES):
            if self.delay_s:
                await asyncio.sleep(self.delay_s)
            if self.bytes_per_s is not None:
                await asyncio.sleep(len(data) / self.bytes_per_s)
            await self._flowing.wait()
            writer.write(data)
            await writer.drain()
        with suppress(OSError):
            writer.write_eof()


@asynccontextmanager
async def start_proxy(upstream_port: int) -> AsyncIterator[Proxy]:
    """A proxy on a free port for the body."""
    async with Proxy(upstream_port) as proxy:
        yield proxy
