"""The HTTP server, its bounds and its end, over real sockets with clients that misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import trustme
import uvloop

from dynamo.common.http.accepting import TlsListener
from dynamo.common.http.connection import HttpConnection, HttpLimits
from dynamo.common.http.request import HIGH_WATER_BYTES, HttpRequest
from dynamo.common.http.served import ServedRequest
from dynamo.common.http.server import HttpServer, serve_app
from dynamo.common.lifecycle import open_listener
from tests.support.memory import instances_of, kept_bytes
from tests.support.waiting import WAIT_S, expiring, until

MIB = 2**20


LOOP_FACTORIES = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
"""The servers run on uvloop, most tests on asyncio's own loop; their transports differ at the end of connections."""


@dataclass
class Echo:
    """Responds with the method, the path and the length of the body; notes what it got."""

    paths: list[str] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    """Requests to `/gate` wait for it."""

    async def __call__(self, request: ServedRequest) -> None:
        self.paths.append(request.path)
        match request.path:
            case "/refuse":
                await respond(request, b"refused", 401)
            case "/wait":
                self.note("waiting")
                while await request.read() is not None:
                    pass
                self.note("disconnected")
            case "/watch":
                await size_of_body(request)
                left = asyncio.Event()
                request.watch.on_leave = left.set
                self.note("watching")
                await left.wait()
                self.note("left")
            case "/gate":
                self.note(f"at the gate {self.paths.count('/gate')}")
                await self.gate.wait()
                await respond(request, b"through")
            case "/slow":
                await request.read()
                self.note("waiting")
                await asyncio.sleep(0.4)
                await respond(request, b"slow")
            case "/flood":
                request.begin(200, [])
                for _ in range(64):
                    await request.write(bytes(MIB))
                await request.write(b"", is_last=True)
            case "/stream":
                request.begin(200, [])
                for piece in (b"one ", b"two ", b"three"):
                    await request.write(piece)
                await request.write(b"", is_last=True)
            case "/broken":
                raise RuntimeError("secret")
            case "/breaks":
                request.begin(200, [])
                await request.write(b"begun")
                raise RuntimeError("secret")
            case "/silent":
                pass
            case _:
                size = await size_of_body(request)
                if size is None:
                    return self.note("disconnected")
                await respond(request, f"{request.method} {request.path} {size}".encode())

    def note(self, event: str) -> None:
        self.events.append(event)
        self.changed.set()

    async def until(self, event: str) -> None:
        async with asyncio.timeout(120):
            while event not in self.events:
                self.changed.clear()
                await self.changed.wait()


async def size_of_body(request: ServedRequest) -> int | None:
    """Return None if the client has left."""
    size = 0
    while (part := await request.read()) is not None:
        size += len(part)
        if not request.more_body:
            return size
    return None


async def respond(request: ServedRequest, body: bytes, status: int = 200) -> None:
    request.begin(status, [(b"content-type", b"text/plain"), (b"content-length", b"%d" % len(body))])
    await request.write(body, is_last=True)


