"""What one client may cost the HTTP/2 server, bound by bound."""

from __future__ import annotations

import asyncio
import gc
import gzip
import itertools
import socket
import ssl
import struct
from asyncio import Event
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, suppress
from time import monotonic
from weakref import ref

import pytest
import trustme

from dynamo.common.lifecycle import open_listener
from dynamo.common.shared_memory.sharing import SharedMemory
from dynamo.common.tensors.tensors import Buffer
from dynamo.frontend.api.capacity import Capacity
from dynamo.frontend.api.rpc.handlers import PendingMessage, read_message
from dynamo.frontend.api.rpc.http2 import frames
from dynamo.frontend.api.rpc.http2.frames import PREFACE, ErrorCode, encode_frame, encode_settings
from dynamo.frontend.api.rpc.http2.server import Http2Server
from dynamo.frontend.api.rpc.http2.windows import SendWindow
from dynamo.frontend.api.rpc.operation import Context, GrpcOperation
from dynamo.frontend.config import CapacityOptions, GrpcOptions
from tests.support.arenas import memory_folder
from tests.support.grpc_operations import bidirectional, unary
from tests.support.http2 import Client, block, call, connected, data, fields, headers, message
from tests.support.waiting import until

MIB = 2**20
CALM = ErrorCode.ENHANCE_YOUR_CALM


class Service:
    """Handlers whose calls a test holds up."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.running = 0
        self.received: list[int] = []
        self.lent: list[object] = []
        self.kept: list[Event] = []

    def operations(self) -> list[GrpcOperation]:
        unaries = {"Say": self.say, "Wait": self.wait, "Large": self.large, "Lend": self.lend, "Keep": self.keep}
        streams = {"Read": self.read, "Hold": self.hold, "Begin": self.begin}
        return [
            *(unary(f"/test.Echo/{name}", method) for name, method in unaries.items()),
            *(bidirectional(f"/test.Echo/{name}", method) for name, method in streams.items()),
        ]

    async def say(self, request: Buffer | PendingMessage, context: Context) -> bytes:
        return await read_message(request)

    async def wait(self, request: Buffer | PendingMessage, context: Context) -> bytes:
        """Respond when the gate is open, and end no earlier even if the call is cancelled."""
        self.running += 1
        try:
            waiting = asyncio.ensure_future(self.gate.wait())
            while not waiting.done():
                try:
                    await asyncio.shield(waiting)
                except asyncio.CancelledError:
                    continue
            return b""
        finally:
            self.running -= 1

    async def large(self, request: Buffer | PendingMessage, context: Context) -> bytes:
        return bytes(int(await read_message(request)))

    async def lend(self, request: Buffer | PendingMessage, context: Context) -> bytes:
        """Hand over the message, and keep nothing of it."""
        self.lent.append(request)
        del request
        await self.gate.wait()
        return b""

    async def keep(self, request: Buffer | PendingMessage, context: Context) -> bytes:
        """Have something that lives as long as the handler's local variables."""
        local = Event()
        self.kept.append(local)
        await self.gate.wait()
        return b"" if local.is_set() else b"."

    async def read(self, unused: object, context: Context) -> None:
        while isinstance(content := await context.read(), bytes | memoryview):
            self.received.append(len(content))

    async def begin(self, unused: object, context: Context) -> None:
        """Begin a response, and go on when the gate is open."""
        await context.write(b".")
        await self.gate.wait()

    async def hold(self, unused: object, context: Context) -> None:
        await self.gate.wait()


class Edge:
    def __init__(self, server: Http2Server, service: Service) -> None:
        self.server = server
        self.service = service
        self.capacity = server.capacity

    async def assert_serving(self) -> None:
        async with connected(self.server.port) as client:
            client.send(call(1, b"hello"))
            assert (await client.response(1))[1] == message(b"hello")


@asynccontextmanager
async def serving(
    *,
    guarded: bool = False,
    capacity: CapacityOptions | None = None,
    memory: SharedMemory | None = None,
    tls: ssl.SSLContext | None = None,
    **options: object,
) -> AsyncIterator[Edge]:
    service = Service()
    settings = GrpcOptions(port=0, **options)  # type: ignore[arg-type]
    server = Http2Server(settings, service.operations(), Capacity(capacity), guarded=guarded, memory=memory)
    await server.listen(open_listener("127.0.0.1", 0, flag="--grpc-port"), tls)
    try:
        yield Edge(server, service)
    finally:
        service.gate.set()
        await server.stop(0.0)


def tls_contexts() -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """The contexts of a server and of a client that trusts it."""
    authority = trustme.CA()
    ours, theirs = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context()
    authority.issue_cert("127.0.0.1").configure_cert(ours)
    authority.configure_trust(theirs)
    for context in (ours, theirs):
        context.set_alpn_protocols(["h2"])
    return ours, theirs


def reset(stream: int) -> bytes:
    return encode_frame(frames.RST_STREAM, 0, stream, struct.pack(">I", 8))


def to(method: str, *more: tuple[str, str]) -> list[tuple[str, str]]:
    return fields(f"/test.Echo/{method}", *more)


async def ends_with(client: Client, code: ErrorCode) -> None:
    frame = await client.next_of(frames.GOAWAY)
    assert frame is not None, "the connection ended without GOAWAY"
    assert frame.word == code, bytes(frame.payload[8:])


