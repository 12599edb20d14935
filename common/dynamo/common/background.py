"""Work beside the body of an `async with`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager

log = logging.getLogger(__name__)


@asynccontextmanager
async def running(work: Coroutine[object, object, None], name: str) -> AsyncIterator[None]:
    """Runs `work` beside the body and ends it with the body, whose own error comes through as it is.

    (A TaskGroup would wrap that error.) `work` handles whatever can happen; if it fails all the same, the failure is logged
    at once and raised when the body has ended.
    """
    task = asyncio.create_task(work, name=name)
    task.add_done_callback(_log_failure)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
    if not task.cancelled():
        task.result()


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("%s failed", task.get_name(), exc_info=error)
