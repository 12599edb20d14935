"""Hostile and broken clients of the gRPC port, over raw sockets, against a server in a process of its own.

Whatever they send, the server serves the next client at once, and its memory does not grow by more than a bound.
"""

from __future__ import annotations

import gzip
import random
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import hpack
import pytest

from tests.support.waiting import WAIT_S, expiring

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST, SETTINGS, PUSH, PING, GOAWAY, WINDOW, CONTINUATION = range(10)
END_STREAM, END_HEADERS, PADDED, PRIORITY_FLAG = 1, 4, 8, 32
SERVICE = "/inference.GRPCInferenceService/"
MIB = 2**20
ROOT = Path(__file__).parents[2]


def frame(kind: int, flags: int, stream: int, payload: bytes = b"", length: int | None = None) -> bytes:
    size = len(payload) if length is None else length
    return struct.pack(">I", size)[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def fields(path: str = SERVICE + "ServerLive", *extra: tuple[str, str]) -> list[tuple[str, str]]:
    return [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", path),
        (":authority", "x"),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
        *extra,
    ]


def block(*pairs: tuple[str, str]) -> bytes:
    """An HPACK block without state: the same bytes on any connection."""
    encoder = hpack.Encoder()
    encoder.header_table_size = 0
    return bytes(encoder.encode(list(pairs or fields()), huffman=False))


def message(payload: bytes, *, flag: int = 0, length: int | None = None) -> bytes:
    return struct.pack(">BI", flag, len(payload) if length is None else length) + payload


class Client:
    """One connection, as broken as a test wants it."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=120)
        self._decoder = hpack.Decoder(max_header_list_size=MIB)
        self._decoder.max_allowed_table_size = 2**16
        self._data = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *unused: object) -> None:
        self.socket.close()

    def send(self, data: bytes) -> bool:
        """False if the server has closed on us, or does not read any more, which is its right."""
        try:
            self.socket.sendall(data)
        except (TimeoutError, ConnectionError):
            return False
        return True

    def is_closed_by_server(self, within_s: float = WAIT_S) -> bool:
        """Whether the server ends the connection, however late it gets to it."""
        self.socket.settimeout(within_s)
        try:
            while self.socket.recv(65_536):
                pass
        except TimeoutError:
            return False
        except OSError:
            return True
        return True

    def frames(self, within_s: float = WAIT_S) -> Iterator[tuple[int, int, int, bytes]]:
        """(kind, flags, stream, payload) until the server closes or is silent. Acknowledges settings and pings."""
        self.socket.settimeout(within_s)
        while True:
            while len(self._data) >= 9 and len(self._data) >= 9 + int.from_bytes(self._data[:3], "big"):
                size = int.from_bytes(self._data[:3], "big")
                kind, flags = self._data[3], self._data[4]
                stream = int.from_bytes(self._data[5:9], "big") & 0x7FFFFFFF
                payload, self._data = self._data[9 : 9 + size], self._data[9 + size :]
                if kind == SETTINGS and not flags & 1:
                    self.send(frame(SETTINGS, 1, 0))
                if kind == PING and not flags & 1:
                    self.send(frame(PING, 1, 0, payload))
                yield kind, flags, stream, payload
            try:
                more = self.socket.recv(65536)
            except (TimeoutError, ConnectionError):
                return
            if not more:
                return
            self._data += more

    def status_of(self, stream: int, within_s: float = WAIT_S) -> str:
        """`grpc-status` of one call; `rst N`, `http N` or `closed` if the server ended it otherwise."""
        for kind, flags, of, payload in self.frames(within_s):
            if kind == HEADERS:
                headers = {str(name): str(value) for name, value in self._decoder.decode(payload)}
                if of == stream and flags & END_STREAM:
                    return headers.get("grpc-status") or f"http {headers.get(':status')}"
            elif kind == RST and of == stream:
                return f"rst {int.from_bytes(payload, 'big')}"
        return "closed"


@dataclass(frozen=True, slots=True)
class Target:
    port: int
    process: subprocess.Popen[str]

    def connect(self, *, settings: bytes = b"", greet: bool = True) -> Client:
        client = Client(self.port)
        if greet:
            assert client.send(PREFACE + frame(SETTINGS, 0, 0, settings))
        return client

    def rss_bytes(self) -> int:
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
        raise AssertionError("the server is gone")

    def assert_serving(self) -> None:
        assert self.process.poll() is None, f"the server ended with status {self.process.returncode}"
        with self.connect() as client:
            client.send(frame(HEADERS, END_HEADERS, 1, block()) + frame(DATA, END_STREAM, 1, message(b"")))
            assert client.status_of(1) == "0"


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.integration.clients.edge_server"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert process.stdout is not None
    port = process.stdout.readline().strip()
    assert port, "the server did not start"
    target = Target(int(port), process)
    target.assert_serving()
    yield target
    process.communicate("", timeout=120)
    assert process.returncode == 0


# Bytes that are no HTTP/2, or not such as the standard allows


MALFORMED: dict[str, bytes] = {
    "an HTTP/1 request": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "a TLS hello": bytes.fromhex("16030100c8010000c40303") + bytes(200),
    "nothing but zeros": bytes(4096),
    "half a preface": PREFACE[:10],
    "a preface and garbage": PREFACE + bytes(range(256)) * 8,
    "a wrong preface": PREFACE.replace(b"2.0", b"9.9") + frame(SETTINGS, 0, 0),
}
BAD_FRAMES: dict[str, bytes] = {
    "settings of a wrong size": frame(SETTINGS, 0, 0, bytes(5)),
    "settings on a stream": frame(SETTINGS, 0, 1, bytes(6)),
    "an acknowledgement with content": frame(SETTINGS, 1, 0, bytes(6)),
    "a window above 2^31": frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 2**32 - 1)),
    "a frame size of 1": frame(SETTINGS, 0, 0, struct.pack(">HI", 5, 1)),
    "push enabled with 7": frame(SETTINGS, 0, 0, struct.pack(">HI", 2, 7)),
    "a header table of 4 GiB": frame(SETTINGS, 0, 0, struct.pack(">HI", 1, 2**32 - 1)),
    "a window update of 0": frame(WINDOW, 0, 0, bytes(4)),
    "a window update that overflows": frame(WINDOW, 0, 0, struct.pack(">I", 2**31 - 1)) * 2,
    "a window update of 3 bytes": frame(WINDOW, 0, 0, bytes(3)),
    "a ping of 7 bytes": frame(PING, 0, 0, bytes(7)),
    "a ping on a stream": frame(PING, 0, 3, bytes(8)),
    "data on stream 0": frame(DATA, 0, 0, b"x"),
    "data on an idle stream": frame(DATA, END_STREAM, 5, b"x"),
    "data padded beyond its end": frame(HEADERS, END_HEADERS, 1, block()) + frame(DATA, PADDED, 1, b"\xff"),
    "headers on stream 0": frame(HEADERS, END_HEADERS, 0, block()),
    "headers on an even stream": frame(HEADERS, END_HEADERS, 2, block()),
    "headers padded beyond their end": frame(HEADERS, END_HEADERS | PADDED, 1, b"\xff" + block()),
    "headers that depend on themselves": frame(HEADERS, END_HEADERS | PRIORITY_FLAG, 1, struct.pack(">IB", 1, 1) + block()),
    "headers cut in the priority": frame(HEADERS, END_HEADERS | PRIORITY_FLAG, 1, b"\0\0"),
    "a stream id that goes back": frame(HEADERS, END_HEADERS, 9, block()) + frame(HEADERS, END_HEADERS, 7, block()),
    "a priority of 4 bytes": frame(PRIORITY, 0, 1, bytes(4)),
    "a reset of 3 bytes": frame(RST, 0, 1, bytes(3)),
    "a reset of stream 0": frame(RST, 0, 0, bytes(4)),
    "a reset of an idle stream": frame(RST, 0, 77, bytes(4)),
    "a push promise": frame(PUSH, END_HEADERS, 1, struct.pack(">I", 2) + block()),
    "a goaway cut short": frame(GOAWAY, 0, 0, bytes(3)),
    "a continuation of nothing": frame(CONTINUATION, END_HEADERS, 1, block()),
    "data between headers and continuation": frame(HEADERS, 0, 1, block()[:5]) + frame(DATA, 0, 1, b"x"),
    "a continuation of another stream": frame(HEADERS, 0, 1, block()[:5]) + frame(CONTINUATION, END_HEADERS, 3, block()[5:]),
    "a frame of 16 MiB": frame(DATA, 0, 1, bytes(1000), length=2**24 - 1),
    "a frame of an unknown kind": frame(0xBA, 0xFF, 1, b"hello"),
    "an index beyond the header table": frame(HEADERS, END_HEADERS, 1, b"\xff\xff\xff\x0f"),
    "an integer without end in headers": frame(HEADERS, END_HEADERS, 1, b"\x7f" + b"\xff" * 60),
    "a header string longer than its frame": frame(HEADERS, END_HEADERS, 1, b"\x00\x7f\xff\xff\x03abc"),
    "Huffman code that ends nowhere": frame(HEADERS, END_HEADERS, 1, b"\x00\x84\xff\xff\xff\xff\x01a"),
    "a header table grown in the middle": frame(HEADERS, END_HEADERS, 1, block()[:4] + b"\x3f\xe1\xff\x03"),
}


@pytest.mark.parametrize("what", MALFORMED)
def test_bytes_that_are_not_http2_harm_no_other_call(target: Target, what: str) -> None:
    with target.connect(greet=False) as connection:
        connection.send(MALFORMED[what])
        target.assert_serving()


@pytest.mark.parametrize("what", BAD_FRAMES)
def test_an_invalid_frame_harms_no_other_connection(target: Target, what: str) -> None:
    with target.connect() as connection:
        connection.send(BAD_FRAMES[what])
        target.assert_serving()


@pytest.mark.parametrize("seed", range(20))
def test_random_frames_harm_no_other_connection(target: Target, seed: int) -> None:
    rng = random.Random(seed)
    with target.connect() as connection:
        for _ in range(300):
            kind, flags = rng.randrange(12), rng.randrange(256)
            stream = rng.choice([0, 1, 1, 3, 5, rng.randrange(2**31)])
            payload = rng.choice([rng.randbytes(rng.randrange(64)), block(), message(rng.randbytes(20))])
            if not connection.send(frame(kind, flags, stream, payload)):
                break
    target.assert_serving()


@pytest.mark.parametrize("seed", range(20))
def test_a_valid_call_with_flipped_bits_harms_no_other_connection(target: Target, seed: int) -> None:
    rng = random.Random(seed)
    good = bytearray(
        frame(HEADERS, END_HEADERS, 1, block(*fields(SERVICE + "ModelInfer")))
        + frame(DATA, END_STREAM, 1, message(b"\x0a\x05adder\x2a\x03\x0a\x01x"))
    )
    for _ in range(rng.randrange(1, 12)):
        good[rng.randrange(len(good))] ^= 1 << rng.randrange(8)
    with target.connect() as connection:
        connection.send(bytes(good))
    target.assert_serving()


# Well-formed HTTP/2 that is no proper gRPC


CALLS: dict[str, tuple[bytes, bytes, str]] = {
    # headers, data, grpc-status or what `status_of` has instead
    "an unknown method": (block(*fields(SERVICE + "Nothing")), message(b""), "12"),
    "an unknown service": (block(*fields("/no.Service/At")), message(b""), "12"),
    "a path of 10 kB": (block(*fields("/" + "x" * 10_000)), message(b""), "12"),
    "a path that is no text": (
        block().replace(SERVICE.encode(), SERVICE.replace("inference", "inf_rence").encode()).replace(b"_", b"\xe5"),
        message(b""),
        "closed",
    ),
    "a path without slash": (block(*fields("x")), message(b""), "12"),
    "the method GET": (
        block((":method", "GET"), *fields()[1:]),
        b"",
        "13",
    ),
    "another content type": (
        block(*fields()[:4], ("content-type", "text/html"), ("te", "trailers")),
        message(b""),
        "13",
    ),
    "what a browser sends for a page without a preflight": (
        block(
            *fields()[:4], ("content-type", "text/plain"), ("origin", "https://evil.example"), ("sec-fetch-site", "cross-site")
        ),
        message(b""),
        "13",
    ),
    "a time limit that is no number": (
        block(*fields(SERVICE + "ServerLive", ("grpc-timeout", "soon"))),
        message(b""),
        "3",
    ),
    "a time limit of 10^11 hours": (
        block(*fields(SERVICE + "ServerLive", ("grpc-timeout", "99999999999H"))),
        message(b""),
        "3",
    ),
    "a time limit of 0": (
        block(*fields(SERVICE + "ServerLive", ("grpc-timeout", "0n"))),
        message(b""),
        "4",
    ),
    "binary metadata that is no base64": (
        block(*fields(SERVICE + "ServerLive", ("x-blob-bin", "!!!"))),
        message(b""),
        "3",
    ),
    "no message at all": (block(), b"", "12"),
    "half a message": (block(), message(b"", length=10), "3"),
    "two messages": (block(), message(b"") * 2, "12"),
    "a compressed message without encoding": (block(), message(b"abc", flag=1), "3"),
    "a message with a strange flag": (block(), message(b"abc", flag=0x7F), "3"),
    "an unknown encoding": (
        block(*fields(SERVICE + "ServerLive", ("grpc-encoding", "zip9"))),
        message(b"abc", flag=1),
        "12",
    ),
    "gzip that is none": (
        block(*fields(SERVICE + "ServerLive", ("grpc-encoding", "gzip"))),
        message(b"abc", flag=1),
        "3",
    ),
    "a message above the limit": (
        block(*fields(SERVICE + "ModelInfer")),
        message(b"", length=2**32 - 1) + b"x" * 1000,
        "8",
    ),
}


@pytest.mark.parametrize("what", CALLS)
def test_a_call_that_is_no_grpc_gets_an_error_and_the_connection_lives_on(target: Target, what: str) -> None:
    headers, data, expected = CALLS[what]
    with target.connect() as connection:
        connection.send(frame(HEADERS, END_HEADERS, 1, headers) + frame(DATA, END_STREAM, 1, data))
        assert connection.status_of(1) == expected
        connection.send(frame(HEADERS, END_HEADERS, 3, block()) + frame(DATA, END_STREAM, 3, message(b"")))
        assert connection.status_of(3) == ("closed" if expected == "closed" else "0")
    target.assert_serving()


# Floods: what is cheap to send must not be dear to keep


def assert_bounded(target: Target, bound_bytes: int, attack: Callable[[], None]) -> None:
    before = target.rss_bytes()
    attack()
    grown = target.rss_bytes() - before
    target.assert_serving()
    assert grown < bound_bytes, f"the server grew by {grown / MIB:.0f} MiB"


def test_headers_of_a_mebibyte_are_refused(target: Target) -> None:
    huge = block(*fields(SERVICE + "ServerLive", *((f"x-{number}", "v" * 4000) for number in range(260))))

    def attack() -> None:
        with target.connect() as connection:
            data = frame(HEADERS, 0, 1, huge[:16384])
            for offset in range(16384, len(huge), 16384):
                last = offset + 16384 >= len(huge)
                data += frame(CONTINUATION, END_HEADERS if last else 0, 1, huge[offset : offset + 16384])
            connection.send(data + frame(DATA, END_STREAM, 1, message(b"")))
            assert connection.status_of(1) == "closed"

    assert_bounded(target, 32 * MIB, attack)


@pytest.mark.slow
def test_headers_that_unpack_to_a_hundred_mebibytes_are_refused(target: Target) -> None:
    """One large header goes into the dynamic table, then each byte refers to it."""
    bomb = block() + b"\x40\x01x" + b"\x7f\xa1\x1f" + b"v" * 4000 + b"\xbe" * 14_000

    def attack() -> None:
        with target.connect() as connection:
            for stream in range(1, 41, 2):
                if not connection.send(frame(HEADERS, END_HEADERS, stream, bomb[:16384])):
                    break
            assert connection.status_of(1) != "0"

    assert_bounded(target, 64 * MIB, attack)


def test_continuations_without_end_are_cut_off(target: Target) -> None:
    def attack() -> None:
        with target.connect() as connection:
            connection.send(frame(HEADERS, 0, 1, block()))
            chunk = frame(CONTINUATION, 0, 1, b"\x00\x01x\x7f\x00" + b"v" * 127) * 1000
            for _ in range(200):
                if not connection.send(chunk):
                    return
            empty = frame(CONTINUATION, 0, 1) * 10_000
            for _ in range(50):
                if not connection.send(empty):
                    return
            assert connection.is_closed_by_server(), "a header block of any length is taken"

    assert_bounded(target, 64 * MIB, attack)


def test_rapid_resets_leave_it_serving(target: Target) -> None:
    opened = frame(HEADERS, END_HEADERS | END_STREAM, 0, block(*fields(SERVICE + "ModelStreamInfer")))

    def attack() -> None:
        for _ in range(4):
            with target.connect() as connection:
                for stream in range(1, 20_001, 2):
                    start = opened[:5] + struct.pack(">I", stream) + opened[9:]
                    if not connection.send(start + frame(RST, 0, stream, struct.pack(">I", 8))):
                        break

    assert_bounded(target, 64 * MIB, attack)


def test_pings_and_settings_with_unread_responses_do_not_pile_up(target: Target) -> None:
    def attack() -> None:
        for flood in (frame(PING, 0, 0, bytes(8)), frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 70_000))):
            with target.connect() as connection:
                connection.socket.settimeout(expiring(1.0))
                for _ in range(500):
                    if not connection.send(flood * 1000):
                        break

    assert_bounded(target, 64 * MIB, attack)


def test_streams_above_the_limit_are_refused(target: Target) -> None:
    """Calls that never end: as many as are allowed are kept, the others refused, and other connections served."""
    start = block(*fields(SERVICE + "ModelStreamInfer"))

    def attack() -> None:
        with target.connect() as connection:
            for stream in range(1, 6001, 2):
                if not connection.send(frame(HEADERS, END_HEADERS, stream, start)):
                    break
            target.assert_serving()

    assert_bounded(target, 128 * MIB, attack)


def test_messages_begun_and_not_ended_are_bounded(target: Target) -> None:
    """Each call announces 4 MiB and sends what its window allows."""
    start = block(*fields(SERVICE + "ModelInfer"))

    def attack() -> None:
        with target.connect() as connection:
            connection.socket.settimeout(expiring(1.0))
            for stream in range(1, 401, 2):
                data = frame(HEADERS, END_HEADERS, stream, start) + frame(DATA, 0, stream, message(b"", length=4 * MIB))
                if not connection.send(data + frame(DATA, 0, stream, bytes(16_000)) * 4):
                    break
            target.assert_serving()

    assert_bounded(target, 128 * MIB, attack)


def pour(client: Client, headers: bytes, body: Iterator[bytes], most_bytes: int) -> int:
    """Sends one message as fast as the windows allow, until the server ends the call; how many bytes that were."""
    client.send(frame(HEADERS, END_HEADERS, 1, headers))
    connection, stream, sent = 65_535, 65_535, 0
    for kind, flags, of, payload in client.frames():
        if kind == SETTINGS and not flags & 1:
            for offset in range(0, len(payload), 6):
                key, value = struct.unpack(">HI", payload[offset : offset + 6])
                stream += value - 65_535 if key == 4 else 0
        elif kind == WINDOW:
            size = int.from_bytes(payload, "big")
            connection, stream = (connection + size, stream) if of == 0 else (connection, stream + size)
        elif kind in (RST, GOAWAY) or (kind == HEADERS and of == 1):
            break
        while min(connection, stream) >= 16_000 and sent < most_bytes and (chunk := next(body, None)) is not None:
            if not client.send(frame(DATA, 0, 1, chunk)):
                return sent
            connection, stream, sent = connection - len(chunk), stream - len(chunk), sent + len(chunk)
    return sent


def test_a_message_above_the_limit_is_cut_off_while_it_arrives(target: Target) -> None:
    def chunks() -> Iterator[bytes]:
        yield message(b"", length=256 * MIB) + bytes(15_000)
        while True:
            yield bytes(16_000)

    with target.connect() as connection:
        before = target.rss_bytes()
        sent = pour(connection, block(*fields(SERVICE + "ModelInfer")), chunks(), 200 * MIB)
        grown = target.rss_bytes() - before
    target.assert_serving()
    assert sent < 32 * MIB
    assert grown < 64 * MIB


@pytest.mark.slow
def test_a_gzip_bomb_does_not_unpack(target: Target) -> None:
    bomb = message(gzip.compress(bytes(512 * MIB), 6), flag=1)
    headers = block(*fields(SERVICE + "ModelInfer", ("grpc-encoding", "gzip")))

    def attack() -> None:
        with target.connect() as connection:
            chunks = (bomb[offset : offset + 16_000] for offset in range(0, len(bomb), 16_000))
            pour(connection, headers, chunks, len(bomb))

    assert_bounded(target, 128 * MIB, attack)


def test_a_client_that_does_not_read_delays_no_other(target: Target) -> None:
    """It asks for large answers with a window of 0 and never opens it."""
    request = b"\x0a\x05adder\x2a\x13\x0a\x01x\x12\x05INT32\x1a\x03\x80\x80\x04\x3a\x80\x80\x10" + bytes(2**18)
    start = frame(HEADERS, END_HEADERS, 0, block(*fields(SERVICE + "ModelInfer")))

    def attack() -> None:
        with target.connect(settings=struct.pack(">HI", 4, 0)) as connection:
            connection.socket.settimeout(expiring(1.0))
            body = message(request)
            for stream in range(1, 41, 2):
                data = start[:5] + struct.pack(">I", stream) + start[9:]
                for offset in range(0, len(body), 16_384):
                    last = offset + 16_384 >= len(body)
                    data += frame(DATA, END_STREAM if last else 0, stream, body[offset : offset + 16_384])
                if not connection.send(data):
                    break
            target.assert_serving()

    assert_bounded(target, 256 * MIB, attack)


def test_silent_connections_delay_no_other(target: Target) -> None:
    silent = [target.connect(greet=number % 2 == 0) for number in range(300)]
    try:
        target.assert_serving()
    finally:
        for connection in silent:
            connection.socket.close()
    target.assert_serving()
