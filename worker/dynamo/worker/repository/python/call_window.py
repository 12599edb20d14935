"""How many responses to one call of a model may be on the way to it."""

from __future__ import annotations

import asyncio

from dynamo.worker.repository.wire import wire


class CallWindow:
    """How many responses to one call may be sent to the model that made it."""

    def __init__(self) -> None:
        self._sent = 0
        self._allowed = wire.RESPONSE_WINDOW
        self._grown = asyncio.Event()

    def __repr__(self) -> str:
        return f"<CallWindow, sent={self._sent}, allowed={self._allowed}>"

    def grow(self, total: int) -> None:
        self._allowed = max(self._allowed, total)
        self._grown.set()

    async def take(self) -> None:
        """Wait until one more response may be sent, and count it."""
        while self._sent >= self._allowed:
            self._grown.clear()
            await self._grown.wait()
        self._sent += 1
