"""The limits of a key hold for all frontends together: 16 processes that share them in virtual time.

How far a rate may be off is checked over 20 s, from a state in which the first burst is over. Requests are the same in each run,
and so are the names of processes, which decide whose turn it is where parts are below one request.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import count

import msgspec
import pytest

from dynamo.common.errors import RateLimited
from dynamo.common.security.files import Watched
from dynamo.frontend.api.guard import Accounts
from dynamo.frontend.fleet.peers.limits import LEASE_S, shared_limits
from dynamo.frontend.security.accounts import KeyAccount
from dynamo.frontend.security.keys import ApiKey, KeyRing, Limits
from dynamo.frontend.security.sharing import Fleet as SharedLimits
from tests.support.fake_bus import FakeBus, FakeConnection
from tests.support.virtual_time import in_virtual_time

PROCESSES = 16
LATENCY_S = 0.003
SETTLE_S, MEASURED_S = 3.0, 20.0
_RATE_HOLDS_S = 0.1
"""After which requests come by the rate of then."""


class Process:
    """One frontend, as far as limits go."""

    def __init__(self, bus: FakeBus, name: str, limits: Limits, ahead_s: float = 0.0) -> None:
        """`ahead_s`: by how much its clock is ahead of those of others."""
        loop = asyncio.get_running_loop()
        ring = KeyRing([ApiKey(name="team", salt=b"", digest=b"", limits=limits)])
        self.connection = FakeConnection(bus)
        self.accounts = Accounts(Watched("keys", (), lambda: ring), lambda: loop.time() + ahead_s, fleet=SharedLimits(name))
        self.life = loop.create_task(self._live())
        self.work: list[asyncio.Task[None]] = []

    @property
    def team(self) -> KeyAccount:
        return self.accounts.named("team")

    async def _live(self) -> None:
        async with shared_limits(self.connection, "ns", self.accounts.fleet, self.accounts):
            await asyncio.get_running_loop().create_future()

    async def kill(self) -> None:
        """End it as SIGKILL does: no peer is told."""
        self.connection.is_up = False
        tasks = [self.life, *self.work]
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, asyncio.CancelledError), result


class Fleet:
    """Frontends, and what they admitted."""

    def __init__(self, bus: FakeBus, limits: Limits) -> None:
        self.bus = bus
        self.processes: list[Process] = []
        self.admitted: list[tuple[float, int]] = []
        """When, and how many requests or tokens."""
        self.refused = 0
        self._limits = limits
        self._random = random.Random(1)
        self._names = random.Random(4)
        self._loop = asyncio.get_running_loop()

    def add(self, ahead_s: float = 0.0) -> Process:
        process = Process(self.bus, self._names.randbytes(8).hex(), self._limits, ahead_s)
        self.processes.append(process)
        return process

    def demand(self, process: Process, per_s: Callable[[float], float], tokens: Callable[[], int] | None = None) -> None:
        """Let requests come to a process at random, so many a second, each of which takes so many tokens."""

        async def come() -> None:
            for _ in count():
                rate = per_s(self._loop.time())
                pause_s = self._random.expovariate(rate) if rate else math.inf
                await asyncio.sleep(min(pause_s, _RATE_HOLDS_S))
                if pause_s <= _RATE_HOLDS_S:
                    self.request(process, tokens)

        process.work.append(self._loop.create_task(come()))

    def request(self, process: Process, tokens: Callable[[], int] | None = None) -> None:
        amount = 1 if tokens is None else tokens()
        try:
            with process.team.admit("m", object()) as ticket:
                if tokens is not None:
                    ticket.reserve(amount, 0)
                    ticket.charge(amount)
        except RateLimited:
            self.refused += 1
        else:
            self.admitted.append((self._loop.time(), amount))

    async def measured(self) -> float:
        """Return what is admitted a second, after a while."""
        await asyncio.sleep(SETTLE_S)
        return await self.measured_now()

    async def measured_now(self, seconds: float = MEASURED_S) -> float:
        from_s = self._loop.time()
        await asyncio.sleep(seconds)
        return sum(amount for at, amount in self.admitted if at >= from_s) / seconds

    async def close(self) -> None:
        for process in self.processes:
            await process.kill()


@asynccontextmanager
async def fleet(processes: int = PROCESSES, **limits: float) -> AsyncIterator[Fleet]:
    bus = FakeBus()
    bus.latency_s = LATENCY_S
    started = Fleet(bus, Limits(**limits))  # type: ignore[arg-type]
    for _ in range(processes):
        started.add()
    await asyncio.sleep(0.1)
    try:
        yield started
    finally:
        await started.close()


DEMANDS: dict[str, Callable[[int, float], float]] = {
    "even": lambda number, now: 8.0,
    "skewed": lambda number, now: 60.0 if number == 0 else 1.0,
    "shifting": lambda number, now: 100.0 if int(now / 2) % PROCESSES == number else 1.0,
    "one only": lambda number, now: 90.0 if number == 5 else 0.0,
}


@pytest.mark.parametrize(
    ("demand", "latency_s"), [*((demand, LATENCY_S) for demand in DEMANDS), ("even", 1.0), ("shifting", 1.0)]
)
@in_virtual_time
async def test_a_rate_holds_for_16_processes_together(demand: str, latency_s: float) -> None:
    """Also when what others use is heard late, as where many keys are busy."""
    async with fleet(requests_per_s=40.0) as frontends:
        frontends.bus.latency_s = latency_s
        for number, process in enumerate(frontends.processes):
            frontends.demand(process, lambda now, number=number: DEMANDS[demand](number, now))  # type: ignore[misc]
        rate = await frontends.measured()
    assert rate == pytest.approx(40.0, rel=0.1)


@in_virtual_time
async def test_a_rate_holds_for_processes_whose_clocks_are_two_minutes_apart() -> None:
    async with fleet(0, requests_per_s=40.0) as frontends:
        for number in range(4):
            process = frontends.add(ahead_s=60.0 if number % 2 else -60.0)
            frontends.demand(process, lambda now: 30.0)
        rate = await frontends.measured()
    assert rate == pytest.approx(40.0, rel=0.1)


@in_virtual_time
async def test_a_rate_below_one_request_for_each_process_is_neither_exceeded_nor_wasted() -> None:
    async with fleet(requests_per_s=2.0) as frontends:
        for process in frontends.processes:
            frontends.demand(process, lambda now: 4.0)
        rate = await frontends.measured()
    assert rate == pytest.approx(2.0, rel=0.1)


@in_virtual_time
async def test_a_budget_of_tokens_holds_for_requests_of_any_size() -> None:
    sizes = random.Random(2)
    async with fleet(tokens_per_minute=60_000) as frontends:
        for process in frontends.processes:
            frontends.demand(process, lambda now: 1.0, lambda: sizes.choice((50, 500, 2000)))
        await asyncio.sleep(30.0)  # the first minute's tokens are used by then
        # One request takes what fills in two seconds: a window of 20 s may hold a tenth more or less, wherever it begins.
        rate = await frontends.measured_now(60.0)
    assert rate == pytest.approx(1000.0, rel=0.1)


@pytest.mark.parametrize("limit", [64, 8])
@in_virtual_time
async def test_requests_at_once_hold_for_16_processes_together(limit: int) -> None:
    """Each process has requests for the whole limit; the first has more than all others, until the last one takes over."""
    loop = asyncio.get_running_loop()
    in_use: list[int] = []
    async with fleet(concurrent_requests=limit) as frontends:
        durations = random.Random(3)

        async def hold(process: Process) -> None:
            with contextlib.suppress(RateLimited), process.team.admit("m", object()):
                await asyncio.sleep(durations.uniform(0.5, 1.5))

        async def come(number: int, process: Process) -> None:
            busy = {0: 0.0, PROCESSES - 1: 15.0}.get(number)
            async with asyncio.TaskGroup() as requests:
                for _ in count():
                    is_busy = busy is not None and busy <= loop.time() < busy + 15.0
                    await asyncio.sleep(durations.expovariate(6.0 * limit if is_busy else 0.3 * limit))
                    requests.create_task(hold(process))

        for number, process in enumerate(frontends.processes):
            process.work.append(loop.create_task(come(number, process)))
        await asyncio.sleep(SETTLE_S)
        while loop.time() < 27.0:
            await asyncio.sleep(0.1)
            in_use.append(sum(process.team.sequences for process in frontends.processes))
    # A tenth, and one more: of eight slots, a tenth is less than one.
    assert sum(in_use) / len(in_use) >= limit * 0.9 - 1
    assert max(in_use) <= limit * 1.1 + 1


@in_virtual_time
async def test_a_rate_holds_while_processes_die_and_others_start() -> None:
    async with fleet(requests_per_s=40.0) as frontends:
        loop = asyncio.get_running_loop()

        def start(process: Process) -> None:
            frontends.demand(process, lambda now: 8.0)

        async def replace() -> None:
            for victim in range(8):
                await asyncio.sleep(2.5)
                await frontends.processes[victim].kill()
                start(frontends.add())

        for process in frontends.processes:
            start(process)
        await asyncio.sleep(SETTLE_S)
        replacing = loop.create_task(replace())
        rate = await frontends.measured_now()
        await replacing
    assert rate == pytest.approx(40.0, rel=0.1)


@in_virtual_time
async def test_what_a_dead_process_had_in_use_is_free_after_its_lease() -> None:
    async with fleet(2, concurrent_requests=10) as frontends:
        first, second = frontends.processes
        for _ in range(10):
            first.team.admit("m", object())
        await asyncio.sleep(0.1)
        with pytest.raises(RateLimited):
            second.team.admit("m", object())
        await first.kill()
        await asyncio.sleep(LEASE_S - 1.5)
        with pytest.raises(RateLimited):
            second.team.admit("m", object())
        await asyncio.sleep(3.0)
        for _ in range(10):
            second.team.admit("m", object())


@pytest.mark.parametrize(("limit", "parts"), [(20, [10]), (20, [2] * 5), (4, [4]), (4, [1] * 4)])
@in_virtual_time
async def test_a_request_with_many_choices_or_prompts_has_its_place_at_each_process_in_turn(limit: int, parts: list[int]) -> None:
    """One client has one request at a time, as through a proxy that goes round: the key has nothing else in use."""
    async with fleet(2, concurrent_requests=limit) as frontends:
        for number in range(48):
            team, request = frontends.processes[number % 2 if number < 24 else number % 4 == 0].team, object()
            with contextlib.ExitStack() as open_parts:
                team.check_limits()
                for part in parts:
                    open_parts.enter_context(team.admit("m", request, part, sum(parts)))
                    await asyncio.sleep(0.002)
                await asyncio.sleep(0.05)
            await asyncio.sleep(0.1)  # until the other process knows that nothing is in use
        assert not any(process.team.sequences for process in frontends.processes)


@in_virtual_time
async def test_a_burst_at_one_process_has_the_whole_limit_at_once_and_all_see_that() -> None:
    async with fleet(requests_per_s=50.0) as frontends:
        for process in frontends.processes:  # each was used before
            frontends.request(process)
        await asyncio.sleep(20.0)
        first, *others = frontends.processes
        for _ in range(50):
            first.team.admit("m", object()).close()
        with pytest.raises(RateLimited):
            first.team.admit("m", object())
        await asyncio.sleep(2 * LATENCY_S)
        assert {other.team.rate_limits()[0].remaining for other in others} == {0}


@in_virtual_time
async def test_a_process_that_starts_knows_what_the_others_have_used() -> None:
    async with fleet(2, tokens_per_minute=6000, concurrent_requests=3) as frontends:
        running = frontends.processes[0].team.admit("m", object(), 2)
        running.reserve(5000, 0)
        await asyncio.sleep(0.1)
        team = frontends.add().team
        await asyncio.sleep(0.1)
        assert team.rate_limits()[0].remaining == pytest.approx(1000, abs=50)
        team.admit("m", object())
        with pytest.raises(RateLimited):
            team.admit("m", object())


@in_virtual_time
async def test_a_lost_message_is_made_up_for_by_the_next() -> None:
    async with fleet(2, requests_per_s=1000.0) as frontends:
        first, second = frontends.processes
        frontends.request(first)
        await asyncio.sleep(0.1)
        frontends.bus.is_lost = lambda subject, payload: True
        first.team.admit("m", object(), 900).close()
        await asyncio.sleep(0.1)
        frontends.bus.is_lost = lambda subject, payload: False
        assert second.team.rate_limits()[0].remaining == 1000
        frontends.request(first)
        await asyncio.sleep(0.1)
        assert second.team.rate_limits()[0].remaining < 350


@in_virtual_time
async def test_a_process_that_leaves_frees_what_it_has_at_once() -> None:
    async with fleet(2, concurrent_requests=1) as frontends:
        first, second = frontends.processes
        first.team.admit("m", object())
        await asyncio.sleep(0.1)
        first.life.cancel()
        await asyncio.sleep(0.1)
        second.team.admit("m", object())


@pytest.mark.parametrize("cut", [1, PROCESSES])
@in_virtual_time
async def test_without_nats_a_process_keeps_its_share(cut: int) -> None:
    async with fleet(requests_per_s=40.0, concurrent_requests=1000) as frontends:
        for process in frontends.processes:
            frontends.demand(process, lambda now: 8.0)
        await asyncio.sleep(SETTLE_S)
        for process in frontends.processes[:cut]:
            process.connection.is_up = False
        await asyncio.sleep(LEASE_S + 2.0)
        rate = await frontends.measured_now()
        own = [process.team.sequences for process in frontends.processes]
        assert own == [0] * PROCESSES
        for process in frontends.processes[:cut]:
            process.connection.reconnect()
        again = await frontends.measured()
    assert 36.0 <= rate <= 44.0 + 40.0 * cut / PROCESSES
    assert again == pytest.approx(40.0, rel=0.1)


def held_up(bus: FakeBus, process: Process) -> Callable[[], None]:
    """Let what comes to a process wait, as in the socket of one that is stopped; return what delivers all of it at once."""
    [subscription] = [each for each in bus.subscriptions if each.connection is process.connection]
    deliver = subscription.on_message
    waiting: list[tuple[str, str, memoryview, bool]] = []
    subscription.on_message = lambda *message: waiting.append(message)

    def go_on() -> None:
        subscription.on_message = deliver
        for message in waiting:
            deliver(*message)

    return go_on


@in_virtual_time
async def test_a_process_that_was_stopped_counts_nothing_of_what_others_used_meanwhile() -> None:
    async with fleet(2, requests_per_s=40.0) as frontends:
        for process in frontends.processes:
            frontends.demand(process, lambda now: 30.0)
        await asyncio.sleep(SETTLE_S)
        go_on = held_up(frontends.bus, frontends.processes[0])
        await asyncio.sleep(20.0)
        go_on()
        await asyncio.sleep(1.5)  # the burst that is there then
        rate = await frontends.measured_now(5.0)
    assert rate == pytest.approx(40.0, rel=0.1)


@in_virtual_time
async def test_a_process_alone_without_nats_has_an_equal_part_of_what_it_did_not_use_before() -> None:
    async with fleet(4, requests_per_s=40.0, concurrent_requests=40) as frontends:
        cut, *others = frontends.processes
        for process in others:
            frontends.demand(process, lambda now: 40.0)
        await asyncio.sleep(SETTLE_S)
        cut.connection.is_up = False
        await asyncio.sleep(LEASE_S + 2.0)
        frontends.admitted.clear()
        frontends.demand(cut, lambda now: 40.0)
        both = await frontends.measured_now()
        admitted = 0
        with contextlib.suppress(RateLimited):
            while True:
                cut.team.occupy()
                admitted += 1
    assert admitted == 10
    assert both == pytest.approx(50.0, rel=0.1)


@in_virtual_time
async def test_messages_that_mean_nothing_are_dropped() -> None:
    async with fleet(1, requests_per_s=10.0) as frontends:
        (process,) = frontends.processes
        stranger = FakeConnection(frontends.bus)
        for use in ([float("nan"), 1.0], [1e300, 1.0], ["much", 1.0]):
            keys = [["team", 0.0, 0.0, 0, use, None, None]]
            stranger.publish_nowait("dynamo.ns.limits", msgspec.msgpack.encode(["stranger", False, False, keys]))
        stranger.publish_nowait(
            "dynamo.ns.limits", msgspec.msgpack.encode(["stranger", True, False, [["other", 0.0, 0.0, 5, None, None, None]]])
        )
        await asyncio.sleep(0.1)
        assert process.team.rate_limits()[0].remaining == 10
        process.team.admit("m", object()).close()
