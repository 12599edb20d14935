"""One HTTP/1.1 connection, parsed by httptools, whose requests are served by an application one after another.

A client costs no more than `HttpLimits` permits, with a key or without: heads have a bound and a deadline, bodies a least rate,
idle connections and unread responses a timeout. The server calls `check` on each connection once a second, which is cheaper than
timers of each request.

A connection is closed as follows.

1. Responses that are the last on their connection say `Connection: close`.
2. If the request's body has not been read to its end, the connection is closed for writing only and what still comes is discarded
   for a moment: a reset would make the client lose the response.
3. A server that stops serves what is under way: connections without a request are closed last, `last_requests_s` later.
4. A client that closes its side after the request still gets the response. It is sent `100 Continue` meanwhile, which clients
   ignore, or in a stream what the application has for this (`on_half_close`); one that is gone resets the connection, which ends
   the request.
5. After a response 101 the connection is the request's (`hand_over`): `read` returns what comes, as it comes, and the end of the
   response closes it. A client that closes its side then has left.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol, cast

import httptools

from dynamo.common.http.request import CONTINUE, HIGH_WATER_BYTES, STATUS_LINES, HttpRequest
from dynamo.common.http.served import App

_STEP_BYTES = 16 * 1024
"""So much is parsed before the event loop may do something else; more if it is the body of one request."""
_LINGER_S = 2.0
"""Between two reads of what a client still sends after its response; `_MAX_LINGER_S` and `_LINGER_BYTES` in all."""
_MAX_LINGER_S = 30.0
_LINGER_BYTES = 128 * 2**20
_PROBE_S = 0.1
_MAX_HEADERS = 256
"""A header of four bytes takes a hundred in memory. Those of one step may be more until they are refused."""
_INVALID = 400, "Invalid HTTP request received."
_OUT_OF_MEMORY = 503, "The server has no memory left for the request."
_HEAD_TOO_LARGE = 431, "The head of the request is too large."
_UNKNOWN_ENCODING = 501, "The only transfer encoding that is supported is chunked."


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """What one client, and all of them together, may occupy."""

    max_connections: int = 8192
    max_head_bytes: int = 64 * 1024
    """Bytes of a request line and its headers, at most."""
    head_timeout_s: float = 10.0
    """From the connection, or the first byte of a later request, to the end of the head."""
    idle_timeout_s: float = 75.0
    """Between two requests."""
    min_body_bytes_per_s: int = 1024
    """Averaged over `body_window_s`, while the server waits for the client."""
    body_window_s: float = 10.0
    unread_timeout_s: float = 300.0
    """A client that reads nothing of a response for so long is disconnected."""
    last_requests_s: float = 0.5
    """When the server stops: for requests that are under way on connections whose clients do not know that yet."""


class HttpConnectionOwner(Protocol):
    """The server that a connection belongs to."""

    limits: HttpLimits
    draining: bool
    """Each response is the last on its connection."""
    date: bytes
    """The header `Date`, as a line."""

    def opened(self, connection: HttpConnection) -> bool:
        """Count a new connection; False if there are too many."""
        ...

    def closed(self, connection: HttpConnection) -> None: ...

    def serve(self, request: HttpRequest) -> None:
        """Run the application for a request."""
        ...


class HttpConnection(asyncio.Protocol):
    """One connection."""

    def __init__(self, server: HttpConnectionOwner, app: App, loop: asyncio.AbstractEventLoop) -> None:
        self.app = app
        self.loop = loop
        self.server = server
        self._limits = server.limits
        self._parser: Any = httptools.HttpRequestParser(self)  # None after the connection: the two hold each other
        self.transport: asyncio.Transport
        self.is_full = False
        """The client reads too slowly for more to be written: `writable` waits until it does not."""
        self._is_tls = False
        self.scheme = "http"
        self.client = "unknown"
        """Address of the client."""

        self._current: HttpRequest | None = None
        """The request that is being served."""
        self._parsing: HttpRequest | None = None
        """The last request whose head has come; its body may not have."""
        self._queue: deque[HttpRequest] = deque()
        """Requests that came before the response to the one ahead of them."""

        self._unparsed = b""
        """Received and not parsed yet; nothing more is read meanwhile."""
        self._deadline: float | None = None
        """When the head must be complete, or an idle or lingering connection is closed; on the event loop's clock."""
        self._in_head = True
        self._asks_to_upgrade = False
        """The head that was just parsed asks for another protocol."""
        self._upgrade: list[tuple[bytes, bytes]] = []
        """The headers that ask for it, while the head is parsed without them."""
        self._tunnel: HttpRequest | None = None
        """The request that has the connection to itself."""
        self._url: list[bytes] = []
        self._headers: list[tuple[bytes, bytes]] = []
        self._head_bytes = 0
        self._refusal = _INVALID
        """What a parser's error means."""
        self._received_bytes = 0
        """In this window of the body, or while lingering."""
        self._window_start = 0.0
        self._eof = False
        """The client has closed its side."""
        self._lingering = False
        self._linger_end = 0.0
        self._failed = False
        """The last bytes were no HTTP; nothing more is parsed."""
        self.is_reading_paused = False
        """Nothing is read from the client until `resume_reading`."""
        self._writable = asyncio.Event()
        self._writable.set()
        self._unread_since: float | None = None
        self._probe: asyncio.TimerHandle | None = None

    # Called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's are not derived from it
        self._is_tls = transport.get_extra_info("sslcontext") is not None
        if self._is_tls:
            self.transport.set_write_buffer_limits(high=HIGH_WATER_BYTES)
        self.scheme = "https" if self._is_tls else "http"
        self.client = _address(transport.get_extra_info("peername"))
        self._deadline = self.loop.time() + self._limits.head_timeout_s
        if not self.server.opened(self):
            self._refuse(503, "too many connections", (b"retry-after: 1\r\n",))

    def connection_lost(self, error: Exception | None) -> None:
        self.server.closed(self)
        if self._probe is not None:
            self._probe.cancel()
        for request in (self._current, *self._queue):
            if request is not None:
                request.disconnect()
        self._queue.clear()
        self._current = self._parsing = self._tunnel = None
        self.is_full = False
        self._writable.set()
        self._parser = None
        self._unparsed = b""

    def eof_received(self) -> bool:
        self._eof = True
        last = self._parsing
        if self._current is None or last is None or last.more_body or self._head_bytes or self._lingering or self._is_tls:
            return False  # closes the transport
        if self._tunnel is not None:
            return False
        last.keep_alive = False
        self._probe_client(_PROBE_S)
        return True

    def _probe_client(self, again_s: float | None) -> None:
        """Send what only a client that is still there accepts. The reset of another is noticed by the next write."""
        request = self._current
        if request is None or self.transport.is_closing():
            return
        if request.started:
            if request.on_half_close is not None:
                request.on_half_close()
        elif request.version == "1.1":
            self.transport.write(CONTINUE)
        if again_s is not None:
            self._probe = self.loop.call_later(again_s, self._probe_client, None)

    def pause_writing(self) -> None:
        self.is_full = True
        self._writable.clear()
        self._unread_since = self.loop.time()

    def resume_writing(self) -> None:
        self.is_full = False
        self._writable.set()
        self._unread_since = None

    def data_received(self, data: bytes) -> None:
        if self._tunnel is not None:
            return self._pass_on(self._tunnel, data)
        if self._lingering or self._failed:
            return self._discard(data)
        if self._unparsed:
            self._unparsed += data
        else:
            self._parse(data)

    def _pass_on(self, request: HttpRequest, data: bytes) -> None:
        if request.complete:
            return
        request.add(data)
        if request.pending_bytes > HIGH_WATER_BYTES:
            self.pause_reading()

    def _discard(self, data: bytes) -> None:
        self._received_bytes += len(data)
        if self._received_bytes > _LINGER_BYTES:
            self.transport.abort()
        elif self._lingering:
            self._deadline = min(self.loop.time() + _LINGER_S, self._linger_end)

    def _parse(self, data: bytes) -> None:
        """Parse in steps, of which the event loop takes one at a time, unless all of a step is body.

        The smallest requests and chunks have a few bytes each, so what comes in one read can be tens of thousands of them.
        """
        while data:
            missing = 0 if self._in_head or self._parsing is None else self._parsing.missing_bytes
            step = data[: max(missing, _STEP_BYTES)]
            data = data[len(step) :]
            self._parse_step(step)
            if self._failed or self._lingering or self.transport.is_closing():
                return
            if data and missing <= _STEP_BYTES:
                self.pause_reading()
                self._unparsed = data
                if not self._queue:
                    self.loop.call_soon(self._parse_rest)
                return

    def _parse_rest(self) -> None:
        if self._queue or self.transport.is_closing():
            return
        data, self._unparsed = self._unparsed, b""
        self._parse(data)
        if not self._queue and (self._parsing is None or self._parsing.pending_bytes <= HIGH_WATER_BYTES):
            self.resume_reading()

    def _parse_step(self, data: bytes) -> None:
        if self._in_head:
            if not self._head_bytes and self._parsing is not None:  # the first byte of another request
                self._deadline = self.loop.time() + self._limits.head_timeout_s
            self._head_bytes += len(data)
        rest: bytes | None = data
        while rest is not None:
            try:
                self._parser.feed_data(rest)
                break
            except httptools.HttpParserUpgrade as upgrade:
                rest = self._without_upgrade(rest[upgrade.args[0] :])
            except httptools.HttpParserError as error:
                is_full = isinstance(error.__context__, MemoryError)  # which a callback raised
                return self._fail(*(_OUT_OF_MEMORY if is_full else self._refusal))
        if self._in_head and (self._head_bytes > self._limits.max_head_bytes or len(self._headers) > _MAX_HEADERS):
            self._fail(*_HEAD_TOO_LARGE)

    def _without_upgrade(self, rest: bytes) -> bytes | None:
        """Return the head that was just parsed, without its wish for another protocol, and the rest, for a new parser.

        A server may ignore that wish (RFC 9110, 7.8), and httptools does not: for it, the request ends with its head. None after
        CONNECT: what follows is another protocol.
        """
        if not self._asks_to_upgrade:
            self._failed = True
            if self._parsing is not None:
                self._parsing.keep_alive = False
            return None
        self._asks_to_upgrade = False
        method, version = self._parser.get_method(), self._parser.get_http_version().encode()
        self._parser = httptools.HttpRequestParser(self)
        lines = [b"%s %s HTTP/%s" % (method, b"".join(self._url), version)]
        lines += [b"%s: %s" % (name, value) for name, value in self._headers if name != b"upgrade"]
        self._upgrade = [header for header in self._headers if header[0] == b"upgrade"]
        return b"\r\n".join(lines) + b"\r\n\r\n" + rest

    def _fail(self, status: int, message: str) -> None:
        """Refuse what was received last. A request that is complete is served first, then the connection is closed."""
        if self._failed:
            return
        self._failed = True
        request = self._parsing
        if request is not None and request.more_body:  # its body will never be complete
            request.disconnect()
            if request is not self._current or request.started:
                return self._close()
        elif request is not None and self._current is not None:
            request.keep_alive = False
            return
        self._refuse(status, message)

    def _refuse(self, status: int, message: str, headers: tuple[bytes, ...] = ()) -> None:
        self._failed = True
        if self.transport.is_closing():
            return
        body = message.encode()
        head = [
            STATUS_LINES[status],
            self.server.date,
            b"content-type: text/plain; charset=utf-8\r\ncontent-length: %d\r\nconnection: close\r\n" % len(body),
            *headers,
            b"\r\n",
            body,
        ]
        self.transport.write(b"".join(head))
        self._linger()

    # Called by the parser

    def on_message_begin(self) -> None:
        self._in_head = True
        self._url, self._headers = [], []

    def on_url(self, url: bytes) -> None:
        self._url.append(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:
            self._headers.append((name.lower(), value))
        else:  # a trailer: it has no meaning here, and may not be endless either
            self._head_bytes += len(name) + len(value)
            if self._head_bytes > self._limits.max_head_bytes:
                self._refuse_head(_HEAD_TOO_LARGE)

    def on_headers_complete(self) -> None:
        if self._parser.should_upgrade() and self._parser.get_method() != b"CONNECT":
            self._asks_to_upgrade = True  # `_feed` parses the head once more
            return
        self._in_head = False
        self._deadline = None
        url = b"".join(self._url)
        size, hosts, has_other_encodings = len(url), 0, False
        for name, value in self._headers:
            size += len(name) + len(value) + 4
            if name == b"host":
                hosts += 1
            elif name == b"transfer-encoding" and value.strip().lower() != b"chunked":
                has_other_encodings = True
        self._head_bytes = 0
        if size > self._limits.max_head_bytes or len(self._headers) > _MAX_HEADERS:
            self._refuse_head(_HEAD_TOO_LARGE)
        if has_other_encodings:
            self._refuse_head(_UNKNOWN_ENCODING)
        if hosts > 1:
            raise ValueError(f"{hosts} Host headers, of which proxies and servers may use different ones")
        if not hosts and self._parser.get_http_version() == "1.1":
            raise ValueError("an HTTP/1.1 request must have a Host header (RFC 9112, 3.2)")
        self._headers += self._upgrade
        self._upgrade = []
        parsed = httptools.parse_url(url)
        request = HttpRequest(
            self,
            self._parser.get_method().decode("ascii"),
            parsed.path or b"/",
            parsed.query or b"",
            self._headers,
            version=self._parser.get_http_version(),
            keep_alive=self._parser.should_keep_alive(),
        )
        self._parsing = request
        self._url, self._headers = [], []  # an idle connection keeps none
        self._received_bytes, self._window_start = 0, self.loop.time()
        if self._current is None:
            self._current = request
            self.server.serve(request)
        else:
            self._queue.append(request)
            self.pause_reading()

    def on_body(self, body: bytes) -> None:
        request = self._parsing
        assert request is not None
        self._received_bytes += len(body)
        request.received_bytes += len(body)
        if request.complete:
            return
        request.add(body)
        if request.pending_bytes > HIGH_WATER_BYTES:
            self.pause_reading()

    def _refuse_head(self, refusal: tuple[int, str]) -> NoReturn:
        """Make the parser fail, and say what that means."""
        self._refusal = refusal
        raise ValueError(refusal[1])

    def on_message_complete(self) -> None:
        if self._asks_to_upgrade:
            return
        request = self._parsing
        assert request is not None
        self._in_head = True
        self._head_bytes = 0
        request.end_body()
        if request.complete and self._current is None:
            self._idle()

    # Called by requests

    @property
    def is_closing(self) -> bool:
        """Nothing can be written any more: it is closed, or for writing, after a refusal."""
        return self._lingering or self.transport.is_closing()

    @property
    def is_last_response(self) -> bool:
        """Nothing more is served after the request at hand."""
        return self.server.draining or ((self._eof or self._failed) and not self._queue)

    def write(self, data: bytes) -> None:
        self.transport.write(data)

    def hand_over(self, request: HttpRequest) -> None:
        """Give what comes from now on to a request. A client that did not wait for the response to send more is cut off."""
        self._tunnel = request
        if self._head_bytes or self._failed or self._queue or self._unparsed:
            self.abort()

    async def writable(self) -> None:
        await self._writable.wait()

    def pause_reading(self) -> None:
        if not self.is_reading_paused and not self._eof and not self.transport.is_closing():
            self.is_reading_paused = True
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        if self.is_reading_paused and not self._unparsed and not self._eof and not self.transport.is_closing():
            self.is_reading_paused = False
            self._received_bytes, self._window_start = 0, self.loop.time()
            self.transport.resume_reading()

    def response_complete(self, request: HttpRequest) -> None:
        """Go on with the next request, or close the connection."""
        self._current = None
        if self.transport.is_closing():
            return
        if not request.keep_alive:
            return self._linger() if request.more_body else self._close()
        if self._unparsed and len(self._queue) <= 1:
            self.loop.call_soon(self._parse_rest)
        if self.is_reading_paused:
            self.resume_reading()
        if self._queue:
            self._current = following = self._queue.popleft()
            self.server.serve(following)
        elif not request.more_body:
            self._idle()

    def abort(self) -> None:
        """Close the connection so that the client notices that its response is incomplete."""
        self.transport.abort()

    # Called by the server

    def close_if_idle(self) -> None:
        if self._current is None:
            self._close()

    def check(self, now: float) -> None:
        """Apply the limits that concern time."""
        limits = self._limits
        if self._unread_since is not None and now - self._unread_since > limits.unread_timeout_s:
            self.transport.abort()
        elif self._deadline is not None and now > self._deadline:
            if self._lingering:
                self.transport.abort()
            elif self._head_bytes:
                self._fail(408, "The head of the request did not arrive in time.")
            else:
                self._close()
        elif self._parsing is not None and self._parsing.more_body and not self.is_reading_paused and not self._lingering:
            if now - self._window_start < limits.body_window_s:
                return
            if self._received_bytes < limits.min_body_bytes_per_s * (now - self._window_start):
                self._fail(408, "The body of the request did not arrive in time.")
            self._received_bytes, self._window_start = 0, now

    def _idle(self) -> None:
        """Wait for another request, of which some bytes may have come already."""
        if self.server.draining or self._eof or self._failed:
            return self._close()
        wait_s = self._limits.head_timeout_s if self._head_bytes else self._limits.idle_timeout_s
        self._deadline = self.loop.time() + wait_s

    def _close(self) -> None:
        self.transport.close()

    def _linger(self) -> None:
        """Close the connection for writing, and discard what the client still sends for a moment."""
        if self._lingering or self.transport.is_closing():
            return
        self._lingering = True
        self._unparsed = b""
        self._received_bytes = 0
        self._deadline = self.loop.time() + _LINGER_S
        self._linger_end = self.loop.time() + _MAX_LINGER_S
        if self._eof:
            return self._close()
        self.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()


def _address(name: Any) -> str:
    return str(name[0]) if isinstance(name, tuple) and len(name) >= 2 else "unknown"