# Calls


async def test_streams_that_a_client_resets_rapidly_end_its_connection() -> None:
    async with serving() as edge, connected(edge.server.port) as client:
        for stream in range(1, 2401, 2):
            client.send(headers(stream), reset(stream))
        await ends_with(client, CALM)
        await edge.assert_serving()


async def test_streams_that_a_client_resets_when_it_has_a_response_are_no_flood() -> None:
    """As gateways end their calls of a picker: with a reset, however many there are."""
    async with serving() as edge, connected(edge.server.port) as client:
        for stream in range(1, 2401, 2):
            client.send(headers(stream, pairs=to("Begin")))
            assert await client.next_of(frames.DATA) is not None, "the connection was ended"
            client.send(reset(stream))
        assert edge.server.connections
        await edge.assert_serving()


async def test_streams_that_a_client_makes_the_server_reset_end_its_connection() -> None:
    """ "MadeYouReset": each window update is an error of its stream."""
    async with serving() as edge, connected(edge.server.port) as client:
        for stream in range(1, 2401, 2):
            client.send(headers(stream), encode_frame(frames.WINDOW_UPDATE, 0, stream, bytes(4)))
        await ends_with(client, CALM)
        await edge.assert_serving()


async def test_calls_that_were_reset_leave_their_streams_free_and_count_apart_until_their_handlers_have_ended() -> None:
    async with serving(max_concurrent_streams=3) as edge, connected(edge.server.port) as client:
        for stream in (1, 3, 5):
            client.send(call(stream, pairs=to("Wait")))
        await until(lambda: edge.service.running == 3)
        client.send(reset(1), reset(3), reset(5), *(call(stream, pairs=to("Wait")) for stream in (7, 9, 11)))
        await until(lambda: edge.service.running == 6)
        client.send(call(13))
        assert await client.status(13) == f"rst {ErrorCode.REFUSED_STREAM}", "three streams are open"
        client.send(reset(7), reset(9), reset(11), call(15))
        assert await client.status(15) == f"rst {ErrorCode.REFUSED_STREAM}", "six handlers run"
        edge.service.gate.set()
        await until(lambda: edge.service.running == 0)
        client.send(call(17))
        assert await client.status(17) == "0"


async def test_a_cancelled_call_keeps_nothing_alive() -> None:
    gc.disable()
    try:
        async with serving() as edge, connected(edge.server.port) as client:
            client.send(call(1, bytes(5000), pairs=to("Keep")), call(3))
            assert await client.status(3) == "0"
            kept = ref(edge.service.kept.pop())
            client.send(reset(1), call(5))
            assert await client.status(5) == "0"
            await until(lambda: kept() is None)
    finally:
        gc.enable()


async def test_a_lost_connection_keeps_nothing_alive() -> None:
    gc.disable()
    try:
        async with serving() as edge:
            async with connected(edge.server.port) as client:
                client.send(headers(1, pairs=to("Hold")), headers(3), data(3, message(b"", size=MIB), ends=False), call(5))
                assert await client.status(5) == "0"
                (connection,) = map(ref, edge.server.connections)
            await until(lambda: connection() is None)
    finally:
        gc.enable()


async def test_a_lost_connection_of_tls_keeps_nothing_alive() -> None:
    ours, theirs = tls_contexts()
    gc.disable()
    try:
        async with serving(tls=ours) as edge:
            _, writer = await asyncio.open_connection("127.0.0.1", edge.server.port, ssl=theirs)
            await until(lambda: len(edge.server.connections) == 1)
            (connection,) = map(ref, edge.server.connections)
            writer.close()
            await until(lambda: connection() is None)
    finally:
        gc.enable()


async def test_calls_of_a_client_that_does_not_read_end_its_connection() -> None:
    async with serving(max_concurrent_streams=100) as edge, connected(edge.server.port) as client:
        client.send(call(1))
        assert await client.status(1) == "0"
        (connection,) = edge.server.connections
        connection.pause_writing()
        client.send(
            *(
                headers(stream, flags=frames.END_HEADERS | frames.END_STREAM, pairs=fields("/no/Such"))
                for stream in range(3, 2403, 2)
            )
        )
        await ends_with(client, CALM)
        await edge.assert_serving()


async def test_windows_are_resized_once_for_a_frame_of_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    resized: list[int] = []
    async with serving() as edge, connected(edge.server.port) as client:
        client.send(headers(1, pairs=to("Hold")), call(3))
        assert await client.status(3) == "0"
        monkeypatch.setattr(SendWindow, "grow", lambda window, more: resized.append(more))
        changes = b"".join(struct.pack(">HI", frames.INITIAL_WINDOW_SIZE, 1000 + number) for number in range(2000))
        client.send(encode_frame(frames.SETTINGS, 0, 0, changes), call(5))
        assert await client.status(5) == "0"
        assert resized == [2999 - frames.DEFAULT_WINDOW_BYTES]


