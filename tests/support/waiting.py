"""Bounded waits for a condition that no event announces, the one limit of all waits, and turns of the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # tests of workers and engines wait as well
    from dynamo.frontend.api.capacity import Capacity

WAIT_S = 120.0
"""How long a test waits for anything: a busy machine needs less, and what never comes still ends the test."""


def expiring(seconds: float) -> float:
    """Return `seconds`, for a limit that is shorter than `WAIT_S` since the test goes on when it has passed.

    It bounds what does not come, or is the time-out that the test is about; a sleep is an outage of that length, or time in which
    something would come that must not. What comes later on a busy machine has `WAIT_S`: the rules of the source tree find a
    shorter limit, or a sleep in a test, that is not marked by this function.
    """
    return seconds


async def until(condition: Callable[[], object], within_s: float = WAIT_S) -> None:
    """Return once `condition()` holds. Raises TimeoutError after `within_s`."""
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.005)


async def until_free(capacity: Capacity) -> None:
    """Return when no request and no byte is counted, which is a moment after the client has its response."""
    await until(lambda: not capacity.requests and not capacity.buffered_bytes)


@asynccontextmanager
async def counting_turns() -> AsyncIterator[list[int]]:
    """Count the turns that others have while the body runs."""
    turns = [0]

    async def count() -> None:
        while True:
            turns[0] += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(count())
    try:
        yield turns
    finally:
        task.cancel()
