"""Frames of HTTP/2 (RFC 9113): their constants and errors, and a reader that splits received bytes into them.

`FrameReader` does no I/O. The payload of a DATA frame goes to a sink in whatever pieces arrive, at best from the socket straight
into the message's own memory; all other frames are handed over whole.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from struct import Struct
from time import monotonic
from typing import Final, Protocol

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

DATA: Final = 0
HEADERS: Final = 1
PRIORITY: Final = 2
RST_STREAM: Final = 3
SETTINGS: Final = 4
PUSH_PROMISE: Final = 5
PING: Final = 6
GOAWAY: Final = 7
WINDOW_UPDATE: Final = 8
CONTINUATION: Final = 9

ACK: Final = 0x1
END_STREAM: Final = 0x1
END_HEADERS: Final = 0x4
PADDED: Final = 0x8
HAS_PRIORITY: Final = 0x20

HEADER_TABLE_SIZE: Final = 1
ENABLE_PUSH: Final = 2
MAX_CONCURRENT_STREAMS: Final = 3
INITIAL_WINDOW_SIZE: Final = 4
MAX_FRAME_SIZE: Final = 5
MAX_HEADER_LIST_SIZE: Final = 6

DEFAULT_WINDOW_BYTES: Final = 65_535
DEFAULT_FRAME_BYTES: Final = 16_384
MAX_FRAME_BYTES: Final = 2**24 - 1
MAX_WINDOW_BYTES: Final = 2**31 - 1
MAX_STREAM_ID: Final = 2**31 - 1

_HEAD_BYTES: Final = 9
_DIRECT_BYTES: Final = 256 * 1024
"""Read at once into a message, so that one connection does not keep the event loop for long."""
_HEAD: Final = Struct(">HBBBI")
"""Its size's upper 16 bits and lower 8, kind, flags and stream."""
_WORD: Final = Struct(">I")
_SETTING: Final = Struct(">HI")


class ErrorCode(IntEnum):
    """Error codes of RST_STREAM and GOAWAY."""

    NO_ERROR = 0x0
    PROTOCOL_ERROR = 0x1
    INTERNAL_ERROR = 0x2
    FLOW_CONTROL_ERROR = 0x3
    SETTINGS_TIMEOUT = 0x4
    STREAM_CLOSED = 0x5
    FRAME_SIZE_ERROR = 0x6
    REFUSED_STREAM = 0x7
    CANCEL = 0x8
    COMPRESSION_ERROR = 0x9
    CONNECT_ERROR = 0xA
    ENHANCE_YOUR_CALM = 0xB
    INADEQUATE_SECURITY = 0xC
    HTTP_1_1_REQUIRED = 0xD


class ConnectionFailure(Exception):
    """A connection error (RFC 9113, 5.4.1): it ends the connection, with this code and text in a GOAWAY frame."""

    def __init__(self, code: ErrorCode, text: str) -> None:
        super().__init__(text)
        self.code = code


def encode_frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return frame_head(len(payload), kind, flags, stream) + payload


def frame_head(size: int, kind: int, flags: int, stream: int) -> bytes:
    """Return the nine bytes before a payload of `size` bytes."""
    return _HEAD.pack(size >> 8, size & 0xFF, kind, flags, stream)


def encode_settings(settings: dict[int, int]) -> bytes:
    return encode_frame(SETTINGS, 0, 0, b"".join(_SETTING.pack(*pair) for pair in settings.items()))


def encode_window_update(stream: int, size: int) -> bytes:
    return encode_frame(WINDOW_UPDATE, 0, stream, _WORD.pack(size))


def encode_reset(stream: int, code: ErrorCode) -> bytes:
    return encode_frame(RST_STREAM, 0, stream, _WORD.pack(code))


def encode_goaway(last_stream: int, code: ErrorCode, text: str = "") -> bytes:
    return encode_frame(GOAWAY, 0, 0, _WORD.pack(last_stream) + _WORD.pack(code) + text.encode())


def encode_header_block(stream: int, flags: int, block: bytes, max_frame_bytes: int) -> bytes:
    """Return a HEADERS frame with a block, and CONTINUATION frames if the client takes no frames of that size."""
    if len(block) <= max_frame_bytes:
        return encode_frame(HEADERS, flags | END_HEADERS, stream, block)
    pieces = [block[start : start + max_frame_bytes] for start in range(0, len(block), max_frame_bytes)]
    frames = [encode_frame(HEADERS, flags, stream, pieces[0])]
    frames += (encode_frame(CONTINUATION, 0, stream, piece) for piece in pieces[1:-1])
    frames.append(encode_frame(CONTINUATION, END_HEADERS, stream, pieces[-1]))
    return b"".join(frames)


def decode_settings(payload: bytes) -> list[tuple[int, int]]:
    """Return the settings, in order. Raises ConnectionFailure."""
    if len(payload) % _SETTING.size:
        raise ConnectionFailure(ErrorCode.FRAME_SIZE_ERROR, f"a SETTINGS frame has {len(payload)} bytes, not a multiple of 6")
    return list(_SETTING.iter_unpack(payload))


