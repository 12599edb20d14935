"""Announces changes of stored responses to those that follow them, at any frontend of the namespace.

An announcement may get lost: what is stored counts. So a follower looks into the store after a reconnect, and every `LOOK_S`
whatever was announced.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from dynamo.common.messaging.nats.connection import Connection
from dynamo.common.messaging.unreadable import Unreadable
from dynamo.common.names import stored_subject

LOOK_S = 10.0


class Watch:
    """What was announced of one response since the watch began."""

    def __init__(self, look_s: float) -> None:
        self._look_s = look_s
        self._events = 0
        """How many events of the response are stored; 0: not known."""
        self._has_ended = False
        self._position = 0
        self._changed = asyncio.Event()

    def has_read(self, events: int) -> None:
        """The follower has the first `events` events: it is woken for more."""
        self._position = events

    @property
    def is_complete(self) -> bool:
        """Whether the follower has all that was announced, and nothing is stored beyond that."""
        return self._position == self._events and not self._has_ended

    async def changed(self) -> None:
        """Return when more is stored, or may be."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._look_s):
                await self._changed.wait()
        self._changed.clear()

    def apply(self, events: int | None) -> None:
        """So many events are stored; None: the response has ended."""
        if events is None:
            self._has_ended = True
        else:
            self._events = max(self._events, events)
        if events is None or events > self._position:
            self._changed.set()

    def doubt(self) -> None:
        """Announcements may have got lost."""
        self._events = 0
        self._changed.set()


class ResponseChanges:
    """Announces the changes of a namespace's stored responses, and watches them."""

    def __init__(self, connection: Connection, namespace: str, *, look_s: float = LOOK_S) -> None:
        self._connection = connection
        self._namespace = namespace
        self._look_s = look_s
        self._watches: set[Watch] = set()
        self._unreadable = Unreadable("an announcement of a stored response")
        connection.on_reconnect(self._doubt)

    def announce(self, id: str, events: int | None = None) -> None:
        """Announce that so many events of a response are stored; None: that it has ended, in whichever way."""
        self._connection.publish_soon(stored_subject(self._namespace, id), b"" if events is None else b"%d" % events)

    @asynccontextmanager
    async def watching(self, id: str) -> AsyncIterator[Watch]:
        """Watch a response: what is stored after the body was entered is announced to it. Raises Unavailable."""
        watch = Watch(self._look_s)

        def on_message(subject: str, reply: str, payload: memoryview, no_responders: bool) -> None:
            try:
                watch.apply(int(bytes(payload[:12])) if payload else None)
            except ValueError as error:
                self._unreadable.drop(subject, error)

        async with self._connection.subscribed(stored_subject(self._namespace, id), on_message):
            self._watches.add(watch)
            try:
                yield watch
            finally:
                self._watches.discard(watch)

    def _doubt(self) -> None:
        for watch in self._watches:
            watch.doubt()
