"""Credits of the request plane under any order of events: never negative, within the budget, and all back in the end."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dynamo.common.errors import DynamoError
from dynamo.common.messaging.request_plane.client import RequestClient, open_client
from dynamo.common.messaging.request_plane.credit import ResponseCredits, StreamCredit
from dynamo.common.messaging.request_plane.incoming import Incoming
from dynamo.common.messaging.request_plane.limits import KIB, PlaneLimits
from dynamo.common.messaging.request_plane.request_stream import RequestStream
from dynamo.common.messaging.request_plane.server import RequestServer, serve_requests
from dynamo.common.names import Endpoint, InstanceId
from tests.support.fake_bus import FakeBus, FakeConnection
from tests.support.virtual_time import VirtualTimeLoop
from tests.support.waiting import WAIT_S, expiring

LIMITS = PlaneLimits(
    chunk_bytes=4 * KIB,
    first_flight_bytes=4 * KIB,
    unacknowledged_bytes=16 * KIB,
    first_unacknowledged_bytes=8 * KIB,
    budget_bytes=128 * KIB,
    window_bytes=512,
    kept_credit_bytes=8 * KIB,
)
MANY = settings(max_examples=60, stateful_step_count=40, deadline=None)
SIZES = st.one_of(st.integers(0, 100), st.integers(0, 3000), st.integers(0, 120 * KIB))


@dataclass(eq=False)
class Stream:
    """One stream as both sides see it: what was granted, what was sent of it, and what of that was read."""

    credit: StreamCredit
    granted: int = 0
    sent: int = 0
    read: int = 0
    needed: int = 0

    def grant(self, size: int) -> None:
        assert size > 0
        self.credit.borrowed += size
        self.note_credit()

    def use(self, size: int) -> None:
        self.read += size
        self.credit.use(size)
        self.note_credit()

    def note_credit(self) -> None:
        assert self.credit.allowed >= self.granted, "what was granted is not taken back"
        self.granted = self.credit.allowed

    @property
    def may_send(self) -> int:
        return self.granted - self.sent


class Credits(RuleBasedStateMachine):
    """Streams that send within their credit and read at their own pace."""

    def __init__(self) -> None:
        super().__init__()
        self.credits = ResponseCredits(LIMITS)
        self.streams: list[Stream] = []

    def pick(self, number: int) -> Stream:
        return self.streams[number % len(self.streams)]

    @rule(expected=SIZES)
    def open(self, expected: int) -> None:
        stream = Stream(StreamCredit(self.credits, expected))
        stream.note_credit()
        self.streams.append(stream)

    @precondition(lambda self: self.streams)
    @rule(number=st.integers(0, 99), size=SIZES)
    def send(self, number: int, size: int) -> None:
        stream = self.pick(number)
        stream.sent += min(size, stream.may_send)
        if size > stream.may_send:
            stream.needed = stream.sent + size
            self.credits.on_demand.request(stream, stream.needed - stream.granted)

    @precondition(lambda self: self.streams)
    @rule(number=st.integers(0, 99), share=st.floats(0, 1))
    def read(self, number: int, share: float) -> None:
        stream = self.pick(number)
        stream.use(round((stream.sent - stream.read) * share))

    @precondition(lambda self: self.streams)
    @rule(number=st.integers(0, 99))
    def close(self, number: int) -> None:
        stream = self.pick(number)
        self.streams.remove(stream)
        stream.credit.close(stream)

    @invariant()
    def what_is_lent_is_what_streams_hold(self) -> None:
        assert self.credits.free_bytes + self.credits.lent_bytes == LIMITS.budget_bytes
        assert self.credits.on_demand.free_bytes >= 0
        assert self.credits.window_bytes >= 0
        assert self.credits.on_demand.lent_bytes == sum(stream.credit.borrowed for stream in self.streams)
        for stream in self.streams:
            assert stream.granted == stream.credit.allowed
            assert stream.credit.used == stream.read
            assert stream.credit.bytes == stream.granted - stream.read >= stream.may_send >= 0

    def teardown(self) -> None:
        """Every stream gets what it needs as soon as the others read, and nothing is lent in the end."""
        for _ in range(1000):
            for stream in self.streams:
                stream.sent = min(stream.granted, max(stream.needed, stream.sent))
                stream.use(stream.sent - stream.read)
        assert all(stream.granted >= stream.needed for stream in self.streams)
        for stream in self.streams:
            stream.credit.close(stream)
        assert self.credits.lent_bytes == 0


@dataclass
class Handler:
    """Sends as many responses of a size as the first bytes of the request say, then the end."""

    failures: list[BaseException] = field(default_factory=list)

    async def __call__(self, request: Incoming) -> None:
        count, size = (int(number) for number in bytes(request.body[:20]).split())
        for _ in range(count):
            if not request.send_nowait(bytes(size)):
                await request.ready()
        request.end(bytes(size))


class Plane(RuleBasedStateMachine):
    """A caller and an instance over a bus that hangs, loses messages and cuts connections. In virtual time."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner(loop_factory=VirtualTimeLoop)
        self.bus = FakeBus()
        self.streams: list[RequestStream] = []
        self.client: RequestClient
        self.server: RequestServer
        self.losses = 0
        self.run(self._open())

    def run(self, main: Coroutine[Any, Any, None]) -> None:
        self.runner.run(main)

    async def _open(self) -> None:
        self.frontend, self.worker = FakeConnection(self.bus, 64 * KIB), FakeConnection(self.bus, 64 * KIB)
        self.bus.is_lost = self._is_lost
        self.over = asyncio.Event()
        is_open = asyncio.Event()
        self.life = asyncio.create_task(self._live(is_open))
        await is_open.wait()

    async def _live(self, is_open: asyncio.Event) -> None:
        handlers = {"send": Handler()}
        async with (
            serve_requests(self.worker, Endpoint(), InstanceId(1), handlers, LIMITS) as self.server,
            open_client(self.frontend, Endpoint().namespace, LIMITS) as self.client,
        ):
            is_open.set()
            await self.over.wait()

    def _is_lost(self, subject: str, payload: bytes) -> bool:
        self.losses -= self.losses > 0
        return self.losses > 0

    @rule(count=st.integers(0, 30), size=SIZES, upload=SIZES, deadline_s=st.none() | st.floats(0.1, 5))
    def open(self, count: int, size: int, upload: int, deadline_s: float | None) -> None:
        async def open_() -> None:
            body = b"%-9d %-9d " % (count, size) + bytes(upload)
            deadline = None if deadline_s is None else self.runner.get_loop().time() + deadline_s
            subject = Endpoint().rpc_subject(InstanceId(1))
            self.streams.append(self.client.open(InstanceId(1), subject, "send", body, deadline=deadline))

        self.run(open_())

    @precondition(lambda self: self.streams)
    @rule(number=st.integers(0, 99), reads=st.integers(1, 20))
    def read(self, number: int, reads: int) -> None:
        stream = self.streams[number % len(self.streams)]

        async def read() -> None:
            with suppress(DynamoError, TimeoutError):
                async with asyncio.timeout(expiring(0.2)):
                    for _ in range(reads):
                        await stream.read()

        self.run(read())

    @precondition(lambda self: self.streams)
    @rule(number=st.integers(0, 99))
    def cancel(self, number: int) -> None:
        async def cancel() -> None:
            self.streams.pop(number % len(self.streams)).cancel()

        self.run(cancel())

    @rule(seconds=st.floats(0, 4))
    def wait(self, seconds: float) -> None:
        self.run(asyncio.sleep(seconds))

    @rule(count=st.integers(1, 5))
    def lose(self, count: int) -> None:
        self.losses = count

    @rule(seconds=st.floats(0, 0.5), at_worker=st.booleans())
    def reconnect(self, seconds: float, at_worker: bool) -> None:
        async def reconnect() -> None:
            connection = self.worker if at_worker else self.frontend
            connection.is_up = False
            await asyncio.sleep(seconds)
            connection.reconnect()

        self.run(reconnect())

    @rule(seconds=st.floats(0, 4))
    def hang(self, seconds: float) -> None:
        """What piles up at a bus that hangs stays within the budgets of those to whom it goes."""

        async def hang() -> None:
            self.bus.is_hung = True
            await asyncio.sleep(seconds)
            held = self.bus.held_bytes()
            heads = 64 * (len(self.streams) + 40)
            assert held <= 2 * LIMITS.budget_bytes + heads, f"{held} bytes on the way, {self.client.credits!r}"
            self.bus.go_on()

        self.run(hang())

    @invariant()
    def budgets_hold(self) -> None:
        for queue in (self.client.credits.on_demand, self.server.uploads):
            assert 0 <= queue.free_bytes <= queue.free_bytes + queue.lent_bytes
        assert 0 <= self.client.credits.lent_bytes <= LIMITS.budget_bytes

    def teardown(self) -> None:
        """Every request ends, and all credit comes back."""

        async def finish() -> None:
            self.losses = 0

            async def read(stream: RequestStream) -> None:
                with suppress(DynamoError):
                    while await stream.read():
                        pass

            async with asyncio.timeout(WAIT_S):
                await asyncio.gather(*map(read, self.streams))
            await asyncio.sleep(10)
            assert self.client.credits.lent_bytes == self.server.uploads.lent_bytes == 0
            assert self.client.open_streams == self.server.open_requests == 0
            self.over.set()
            await self.life

        try:
            self.run(finish())
        finally:
            self.runner.close()


TestCredits = Credits.TestCase
TestCredits.settings = MANY
TestPlane = Plane.TestCase
TestPlane.settings = settings(MANY, max_examples=25, suppress_health_check=[HealthCheck.too_slow])
