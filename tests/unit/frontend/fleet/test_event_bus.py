"""Following events, and doing without them while they come too fast, in virtual time."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from dynamo.common.messaging.buffers import Body
from dynamo.common.messaging.nats.connection import OnMessage
from dynamo.common.process.background import running
from dynamo.frontend.fleet.event_bus import EventBus
from tests.support.virtual_time import in_virtual_time

BYTES_PER_S = 1000
MESSAGE_BYTES = 10


class SlowLink:
    """A connection that reads `BYTES_PER_S`. What comes beyond that waits at the server, pongs behind messages."""

    max_payload = 1 << 20

    def __init__(self) -> None:
        self.last_read_at = float("-inf")
        self.subjects: list[str] = []
        self.flood_per_s = 0.0
        """Bytes that others publish."""
        self.is_silent = False
        self._unread: deque[int | asyncio.Future[bool]] = deque()
        self._pings: list[asyncio.Future[bool]] = []

    async def run(self) -> None:
        loop, tick_s = asyncio.get_running_loop(), 0.01
        while True:
            await asyncio.sleep(tick_s)
            if self.flood_per_s and self.subjects:
                self._unread.append(int(self.flood_per_s * tick_s))
            left = BYTES_PER_S * tick_s
            while self._unread and left > 0 and not self.is_silent:
                first = self._unread.popleft()
                self.last_read_at = loop.time()
                if isinstance(first, asyncio.Future):
                    if not first.done():
                        first.set_result(True)
                    continue
                if first > left:
                    self._unread.appendleft(int(first - left))
                left -= first

    def ping(self) -> asyncio.Future[bool]:
        pong: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._unread.append(pong)
        self._pings.append(pong)
        return pong

    def cut(self) -> None:
        """As nats-server does it with a slow consumer."""
        self._unread.clear()
        for pong in self._pings:
            pong.cancel()

    async def connected(self) -> None: ...

    async def subscribe(self, subject: str, on_message: OnMessage) -> SlowSubscription:
        self.subjects.append(subject)
        return SlowSubscription(self, subject)

    def publish_nowait(self, subject: str, payload: Body, reply: str = "") -> bool:
        return True


class SlowSubscription:
    def __init__(self, link: SlowLink, subject: str) -> None:
        self._link = link
        self._subject = subject

    async def close(self) -> None:
        self._link.subjects.remove(self._subject)


def ignore(subject: str, reply: str, payload: memoryview, no_responders: bool) -> None: ...


@asynccontextmanager
async def opened() -> AsyncIterator[tuple[SlowLink, EventBus]]:
    link = SlowLink()
    bus = EventBus(link)
    async with running(link.run(), "link"), running(bus.watch(), "bus"):
        yield link, bus


async def dropped(bus: EventBus, is_dropped: bool = True) -> float:
    """Return the time when the bus has dropped its subscriptions, or follows again."""
    async with asyncio.timeout(1000):
        while bus.is_dropped is not is_dropped:
            await asyncio.sleep(0.01)
    return asyncio.get_running_loop().time()


@in_virtual_time
async def test_events_below_what_can_be_read_are_followed() -> None:
    async with opened() as (link, bus):
        await bus.subscribe("kv", ignore)
        link.flood_per_s = 0.9 * BYTES_PER_S
        await asyncio.sleep(60)
        assert (bus.drops, link.subjects) == (0, ["kv"])
        assert bus.lag_s < 0.2


@in_virtual_time
async def test_events_that_come_too_fast_are_dropped_once_and_followed_again_after_quiet(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    calls: list[str] = []
    async with opened() as (link, bus):
        bus.on_dropped(lambda: calls.append("dropped"))
        bus.on_resumed(lambda: calls.append("resumed"))
        await bus.subscribe("kv", ignore)
        await bus.subscribe("load", ignore)
        link.flood_per_s = 3 * BYTES_PER_S
        await dropped(bus)
        assert (link.subjects, bus.drops, calls) == ([], 1, ["dropped"])
        link.flood_per_s = 0.0
        await dropped(bus, False)
        await asyncio.sleep(0.1)
        assert (link.subjects, bus.lag_s, calls) == (["kv", "load"], 0.0, ["dropped", "resumed"])
    assert len(caplog.records) == 1


@in_virtual_time
async def test_the_pause_doubles_while_events_stay_too_fast_and_is_short_again_after_steady_minutes() -> None:
    async with opened() as (link, bus):
        await bus.subscribe("kv", ignore)

        async def pause() -> float:
            begun_at = await dropped(bus)
            return await dropped(bus, False) - begun_at

        link.flood_per_s = 3 * BYTES_PER_S
        pauses = [await pause() for _ in range(7)]
        assert all(later > earlier + 1.5 for earlier, later in itertools.pairwise(pauses[:5]))
        assert 60 <= pauses[-1] < 70
        link.flood_per_s = 0.0
        await asyncio.sleep(120)
        link.flood_per_s = 3 * BYTES_PER_S
        assert await pause() < 2 * pauses[0]


@in_virtual_time
async def test_being_cut_off_while_behind_counts_as_too_slow() -> None:
    async with opened() as (link, bus):
        await bus.subscribe("kv", ignore)
        link.flood_per_s = 30 * BYTES_PER_S
        while bus.lag_s < 0.6:
            await asyncio.sleep(0.01)
        assert not bus.is_dropped
        link.flood_per_s = 0.0
        link.cut()
        await asyncio.sleep(0.2)
        assert bus.is_dropped


@in_virtual_time
async def test_a_silent_or_restarted_server_does_not_count_as_too_slow() -> None:
    async with opened() as (link, bus):
        await bus.subscribe("kv", ignore)
        link.is_silent = True
        await asyncio.sleep(20)
        link.cut()
        link.is_silent = False
        await asyncio.sleep(20)
        assert (bus.drops, bus.lag_s) == (0, 0.0)


@in_virtual_time
async def test_subscriptions_that_begin_or_end_meanwhile_are_right_afterwards() -> None:
    async with opened() as (link, bus):
        ended = await bus.subscribe("ends", ignore)
        link.flood_per_s = 3 * BYTES_PER_S
        await dropped(bus)
        link.flood_per_s = 0.0
        await ended.close()
        await bus.subscribe("begins", ignore)
        assert link.subjects == []
        await dropped(bus, False)
        await asyncio.sleep(0.1)
        assert link.subjects == ["begins"]
