"""An event loop whose turns a test takes."""

from __future__ import annotations

from collections.abc import Callable


class Loop:
    """An event loop whose clock the test moves, and whose turns it takes."""

    def __init__(self) -> None:
        self.now = 100.0
        self._soon: list[Callable[[], None]] = []

    def clock(self) -> float:
        return self.now

    def call_soon(self, function: Callable[[], None]) -> None:
        self._soon.append(function)

    def turn(self) -> float:
        """Take a turn; return how long it took."""
        begun = self.now
        soon, self._soon = self._soon, []
        for function in soon:
            function()
        return self.now - begun

    @property
    def is_idle(self) -> bool:
        return not self._soon