async def test_one_large_step_of_all_decompressions_is_taken_in_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = 0
    taken: list[int] = []

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    def steps(message: Buffer, encoding: str) -> Iterator[bytes]:
        for _ in range(3):
            taken.append(turns)
            ends_at = monotonic() + 0.005  # more than a step
            while monotonic() < ends_at:
                pass
            yield b""

    monkeypatch.setattr("dynamo.frontend.api.rpc.http2.messages.inflate_steps", steps)
    async with serving() as edge, connected(edge.server.port) as client:
        counting = asyncio.create_task(count_turns())
        pairs = to("Say", ("grpc-encoding", "gzip"))
        client.send(*(headers(stream, pairs=pairs) + data(stream, message(b"x", flag=1)) for stream in range(1, 21, 2)))
        for stream in range(1, 21, 2):
            assert await client.status(stream) == "0"
        counting.cancel()
    assert len(set(taken)) == len(taken) == 30


async def test_a_client_that_cancels_ends_its_handler() -> None:
    async with serving() as edge, connected(edge.server.port) as client:
        client.send(headers(1, pairs=to("Hold")), call(3))
        assert await client.status(3) == "0"
        assert len(edge.server.calls) == 1
        client.send(reset(1))
        await until(lambda: not edge.server.calls)


async def test_a_lost_connection_ends_its_handlers_and_gives_back_what_they_hold() -> None:
    async with serving() as edge:
        async with connected(edge.server.port) as client:
            client.send(headers(1, pairs=to("Hold")), data(1, message(bytes(5000)), ends=False))
            client.send(headers(3), data(3, message(bytes(5000), size=MIB), ends=False), call(5))
            assert await client.status(5) == "0"
            assert edge.capacity.buffered_bytes > 10_000
        await until(lambda: not edge.server.calls and not edge.capacity.buffered_bytes)


@pytest.mark.parametrize("method", ["Hold", "Say"])
async def test_a_deadline_ends_a_call(method: str) -> None:
    async with serving() as edge, connected(edge.server.port) as client:
        client.send(headers(1, pairs=to(method, ("grpc-timeout", "50m"))))
        received, _ = await client.response(1)
        assert received["grpc-status"] == "4"
        await until(lambda: not edge.server.calls)


async def test_deadlines_that_did_not_pass_are_forgotten() -> None:
    async with serving() as edge, connected(edge.server.port) as client:
        for stream in range(1, 1001, 2):
            client.send(call(stream, pairs=to("Say", ("grpc-timeout", "1H"))))
            assert await client.status(stream) == "0"
        assert len(edge.server.deadlines) < 200


# Headers


async def test_a_header_block_without_end_ends_the_connection() -> None:
    async with serving(max_metadata_bytes=8192) as edge, connected(edge.server.port) as client:
        client.send(headers(1, flags=0))
        client.send(*(encode_frame(frames.CONTINUATION, 0, 1, bytes(1000)) for _ in range(9)))
        await ends_with(client, CALM)


async def test_empty_continuations_end_the_connection() -> None:
    async with serving() as edge, connected(edge.server.port) as client:
        client.send(headers(1, flags=0), encode_frame(frames.CONTINUATION, 0, 1) * 1000)
        await ends_with(client, CALM)


async def test_headers_that_unpack_to_more_than_the_limit_end_the_connection() -> None:
    bomb = block() + b"\x40\x01x\x7f\xa1\x1e" + b"v" * 4000 + b"\xbe" * 3000
    async with serving() as edge, connected(edge.server.port) as client:
        client.send(encode_frame(frames.HEADERS, frames.END_HEADERS, 1, bomb))
        await ends_with(client, CALM)


# Control frames


FLOODS = {
    "PING": encode_frame(frames.PING, 0, 0, bytes(8)),
    "SETTINGS": encode_settings({frames.INITIAL_WINDOW_SIZE: 70_000}),
    "PRIORITY": encode_frame(frames.PRIORITY, 0, 1, b"\0\0\0\3\0"),
    "WINDOW_UPDATE": encode_frame(frames.WINDOW_UPDATE, 0, 0, struct.pack(">I", 1)),
    "an unknown kind": encode_frame(0xBA, 0, 0),
    "empty DATA": encode_frame(frames.DATA, 0, 1),
}


@pytest.mark.parametrize("kind", FLOODS)
async def test_a_flood_of_frames_without_content_ends_the_connection(kind: str) -> None:
    async with serving() as edge, connected(edge.server.port) as client:
        client.send(headers(1, pairs=to("Hold")), FLOODS[kind] * 25_000)
        await ends_with(client, CALM)
        await edge.assert_serving()


async def test_pings_while_responses_are_sent_are_welcome() -> None:
    """Clients measure the bandwidth by them."""
    async with serving() as edge, connected(edge.server.port) as client:
        for stream in range(1, 41, 2):
            client.send(encode_frame(frames.PING, 0, 0, bytes(8)), call(stream))
            assert await client.status(stream) == "0"


# Messages


async def test_a_message_above_the_limit_is_refused_when_its_size_is_known() -> None:
    async with serving(max_message_bytes=5000) as edge, connected(edge.server.port) as client:
        client.send(headers(1), data(1, message(b"abc", size=5001), ends=False))
        received, _ = await client.response(1)
        assert (received["grpc-status"], received["grpc-message"]) == (
            "8", "the message has 5001 bytes; messages are limited to 5000",
        )  # fmt: skip
        frame = await client.next_of(frames.RST_STREAM)
        assert frame is not None
        assert (frame.stream, frame.word) == (1, ErrorCode.NO_ERROR)
        client.send(data(1, bytes(3000)), call(3))  # what was under way is ignored
        assert await client.status(3) == "0"
        assert edge.capacity.buffered_bytes == 0


