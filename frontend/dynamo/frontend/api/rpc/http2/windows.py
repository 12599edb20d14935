"""How much, how often and how slowly either side may act: flow control (RFC 9113, 5.2), budgets and the least pace."""

from __future__ import annotations

from typing import Final

from dynamo.frontend.api.rpc.http2.frames import DEFAULT_WINDOW_BYTES, MAX_WINDOW_BYTES

CONNECTION_WINDOW_BYTES: Final = 16 * 2**20
STREAM_WINDOW_BYTES: Final = 4 * 2**20
"""Without these options. A message that is larger than its stream's window makes that grow when its size is known."""
GUARDED_WINDOW_BYTES: Final = DEFAULT_WINDOW_BYTES
"""Window of a stream before its caller is accepted, where callers must show credentials."""
RESETS_PER_S: Final = 100.0
"""By a connection's client; ten times as many at once."""
_LEAST_BYTES_PER_S: Final = 1024
_MAX_STREAMS: Final = 4096


class WindowOverflow(Exception):
    """A client made a window larger than HTTP/2 allows."""


class SendWindow:
    """What we may send. A change of the client's settings can make it negative."""

    __slots__ = ("left",)

    def __init__(self, size: int) -> None:
        self.left = size

    def grow(self, more: int) -> None:
        """Raises WindowOverflow."""
        if self.left + more > MAX_WINDOW_BYTES:
            raise WindowOverflow
        self.left += more


class ReceiveWindow:
    """What the client may send."""

    __slots__ = ("left",)

    def __init__(self, size: int) -> None:
        self.left = size

    def take(self, count: int) -> bool:
        """Count received bytes; return whether they were allowed."""
        self.left -= count
        return self.left >= 0

    def grant(self, wanted: int) -> int:
        """Return, and count, by how much the window is to grow so that the client may send `wanted` bytes.

        That is 0 as long as half of it is left, so that one update comes for many frames.
        """
        if 2 * self.left >= wanted:
            return 0
        more = min(wanted, MAX_WINDOW_BYTES) - self.left
        self.left += more
        return more


class ActionBudget:
    """How often a client may do what costs us more than it: `burst` times at once, `per_s` times a second on average."""

    __slots__ = ("_at", "_burst", "_left", "_per_s")

    def __init__(self, burst: int, per_s: float) -> None:
        self._burst: Final = float(burst)
        self._per_s: Final = per_s
        self._left = self._burst
        self._at = 0.0

    def spend(self, now: float) -> bool:
        """Count once more, at a moment in seconds; return whether that is within the budget."""
        self._left = min(self._burst, self._left + (now - self._at) * self._per_s) - 1
        self._at = now
        return self._left >= 0


class Pace:
    """Whether bytes move fast enough: at least `_LEAST_BYTES_PER_S`, averaged over each period of `period_s`."""

    __slots__ = ("_moved", "_period_s", "_since")

    def __init__(self, moved: int, now: float, period_s: float) -> None:
        """`moved`: the count of bytes at the moment `now`."""
        self._moved = moved
        self._since = now
        self._period_s: Final = period_s

    def is_too_slow(self, moved: int, now: float) -> bool:
        """Take note of the count; return whether a period ends now in which too little has moved."""
        elapsed_s = now - self._since
        if elapsed_s < self._period_s:
            return False
        is_slow = moved - self._moved < elapsed_s * _LEAST_BYTES_PER_S
        self._moved, self._since = moved, now
        return is_slow


class LastStreams:
    """The last streams that were added."""

    __slots__ = ("_ids",)

    def __init__(self) -> None:
        self._ids: dict[int, None] = {}

    def add(self, stream: int) -> None:
        self._ids[stream] = None
        if len(self._ids) > _MAX_STREAMS:
            del self._ids[next(iter(self._ids))]

    def __contains__(self, stream: int) -> bool:
        return stream in self._ids
