"""A worker falls asleep and wakes: in which order, what happens when a step fails, and who may say so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx2
import pytest
from prometheus_client import CollectorRegistry

from dynamo.common.errors import EngineError, NoInstances, ShuttingDown, Unavailable, Unsupported
from dynamo.common.generation import Delta, GenerateRequest, Stop, Summary, pack_tokens, request_encoder
from dynamo.common.http.web_pages import OwnHosts
from dynamo.common.model_card import LlmInfo, ModelCard, ModelKind
from dynamo.common.names import Endpoint, InstanceId
from dynamo.common.observability.scrape import Scraper
from dynamo.worker.engine.base import Context, EngineLoad
from dynamo.worker.process.sleep import Sleeper
from dynamo.worker.process.status import Status, status_app
from dynamo.worker.serve import ServedModel, Service
from tests.support.incoming import FakeIncoming
from tests.support.served import AppTransport

CARD = ModelCard(name="m", kind=ModelKind.LLM, llm=LlmInfo(context_length=64, tokenizer="t"))


class Awake:
    """An engine that cannot sleep."""

    def __init__(self, steps: list[str]) -> None:
        self.steps = steps
        self.failing = ""
        self.can_sleep = True

    async def start(self) -> ModelCard:
        return CARD

    async def generate(self, request: GenerateRequest, context: Context) -> AsyncIterator[Delta | Summary]:
        self.steps.append("generates")
        yield Summary()

    def load(self) -> EngineLoad:
        return EngineLoad()

    async def close(self) -> None:
        return


class Sleepy(Awake):
    def check_sleep(self) -> None:
        if not self.can_sleep:
            raise Unsupported("it is configured to stay awake")

    async def sleep(self) -> None:
        self._do("sleeps")

    async def wake(self) -> None:
        self._do("wakes")

    def _do(self, step: str) -> None:
        if self.failing == step:
            raise EngineError("the memory is stuck")
        self.steps.append(step)


class Worker:
    """What surrounds a Sleeper: writes down what is done to it."""

    def __init__(self, engine: type[Awake] = Sleepy, drain_timeout_s: float = 5.0) -> None:
        self.steps: list[str] = []
        self.engine = engine(self.steps)
        self.service = Service([ServedModel.of(CARD, self.engine)])
        self.idle = asyncio.Event()
        self.idle.set()
        self.has_etcd = True
        self.sleeper = Sleeper([self.engine], self.service, self, self._hide, drain_timeout_s)
        self.status = Status(Endpoint(), InstanceId(1))
        self.status.start_serving(asyncio.Event(), asyncio.Event(), asyncio.Event(), self.sleeper)

    async def _hide(self, hidden: bool) -> bool:
        self.steps.append("leaves" if hidden else "returns")
        return self.has_etcd

    async def drained(self) -> None:
        assert not self.service.models, "nothing new may come while it drains"
        self.steps.append("drains")
        await self.idle.wait()

    def stop_all(self) -> None:
        self.steps.append("refuses the rest")

    async def send_request(self) -> None:
        request = GenerateRequest(model="m", prompt=pack_tokens((1,)), stop=Stop(max_tokens=1))
        await self.service.generate(FakeIncoming(request_encoder.encode(request)))

    def client(self, *, allow_sleep: bool = True, allowed_hosts: tuple[str, ...] = ()) -> httpx2.AsyncClient:
        hosts = OwnHosts(allowed_hosts)
        app = status_app(self.status, Scraper(CollectorRegistry(), ()).scrape, allow_sleep=allow_sleep, hosts=hosts)
        return httpx2.AsyncClient(transport=AppTransport(app), base_url="http://127.0.0.1")


ASLEEP = ["leaves", "drains", "refuses the rest", "sleeps"]


async def test_the_engine_sleeps_last_and_wakes_first() -> None:
    worker = Worker()
    await worker.sleeper.sleep()
    assert worker.steps == ASLEEP
    await worker.sleeper.wake()
    assert worker.steps == [*ASLEEP, "wakes", "returns"]
    await worker.send_request()
    assert worker.steps[-1] == "generates"


async def test_while_it_sleeps_requests_may_go_elsewhere_and_the_engine_sees_none() -> None:
    worker = Worker()
    await worker.sleeper.sleep()
    with pytest.raises(NoInstances) as refused:
        await worker.send_request()
    assert refused.value.retryable
    request = FakeIncoming(b"\x82\xa5model\xa1m\xa6idle_s\x00")
    await worker.service.canary(request)
    assert worker.steps == ASLEEP


async def test_a_second_sleep_and_a_second_wake_change_nothing() -> None:
    worker = Worker()
    await worker.sleeper.wake()
    assert worker.steps == []
    await asyncio.gather(worker.sleeper.sleep(), worker.sleeper.sleep())
    assert worker.steps == ASLEEP
    await asyncio.gather(worker.sleeper.wake(), worker.sleeper.wake())
    assert worker.steps == [*ASLEEP, "wakes", "returns"]


async def test_it_sleeps_only_when_running_requests_have_ended() -> None:
    worker = Worker()
    worker.idle.clear()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(worker.sleeper.sleep())
        async with asyncio.timeout(120):
            while worker.steps != ["leaves", "drains"]:
                await asyncio.sleep(0)
        assert (worker.sleeper.is_away, worker.sleeper.is_sleeping) == (True, False)
        worker.idle.set()
    assert worker.steps == ASLEEP and worker.sleeper.is_sleeping


async def test_requests_that_outlast_the_drain_timeout_are_refused() -> None:
    worker = Worker(drain_timeout_s=0.01)
    worker.idle.clear()
    await worker.sleeper.sleep()
    assert worker.steps == ASLEEP


async def test_without_etcd_it_stays_awake() -> None:
    worker = Worker()
    worker.has_etcd = False
    with pytest.raises(Unavailable, match="etcd"):
        await worker.sleeper.sleep()
    assert worker.steps == ["leaves", "returns"] and not worker.sleeper.is_away
    await worker.send_request()


async def test_an_engine_that_fails_to_sleep_serves_on() -> None:
    worker = Worker()
    worker.engine.failing = "sleeps"
    with pytest.raises(EngineError, match="stuck"):
        await worker.sleeper.sleep()
    assert not worker.sleeper.is_away
    await worker.send_request()
    assert worker.steps == [*ASLEEP[:-1], "wakes", "returns", "generates"]


async def test_an_engine_that_fails_to_wake_serves_nothing_and_may_be_woken_again() -> None:
    worker = Worker()
    await worker.sleeper.sleep()
    worker.engine.failing = "wakes"
    with pytest.raises(EngineError, match="stuck"):
        await worker.sleeper.wake()
    assert worker.sleeper.is_sleeping and not worker.service.models
    worker.engine.failing = ""
    await worker.sleeper.wake()
    await worker.send_request()


async def test_a_worker_that_ends_leaves_no_change_behind_that_waits_for_etcd() -> None:
    worker = Worker()
    waiting = asyncio.Event()

    async def hide(hidden: bool) -> bool:
        waiting.set()
        await asyncio.Event().wait()
        return False

    sleeper = Sleeper([worker.engine], worker.service, worker, hide, drain_timeout_s=0.01)
    change = asyncio.create_task(sleeper.sleep())
    await waiting.wait()
    async with asyncio.timeout(120):
        await sleeper.close()
    assert change.cancelled()


async def test_a_worker_that_ends_changes_no_more() -> None:
    worker = Worker()
    await worker.sleeper.close()
    assert worker.steps == []
    closed = asyncio.create_task(worker.sleeper.sleep())
    with pytest.raises(ShuttingDown):
        async with asyncio.timeout(120):
            await closed
    assert worker.steps == []


async def test_the_status_port_takes_vllms_own_calls() -> None:
    worker = Worker()
    async with worker.client() as http:
        assert (await http.get("/is_sleeping")).json() == {"is_sleeping": False}
        response = await http.post("/sleep?level=1")
        assert (response.status_code, response.json()) == (200, {"is_sleeping": True})
        health = await http.get("/health")
        assert (health.status_code, health.json()["state"]) == (503, "sleeping")
        assert (await http.get("/is_sleeping")).json() == {"is_sleeping": True}
        assert (await http.post("/wake_up")).json() == {"is_sleeping": False}
        assert (await http.get("/health")).json()["state"] == "starting", "its own state again"
        assert (await http.get("/sleep")).status_code == (await http.post("/is_sleeping")).status_code == 405


@pytest.mark.parametrize("level", ["0", "2", "", "deep", "1&level=2"])
async def test_other_levels_are_refused(level: str) -> None:
    worker = Worker()
    async with worker.client() as http:
        response = await http.post(f"/sleep?level={level}")
    assert response.status_code == 400 and "level=1" in response.json()["error"]
    assert worker.steps == []


async def test_no_engine_sleeps_if_one_cannot() -> None:
    never, not_now = Worker(Awake), Worker()
    not_now.engine.can_sleep = False
    for worker, message in ((never, "(Awake) cannot sleep"), (not_now, "configured to stay awake")):
        async with worker.client() as http:
            response = await http.post("/sleep")
            assert response.status_code == 501 and message in response.json()["error"]
            assert (await http.post("/wake_up")).status_code == 200
        assert worker.steps == []


async def test_sleep_needs_allow_sleep_and_is_never_taken_from_web_pages() -> None:
    worker = Worker()
    async with worker.client(allow_sleep=False) as http:
        response = await http.post("/sleep")
        assert response.status_code == 403 and "--allow-sleep" in response.json()["error"]
        assert (await http.post("/wake_up")).status_code == 403
        assert (await http.get("/is_sleeping")).status_code == 200
    async with worker.client() as http:
        for page in ({"origin": "http://evil.example"}, {"sec-fetch-site": "cross-site"}, {"host": "evil.example"}):
            for path in ("/sleep", "/wake_up", "/metrics", "/is_sleeping"):
                method = "POST" if path in ("/sleep", "/wake_up") else "GET"
                assert (await http.request(method, path, headers=page)).status_code == 403, (page, path)
            assert (await http.get("/live", headers=page)).status_code == 200
            assert (await http.get("/health", headers=page)).status_code == 503
    assert worker.steps == []
    async with worker.client(allowed_hosts=(".dynamo.svc",)) as http:
        assert (await http.get("/metrics", headers={"host": "worker.dynamo.svc:9090"})).status_code == 200


async def test_failures_have_their_status() -> None:
    worker = Worker()
    async with worker.client() as http:
        worker.has_etcd = False
        assert (await http.post("/sleep")).status_code == 503
        worker.has_etcd = True
        worker.engine.failing = "sleeps"
        response = await http.post("/sleep")
        assert (response.status_code, response.json()) == (500, {"error": "the memory is stuck"})
    worker.status = Status(Endpoint(), InstanceId(1))
    async with worker.client() as http:
        assert (await http.post("/sleep")).status_code == 503
