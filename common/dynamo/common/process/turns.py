"""Time for what has come on all connections of a process together: each turn of the event loop takes a few milliseconds for it.

What has just come is read at once while there is time, so that clients that send little do not wait. The rest is queued.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import Final

_TURN_S: Final = 0.004
"""In a turn of the event loop for what has just come, and as much for the line."""
_SHARE_S: Final = 0.001
"""For one connection of the line, before it waits again."""


class LoopTurns:
    """Divides the time. One for all connections of a port."""

    def __init__(self, call_soon: Callable[[Callable[[], None]], object], clock: Callable[[], float] = monotonic) -> None:
        """`call_soon` is the event loop's."""
        self._call_soon = call_soon
        self._clock = clock
        self._line: deque[Callable[[], None]] = deque()
        self._is_scheduled = False
        """The line goes on in the next turn."""
        self._ends_at = 0.0
        """When the time for what has just come is over in this turn; 0: nothing has come in it."""
        self._share_ends_at = 0.0
        """When the time of the connection is over that has left the line; 0: none has."""

    def ends_at(self) -> float:
        """Return until when a connection may read what has come; 0 if it has to `wait`."""
        if self._share_ends_at:
            return self._share_ends_at
        now = self._clock()
        if not self._ends_at:
            self._ends_at = now + _TURN_S
            self._call_soon(self._turn_ended)
        return self._ends_at if now < self._ends_at else 0.0

    def has_time(self) -> bool:
        """Return whether a connection may read more of what has come; if not, it has to `wait`."""
        return self._clock() < self.ends_at()

    def _turn_ended(self) -> None:
        self._ends_at = 0.0

    def wait(self, go_on: Callable[[], None]) -> None:
        """Call `go_on` when it is the turn of a connection, which may then read for a moment."""
        self._line.append(go_on)
        if not self._is_scheduled:
            self._is_scheduled = True
            self._call_soon(self._serve_line)

    def _serve_line(self) -> None:
        line, clock = self._line, self._clock
        now = clock()
        ends_at = now + _TURN_S
        for _ in range(len(line)):
            self._share_ends_at = min(ends_at, now + _SHARE_S)
            line.popleft()()
            now = clock()
            if now >= ends_at:
                break
        self._share_ends_at = 0.0
        self._is_scheduled = bool(line)
        if line:
            self._call_soon(self._serve_line)
