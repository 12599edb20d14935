"""Engine servers that come and go while a process runs: each has a worker in front of it for as long as it is listed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import count

from dynamo.common.config import ConfigError
from dynamo.common.errors import DynamoError
from dynamo.common.process.background import awaited
from dynamo.worker.engine.remote.servers import ListedServer

log = logging.getLogger(__name__)

_LOOK_S = 1.0
"""How often the list is looked at."""
_AGAIN_S = 10.0
"""After which a server that could not be used is tried again."""

Serve = Callable[[ListedServer, int, asyncio.Event], Coroutine[None, None, None]]
"""Serves a server, to which it gives a number, until the event is set. Raises DynamoError for one that cannot be used."""


@dataclass(frozen=True, slots=True)
class _Followed:
    number: int
    stop: asyncio.Event
    task: asyncio.Task[None]


async def follow_servers(
    listed: Callable[[], Iterable[ListedServer]], serve: Serve, stop: asyncio.Event, look_s: float = _LOOK_S
) -> None:
    """Serve the servers that `listed` returns, until `stop` is set; those that are not listed any more drain."""
    followed: dict[ListedServer, _Followed] = {}
    try:
        while not stop.is_set():
            _follow(followed, set(listed()), serve)
            await _passed(stop, look_s)
    finally:
        for each in followed.values():
            each.stop.set()
        if followed:
            await asyncio.wait([each.task for each in followed.values()])


def _follow(followed: dict[ListedServer, _Followed], listed: set[ListedServer], serve: Serve) -> None:
    """Start and stop what has changed. A server that is listed again while it drains is served again after that."""
    for server, each in list(followed.items()):
        if each.task.done():
            del followed[server]
            each.task.result()
        elif server not in listed and not each.stop.is_set():
            log.info("%s is not listed any more", server.url)
            each.stop.set()
    for server in listed - set(followed):
        log.info("%s is listed", server.url)
        taken = {each.number for each in followed.values()}
        number, stopping = next(number for number in count() if number not in taken), asyncio.Event()
        followed[server] = _Followed(number, stopping, awaited(_serve(server, number, stopping, serve)))


async def _serve(server: ListedServer, number: int, stop: asyncio.Event, serve: Serve) -> None:
    while not stop.is_set():
        try:
            return await serve(server, number, stop)
        except (DynamoError, ConfigError) as error:
            log.error("%s is not served, and tried again in %g s: %s", server.url, _AGAIN_S, error)
            await _passed(stop, _AGAIN_S)


async def _passed(stop: asyncio.Event, seconds: float) -> None:
    """Return when `stop` is set, or so many seconds have passed."""
    with suppress(TimeoutError):
        await asyncio.wait_for(stop.wait(), seconds)
