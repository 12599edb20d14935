"""Exchanges the bookings of the frontends of a namespace, with `--router-replica-sync`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Protocol

from dynamo.common.names import Endpoint, InstanceId
from dynamo.common.process.background import running
from dynamo.frontend.fleet.peers.exchange import Paced, PeerBus, Topic
from dynamo.frontend.router.loads.shared_bookings import SHARE_S, SharedBookings
from dynamo.frontend.router.loads.table import LoadTable

_COMPLETE_S = 1.0
"""All bookings are published this often."""
_ENTRY_BYTES = 256
"""An instance's bookings or a prompt, at most."""
_MESSAGE_MARGIN_BYTES = 1024


class BookingsBus(PeerBus, Protocol):
    @property
    def max_payload(self) -> int: ...


@asynccontextmanager
async def shared_bookings(
    bus: BookingsBus, endpoint: Endpoint, loads: LoadTable, is_registered: Callable[[InstanceId], bool]
) -> AsyncIterator[None]:
    """Publish the sums of this frontend's bookings while the body runs, apply those of others, and forget who fell silent.

    Bookings of instances that are not registered are ignored: they could be invented.
    """
    clock = asyncio.get_running_loop().time
    topic = Topic(bus, endpoint.bookings_subject(), SharedBookings, loads.origin, "a message of bookings")

    def most_entries() -> int:
        """Return how many instances or prompts fit into a message that nats-server takes."""
        return max((bus.max_payload - _MESSAGE_MARGIN_BYTES) // _ENTRY_BYTES, 1)

    def publish(messages: Iterable[SharedBookings]) -> None:
        for message in messages:
            topic.publish(message)

    async def share_all() -> None:
        while True:
            publish(loads.all_own_bookings(most_entries()))
            loads.expire_peers(clock())
            await asyncio.sleep(_COMPLETE_S)

    changes = Paced(SHARE_S, lambda: publish(loads.take_unshared(most_entries())))
    loads.on_unshared(changes.due)
    try:
        async with topic.received(lambda message: loads.apply(message, clock(), is_registered)), running(share_all(), "bookings"):
            yield
    finally:
        changes.cancel()
