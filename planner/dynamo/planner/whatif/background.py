"""Searches in a thread of their own, so that decisions go on meanwhile."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

log = logging.getLogger(__name__)


class SearchThread:
    """Runs searches one after the other; use `search_thread`."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool

    def start(self, search: Callable[[], None]) -> None:
        """Run a search when those before it have ended."""
        self._pool.submit(search).add_done_callback(_log_failure)


def _log_failure(search: Future[None]) -> None:
    if not search.cancelled() and (error := search.exception()) is not None:
        log.error("a what-if failed; decisions go on without it", exc_info=error)


@contextmanager
def search_thread() -> Iterator[SearchThread]:
    """At the end of the body, the search that goes on is completed, which takes seconds, and no further one begins."""
    pool = ThreadPoolExecutor(1, "what-if")
    try:
        yield SearchThread(pool)
    finally:
        pool.shutdown(cancel_futures=True)
