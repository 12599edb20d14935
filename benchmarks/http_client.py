"""A lean HTTP/1.1 client for streams and whole responses, so that a benchmark measures servers and not its client."""

from __future__ import annotations

import asyncio
import re
import socket
import time
from dataclasses import dataclass
from typing import cast

_LENGTH = re.compile(rb"\ncontent-length: *(\d+)")
_EVENT = b"data: {"
_TAIL_BYTES = 1000


@dataclass(slots=True)
class Response:
    """What became of one request."""

    sent_at: float
    done: asyncio.Future[None]
    status: int = 0
    events: int = 0
    pieces: int = 0
    """Times that something of it was read."""
    first_at: float = 0.0
    ended_at: float = 0.0
    error: str = ""
    tail: bytes = b""
    """The last bytes of the body, with the usage."""


class HttpConnection(asyncio.Protocol):
    """One kept-alive connection; one request at a time."""

    def __init__(self, tokens: int, acknowledge_at_once: bool = False) -> None:
        self.broken = ""
        self._acknowledge_at_once = acknowledge_at_once
        self._expected = b'"completion_tokens":%d' % tokens
        self._transport: asyncio.Transport
        self._response: Response | None = None
        self._head = b""
        self._tail = b""
        self._left: int | None = None
        """Bytes that the body still has; None: it is chunked."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance

    def connection_lost(self, error: Exception | None) -> None:
        self.broken = str(error or "closed by the server")
        self._end(self.broken)

    def close(self) -> None:
        self._transport.close()

    def send(self, request: bytes) -> Response:
        """Send a whole request; `Response.done` is set at the end of its response."""
        response = self._response = Response(time.perf_counter(), asyncio.get_running_loop().create_future())
        self._head = self._tail = b""
        self._transport.write(request)
        return response

    def data_received(self, data: bytes) -> None:
        if self._acknowledge_at_once:  # the kernel forgets it by itself
            self._transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
        response = self._response
        if response is None:
            return
        response.pieces += 1
        if not response.status:
            self._head += data
            head, separator, data = self._head.partition(b"\r\n\r\n")
            if not separator:
                return
            response.status = int(head[9:12])
            length = _LENGTH.search(head.lower())
            self._left = int(length[1]) if length else None
        if events := data.count(_EVENT):
            response.first_at = response.first_at or time.perf_counter()
            response.events += events
        self._tail = (self._tail + data)[-_TAIL_BYTES:]
        if self._left is not None:
            self._left -= len(data)
        if self._left == 0 or (self._left is None and self._tail.endswith(b"\r\n0\r\n\r\n")):
            is_over = self._left == 0 or b"[DONE]" in self._tail
            whole = response.status == 200 and is_over and self._expected in self._tail
            self._end("" if whole else f"{response.status} {self._tail[-160:].decode(errors='replace')}")

    def _end(self, error: str) -> None:
        response, self._response = self._response, None
        if response is not None:
            response.ended_at, response.error, response.tail = time.perf_counter(), error, self._tail
            response.done.set_result(None)


async def connect(port: int, tokens: int, *, acknowledge_at_once: bool = False) -> HttpConnection:
    """A connection on which every response must have so many tokens, in a stream or as a whole.

    `acknowledge_at_once` keeps a server from waiting that sets no TCP_NODELAY.
    """
    loop = asyncio.get_running_loop()
    _, connection = await loop.create_connection(lambda: HttpConnection(tokens, acknowledge_at_once), "127.0.0.1", port)
    return connection
