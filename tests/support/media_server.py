"""A server of audio and images, as OpenAI's API has them: what it was sent decides what it sends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from dynamo.frontend.api.http.multipart import parse_form

SPOKEN = bytes(range(256)) * 1024
"""Audio that it makes of every text."""
PIECE = 32 * 1024


@dataclass
class Sent:
    """A request that it got."""

    path: str
    headers: Mapping[str, str]
    body: bytes

    @property
    def fields(self) -> dict[str, bytes]:
        """The fields of a form."""
        return {name: part.content for name, part in parse_form(self.headers["content-type"], self.body).items()}


@dataclass
class MediaServer:
    model: str = "/models/whisper-tiny"
    port: int = 0
    refusals: list[tuple[int, bytes]] = field(default_factory=list)
    """Status and body of the next responses."""
    listed: bytes = b""
    """The list of its models, in the place of one with `model`."""
    events: list[bytes] = field(default_factory=list)
    """Parts of a stream of events that each request for speech gets in the place of audio, if there are any."""
    is_slow: bool = False
    """Streams go on until the caller leaves."""
    is_cut: bool = False
    """Streams are cut after their first part."""
    requests: list[Sent] = field(default_factory=list)
    left: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a caller leaves a slow stream."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[MediaServer]:
        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with suppress(ConnectionError, asyncio.IncompleteReadError):
                await self._respond(reader, writer)
            writer.close()

        server = await asyncio.start_server(connected, "127.0.0.1", self.port)
        self.port = server.sockets[0].getsockname()[1]
        async with server:
            yield self

    async def _respond(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines if line)}
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        if head.startswith("GET /v1/models "):
            listed = self.listed or json.dumps({"data": [{"id": self.model}]}).encode()
            return await _whole(writer, 200, "application/json", listed)
        sent = Sent(head.split(" ")[1], headers, body)
        self.requests.append(sent)
        if self.refusals:
            status, refusal = self.refusals.pop(0)
            return await _whole(writer, status, "application/json", refusal)
        match sent.path:
            case "/v1/audio/transcriptions" | "/v1/audio/translations":
                await self._transcribe(sent, reader, writer)
            case "/v1/audio/speech" if self.events:
                await self._stream(reader, writer, "text/event-stream", self.events)
            case "/v1/audio/speech":
                await self._stream(reader, writer, "audio/mpeg", [SPOKEN[at : at + PIECE] for at in range(0, len(SPOKEN), PIECE)])
            case "/v1/chat/completions":
                audio = {"id": "a", "data": "AAAA", "expires_at": 0, "transcript": "Hi"}
                message = {"role": "assistant", "content": None, "audio": audio}
                chat = {"id": "c", "object": "chat.completion", "created": 0, "model": json.loads(body)["model"]}
                choices = [{"index": 0, "finish_reason": "stop", "message": message}]
                await _whole(writer, 200, "application/json", json.dumps({**chat, "choices": choices}).encode())
            case "/v1/images/generations" | "/v1/images/edits":
                await _whole(writer, 200, "application/json", b'{"created":1,"data":[{"b64_json":"AAAA"}]}')
            case "/v1/videos":
                await _whole(writer, 200, "application/json", b'{"status":"completed","data":[{"b64_json":"AAAA"}]}')
            case "/v1/videos/sync":
                await self._stream(reader, writer, "video/mp4", [SPOKEN])
            case _:
                await _whole(writer, 404, "application/json", b'{"error":{"message":"no such path"}}')

    async def _transcribe(self, sent: Sent, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        fields = sent.fields
        text = f"{len(fields['file'])} bytes"
        if fields.get("stream") == b"true":
            deltas = [{"type": "transcript.text.delta", "delta": word} for word in text.split(" ")]
            events = [*deltas, {"type": "transcript.text.done", "text": text}]
            # Cut where no event ends: what stands between must not be torn.
            stream = b"".join(b"data: " + json.dumps(event).encode() + b"\r\n\r\n" for event in events)
            return await self._stream(
                reader, writer, "text/event-stream", [stream[at : at + 70] for at in range(0, len(stream), 70)]
            )
        match fields.get("response_format", b"json"):
            case b"srt":
                await _whole(writer, 200, "text/plain", f"1\n00:00:00,000 --> 00:00:01,000\n{text}\n".encode())
            case b"verbose_json":
                verbose = {"task": "transcribe", "language": "english", "duration": 1.0, "text": text}
                await _whole(writer, 200, "application/json", json.dumps(verbose).encode())
            case _:
                await _whole(writer, 200, "application/json", json.dumps({"text": text}).encode())

    async def _stream(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kind: str, pieces: list[bytes]) -> None:
        writer.write(f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ntransfer-encoding: chunked\r\n\r\n".encode())
        for number, piece in enumerate(pieces):
            if self.is_cut and number:
                return writer.transport.abort()
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            await writer.drain()
            await asyncio.sleep(0)  # so that its reader gets it apart from the next one, mostly
            if self.is_slow:
                await reader.read()
                return self.left.set()
        writer.write(b"0\r\n\r\n")
        await writer.drain()


async def _whole(writer: asyncio.StreamWriter, status: int, kind: str, body: bytes) -> None:
    writer.write(f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
    await writer.drain()
