"""One HTTP request of a connection."""

from __future__ import annotations

import asyncio
import http
import logging
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING
from urllib.parse import unquote

from dynamo.common.http.served import ClientWatch, Header
from dynamo.common.messaging.buffers import Buffer

if TYPE_CHECKING:
    from dynamo.common.http.connection import HttpConnection

_log = logging.getLogger(__name__)

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
HIGH_WATER_BYTES = 64 * 1024
"""A body of which more has come than this, and which nothing reads, stops the reading of its connection."""
_TINY_BYTES = 2048
"""Smaller parts of a body are put together as they come."""
_SKIPPED_BYTES = 64 * 1024
"""So much of a body that nothing reads is skipped for the sake of the connection; more closes it."""
_INVALID_NAME = re.compile(rb'[\x00-\x20\x7f()<>@,;:\\\[\]={}"]')
_INVALID_VALUE = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")


def _status_line(status: int) -> bytes:
    try:
        phrase = http.HTTPStatus(status).phrase
    except ValueError:
        phrase = ""
    return f"HTTP/1.1 {status} {phrase}\r\n".encode()


STATUS_LINES = {status: _status_line(status) for status in (101, *range(200, 600))}


class HttpRequest:
    """One request, as a `ServedRequest`, and what the connection has to know of it."""

    __slots__ = (
        "_chunked", "_connection", "_expects_continue", "_has_news", "_head", "_left", "_reader", "client", "complete",
        "content_length", "headers", "keep_alive", "method", "more_body", "on_half_close", "parts", "path", "pending_bytes",
        "query", "raw_path", "received_bytes", "scheme", "started", "version", "watch",
    )  # fmt: skip

    def __init__(
        self,
        connection: HttpConnection,
        method: str,
        raw_path: bytes,
        query: bytes,
        headers: Sequence[Header],
        *,
        version: str,
        keep_alive: bool,
    ) -> None:
        self.method = method
        self.scheme = connection.scheme
        path = raw_path.decode("utf-8", "replace")
        self.path = unquote(path) if "%" in path else path
        self.raw_path = raw_path
        self.query = query
        self.headers = headers
        self.client = connection.client
        self.watch = ClientWatch()
        self.more_body = True
        self.on_half_close: Callable[[], None] | None = None
        self.version = version
        self.parts: list[bytes | bytearray] = []
        """The part of the body that has come and that the application has not read, of `pending_bytes` bytes."""
        self.pending_bytes = 0
        self.received_bytes = 0
        self.content_length: int | None = None
        self.keep_alive = keep_alive
        self.started = False
        """The head of the response has been given, though perhaps not been written."""
        self.complete = False
        """The end of the response has been given, though perhaps not been written."""
        self._connection = connection
        self._has_news = False
        """A part of the body has come, or its end, and `read` has not returned it."""
        self._reader: asyncio.Future[None] | None = None
        """Set while `read` waits."""
        self._expects_continue = False
        self._head = b""
        self._chunked = False
        self._left = 0
        """Bytes of the response's body that are missing."""
        for name, value in headers:
            if name == b"content-length" and value.isdigit():
                self.content_length = int(value)
            elif name == b"transfer-encoding" and version == "1.0":
                self.keep_alive = False  # a proxy that speaks HTTP/1.0 does not know where its body ends
            elif name == b"expect" and value.lower() == b"100-continue":
                self._expects_continue = version == "1.1"

    @property
    def missing_bytes(self) -> int:
        """How much of the body has not come, if its length is known."""
        return 0 if self.content_length is None else self.content_length - self.received_bytes

    def add(self, data: bytes) -> None:
        """Keep a part of the body until the application receives it."""
        self.pending_bytes += len(data)
        if len(data) >= _TINY_BYTES or not self.more_body:
            self.parts.append(data)
        elif self.parts and isinstance(last := self.parts[-1], bytearray):
            last += data
        else:
            self.parts.append(bytearray(data))
        self._has_news = True
        if self._reader is not None:
            self._wake()

    def end_body(self) -> None:
        """All of the body has come."""
        self.more_body = False
        self._has_news = True
        if self._reader is not None:
            self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def run(self) -> None:
        """Let the application respond; respond for it if it fails to."""
        connection = self._connection
        status, body = 500, b"Internal Server Error"
        try:
            await connection.app(self)
        except asyncio.CancelledError:
            status, body = 503, b"The server stops; the request did not finish in time"
            raise
        except Exception:
            _log.exception("%s %s failed unforeseen", self.method, self.path)
        finally:
            if not self.complete and not connection.is_closing:
                if self.started and not self._head:
                    connection.abort()
                else:
                    self._head = b""
                    self.keep_alive = False
                    self._respond(status, body)

    def _respond(self, status: int, body: bytes) -> None:
        head = b"content-type: text/plain; charset=utf-8\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self._connection.write(STATUS_LINES[status] + self._connection.server.date + head + body)
        self._end()

    def disconnect(self) -> None:
        """The client is gone, or no longer worth waiting for."""
        self.watch.leave()
        self._wake()

    async def read(self) -> bytes | None:
        connection = self._connection
        if self._expects_continue and not self.started and not connection.is_closing:
            self._expects_continue = False
            connection.write(CONTINUE)
        if not (self._has_news or self.watch.has_left or self.complete):
            connection.resume_reading()
            self._reader = connection.loop.create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        self._has_news = False
        if self.watch.has_left or self.complete:
            return None
        body = bytes(self.parts[0]) if len(self.parts) == 1 else b"".join(self.parts)
        self.parts.clear()
        self.pending_bytes = 0
        if connection.is_reading_paused:  # after the body as well: that the client leaves is read, too
            connection.resume_reading()
        return body

    def begin(self, status: int, headers: Sequence[Header]) -> None:
        if self.started:
            raise RuntimeError("the response has been started already")
        self.started = True
        connection = self._connection
        lines = [STATUS_LINES[status], connection.server.date]
        length: int | None = None
        for name, value in headers:
            if _INVALID_NAME.search(name) or _INVALID_VALUE.search(value):
                raise RuntimeError(f"the header {name!r} of a response is invalid")
            if name == b"content-length":
                length = int(value)
            lines.append(b"%b: %b\r\n" % (name, value))
        no_body = self.method == "HEAD" or status in (101, 204, 304)
        if length is None and not no_body:
            if self.version == "1.0":
                self.keep_alive = False  # the end of the connection is that of the body
            else:
                self._chunked = True
                lines.append(b"transfer-encoding: chunked\r\n")
        self._left = -1 if no_body or length is None else length
        if self.more_body and (self._expects_continue or self.content_length is None or self.missing_bytes > _SKIPPED_BYTES):
            self.keep_alive = False
        if connection.is_last_response:
            self.keep_alive = False
        if status == 101:
            self.keep_alive = False
            connection.hand_over(self)
        elif not self.keep_alive:
            lines.append(b"connection: close\r\n")
        elif self.version == "1.0":
            lines.append(b"connection: keep-alive\r\n")
        lines.append(b"\r\n")
        self._head = b"".join(lines)

    async def write(self, body: Buffer, *, is_last: bool = False) -> None:
        connection, watch = self._connection, self.watch
        if connection.is_full and not watch.has_left:
            await connection.writable()
        if watch.has_left or connection.transport.is_closing():
            return
        if not self.started or self.complete:
            raise RuntimeError("the body of a response is written between its head and its end")
        if self.method == "HEAD":
            body = b""
        elif self._left >= 0:
            self._left -= len(body)
            if self._left < 0 or (is_last and self._left):
                raise RuntimeError("the response's body does not have the length that its head says")
        head, self._head = self._head, b""
        data: Buffer
        if self._chunked:
            end = b"0\r\n\r\n" if is_last else b""
            data = b"".join((head, b"%x\r\n" % len(body), body, b"\r\n", end)) if body else head + end
        elif not head:
            data = body
        elif len(body) < HIGH_WATER_BYTES:
            data = head + body
        else:  # not worth a copy
            self._connection.write(head)
            data = body
        if len(data):
            self._connection.transport.write(data)
        if is_last:
            self._end()

    def _end(self) -> None:
        self.started = self.complete = True
        self.headers, self.raw_path, self.query = (), b"", b""  # the connection keeps the request until the next one
        if self._reader is not None:
            self._wake()
        self._connection.response_complete(self)
