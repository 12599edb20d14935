"""Connections to engine servers: kept after whole responses, closed after parts of one, replaced when the server closed them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from dynamo.common.errors import EngineError, Unavailable
from dynamo.common.http.client import HttpClient
from tests.support.waiting import expiring

WHOLE = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n8\r\ndata: a\n\r\n0\r\n\r\n"
CLOSING = b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nok"
ENDLESS = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n8\r\ndata: a\n\r\n"


class Server:
    """Responds to each request with the next of `responses`; b"" closes the connection instead, None is silence."""

    def __init__(self, *responses: bytes | None) -> None:
        self.responses = [*responses]
        self.connections = 0
        self.open: set[asyncio.StreamWriter] = set()
        self.port = 0

    @asynccontextmanager
    async def client(self, timeout_s: float = 120) -> AsyncIterator[HttpClient]:
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        async with server:
            client = HttpClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", timeout_s=timeout_s)
            yield client
            client.close()
            for writer in [*self.open]:
                writer.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open.add(writer)
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                await reader.readuntil(b"\r\n\r\n")
                response = self.responses.pop(0)
                if response is None:
                    continue
                if not response:
                    break
                writer.write(response)
        self.open.discard(writer)
        writer.close()


async def test_a_connection_is_used_again_after_whole_responses() -> None:
    server = Server(WHOLE, CHUNKED, WHOLE)
    async with server.client() as client:
        assert await client.fetch("GET", "/") == (200, b"ok")
        async with client.send("POST", "/") as response:
            assert [await response.events(), await response.events()] == [[b"a"], []]
        assert await client.fetch("GET", "/") == (200, b"ok")
        assert server.connections == 1


async def test_events_are_read_as_they_arrive_however_their_lines_are_cut() -> None:
    parts = [b"data: a\n\n: no event\ndata:b\r\n\r\nda", b"ta: c", b" d\n", b"\ndata: cut off"]
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)
    server = Server(CHUNKED[: CHUNKED.index(b"\r\n\r\n") + 4] + chunks + b"0\r\n\r\n")
    received: list[bytes] = []
    async with server.client() as client, client.send("POST", "/") as response:
        while events := await response.events():
            received += events
    assert received == [b"a", b"b", b"c d"]


async def test_chunks_of_one_byte_that_come_together_are_one_piece() -> None:
    server = Server(CHUNKED[: CHUNKED.index(b"\r\n\r\n") + 4] + b"1\r\nx\r\n" * 10_000 + b"0\r\n\r\n")
    async with server.client() as client, client.send("POST", "/") as response:
        pieces = [piece async for piece in response.chunks()]
    assert b"".join(pieces) == b"x" * 10_000 and len(pieces) < 100


async def test_a_server_that_changes_the_protocol_is_an_error_in_words() -> None:
    server = Server(b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n")
    async with server.client() as client:
        with pytest.raises(EngineError, match="does not speak HTTP"):
            await client.fetch("GET", "/")


async def test_a_stream_whose_end_comes_later_leaves_its_connection() -> None:
    server = Server(ENDLESS, WHOLE)
    async with server.client() as client:
        async with client.send("POST", "/") as response:
            assert await response.events() == [b"a"]
            [writer] = server.open
            writer.write(b"0\r\n\r\n")
            await response.finish()
        await client.fetch("GET", "/")
        assert server.connections == 1


async def test_a_response_that_is_left_early_closes_its_connection() -> None:
    server = Server(ENDLESS, WHOLE)
    async with server.client() as client:
        async with client.send("POST", "/") as response:
            assert response.status == 200
        await client.fetch("GET", "/")
        assert server.connections == 2


async def test_a_server_that_closes_after_a_response_gets_a_new_connection() -> None:
    server = Server(CLOSING, WHOLE)
    async with server.client() as client:
        await client.fetch("GET", "/")
        await client.fetch("GET", "/")
        assert server.connections == 2


async def test_a_kept_connection_that_the_server_closed_is_replaced() -> None:
    server = Server(WHOLE, b"", WHOLE)
    async with server.client() as client:
        await client.fetch("GET", "/")
        assert await client.fetch("GET", "/") == (200, b"ok"), "sent again, since nothing came of it"
        assert server.connections == 2


@pytest.mark.parametrize(
    ("response", "what"),
    [
        (b"HTTP/1.1 200 OK\r\nx: " + b"v" * 100_000, "a head"),
        (b"HTTP/1.1 100 Continue\r\n\r\n" * 10_000, "a head"),
        (CHUNKED[:-2] + b"name: value\r\n" * 20_000, "trailers"),
        (CHUNKED[:-2] + b"name: " + b"v" * 200_000, "trailers"),
        (ENDLESS + b"1;" + b"v" * 200_000, "trailers"),
    ],
)
async def test_heads_and_trailers_of_a_response_are_bounded(response: bytes, what: str) -> None:
    async with Server(response).client() as client:
        with pytest.raises(EngineError, match=f"sent {what} of more than 65536 bytes"):
            await client.fetch("GET", "/")


async def test_a_long_body_in_small_chunks_is_no_long_head() -> None:
    body = b"1\r\nx\r\n" * 50_000
    async with Server(ENDLESS + body + b"0\r\nname: value\r\n\r\n").client() as client:
        status, content = await client.fetch("GET", "/")
        assert (status, len(content)) == (200, 50_008)


async def test_a_request_is_not_sent_again_to_a_server_that_is_silent() -> None:
    server = Server(WHOLE, None, WHOLE)
    async with server.client(timeout_s=expiring(0.05)) as client:
        await client.fetch("GET", "/")
        with pytest.raises(Unavailable, match="did not respond in time"):
            await client.fetch("GET", "/")
        assert server.responses == [WHOLE], "it may be working on the request"


async def test_a_closed_client_keeps_no_connection() -> None:
    server = Server(WHOLE, WHOLE)
    async with server.client() as client:
        async with client.send("GET", "/") as response:
            client.close()
            assert await response.read() == b"ok"
        await client.fetch("GET", "/")
        assert server.connections == 2


async def test_a_new_connection_that_the_server_closes_is_a_lost_server() -> None:
    server = Server(b"")
    async with server.client() as client:
        with pytest.raises(Unavailable, match="closed the connection"):
            await client.fetch("GET", "/")
        assert server.connections == 1


async def test_requests_side_by_side_have_connections_of_their_own() -> None:
    server = Server(*[WHOLE] * 6)
    async with server.client() as client:
        async with client.send("GET", "/") as first, client.send("GET", "/") as second:
            assert (await first.read(), await second.read()) == (b"ok", b"ok")
        await asyncio.gather(*(client.fetch("GET", "/") for _ in range(2)))
        assert server.connections == 2
