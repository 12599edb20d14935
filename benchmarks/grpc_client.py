"""A gRPC client that costs little, so that a benchmark measures the server and not its own client.

It speaks just enough HTTP/2 for unary calls, for streaming calls that send one message, whose requests are two frames made of
prepared bytes, and for those that send small messages one by one. Of a response it reads the frame headers, the message lengths
and the status.
"""

from __future__ import annotations

import asyncio
import struct
import time
from collections import deque
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import unquote

import hpack

_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _GOAWAY, _WINDOW, _CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
_ACK = END_STREAM = 1
_END_HEADERS, _PADDED, _PRIORITY = 4, 8, 32
_LARGEST_WINDOW = 2**31 - 1
_MAX_FRAME = 2**20
_GRANT_BYTES = 2**26


@dataclass(slots=True)
class Reply:
    """How one call went. Times are of `time.perf_counter`; `status` is gRPC's, -1 if the connection broke."""

    sent_at: float
    done: asyncio.Future[None]
    first_at: float = 0.0
    ended_at: float = 0.0
    status: int = -1
    detail: str = ""
    messages: int = 0
    body_bytes: int = 0
    body: bytearray | None = None
    """The raw response with gRPC's message prefixes, if the caller wanted it."""
    _missing: int = 0
    _prefix: bytes = b""

    def feed(self, data: memoryview) -> None:
        """Counts messages in the next bytes of the response."""
        self.body_bytes += len(data)
        if self.body is not None:
            self.body += data
        if not self._missing and not self._prefix and len(data) == 5 + int.from_bytes(data[1:5], "big"):
            self.messages += 1  # the frame is one message, as most are
            return
        while len(data):
            if self._missing:
                size = min(self._missing, len(data))
                self._missing -= size
                data = data[size:]
                if not self._missing:
                    self.messages += 1
            else:
                size = 5 - len(self._prefix)
                self._prefix += bytes(data[:size])
                data = data[size:]
                if len(self._prefix) == 5:
                    self._missing = int.from_bytes(self._prefix[1:], "big")
                    self._prefix = b""
                    if not self._missing:
                        self.messages += 1


@dataclass(slots=True)
class Stream(Reply):
    """A call to which more than one message is sent; `number` names it on its connection."""

    number: int = field(kw_only=True)


@dataclass(slots=True)
class _Upload:
    stream: int
    body: memoryview
    window: int


_HEAD = struct.Struct(">HBBBI")
"""Head of a frame: its size's upper 16 bits and lower 8, kind, flags and stream."""


def _frame(kind: int, flags: int, stream: int, size: int) -> bytes:
    return _HEAD.pack(size >> 8, size & 255, kind, flags, stream)


def _literal(text: str) -> bytes:
    raw = text.encode()
    if len(raw) > 126:
        raise ValueError("header too long for this client")
    return bytes((len(raw),)) + raw


def request_headers(path: str, authority: str) -> bytes:
    """A header block that leaves the server's compression state alone, so that the same bytes serve every request."""
    return b"".join(
        (
            b"\x83\x86",  # :method POST, :scheme http
            b"\x04" + _literal(path),
            b"\x01" + _literal(authority),
            b"\x0f\x10" + _literal("application/grpc"),
            b"\x00" + _literal("te") + _literal("trailers"),
        )
    )


def message(payload: bytes) -> bytes:
    """A payload with gRPC's prefix."""
    return b"\0" + struct.pack(">I", len(payload)) + payload