class Client:
    """A socket, and what came from it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    def half_close(self) -> None:
        self._writer.write_eof()

    def close(self) -> None:
        self._writer.close()

    async def response(self) -> tuple[int, dict[str, str], bytes]:
        """The next response, interim ones skipped."""
        async with asyncio.timeout(120):
            head = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            status = int(head.split()[1])
            if status == 100:
                return await self.response()
            headers = {name.lower(): value for name, value in re.findall(r"^([^:\r]+): (.*?)\r$", head, re.MULTILINE)}
            if headers.get("transfer-encoding") == "chunked":
                return status, headers, await self._chunks()
            return status, headers, await self._reader.readexactly(int(headers.get("content-length", "0")))

    async def _chunks(self) -> bytes:
        body = b""
        while size := int(await self._reader.readuntil(b"\r\n"), 16):
            body += (await self._reader.readexactly(size + 2))[:-2]
        await self._reader.readexactly(2)
        return body

    async def rest(self, within_s: float = 120) -> bytes:
        """Everything until the server closes the connection."""
        received = b""
        async with asyncio.timeout(within_s):
            with contextlib.suppress(ConnectionError):
                while data := await self._reader.read(65536):
                    received += data
        return received

    async def ends(self, within_s: float = 120) -> bool:
        with contextlib.suppress(TimeoutError):
            await self.rest(within_s)
            return True
        return False


@dataclass
class Side:
    server: HttpServer
    app: Echo

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Client]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.server.port, limit=MIB)
        try:
            yield Client(reader, writer)
        finally:
            writer.close()

    async def flood(self, first: bytes, piece: bytes, most: int) -> tuple[int, bytes]:
        """Send `piece` up to `most` times; return how many bytes were taken, and the response."""
        async with self.client() as client:
            sent = 0
            response = asyncio.ensure_future(client.rest())
            with contextlib.suppress(ConnectionError):
                async with asyncio.timeout(WAIT_S):
                    await client.send(first)
                    for _ in range(most):
                        await client.send(piece)
                        sent += len(piece)
            return sent, await response


@asynccontextmanager
async def serving(**limits: Any) -> AsyncIterator[Side]:
    app = Echo()
    listener = open_listener("127.0.0.1", 0, flag="--port")
    async with serve_app(listener, app, limits=HttpLimits(**limits)) as server:
        yield Side(server, app)


def get(path: str = "/", *headers: str, version: str = "1.1") -> bytes:
    return "\r\n".join([f"GET {path} HTTP/{version}", "host: x", *headers, "", ""]).encode()


def post(path: str, length: int, *headers: str) -> bytes:
    return "\r\n".join([f"POST {path} HTTP/1.1", "host: x", f"content-length: {length}", *headers, "", ""]).encode()


async def test_a_response_over_tls_that_is_not_read_keeps_as_little_as_without_tls() -> None:
    """An event loop would have half a MiB of it encrypted and kept for each connection."""
    authority = trustme.CA()
    ours, theirs = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    authority.issue_cert("127.0.0.1").configure_cert(ours)
    authority.configure_trust(theirs)
    app = Echo()
    connection = HttpConnection(HttpServer(app, HttpLimits()), app, asyncio.get_running_loop())
    listener = open_listener("127.0.0.1", 0, flag="--port")
    listener.listen()
    port = listener.getsockname()[1]
    accepting = TlsListener(listener, ours, lambda: connection, lambda failed: None)
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=theirs)
        writer.write(get("/gate"))
        await app.until("at the gate 1")
        assert connection.transport.get_write_buffer_limits()[1] == HIGH_WATER_BYTES
        app.gate.set()
        writer.close()
    finally:
        accepting.close()
        await connection.server.stop(0.0)


# HTTP


async def test_a_connection_serves_one_request_after_another() -> None:
    async with serving() as side, side.client() as client:
        for number in range(3):
            await client.send(post(f"/{number}", 5) + b"hello")
            status, headers, body = await client.response()
            assert (status, body) == (200, f"POST /{number} 5".encode())
            assert "date" in headers and "connection" not in headers


async def test_pipelined_requests_get_their_responses_in_order() -> None:
    async with serving() as side, side.client() as client:
        await client.send(
            get("/slow") + b"".join(post(f"/{n}", 2) + b"ab" for n in range(20)) + get("/last", "connection: close")
        )
        assert (await client.response())[2] == b"slow"
        for number in range(20):
            assert (await client.response())[2] == f"POST /{number} 2".encode()
        _, headers, body = await client.response()
        assert (body, headers["connection"]) == (b"GET /last 0", "close")
        assert await client.rest() == b""


@pytest.mark.parametrize(
    ("request_", "connection"),
    [
        (get(version="1.0"), "close"),
        (get("/", "connection: keep-alive", version="1.0"), "keep-alive"),
        (get("/", "connection: close"), "close"),
    ],
)
async def test_the_response_says_whether_the_connection_stays(request_: bytes, connection: str) -> None:
    async with serving() as side, side.client() as client:
        await client.send(request_)
        status, headers, body = await client.response()
        assert (status, headers["connection"], body) == (200, connection, b"GET / 0")
        if connection == "close":
            assert await client.rest() == b""


UPGRADE = ("connection: Upgrade, HTTP2-Settings", "upgrade: h2c", "http2-settings: AAMAAABkAAQAAP__")
"""What `curl --http2` and Java's HttpClient send with every request on a port without TLS."""


