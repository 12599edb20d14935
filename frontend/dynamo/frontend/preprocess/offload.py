"""Run the Python code that a large request needs without holding up the requests beside it."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from dynamo.common.errors import Overloaded

P = ParamSpec("P")
T = TypeVar("T")

MAX_PENDING = 256
_HUGE_CHARS = 256 * 1024
"""A longer text is tokenized in 80 ms at least, and in seconds by some tokenizers."""


class Offload:
    """A few threads, one by default, for work that would take the event loop more than some milliseconds.

    The interpreter changes threads every 5 ms. With one thread beside it, the event loop waits no longer than that for its turn;
    with the many threads of asyncio's own pool it might wait for each of them, and what else uses that pool would wait for all
    this work. Work that leaves the interpreter, such as tokenization, gets threads of its own, as many as there are processors.
    """

    def __init__(self, max_pending: int = MAX_PENDING, *, threads: int = 1) -> None:
        self._executor = ThreadPoolExecutor(threads, "large requests")
        self._places = threading.Semaphore(max_pending)

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return `function(*args, **kwargs)`, called in the thread. Raises Overloaded if too much is waiting for it."""
        if not self._places.acquire(blocking=False):
            raise Overloaded("too many large requests are waiting to be prepared")
        future = self._executor.submit(function, *args, **kwargs)
        # Not when the caller is done: what it gave up waiting for still runs.
        future.add_done_callback(lambda _: self._places.release())
        return await asyncio.wrap_future(future)

    async def run_if(self, is_large: bool, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return `function(*args, **kwargs)`, called in the thread if `is_large`, else at once."""
        return await self.run(function, *args, **kwargs) if is_large else function(*args, **kwargs)


class TextThreads:
    """Threads for texts to encode and tokens to decode, as many as there are processors, and one beside them for huge texts.

    Huge texts wait for one another, so that requests of another caller, which are seldom huge, do not wait for them.
    """

    def __init__(self, one: Offload | None = None) -> None:
        """With `one`, all of them wait for one another there."""
        self._usual = one or Offload(threads=os.cpu_count() or 1)
        self._huge = one or Offload()

    async def run(self, size: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return `function(*args, **kwargs)`, called in a thread for `size` characters or tokens. Raises Overloaded."""
        offload = self._huge if size > _HUGE_CHARS else self._usual
        return await offload.run(function, *args, **kwargs)
