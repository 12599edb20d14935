"""The HTTP/2 server beside clients that were written by others: the package `h2`, and gRPC's own."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo.frontend.api.rpc.operation import Context
from dynamo.frontend.api.rpc.server import GrpcServer, serve_grpc
from dynamo.frontend.config import GrpcOptions
from tests.support.grpc_operations import ECHO, bidirectional, unary
from tests.support.http2 import fields, message

h2_connection = pytest.importorskip("h2.connection")
h2_events = pytest.importorskip("h2.events")
h2_config = pytest.importorskip("h2.config")

MIB = 2**20


async def echo_stream(unused: object, context: Context) -> None:
    while isinstance(content := await context.read(), bytes | memoryview):
        await context.write(bytes(content))


OPERATIONS = [*ECHO, bidirectional("/test.Echo/Repeat", echo_stream)]


class Peer:
    """A client on `h2`, which checks every frame of the server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._h2 = h2_connection.H2Connection(h2_config.H2Configuration(client_side=True, header_encoding="utf-8"))
        self._h2.initiate_connection()
        self.headers: dict[int, dict[str, str]] = {}
        self.data: dict[int, bytearray] = {}
        self.ended: set[int] = set()

    async def call(self, path: str, contents: list[bytes], padding: int | None) -> int:
        stream: int = self._h2.get_next_available_stream_id()
        self._h2.send_headers(stream, fields(path, ("x-number", str(stream))))
        rest = b"".join(map(message, contents))
        while rest:
            overhead = 0 if padding is None else padding + 1
            room = min(self._h2.local_flow_control_window(stream), self._h2.max_outbound_frame_size) - overhead
            if room <= 0:
                await self._exchange()
                continue
            self._h2.send_data(stream, rest[:room], pad_length=padding)
            rest = rest[room:]
        self._h2.end_stream(stream)
        return stream

    async def response(self, stream: int) -> bytes:
        async with asyncio.timeout(120):
            while stream not in self.ended:
                await self._exchange()
        assert self.headers[stream]["grpc-status"] == "0"
        return bytes(self.data.get(stream, b""))

    async def _exchange(self) -> None:
        self._writer.write(self._h2.data_to_send())
        for event in self._h2.receive_data(await self._reader.read(65_536)):
            if isinstance(event, h2_events.ResponseReceived | h2_events.TrailersReceived):
                self.headers.setdefault(event.stream_id, {}).update(event.headers)
            elif isinstance(event, h2_events.DataReceived):
                self.data.setdefault(event.stream_id, bytearray()).extend(event.data)
                self._h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            elif isinstance(event, h2_events.StreamEnded | h2_events.StreamReset):
                self.ended.add(event.stream_id)
        self._writer.write(self._h2.data_to_send())

    def close(self) -> None:
        self._writer.close()


CALL = st.tuples(
    st.sampled_from(["Say", "Repeat"]),
    st.lists(st.sampled_from([0, 1, 100, 16_379, 16_384, 70_000, 300_000]), min_size=1, max_size=4),
    st.sampled_from([None, 0, 1, 255]),
)


@settings(max_examples=25, deadline=None)
@given(st.lists(CALL, min_size=1, max_size=6))
def test_h2_gets_what_it_sent(calls: list[tuple[str, list[int], int | None]]) -> None:
    async def exchange() -> None:
        async with serve_grpc(GrpcOptions(port=0), OPERATIONS) as server:
            peer = Peer(*await asyncio.open_connection("127.0.0.1", server.port))
            expected = {}
            for method, sizes, padding in calls:
                contents = [bytes((size % 251,)) * size for size in (sizes[:1] if method == "Say" else sizes)]
                stream = await peer.call(f"/test.Echo/{method}", contents, padding)
                expected[stream] = b"".join(map(message, contents))
            for stream, content in expected.items():
                assert await peer.response(stream) == content
            peer.close()

    asyncio.run(exchange())


async def channel_to(server: GrpcServer) -> grpc.aio.Channel:
    options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    return grpc.aio.insecure_channel(f"127.0.0.1:{server.port}", options=options)


@pytest.mark.parametrize("compression", [grpc.Compression.NoCompression, grpc.Compression.Gzip, grpc.Compression.Deflate])
async def test_grpcs_client_gets_what_it_sent(compression: grpc.Compression) -> None:
    async with serve_grpc(GrpcOptions(port=0), OPERATIONS) as server, await channel_to(server) as channel:
        say = channel.unary_unary("/test.Echo/Say")
        contents = [bytes((number,)) * size for number, size in enumerate((0, 1, 5000, 70_000, MIB, 5 * MIB, 20 * MIB))]
        assert await asyncio.gather(*(say(content, timeout=120, compression=compression) for content in contents)) == contents
        repeat = channel.stream_stream("/test.Echo/Repeat")(compression=compression)
        for content in contents:
            await repeat.write(content)
            assert await repeat.read() == content
        await repeat.done_writing()
        assert await repeat.read() is grpc.aio.EOF
        assert await repeat.code() is grpc.StatusCode.OK


async def test_metadata_goes_both_ways() -> None:
    async def show(request: bytes, context: Context) -> bytes:
        sent = dict(context.invocation_metadata() or ())
        context.set_trailing_metadata((("x-text", str(sent["x-text"])), ("x-raw-bin", b"\0\xff")))
        assert sent["x-raw-bin"] == b"\1\2"
        return context.peer().encode()

    operations = [unary("/test.Echo/Show", show)]
    async with serve_grpc(GrpcOptions(port=0), operations) as server, await channel_to(server) as channel:
        call = channel.unary_unary("/test.Echo/Show")(b"", metadata=(("x-text", "hello"), ("x-raw-bin", b"\1\2")))
        assert (await call).startswith(b"ipv4:127.0.0.1:")
        trailing = dict(await call.trailing_metadata())
        assert (trailing["x-text"], trailing["x-raw-bin"]) == ("hello", b"\0\xff")
