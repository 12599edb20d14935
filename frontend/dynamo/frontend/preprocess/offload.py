"""Run the Python code that a large request needs without holding up the requests beside it."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, ParamSpec, TypeVar

from dynamo.common.errors import Overloaded
from dynamo.common.process.fair_line import FairLine
from dynamo.frontend.security.keys import key_name

P = ParamSpec("P")
T = TypeVar("T")

MAX_PENDING = 256
_HUGE_CHARS = 256 * 1024
"""A longer text is tokenized in 80 ms at least, and in seconds by some tokenizers."""


class _Job(NamedTuple):
    function: Callable[[], Any]
    done: Future[Any]


class Offload:
    """A few threads, one by default, for work that would take the event loop more than some milliseconds.

    The interpreter changes threads every 5 ms. With one thread beside it, the event loop waits no longer than that for its turn;
    with the many threads of asyncio's own pool it might wait for each of them, and what else uses that pool would wait for all
    this work. Work that leaves the interpreter, such as tokenization, gets threads of its own, as many as there are processors.

    API keys have their turns, whatever each has waiting. Where too much waits, what the key with most of it sent last is refused.
    """

    def __init__(self, max_pending: int = MAX_PENDING, *, threads: int = 1) -> None:
        self._executor = ThreadPoolExecutor(threads, "large requests")
        self._lock = threading.Lock()
        self._max_pending = max_pending
        self._pending = 0
        self._jobs = FairLine[_Job]()
        """What waits for a thread, by API key."""

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return `function(*args, **kwargs)`, called in the thread. Raises Overloaded if too much is waiting for it."""
        future: Future[T] = Future()
        with self._lock:
            key, displaced = key_name.get(), None
            if self._pending >= self._max_pending:
                displaced = self._displaced_by(key)
            self._jobs.append(key, _Job(partial(function, *args, **kwargs), future))
            self._pending += 1
        # Not when the caller is done: what it gave up waiting for still runs.
        future.add_done_callback(self._over)
        if displaced is None:
            self._executor.submit(self._work)
        else:
            displaced.set_exception(_too_many())
        return await asyncio.wrap_future(future)

    def _displaced_by(self, key: str) -> Future[Any]:
        """Take what is refused in the place of new work of `key`. Raises Overloaded if that is the new one."""
        most = self._jobs.longest() if self._jobs else key
        if self._jobs.count(most) <= self._jobs.count(key) + 1 or self._jobs.last(most).done.cancelled():
            raise _too_many()
        displaced = self._jobs.take_last(most).done
        displaced.set_running_or_notify_cancel()
        return displaced

    def _over(self, _: Future[Any]) -> None:
        with self._lock:
            self._pending -= 1

    def _work(self) -> None:
        """Carry out the first work of the key whose turn it is."""
        with self._lock:
            function, future = self._jobs.take()
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = function()
        except BaseException as error:
            future.set_exception(error)
            del function, future  # the frame of its traceback would keep them, and they it
        else:
            future.set_result(result)

    async def run_if(self, is_large: bool, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return `function(*args, **kwargs)`, called in the thread if `is_large`, else at once."""
        return await self.run(function, *args, **kwargs) if is_large else function(*args, **kwargs)


def _too_many() -> Overloaded:
    return Overloaded("too many large requests are waiting to be prepared")


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
