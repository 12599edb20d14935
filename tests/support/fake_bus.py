"""A NATS bus inside the test's process: at most once and in order. Connections can be cut, messages lost, the bus can hang."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from dynamo.common.messaging.buffers import Body
from dynamo.common.messaging.nats.connection import Connection, OnMessage
from dynamo.common.messaging.request_plane.frames import joined


class FakeSubscription:
    def __init__(self, bus: FakeBus, subject: str, on_message: OnMessage, connection: FakeConnection) -> None:
        self.subject = subject
        self.on_message = on_message
        self.connection = connection
        self._bus = bus

    async def close(self) -> None:
        if self in self._bus.subscriptions:
            self._bus.subscriptions.remove(self)


class FakeBus:
    def __init__(self) -> None:
        self.subscriptions: list[FakeSubscription] = []
        self.is_lost: Callable[[str, bytes], bool] = lambda subject, payload: False
        """Whether a message gets lost on the way."""
        self.is_hung = False
        self.latency_s = 0.0
        self._later: list[Callable[[], None]] = []
        self._held_bytes = 0

    def held_bytes(self) -> int:
        """Return how much came while the bus hangs."""
        return self._held_bytes

    def go_on(self) -> None:
        """Deliver what came while the bus hung."""
        self.is_hung = False
        later, self._later = self._later, []
        self._held_bytes = 0
        for deliver in later:
            deliver()

    def publish(self, subject: str, payload: bytes, reply: str) -> None:
        if self.is_hung:
            self._held_bytes += len(payload)
            self._later.append(lambda: self.publish(subject, payload, reply))
            return
        if self.is_lost(subject, payload):
            return
        if not self._deliver(subject, reply, payload, False) and reply:
            self._deliver(reply, "", b"", True)

    def _deliver(self, subject: str, reply: str, payload: bytes, no_responders: bool) -> bool:
        reached = [s for s in self.subscriptions if s.connection.is_connected and _matches(s.subject, subject)]
        loop = asyncio.get_running_loop()
        for subscription in reached:
            deliver = partial(self._hand_over, subscription, subject, reply, memoryview(payload), no_responders)
            if self.latency_s:
                loop.call_later(self.latency_s, deliver)
            else:
                loop.call_soon(deliver)
        return bool(reached)

    def _hand_over(
        self, subscription: FakeSubscription, subject: str, reply: str, payload: memoryview, no_responders: bool
    ) -> None:
        if subscription in self.subscriptions and subscription.connection.is_connected:
            subscription.on_message(subject, reply, payload, no_responders)


class FakeConnection(Connection):
    """One process's connection to the bus."""

    def __init__(self, bus: FakeBus, max_payload: int = 1 << 20) -> None:
        self.max_payload = max_payload
        self.reconnected_at = float("-inf")
        self.largest = 0
        """Bytes of the largest message published."""
        self.is_up = True
        self._bus = bus
        self._callbacks: list[Callable[[], None]] = []

    @property
    def is_connected(self) -> bool:
        return self.is_up

    @property
    def is_silent(self) -> bool:
        return self._bus.is_hung

    async def connected(self) -> None:
        """Return at once: the test decides when it is up."""

    def on_reconnect(self, callback: Callable[[], None]) -> None:
        self._callbacks.append(callback)

    def publish_nowait(self, subject: str, payload: Body, reply: str = "") -> bool:
        if not self.is_up:
            return False
        data = bytes(joined(payload))
        self.largest = max(self.largest, len(data))
        self._bus.publish(subject, data, reply)
        return True

    def publish_soon(self, subject: str, payload: bytes, reply: str = "") -> bool:
        return self.publish_nowait(subject, payload, reply)

    async def subscribe(self, subject: str, on_message: OnMessage) -> FakeSubscription:  # type: ignore[override]
        subscription = FakeSubscription(self._bus, subject, on_message, self)
        self._bus.subscriptions.append(subscription)
        return subscription

    def reconnect(self) -> None:
        self.is_up = True
        self.reconnected_at = asyncio.get_running_loop().time()
        for callback in self._callbacks:
            callback()


def _matches(pattern: str, subject: str) -> bool:
    patterns, tokens = pattern.split("."), subject.split(".")
    for position, token in enumerate(patterns):
        if token == ">":
            return len(tokens) > position
        if position >= len(tokens) or token not in ("*", tokens[position]):
            return False
    return len(patterns) == len(tokens)