def decode_word(payload: bytes, what: str) -> int:
    """Return the number that a frame of four bytes holds. Raises ConnectionFailure."""
    if len(payload) != _WORD.size:
        raise ConnectionFailure(ErrorCode.FRAME_SIZE_ERROR, f"a {what} frame has {len(payload)} bytes, not 4")
    number: int = _WORD.unpack(payload)[0]
    return number


def strip_headers(stream: int, flags: int, payload: bytes) -> bytes:
    """Return the fragment of a header block in a HEADERS frame, without padding and priority. Raises ConnectionFailure."""
    begin, end = 0, len(payload)
    if flags & PADDED:
        if not payload:
            raise ConnectionFailure(ErrorCode.FRAME_SIZE_ERROR, "a padded HEADERS frame is empty")
        begin, end = 1, end - payload[0]
    if flags & HAS_PRIORITY:
        check_priority(stream, payload[begin : begin + 5])
        begin += 5
    if end < begin:
        raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, "the padding of a HEADERS frame is longer than its payload")
    return payload[begin:end]


def check_priority(stream: int, payload: bytes) -> None:
    """Check the five bytes of a priority, which is otherwise ignored. Raises ConnectionFailure."""
    if not stream:
        raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, "a priority is on stream 0")
    if len(payload) != 5:
        raise ConnectionFailure(ErrorCode.FRAME_SIZE_ERROR, f"a priority has {len(payload)} bytes, not 5")
    if _WORD.unpack(payload[:4])[0] & MAX_STREAM_ID == stream:
        raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, "a stream depends on itself")


def check_ping(stream: int, payload: bytes) -> None:
    """Raises ConnectionFailure."""
    if stream:
        raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, f"a PING frame is on stream {stream}")
    if len(payload) != 8:
        raise ConnectionFailure(ErrorCode.FRAME_SIZE_ERROR, f"a PING frame has {len(payload)} bytes, not 8")


def check_settings(flags: int, stream: int, payload: bytes) -> None:
    """Raises ConnectionFailure."""
    if stream:
        raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, f"a SETTINGS frame is on stream {stream}")
    if flags & ACK and payload:
        raise ConnectionFailure(ErrorCode.FRAME_SIZE_ERROR, "an acknowledgement of SETTINGS has content")


def check_goaway(stream: int, payload: bytes) -> None:
    """Raises ConnectionFailure."""
    if stream:
        raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, f"a GOAWAY frame is on stream {stream}")
    if len(payload) < 8:
        raise ConnectionFailure(ErrorCode.FRAME_SIZE_ERROR, f"a GOAWAY frame has {len(payload)} bytes")


class DataSink(Protocol):
    """Takes the payload of one DATA frame."""

    def feed(self, data: memoryview) -> None:
        """Take the next bytes. `data` is only valid during the call."""
        ...

    def space(self) -> memoryview | None:
        """Return memory into which the next bytes may be received, not empty; None to be fed them."""
        ...

    def filled(self, count: int) -> None:
        """So many bytes are in the memory that `space` returned."""
        ...


class _Discard:
    """A sink for what is not needed."""

    def feed(self, data: memoryview) -> None:
        pass

    def space(self) -> None:
        return None

    def filled(self, count: int) -> None:
        pass


DISCARD: Final = _Discard()


