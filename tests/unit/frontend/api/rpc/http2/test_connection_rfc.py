"""The rules of RFC 9113 and RFC 7541 that a server enforces, case by case, in the order of h2spec's list."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import pytest

from dynamo.frontend.api.rpc.http2 import frames
from dynamo.frontend.api.rpc.http2.frames import ErrorCode, encode_frame, encode_settings
from dynamo.frontend.api.rpc.server import serve_grpc
from dynamo.frontend.config import GrpcOptions
from tests.support.grpc_operations import ECHO
from tests.support.http2 import block, call, connected, data, fields, headers, message

PROTOCOL, SIZE, FLOW = ErrorCode.PROTOCOL_ERROR, ErrorCode.FRAME_SIZE_ERROR, ErrorCode.FLOW_CONTROL_ERROR
CLOSED, COMPRESSION = ErrorCode.STREAM_CLOSED, ErrorCode.COMPRESSION_ERROR
END, END_HEADERS = frames.END_STREAM, frames.END_HEADERS


def window(stream: int, more: int) -> bytes:
    return encode_frame(frames.WINDOW_UPDATE, 0, stream, struct.pack(">I", more))


def reset(stream: int) -> bytes:
    return encode_frame(frames.RST_STREAM, 0, stream, bytes(4))


def setting(key: int, value: int) -> bytes:
    return encode_settings({key: value})


def extra(*pairs: tuple[str, str]) -> list[tuple[str, str]]:
    return fields("/test.Echo/Say", *pairs)


@dataclass(frozen=True)
class Goaway:
    """The connection ends with this code."""

    code: ErrorCode


@dataclass(frozen=True)
class Reset:
    """Stream 1 ends with this code; the next call on the connection is served."""

    code: ErrorCode


SERVED = None
"""Stream 1 is served."""

CASES: dict[str, tuple[bytes, Goaway | Reset | None]] = {
    # 4.1 frames
    "a frame of an unknown kind is ignored": (encode_frame(0x16, 0, 0, bytes(8)) + call(1), SERVED),
    "undefined flags are ignored": (encode_frame(frames.PING, 0x16, 0, bytes(8)) + call(1), SERVED),
    "the reserved bit of a stream is ignored": (encode_frame(frames.PING, 0, 2**31, bytes(8)) + call(1), SERVED),
    "a large unknown frame is ignored": (encode_frame(0x16, 0, 0, bytes(100_000)) + call(1), SERVED),
    # 4.3 header compression
    "an invalid header block": (encode_frame(frames.HEADERS, END_HEADERS, 1, b"\0\xff\xff\xff\xff\xff"), Goaway(COMPRESSION)),
    "PRIORITY within a header block": (
        headers(1, flags=0) + encode_frame(frames.PRIORITY, 0, 1, b"\0\0\0\3\0"),
        Goaway(PROTOCOL),
    ),
    "HEADERS of another stream within a header block": (headers(1, flags=0) + headers(3), Goaway(PROTOCOL)),
    "an unknown frame within a header block": (headers(1, flags=0) + encode_frame(0x16, 0, 1), Goaway(PROTOCOL)),
    # 5.1 stream states
    "DATA on an idle stream": (data(1, b"x"), Goaway(PROTOCOL)),
    "RST_STREAM on an idle stream": (reset(1), Goaway(PROTOCOL)),
    "WINDOW_UPDATE on an idle stream": (window(1, 100), Goaway(PROTOCOL)),
    "CONTINUATION on an idle stream": (encode_frame(frames.CONTINUATION, END_HEADERS, 1, block()), Goaway(PROTOCOL)),
    "DATA on a half-closed stream": (call(1) + data(1, b"x"), Reset(CLOSED)),
    "HEADERS on a half-closed stream": (call(1) + headers(1, flags=END | END_HEADERS), Goaway(CLOSED)),
    "CONTINUATION on a half-closed stream": (
        call(1) + encode_frame(frames.CONTINUATION, END_HEADERS, 1, block()),
        Goaway(PROTOCOL),
    ),
    "DATA after RST_STREAM": (headers(1) + reset(1) + data(1, b"x"), Reset(CLOSED)),
    "HEADERS after RST_STREAM": (headers(1) + reset(1) + headers(1, flags=END | END_HEADERS), Goaway(CLOSED)),
    "an even stream": (headers(2), Goaway(PROTOCOL)),
    "a stream lower than the last": (headers(5) + headers(3), Goaway(CLOSED)),
    "WINDOW_UPDATE on a half-closed stream": (call(1) + window(1, 9), SERVED),
    # 5.3 priority
    "HEADERS that depend on themselves": (
        encode_frame(frames.HEADERS, END_HEADERS | frames.HAS_PRIORITY, 1, b"\0\0\0\1\0" + block()),
        Goaway(PROTOCOL),
    ),
    "PRIORITY that depends on itself": (encode_frame(frames.PRIORITY, 0, 1, b"\0\0\0\1\0"), Goaway(PROTOCOL)),
    "PRIORITY of an idle stream": (encode_frame(frames.PRIORITY, 0, 1, b"\0\0\0\7\0") + call(1), SERVED),
    "HEADERS with a priority": (
        encode_frame(frames.HEADERS, END_HEADERS | frames.HAS_PRIORITY, 1, b"\x80\0\0\0\xff" + block()) + data(1, message(b"")),
        SERVED,
    ),
    # 6.1 DATA
    "DATA on stream 0": (data(0, b"x"), Goaway(PROTOCOL)),
    "DATA with padding": (headers(1) + encode_frame(frames.DATA, END | frames.PADDED, 1, b"\3" + message(b"") + b"xyz"), SERVED),
    "DATA with too much padding": (headers(1) + encode_frame(frames.DATA, END | frames.PADDED, 1, b"\6abcde"), Goaway(PROTOCOL)),
    # 6.2 HEADERS
    "HEADERS on stream 0": (headers(0), Goaway(PROTOCOL)),
    "HEADERS with padding": (
        encode_frame(frames.HEADERS, END_HEADERS | frames.PADDED, 1, b"\2" + block() + b"xy") + data(1, message(b"")),
        SERVED,
    ),
    "HEADERS with too much padding": (
        encode_frame(frames.HEADERS, END_HEADERS | frames.PADDED, 1, b"\xff" + block()),
        Goaway(PROTOCOL),
    ),
    "HEADERS that end in the priority": (
        encode_frame(frames.HEADERS, END_HEADERS | frames.HAS_PRIORITY, 1, b"\0\0"),
        Goaway(SIZE),
    ),
    # 6.3 PRIORITY, 6.4 RST_STREAM
    "PRIORITY on stream 0": (encode_frame(frames.PRIORITY, 0, 0, bytes(5)), Goaway(PROTOCOL)),
    "PRIORITY of 4 bytes": (encode_frame(frames.PRIORITY, 0, 1, bytes(4)), Goaway(SIZE)),
    "RST_STREAM on stream 0": (reset(0), Goaway(PROTOCOL)),
    "RST_STREAM of 3 bytes": (headers(1) + encode_frame(frames.RST_STREAM, 0, 1, bytes(3)), Goaway(SIZE)),
    # 6.5 SETTINGS
    "an acknowledgement with content": (encode_frame(frames.SETTINGS, frames.ACK, 0, b"x"), Goaway(SIZE)),
    "SETTINGS on a stream": (encode_frame(frames.SETTINGS, 0, 1), Goaway(PROTOCOL)),
    "SETTINGS of 3 bytes": (encode_frame(frames.SETTINGS, 0, 0, bytes(3)), Goaway(SIZE)),
    "ENABLE_PUSH of 2": (setting(frames.ENABLE_PUSH, 2), Goaway(PROTOCOL)),
    "a window above 2^31-1": (setting(frames.INITIAL_WINDOW_SIZE, 2**31), Goaway(FLOW)),
    "a frame size below 2^14": (setting(frames.MAX_FRAME_SIZE, 2**14 - 1), Goaway(PROTOCOL)),
    "a frame size above 2^24-1": (setting(frames.MAX_FRAME_SIZE, 2**24), Goaway(PROTOCOL)),
    "an unknown setting is ignored": (setting(0xFF, 1) + call(1), SERVED),
    # 6.6 PUSH_PROMISE, 6.7 PING, 6.8 GOAWAY
    "PUSH_PROMISE": (encode_frame(frames.PUSH_PROMISE, END_HEADERS, 1, bytes(4) + block()), Goaway(PROTOCOL)),
    "PING on a stream": (encode_frame(frames.PING, 0, 1, bytes(8)), Goaway(PROTOCOL)),
    "PING of 6 bytes": (encode_frame(frames.PING, 0, 0, bytes(6)), Goaway(SIZE)),
    "PING acknowledgements that are not waited for": (encode_frame(frames.PING, frames.ACK, 0, bytes(8)) + call(1), SERVED),
    "GOAWAY on a stream": (encode_frame(frames.GOAWAY, 0, 1, bytes(8)), Goaway(PROTOCOL)),
    "GOAWAY cut short": (encode_frame(frames.GOAWAY, 0, 0, bytes(4)), Goaway(SIZE)),
    "GOAWAY before a call": (encode_frame(frames.GOAWAY, 0, 0, bytes(8)) + call(1), SERVED),
    # 6.9 WINDOW_UPDATE
    "a window that grows by 0": (window(0, 0), Goaway(PROTOCOL)),
    "a stream's window that grows by 0": (headers(1) + window(1, 0), Reset(PROTOCOL)),
    "WINDOW_UPDATE of 3 bytes": (encode_frame(frames.WINDOW_UPDATE, 0, 0, bytes(3)), Goaway(SIZE)),
    "a window that overflows": (window(0, 2**31 - 1), Goaway(FLOW)),
    "a stream's window that overflows": (headers(1) + window(1, 2**31 - 1), Reset(FLOW)),
    # 6.10 CONTINUATION
    "a header block in three frames": (
        headers(1, flags=0)[:9].replace(len(block()).to_bytes(3, "big"), b"\0\0\4", 1)
        + block()[:4]
        + encode_frame(frames.CONTINUATION, 0, 1, block()[4:7])
        + encode_frame(frames.CONTINUATION, END_HEADERS, 1, block()[7:])
        + data(1, message(b"")),
        SERVED,
    ),
    "DATA within a header block": (headers(1, flags=0) + data(1, b""), Goaway(PROTOCOL)),
    "CONTINUATION on stream 0": (headers(1, flags=0) + encode_frame(frames.CONTINUATION, END_HEADERS, 0), Goaway(PROTOCOL)),
    "CONTINUATION after the end of the block": (headers(1) + encode_frame(frames.CONTINUATION, 0, 1), Goaway(PROTOCOL)),
    # 8.1 requests
    "HEADERS again without the end of the stream": (headers(1) + headers(1), Reset(PROTOCOL)),
    "pseudo-headers in trailers": (headers(1) + headers(1, flags=END | END_HEADERS), Reset(PROTOCOL)),
    "trailers": (
        headers(1) + data(1, message(b""), ends=False) + headers(1, flags=END | END_HEADERS, pairs=[("x-sum", "1")]),
        SERVED,
    ),
    "a name with an upper-case letter": (call(1, pairs=extra(("X-Test", "ok"))), Reset(PROTOCOL)),
    "an unknown pseudo-header": (call(1, pairs=[(":test", "ok"), *fields()]), Reset(PROTOCOL)),
    "a pseudo-header of responses": (call(1, pairs=[(":status", "200"), *fields()]), Reset(PROTOCOL)),
    "a pseudo-header after others": (call(1, pairs=[*fields()[1:], (":method", "POST")]), Reset(PROTOCOL)),
    "a header of the connection": (call(1, pairs=extra(("connection", "keep-alive"))), Reset(PROTOCOL)),
    "te other than trailers": (call(1, pairs=[*fields()[:4], ("te", "gzip"), fields()[5]]), Reset(PROTOCOL)),
    "no :path": (call(1, pairs=[*fields()[:2], *fields()[3:]]), Reset(PROTOCOL)),
    "an empty :path": (call(1, pairs=fields("")), Reset(PROTOCOL)),
    "no :method": (call(1, pairs=fields()[1:]), Reset(PROTOCOL)),
    "no :scheme": (call(1, pairs=[fields()[0], *fields()[2:]]), Reset(PROTOCOL)),
    ":method twice": (call(1, pairs=[fields()[0], *fields()]), Reset(PROTOCOL)),
    "a content-length that is too small": (call(1, b"abc", pairs=extra(("content-length", "1"))), Reset(PROTOCOL)),
    "a content-length that is too large": (call(1, b"abc", pairs=extra(("content-length", "100"))), Reset(PROTOCOL)),
    "the right content-length": (call(1, b"abc", pairs=extra(("content-length", "8"))), SERVED),
    # RFC 7541
    "an index of 0": (encode_frame(frames.HEADERS, END_HEADERS, 1, block() + b"\x80"), Goaway(COMPRESSION)),
    "an index beyond the table": (encode_frame(frames.HEADERS, END_HEADERS, 1, block() + b"\xc6"), Goaway(COMPRESSION)),
    "a table size at the end of a block": (encode_frame(frames.HEADERS, END_HEADERS, 1, block() + b"\x20"), Goaway(COMPRESSION)),
    "a table size above the limit": (
        encode_frame(frames.HEADERS, END_HEADERS, 1, b"\x3f\xe2\x1f" + block()),
        Goaway(COMPRESSION),
    ),
    "Huffman code padded by more than 7 bits": (
        encode_frame(frames.HEADERS, END_HEADERS, 1, block() + b"\0\x85\xf2\xb2\x4a\x84\xff\x84\x49\x50\x9f\xff"),
        Goaway(COMPRESSION),
    ),
    "Huffman code padded by zeros": (
        encode_frame(frames.HEADERS, END_HEADERS, 1, block() + b"\0\x85\xf2\xb2\x4a\x84\xff\x83\x49\x50\x90"),
        Goaway(COMPRESSION),
    ),
    "Huffman code with an end of string": (
        encode_frame(frames.HEADERS, END_HEADERS, 1, block() + b"\0\x85\xf2\xb2\x4a\x87\xff\xff\xff\xff\xff\xff\xff"),
        Goaway(COMPRESSION),
    ),
}


@pytest.mark.parametrize("case", CASES)
async def test_a_rule_of_the_standard(case: str) -> None:
    sent, expected = CASES[case]
    async with serve_grpc(GrpcOptions(port=0), ECHO) as server, connected(server.port) as client:
        client.send(sent)
        match expected:
            case None:
                assert await client.status(1) == "0"
            case Reset(code):
                await _ends_by_reset(client.next_of(frames.RST_STREAM), code)
                client.send(call(7))
                assert await client.status(7) == "0"
            case Goaway(code):
                frame = await client.next_of(frames.GOAWAY)
                assert frame is not None, "the connection ended without GOAWAY"
                assert frame.word == code
                assert await client.next_of() is None


async def _ends_by_reset(frame_coming: object, code: ErrorCode) -> None:
    frame = await frame_coming  # type: ignore[misc]
    assert frame is not None, "the connection ended"
    assert (frame.stream, frame.word) == (1, code)


@pytest.mark.parametrize("first", [b"", encode_frame(frames.PING, 0, 0, bytes(8)), encode_frame(frames.SETTINGS, frames.ACK, 0)])
async def test_the_first_frame_is_settings(first: bytes) -> None:
    async with serve_grpc(GrpcOptions(port=0), ECHO) as server, connected(server.port, greet=False) as client:
        client.send(frames.PREFACE, first or call(1))
        frame = await client.next_of(frames.GOAWAY)
        assert frame is not None
        assert frame.word == PROTOCOL


async def test_a_wrong_preface_ends_the_connection() -> None:
    async with serve_grpc(GrpcOptions(port=0), ECHO) as server, connected(server.port, greet=False) as client:
        client.send(b"INVALID CONNECTION PREFACE\r\n\r\n")
        frame = await client.next_of(frames.GOAWAY)
        assert frame is not None
        assert await client.next_of() is None


async def test_settings_and_pings_are_acknowledged() -> None:
    async with serve_grpc(GrpcOptions(port=0), ECHO) as server, connected(server.port) as client:
        client.send(encode_frame(frames.PING, 0, 0, b"12345678"))
        kinds = []
        while (frame := await client.frame()) is not None:
            kinds.append((frame.kind, frame.flags))
            if frame.kind == frames.PING:
                break
        assert (frames.SETTINGS, frames.ACK) in kinds
        assert frame is not None
        assert frame.payload == b"12345678"


@pytest.mark.parametrize("windows", [(0, 1), (1, 3), (3, 65_535)])
async def test_a_response_keeps_to_windows_that_change(windows: tuple[int, int]) -> None:
    """RFC 9113, 6.9.2: a window may become negative, and grows by updates and settings."""
    first, second = windows
    settings = {frames.INITIAL_WINDOW_SIZE: first}
    async with serve_grpc(GrpcOptions(port=0), ECHO) as server, connected(server.port, settings) as client:
        client.send(call(1, b"hello"))
        received = b""
        if first:
            frame = await client.next_of(frames.DATA)
            assert frame is not None
            assert len(frame.payload) == first
            received = frame.payload
        client.send(setting(frames.INITIAL_WINDOW_SIZE, second))
        client.send(*(window(1, 1) for _ in range(10)))
        _, rest = await client.response(1)
        assert received + rest == message(b"hello")


async def test_a_window_that_grows_by_settings_is_used_behind_their_acknowledgement() -> None:
    """RFC 9113, 6.5.3. gRPC's clients, whose estimates of bandwidth grow, end a stream that uses it before."""
    settings = {frames.INITIAL_WINDOW_SIZE: 1}
    async with serve_grpc(GrpcOptions(port=0), ECHO) as server, connected(server.port, settings) as client:
        client.send(call(1, b"hello"))
        assert await client.next_of(frames.DATA) is not None
        client.send(setting(frames.INITIAL_WINDOW_SIZE, 65_535))
        frame = await client.frame()
        assert frame is not None
        assert (frame.kind, frame.flags) == (frames.SETTINGS, frames.ACK)
        _, rest = await client.response(1)
        assert rest == message(b"hello")[1:]
