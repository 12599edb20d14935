"""A client of an HTTP/2 server that sends whatever bytes a test wants, and reads frames."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

import hpack

from dynamo.frontend.api.rpc.http2 import frames
from dynamo.frontend.api.rpc.http2.frames import PREFACE, encode_frame, encode_settings

PATH = "/test.Echo/Say"


class Frame(NamedTuple):
    kind: int
    flags: int
    stream: int
    payload: bytes

    @property
    def word(self) -> int:
        """The last four bytes, which are the code of RST_STREAM and, without a text, of GOAWAY."""
        return int.from_bytes(self.payload[:4] if self.kind != frames.GOAWAY else self.payload[4:8], "big")


def fields(path: str = PATH, *more: tuple[str, str]) -> list[tuple[str, str]]:
    """The headers of a call."""
    return [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", path),
        (":authority", "x"),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
        *more,
    ]


def block(pairs: list[tuple[str, str]] | None = None) -> bytes:
    """A header block that leaves the table as it is."""
    named = pairs if pairs is not None else fields()
    return bytes(hpack.Encoder().encode([hpack.NeverIndexedHeaderTuple(*pair) for pair in named], huffman=False))


def message(content: bytes, *, flag: int = 0, size: int | None = None) -> bytes:
    return bytes((flag,)) + (len(content) if size is None else size).to_bytes(4, "big") + content


def headers(stream: int, *, flags: int = frames.END_HEADERS, pairs: list[tuple[str, str]] | None = None) -> bytes:
    return encode_frame(frames.HEADERS, flags, stream, block(pairs))


def data(stream: int, content: bytes, *, ends: bool = True) -> bytes:
    return encode_frame(frames.DATA, frames.END_STREAM if ends else 0, stream, content)


def call(stream: int, content: bytes = b"", *, pairs: list[tuple[str, str]] | None = None) -> bytes:
    return headers(stream, pairs=pairs) + data(stream, message(content))


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._decoder = hpack.Decoder()

    def send(self, *pieces: bytes) -> None:
        self._writer.write(b"".join(pieces))

    def greet(self, settings: dict[int, int] | None = None) -> None:
        self.send(PREFACE, encode_settings(settings or {}))

    async def frame(self) -> Frame | None:
        """The next frame; None at the end of the connection."""
        try:
            async with asyncio.timeout(120):
                head = await self._reader.readexactly(9)
                payload = await self._reader.readexactly(int.from_bytes(head[:3], "big"))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        return Frame(head[3], head[4], int.from_bytes(head[5:], "big"), payload)

    async def next_of(self, *kinds: int) -> Frame | None:
        """The next frame of one of these kinds, not counting acknowledgements of SETTINGS."""
        while (frame := await self.frame()) is not None:
            if frame.kind in kinds and not (frame.kind == frames.SETTINGS and frame.flags & frames.ACK):
                return frame
        return None

    async def response(self, stream: int) -> tuple[dict[str, str], bytes]:
        """All headers and the data of a response, to its end. A reset is the header `reset`, a GOAWAY `goaway`."""
        received: dict[str, str] = {}
        content = b""
        while (frame := await self.frame()) is not None:
            if frame.kind == frames.HEADERS:
                decoded = {str(name): str(value) for name, value in self._decoder.decode(frame.payload)}
                if frame.stream == stream:
                    received |= decoded
            elif frame.kind == frames.GOAWAY and frame.word:
                received["goaway"] = str(frame.word)
            if frame.stream != stream:
                continue
            if frame.kind == frames.DATA:
                content += frame.payload
            if frame.kind == frames.RST_STREAM:
                received["reset"] = str(frame.word)
                break
            if frame.kind in (frames.HEADERS, frames.DATA) and frame.flags & frames.END_STREAM:
                break
        return received, content

    async def response_with_windows(self, stream: int) -> tuple[dict[str, str], bytes]:
        """As `response`, with windows that are open wide."""
        more = (2**24).to_bytes(4, "big")
        self.send(encode_frame(frames.WINDOW_UPDATE, 0, 0, more), encode_frame(frames.WINDOW_UPDATE, 0, stream, more))
        return await self.response(stream)

    async def status(self, stream: int) -> str:
        """How a call ended: its grpc-status, `rst N`, `goaway N` or `closed`."""
        received, _ = await self.response(stream)
        if "grpc-status" in received:
            return received["grpc-status"]
        return f"rst {received['reset']}" if "reset" in received else f"goaway {received.get('goaway', '?')}"

    def close(self) -> None:
        self._writer.close()


@asynccontextmanager
async def connected(port: int, settings: dict[int, int] | None = None, *, greet: bool = True) -> AsyncIterator[Client]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    client = Client(reader, writer)
    if greet:
        client.greet(settings)
    try:
        yield client
    finally:
        client.close()
