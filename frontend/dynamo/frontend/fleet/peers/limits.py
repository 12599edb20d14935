"""Exchanges what the frontends of a namespace use of the limits of API keys; `security.sharing` says what each makes of it.

A message has the totals of the keys that were used since the last one. Every process publishes at least once a second: its own
message shows it that it is connected, and shows the others that it lives. A process that was silent for `LEASE_S` is forgotten,
and what it had in use is free. One that receives nothing, not even its own messages, forgets no peer. No message has a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Annotated, Protocol

import msgspec

from dynamo.common.messaging.nats.connection import Connection
from dynamo.common.names import limits_subject
from dynamo.common.process.background import running
from dynamo.frontend.fleet.peers.exchange import Paced, Topic
from dynamo.frontend.security.sharing import REFRESH_S, Fleet, KeyUse

HEARTBEAT_S = 1.0
LEASE_S = 3.0
MAX_PROCESSES = 1024
"""Processes that are followed, at most; others are ignored."""
_KEYS_PER_S = 10_000
"""Keys per second that reach a process, at most: when more are busy, each is published less often."""
_KEYS_PER_MESSAGE = 500


class LimitTable(Protocol):
    """The accounts of a process."""

    def used(self, names: Iterable[str]) -> list[KeyUse]:
        """Return what this process has used of the limits of some keys."""
        ...

    def in_use(self) -> list[str]:
        """Return the names of the keys whose limits this process uses now."""
        ...

    def apply(self, origin: str, use: KeyUse) -> None:
        """Another process has used so much of the limits of a key."""
        ...

    def forget(self, origin: str) -> None:
        """Another process has gone."""
        ...


class _LimitMessage(msgspec.Struct, frozen=True, array_like=True):
    origin: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    is_new: bool
    """The process has just connected, and needs to know what all others have used."""
    leaves: bool
    keys: list[KeyUse]


class _LimitExchange:
    """What one process uses of the limits of API keys, and what its peers use."""

    def __init__(self, topic: Topic[_LimitMessage], fleet: Fleet, table: LimitTable) -> None:
        self._topic = topic
        self._fleet = fleet
        self._table = table
        self._loop = asyncio.get_running_loop()
        self._used: dict[str, None] = {}
        self._messages = Paced(REFRESH_S, self._flush)
        self._heard_at: dict[str, float] = {}
        """When each other process was heard last."""
        self._is_behind = False
        """What arrives may be as old as the time in which nothing did: our message that asks for news has not come back yet."""
        fleet.reached(self._loop.time())
        fleet.on_used(self._on_used)

    def synchronize(self) -> None:
        """Publish all that is in use here, and request the same of the others."""
        self._publish([], is_new=True)
        self._publish_all()

    async def beat(self) -> None:
        """Show that this process lives, and look which others do, until cancelled."""
        while True:
            if self._is_behind:  # the message that asks for news may have got lost
                self.synchronize()
            else:
                self._publish([])
            await asyncio.sleep(HEARTBEAT_S)
            self._look()

    def leave(self) -> None:
        """Tell the others that this process has gone."""
        self._messages.cancel()
        self._publish(self._table.used(self._used), leaves=True)

    def came_back(self, message: _LimitMessage) -> None:
        """A message of this process itself has arrived, after all that were sent before it."""
        self._connected()
        if message.is_new:
            self._is_behind = False

    def _connected(self) -> None:
        now = self._loop.time()
        if self._fleet.is_isolated(now):
            self._rejoin()
        self._fleet.reached(now)

    def apply(self, message: _LimitMessage) -> None:
        self._connected()
        if message.leaves:
            self._forget(message.origin)
        elif self._is_behind:
            return
        elif message.origin in self._heard_at or len(self._heard_at) < MAX_PROCESSES:
            self._heard_at[message.origin] = self._loop.time()
            self._fleet.found(len(self._heard_at))
            for use in message.keys:
                self._table.apply(message.origin, use)
            if message.is_new:
                self._publish_all()

    def _on_used(self, name: str) -> None:
        self._used[name] = None
        self._messages.due()

    def _publish_all(self) -> None:
        self._used.update(dict.fromkeys(self._table.in_use()))
        if self._used:
            self._messages.due()

    def _flush(self) -> None:
        names, self._used = list(self._used), {}
        self._messages.interval_s = max(REFRESH_S, len(names) * self._fleet.others / _KEYS_PER_S)
        for start in range(0, len(names), _KEYS_PER_MESSAGE):
            self._publish(self._table.used(names[start : start + _KEYS_PER_MESSAGE]))

    def _publish(self, keys: list[KeyUse], *, is_new: bool = False, leaves: bool = False) -> None:
        self._topic.publish(_LimitMessage(self._topic.origin, is_new, leaves, keys))

    def _rejoin(self) -> None:
        """Begin anew, as a process that starts: what was used on either side meanwhile is not made up for.

        A process that was stopped finds messages of all that time, which come at once: they would take from a limit what has been
        there again since.
        """
        self._is_behind = True
        for origin in list(self._heard_at):
            self._forget(origin)
        self.synchronize()

    def _look(self) -> None:
        now = self._loop.time()
        if self._fleet.is_isolated(now):
            return
        for origin, heard_at in list(self._heard_at.items()):
            if now - heard_at > LEASE_S:
                self._forget(origin)

    def _forget(self, origin: str) -> None:
        self._heard_at.pop(origin, None)
        self._fleet.found(len(self._heard_at))
        self._table.forget(origin)


@asynccontextmanager
async def shared_limits(connection: Connection, namespace: str, fleet: Fleet, table: LimitTable) -> AsyncIterator[None]:
    """Share the limits of keys with the other frontends of the namespace while the body runs."""
    topic = Topic(connection, limits_subject(namespace), _LimitMessage, fleet.origin, "a message about limits")
    exchange = _LimitExchange(topic, fleet, table)
    async with topic.received(exchange.apply, on_own=exchange.came_back):
        connection.on_reconnect(exchange.synchronize)
        exchange.synchronize()
        try:
            async with running(exchange.beat(), "limits"):
                yield
        finally:
            exchange.leave()
