"""What one connection sends: responses in the order of their streams' turns, within the client's windows.

Frames leave with all others of their event-loop turn in one write, since each write is a system call and wakes the client; at
once when they are many bytes, or when the connection has no open call left whose response they could wait for. A response that
fits into the windows is not copied if it is large. What does not fit waits in its `Outgoing`. While the client does not read,
nothing is handed to the transport, and long responses count against the capacity.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

from dynamo.common.tensors.tensors import Buffer
from dynamo.frontend.api.capacity import Capacity
from dynamo.frontend.api.rpc.http2.frames import (
    DATA,
    DEFAULT_FRAME_BYTES,
    DEFAULT_WINDOW_BYTES,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    encode_header_block,
    frame_head,
)
from dynamo.frontend.api.rpc.http2.headers import HeaderEncoder, Metadata
from dynamo.frontend.api.rpc.http2.messages import PREFIX, PREFIX_BYTES
from dynamo.frontend.api.rpc.http2.windows import Pace, SendWindow

_COPIED_BYTES: Final = 16 * 1024
"""Up to this size one buffer is faster than several."""
_FLUSHED_BYTES: Final = 256 * 1024
"""Frames of one turn that are more leave before it ends."""
_COUNTED_BYTES: Final = 64 * 1024
"""Messages above this size that wait for their turns count against the capacity, and smaller ones beyond `_UNCOUNTED_BYTES`."""
_UNCOUNTED_BYTES: Final = 256 * 1024
"""On one connection."""
_AT_ONCE_BYTES: Final = 2 * 2**20
"""A response up to this size is handed to the transport at once, one of them before it pauses."""
_TURN_BYTES: Final = 256 * 1024
"""Sent of one stream before it is another one's turn."""
HIGH_WATER_BYTES: Final = 512 * 1024


class _Gone(asyncio.Transport):
    """Takes the place of a lost connection's transport: that of TLS holds the connection for as long as it lives."""

    def is_closing(self) -> bool:
        return True

    def write(self, data: Buffer) -> None:
        pass

    def can_write_eof(self) -> bool:
        return False

    def close(self) -> None:
        pass

    def abort(self) -> None:
        pass


GONE: Final = _Gone()


class Outgoing:
    """The response of one stream: what of it has not been sent."""

    __slots__ = (
        "drained",
        "encoding",
        "has_begun",
        "held_bytes",
        "is_over",
        "key",
        "pace",
        "pieces",
        "sent_bytes",
        "stream",
        "trailers",
        "uncounted_bytes",
        "window",
    )

    def __init__(self, stream: int, window: int) -> None:
        self.stream = stream
        self.window = SendWindow(window)
        self.key = ""
        """The API key of the caller, of which all that waits together has a share; empty: none, or it is not known yet."""
        self.encoding = ""
        """Encoding of compressed messages, if there are any."""
        self.pieces: deque[memoryview] = deque()
        self.trailers: tuple[int, str, Metadata] | None = None
        """Status, text and metadata that follow the pieces."""
        self.drained: asyncio.Future[None] | None = None
        """Done when there are no pieces; the writer waits for it."""
        self.held_bytes = 0
        """What messages that wait have, and counts against the capacity; `uncounted_bytes`: what others have."""
        self.uncounted_bytes = 0
        self.sent_bytes = 0
        """Bytes sent so far of what had to wait."""
        self.pace: Pace | None = None
        """Pace at which the client reads what waits; None before the first check that sees it."""
        self.is_over = False
        """The last frame has been sent, or none will be."""
        self.has_begun = False
        """Its headers have been sent."""