@pytest.mark.parametrize("method", ["Say", "Read"])
async def test_messages_count_against_the_capacity_as_they_come_and_not_as_they_are_announced(method: str) -> None:
    capacity = CapacityOptions(max_buffered_bytes=3 * MIB)
    async with serving(capacity=capacity) as edge, connected(edge.server.port) as client:
        for stream in range(1, 21, 2):
            client.send(headers(stream, pairs=to(method)), data(stream, message(b"", size=2 * MIB), ends=False))
        client.send(call(21))
        assert await client.status(21) == "0"
        assert edge.capacity.buffered_bytes == 0
        client.send(data(1, bytes(10_000), ends=False), call(23))
        assert await client.status(23) == "0"
        assert 10_000 <= edge.capacity.buffered_bytes <= 20_000 + 200
        client.send(*(data(1, bytes(10_000), ends=False) for _ in range(130)), call(25))
        assert await client.status(25) == "0"
        assert 1_310_000 <= edge.capacity.buffered_bytes <= 2 * MIB + 200
        client.send(*(data(3, bytes(10_000), ends=False) for _ in range(200)))
        assert await client.status(3) == "14"
        assert edge.capacity.buffered_bytes <= 2 * MIB + 200
        client.send(*(reset(stream) for stream in range(1, 21, 2) if stream != 3))
        await until(lambda: edge.capacity.buffered_bytes == 0)


async def test_a_message_that_cannot_be_held_is_refused_when_it_is_announced() -> None:
    capacity = CapacityOptions(max_buffered_bytes=3 * MIB)
    async with serving(capacity=capacity) as edge, connected(edge.server.port) as client:
        client.send(headers(1, pairs=to("Say")), data(1, message(b"", size=4 * MIB), ends=False))
        assert await client.status(1) == "14"


async def test_a_bomb_is_refused_where_it_passes_the_limit() -> None:
    bomb = gzip.compress(bytes(64 * MIB), 6)
    async with serving(max_message_bytes=4 * MIB) as edge, connected(edge.server.port) as client:
        client.send(headers(1, pairs=to("Say", ("grpc-encoding", "gzip"))), data(1, message(bomb, flag=1)[:16_384], ends=False))
        for start in range(16_384, len(bomb) + 5, 16_384):
            client.send(data(1, message(bomb, flag=1)[start : start + 16_384], ends=start + 16_384 >= len(bomb) + 5))
        received, _ = await client.response(1)
        assert received["grpc-status"] == "8"
        assert "decompressed" in received["grpc-message"]
        assert edge.capacity.buffered_bytes == 0


async def test_a_stream_that_its_handler_does_not_read_takes_no_more_than_its_window() -> None:
    window = 100_000
    async with serving(initial_stream_window_size=window) as edge, connected(edge.server.port) as client:
        client.send(headers(1, pairs=to("Hold")))
        client.send(*(data(1, message(bytes(9_995)), ends=False) for _ in range(10)))
        client.send(call(3))
        while (frame := await client.next_of(frames.WINDOW_UPDATE, frames.HEADERS)) is not None and frame.kind != frames.HEADERS:
            assert frame.stream == 0, "the window of a stream that is not read has grown"
        assert edge.capacity.buffered_bytes > window - 1000
        client.send(data(1, bytes(70_000), ends=False))
        await ends_by(client, 1, ErrorCode.FLOW_CONTROL_ERROR)


async def ends_by(client: Client, stream: int, code: ErrorCode) -> None:
    frame = await client.next_of(frames.RST_STREAM)
    assert frame is not None
    assert (frame.stream, frame.word) == (stream, code)


async def test_a_client_that_sends_more_than_the_connections_window_is_cut_off() -> None:
    async with serving(initial_connection_window_size=70_000) as edge, connected(edge.server.port) as client:
        client.send(headers(1, pairs=to("Hold")))
        client.send(encode_frame(frames.DATA, 0, 1, bytes(80_000)))
        await ends_with(client, ErrorCode.FLOW_CONTROL_ERROR)


async def test_padding_counts_and_is_given_back() -> None:
    async with serving(initial_connection_window_size=70_000) as edge, connected(edge.server.port) as client:
        client.send(headers(1, pairs=to("Hold")))
        assert (await client.next_of(frames.WINDOW_UPDATE)) is not None  # from HTTP/2's least window to the configured one
        client.send(*(encode_frame(frames.DATA, frames.PADDED, 1, b"\xff" + b"\0" + bytes(255)) for _ in range(140)))
        frame = await client.next_of(frames.WINDOW_UPDATE)
        assert frame is not None
        assert (frame.stream, 35_000 <= frame.word < 35_300) == (0, True)


async def test_before_a_caller_is_accepted_its_message_is_not_looked_at() -> None:
    """The handler waits; what the client has sent meanwhile is neither counted nor credited, and the rest may not come."""
    async with serving(guarded=True) as edge, connected(edge.server.port) as client:
        settings = await client.frame()
        assert settings is not None
        assert (frames.INITIAL_WINDOW_SIZE, 65_535) in list(struct.iter_unpack(">HI", settings.payload))
        client.send(headers(1, pairs=to("Wait")), data(1, message(b"", size=MIB)[:5] + bytes(16_000), ends=False), call(3))
        assert await client.status(3) == "0"
        assert edge.capacity.buffered_bytes == 0


