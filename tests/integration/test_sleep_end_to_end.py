"""A worker that is put to sleep and woken at its status port, behind a real etcd and nats-server, while requests come."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from itertools import count
from typing import Any

import httpx2
import pytest

from dynamo.common.errors import Unavailable
from dynamo.common.generation import Stop
from dynamo.common.names import InstanceId
from dynamo.frontend.preprocess.text import TextRequest
from dynamo.frontend.security.accounts import ANONYMOUS
from dynamo.frontend.serving.call import Call
from dynamo.worker.app import Worker
from dynamo.worker.config import StatusOptions
from dynamo.worker.engine.sim.engine import SimEngine
from dynamo.worker.process.engine_factory import sim_config
from tests.support.plane import generate
from tests.support.servers import EtcdServer, NatsServer
from tests.support.sim_fleet import KV, SimFleet, prompt
from tests.support.waiting import until

SIM = "blocks=400,block_size=16,speedup=5"


def fleet(etcd: EtcdServer, nats: NatsServer, namespace: str, **options: Any) -> SimFleet:
    status = StatusOptions(port=0, allow_sleep=True)

    def make() -> SimEngine:
        return SimEngine(sim_config(SIM, "sim", None, None))

    return SimFleet(etcd, nats, namespace, status=status, worker_options=options, make=make, routing=KV)


async def order(worker: Worker, path: str) -> None:
    async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{worker.status_port}", timeout=120) as http:
        response = await http.post(path)
        assert response.status_code == 200, response.text


class Served:
    """Sends requests without a pause and counts them by instance. A failed request fails the test."""

    def __init__(self, fleet: SimFleet) -> None:
        self.by: Counter[InstanceId] = Counter()
        self._fleet = fleet
        self._numbers = count()

    async def run(self) -> None:
        while True:
            instance, _, summary = await self._fleet.generate(prompt(next(self._numbers) % 40), tokens=12)
            assert summary.output_tokens == 12
            self.by[instance] += 1

    async def more(self, instance: InstanceId, requests: int = 20) -> None:
        goal = self.by[instance] + requests
        await until(lambda: self.by[instance] >= goal, 120)


@asynccontextmanager
async def under_load(fleet: SimFleet) -> AsyncIterator[Served]:
    served = Served(fleet)
    async with asyncio.TaskGroup() as tasks:
        clients = [tasks.create_task(served.run()) for _ in range(8)]
        yield served
        for client in clients:
            client.cancel()


async def test_one_of_two_sleeps_and_wakes_under_load_without_a_failed_request(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str
) -> None:
    f = fleet(etcd_server, nats_server, namespace)
    async with f.worker() as sleepy, f.worker() as awake, f.frontend(), under_load(f) as served:
        await served.more(sleepy.instance)
        await served.more(awake.instance)
        await order(sleepy, "/sleep?level=1")
        assert sleepy.requests.open_requests == 0
        assert not f.engines[sleepy.instance].kv.held()
        await until(lambda: [instance.id for instance in f.frontends[0].plane.models.instances("sim")] == [awake.instance])
        before = served.by[sleepy.instance]
        await served.more(awake.instance, 60)
        assert served.by[sleepy.instance] <= before + 8, "except responses that were not read yet"
        assert not f.router().index("sim").held(sleepy.instance)
        await order(sleepy, "/wake_up")
        await served.more(sleepy.instance)


async def test_routers_know_that_what_was_cached_before_the_sleep_is_gone(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str
) -> None:
    f = fleet(etcd_server, nats_server, namespace)
    async with f.worker() as sleepy, f.frontend():
        instance, _, _ = await f.generate(prompt(1))
        await until(f.is_exact)
        await order(sleepy, "/sleep")
        await order(sleepy, "/wake_up")
        await until(lambda: len(f.frontends[0].plane.models.instances("sim")) == 1)
        await until(f.is_exact)
        again, overlap, summary = await f.generate(prompt(1))
        assert (again, overlap, summary.cached_tokens) == (instance, 0, 0)
        await until(f.is_exact)
        assert (await f.generate(prompt(1)))[1] > 10


async def test_a_stream_longer_than_the_drain_goes_on_elsewhere(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str
) -> None:
    f = fleet(etcd_server, nats_server, namespace, drain_timeout_s=0.1)
    async with f.worker() as one, f.worker() as other, f.frontend():
        workers = {worker.instance: worker for worker in (one, other)}
        request = TextRequest(model="sim", prompt=prompt(1), stop=Stop(max_tokens=2000, ignore_eos=True))
        async with generate(f.frontends[0].plane, request, Call(account=ANONYMOUS, request_id="long")) as generation:
            assert await generation.read()
            assert generation.decision is not None
            first = generation.decision.instance.id
            await order(workers[first], "/sleep")
            while await generation.read():
                pass
            assert generation.decision.instance.id != first
            assert generation.summary.output_tokens == 2000


async def test_without_an_awake_worker_requests_are_unavailable_until_one_wakes(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str
) -> None:
    f = fleet(etcd_server, nats_server, namespace)
    async with f.worker() as only, f.frontend():
        await f.generate(prompt(1))
        await order(only, "/sleep")
        with pytest.raises(Unavailable):
            await f.generate(prompt(1))
        await order(only, "/wake_up")
        async with asyncio.timeout(120):
            while True:
                with suppress(Unavailable):
                    await f.generate(prompt(1))
                    return
                await asyncio.sleep(0.02)
