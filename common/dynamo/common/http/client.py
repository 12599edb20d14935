"""A client of one HTTP/1.1 server. A request has a connection to itself: closing it is how the request is cancelled.

Connections whose response was read to its end are kept for a while, and used again.
"""

from __future__ import annotations

import asyncio
import re
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

import httptools

from dynamo.common.errors import EngineError, InvalidRequest, Unavailable

MAX_BODY_BYTES = 16 << 20
"""Longest body that is read whole, and longest event of a stream."""
_MAX_HEAD_BYTES = 64 << 10
_READ_BYTES = 64 << 10
_SECRETS = re.compile(r"//.*@|[?#].*", re.DOTALL)
_CONNECT_S = 5.0
_FINISH_S = 0.5
_MAX_IDLE = 64
"""Connections that are kept; others are closed after their response."""
_IDLE_S = 4.0
"""Most servers close idle connections after 5 s or later."""


@dataclass(slots=True)
class _ClientConnection:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    idle_since: float = 0.0

    def abort(self) -> None:
        self.writer.transport.abort()


class _ConnectionLost(Unavailable):
    """The connection could not be opened, or ended early."""


class HttpClient:
    """Sends requests to the server at one URL."""

    def __init__(
        self,
        url: str,
        *,
        key: str | None = None,
        timeout_s: float,
        address: str | None = None,
        tls: Callable[[], ssl.SSLContext] | None = None,
    ) -> None:
        """`key` is sent as bearer token; `timeout_s` bounds the time between two reads of a response.

        Connections go to `address`, by default to that of the URL's host. With `https`, each new one uses what `tls` returns, by
        default a context that trusts the authorities of the system. Raises InvalidRequest for a URL that is none.
        """
        self._url = parse_url(url)
        is_https = self._url.scheme == "https"
        self._tls = ssl.create_default_context() if is_https and tls is None else None
        self._tls_source = tls if is_https else None
        self._key = key
        self._timeout_s = timeout_s
        self._address = address
        self._idle: list[_ClientConnection] = []
        """In order of their last use."""
        self._is_closed = False

    def __str__(self) -> str:
        return f"{self._url.scheme}://{self._url.netloc}{self._url.path}"

    @asynccontextmanager
    async def send(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[HttpResponse]:
        """Send a request and give its response when the head is there. Leaving the body early closes the connection.

        Raises Unavailable if the server cannot be reached or closes the connection early, EngineError if it does not speak HTTP.
        """
        data = self._head(method, path, len(body), headers or {}) + body
        connection, response = await self._exchange(data)
        try:
            yield response
        finally:
            if response.leaves_connection and len(self._idle) < _MAX_IDLE and not self._is_closed:
                connection.idle_since = time.monotonic()
                self._idle.append(connection)
            else:
                connection.abort()

    async def _exchange(self, data: bytes) -> tuple[_ClientConnection, HttpResponse]:
        """Send a request; return its response when the head is there, and the connection."""
        while True:
            kept = self._take_idle()
            connection = kept or await self._connect()
            response = HttpResponse(self, connection.reader)
            try:
                connection.writer.write(data)
                await response.read_head()
            except _ConnectionLost:
                connection.abort()
                if kept is None or response.has_begun:
                    raise
                # The server had closed it before the request arrived. One that is silent is not sent the request again.
            except BaseException:
                connection.abort()
                raise
            else:
                return connection, response

    def _take_idle(self) -> _ClientConnection | None:
        """Return a connection that the server has not closed. Those that were idle for too long are closed."""
        oldest = time.monotonic() - _IDLE_S
        while self._idle and self._idle[0].idle_since < oldest:
            self._idle.pop(0).abort()
        while self._idle:
            connection = self._idle.pop()
            if not connection.reader.at_eof() and not connection.writer.is_closing():
                return connection
            connection.abort()
        return None

    async def _connect(self) -> _ClientConnection:
        port = self._url.port or (443 if self._url.scheme == "https" else 80)
        with self._mapped():
            async with asyncio.timeout(_CONNECT_S):
                host = self._url.hostname
                tls = self._current_tls()
                opened = asyncio.open_connection(self._address or host, port, ssl=tls, server_hostname=host if tls else None)
                return _ClientConnection(*await opened)

    def close(self) -> None:
        """Close the connections that are kept, and from now on each at the end of its response."""
        self._is_closed = True
        for connection in self._idle:
            connection.abort()
        self._idle.clear()

    async def fetch(self, method: str, path: str, body: bytes = b"", *, max_bytes: int = MAX_BODY_BYTES) -> tuple[int, bytes]:
        """Return status and body of a whole response. Raises as `send`, and EngineError for one of more than `max_bytes`."""
        async with self.send(method, path, body) as response:
            return response.status, await response.read(max_bytes)

    def websocket(self, path: str) -> tuple[str, dict[str, str], ssl.SSLContext | None]:
        """Return the URL, the headers and the TLS context with which a WebSocket to the server is opened."""
        scheme = "wss" if self._url.scheme == "https" else "ws"
        return f"{scheme}://{self._url.netloc}{self._url.path}{path}", self._credentials(), self._current_tls()

    def _current_tls(self) -> ssl.SSLContext | None:
        return self._tls if self._tls_source is None else self._tls_source()

    def _credentials(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self._key}"} if self._key else {}

    async def read(self, reader: asyncio.StreamReader) -> bytes:
        """Return what comes next. Raises Unavailable at the end of the connection, and after `timeout_s`."""
        with self._mapped():
            async with asyncio.timeout(self._timeout_s):
                data = await reader.read(_READ_BYTES)
        if not data:
            raise _ConnectionLost(f"the server at {self} closed the connection before the end of its response")
        return data

    def _head(self, method: str, path: str, length: int, headers: Mapping[str, str]) -> bytes:
        fields = {
            "host": self._url.netloc,
            "accept": "*/*",
            "connection": "keep-alive",
            "content-type": "application/json",
            "content-length": str(length),
            **headers,
            **self._credentials(),
        }
        for name, value in fields.items():
            if "\r" in value or "\n" in value:
                raise InvalidRequest(f"the header '{name}' has a line break")
        lines = [f"{method} {self._url.path}{path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items()), "", ""]
        return "\r\n".join(lines).encode("latin-1", errors="replace")

    @contextmanager
    def _mapped(self) -> Iterator[None]:
        try:
            yield
        except TimeoutError as error:
            raise Unavailable(f"the server at {self} did not respond in time") from error
        except OSError as error:
            raise _ConnectionLost(f"the server at {self} cannot be reached: {error}") from error


class HttpResponse:
    """A response that is being received."""

    def __init__(self, client: HttpClient, reader: asyncio.StreamReader) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        """With names in lower case."""
        self._client = client
        self._reader = reader
        self._parser = httptools.HttpResponseParser(self)
        self._has_head = self._is_complete = False
        self._keeps_alive = False
        self.has_begun = False
        """Whether a part of it has arrived."""
        self._head_bytes = 0
        """Received since the last part of the body: of the head, and of trailers."""
        self._body: list[bytes] = []
        self._line = bytearray()
        """The beginning of a line of events."""

    @property
    def leaves_connection(self) -> bool:
        """Whether it was read to its end, and the connection may be used again."""
        return self._is_complete and not self._body and self._keeps_alive

    # What the parser calls

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._has_head:  # trailers have no meaning here
            self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        self._has_head = self.status >= 200  # others announce a response

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        self._is_complete = self._has_head
        self._keeps_alive = self._parser.should_keep_alive()

    async def read_head(self) -> None:
        while not self._has_head:
            await self._receive()

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """Yield the body as it arrives, all that came together in one piece. Raises Unavailable if the connection ends before it.

        How a server frames its body does not matter: chunks of one byte would be ten thousand pieces in each read.
        """
        while True:
            received, self._body = self._body, []
            if received:
                yield received[0] if len(received) == 1 else b"".join(received)
            if self._is_complete:
                return
            await self._receive()

    async def read(self, max_bytes: int = MAX_BODY_BYTES) -> bytes:
        """Return the whole body. Raises EngineError if it is longer than `max_bytes`."""
        body = bytearray()
        async with aclosing(self.chunks()) as chunks:
            async for part in chunks:
                body += part
                if len(body) > max_bytes:
                    raise EngineError(f"the server at {self._client} sent a body of more than {max_bytes} bytes")
        return bytes(body)

    async def finish(self) -> None:
        """Read what is left, so that the connection can be used again. Does nothing if that takes long: the body is complete."""
        with suppress(TimeoutError, Unavailable, EngineError):
            async with asyncio.timeout(_FINISH_S), aclosing(self.chunks()) as chunks:
                async for _ in chunks:
                    pass

    async def events(self) -> list[bytes]:
        """Return the data of all server-sent events since the last call, at least one; [] at the end.

        Raises Unavailable if the connection ends before, and EngineError for an event of more than MAX_BODY_BYTES.
        """
        while True:
            received, self._body = self._body, []
            if events := self._events_in(b"".join(received)):
                return events
            if self._is_complete:
                return []
            await self._receive()

    def _events_in(self, received: bytes) -> list[bytes]:
        first, *others = received.split(b"\n")
        self._line += first
        lines: list[bytes] = []
        if others:
            lines = [bytes(self._line), *others[:-1]]
            self._line = bytearray(others[-1])
        if len(self._line) > MAX_BODY_BYTES:
            raise EngineError(f"the server at {self._client} sent an event of more than {MAX_BODY_BYTES} bytes")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]

    async def _receive(self) -> None:
        data = await self._client.read(self._reader)
        self.has_begun = True
        parts = len(self._body)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            raise EngineError(f"the server at {self._client} does not speak HTTP/1.1: {error}") from error
        self._head_bytes = 0 if len(self._body) > parts else self._head_bytes + len(data)
        if self._head_bytes > _MAX_HEAD_BYTES and not (self._has_head and self._is_complete):
            what = "trailers" if self._has_head else "a head"
            raise EngineError(f"the server at {self._client} sent {what} of more than {_MAX_HEAD_BYTES} bytes")


def parse_url(url: str) -> SplitResult:
    """Return the parts of a server's URL, without the `/v1` of its path. Raises InvalidRequest, with no secret in its message."""
    try:
        parts = urlsplit(url.rstrip("/"))
        host = parts.hostname or ""
        is_valid = parts.scheme in ("http", "https") and bool(host) and parts.port != 0 and " " not in url and url.isprintable()
        host.encode("idna")  # which resolving it would fail to do
    except ValueError:  # of the port, or the host
        is_valid = False
    if not is_valid or parts.username is not None or parts.query or parts.fragment:
        raise InvalidRequest(f"--url must be http://HOST:PORT or https://HOST:PORT, got {without_secrets(url)!r}")
    return parts._replace(path=parts.path.removesuffix("/v1"))


def without_secrets(url: str) -> str:
    """Return a URL, perhaps a wrong one, without what may be a password or key in it."""
    return _SECRETS.sub(lambda found: "//…@" if found[0].startswith("//") else "?…", url)
