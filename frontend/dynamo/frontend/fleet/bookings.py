"""Exchanges the bookings of the frontends of a namespace, with `--router-replica-sync`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Protocol

import msgspec

from dynamo.common.background import running
from dynamo.common.kv.events import message_encoder
from dynamo.common.kv.hashes import HASH_BYTES
from dynamo.common.messaging.connection import OnMessage
from dynamo.common.messaging.frames import Body
from dynamo.common.messaging.unreadable import Unreadable
from dynamo.common.names import Endpoint, InstanceId
from dynamo.frontend.router.load import BookingEvent, LoadTable, Step

_ALIVE_S = 1.0
_MAX_BOOKINGS = 200_000
"""Open at once, of all frontends together."""
_EVENT_BYTES = 128
"""An event without its blocks, at most."""
_MESSAGE_MARGIN_BYTES = 1024
_bookings_decoder = msgspec.msgpack.Decoder(list[BookingEvent])


class _Closable(Protocol):
    async def close(self) -> None: ...


class BookingsBus(Protocol):
    """The part of `fleet.event_bus.EventBus` that bookings need."""

    @property
    def max_payload(self) -> int: ...

    def publish_nowait(self, subject: str, payload: Body) -> bool: ...

    async def subscribe(self, subject: str, on_message: OnMessage) -> _Closable: ...


class Bookings:
    """Publishes this frontend's bookings to its siblings, once per event-loop turn, and applies theirs."""

    def __init__(self, bus: BookingsBus, endpoint: Endpoint) -> None:
        self._bus = bus
        self._subject = endpoint.bookings_subject()
        self._loop = asyncio.get_running_loop()
        self._waiting: list[BookingEvent] = []

    def publish(self, event: BookingEvent) -> None:
        """Publish a booking; a LoadTable takes this as `on_booking`."""
        if not self._waiting:
            self._loop.call_soon(self._flush)
        self._waiting.append(event)

    def _flush(self) -> None:
        """Send what waits, in messages that nats-server takes: the blocks of one long prompt have a megabyte."""
        events, self._waiting = self._waiting, []
        max_bytes = self._bus.max_payload - _MESSAGE_MARGIN_BYTES
        batch: list[BookingEvent] = []
        size = 0
        for event in events:
            if (event_bytes := len(event.blocks) + _EVENT_BYTES) > max_bytes:
                event = _without_blocks(event)
                event_bytes = _EVENT_BYTES
            if size + event_bytes > max_bytes:
                self._bus.publish_nowait(self._subject, message_encoder.encode(batch))
                batch, size = [], 0
            batch.append(event)
            size += event_bytes
        self._bus.publish_nowait(self._subject, message_encoder.encode(batch))

    @asynccontextmanager
    async def exchanged(self, loads: LoadTable, is_registered: Callable[[InstanceId], bool]) -> AsyncIterator[None]:
        """Apply the bookings of siblings to `loads`, and forget siblings that fell silent, while the body runs.

        Bookings of instances that are not registered are ignored, and those past `_MAX_BOOKINGS`: anyone could invent them.
        """
        unreadable = Unreadable("a message of bookings")

        def on_bookings(subject: str, reply: str, payload: memoryview, no_responders: bool) -> None:
            try:
                events: Iterable[BookingEvent] = _bookings_decoder.decode(payload)
            except (ValueError, RecursionError) as error:
                return unreadable.drop(subject, error)
            now = self._loop.time()
            for event in events:
                if event.step is not Step.BOOKED or (is_registered(InstanceId(event.instance)) and len(loads) < _MAX_BOOKINGS):
                    loads.apply(event, now)

        async def keep_alive() -> None:
            while True:
                self.publish(loads.alive())
                loads.expire_siblings(self._loop.time())
                await asyncio.sleep(_ALIVE_S)

        subscription = await self._bus.subscribe(self._subject, on_bookings)
        try:
            async with running(keep_alive(), "bookings"):
                yield
        finally:
            await subscription.close()


def _without_blocks(event: BookingEvent) -> BookingEvent:
    """Return the same load, in blocks that no other request shares."""
    blocks = len(event.blocks) // HASH_BYTES
    return msgspec.structs.replace(event, blocks=b"", extra_blocks=event.extra_blocks + blocks)