class GrpcConnection(asyncio.Protocol):
    """One HTTP/2 connection. Make it with `connect`."""

    def __init__(self) -> None:
        self._replies: dict[int, Reply] = {}
        self._received = bytearray()
        self._next_stream = 1
        self._window = 65_535
        self._stream_window = 65_535
        self._frame_bytes = 16_384
        self._uploads: deque[_Upload] = deque()
        self._consumed = 0
        self._header_parts = bytearray()
        self._decoder = hpack.Decoder()
        self._known_headers: dict[bytes, dict[str, str]] = {}
        """Header blocks that are references into the server's table, as most are, since the table last changed."""
        self.broken = ""
        """Why the connection cannot be used any more."""

    def call(self, headers: bytes, body: bytes, *, keep: bool = False) -> Reply:
        """Sends one request; await `reply.done`."""
        reply = Reply(time.perf_counter(), asyncio.get_running_loop().create_future(), body=bytearray() if keep else None)
        if self.broken:
            self._end(reply, -1, self.broken)
            return reply
        stream = self._next_stream
        self._next_stream += 2
        self._replies[stream] = reply
        head = _frame(_HEADERS, _END_HEADERS, stream, len(headers)) + headers
        size = len(body)
        if size <= min(self._frame_bytes, self._window, self._stream_window) and not self._uploads:
            self._window -= size
            self._transport.write(b"".join((head, _frame(_DATA, END_STREAM, stream, size), body)))
        else:
            self._transport.write(head)
            self._uploads.append(_Upload(stream, memoryview(body), self._stream_window))
            self._upload()
        return reply

    def begin(self, headers: bytes) -> Stream:
        """Begin a call to which messages are sent one after the other."""
        reply = Stream(time.perf_counter(), asyncio.get_running_loop().create_future(), number=self._next_stream)
        self._next_stream += 2
        self._replies[reply.number] = reply
        self._transport.write(_frame(_HEADERS, _END_HEADERS, reply.number, len(headers)) + headers)
        return reply

    def send(self, stream: Stream, body: bytes, *, ends: bool = False) -> None:
        """Send a message of such a call, or `ends` it without one. It has to fit into a frame and the windows."""
        self._window -= len(body)
        self._transport.write(_frame(_DATA, END_STREAM if ends else 0, stream.number, len(body)) + body)

    def close(self) -> None:
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        settings = struct.pack(">HIHI", 4, _LARGEST_WINDOW, 5, _MAX_FRAME)
        grant = struct.pack(">I", _LARGEST_WINDOW - 65_535)
        self._transport.write(
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
            + _frame(_SETTINGS, 0, 0, len(settings))
            + settings
            + _frame(_WINDOW, 0, 0, 4)
            + grant
        )

    def connection_lost(self, exc: Exception | None) -> None:
        self.broken = self.broken or f"connection lost: {exc}"
        for reply in list(self._replies.values()):
            self._end(reply, -1, self.broken)
        self._replies.clear()

    def data_received(self, data: bytes) -> None:
        received: bytes | bytearray = data
        if self._received:
            self._received += data
            received = self._received
        view, end, position = memoryview(received), len(received), 0
        while end - position >= 9:
            upper, lower, kind, flags, stream = _HEAD.unpack_from(received, position)
            begin = position + 9
            if end - begin < (size := upper << 8 | lower):
                break
            position = begin + size
            self._on_frame(kind, flags, stream & _LARGEST_WINDOW, view[begin:position])
        if position or received is data:
            self._received = bytearray(view[position:])

    def _on_frame(self, kind: int, flags: int, stream: int, payload: memoryview) -> None:
        if kind == _DATA:
            self._on_data(stream, flags, payload)
        elif kind in (_HEADERS, _CONTINUATION):
            self._on_headers(kind, stream, flags, payload)
        elif kind == _WINDOW:
            self._on_window(stream, int.from_bytes(payload, "big") & _LARGEST_WINDOW)
        elif kind == _SETTINGS and not flags & _ACK:
            self._on_settings(bytes(payload))
        elif kind == _PING and not flags & _ACK:
            self._transport.write(_frame(_PING, _ACK, 0, 8) + bytes(payload))
        elif kind == _RESET:
            if reply := self._replies.pop(stream, None):
                self._end(reply, -1, f"reset {int.from_bytes(payload, 'big')}")
        elif kind == _GOAWAY:
            self.broken = f"goaway {int.from_bytes(payload[4:8], 'big')} {bytes(payload[8:])!r}"

    def _on_data(self, stream: int, flags: int, payload: memoryview) -> None:
        self._consumed += len(payload)
        if self._consumed > _GRANT_BYTES:
            self._transport.write(_frame(_WINDOW, 0, 0, 4) + struct.pack(">I", self._consumed))
            self._consumed = 0
        reply = self._replies.get(stream)
        if reply is None:
            return
        if not reply.first_at:
            reply.first_at = time.perf_counter()
        reply.feed(payload[1 : len(payload) - payload[0]] if flags & _PADDED else payload)

    def _on_headers(self, kind: int, stream: int, flags: int, payload: memoryview) -> None:
        if kind == _HEADERS:
            begin = (1 if flags & _PADDED else 0) + (5 if flags & _PRIORITY else 0)
            self._header_parts += payload[begin : len(payload) - (payload[0] if flags & _PADDED else 0)]
            self._last = bool(flags & END_STREAM)
        else:
            self._header_parts += payload
        if not flags & _END_HEADERS:
            return
        fields = self._decoded(bytes(self._header_parts))
        self._header_parts.clear()
        if self._last and (reply := self._replies.pop(stream, None)):
            self._end(reply, int(fields.get("grpc-status", -1)), unquote(fields.get("grpc-message", "")))

    def _decoded(self, block: bytes) -> dict[str, str]:
        cached = self._known_headers.get(block)
        if cached is not None:
            return cached
        fields = {str(key): str(value) for key, value in self._decoder.decode(block)}
        if min(block, default=0) >= 0x80:
            self._known_headers[block] = fields
        else:
            self._known_headers.clear()
        return fields

    def _on_settings(self, payload: bytes) -> None:
        for key, value in struct.iter_unpack(">HI", payload):
            if key == 4:
                for upload in self._uploads:
                    upload.window += value - self._stream_window
                self._stream_window = value
            elif key == 5:
                self._frame_bytes = min(value, _MAX_FRAME)
        self._transport.write(_frame(_SETTINGS, _ACK, 0, 0))
        self._upload()

    def _on_window(self, stream: int, size: int) -> None:
        if not stream:
            self._window += size
        for upload in self._uploads:
            if upload.stream == stream:
                upload.window += size
        self._upload()

    def _upload(self) -> None:
        for _ in range(len(self._uploads)):
            upload = self._uploads.popleft()
            while upload.body and upload.stream in self._replies:
                size = min(len(upload.body), self._frame_bytes, self._window, upload.window)
                if size <= 0:
                    self._uploads.append(upload)
                    break
                self._window -= size
                upload.window -= size
                last = size == len(upload.body)
                self._transport.writelines((_frame(_DATA, int(last), upload.stream, size), upload.body[:size]))
                upload.body = upload.body[size:]

    def _end(self, reply: Reply, status: int, detail: str) -> None:
        reply.ended_at = time.perf_counter()
        reply.status, reply.detail = status, detail
        if not reply.done.done():
            reply.done.set_result(None)


async def connect(host: str, port: int) -> GrpcConnection:
    _, connection = await asyncio.get_running_loop().create_connection(GrpcConnection, host, port)
    return connection
