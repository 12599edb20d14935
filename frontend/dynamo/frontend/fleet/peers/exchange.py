"""One way in which the frontends of a namespace tell one another something: one kind of message on one subject.

Whatever is told, a message may get lost, arrive before the frontend knows its sender, or come from a program that is no frontend.
So each message carries the name of the process that sent it, is read strictly, and is dropped if it cannot be read.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Generic, Protocol, TypeVar

import msgspec

from dynamo.common.messaging.buffers import Body
from dynamo.common.messaging.nats.connection import OnMessage
from dynamo.common.messaging.unreadable import Unreadable
from dynamo.frontend.fleet.event_bus import Closable


class PeerMessage(Protocol):
    @property
    def origin(self) -> str:
        """The process that sent it."""
        ...


MessageType = TypeVar("MessageType", bound=PeerMessage)


class PeerBus(Protocol):
    """A connection to NATS: the first or, for what comes at any rate, the second."""

    def publish_nowait(self, subject: str, payload: Body) -> bool: ...

    async def subscribe(self, subject: str, on_message: OnMessage) -> Closable: ...


class Topic(Generic[MessageType]):
    """One kind of message, `kind` in words, between frontends of which this one is called `origin`."""

    def __init__(self, bus: PeerBus, subject: str, message: type[MessageType], origin: str, kind: str) -> None:
        self.origin = origin
        self._bus = bus
        self._subject = subject
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(message)
        self._unreadable = Unreadable(kind)

    def publish(self, message: MessageType) -> None:
        self._bus.publish_nowait(self._subject, self._encoder.encode(message))

    @asynccontextmanager
    async def received(
        self, on_message: Callable[[MessageType], None], *, on_own: Callable[[MessageType], None] | None = None
    ) -> AsyncIterator[None]:
        """Call `on_message` with each message of other frontends while the body runs, and `on_own` with our own."""

        def received(subject: str, reply: str, payload: memoryview, no_responders: bool) -> None:
            message = self._unreadable.read(self._decoder, subject, payload)
            if message is None:
                return
            if message.origin != self.origin:
                on_message(message)
            elif on_own is not None:
                on_own(message)

        subscription = await self._bus.subscribe(self._subject, received)
        try:
            yield
        finally:
            await subscription.close()


class Paced:
    """Calls a function soon after it is due, and at most once in `interval_s`, which may change."""

    def __init__(self, interval_s: float, call: Callable[[], None]) -> None:
        self.interval_s = interval_s
        self._call = call
        self._loop = asyncio.get_running_loop()
        self._called_at = -math.inf
        self._timer: asyncio.TimerHandle | None = None

    def due(self) -> None:
        if self._timer is None:
            self._timer = self._loop.call_at(max(self._loop.time(), self._called_at + self.interval_s), self._run)

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _run(self) -> None:
        self._timer = None
        self._called_at = self._loop.time()
        self._call()
