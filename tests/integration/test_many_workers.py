"""A fleet of simulated engines in one process."""

from __future__ import annotations

import asyncio

import httpx2
import pytest

from dynamo.common.generation import Stop
from dynamo.common.options import EtcdOptions, LogOptions, NatsOptions
from dynamo.common.process.ports import free_ports
from dynamo.frontend.app import serve_frontend
from dynamo.frontend.config import FrontendConfig, HttpOptions, RouterMode, RouterOptions
from dynamo.frontend.preprocess.text import TextRequest
from dynamo.frontend.security.accounts import ANONYMOUS
from dynamo.frontend.serving.call import Call
from tests.support.plane import generate
from tests.support.processes import worker
from tests.support.servers import EtcdServer, NatsServer
from tests.support.waiting import until

COUNT = 100


@pytest.mark.slow
async def test_a_hundred_workers_in_one_process_register_and_serve(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str
) -> None:
    config = FrontendConfig(
        namespace=namespace,
        router=RouterOptions(mode=RouterMode.ROUND_ROBIN),
        http=HttpOptions(port=0),
        log=LogOptions(),
        etcd=EtcdOptions(endpoints=(etcd_server.endpoint,)),
        nats=NatsOptions(servers=(nats_server.url,)),
    )
    model = ("--model", "sim:blocks=64", "--speedup-ratio", "0")
    async with (
        serve_frontend(config) as frontend,
        worker(etcd_server, nats_server, namespace, *model, "--num-workers", str(COUNT)) as process,
    ):
        await until(lambda: len(frontend.plane.models.instances("sim")) == COUNT, 120)

        async def send(number: int) -> int:
            request = TextRequest(model="sim", prompt=f"request {number}", stop=Stop(max_tokens=4))
            async with generate(frontend.plane, request, Call(account=ANONYMOUS, request_id=f"r{number}")) as generation:
                while await generation.read():
                    pass
                assert generation.decision is not None and generation.summary.output_tokens > 0
                return generation.decision.instance.id

        served = await asyncio.gather(*(send(number) for number in range(2 * COUNT)))
        assert {served.count(instance) for instance in served} == {2}, "each of them took two requests"
        process.terminate()
        assert await process.ended() == 0
        await until(lambda: not frontend.plane.models.instances("sim"))


async def test_each_worker_of_a_process_has_a_status_port_of_its_own(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str
) -> None:
    port, _ = free_ports(2)
    flags = ("--model", "sim", "--num-workers", "2", "--status-port", str(port))
    async with worker(etcd_server, nats_server, namespace, *flags) as process, httpx2.AsyncClient() as client:
        await process.logged("serving sim", times=2)
        bodies = [(await client.get(f"http://127.0.0.1:{port + number}/health")).json() for number in range(2)]
        assert bodies[0] != bodies[1], "they are different instances"
