"""What a real frontend reports of its demand over a real nats-server, while it serves, refuses and lets requests wait."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import httpx2
import msgspec

from dynamo.common.messaging.nats.connection import connect_nats
from dynamo.common.options import NatsOptions
from dynamo.common.scaling.demand import DemandReport, PoolDemand, demand_subject
from dynamo.common.scaling.pool import Pool
from tests.support.fleet import connect, echo_request
from tests.support.processes import FrontendProcess, frontend, worker
from tests.support.servers import EtcdServer, NatsServer

QUEUE = ("--router-mode", "kv", "--active-decode-blocks-threshold", "0.01", "--router-queue-size", "1")
BUSY = {"model": "sim", "prompt": "some words that fill blocks, " * 20, "max_tokens": 8_000, "ignore_eos": True, "stream": True}
SHORT = {"model": "sim", "prompt": "some words that fill blocks, " * 20, "max_tokens": 2}
SIM, ECHO = Pool("sim"), Pool("echo")


class Reports:
    """The last report of each pool, by the process that sent it."""

    def __init__(self) -> None:
        self.by_origin: dict[str, dict[Pool, PoolDemand]] = {}
        self.samples = 0
        self._news = asyncio.Event()

    def received(self, subject: str, reply: str, payload: memoryview, no_responders: bool) -> None:
        report = msgspec.msgpack.decode(payload, type=DemandReport)
        self.by_origin.setdefault(report.origin, {}).update({demand.pool: demand for demand in report.pools})
        self.samples += sum(len(demand.samples) for demand in report.pools)
        self._news.set()

    async def show(self, pool: Pool, is_expected: Callable[[PoolDemand], bool]) -> PoolDemand:
        """Return what one process says of a pool, once that is as expected."""
        async with asyncio.timeout(120):
            while True:
                for demands in self.by_origin.values():
                    if pool in demands and is_expected(demands[pool]):
                        return demands[pool]
                self._news.clear()
                await self._news.wait()

    async def come_from(self, processes: int) -> None:
        async with asyncio.timeout(120):
            while len(self.by_origin) < processes:
                self._news.clear()
                await self._news.wait()


@asynccontextmanager
async def reports(nats: NatsServer, namespace: str) -> AsyncIterator[Reports]:
    received = Reports()
    async with connect_nats(NatsOptions(servers=(nats.url,)), "test") as connection:
        subscription = await connection.subscribe(demand_subject(namespace), received.received)
        try:
            yield received
        finally:
            await subscription.close()


def client_of(front: FrontendProcess) -> httpx2.AsyncClient:
    return httpx2.AsyncClient(base_url=f"http://127.0.0.1:{front.http_port}", timeout=120)


async def test_a_frontend_reports_what_it_serves_what_it_refuses_and_what_waits(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str
) -> None:
    async with (
        worker(etcd_server, nats_server, namespace, "--model", "sim:blocks=1000,speedup=0.5", "--model", "echo"),
        frontend(etcd_server.endpoint, nats_server.url, namespace, *QUEUE) as front,
        client_of(front) as client,
        connect(front.grpc_target) as tensors,
        reports(nats_server, namespace) as demand,
        asyncio.TaskGroup() as tasks,
    ):
        await front.serves("sim", "echo")
        await tensors.infer(echo_request())
        async with client.stream("POST", "/v1/completions", json=BUSY) as response:
            lines = response.aiter_lines()  # kept: a dropped iterator ends the request
            await anext(lines)
            served = await demand.show(SIM, lambda sim: sim.totals.placed == 1)
            in_line = tasks.create_task(client.post("/v1/completions", json=SHORT))
            waiting = await demand.show(SIM, lambda sim: sim.waiting == 1)
            assert (await client.post("/v1/completions", json=SHORT)).status_code == 503
            refused = await demand.show(SIM, lambda sim: sim.totals.refused == 1)
        assert (await in_line).status_code == 200
        last = await demand.show(SIM, lambda sim: sim.totals.placed == 2 and sim.waiting == 0)
        echo = await demand.show(ECHO, lambda pool: pool.totals.placed == 1)
    assert served.totals.computed_tokens == served.totals.placed_tokens > 100
    assert served.totals.output_tokens == 8_000
    assert waiting.waiting_tokens == 0  # it has the prompt of the request before
    assert refused.totals.placed == 1
    assert last.totals.computed_tokens < last.totals.placed_tokens
    assert (echo.totals.placed_tokens, echo.totals.refused, echo.waiting) == (0, 0, 0)
    assert demand.samples == 3  # those with prompts
    assert last.ttft_ratio > 0


async def test_requests_for_a_model_whose_last_instance_left_are_reported_as_refused(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str
) -> None:
    async with (
        frontend(etcd_server.endpoint, nats_server.url, namespace, "--router-mode", "round-robin") as front,
        client_of(front) as client,
        reports(nats_server, namespace) as demand,
    ):
        async with worker(etcd_server, nats_server, namespace, "--model", "sim"):
            await front.serves("sim")
            assert (await client.post("/v1/completions", json=SHORT)).status_code == 200
            placed = await demand.show(SIM, lambda sim: sim.totals.placed == 1)
            assert placed.totals.computed_tokens == placed.totals.placed_tokens
        while (await client.post("/v1/completions", json=SHORT)).status_code != 503:
            await asyncio.sleep(0.05)
        refused = await demand.show(SIM, lambda sim: sim.totals.refused > 0)
        assert refused.totals.refused_tokens == placed.totals.placed_tokens * refused.totals.refused


async def test_each_process_of_a_frontend_reports_under_a_name_of_its_own(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str
) -> None:
    async with (
        reports(nats_server, namespace) as demand,
        frontend(etcd_server.endpoint, nats_server.url, namespace, "--processes", "2"),
    ):
        await demand.come_from(2)
        assert len(demand.by_origin) == 2