async def test_an_accepted_caller_may_send_all_of_its_message() -> None:
    async with serving(guarded=True) as edge, connected(edge.server.port) as client:
        whole = message(bytes(300_000))
        client.send(headers(1), data(1, whole[:16_000], ends=False))
        frame = await client.next_of(frames.WINDOW_UPDATE)
        while frame is not None and frame.stream != 1:
            frame = await client.next_of(frames.WINDOW_UPDATE)
        client.send(
            *(data(1, whole[at : at + 16_000], ends=at + 16_000 >= len(whole)) for at in range(16_000, len(whole), 16_000))
        )
        received, content = await client.response_with_windows(1)
        assert (received["grpc-status"], content) == ("0", whole)


# Responses


async def test_responses_that_no_client_reads_count_against_the_capacity() -> None:
    settings = {frames.INITIAL_WINDOW_SIZE: 0}
    capacity = CapacityOptions(max_buffered_bytes=3 * MIB)
    async with serving(capacity=capacity) as edge, connected(edge.server.port, settings) as client:
        for stream in (1, 3, 5):
            client.send(call(stream, b"%d" % MIB, pairs=to("Large")))
        received, _ = await client.response(5)
        assert (received["grpc-status"], received["retry-after"]) == ("14", "1")
        assert 2 * MIB <= edge.capacity.buffered_bytes < 3 * MIB
        client.send(reset(1), reset(3))
        await until(lambda: edge.capacity.buffered_bytes == 0)


async def test_many_small_responses_that_no_client_reads_count_against_the_capacity() -> None:
    settings, size = {frames.INITIAL_WINDOW_SIZE: 0}, 60_000
    capacity = CapacityOptions(max_buffered_bytes=MIB)
    async with serving(capacity=capacity) as edge, connected(edge.server.port, settings) as client:
        client.send(*(call(stream, b"%d" % size, pairs=to("Large")) for stream in range(1, 201, 2)))
        received, _ = await client.response(199)
        assert (received["grpc-status"], received["retry-after"]) == ("14", "1")
        assert MIB - size < edge.capacity.buffered_bytes <= MIB
        client.close()
        await until(lambda: edge.capacity.buffered_bytes == 0)


async def test_some_small_responses_that_wait_do_not_depend_on_the_capacity() -> None:
    settings = {frames.INITIAL_WINDOW_SIZE: 0}
    capacity = CapacityOptions(max_buffered_bytes=2000)
    async with serving(capacity=capacity) as edge, connected(edge.server.port, settings) as client:
        for round in range(20):  # what has been sent counts no more
            stream = 2 * round + 1
            client.send(call(stream, b"60000", pairs=to("Large")))
            received, content = await client.response_with_windows(stream)
            assert (received["grpc-status"], len(content)) == ("0", 60_005)
        assert edge.capacity.buffered_bytes == 0


@pytest.mark.parametrize("method", ["Say", "Hold"])
async def test_long_metadata_count_until_the_call_is_over(method: str) -> None:
    long = [(f"x-{number}", "a" * 4000) for number in range(12)]
    capacity = CapacityOptions(max_buffered_bytes=120_000)
    async with serving(capacity=capacity) as edge, connected(edge.server.port) as client:
        client.send(*(headers(stream, pairs=to(method, *long)) for stream in (1, 3, 5)))
        received, _ = await client.response(5)
        assert (received["grpc-status"], "near its limit" in received["grpc-message"]) == ("14", True)
        assert edge.capacity.buffered_bytes > 2 * 48_000
        client.send(reset(1), reset(3))
        await until(lambda: edge.capacity.buffered_bytes == 0)
        client.send(headers(7, flags=frames.END_HEADERS | frames.END_STREAM, pairs=to("Hold", *long)))
        edge.service.gate.set()
        assert await client.status(7) == "0"
        await until(lambda: edge.capacity.buffered_bytes == 0)


async def test_a_call_without_a_message_and_room_for_its_metadata_is_refused_once() -> None:
    long = [(f"x-{number}", "a" * 4000) for number in range(12)]
    async with serving(capacity=CapacityOptions(max_buffered_bytes=1000)) as edge, connected(edge.server.port) as client:
        client.send(headers(1, flags=frames.END_HEADERS | frames.END_STREAM, pairs=to("Say", *long)), call(3))
        assert await client.status(1) == "14"
        assert await client.status(3) == "0"
        assert not edge.server.calls


async def test_connections_beyond_the_limit_are_closed() -> None:
    async with serving(max_connections=2) as edge, connected(edge.server.port) as first, connected(edge.server.port) as second:
        for client in (first, second):
            client.send(call(1))
            assert await client.status(1) == "0"
        async with connected(edge.server.port) as third:
            assert await third.frame() is None
        first.close()
        await until(lambda: len(edge.server.connections) == 1)
        await edge.assert_serving()


# Time. The server's checks are called with a clock that is ahead.


async def test_a_connection_that_does_not_greet_is_closed() -> None:
    async with serving() as edge, connected(edge.server.port, greet=False) as client:
        await until(lambda: len(edge.server.connections) == 1)
        (connection,) = edge.server.connections
        connection.check(monotonic() + 9)
        assert (await client.frame()) is not None
        connection.check(monotonic() + 11)
        assert await client.next_of() is None


