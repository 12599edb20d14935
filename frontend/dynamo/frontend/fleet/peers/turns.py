"""Exchanges between the frontends of a namespace which API keys wait in line; `serving.queue.turns` says what each makes of it.

A frontend publishes while requests wait, at itself or at another, and nothing otherwise. Each message is complete, so that a lost
one does no harm; no message has a time.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Annotated, Protocol

import msgspec

from dynamo.common.model_card import Role
from dynamo.common.names import turns_subject
from dynamo.frontend.fleet.peers.exchange import Paced, PeerBus, Topic

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


@asynccontextmanager
async def shared_turns(bus: PeerBus, namespace: str, origin: str, table: TurnTable) -> AsyncIterator[None]:
    """Publish which keys wait in the queues of this process while the body runs, and apply what others publish."""
    topic = Topic(bus, turns_subject(namespace), _TurnMessage, origin, "a message about turns")

    def publish() -> None:
        lines = table.published()
        if lines:
            topic.publish(_TurnMessage(origin, lines[:MAX_LINES]))
            messages.due()

    def apply(message: _TurnMessage) -> None:
        table.apply(message.origin, message.lines)
        messages.due()

    messages = Paced(PERIOD_S, publish)
    table.on_wait(messages.due)
    try:
        async with topic.received(apply):
            yield
    finally:
        messages.cancel()
