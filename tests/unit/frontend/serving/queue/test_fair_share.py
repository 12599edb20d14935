"""Keys that wait at several frontends have their turns in fairness: processes in virtual time that share what they serve."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from dynamo.common.errors import Overloaded
from dynamo.frontend.fleet.peers.waiting_keys import shared_fairness
from dynamo.frontend.metrics import FrontendMetrics
from dynamo.frontend.router.base import RoutingDecision
from dynamo.frontend.security.accounts import Account, KeyAccount
from dynamo.frontend.security.keys import ApiKey
from dynamo.frontend.serving.call import Call, Work
from dynamo.frontend.serving.dispatch.dispatcher import Dispatcher
from dynamo.frontend.serving.queue.admission import AdmissionQueue
from dynamo.frontend.serving.queue.fair_share import FRESH_S
from tests.support.fake_bus import FakeBus, FakeConnection
from tests.support.fakes import FakeClient, FakeDirectory, FakeLink, FakeStream, RecordingRouter, instance
from tests.support.virtual_time import in_virtual_time

LATENCY_S = 0.003


def key(name: str, weight: float = 1.0) -> KeyAccount:
    return KeyAccount(ApiKey(name=name, salt=b"", digest=b"", weight=weight))


class SharedRoom(RecordingRouter):
    """Routers of all frontends, which see each other's requests at once; names of requests may be refused."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room
        self.unplaceable = ""

    def pick(self, request, candidates, *, explain=False) -> RoutingDecision:  # type: ignore[no-untyped-def]
        if len(self.open) >= self.room or (self.unplaceable and request.request_id.startswith(self.unplaceable)):
            raise Overloaded("all instances are busy", retry_after_s=1)
        return super().pick(request, candidates, explain=explain)


class Fleet:
    """Frontends before one instance, which takes `service_s` for each request."""

    def __init__(self, frontends: int, room: int, service_s: float) -> None:
        self.bus = FakeBus()
        self.bus.latency_s = LATENCY_S
        self.router = SharedRoom(room)
        self.served: list[str] = []
        """Names of requests, as they were sent to the instance."""
        self.queues = [AdmissionQueue(1000) for _ in range(frontends)]
        self._service_s = service_s
        self._metrics = FrontendMetrics(CollectorRegistry()).for_model("adder")
        client, directory = FakeClient(self._respond), FakeDirectory(instance(1))
        self._dispatchers = [Dispatcher(directory, client, FakeLink(), self.router, queue=queue) for queue in self.queues]
        self._tasks: list[asyncio.Task[object]] = []

    def _respond(self, stream: FakeStream) -> None:
        self.served.append(bytes(stream.body).decode())
        asyncio.get_running_loop().call_later(self._service_s, stream.end, b"response")

    async def call(self, frontend: int, account: Account, name: str, **more: int) -> None:
        work = Work(model="adder", verb="infer", body=name.encode(), metrics=self._metrics, prompt=bytes(400), **more)  # type: ignore[arg-type]
        await self._dispatchers[frontend].stream(work, Call(account=account, request_id=name)).result()

    def send(self, frontend: int, account: Account, count: int, **call: int) -> None:
        """Send so many requests at once."""
        for number in range(count):
            self._tasks.append(asyncio.create_task(self.call(frontend, account, f"{account.name}{number}", **call)))

    def keep_sending(self, frontend: int, account: Account, at_once: int) -> None:
        """Send the next request whenever one of so many has ended."""

        async def loop() -> None:
            while True:
                await self.call(frontend, account, account.name)

        self._tasks += [asyncio.create_task(loop()) for _ in range(at_once)]

    async def shares(self, for_s: float) -> Counter[str]:
        """Return how many requests of each key are served in a while, once turns have settled."""
        await asyncio.sleep(5)
        before = len(self.served)
        await asyncio.sleep(for_s)
        return Counter(name.rstrip("0123456789") for name in self.served[before:])

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@asynccontextmanager
async def fleet(frontends: int = 2, *, room: int = 1, service_s: float = 0.1) -> AsyncIterator[Fleet]:
    made = Fleet(frontends, room, service_s)
    async with AsyncExitStack() as stack:
        for number, queue in enumerate(made.queues):
            await stack.enter_async_context(shared_fairness(FakeConnection(made.bus), "ns", f"{number}", queue.fair_shares))
        stack.push_async_callback(made.close)
        yield made


