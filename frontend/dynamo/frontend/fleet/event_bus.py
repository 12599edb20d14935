"""The events of the fleet: KV events, load reports, and bookings of other frontends. Their publishers set the rate.

A frontend receives events on a NATS connection of its own. nats-server cuts a connection whose unread bytes pass its limit, and
messages wait behind those that were sent before them on the same connection: events must do neither to requests and responses.

Events are hints, so a frontend that falls behind drops its subscriptions rather than handle old events. `EventBus` measures by
pings how far it is behind, since nats-server sends the response to a ping after everything that it has sent before:

    following → behind for `behind_s`, or cut off meanwhile → subscriptions dropped → the rest is read, and a pause → following

The pause doubles each time that this happens again soon: without subscriptions, a frontend cannot see how much is published.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from dynamo.common.messaging.buffers import Body
from dynamo.common.messaging.nats.connection import Connection, OnMessage

log = logging.getLogger(__name__)

MESSAGES_PER_TURN = 100
"""Events that are handled before requests get their turn of the event loop: about a millisecond."""
_TICK_S = 0.1
_FIRST_PAUSE_S = 2.0
_LONGEST_PAUSE_S = 60.0
_STEADY_S = 30.0
"""After following for so long, the next pause is the first one again."""


class Closable(Protocol):
    async def close(self) -> None: ...


@dataclass(eq=False, slots=True)
class EventSubscription:
    """A subscription that the bus drops and makes again."""

    _bus: EventBus
    subject: str
    on_message: OnMessage
    live: Closable | None = None
    """None while it is dropped."""
    is_closed: bool = False

    async def open(self) -> None:
        live = await self._bus.link.subscribe(self.subject, self.on_message)
        if self.is_closed or self._bus.is_dropped:  # meanwhile
            await live.close()
        else:
            self.live = live

    async def drop(self) -> None:
        live, self.live = self.live, None
        if live is not None:
            await live.close()

    async def close(self) -> None:
        self.is_closed = True
        self._bus.forget(self)
        await self.drop()


class EventBus:
    """Subscriptions that are dropped together while this process cannot follow, as far as `watch` runs.

    `behind_s`: how old events may be.
    """

    def __init__(self, link: Connection, behind_s: float = 1.0) -> None:
        self.link = link
        self.is_dropped = False
        """Whether nothing is received, because this process was behind."""
        self.lag_s = 0.0
        """How old the events are that are handled now."""
        self.drops = 0
        """How often the subscriptions were dropped."""
        self._behind_s = behind_s
        self._loop = asyncio.get_running_loop()
        self._subscriptions: list[EventSubscription] = []
        self._on_dropped: list[Callable[[], None]] = []
        self._on_resumed: list[Callable[[], None]] = []

    def __repr__(self) -> str:
        state = "dropped" if self.is_dropped else "following"
        return f"<EventBus {state}, {self.lag_s:.1f} s behind, {len(self._subscriptions)} subscriptions>"

    @property
    def max_payload(self) -> int:
        return self.link.max_payload

    async def connected(self) -> None:
        """Return once there is a connection."""
        await self.link.connected()

    def publish_nowait(self, subject: str, payload: Body) -> bool:
        """Publish an event, also while none are received."""
        return self.link.publish_nowait(subject, payload)

    async def subscribe(self, subject: str, on_message: OnMessage) -> EventSubscription:
        """Call `on_message` for each event on `subject`, except while the subscriptions are dropped."""
        subscription = EventSubscription(self, subject, on_message)
        self._subscriptions.append(subscription)
        if not self.is_dropped:
            await subscription.open()
        return subscription

    def forget(self, subscription: EventSubscription) -> None:
        if subscription in self._subscriptions:
            self._subscriptions.remove(subscription)

    def on_dropped(self, callback: Callable[[], None]) -> None:
        """Call `callback` when the subscriptions are dropped: the state that was built from events is out of date from now on."""
        self._on_dropped.append(callback)

    def on_resumed(self, callback: Callable[[], None]) -> None:
        """Call `callback` when there are subscriptions again; what was published meanwhile is lost."""
        self._on_resumed.append(callback)

    async def watch(self) -> None:
        """Drop the subscriptions whenever this process is behind, and resume them later, until cancelled."""
        pause_s = _FIRST_PAUSE_S
        while True:
            begun_at = self._loop.time()
            await self._fallen_behind()
            if self._loop.time() - begun_at >= _STEADY_S:
                pause_s = _FIRST_PAUSE_S
            await self._drop()
            await self._quiet(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            await self._resume()

    async def _fallen_behind(self) -> None:
        """Return when a ping has had no response for `behind_s` although bytes arrive, or half of that and was cut off."""
        while self.lag_s < self._behind_s:
            was_cut = await self._measure_lag()
            if was_cut and self.lag_s >= self._behind_s / 2:
                return  # nats-server cuts a connection that is too far behind
            await asyncio.sleep(_TICK_S)

    async def _measure_lag(self) -> bool:
        """Set `lag_s`, to `behind_s` at most. Return whether the connection was cut meanwhile.

        Only time in which bytes arrive counts: a silent nats-server or a frozen process does not mean that too much is published.
        """
        await self.link.connected()
        pong, waited_s = self.link.ping(), 0.0
        while waited_s < self._behind_s:
            before = self.link.last_read_at
            await asyncio.wait({pong}, timeout=_TICK_S)
            if pong.done():
                break
            if self.link.last_read_at > before:
                waited_s += _TICK_S
                self.lag_s = max(self.lag_s, waited_s)
        self.lag_s = waited_s
        return pong.cancelled()

    async def _drop(self) -> None:
        self.is_dropped = True
        self.drops += 1
        log.warning(
            "events of the fleet come faster than they can be handled (%.1f s behind): they are not followed for a while, and "
            "requests are routed by the load that this process knows of",
            self.lag_s,
        )
        for subscription in list(self._subscriptions):
            await subscription.drop()
        for callback in self._on_dropped:
            callback()

    async def _quiet(self, pause_s: float) -> None:
        """Return when what nats-server had sent before has been read, and `pause_s` later."""
        while True:
            await self.link.connected()
            pong = self.link.ping()
            await asyncio.wait({pong})
            if not pong.cancelled():
                break
        self.lag_s = 0.0
        await asyncio.sleep(pause_s)

    async def _resume(self) -> None:
        self.is_dropped = False
        for subscription in list(self._subscriptions):
            await subscription.open()
        log.info("events of the fleet are followed again")
        for callback in self._on_resumed:
            callback()
