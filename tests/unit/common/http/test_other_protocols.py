"""A connection after a response 101, which is its request's from then on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from dynamo.common.http.connection import HttpLimits
from dynamo.common.http.served import ServedRequest
from dynamo.common.http.server import serve_app
from dynamo.common.lifecycle import open_listener
from tests.support.waiting import WAIT_S

ASKED = b"GET /echo HTTP/1.1\r\nhost: x\r\nconnection: Upgrade\r\nupgrade: shout\r\n\r\n"


@dataclass
class Shouting:
    """Returns what comes in capitals, until it is told to stop."""

    headers: dict[bytes, bytes] = field(default_factory=dict)
    left: asyncio.Event = field(default_factory=asyncio.Event)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    """Nothing is read before it is set."""
    most_bytes: int = 0
    """Most bytes that were read at once."""

    async def __call__(self, request: ServedRequest) -> None:
        self.headers = dict(request.headers)
        request.watch.on_leave = self.left.set
        request.begin(101, [(b"upgrade", b"shout"), (b"connection", b"upgrade")])
        await request.write(b"")
        await self.gate.wait()
        while (data := await request.read()) is not None and b"stop" not in data:
            self.most_bytes = max(self.most_bytes, len(data))
            if data:
                await request.write(data.upper())
        await request.write(b"bye", is_last=True)


@asynccontextmanager
async def shouting(*, is_reading: bool = True) -> AsyncIterator[tuple[Shouting, asyncio.StreamReader, asyncio.StreamWriter]]:
    app = Shouting()
    if is_reading:
        app.gate.set()
    listener = open_listener("127.0.0.1", 0, flag="--port")
    limits = HttpLimits(min_body_bytes_per_s=2**30, body_window_s=0.0, idle_timeout_s=0.0)  # which do not concern it
    async with serve_app(listener, app, limits=limits) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        yield app, reader, writer
        writer.close()


async def within(wait: Callable[[], Awaitable[bytes]]) -> bytes:
    async with asyncio.timeout(WAIT_S):
        return await wait()


async def test_bytes_go_both_ways_until_the_response_ends() -> None:
    async with shouting() as (app, reader, writer):
        writer.write(ASKED)
        head = await within(lambda: reader.readuntil(b"\r\n\r\n"))
        assert head.startswith(b"HTTP/1.1 101 Switching Protocols\r\n") and b"chunked" not in head and b"close" not in head
        assert app.headers[b"upgrade"] == b"shout" and app.headers[b"connection"] == b"Upgrade"
        for said in (b"GET / HTTP/1.1\r\n\r\n", b"\x00\xff" + b"b" * 100_000):
            writer.write(said)
            assert await within(lambda said=said: reader.readexactly(len(said))) == said.upper()
        writer.write(b"stop")
        assert await within(reader.read) == b"bye"


async def test_what_is_not_read_stays_in_the_connection() -> None:
    async with shouting(is_reading=False) as (app, reader, writer):
        writer.write(ASKED)
        await within(lambda: reader.readuntil(b"\r\n\r\n"))
        size = 32 << 20
        writer.write(b"a" * size)
        app.gate.set()
        received = 0
        while received < size:
            received += len(await within(lambda: reader.read(1 << 20)))
        assert received == size and 0 < app.most_bytes < 1 << 20


async def test_a_client_that_closes_its_side_has_left() -> None:
    async with shouting() as (app, reader, writer):
        writer.write(ASKED)
        await within(lambda: reader.readuntil(b"\r\n\r\n"))
        writer.write_eof()
        async with asyncio.timeout(WAIT_S):
            await app.left.wait()


async def test_a_client_that_does_not_wait_for_the_response_is_cut_off() -> None:
    async with shouting() as (app, _, writer):
        writer.write(ASKED + b"hello")
        async with asyncio.timeout(WAIT_S):
            await app.left.wait()