async def greeted(edge: Edge, client: Client) -> None:
    client.send(call(1))
    assert await client.status(1) == "0"
    assert len(edge.server.connections) == 1


def check_after(edge: Edge, *seconds: float) -> None:
    """Let the server check its only connection at these times from now."""
    (connection,) = edge.server.connections
    for second in seconds:
        connection.check(monotonic() + second)


async def test_a_silent_connection_is_pinged_and_closed_if_it_does_not_respond() -> None:
    async with serving(keepalive_s=60, keepalive_timeout_s=20) as edge, connected(edge.server.port) as client:
        await greeted(edge, client)
        (connection,) = edge.server.connections
        connection.check(monotonic() + 61)
        ping = await client.next_of(frames.PING)
        assert ping is not None
        client.send(encode_frame(frames.PING, frames.ACK, 0, ping.payload), call(3))
        assert await client.status(3) == "0"
        connection.check(monotonic() + 90)
        connection.check(monotonic() + 200)
        connection.check(monotonic() + 300)
        assert await client.next_of() is None


async def test_without_calls_a_connection_is_not_pinged_where_that_is_not_permitted() -> None:
    async with serving(keepalive_s=60, keepalive_permit_without_calls=False) as edge, connected(edge.server.port) as client:
        await greeted(edge, client)
        check_after(edge, 61)
        client.send(headers(3, pairs=to("Hold")), call(5))
        assert await client.status(5) == "0"
        check_after(edge, 122)
        assert await client.next_of(frames.PING, frames.HEADERS) == (frames.PING, 0, 0, b"dynamo-k")


async def test_clients_without_calls_may_not_ping_where_that_is_not_permitted() -> None:
    ping = encode_frame(frames.PING, 0, 0, bytes(8))
    async with serving(keepalive_permit_without_calls=False, client_ping_interval_s=0) as edge:
        async with connected(edge.server.port) as busy:
            busy.send(headers(1, pairs=to("Hold")), ping * 10, call(3))
            assert await busy.status(3) == "0"
        async with connected(edge.server.port) as idle:
            idle.send(ping * 10)
            await ends_with(idle, CALM)


async def test_a_connection_is_pinged_no_more_often_than_permitted_until_a_response_is_sent() -> None:
    acknowledgement = encode_frame(frames.PING, frames.ACK, 0, b"dynamo-k")
    async with serving(keepalive_s=60, max_pings_without_data=2) as edge, connected(edge.server.port) as client:
        await greeted(edge, client)
        (connection,) = edge.server.connections
        for later_s, is_sent in ((1000, True), (2000, True), (3000, False)):
            connection.check(monotonic() + later_s)
            assert (connection.pings.sent_at is not None) is is_sent
            client.send(acknowledgement)
            await until(lambda: connection.pings.sent_at is None)
        client.send(call(3))
        assert await client.status(3) == "0"
        connection.check(monotonic() + 4000)
        assert connection.pings.sent_at is not None


@pytest.mark.parametrize("guarded", [False, True])
async def test_a_call_of_one_request_that_has_two_messages_is_refused(guarded: bool) -> None:
    async with serving(guarded=guarded) as edge, connected(edge.server.port) as client:
        client.send(headers(1, pairs=to("Say")), data(1, message(b"a") + message(b"b"), ends=False))
        received, _ = await client.response(1)
        assert (received["grpc-status"], received["grpc-message"]) == ("12", "the call has more than one message")
        await edge.assert_serving()
        assert edge.capacity.buffered_bytes == 0


async def test_a_second_message_ends_a_handler_that_runs() -> None:
    async with serving() as edge, connected(edge.server.port) as client:
        client.send(headers(1, pairs=to("Keep")), data(1, message(b"a"), ends=False))
        await until(lambda: bool(edge.service.kept))
        client.send(data(1, message(b"b")))
        assert await client.status(1) == "12"
        await until(lambda: not edge.server.calls)


async def test_a_message_that_arrives_too_slowly_fails_its_call() -> None:
    async with serving() as edge, connected(edge.server.port) as client:
        client.send(headers(1), data(1, message(b"abc", size=MIB), ends=False), call(3))
        assert await client.status(3) == "0"
        check_after(edge, 0, 9)
        client.send(call(5))
        assert await client.status(5) == "0"
        check_after(edge, 11)
        assert await client.status(1) == "4"
        assert edge.capacity.buffered_bytes == 0


async def test_a_message_that_stops_after_much_of_it_fails_its_call() -> None:
    async with serving() as edge, connected(edge.server.port) as client:
        client.send(headers(1), data(1, message(b"", size=MIB), ends=False))
        client.send(*(data(1, bytes(16_000), ends=False) for _ in range(4)), call(3))
        assert await client.status(3) == "0"
        check_after(edge, 0, 11)
        assert await client.status(1) == "4"
        assert edge.capacity.buffered_bytes == 0


async def test_a_message_that_arrives_in_time_is_waited_for() -> None:
    async with serving() as edge, connected(edge.server.port) as client:
        whole = message(bytes(48_000))
        client.send(headers(1), data(1, whole[:5], ends=False))
        for number, at in enumerate(range(5, len(whole), 12_000)):
            check_after(edge, 11 * number)
            client.send(data(1, whole[at : at + 12_000], ends=at + 12_000 >= len(whole)), call(3 + 2 * number))
            assert await client.status(3 + 2 * number) == "0"
        assert edge.capacity.buffered_bytes == 0