@pytest.mark.parametrize("service_s", [0.02, 0.1, 10.0])
@in_virtual_time
async def test_a_light_key_does_not_starve_at_a_frontend_that_has_no_other_requests(service_s: float) -> None:
    async with fleet(service_s=service_s) as f:
        f.send(0, key("heavy"), 50)
        await asyncio.sleep(service_s / 2)
        f.send(1, key("light"), 3)
        await asyncio.sleep(20 * service_s + 1)
        positions = [position for position, name in enumerate(f.served) if name.startswith("light")]
        assert len(positions) == 3
        assert positions[-1] <= 15


@pytest.mark.parametrize("service_s", [0.05, 2.0])
@in_virtual_time
async def test_keys_that_wait_at_different_frontends_are_served_evenly(service_s: float) -> None:
    async with fleet(3, room=2, service_s=service_s) as f:
        f.keep_sending(0, key("a"), 20)
        f.keep_sending(1, key("b"), 5)
        f.keep_sending(2, key("c"), 3)
        shares = await f.shares(120 * service_s)
        assert min(shares["a"], shares["b"], shares["c"]) >= 0.8 * shares.total() / 3


@in_virtual_time
async def test_keys_get_turns_by_weight_also_where_one_waits_at_several_frontends() -> None:
    async with fleet(3, room=2, service_s=0.05) as f:
        for frontend in range(3):
            f.keep_sending(frontend, key("single"), 10)
        f.keep_sending(2, key("double", 2.0), 10)
        shares = await f.shares(60)
        assert shares["double"] / shares["single"] == pytest.approx(2.0, rel=0.25)


@in_virtual_time
async def test_room_that_no_other_key_can_use_is_not_left_unused() -> None:
    async with fleet(service_s=0.05) as f:
        f.router.unplaceable = "light"
        f.send(1, key("light"), 1)
        f.keep_sending(0, key("heavy"), 2)
        shares = await f.shares(20)
        assert shares["heavy"] >= 0.75 * 20 / 0.05


@in_virtual_time
async def test_a_process_that_dies_while_its_requests_wait_holds_no_other_back() -> None:
    async with fleet(service_s=0.05) as f:
        f.keep_sending(0, key("heavy"), 2)
        line = [["adder", None, [["light", 0.0, 0.0]]]]
        FakeConnection(f.bus).publish_nowait("dynamo.ns.turns", msgspec.msgpack.encode(["dead", line]))
        await asyncio.sleep(FRESH_S + 0.3)
        before = len(f.served)
        await asyncio.sleep(10)
        assert len(f.served) - before >= 195


@in_virtual_time
async def test_a_more_important_request_at_another_frontend_goes_first() -> None:
    async with fleet() as f:
        f.send(0, key("heavy"), 10)
        await asyncio.sleep(0.05)
        f.send(1, key("heavy"), 3, priority=5)
        await asyncio.sleep(3)
        assert len(f.served) == 13


@in_virtual_time
async def test_nothing_is_published_while_no_request_waits() -> None:
    async with fleet() as f:
        published: list[bytes] = []
        f.bus.is_lost = lambda subject, payload: published.append(payload) is not None
        f.send(0, key("a"), 1)
        await asyncio.sleep(1)
        assert published == []
        f.send(0, key("a"), 3)
        await asyncio.sleep(2)
        count = len(published)
        assert 0 < count < 12
        await asyncio.sleep(10)
        assert len(published) == count


@pytest.mark.parametrize(
    "lines", [7, [["adder", "chief", []]], [["adder", None, [["a", float("nan"), 0.0]]]], [["adder", None, [["a", 0.0, -1.0]]]]]
)
@in_virtual_time
async def test_messages_that_no_frontend_could_mean_are_dropped(lines: object) -> None:
    async with fleet(service_s=0.05) as f:
        f.keep_sending(0, key("heavy"), 2)
        for _ in range(100):
            FakeConnection(f.bus).publish_nowait("dynamo.ns.turns", msgspec.msgpack.encode(["stranger", lines]))
            await asyncio.sleep(0.05)
        assert len(f.served) >= 95
