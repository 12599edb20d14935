"""Exchanges between the frontends of a namespace which API keys wait; `serving.queue.fair_share` says what each makes of it.

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
MAX_QUEUES = 200
"""Queues that a process publishes, at most; in the other ones, each frontend is fair by itself."""

_NonNegative = Annotated[float, msgspec.Meta(ge=0, le=1e18)]
_Rank = Annotated[float, msgspec.Meta(ge=-1e18, le=1e18)]


class KeyShare(msgspec.Struct, frozen=True, array_like=True):
    """What one process says of a key in a queue."""

    key: str
    rank: _Rank | None
    """Rank of the first request that waits; lower ranks are next before all higher ones. None: none waits."""
    served: _NonNegative
    """Tokens over the weight of the key, lately."""


class QueueShares(msgspec.Struct, frozen=True, array_like=True):
    """What one process says of a queue."""

    model: str
    role: Role | None
    keys: Annotated[list[KeyShare], msgspec.Meta(max_length=MAX_KEYS)]


class ShareTable(Protocol):
    """The queues of a process."""

    def on_wait(self, callback: Callable[[], None]) -> None:
        """Call `callback` when a request waits."""
        ...

    def published(self) -> list[QueueShares]:
        """Return what other processes have to know; [] while no request waits."""
        ...

    def apply(self, origin: str, queues: Iterable[QueueShares]) -> None:
        """Another process has published this."""
        ...


class _ShareMessage(msgspec.Struct, frozen=True, array_like=True):
    origin: Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
    queues: Annotated[list[QueueShares], msgspec.Meta(max_length=MAX_QUEUES)]


@asynccontextmanager
async def shared_fairness(bus: PeerBus, namespace: str, origin: str, table: ShareTable) -> AsyncIterator[None]:
    """Publish which keys wait in the queues of this process while the body runs, and apply what others publish."""
    topic = Topic(bus, turns_subject(namespace), _ShareMessage, origin, "a message about fair shares")

    def publish() -> None:
        queues = table.published()
        if queues:
            topic.publish(_ShareMessage(origin, queues[:MAX_QUEUES]))
            messages.due()

    def apply(message: _ShareMessage) -> None:
        table.apply(message.origin, message.queues)
        messages.due()

    messages = Paced(PERIOD_S, publish)
    table.on_wait(messages.due)
    try:
        async with topic.received(apply):
            yield
    finally:
        messages.cancel()
