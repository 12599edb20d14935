"""Exchanges between the frontends of a namespace which API keys wait in line; `serving.queue.turns` says what each makes of it.

A frontend publishes while requests wait, at itself or at another, and nothing otherwise. Each message is complete, so that a lost
one does no harm; no message has a time.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Annotated, Protocol

import msgspec

from dynamo.common.messaging.nats.connection import Connection
from dynamo.common.messaging.unreadable import Unreadable
from dynamo.common.model_card import Role
from dynamo.common.names import turns_subject

PERIOD_S = 0.05
"""Between two messages of a process."""
MAX_KEYS = 64
"""Keys of a queue that a process publishes, at most; those that are next come first."""
MAX_LINES = 200
"""Queues that a process publishes, at most; in the other ones, each frontend is fair by itself."""

_NonNegative = Annotated[float, msgspec.Meta(ge=0, le=1e18)]
_Rank = Annotated[float, msgspec.Meta(ge=-1e18, le=1e18)]


class KeyTurns(msgspec.Struct, frozen=True, array_like=True):
    """What one process says of a key in a line."""

    key: str
    rank: _Rank | None
    """Rank of the first request that waits; lower ranks are next before all higher ones. None: none waits."""
    served: _NonNegative
    """Tokens over the weight of the key, lately."""


class LineTurns(msgspec.Struct, frozen=True, array_like=True):
    """What one process says of a line."""

    model: str
    role: Role | None
    keys: Annotated[list[KeyTurns], msgspec.Meta(max_length=MAX_KEYS)]


class TurnTable(Protocol):
    """The lines of a process."""

    def on_wait(self, callback: Callable[[], None]) -> None:
        """Call `callback` when a request waits."""
        ...

    def published(self) -> list[LineTurns]:
        """Return what other processes have to know; [] while no request waits."""
        ...

    def apply(self, origin: str, lines: Iterable[LineTurns]) -> None:
        """Another process has published this."""
        ...


class _TurnMessage(msgspec.Struct, frozen=True, array_like=True):
    origin: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    lines: Annotated[list[LineTurns], msgspec.Meta(max_length=MAX_LINES)]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_TurnMessage)


class TurnExchange:
    """Publishes which keys wait in the queues of one process, and receives what its peers publish; use `open_turn_exchange`."""

    def __init__(self, connection: Connection, namespace: str, table: TurnTable) -> None:
        self.subject = turns_subject(namespace)
        self._connection = connection
        self._table = table
        self._origin = secrets.token_hex(8)
        self._loop = asyncio.get_running_loop()
        self._published_at = -PERIOD_S
        self._timer: asyncio.TimerHandle | None = None
        self._unreadable = Unreadable("a message about turns")
        table.on_wait(self._schedule)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def on_message(self, subject: str, reply: str, payload: memoryview, no_responders: bool) -> None:
        message = self._unreadable.read(_decoder, subject, payload)
        if message is not None and message.origin != self._origin:
            self._table.apply(message.origin, message.lines)
            self._schedule()

    def _schedule(self) -> None:
        if self._timer is None:
            self._timer = self._loop.call_at(max(self._loop.time(), self._published_at + PERIOD_S), self._flush)

    def _flush(self) -> None:
        self._timer = None
        self._published_at = self._loop.time()
        lines = self._table.published()
        if lines:
            self._connection.publish_nowait(self.subject, _encoder.encode(_TurnMessage(self._origin, lines[:MAX_LINES])))
            self._schedule()


@asynccontextmanager
async def open_turn_exchange(connection: Connection, namespace: str, table: TurnTable) -> AsyncIterator[None]:
    """Share turns with the other frontends of the namespace while the body runs."""
    exchange = TurnExchange(connection, namespace, table)
    async with connection.subscribed(exchange.subject, exchange.on_message):
        try:
            yield
        finally:
            exchange.close()
