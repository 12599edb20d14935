"""Bounded waits for a condition that no event announces."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # tests of workers and engines wait as well
    from dynamo.frontend.api.capacity import Capacity


async def until(condition: Callable[[], object], within_s: float = 120) -> None:
    """Return once `condition()` holds. Raises TimeoutError after `within_s`."""
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.005)


async def until_free(capacity: Capacity) -> None:
    """Return when no request and no byte is counted, which is a moment after the client has its response."""
    await until(lambda: not capacity.requests and not capacity.buffered_bytes, 120)
