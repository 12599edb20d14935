"""Flow control (RFC 9113, 5.2): how much each side may send, of one stream and of the connection."""

from __future__ import annotations

from typing import Final

from dynamo.frontend.api.rpc.http2.frames import MAX_WINDOW_BYTES


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


class Budget:
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
