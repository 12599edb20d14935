"""One HTTP/2 connection of a gRPC client: the frames that it sends, and what they do to its calls.

What a client may cost is bounded, with a key or without:

| what | bound | past it |
|---|---|---|
| header blocks | `max_metadata_bytes`, encoded and decoded | GOAWAY |
| updates of the header table's size at the start of a block | 2 | GOAWAY |
| calls at once | `max_concurrent_streams` | RST_STREAM |
| calls at once with those that were reset and whose handlers still run | twice `max_concurrent_streams` | RST_STREAM |
| resets of streams by the client before a response, or for its fault | `resets_per_s`, at once ten times as many | GOAWAY |
| SETTINGS | `_SETTINGS` at once, one a second on average | GOAWAY |
| frames without content between two that have some | `_IDLE_FRAMES` a second | GOAWAY |
| PINGs while nothing is sent | one in `client_ping_interval_s` or, by option, in two hours; twice more often | GOAWAY |
| acknowledgements and calls while the client does not read | `_UNREAD_FRAMES`, and `max_concurrent_streams` | GOAWAY |
| frames that have come, on all connections together | some milliseconds in a turn of the event loop; then they are queued | |
| messages | `max_message_bytes` each, and the capacity together | the call fails |
| a message that is due | 1 KiB a second, averaged over 10 s | the call fails |
| a response that is not read | 1 KiB a second, averaged over 300 s | RST_STREAM |
| a connection of which nothing is read | `_UNREAD_S` | it is closed |
"""

from __future__ import annotations

import asyncio
import logging
from time import monotonic
from typing import Final, cast

import grpc

from dynamo.frontend.api.rpc.http2 import frames
from dynamo.frontend.api.rpc.http2.call import GrpcCall
from dynamo.frontend.api.rpc.http2.call_host import peer_name
from dynamo.frontend.api.rpc.http2.client_settings import apply_settings
from dynamo.frontend.api.rpc.http2.frames import DISCARD, ConnectionFailure, DataSink, ErrorCode, FrameReader
from dynamo.frontend.api.rpc.http2.headers import CallHeaders, HeaderDecoder, MalformedRequest, PartialBlock, Refusal
from dynamo.frontend.api.rpc.http2.messages import MessageMemory
from dynamo.frontend.api.rpc.http2.owner import Http2ConnectionOwner
from dynamo.frontend.api.rpc.http2.pings import Pings
from dynamo.frontend.api.rpc.http2.sender import GONE, HIGH_WATER_BYTES, Outgoing, Sender
from dynamo.frontend.api.rpc.http2.windows import ActionBudget, LastStreams, ReceiveWindow, WindowOverflow

_log = logging.getLogger(__name__)

_SETTINGS: Final = 100
_IDLE_FRAMES: Final = 10_000
_FRAMES_PER_WRITE: Final = 4
"""Besides, for each write of a response, which clients acknowledge by WINDOW_UPDATEs."""
_UNREAD_FRAMES: Final = 1000
_UNREAD_S: Final = 300.0
_GREETING_S: Final = 10.0
_READ_BYTES: Final = 2 * 2**20
"""Read of one connection before all others have their turn."""
_LINGER_S: Final = 5.0
"""Time for a client to read the GOAWAY before its connection is cut."""
_DRAIN_S: Final = 1.0
"""Time for a client to acknowledge the first of two GOAWAYs."""

_KEEPALIVE: Final = b"dynamo-k"
_DRAIN: Final = b"dynamo-d"
_NOT_FOUND: Final = Refusal(grpc.StatusCode.UNIMPLEMENTED, "method not found")


