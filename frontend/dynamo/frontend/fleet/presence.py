"""Whether instances that etcd does not list any more are still there: they say so themselves, over NATS.

Registrations disappear without their workers where leases expire that could not be renewed (etcd without quorum, a partition
between a worker and etcd), where etcd comes back without its data, and where an operator deletes them. Requests reach such an
instance as before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Annotated, Protocol

import msgspec

from dynamo.common.discovery import Instance
from dynamo.common.errors import DeadlineExceeded, DynamoError, InstanceGone, Unavailable
from dynamo.common.messaging.buffers import Body, Buffer
from dynamo.common.messaging.nats.connection import Connection

RECONNECT_GRACE_S = 5.0
"""After our connection to NATS came back: those of instances may take so long."""
_AT_ONCE = 32
_RESPONSE_S = 5.0
_MAX_NAMES = 1 << 17
"""A registration has at most 1 MiB, and each model one of its own."""
_models_decoder = msgspec.msgpack.Decoder(Annotated[list[str], msgspec.Meta(max_length=_MAX_NAMES)])


class Queries(Protocol):
    """The part of `serving.dispatch.dispatcher.Dispatcher` that is needed here."""

    async def query(self, instance: Instance, verb: str, body: Body, deadline: float) -> Buffer: ...


class Silent(Exception):
    """An instance does not respond."""


class Unknown(Exception):
    """Nothing can be said about an instance: the fault may lie with our own connection."""


class Presence:
    """Asks instances what they serve. At most `_AT_ONCE` are asked at once."""

    def __init__(self, queries: Queries, link: Connection) -> None:
        self._queries = queries
        self._link = link
        self._loop = asyncio.get_running_loop()
        self._limit = asyncio.Semaphore(_AT_ONCE)

    async def served_by(self, instance: Instance) -> Collection[str] | None:
        """Return the names of the models that an instance serves; None if it serves and is too old to name them.

        Raises Silent or Unknown.
        """
        async with self._limit:
            try:
                body = await self._queries.query(instance, "ping", b"", self._loop.time() + _RESPONSE_S)
            except (InstanceGone, DeadlineExceeded):
                raise (Unknown if self._is_disturbed() else Silent) from None
            except Unavailable:
                return ()  # it drains
            except DynamoError:
                return None  # it refuses for another reason, as when it is overloaded
        return _names(body)

    def _is_disturbed(self) -> bool:
        link = self._link
        return (
            not link.is_connected or link.is_silent or self._loop.time() - link.reconnected_at < RECONNECT_GRACE_S + _RESPONSE_S
        )


def _names(body: Buffer) -> Collection[str] | None:
    try:
        names: Collection[str] = _models_decoder.decode(body)
    except msgspec.MsgspecError:
        return None
    return names
