"""State shared by the frontend processes of a namespace, apart from bookings.

Busy thresholds that are set at run time apply to all frontends: each change is published, and a frontend that starts or
reconnects requests the changes it missed. With `--router-replica-sync` frontends also publish the instances of their sessions.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Annotated, TypeAlias

import msgspec

from dynamo.common.messaging.nats.connection import Connection
from dynamo.common.names import InstanceId, frontends_subject
from dynamo.frontend.fleet.peers.exchange import Paced, Topic
from dynamo.frontend.router.loads.thresholds import Thresholds, ThresholdTable
from dynamo.frontend.router.policies.affinity import SessionKey

log = logging.getLogger(__name__)


class _StateRequest(msgspec.Struct, frozen=True, array_like=True, tag="asking"):
    """Requests all thresholds; sent by a frontend that starts or reconnects."""


class _Changed(msgspec.Struct, frozen=True, array_like=True, tag="thresholds"):
    model: str
    at_ms: int
    active_decode_blocks: float | None
    active_prefill_tokens: int | None


class _SessionPlaced(msgspec.Struct, frozen=True, array_like=True, tag="session"):
    key: SessionKey
    instance: int


_Event: TypeAlias = _StateRequest | _Changed | _SessionPlaced
_EVENTS_PER_MESSAGE = 500
_RESPOND_EVERY_S = 1.0
"""Requests for all thresholds are answered together: many come at once where NATS returns, or from a program that floods."""


class _StateMessage(msgspec.Struct, frozen=True, array_like=True):
    origin: str
    events: Annotated[list[_Event], msgspec.Meta(max_length=_EVENTS_PER_MESSAGE)]


class SharedState:
    """Publishes and applies the shared state, in one message per iteration of the event loop. Use `open_shared_state`."""

    def __init__(self, topic: Topic[_StateMessage], thresholds: ThresholdTable) -> None:
        self._topic = topic
        self._thresholds = thresholds
        self._loop = asyncio.get_running_loop()
        self._waiting: list[_Event] = []
        self._responses = Paced(_RESPOND_EVERY_S, self._publish_all)
        self._on_placed: list[Callable[[SessionKey, InstanceId], None]] = []

    def on_placed(self, callback: Callable[[SessionKey, InstanceId], None]) -> None:
        """Call `callback` with each session that another frontend sent to an instance."""
        self._on_placed.append(callback)

    def set_thresholds(self, model: str, thresholds: Thresholds) -> None:
        """Apply thresholds here at once, and publish them to the other frontends."""
        # Later than any change applied here, even if the clock of the frontend that made it is ahead of ours.
        at_ms = max(time.time_ns() // 1_000_000, self._thresholds.changed_at_ms(model) + 1)
        self._thresholds.set(model, thresholds, at_ms)
        self._enqueue(_thresholds_changed(model, at_ms, thresholds))

    def place(self, key: SessionKey, instance: InstanceId) -> None:
        """Publish the instance of a session; a SessionRouter takes this as `on_placed`."""
        self._enqueue(_SessionPlaced(key, instance))

    def synchronize(self) -> None:
        """Request the thresholds of all other frontends, and publish ours."""
        self._enqueue(_StateRequest())
        self._publish_all()

    def close(self) -> None:
        """Respond no more."""
        self._responses.cancel()

    def apply(self, message: _StateMessage) -> None:
        for event in message.events:
            self._apply(event)

    def _apply(self, event: _Event) -> None:
        match event:
            case _Changed(model, at_ms, decode, prefill):
                thresholds = Thresholds(active_decode_blocks=decode, active_prefill_tokens=prefill)
                if self._thresholds.set(model, thresholds, at_ms):
                    log.info("busy thresholds of model '%s' are now %s", model, thresholds)
            case _SessionPlaced(key, instance):
                for callback in self._on_placed:
                    callback(key, InstanceId(instance))
            case _StateRequest():
                self._responses.due()

    def _publish_all(self) -> None:
        for model, (at_ms, thresholds) in self._thresholds.changes().items():
            self._enqueue(_thresholds_changed(model, at_ms, thresholds))

    def _enqueue(self, event: _Event) -> None:
        if not self._waiting:
            self._loop.call_soon(self._flush)
        self._waiting.append(event)

    def _flush(self) -> None:
        events, self._waiting = self._waiting, []
        for start in range(0, len(events), _EVENTS_PER_MESSAGE):
            self._topic.publish(_StateMessage(self._topic.origin, events[start : start + _EVENTS_PER_MESSAGE]))


def _thresholds_changed(model: str, at_ms: int, thresholds: Thresholds) -> _Changed:
    return _Changed(model, at_ms, thresholds.active_decode_blocks, thresholds.active_prefill_tokens)


@asynccontextmanager
async def open_shared_state(
    connection: Connection, namespace: str, origin: str, thresholds: ThresholdTable
) -> AsyncIterator[SharedState]:
    """Share state with the other frontends of the namespace while the body runs."""
    topic = Topic(connection, frontends_subject(namespace), _StateMessage, origin, "a message of another frontend")
    state = SharedState(topic, thresholds)
    async with topic.received(state.apply):
        connection.on_reconnect(state.synchronize)
        state.synchronize()
        try:
            yield state
        finally:
            state.close()
