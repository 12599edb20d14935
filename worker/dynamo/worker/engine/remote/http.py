"""A client of one HTTP/1.1 server. Each request has a connection of its own: closing it is how a request is cancelled."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager
from urllib.parse import SplitResult, urlsplit

import httptools

from dynamo.common.errors import EngineError, InvalidRequest, Unavailable

MAX_BODY_BYTES = 16 << 20
"""Longest body that is read whole, and longest event of a stream."""
_MAX_HEAD_BYTES = 64 << 10
_READ_BYTES = 64 << 10
_CONNECT_S = 5.0


class HttpClient:
    """Sends requests to the server at one URL."""

    def __init__(self, url: str, *, key: str | None = None, timeout_s: float) -> None:
        """`key` is sent as bearer token; `timeout_s` bounds the time between two reads of a response.

        Raises InvalidRequest for a URL that is none.
        """
        self._url = _parse(url)
        self._tls = ssl.create_default_context() if self._url.scheme == "https" else None
        self._key = key
        self._timeout_s = timeout_s

    def __str__(self) -> str:
        return f"{self._url.scheme}://{self._url.netloc}{self._url.path}"

    @asynccontextmanager
    async def send(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[HttpResponse]:
        """Send a request and give its response when the head is there. Leaving the body closes the connection.

        Raises Unavailable if the server cannot be reached or closes the connection early, EngineError if it does not speak HTTP.
        """
        with self._mapped():
            async with asyncio.timeout(_CONNECT_S):
                reader, writer = await asyncio.open_connection(
                    self._url.hostname, self._url.port or (443 if self._tls else 80), ssl=self._tls
                )
        try:
            writer.write(self._head(method, path, len(body), headers or {}) + body)
            response = HttpResponse(self, reader)
            await response.read_head()
            yield response
        finally:
            writer.transport.abort()

    async def fetch(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        """Return status and body of a whole response. Raises as `send`."""
        async with self.send(method, path, body) as response:
            return response.status, await response.read()

    async def read(self, reader: asyncio.StreamReader) -> bytes:
        """Return what comes next. Raises Unavailable at the end of the connection, and after `timeout_s`."""
        with self._mapped():
            async with asyncio.timeout(self._timeout_s):
                data = await reader.read(_READ_BYTES)
        if not data:
            raise Unavailable(f"the server at {self} closed the connection before the end of its response")
        return data

    def _head(self, method: str, path: str, length: int, headers: Mapping[str, str]) -> bytes:
        fields = {
            "host": self._url.netloc,
            "accept": "*/*",
            "connection": "close",
            "content-type": "application/json",
            "content-length": str(length),
            **headers,
        }
        if self._key:
            fields["authorization"] = f"Bearer {self._key}"
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
            raise Unavailable(f"the server at {self} cannot be reached: {error}") from error


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
        self._body: list[bytes] = []

    # What the parser calls

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        self._has_head = self.status >= 200  # others announce a response

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        self._is_complete = self._has_head

    async def read_head(self) -> None:
        received = 0
        while not self._has_head:
            received += await self._receive()
            if received > _MAX_HEAD_BYTES and not self._has_head:
                raise EngineError(f"the server at {self._client} sent a head of more than {_MAX_HEAD_BYTES} bytes")

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """Yield the body as it arrives. Raises Unavailable if the connection ends before it."""
        while True:
            received, self._body = self._body, []
            for part in received:
                yield part
            if self._is_complete:
                return
            await self._receive()

    async def read(self) -> bytes:
        """Return the whole body. Raises EngineError if it is longer than MAX_BODY_BYTES."""
        body = bytearray()
        async with aclosing(self.chunks()) as chunks:
            async for part in chunks:
                body += part
                if len(body) > MAX_BODY_BYTES:
                    raise EngineError(f"the server at {self._client} sent a body of more than {MAX_BODY_BYTES} bytes")
        return bytes(body)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the data of each server-sent event. Raises EngineError for an event of more than MAX_BODY_BYTES."""
        pending = bytearray()
        async with aclosing(self.chunks()) as chunks:
            async for part in chunks:
                first, *others = part.split(b"\n")
                pending += first
                for part_of_next in others:
                    if pending.startswith(b"data:"):
                        yield bytes(pending[5:].strip())
                    pending = bytearray(part_of_next)
                if len(pending) > MAX_BODY_BYTES:
                    raise EngineError(f"the server at {self._client} sent an event of more than {MAX_BODY_BYTES} bytes")

    async def _receive(self) -> int:
        data = await self._client.read(self._reader)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            raise EngineError(f"the server at {self._client} does not speak HTTP/1.1: {error}") from error
        return len(data)


def _parse(url: str) -> SplitResult:
    try:
        parts = urlsplit(url.rstrip("/"))
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # of the port
        is_valid = False
    if not is_valid or parts.username is not None or parts.query or parts.fragment:
        raise InvalidRequest(f"--url must be http://HOST:PORT or https://HOST:PORT, got {url!r}")
    return parts._replace(path=parts.path.removesuffix("/v1"))