@pytest.mark.parametrize("size", [1, 7, 10_000])
async def test_a_request_that_asks_for_another_protocol_is_served_with_its_body(size: int) -> None:
    chunked = b"\r\n".join(
        [b"POST /2 HTTP/1.1", b"host: x", *(line.encode() for line in UPGRADE), b"transfer-encoding: chunked", b"", b""]
    )
    requests = [
        post("/1", 5, *UPGRADE) + b"hello",
        chunked + b"3\r\nabc\r\n0\r\n\r\n",
        get("/3", "connection: Upgrade", "upgrade: websocket"),
        get("/4"),
    ]
    async with serving() as side, side.client() as client:
        data = b"".join(requests)
        for begin in range(0, len(data), size):
            await client.send(data[begin : begin + size])
        bodies = [(await client.response())[2] for _ in requests]
        assert bodies == [b"POST /1 5", b"POST /2 3", b"GET /3 0", b"GET /4 0"]


async def test_a_head_that_asks_for_another_protocol_is_bounded_like_any_other() -> None:
    async with serving() as side, side.client() as client:
        await client.send(post("/", 3, *UPGRADE, *(f"x-{n}: {'a' * 1000}" for n in range(66))) + b"abc")
        assert (await client.response())[0] == 431


async def test_a_body_in_an_encoding_other_than_chunked_is_not_implemented() -> None:
    async with serving() as side, side.client() as client:
        await client.send(b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n")
        assert (await client.response())[0] == 501


async def test_streams_are_chunked_and_go_to_the_end_of_the_connection_in_http_1_0() -> None:
    async with serving() as side:
        async with side.client() as client:
            await client.send(get("/stream"))
            assert (await client.response())[2] == b"one two three"
        async with side.client() as client:
            await client.send(get("/stream", version="1.0"))
            assert (await client.rest()).endswith(b"\r\n\r\none two three")


async def test_a_body_for_which_there_is_no_memory_is_no_mistake_of_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    def add(request: HttpRequest, data: bytes) -> None:
        raise MemoryError

    monkeypatch.setattr(HttpRequest, "add", add)
    async with serving() as side, side.client() as client:
        await client.send(post("/", 100) + bytes(50))
        status, _, body = await client.response()
        assert (status, body) == (503, b"The server has no memory left for the request.")


async def test_a_response_to_head_has_no_body() -> None:
    async with serving() as side, side.client() as client:
        await client.send(b"HEAD /x HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        head, _, body = (await client.rest()).partition(b"\r\n\r\n")
        assert b"content-length: 9" in head and body == b""


async def test_a_client_that_expects_it_is_told_to_continue_once_the_body_is_read() -> None:
    async with serving() as side:
        async with side.client() as client:
            await client.send(post("/", 3, "expect: 100-continue"))
            status, _, _ = await asyncio.wait_for(_interim(client), 120)
            assert status == 100
            await client.send(b"abc")
            assert (await client.response())[2] == b"POST / 3"
        async with side.client() as client:
            await client.send(post("/refuse", 3, "expect: 100-continue"))
            status, headers, _ = await client.response()
            assert (status, headers["connection"]) == (401, "close")


async def _interim(client: Client) -> tuple[int, dict[str, str], bytes]:
    head = await client._reader.readuntil(b"\r\n\r\n")
    return int(head.split()[1]), {}, b""


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
        b"GET\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\ncontent-length: x\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nxyz\r\n",
        b"CONNECT x HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\nhost: y\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\nhost: x\n\n",
        b"GET / HTTP/1.1\r\nhost: x\r\na: b\r\n c\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\na: b\0c\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\ncontent-length: 40\r\n\r\n{}",
        b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: +2\r\n\r\n{}",
        b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\ncontent-length: 3\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding : chunked\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked, identity\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: \x0bchunked\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
)
async def test_what_is_no_http_is_refused_and_the_connection_closed(garbage: bytes) -> None:
    async with serving() as side, side.client() as client:
        await client.send(garbage)
        assert (await client.rest()).startswith(b"HTTP/1.1 400 ")


async def test_a_body_that_turns_out_to_be_no_http_gets_one_response(caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as side, side.client() as client:
        await client.send(b"POST /body HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n5\r\nabcde\r\n")
        await until(lambda: side.app.paths == ["/body"])
        await client.send(b"no length\r\n")
        rest = await client.rest()
        assert (rest[:13], rest.count(b"HTTP/1.1 ")) == (b"HTTP/1.1 400 ", 1)
        await side.app.until("disconnected")
    assert "failed" not in caplog.text


async def test_a_chunked_request_of_http_1_0_is_the_last_on_its_connection() -> None:
    async with serving() as side, side.client() as client:
        head = b"GET /slow HTTP/1.0\r\nconnection: keep-alive\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"
        await client.send(head + get("/slow"))
        status, headers, body = await client.response()
        assert (status, headers["connection"], body) == (200, "close", b"slow")
        assert await client.ends()


async def test_garbage_after_a_request_does_not_take_its_response() -> None:
    async with serving() as side, side.client() as client:
        await client.send(get("/slow") + b"\x00garbage\r\n\r\n")
        assert (await client.response())[2] == b"slow"
        assert await client.ends()


async def test_an_application_that_fails_is_a_500_or_a_broken_response(caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as side:
        for path in ("/broken", "/silent"):
            async with side.client() as client:
                await client.send(get(path))
                status, headers, body = await client.response()
                assert (status, headers["connection"], body) == (500, "close", b"Internal Server Error")
        async with side.client() as client:
            await client.send(get("/breaks"))
            text = await client.rest()
            assert b"0\r\n\r\n" not in text and b"secret" not in text
    assert [r.getMessage() for r in caplog.records if r.exc_info] == [
        "GET /broken failed unforeseen",
        "GET /breaks failed unforeseen",
    ]


# Bounds


@pytest.mark.parametrize(
    ("first", "piece"),
    [
        (b"GET /", b"a" * 65536),
        (b"GET / HTTP/1.1\r\nx-a: ", b"a" * 65536),
        (b"GET / HTTP/1.1\r\nhost: x\r\n", b"x-a: b\r\n" * 8192),
        (b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n0\r\n", b"x-a: b\r\n" * 8192),
    ],
    ids=["URL", "header", "headers", "trailers"],
)
async def test_a_head_without_an_end_is_cut(first: bytes, piece: bytes) -> None:
    async with serving() as side:
        sent, response = await side.flood(first, piece, 4096)
        assert sent < 200 * MIB  # what lies in the buffers of both sides, and what is discarded for a moment
        assert response.startswith(b"HTTP/1.1 431 ")
        assert side.app.events in ([], ["disconnected"])


async def test_a_head_may_be_as_large_as_the_bound() -> None:
    async with serving(max_head_bytes=4096) as side:
        for padding, status in ((3900, 200), (4200, 431)):
            async with side.client() as client:
                await client.send(get("/", "x-a: " + "a" * padding))
                assert (await client.response())[0] == status


async def test_a_head_may_have_so_many_headers() -> None:
    async with serving() as side:
        for count, status in ((250, 200), (300, 431)):
            async with side.client() as client:
                await client.send(get("/", *["a:"] * count))
                assert (await client.response())[0] == status


async def test_an_idle_connection_keeps_nothing_of_its_last_request() -> None:
    requests: list[ServedRequest] = []

    async def app(request: ServedRequest) -> None:
        requests.append(request)
        await respond(request, b"")

    listener = open_listener("127.0.0.1", 0, flag="--port")
    async with serve_app(listener, app) as server:
        side = Side(server, Echo())
        async with side.client() as client:
            await client.send(get("/a?" + "q" * 20_000, *(f"x-{number}: " + "v" * 200 for number in range(200))))
            assert (await client.response())[0] == 200
            [request] = requests
            assert isinstance(request, HttpRequest)
            assert kept_bytes(request.headers) + len(request.query) + len(request.raw_path) < 1000


@pytest.mark.parametrize("before", [b"", get("/")], ids=["first request", "later request"])
async def test_a_head_that_does_not_come_in_time_is_cut(before: bytes) -> None:
    async with serving(head_timeout_s=0.3) as side, side.client() as client:
        if before:
            await client.send(before)
            await client.response()
        await client.send(b"GET / HTTP/1.1\r\nx-a: ")
        while not await client.ends(expiring(0.05)):
            with contextlib.suppress(ConnectionError):
                await client.send(b"a")
    async with serving(head_timeout_s=0.2) as side, side.client() as client:
        await client.send(b"GET / HT")
        assert (await client.rest()).startswith(b"HTTP/1.1 408 ")


async def test_a_connection_on_which_nothing_comes_is_closed() -> None:
    async with serving(head_timeout_s=0.2, idle_timeout_s=0.3) as side:
        async with side.client() as client:
            assert await client.rest() == b""
        async with side.client() as client:
            await client.send(get("/"))
            await client.response()
            assert await client.rest() == b""


async def test_a_body_that_trickles_is_cut_and_one_that_is_merely_slow_is_not() -> None:
    async with serving(head_timeout_s=1, min_body_bytes_per_s=100, body_window_s=0.4) as side:
        async with side.client() as client:
            await client.send(post("/", 1000))
            text = b""
            while not text:
                with contextlib.suppress(TimeoutError, ConnectionError):
                    text = await client.rest(expiring(0.1))
                    break
                with contextlib.suppress(ConnectionError):
                    await client.send(b"a")
            await side.app.until("disconnected")
        async with side.client() as client:
            await client.send(post("/", 2000))
            for _ in range(10):
                await client.send(b"a" * 200)
                await asyncio.sleep(expiring(0.1))
            assert (await client.response())[2] == b"POST / 2000"


async def test_an_unread_body_is_not_received_without_an_end() -> None:
    async with serving() as side:
        first = b"POST /refuse HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
        sent, response = await side.flood(first, b"10000\r\n" + bytes(65536) + b"\r\n", 4096)
        assert sent < 200 * MIB
        assert response.startswith(b"HTTP/1.1 401 ")


async def test_a_client_that_still_sends_gets_the_response_that_refuses_its_body() -> None:
    async with serving() as side, side.client() as client:
        await client.send(post("/refuse", 8 * MIB))
        sending = asyncio.ensure_future(client.send(bytes(8 * MIB)))
        status, headers, body = await client.response()
        assert (status, headers["connection"], body) == (401, "close", b"refused")
        await sending
        assert await client.ends()


async def test_a_client_that_sends_all_before_it_reads_gets_the_response_too() -> None:
    async with serving() as side, side.client() as client:
        await client.send(post("/refuse", 60 * MIB))
        for _ in range(60):
            await client.send(bytes(MIB))
        assert (await client.response())[0] == 401


async def test_a_small_unread_body_does_not_cost_the_connection() -> None:
    async with serving() as side, side.client() as client:
        for _ in range(2):
            await client.send(post("/refuse", 4))
            assert "connection" not in (await client.response())[1]
            await client.send(b"abcd")


async def test_a_client_that_does_not_read_is_disconnected() -> None:
    async with serving(unread_timeout_s=0.3, head_timeout_s=1) as side:
        with socket.create_connection(("127.0.0.1", side.server.port)) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.sendall(get("/flood"))
            async with asyncio.timeout(120):
                while not side.app.paths or side.server.open_connections:
                    await asyncio.sleep(0.05)


async def test_connections_beyond_the_bound_are_told_to_come_back() -> None:
    async with serving(max_connections=2) as side:
        async with side.client() as one, side.client() as other:
            for client in (one, other):
                await client.send(get("/"))
                assert (await client.response())[0] == 200
            async with side.client() as third:
                status, headers, _ = await third.response()
                assert (status, headers["retry-after"], headers["connection"]) == (503, "1", "close")
                assert await third.ends()
        async with asyncio.timeout(120):
            while side.server.open_connections:
                await asyncio.sleep(0.01)
        async with side.client() as client:
            await client.send(get("/"))
            assert (await client.response())[0] == 200


async def test_a_flood_of_tiny_requests_is_parsed_as_it_is_served() -> None:
    async with serving() as side:
        with socket.create_connection(("127.0.0.1", side.server.port)) as connection:
            connection.setblocking(False)
            loop, flood = asyncio.get_running_loop(), get("/") * 2000
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(expiring(2)):  # until the server reads no more, since the client does not
                    for _ in range(500):
                        await loop.sock_sendall(connection, flood)
            assert len(instances_of(HttpRequest)) < 2000
            async with side.client() as client:
                await client.send(get("/"))
                assert (await client.response())[0] == 200


async def test_a_pipeline_of_many_requests_is_served_to_its_end() -> None:
    async with serving() as side, side.client() as client:
        posts = b"".join(post(f"/{number}", 100) + bytes(100) for number in range(3000))
        sending = asyncio.ensure_future(client.send(posts + post("/big", MIB) + bytes(MIB) + get("/last", "connection: close")))
        for number in range(3000):
            assert (await client.response())[2] == f"POST /{number} 100".encode()
        assert (await client.response())[2] == f"POST /big {MIB}".encode()
        assert (await client.response())[2] == b"GET /last 0"
        assert await client.ends()
        await sending


async def test_a_body_in_tiny_chunks_is_put_together() -> None:
    async with serving() as side, side.client() as client:
        await client.send(b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
        await client.send(b"1\r\n \r\n" * 100_000 + b"1000\r\n" + bytes(4096) + b"\r\n" + b"1\r\n \r\n" * 10 + b"0\r\n\r\n")
        assert (await client.response())[2] == b"POST / 104106"


# The client's end


async def test_a_client_that_closed_its_side_after_the_request_gets_the_response() -> None:
    async with serving() as side:
        for requests, last in ((get("/slow"), b"slow"), (post("/x", 3) + b"abc" + get("/slow"), b"slow")):
            async with side.client() as client:
                await client.send(requests)
                client.half_close()
                text = await client.rest()
                assert text.endswith(b"\r\n\r\n" + last)
        assert side.app.events == ["waiting", "waiting"]


async def test_a_client_that_is_gone_is_noticed_while_its_request_runs() -> None:
    async with serving() as side:
        async with side.client() as client:
            await client.send(get("/wait"))
            await side.app.until("waiting")
        async with asyncio.timeout(120):
            await side.app.until("disconnected")


@pytest.mark.parametrize("body_bytes", [0, 10, 3 * HIGH_WATER_BYTES, MIB])
async def test_a_client_that_is_gone_is_reported_to_an_application_that_has_read_its_body(body_bytes: int) -> None:
    async with serving() as side:
        async with side.client() as client:
            await client.send(post("/watch", body_bytes) + bytes(body_bytes))
            await side.app.until("watching")
        await side.app.until("left")


async def test_a_request_whose_body_ends_early_is_not_served_as_if_it_were_whole() -> None:
    async with serving() as side, side.client() as client:
        await client.send(post("/", 100) + b"abc")
        client.half_close()
        assert await client.rest() == b""
        await side.app.until("disconnected")


# The server's end


async def test_draining_makes_each_response_the_last_on_its_connection() -> None:
    async with serving() as side, side.client() as idle, side.client() as busy:
        await idle.send(get("/"))
        assert "connection" not in (await idle.response())[1]
        await busy.send(get("/slow"))
        await side.app.until("waiting")
        side.server.start_draining()
        await idle.send(get("/again"))  # came before the connection was cut
        status, headers, body = await idle.response()
        assert (status, headers["connection"], body) == (200, "close", b"GET /again 0")
        assert await idle.rest() == b""
        status, headers, body = await busy.response()
        assert (status, headers["connection"], body) == (200, "close", b"slow")


async def test_stopping_closes_idle_connections_when_the_last_request_has_ended() -> None:
    async with serving() as side, side.client() as idle, side.client() as busy:
        await idle.send(get("/"))
        await idle.response()
        await busy.send(get("/slow"))
        await side.app.until("waiting")
        stopping = asyncio.ensure_future(side.server.stop(600))
        await asyncio.sleep(expiring(0.05))
        await idle.send(get("/late"))
        assert (await idle.response())[1]["connection"] == "close"
        assert (await busy.response())[2] == b"slow"
        async with asyncio.timeout(120):
            await stopping
        with pytest.raises(OSError):
            await asyncio.open_connection("127.0.0.1", side.server.port)


async def test_a_request_that_is_under_way_on_an_idle_connection_when_the_server_stops_is_served() -> None:
    async with serving(last_requests_s=600) as side, side.client() as new, side.client() as used:
        await used.send(get("/"))
        await used.response()
        await until(lambda: side.server.open_connections == 2)
        stopping = asyncio.ensure_future(side.server.stop(600))
        await refused(side.server.port)
        for client in (new, used):
            await client.send(get("/late"))
            status, headers, body = await client.response()
            assert (status, headers["connection"], body) == (200, "close", b"GET /late 0")
        async with asyncio.timeout(120):
            await stopping


async def test_a_connection_that_only_the_kernel_has_accepted_when_the_server_stops_is_served() -> None:
    async with serving(last_requests_s=600) as side:
        with socket.create_connection(("127.0.0.1", side.server.port)) as client:  # the event loop has no turn meanwhile
            client.sendall(get("/late"))
            stopping = asyncio.ensure_future(side.server.stop(600))
            received = await asyncio.to_thread(client.recv, 65536)
            assert received.endswith(b"GET /late 0")
        async with asyncio.timeout(120):
            await stopping


async def refused(port: int) -> None:
    """Return when connections are refused."""
    async with asyncio.timeout(120):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except ConnectionError:
                return
            writer.close()


async def test_stopping_notices_that_requests_have_ended_which_end_at_the_same_moment(caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as side, side.client() as one, side.client() as other:
        for number, client in enumerate((one, other), 1):
            await client.send(get("/gate"))
            await side.app.until(f"at the gate {number}")
        stopping = asyncio.ensure_future(side.server.stop(600))
        side.app.gate.set()
        assert [(await client.response())[2] for client in (one, other)] == [b"through", b"through"]
        async with asyncio.timeout(120):
            await stopping
    assert "cut off" not in caplog.text


async def test_stopping_cuts_what_does_not_end_in_time() -> None:
    async with serving() as side, side.client() as client:
        await client.send(get("/wait"))
        await side.app.until("waiting")
        async with asyncio.timeout(120):
            await side.server.stop(0.1)
        status, headers, body = await client.response()
        assert (status, headers["connection"]) == (503, "close")
        assert body == b"The server stops; the request did not finish in time"
        assert await client.ends()
