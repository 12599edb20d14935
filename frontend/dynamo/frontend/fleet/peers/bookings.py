"""Exchanges the bookings of the frontends of a namespace, with `--router-replica-sync`."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Protocol

import msgspec

from dynamo.common.kv.events import message_encoder
from dynamo.common.messaging.buffers import Body
from dynamo.common.messaging.nats.connection import OnMessage
from dynamo.common.messaging.unreadable import Unreadable
from dynamo.common.names import Endpoint, InstanceId
from dynamo.common.process.background import running
from dynamo.frontend.fleet.event_bus import Closable
from dynamo.frontend.router.loads.shared_bookings import SHARE_S, SharedBookings
from dynamo.frontend.router.loads.table import LoadTable

_COMPLETE_S = 1.0
"""All bookings are published this often."""
_ENTRY_BYTES = 256
"""An instance's bookings or a prompt, at most."""
_MESSAGE_MARGIN_BYTES = 1024
_decoder = msgspec.msgpack.Decoder(SharedBookings)


class BookingsBus(Protocol):
    """The part of `fleet.event_bus.EventBus` that bookings need."""

    @property
    def max_payload(self) -> int: ...

    def publish_nowait(self, subject: str, payload: Body) -> bool: ...

    async def subscribe(self, subject: str, on_message: OnMessage) -> Closable: ...


class Bookings:
    """Publishes the sums of this frontend's bookings to its siblings, and applies theirs."""

    def __init__(self, bus: BookingsBus, endpoint: Endpoint) -> None:
        self._bus = bus
        self._subject = endpoint.bookings_subject()
        self._loop = asyncio.get_running_loop()
        self._shared_at = -math.inf
        self._unreadable = Unreadable("a message of bookings")

    @asynccontextmanager
    async def exchanged(self, loads: LoadTable, is_registered: Callable[[InstanceId], bool]) -> AsyncIterator[None]:
        """Apply the bookings of siblings to `loads`, and forget siblings that fell silent, while the body runs.

        Bookings of instances that are not registered are ignored: they could be invented.
        """

        def on_bookings(subject: str, reply: str, payload: memoryview, no_responders: bool) -> None:
            message = self._unreadable.read(_decoder, subject, payload)
            if message is not None:
                loads.apply(message, self._loop.time(), is_registered)

        def share() -> None:
            self._shared_at = self._loop.time()
            self._publish(loads.take_unshared(self._most_entries()))

        def share_soon() -> None:
            self._loop.call_at(max(self._loop.time(), self._shared_at + SHARE_S), share)

        async def share_all() -> None:
            while True:
                self._publish(loads.all_own_bookings(self._most_entries()))
                loads.expire_siblings(self._loop.time())
                await asyncio.sleep(_COMPLETE_S)

        loads.on_unshared(share_soon)
        subscription = await self._bus.subscribe(self._subject, on_bookings)
        try:
            async with running(share_all(), "bookings"):
                yield
        finally:
            await subscription.close()

    def _most_entries(self) -> int:
        """Return how many instances or prompts fit into a message that nats-server takes."""
        return max((self._bus.max_payload - _MESSAGE_MARGIN_BYTES) // _ENTRY_BYTES, 1)

    def _publish(self, messages: Iterable[SharedBookings]) -> None:
        for message in messages:
            self._bus.publish_nowait(self._subject, message_encoder.encode(message))