class Sender:
    """Sends the frames of one connection."""

    def __init__(
        self,
        transport: asyncio.WriteTransport,
        capacity: Capacity,
        ended: Callable[[Outgoing], None],
        call_soon: Callable[[Callable[[], None]], object],
    ) -> None:
        """`ended` is called when the last frame of a response has been sent; `call_soon` is the event loop's."""
        self.encoder = HeaderEncoder()
        self.window = SendWindow(DEFAULT_WINDOW_BYTES)
        self.initial_window = DEFAULT_WINDOW_BYTES
        self.max_frame_bytes = DEFAULT_FRAME_BYTES
        self.is_paused = False
        """The transport has more to send than it should have."""
        self.responses = 0
        """A number that grows with each write of a response."""
        self._transport = transport
        self._call_soon = call_soon
        self._capacity = capacity
        self._ended = ended
        self._unsent: list[Buffer] = []
        """Frames of this turn of the event loop, and about how many bytes they are."""
        self._unsent_bytes = 0
        self._uncounted_bytes = 0
        """What all messages have that wait and do not count."""
        self._is_scheduled = False
        self._ready: dict[Outgoing, None] = {}
        """Responses that wait, and whose own window is open, in the order of their turns."""

    def close(self) -> None:
        """Nothing is sent any more, and ends are not reported."""
        self._ended = _ignore
        self._transport = GONE
        self._unsent.clear()
        self._ready.clear()

    def control(self, frames: bytes) -> None:
        """Send frames that no window applies to."""
        self._unsent.append(frames)
        self._added(len(frames))

    def flush(self) -> None:
        """Hand all frames to the transport."""
        unsent, size = self._unsent, self._unsent_bytes
        if not unsent:
            return
        self._unsent, self._unsent_bytes = [], 0
        if size <= _COPIED_BYTES:
            self._transport.write(b"".join(unsent))
        else:
            self._transport.writelines(unsent)

    def _added(self, size: int) -> None:
        """Have the `size` bytes sent that were added to the unsent frames."""
        self._unsent_bytes += size
        if self._unsent_bytes > _FLUSHED_BYTES:
            self.flush()  # may pause
        elif not self._is_scheduled:
            self._is_scheduled = True
            self._call_soon(self._turn_ended)

    def _turn_ended(self) -> None:
        self._is_scheduled = False
        self.flush()

    def respond(self, out: Outgoing, response: Buffer, metadata: Metadata, *, is_compressed: bool = False) -> None:
        """Send the only message of a successful response, and its trailers. Raises Overloaded, before anything is sent."""
        size = len(response)
        total = size + PREFIX_BYTES
        limit = min(self.window.left, out.window.left, self.max_frame_bytes, _AT_ONCE_BYTES)
        if total > limit or self._ready or self.is_paused or is_compressed:
            self.send(out, response, is_compressed=is_compressed)
            self.finish(out, 0, "", metadata)
            return
        self.window.left -= total
        out.is_over = True
        self.responses += 1
        stream, encoder = out.stream, self.encoder
        head = encoder.response()
        ok = encoder.trailers(0, "", metadata) if metadata else encoder.success()
        end = encode_header_block(stream, END_STREAM, ok, self.max_frame_bytes)
        start = (
            frame_head(len(head), HEADERS, END_HEADERS, stream),
            head,
            frame_head(total, DATA, 0, stream),
            PREFIX.pack(0, size),
        )
        if size <= _COPIED_BYTES:
            self._unsent.append(b"".join((*start, response, end)))
        else:
            self._unsent += (b"".join(start), response, end)
        self._unsent_bytes += size + len(end)
        self._ended(out)
        if self._unsent:
            self._added(0)

    def send(self, out: Outgoing, message: Buffer, *, is_compressed: bool = False) -> None:
        """Send a message as soon as the windows allow. Raises Overloaded, before anything of it is sent."""
        total = len(message) + PREFIX_BYTES
        if total > _COUNTED_BYTES or self._uncounted_bytes + total > _UNCOUNTED_BYTES:
            self._capacity.hold_waiting(out.key, total, out.held_bytes)
            out.held_bytes += total
        else:
            self._uncounted_bytes += total
            out.uncounted_bytes += total
        prefix = PREFIX.pack(is_compressed, len(message))
        if total <= _COPIED_BYTES:
            out.pieces.append(memoryview(b"".join((prefix, message))))
        else:
            out.pieces += (memoryview(prefix), memoryview(message).cast("B"))
        self._wait_for_turn(out)

    def finish(self, out: Outgoing, status: int, text: str, metadata: Metadata) -> None:
        """Send the trailers after what waits."""
        out.trailers = (status, text, metadata)
        if not out.pieces:
            frames: list[Buffer] = []
            self._add_head(out, frames)
            self._add_trailers(out, frames)

    def fail(self, out: Outgoing, status: int, text: str, metadata: Metadata, http_status: int = 200) -> None:
        """End a response by a failure, without what waits."""
        self.drop(out, is_over=False)
        if out.has_begun:
            return self.finish(out, status, text, metadata)
        block = self.encoder.failure(status, text, metadata, http_status)
        self.control(encode_header_block(out.stream, END_STREAM, block, self.max_frame_bytes))
        self._over(out)

    def drop(self, out: Outgoing, *, is_over: bool = True) -> None:
        """Forget what waits of a response, of which nothing more is sent if it `is_over`."""
        out.is_over = out.is_over or is_over
        out.pieces.clear()
        out.trailers = None
        self._ready.pop(out, None)
        self._drained(out)

    def window_grown(self, out: Outgoing) -> None:
        """Go on with a response whose own window has grown."""
        if out.pieces:
            self._wait_for_turn(out)

    def _wait_for_turn(self, out: Outgoing) -> None:
        self._ready[out] = None
        self.pump()

    def pump(self) -> None:
        """Send what the windows and the transport allow."""
        ready = self._ready
        while ready and self.window.left > 0 and not self.is_paused:
            out = next(iter(ready))
            del ready[out]
            frames: list[Buffer] = []
            self._take_turn(out, frames)
            if out.pieces and out.window.left > 0:
                ready[out] = None
            if frames:
                self.responses += 1
                self._unsent += frames
                self._added(sum(map(len, frames)))  # may pause

    def _take_turn(self, out: Outgoing, frames: list[Buffer]) -> None:
        """Add frames of a response for one turn."""
        self._add_head(out, frames)
        sent_bytes = 0
        while out.pieces and sent_bytes < _TURN_BYTES:
            room = min(self.window.left, out.window.left, self.max_frame_bytes)
            if room <= 0:
                break
            sent_bytes += self._add_frame(out, frames, room)
        out.sent_bytes += sent_bytes
        if not out.pieces:
            self._drained(out)
            if out.trailers is not None:
                self._add_trailers(out, frames)

    def _add_head(self, out: Outgoing, frames: list[Buffer]) -> None:
        if not out.has_begun:
            out.has_begun = True
            frames.append(encode_header_block(out.stream, 0, self.encoder.response(out.encoding), self.max_frame_bytes))

    def _add_frame(self, out: Outgoing, frames: list[Buffer], room: int) -> int:
        head = len(frames)
        frames.append(b"")
        size, pieces = 0, out.pieces
        while pieces and size < room:
            piece = pieces.popleft()
            if len(piece) > room - size:
                pieces.appendleft(piece[room - size :])
                piece = piece[: room - size]
            size += len(piece)
            frames.append(piece)
        frames[head] = frame_head(size, DATA, 0, out.stream)
        self.window.left -= size
        out.window.left -= size
        return size

    def _add_trailers(self, out: Outgoing, frames: list[Buffer]) -> None:
        assert out.trailers is not None, "a response ends with trailers"
        status, text, metadata = out.trailers
        encoder = self.encoder
        block = encoder.trailers(status, text, metadata) if status or metadata else encoder.success()
        frames.append(encode_header_block(out.stream, END_STREAM, block, self.max_frame_bytes))
        self._unsent += frames
        self._added(sum(map(len, frames)))  # what `ended` may send has to follow
        frames.clear()
        self._over(out)

    def _over(self, out: Outgoing) -> None:
        out.is_over = True
        self.responses += 1
        self._ended(out)

    def _drained(self, out: Outgoing) -> None:
        if out.held_bytes:
            self._capacity.waiting_over(out.key, out.held_bytes)
            self._capacity.release(out.held_bytes)
        self._uncounted_bytes -= out.uncounted_bytes
        out.held_bytes = out.uncounted_bytes = 0
        out.pace = None
        if out.drained is not None:
            if not out.drained.done():
                out.drained.set_result(None)
            out.drained = None


def _ignore(out: Outgoing) -> None:
    pass
