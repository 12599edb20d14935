"""An event for what is seldom waited for."""

from __future__ import annotations

import asyncio
from typing import Literal

import msgspec


class LazyEvent(msgspec.Struct, eq=False):
    """Like `asyncio.Event`, which is only made when something waits. It cannot be cleared."""

    _is_set: bool = False
    _event: asyncio.Event | None = None

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        if self._event is not None:
            self._event.set()

    async def wait(self) -> Literal[True]:
        """Return True once `set` was called."""
        if not self._is_set:
            if self._event is None:
                self._event = asyncio.Event()
            await self._event.wait()
        return True