class FrameHandler(Protocol):
    """The connection that a reader splits frames for. Its methods may raise ConnectionFailure."""

    def frame_received(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        """Handle a whole frame of a known kind other than DATA."""
        ...

    def skipped(self) -> None:
        """Count a frame of an unknown kind, whose payload is discarded."""
        ...

    def data_begun(self, stream: int, size: int, content: int, *, ends: bool) -> DataSink:
        """Return where the `content` bytes of a DATA frame go, whose payload has `size` bytes with the padding."""
        ...

    def data_ended(self, stream: int) -> None:
        """Handle END_STREAM after the payload of a DATA frame."""
        ...


class FrameReader:
    """Splits what a connection receives into frames."""

    __slots__ = (
        "_clock", "_direct", "_ends", "_greeted", "_handler", "_left", "_max_bytes", "_padding", "_rest", "_shared", "_sink",
        "_stream", "_turn_ends_at", "is_behind",
    )  # fmt: skip

    def __init__(
        self,
        handler: FrameHandler,
        shared: memoryview,
        max_frame_bytes: int,
        turn_ends_at: Callable[[], float] = lambda: float("inf"),
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """`shared` is memory for what is received, the same for all connections of a thread: nothing stays in it.

        It is larger than `max_frame_bytes`, the bound of frames other than DATA. `turn_ends_at` returns until when, on the
        `clock`, frames may be read now; 0: not now.
        """
        self._handler = handler
        self._shared = shared
        self._max_bytes = max_frame_bytes
        self._turn_ends_at = turn_ends_at
        self._clock = clock
        self._rest = b""
        """Received bytes of an incomplete frame, and what else the last turn has left."""
        self.is_behind = False
        """The last turn has perhaps left frames: `go_on` reads them, and has to before more is received."""
        self._greeted = False
        self._sink: DataSink | None = None
        """Where the payload of the DATA frame that is being received goes; None: no such payload is missing."""
        self._direct: memoryview | None = None
        """Its memory, which is being received into."""
        self._left = 0
        """Bytes of the payload still to come, and `_padding` after them."""
        self._padding = 0
        self._stream = 0
        self._ends = False

    def get_buffer(self) -> memoryview:
        """Return memory for the next bytes."""
        sink = self._sink
        self._direct = None  # there was perhaps nothing to read into the last one
        if sink is not None and self._left:
            space = sink.space()
            if space is not None:
                self._direct = space = space[: min(self._left, _DIRECT_BYTES)]
                return space
        rest = self._rest
        if not rest:
            return self._shared
        self._shared[: len(rest)] = rest
        return self._shared[len(rest) :]

    def buffer_updated(self, count: int) -> None:
        """So many bytes are in the memory that `get_buffer` returned. Raises ConnectionFailure."""
        direct = self._direct
        if direct is None:
            return self._parse(len(self._rest) + count)
        self._direct = None
        assert self._sink is not None, "memory to receive into belongs to a sink"
        self._left -= count
        self._sink.filled(count)
        if not self._left and not self._padding:
            self._end_data()

    def go_on(self) -> None:
        """Read what the last turn has left, for another one. Raises ConnectionFailure."""
        rest = self._rest
        self._shared[: len(rest)] = rest
        self._parse(len(rest))

    def _parse(self, end: int) -> None:
        buffer, handler, clock = self._shared, self._handler, self._clock
        ends_at = self._turn_ends_at()
        self.is_behind = not ends_at
        if self.is_behind:
            self._rest = bytes(buffer[:end])
            return
        self._rest = b""
        position = 0
        if self._sink is not None:
            position = self._continue_data(0, end)
        elif not self._greeted:
            position = self._greet(end)
        while end - position >= _HEAD_BYTES:
            upper, lower, kind, flags, stream = _HEAD.unpack_from(buffer, position)
            size = upper << 8 | lower
            stream &= MAX_STREAM_ID
            begin = position + _HEAD_BYTES
            if kind == DATA:
                if flags & PADDED and begin == end and size:
                    break  # the length of the padding has not come
                position = self._begin_data(stream, flags, size, begin, end)
            elif kind > CONTINUATION:
                handler.skipped()
                self._sink, self._stream, self._ends, self._left = DISCARD, stream, False, size
                position = self._continue_data(begin, end)
            else:
                if size > self._max_bytes:
                    raise ConnectionFailure(ErrorCode.FRAME_SIZE_ERROR, f"a frame of kind {kind} has {size} bytes")
                if begin + size > end:
                    break
                position = begin + size
                handler.frame_received(kind, flags, stream, bytes(buffer[begin:position]))
            if clock() > ends_at:
                self.is_behind = True
                break
        if position < end:
            self._rest = bytes(buffer[position:end])

    def _greet(self, end: int) -> int:
        start = bytes(self._shared[: min(end, len(PREFACE))])
        if not PREFACE.startswith(start):
            raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, "the connection does not begin with the preface of HTTP/2")
        if len(start) < len(PREFACE):
            self._rest = start
            return end
        self._greeted = True
        return len(PREFACE)

    def _begin_data(self, stream: int, flags: int, size: int, begin: int, end: int) -> int:
        """Start a DATA frame whose payload begins at `begin`; return where what is not parsed yet begins."""
        padding = 0
        if flags & PADDED:
            if not size:
                raise ConnectionFailure(ErrorCode.FRAME_SIZE_ERROR, "a padded DATA frame is empty")
            padding = self._shared[begin]
            if padding >= size:
                raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, "the padding of a DATA frame is longer than its payload")
            begin += 1
            self._left = size - 1 - padding
        else:
            self._left = size
        self._padding = padding
        self._ends = bool(flags & END_STREAM)
        self._stream = stream
        self._sink = self._handler.data_begun(stream, size, self._left, ends=self._ends)
        return self._continue_data(begin, end)

    def _continue_data(self, position: int, end: int) -> int:
        if self._left and position < end:
            sink, stop = self._sink, min(end, position + self._left)
            assert sink is not None, "a DATA frame is being received"
            self._left -= stop - position
            sink.feed(self._shared[position:stop])
            position = stop
        if self._left:
            return position
        if self._padding:
            skipped = min(self._padding, end - position)
            self._padding -= skipped
            position += skipped
        if not self._padding:
            self._end_data()
        return position

    def _end_data(self) -> None:
        self._sink = None
        if self._ends:
            self._handler.data_ended(self._stream)