@pytest.mark.parametrize("begun", [b"", b"\0\0"])
@pytest.mark.parametrize("guarded", [False, True])
async def test_a_unary_call_without_a_message_fails(guarded: bool, begun: bytes) -> None:
    async with serving(guarded=guarded) as edge, connected(edge.server.port) as client:
        client.send(headers(1), data(1, begun, ends=False), call(3))
        assert await client.status(3) == "0"
        check_after(edge, 0, 11)
        assert await client.status(1) == "4"


async def test_a_stream_may_be_silent_between_messages() -> None:
    async with serving() as edge, connected(edge.server.port) as client:
        client.send(headers(1, pairs=to("Read")), data(1, message(b"abc"), ends=False), call(3))
        assert await client.status(3) == "0"
        check_after(edge, 0, 11, 1000)
        client.send(data(1, message(b"")))
        assert await client.status(1) == "0"
        assert edge.service.received == [3, 0]


async def test_a_response_that_is_read_byte_by_byte_is_dropped_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = itertools.count(monotonic(), 100)
    now = next(seconds)
    monkeypatch.setattr("dynamo.frontend.api.rpc.http2.connection.monotonic", lambda: now)
    async with serving(keepalive_s=1000) as edge, connected(edge.server.port, {frames.INITIAL_WINDOW_SIZE: 10}) as client:
        client.send(call(1, b"100000", pairs=to("Large")))
        assert await client.next_of(frames.DATA) is not None
        (connection,) = edge.server.connections
        for now in itertools.islice(seconds, 4):
            connection.check(now)
            client.send(encode_frame(frames.WINDOW_UPDATE, 0, 1, struct.pack(">I", 1)))
            frame = await client.next_of(frames.DATA, frames.RST_STREAM)
        assert frame is not None
        assert (frame.kind, frame.word) == (frames.RST_STREAM, ErrorCode.CANCEL)
        await until(lambda: edge.capacity.buffered_bytes == 0)


async def test_a_response_that_is_not_read_is_dropped_in_the_end() -> None:
    async with serving(keepalive_s=1000) as edge, connected(edge.server.port, {frames.INITIAL_WINDOW_SIZE: 10}) as client:
        client.send(call(1, b"100000", pairs=to("Large")))
        assert await client.next_of(frames.DATA) is not None
        check_after(edge, 0, 299)
        assert edge.capacity.buffered_bytes == 100_005
        check_after(edge, 301)
        await ends_by(client, 1, ErrorCode.CANCEL)
        await until(lambda: edge.capacity.buffered_bytes == 0)


async def test_an_old_connection_is_drained_by_two_goaways_and_loses_no_call() -> None:
    async with serving(max_connection_age_s=100) as edge, connected(edge.server.port) as client:
        client.send(headers(1, pairs=to("Hold")), call(3))
        assert await client.status(3) == "0"
        (connection,) = edge.server.connections
        connection.check(monotonic() + 111)
        first = await client.next_of(frames.GOAWAY)
        assert first is not None
        assert (int.from_bytes(first.payload[:4], "big"), first.word) == (2**31 - 1, ErrorCode.NO_ERROR)
        ping = await client.next_of(frames.PING)
        assert ping is not None
        client.send(call(5))  # sent before the client has seen the first
        assert await client.status(5) == "0"
        client.send(encode_frame(frames.PING, frames.ACK, 0, ping.payload))
        second = await client.next_of(frames.GOAWAY)
        assert second is not None
        assert (int.from_bytes(second.payload[:4], "big"), second.word) == (5, ErrorCode.NO_ERROR)
        client.send(call(7))
        await ends_by(client, 7, ErrorCode.REFUSED_STREAM)
        edge.service.gate.set()
        assert await client.status(1) == "0"
        assert await client.next_of() is None


async def test_a_response_of_a_handler_that_ignores_its_end_is_not_sent() -> None:
    async with serving() as edge, connected(edge.server.port) as client:
        client.send(call(1, pairs=to("Wait")))
        await until(lambda: edge.service.running == 1)
        client.send(reset(1))
        await until(lambda: any(call.is_cancelled for call in edge.server.calls))
        edge.service.gate.set()
        await until(lambda: not edge.server.calls)
        client.send(call(3))
        while (frame := await client.next_of(frames.HEADERS)) is not None and frame.stream != 3:
            raise AssertionError("the cancelled call got a response")


# The end of the server


async def test_a_call_on_a_connection_that_the_client_has_only_just_made_when_the_server_stops_is_served() -> None:
    async with serving() as edge, connected(edge.server.port, greet=False) as client:
        await until(lambda: edge.server.connections)
        stopping = asyncio.ensure_future(edge.server.stop(30.0))
        first = await client.next_of(frames.GOAWAY)
        assert first is not None
        assert first.word == ErrorCode.NO_ERROR
        client.greet()
        client.send(call(1))
        assert await client.status(1) == "0"
        client.close()
        await stopping


