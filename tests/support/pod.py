"""A plain engine pod for tests of gateways: an HTTP server that speaks as `vllm serve` does, with keep-alive and chunked bodies.

What it generates is a word for each token, so many as `max_tokens` says, `step_s` apart. It keeps what it was sent.
"""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dynamo.worker.engine.echo import CHAT_TEMPLATE, byte_tokenizer

_TEXT_PATHS = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"})


@dataclass
class Received:
    """A request as the pod got it."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> dict[str, Any]:
        value: dict[str, Any] = json.loads(self.plain)
        return value

    @property
    def plain(self) -> bytes:
        return gzip.decompress(self.body) if self.headers.get("content-encoding") == "gzip" else self.body


@dataclass
class Pod:
    name: str
    folder: Path
    model: str = "served"
    context_length: int = 400_000
    step_s: float = 0.0
    port: int = 0
    metrics: str = ""
    received: list[Received] = field(default_factory=list)
    """Requests, without those of the worker that watches the pod."""
    open_requests: int = 0
    """Requests whose response has not ended."""
    status: int = 200
    fails_every: int = 0
    """Each of so many requests gets 500; 0: none does."""
    hangs: bool = False
    """Requests that generate text get no response; those that come by the gateway get theirs."""
    _server: asyncio.Server | None = None
    _connections: set[asyncio.StreamWriter] = field(default_factory=set)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    async def start(self) -> None:
        """Serve, on the same port as before."""
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", self.port, limit=1 << 20, backlog=1024)
        self.port = self._server.sockets[0].getsockname()[1]

    async def kill(self) -> None:
        """Accept nothing any more, and lose all connections."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
            for writer in list(self._connections):
                writer.transport.abort()
            await server.wait_closed()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.add(writer)
        try:
            with suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
                while await self._respond(reader, writer):
                    pass
        finally:
            self._connections.discard(writer)
            writer.close()

    async def _respond(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, path, _ = head[0].split(" ")
        pairs = (line.partition(":") for line in head[1:] if line)
        headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        received = Received(method, path, headers, await _body(reader, headers))
        if path == "/health":
            await _send(writer, 200, {})
        elif path == "/metrics":
            await _send_raw(writer, 200 if self.metrics else 404, "text/plain", self.metrics.encode())
        elif path == "/v1/models" and "x-dynamo-placement" not in headers:
            await _send(writer, 200, self._models())
        elif path in _TEXT_PATHS and "x-dynamo-placement" not in headers:
            if self.hangs:
                await reader.read()  # until the client leaves
            await self._generate(writer, json.loads(received.body))
        else:
            self.received.append(received)
            self.open_requests += 1
            try:
                await self._serve(received, reader, writer)
            finally:
                self.open_requests -= 1
        return headers.get("connection", "").lower() != "close"

    async def _serve(self, received: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            body = received.json
        except ValueError:
            return await _send(writer, 400 if received.method == "POST" else 200, {"pod": self.name})
        is_failure = self.fails_every and len(self.received) % self.fails_every == 0
        if self.status != 200 or is_failure:
            return await _send(writer, 500 if is_failure else self.status, {"error": {"message": f"{self.name} fails"}})
        if body.get("stream"):
            return await self._generate(writer, body)
        await asyncio.sleep(self.step_s * body.get("max_tokens", 1))
        await _send(writer, 200, {"pod": self.name, "text": " ".join(["word"] * body.get("max_tokens", 1))})

    async def _generate(self, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        count = body.get("max_tokens") or 1
        for number in range(count):
            choice: dict[str, Any] = {"index": 0, "text": "w", "finish_reason": None if number + 1 < count else "length"}
            if body.get("return_token_ids"):
                choice["token_ids"] = [119]
            await _chunk(writer, {"pod": self.name, "choices": [choice]})
            if self.step_s:
                await asyncio.sleep(self.step_s)
        await _chunk(writer, {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": count}})
        data = b"data: [DONE]\n\n"
        writer.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data))
        await writer.drain()

    def _models(self) -> dict[str, Any]:
        return {
            "object": "list",
            "data": [{"id": self.model, "owned_by": "vllm", "root": str(self.folder), "max_model_len": self.context_length}],
        }


async def _body(reader: asyncio.StreamReader, headers: dict[str, str]) -> bytes:
    if "chunked" not in headers.get("transfer-encoding", ""):
        return await reader.readexactly(int(headers.get("content-length", "0")))
    parts = []
    while size := int(await reader.readline(), 16):
        parts.append(await reader.readexactly(size))
        await reader.readline()
    await reader.readline()
    return b"".join(parts)


async def _send(writer: asyncio.StreamWriter, status: int, body: dict[str, Any]) -> None:
    await _send_raw(writer, status, "application/json", json.dumps(body).encode())


async def _send_raw(writer: asyncio.StreamWriter, status: int, kind: str, data: bytes) -> None:
    head = f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\ncontent-length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    await writer.drain()


async def _chunk(writer: asyncio.StreamWriter, event: dict[str, Any]) -> None:
    data = b"data: " + json.dumps(event).encode() + b"\n\n"
    writer.write(b"%x\r\n%b\r\n" % (len(data), data))
    await writer.drain()


@asynccontextmanager
async def serve_pod(name: str, folder: Path, **settings: Any) -> AsyncIterator[Pod]:
    """Serve a pod while the body runs. Its tokenizer, a token for each byte, is written to `folder`."""
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_bytes(byte_tokenizer())
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT_TEMPLATE}))
    pod = Pod(name, folder, **settings)
    await pod.start()
    try:
        yield pod
    finally:
        await pod.kill()