class Http2Connection(asyncio.BufferedProtocol):
    """One connection."""

    sender: Sender

    def __init__(self, server: Http2ConnectionOwner) -> None:
        self.options = server.options
        self.capacity = server.capacity
        self.overload = server.overload
        self.inflating = server.inflating
        self.peer = "unknown"
        self._server = server
        self._transport: asyncio.Transport
        self._reader: FrameReader
        self._decoder = HeaderDecoder(self.options.max_metadata_bytes)
        self._calls: dict[int, GrpcCall] = {}
        """By stream. A call that was reset stays until its handler has ended."""
        self._last_stream = 0
        self._reset_ids = LastStreams()
        """Streams that we have reset, of which frames may still be under way."""
        self._window = ReceiveWindow(server.connection_window_bytes)
        self._block: PartialBlock | None = None
        """What has come of a header block that continues in the next frame."""
        self._has_settings = False
        self._settings_acknowledged = False

        self._resets = ActionBudget(int(10 * server.resets_per_s), server.resets_per_s)
        self._settings = ActionBudget(_SETTINGS, 1.0)
        self._idle_frames = 0
        """Since the last one with content, or the last call of `check`."""
        self._responses_at_check = 0
        self._unread_frames = 0
        """Acknowledgements that were sent, and calls that were opened, while the client did not read."""
        self.pings = Pings(self.options)
        self._read_bytes = 0
        """Since reading was paused last."""
        self._opened_at = self._read_at = monotonic()
        """`_read_at` is exact to the interval between two calls of `check`."""
        self._now = self._opened_at
        self._ends_at = self._opened_at + server.max_age_s()
        self._paused_at: float | None = None
        self._drains_at: float | None = None
        """When the second GOAWAY is due, infinite once it was sent; None before the first."""
        self._last_served = frames.MAX_STREAM_ID
        """Streams after this one are not served."""
        self._closing_at: float | None = None
        """What comes is discarded since then."""

    def __repr__(self) -> str:
        return f"<Connection of {self.peer}, {len(self._calls)} calls>"

    @property
    def stream_window_bytes(self) -> int:
        return self._server.stream_window_bytes

    # Called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's are not derived from it
        self._transport.set_write_buffer_limits(high=HIGH_WATER_BYTES)
        longest = max(frames.DEFAULT_FRAME_BYTES, self.options.max_metadata_bytes)
        self._reader = FrameReader(self, self._server.read_memory, longest, self._server.turns.ends_at)
        self.peer = peer_name(transport.get_extra_info("peername"))
        self.sender = Sender(self._transport, self.capacity, self._response_ended, asyncio.get_running_loop().call_soon)
        secured = transport.get_extra_info("ssl_object")
        if not self._server.opened(self) or (secured is not None and secured.selected_alpn_protocol() != "h2"):
            self._closing_at = self._now
            self._transport.abort()
            return
        settings = {
            frames.MAX_CONCURRENT_STREAMS: self.options.max_concurrent_streams,
            frames.INITIAL_WINDOW_SIZE: self.stream_window_bytes,
            frames.MAX_FRAME_SIZE: frames.MAX_FRAME_BYTES,
            frames.MAX_HEADER_LIST_SIZE: self.options.max_metadata_bytes,
        }
        more = self._server.connection_window_bytes - frames.DEFAULT_WINDOW_BYTES
        self._transport.write(frames.encode_settings(settings) + (frames.encode_window_update(0, more) if more else b""))

    def connection_lost(self, error: Exception | None) -> None:
        self._closing_at = self._now
        self._server.closed(self)
        for call in list(self._calls.values()):
            call.cancel()
        self._calls = {call.stream: call for call in self._calls.values() if call.task is not None and not call.task.done()}
        # The connection goes with its last reference, without the garbage collector. None of these is needed any more.
        del self._reader
        self._transport = GONE
        self.sender.close()

    def get_buffer(self, hint: int) -> memoryview:
        return self._reader.get_buffer() if self._closing_at is None else self._server.read_memory

    def buffer_updated(self, count: int) -> None:
        if self._closing_at is not None:
            return
        self._read_at = self._now
        self._read_bytes += count
        try:
            self._reader.buffer_updated(count)
        except ConnectionFailure as failure:
            self._fail(failure.code, str(failure))
        if self._closing_at is None and (self._reader.is_behind or self._read_bytes >= _READ_BYTES):
            # Let the event loop do something else: it reads from one connection for as long as there is something.
            self._transport.pause_reading()
            self._server.turns.wait(self._resume_reading)

    def _resume_reading(self) -> None:
        if self._closing_at is None and self._reader.is_behind:
            try:
                self._reader.go_on()
            except ConnectionFailure as failure:
                self._fail(failure.code, str(failure))
            if self._closing_at is None and self._reader.is_behind:
                return self._server.turns.wait(self._resume_reading)
        self._read_bytes = 0
        if not self._transport.is_closing():
            self._transport.resume_reading()

    def pause_writing(self) -> None:
        self.sender.is_paused = True
        self._paused_at = monotonic()

    def resume_writing(self) -> None:
        self.sender.is_paused = False
        self._paused_at = None
        self._unread_frames = 0
        self.sender.pump()

    # Called by the server

    def check(self, now: float) -> None:
        """Apply the time limits. Called about once a second."""
        self._now = now
        self._idle_frames, self._responses_at_check = 0, self.sender.responses
        if self._closing_at is not None:
            if now - self._closing_at > _LINGER_S:
                self._transport.abort()
            return
        if not self._has_settings and now - self._opened_at > _GREETING_S:
            return self._transport.abort()
        if self._paused_at is not None and now - self._paused_at > _UNREAD_S:
            _log.info("%r is closed: it has read nothing for %g s", self, _UNREAD_S)
            return self._transport.abort()
        try:
            self._check_calls(now)
        except ConnectionFailure as failure:
            return self._fail(failure.code, str(failure))
        self._check_life(now)
        if self._drains_at is not None and now >= self._drains_at:
            self._announce_last_stream()
        elif now >= self._ends_at:
            self.start_draining()

    def _check_calls(self, now: float) -> None:
        for call in list(self._calls.values()):
            if call.is_unread(now):
                self._reset(call.stream, ErrorCode.CANCEL)
            elif call.is_stuck(now):
                call.end(grpc.StatusCode.DEADLINE_EXCEEDED, "the message arrives too slowly")

    def _check_life(self, now: float) -> None:
        responses, has_calls = self.sender.responses, bool(self._calls)
        if self.pings.is_overdue(now):
            _log.info("%r is closed: a ping was not acknowledged within %g s", self, self.options.keepalive_timeout_s)
            self._transport.abort()
        elif self._has_settings and self.pings.send(now, now - self._read_at, responses, has_calls=has_calls):
            self.sender.control(frames.encode_frame(frames.PING, 0, 0, _KEEPALIVE))

    def start_draining(self) -> None:
        """Let the client go elsewhere with new calls; the connection ends with the last of those it has. Idempotent."""
        self._ends_at = float("inf")
        if self._drains_at is not None or self._closing_at is not None:
            return
        self._drains_at = monotonic() + _DRAIN_S
        first = frames.encode_goaway(frames.MAX_STREAM_ID, ErrorCode.NO_ERROR)
        self.sender.control(first + frames.encode_frame(frames.PING, 0, 0, _DRAIN))

    def _announce_last_stream(self) -> None:
        """Send the second GOAWAY: what the client has sent before it knew of the first has come."""
        if self._drains_at == float("inf"):
            return
        self._drains_at = float("inf")
        self._last_served = self._last_stream
        self.sender.control(frames.encode_goaway(self._last_stream, ErrorCode.NO_ERROR))
        self._close_if_drained()

    def _close_if_drained(self) -> None:
        if self._drains_at == float("inf") and not self._calls:
            self._close()

    def abort(self) -> None:
        self._transport.abort()

    # Frames

    def frame_received(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if self._block is not None and (kind != frames.CONTINUATION or stream != self._block.stream):
            raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, "a header block is not continued by the next frame")
        if not self._has_settings and (kind != frames.SETTINGS or flags & frames.ACK):
            raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, "the first frame is not SETTINGS")
        if kind == frames.HEADERS:
            return self._headers_received(flags, stream, payload)
        if kind == frames.CONTINUATION:
            return self._continuation_received(flags, payload)
        self.skipped()
        match kind:
            case frames.WINDOW_UPDATE:
                self._window_update_received(stream, frames.decode_word(payload, "WINDOW_UPDATE") & frames.MAX_WINDOW_BYTES)
            case frames.PING:
                self._ping_received(flags, stream, payload)
            case frames.SETTINGS:
                self._settings_received(flags, stream, payload)
            case frames.RST_STREAM:
                self._reset_received(stream, frames.decode_word(payload, "RST_STREAM"))
            case frames.GOAWAY:
                frames.check_goaway(stream, payload)  # it is about streams of ours; the client closes when it has its responses
            case frames.PRIORITY:
                frames.check_priority(stream, payload)
            case _:
                raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, "clients do not send PUSH_PROMISE")

    def skipped(self) -> None:
        if self._block is not None:
            raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, "a header block is not continued by the next frame")
        self._idle_frames += 1
        if self._idle_frames > _IDLE_FRAMES + _FRAMES_PER_WRITE * (self.sender.responses - self._responses_at_check):
            raise ConnectionFailure(ErrorCode.ENHANCE_YOUR_CALM, f"over {_IDLE_FRAMES} frames without content in a second")

    def data_begun(self, stream: int, size: int, content: int, *, ends: bool) -> DataSink:
        if self._block is not None or not self._has_settings:
            raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, "a DATA frame is not allowed here")
        if not self._window.take(size):
            raise ConnectionFailure(ErrorCode.FLOW_CONTROL_ERROR, "the client has sent more than the connection's window")
        if more := self._window.grant(self._server.connection_window_bytes):
            self.sender.control(frames.encode_window_update(0, more))
        if content:
            self._idle_frames = 0
        elif not ends:
            self.skipped()
        call = self._calls.get(stream)
        if call is None or call.is_half_closed or call.is_cancelled:
            return self._stray_data(stream)
        lenient = 0 if self._settings_acknowledged else frames.DEFAULT_WINDOW_BYTES
        if not call.window.take(size) and call.window.left + lenient < 0:
            self._reset(stream, ErrorCode.FLOW_CONTROL_ERROR)
            return DISCARD
        return call.data_begun(content, ends=ends)

    def _stray_data(self, stream: int) -> DataSink:
        """Return where the data of a stream go that expects none."""
        if not stream or stream > self._last_stream:
            raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, f"a DATA frame is on stream {stream}, which is not open")
        if stream not in self._reset_ids:
            self._reset(stream, ErrorCode.STREAM_CLOSED)
        return DISCARD

    def data_ended(self, stream: int) -> None:
        call = self._calls.get(stream)
        if call is None or call.is_half_closed or call.is_cancelled:
            return
        if call.headers.content_length not in (None, call.content_bytes):
            return self._reset(stream, ErrorCode.PROTOCOL_ERROR)
        call.half_close()

    def _headers_received(self, flags: int, stream: int, payload: bytes) -> None:
        fragment = frames.strip_headers(stream, flags, payload)
        if flags & frames.END_HEADERS:
            return self._block_received(stream, fragment, ends=bool(flags & frames.END_STREAM))
        self._block = PartialBlock(bytearray(fragment), stream, bool(flags & frames.END_STREAM))

    def _continuation_received(self, flags: int, payload: bytes) -> None:
        block = self._block
        if block is None:
            raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, "a CONTINUATION frame continues nothing")
        block.data += payload
        if len(block.data) > self.options.max_metadata_bytes:
            raise ConnectionFailure(ErrorCode.ENHANCE_YOUR_CALM, "a header block is too large")
        if flags & frames.END_HEADERS:
            self._block = None
            self._block_received(block.stream, bytes(block.data), ends=block.ends_stream)
        elif not payload:
            self._idle_frames += 100  # no client has a reason to send an empty one
            if self._idle_frames > _IDLE_FRAMES:
                raise ConnectionFailure(ErrorCode.ENHANCE_YOUR_CALM, "there are many empty CONTINUATION frames")

    def _block_received(self, stream: int, block: bytes, *, ends: bool) -> None:
        if len(block) > self.options.max_metadata_bytes:
            raise ConnectionFailure(ErrorCode.ENHANCE_YOUR_CALM, "a header block is too large")
        if stream % 2 == 0:
            raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, f"a HEADERS frame is on stream {stream}")
        if stream <= self._last_stream:
            return self._trailers_received(stream, block, ends=ends)
        self._last_stream = stream
        self._count_unread()
        try:
            headers = self._decoder.decode(block)
        except MalformedRequest as error:
            _log.debug("%r sent a malformed request: %s", self, error)
            return self._reset(stream, ErrorCode.PROTOCOL_ERROR)
        if stream > self._last_served or self._is_full():
            return self._reset(stream, ErrorCode.REFUSED_STREAM)
        if ends and headers.content_length:
            return self._reset(stream, ErrorCode.PROTOCOL_ERROR)
        method = self._server.methods.get(headers.path)
        refusal = headers.refusal or (_NOT_FOUND if method is None else None)
        out = Outgoing(stream, self.sender.initial_window)
        if method is None or refusal is not None:
            return self._refuse(out, refusal or _NOT_FOUND, ends=ends)
        self._open(GrpcCall(self, stream, headers, method, out, self.stream_window_bytes), headers, ends=ends)

    def _is_full(self) -> bool:
        """Whether the client has as many calls as it may.

        It does not count those that it has reset, and may open others at once, while their handlers have yet to end. Those that
        are refused would fail: clients retry a refused call once.
        """
        limit = self.options.max_concurrent_streams
        if len(self._calls) < limit:
            return False
        return len(self._calls) >= 2 * limit or sum(not call.is_cancelled for call in self._calls.values()) >= limit

    def _open(self, call: GrpcCall, headers: CallHeaders, *, ends: bool) -> None:
        self._calls[call.stream] = call
        if headers.timeout_s is not None:
            call.deadline = monotonic() + headers.timeout_s
            self._server.deadlines.add(call, call.deadline)
        call.open()
        if ends and not call.is_over:
            call.half_close()

    def _refuse(self, out: Outgoing, refusal: Refusal, *, ends: bool) -> None:
        self.sender.fail(out, refusal.status.value[0], refusal.text, (), refusal.http_status)
        if not ends:
            self._reset_ids.add(out.stream)
            self.sender.control(frames.encode_reset(out.stream, ErrorCode.NO_ERROR))

    def _trailers_received(self, stream: int, block: bytes, *, ends: bool) -> None:
        call = self._calls.get(stream)
        is_valid = ends
        try:
            self._decoder.decode_trailers(block)
        except MalformedRequest:
            is_valid = False
        if call is None or call.is_half_closed or call.is_cancelled:
            if stream not in self._reset_ids:
                raise ConnectionFailure(ErrorCode.STREAM_CLOSED, f"a HEADERS frame is on stream {stream}, which is closed")
        elif is_valid:
            self.data_ended(stream)
        else:
            self._reset(stream, ErrorCode.PROTOCOL_ERROR)

    def _window_update_received(self, stream: int, more: int) -> None:
        if not stream:
            if not more:
                raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, "a window grows by 0")
            try:
                self.sender.window.grow(more)
            except WindowOverflow:
                raise ConnectionFailure(ErrorCode.FLOW_CONTROL_ERROR, "the connection's window is over 2^31-1") from None
            return self.sender.pump()
        self._check_not_idle(stream, "WINDOW_UPDATE")
        call = self._calls.get(stream)
        if call is None or call.is_cancelled:
            return
        if not more:
            return self._reset(stream, ErrorCode.PROTOCOL_ERROR)
        try:
            call.out.window.grow(more)
        except WindowOverflow:
            return self._reset(stream, ErrorCode.FLOW_CONTROL_ERROR)
        self.sender.window_grown(call.out)

    def _ping_received(self, flags: int, stream: int, payload: bytes) -> None:
        frames.check_ping(stream, payload)
        if flags & frames.ACK:
            self.pings.sent_at = None
            if payload == _DRAIN and self._drains_at is not None:
                self._announce_last_stream()
            return
        self.pings.received(self.sender.responses, has_calls=bool(self._calls))
        self._acknowledge(frames.encode_frame(frames.PING, frames.ACK, 0, payload))

    def _acknowledge(self, frame: bytes) -> None:
        self._count_unread()
        self.sender.control(frame)

    def _count_unread(self) -> None:
        """Count what is responded to at once, whether the client reads or not: failures of calls do not wait for windows."""
        if self.sender.is_paused:
            self._unread_frames += 1
            if self._unread_frames > _UNREAD_FRAMES + self.options.max_concurrent_streams:
                raise ConnectionFailure(ErrorCode.ENHANCE_YOUR_CALM, "responses and acknowledgements are not read")

    def _settings_received(self, flags: int, stream: int, payload: bytes) -> None:
        frames.check_settings(flags, stream, payload)
        if flags & frames.ACK:
            self._settings_acknowledged = True
            return
        if not self._settings.spend(monotonic()):
            raise ConnectionFailure(ErrorCode.ENHANCE_YOUR_CALM, "the settings change too often")
        apply_settings(payload, self.sender, [call.out for call in self._calls.values()])
        self._has_settings = True
        self._acknowledge(frames.encode_frame(frames.SETTINGS, frames.ACK, 0))
        # Only behind the acknowledgement: until that has come, gRPC's clients hold us to the windows they had before.
        for call in list(self._calls.values()):
            self.sender.window_grown(call.out)
        self.sender.pump()

    def _reset_received(self, stream: int, code: int) -> None:
        self._check_not_idle(stream, "RST_STREAM")
        call = self._calls.get(stream)
        has_waited = call is not None and call.out.has_begun  # no flood does; gateways end each of their calls so
        if not has_waited and not self._resets.spend(monotonic()):
            raise ConnectionFailure(ErrorCode.ENHANCE_YOUR_CALM, "streams are reset too often")
        if call is not None and not call.is_cancelled:
            call.cancel()

    def _check_not_idle(self, stream: int, what: str) -> None:
        if not stream or stream > self._last_stream or stream % 2 == 0:
            raise ConnectionFailure(ErrorCode.PROTOCOL_ERROR, f"a {what} frame is on stream {stream}, which was never open")

    # Ends

    def _reset(self, stream: int, code: ErrorCode) -> None:
        """End a stream for a fault of the client."""
        if not self._resets.spend(monotonic()):
            raise ConnectionFailure(ErrorCode.ENHANCE_YOUR_CALM, "too many streams had to be reset")
        self._reset_ids.add(stream)
        self.sender.control(frames.encode_reset(stream, code))
        call = self._calls.get(stream)
        if call is not None and not call.is_cancelled:
            call.cancel()

    def _response_ended(self, out: Outgoing) -> None:
        """The last frame of a response has been sent."""
        call = self._calls.pop(out.stream, None)
        if call is None:
            return  # it was refused
        if not call.is_half_closed:
            self._reset_ids.add(out.stream)
            self.sender.control(frames.encode_reset(out.stream, ErrorCode.NO_ERROR))
        if not self._calls:
            self.sender.flush()
        if self._drains_at is not None:
            self._close_if_drained()

    def _fail(self, code: ErrorCode, text: str) -> None:
        _log.debug("%r is closed: %s", self, text)
        self.sender.control(frames.encode_goaway(self._last_stream, code, text))
        self.sender.flush()
        self._closing_at = self._now
        self._end_writing()
        for call in list(self._calls.values()):
            call.cancel()

    def _close(self) -> None:
        """Close when the client has: what it still sends would reset the connection, and it would lose what it has not read."""
        self._closing_at = self._now
        self.sender.flush()
        self._end_writing()

    def _end_writing(self) -> None:
        if self._transport.can_write_eof():
            self._transport.write_eof()
        else:
            self._transport.close()

    # Called by calls

    def grant(self, stream: int, more: int) -> None:
        self.sender.control(frames.encode_window_update(stream, more))

    def allocate(self, size: int) -> MessageMemory:
        return self._server.allocate(size)

    def call_started(self, call: GrpcCall) -> None:
        self._server.call_started(call)

    def call_done(self, call: GrpcCall) -> None:
        self._server.call_done(call)
        if self._calls.get(call.stream) is call and call.out.is_over:
            del self._calls[call.stream]
            if self._drains_at is not None:
                self._close_if_drained()