async def test_a_connection_that_only_the_kernel_has_accepted_when_the_server_stops_is_told() -> None:
    async with serving() as edge:
        with socket.create_connection(("127.0.0.1", edge.server.port)) as client:  # the event loop has no turn meanwhile
            client.sendall(PREFACE + encode_settings({}) + call(1))
            stopping = asyncio.ensure_future(edge.server.stop(30.0))
            received = b""
            while b"grpc-status" not in received:
                more = await asyncio.to_thread(client.recv, 65536)
                assert more, "closed without a response"
                received += more
        await stopping


async def test_a_stop_lets_calls_finish_and_closes_the_connections() -> None:
    async with serving() as edge, connected(edge.server.port) as client:
        client.send(headers(1, pairs=to("Hold")), call(3))
        assert await client.status(3) == "0"
        stopping = asyncio.ensure_future(edge.server.stop(30.0))
        ping = await client.next_of(frames.PING)
        assert ping is not None
        client.send(encode_frame(frames.PING, frames.ACK, 0, ping.payload))
        edge.service.gate.set()
        assert await client.status(1) == "0"
        assert await client.next_of() is None
        assert edge.server.connections, "what a client still sends resets a connection that is closed, and it loses the response"
        client.send(encode_frame(frames.PING, 0, 0, bytes(8)))
        client.close()
        await stopping
        with pytest.raises(ConnectionError):
            await asyncio.open_connection("127.0.0.1", edge.server.port)


async def test_calls_that_outlast_a_stop_are_unavailable() -> None:
    async with serving() as edge, connected(edge.server.port) as client:
        client.send(headers(1, pairs=to("Hold")), call(3))
        assert await client.status(3) == "0"
        stopping = asyncio.ensure_future(edge.server.stop(0.05))
        received, _ = await client.response(1)
        assert (received["grpc-status"], received["grpc-message"]) == ("14", "the server is shutting down")
        await stopping
        assert not edge.server.calls


async def test_a_connection_whose_handshake_outlasts_the_stop_of_the_server_is_not_served() -> None:
    ours, theirs = tls_contexts()
    async with serving(tls=ours) as edge:
        received, sent = ssl.MemoryBIO(), ssl.MemoryBIO()
        client = theirs.wrap_bio(received, sent, server_hostname="127.0.0.1")
        reader, writer = await asyncio.open_connection("127.0.0.1", edge.server.port)
        with pytest.raises(ssl.SSLWantReadError):
            client.do_handshake()
        writer.write(sent.read())
        while True:
            received.write(await reader.read(2**16))
            with suppress(ssl.SSLWantReadError):
                client.do_handshake()
                break
        await edge.server.stop(30.0)
        client.write(PREFACE + encode_settings({}) + call(1, b"hello"))
        writer.write(sent.read())  # ends the handshake
        with suppress(ConnectionError):
            await asyncio.wait_for(reader.read(), 120)
        writer.close()


# Shared memory


async def test_a_large_message_is_received_into_shared_memory_and_given_back() -> None:
    with memory_folder() as folder, ExitStack() as stack:
        ours, theirs = SharedMemory(folder, 8 * MIB), SharedMemory(folder, MIB)
        stack.callback(ours.close)
        stack.callback(theirs.close)
        reader = ours.neighbour(theirs.token)
        assert reader is not None
        async with serving(memory=ours) as edge, connected(edge.server.port) as client:
            content = bytes(range(256)) * 2000
            client.send(headers(1, pairs=to("Lend")))
            parts = [message(content)[start : start + 16_000] for start in range(0, len(content) + 5, 16_000)]
            client.send(*(data(1, part, ends=part is parts[-1]) for part in parts))
            await until(lambda: bool(edge.service.lent))
            used = ours.used_bytes
            body = edge.service.lent[0]
            assert isinstance(body, memoryview)
            reference = ours.lend(body, len(content), reader)
            assert reference is not None
            assert ours.used_bytes == used, "it was copied"
            owner = theirs.neighbour(ours.token)
            assert owner is not None
            assert bytes(theirs.take(owner, reference) or b"") == content
            edge.service.lent.clear()
            del body
            edge.service.gate.set()
            assert await client.status(1) == "0"
            client.send(headers(3), *(data(3, part, ends=False) for part in parts[:-1]))
            ours.sweep()
            assert ours.used_bytes == 0
            await until(lambda: ours.used_bytes > 0)
            client.send(reset(3), call(5))
            assert await client.status(5) == "0"
            ours.sweep()
            assert ours.used_bytes == 0


async def test_a_large_message_of_a_call_that_is_reset_as_it_begins_is_given_back() -> None:
    gc.disable()
    try:
        with memory_folder() as folder, ExitStack() as stack:
            ours, theirs = SharedMemory(folder, 8 * MIB), SharedMemory(folder, MIB)
            stack.callback(ours.close)
            stack.callback(theirs.close)
            assert ours.neighbour(theirs.token) is not None
            async with serving(memory=ours) as edge, connected(edge.server.port) as client:
                begin, end = message(bytes(400_000))[:-1000], bytes(1000)
                client.send(
                    headers(1), *(data(1, begin[start : start + 16_000], ends=False) for start in range(0, len(begin), 16_000))
                )
                await until(lambda: ours.used_bytes > 0)
                client.send(data(1, end), reset(1), call(3))
                assert await client.status(3) == "0"
                ours.sweep()
                assert ours.used_bytes == 0
    finally:
        gc.enable()
