"""Watches of grpc.health.v1 calls: those of all clients share one timer, and the status of each service is determined once.

A watch needs no key and has no end, so it may cost nothing while nothing changes, and there are bounds on their number.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, Generic, TypeVar

S = TypeVar("S")

PER_CONNECTION: Final = 16
PER_PROCESS: Final = 1024
_PERIOD_S: Final = 0.5
"""What becomes ready without a change of the fleet, such as a tokenizer, is noticed this late."""
_LEAST_S: Final = 0.05
"""Between two looks at all statuses, however often the fleet changes."""


class TooManyWatches(Exception):
    """A watch beyond a bound, which `str()` names."""


class WatchedService(Generic[S]):
    """One service that is watched."""

    def __init__(self, status: S) -> None:
        self.status = status
        self.watches = 0
        self._changed = asyncio.Event()

    def next_change(self) -> asyncio.Event:
        """Return what is set by the next change. To miss none, take it before the status."""
        return self._changed

    def change(self, status: S) -> None:
        self.status = status
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


class Watches(Generic[S]):
    """All watches of a process."""

    def __init__(self, status: Callable[[str], S], is_ending: Callable[[], bool]) -> None:
        """`status` determines that of a service. Once `is_ending`, each watch is told, whether or not its status changes."""
        self._status = status
        self._is_ending = is_ending
        self._services: dict[str, WatchedService[S]] = {}
        self._by_connection: Counter[str] = Counter()
        self._timer: asyncio.TimerHandle | None = None
        """The timer of the next look; None without a watch."""

    @contextmanager
    def entered(self, connection: str) -> Iterator[None]:
        """Count a watch of a connection. Raises TooManyWatches."""
        if self._by_connection[connection] >= PER_CONNECTION:
            raise TooManyWatches(f"a connection may have {PER_CONNECTION} watches at once")
        if self._by_connection.total() >= PER_PROCESS:
            raise TooManyWatches(f"the server has {PER_PROCESS} watches, which is its limit")
        self._by_connection[connection] += 1
        try:
            yield
        finally:
            self._by_connection[connection] -= 1
            if not self._by_connection[connection]:
                del self._by_connection[connection]

    @contextmanager
    def watching(self, service: str) -> Iterator[WatchedService[S]]:
        """Keep the status of a service up to date while the body runs."""
        watched = self._services.get(service)
        if watched is None:
            watched = self._services[service] = WatchedService(self._status(service))
        watched.watches += 1
        if self._timer is None:
            self._look_in(_PERIOD_S)
        try:
            yield watched
        finally:
            watched.watches -= 1
            if not watched.watches:
                del self._services[service]
            if not self._services and self._timer is not None:
                self._timer.cancel()
                self._timer = None

    def look_soon(self) -> None:
        """The fleet or the process has changed."""
        timer = self._timer
        if timer is not None and timer.when() > asyncio.get_running_loop().time() + _LEAST_S:
            timer.cancel()
            self._look_in(_LEAST_S)

    def _look_in(self, pause_s: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(pause_s, self._look)

    def _look(self) -> None:
        self._look_in(_PERIOD_S)
        is_ending = self._is_ending()
        for service, watched in self._services.items():
            status = self._status(service)
            if status != watched.status or is_ending:
                watched.change(status)
