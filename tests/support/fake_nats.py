"""A nats-server that greets, answers pings and does what a test tells it: freeze, report an error, cut."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class FakeClient:
    """One connection, as the server sees it."""

    writer: asyncio.StreamWriter
    connect: dict[str, Any] = field(default_factory=dict)
    """What it logged in with."""
    lines: list[bytes] = field(default_factory=list)
    """Every other line that it sent, payloads included."""

    def send(self, line: bytes) -> None:
        self.writer.write(line + b"\r\n")

    def cut(self) -> None:
        self.writer.transport.abort()


class FakeNats:
    def __init__(self, **info: Any) -> None:
        self.info = {"server_id": "x", "version": "2.10.0", "proto": 1, "headers": True, "max_payload": 1 << 20, **info}
        self.clients: list[FakeClient] = []
        self.port = 0
        self._changed = asyncio.Event()

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    def freeze(self) -> None:
        """Read nothing more from those that are connected now, and send them nothing."""
        for client in self.clients:
            client.writer.transport.pause_reading()  # type: ignore[attr-defined]

    def thaw(self) -> None:
        """End `freeze`."""
        for client in self.clients:
            client.writer.transport.resume_reading()  # type: ignore[attr-defined]

    async def connections(self, count: int) -> None:
        """Return when so many connections have been made and logged in."""
        while sum(bool(client.connect) for client in self.clients) < count:
            self._changed.clear()
            await self._changed.wait()

    async def received(self, text: bytes, client: int = -1) -> None:
        """Return when a line with `text` came from a client."""
        while not any(text in line for line in self.clients[client].lines):
            self._changed.clear()
            await self._changed.wait()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        client = FakeClient(writer)
        self.clients.append(client)
        client.send(b"INFO " + json.dumps(self.info).encode())
        try:
            while line := await reader.readline():
                if line.startswith(b"CONNECT "):
                    client.connect = json.loads(line[8:])
                elif line == b"PING\r\n":
                    client.send(b"PONG")
                else:
                    client.lines.append(line.strip())
                self._changed.set()
        except (ConnectionError, ValueError):  # cut; or a line longer than the reader takes
            pass
        finally:
            writer.close()


@asynccontextmanager
async def start_fake_nats(**info: Any) -> AsyncIterator[FakeNats]:
    """`info` is what the server says of itself beyond what is usual."""
    fake = FakeNats(**info)
    server = await asyncio.start_server(fake.serve, "127.0.0.1", 0)
    fake.port = server.sockets[0].getsockname()[1]
    try:
        yield fake
    finally:
        server.close()
        for client in fake.clients:
            client.cut()
