"""What servers of tests have in common that speak as engine servers do: HTTP, health, refusals, lost connections.

A simulated engine generates. A request whose connection ends is aborted.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from dynamo.common.errors import InvalidRequest
from dynamo.common.generation import Delta, GenerateRequest, Summary
from dynamo.worker.engine.base import Context
from dynamo.worker.engine.sim.engine import SimEngine

S = TypeVar("S", bound="EngineServer")


@dataclass
class EngineServer:
    engine: SimEngine
    folder: Path
    model: str = "served"
    context_length: int = 512
    port: int = 0
    is_ready: bool = True
    is_dead: bool = False
    """Its engine process has died: completions fail, and /health has status 503."""
    refusals: list[tuple[int, str]] = field(default_factory=list)
    """Status and message of the next responses to requests for text."""
    lost_after: int | None = None
    """Events after which connections are lost; None: never."""
    metrics: str = ""
    """The page at /metrics; empty: there is none."""
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[bytes] = field(default_factory=list)
    """The head of each request for text."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Serve on a free port at first, then always on the same. At the end all connections are lost."""
        writers: set[asyncio.StreamWriter] = set()

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writers.add(writer)
            try:
                with suppress(ConnectionError, asyncio.IncompleteReadError):
                    await self._respond(reader, writer)
            finally:
                writers.discard(writer)
                writer.close()

        server = await asyncio.start_server(connected, "127.0.0.1", self.port)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield
        finally:
            server.close()
            for writer in [*writers]:
                writer.transport.abort()
            await server.wait_closed()

    async def _respond(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next((int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), 0)
        body = await reader.readexactly(length)
        match head.split(b" ")[:2]:
            case [b"GET", b"/health"]:
                await _send(writer, 503 if self.is_dead else 200, {})
            case [b"POST", path] if path in self.paths and self.is_dead:
                await _send(writer, 500, {"error": {"message": "EngineCore encountered an issue", "code": 500}})
            case [b"GET", b"/v1/models"] if self.is_ready:
                await _send(writer, 200, self.models())
            case [b"POST", path] if path in self.paths and self.refusals:
                status, message = self.refusals.pop(0)
                await _send(writer, status, {"error": {"message": message, "type": "error", "param": None, "code": status}})
            case [b"POST", path] if path in self.paths:
                self.headers.append(head)
                self.requests.append(json.loads(body))
                generating = asyncio.create_task(self._complete(self.requests[-1], writer))
                leaving = asyncio.create_task(reader.read())
                await asyncio.wait({generating, leaving}, return_when=asyncio.FIRST_COMPLETED)
                for task in (generating, leaving):
                    task.cancel()
                await asyncio.gather(generating, leaving, return_exceptions=True)
            case [b"POST", path] if (change := self.change(path.decode(), json.loads(body))) is not None:
                await _send(writer, *change)
            case [b"GET", b"/metrics"] if self.metrics:
                await _send_body(writer, 200, b"text/plain", self.metrics.encode())
            case [b"GET", path] if self.is_ready and (page := self.page(path.decode())) is not None:
                await _send(writer, 200, page)
            case _:
                await _send(writer, 404 if self.is_ready else 503, {"detail": "Not Found"})

    async def _complete(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if (refusal := self.refusal(body)) is not None:
            await _send(writer, 400, {"error": {"message": refusal, "code": 400}})
            return
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        sent = 0
        async with aclosing(self.engine.generate(self.to_request(body), Context("served"))) as items:  # type: ignore[type-var]
            try:
                async for event in self.events(items, body):
                    if sent == self.lost_after:
                        writer.transport.abort()
                        return
                    await _send_event(writer, event)
                    sent += 1
            except InvalidRequest as error:
                await _send_event(writer, {"error": {"message": str(error), "type": "BadRequestError", "code": 400}})
        await _send_chunk(writer, b"data: [DONE]\n\n")
        await _send_chunk(writer, b"")

    # What kinds of servers differ in

    paths: ClassVar[tuple[bytes, ...]]
    """Paths of requests for text."""

    def models(self) -> dict[str, Any]:
        """Return the body of /v1/models."""
        raise NotImplementedError

    def page(self, path: str) -> dict[str, Any] | None:
        """Return the body of another page that the server has."""
        return None

    def change(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]] | None:
        """Return status and body of the response to another POST request; None if the server has no such path."""
        return None

    def refusal(self, body: dict[str, Any]) -> str | None:
        """Return why the server refuses a request."""
        return None

    def to_request(self, body: dict[str, Any]) -> GenerateRequest:
        raise NotImplementedError

    def events(self, items: AsyncIterator[Delta | Summary], body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Yield the events of the stream for what the engine generates."""
        raise NotImplementedError


async def _send(writer: asyncio.StreamWriter, status: int, body: dict[str, Any]) -> None:
    await _send_body(writer, status, b"application/json", json.dumps(body).encode())


async def _send_body(writer: asyncio.StreamWriter, status: int, kind: bytes, data: bytes) -> None:
    writer.write(b"HTTP/1.1 %d X\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n" % (status, kind, len(data)) + data)
    await writer.drain()


async def _send_event(writer: asyncio.StreamWriter, event: dict[str, Any]) -> None:
    await _send_chunk(writer, b"data: " + json.dumps(event).encode() + b"\n\n")


async def _send_chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(b"%x\r\n%b\r\n" % (len(data), data))
    await writer.drain()


@asynccontextmanager
async def serving(kind: type[S], engine: SimEngine, folder: Path, context_length: int = 512) -> AsyncIterator[S]:
    """Serve `engine`, whose tokenizer and template are written to `folder`."""
    await engine.start()
    tokenizer, template = engine.files()
    (folder / "tokenizer.json").write_bytes(tokenizer)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template.decode()}))
    server = kind(engine, folder, context_length=context_length)
    try:
        async with server.serving():
            yield server
    finally:
        await engine.close()
