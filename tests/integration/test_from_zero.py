"""Models that have no worker and can be started, at a real frontend with real etcd and NATS."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import grpc
import grpc.aio
import httpx2
import pytest

from dynamo.common.discovery import decode_registration
from dynamo.common.etcd import Etcd, connect_etcd
from dynamo.common.names import namespace_prefix
from dynamo.common.options import EtcdOptions
from dynamo.common.scaling.pool import Pool
from dynamo.common.scaling.standby import Standby, delete_standby, pool_standby_key, put_standby
from tests.integration.test_demand_reports import Reports, client_of, reports
from tests.support.fleet import connect, echo_request
from tests.support.processes import FrontendProcess, frontend, worker
from tests.support.servers import EtcdServer, NatsServer

MODELS = ("--model", "sim", "--model", "echo")
SHORT = {"model": "sim", "prompt": "some words", "max_tokens": 3, "ignore_eos": True}
SIM, ECHO = Pool("sim"), Pool("echo")


@asynccontextmanager
async def put_to_sleep(etcd_server: EtcdServer, nats_server: NatsServer, namespace: str) -> AsyncIterator[Etcd]:
    """Have records of the models of a worker that was there once, as a planner puts them; the worker is gone."""
    async with connect_etcd(EtcdOptions(endpoints=(etcd_server.endpoint,))) as etcd:
        async with worker(etcd_server, nats_server, namespace, *MODELS), asyncio.timeout(120):
            while len(kvs := (await etcd.range(namespace_prefix(namespace), prefix=True)).kvs) < 2:
                await asyncio.sleep(0.05)
        for each in [decode_registration(kv.key, kv.value) for kv in kvs]:
            await put_standby(etcd, Standby(card=each.card, endpoint=each.endpoint, start_s=33.0))
        yield etcd


@asynccontextmanager
async def asleep(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str, *flags: str
) -> AsyncIterator[tuple[FrontendProcess, httpx2.AsyncClient, Reports, Etcd]]:
    """Serve a frontend that knows the models by their records alone."""
    async with (
        put_to_sleep(etcd_server, nats_server, namespace) as etcd,
        reports(nats_server, namespace) as demand,
        frontend(etcd_server.endpoint, nats_server.url, namespace, *flags) as front,
        client_of(front) as client,
    ):
        await demand.come_from(1)
        async with asyncio.timeout(120):
            while (await client.get("/health")).status_code != 200:
                await asyncio.sleep(0.05)
        yield front, client, demand, etcd


async def test_requests_of_every_protocol_wait_until_a_worker_has_started(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str
) -> None:
    async with AsyncExitStack() as stack:
        front, client, demand, _ = await stack.enter_async_context(asleep(etcd_server, nats_server, namespace))
        models = (await client.get("/v1/models")).json()["data"]
        assert {model["id"]: model["ready"] for model in models} == {"echo": False, "sim": False}
        metadata = await client.get("/v2/models/echo")
        assert (metadata.status_code, metadata.json()["inputs"][0]["name"]) == (200, "INPUT0")
        assert (await client.get("/v2/models/echo/ready")).status_code == 400
        assert (await client.get("/v2/health/ready")).status_code == 200
        tokens = await client.post("/tokenize", json={"model": "sim", "prompt": "some words"})
        count = tokens.json()["count"]

        tensors = await stack.enter_async_context(connect(front.grpc_target))
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        whole = tasks.create_task(client.post("/v1/completions", json=SHORT))
        streamed = tasks.create_task(client.post("/v1/completions", json={**SHORT, "stream": True}))
        infer = tasks.create_task(tensors.infer(echo_request(b"12345678")))
        sim = await demand.show(SIM, lambda pool: pool.waiting == 2)
        await demand.show(ECHO, lambda pool: pool.waiting == 1)
        assert sim.waiting_tokens == 2 * count
        assert (sim.totals.placed, sim.totals.refused) == (0, 0)

        await stack.enter_async_context(worker(etcd_server, nats_server, namespace, *MODELS))
        assert (await whole).json()["usage"]["completion_tokens"] == 3
        lines = [line for line in (await streamed).text.splitlines() if line]
        assert lines[-1] == "data: [DONE]"
        assert json.loads(lines[0].removeprefix("data: "))["object"] == "text_completion"
        assert list((await infer).raw_output_contents) == [b"12345678"]
        await demand.show(SIM, lambda pool: pool.waiting == 0 and pool.totals.placed == 2)
        assert (await client.get("/v2/models/echo/ready")).status_code == 200


async def test_a_request_that_has_waited_for_too_long_is_told_that_the_model_starts(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str
) -> None:
    async with asleep(etcd_server, nats_server, namespace, "--start-timeout", "1.5") as (front, client, demand, etcd):
        for body in (SHORT, {**SHORT, "stream": True}):
            response = await client.post("/v1/completions", json=body)
            assert (response.status_code, response.headers["retry-after"]) == (503, "33")
            assert response.json()["error"]["message"] == "model 'sim' is starting: no instance serves it after 1.5 s"
        async with connect(front.grpc_target) as tensors:
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await tensors.infer(echo_request())
        assert failure.value.code() is grpc.StatusCode.UNAVAILABLE
        assert failure.value.details() == "model 'echo' is starting: no instance serves it after 1.5 s"
        metadata = failure.value.trailing_metadata()
        assert metadata is not None
        assert dict(metadata)["retry-after"] == "33"
        await demand.show(SIM, lambda pool: pool.totals.refused == 2 and pool.waiting == 0)

        await delete_standby(etcd, namespace, SIM)
        async with asyncio.timeout(120):
            while (await client.post("/v1/completions", json=SHORT)).status_code != 404:
                await asyncio.sleep(0.05)


async def test_only_so_many_wait_and_one_whose_client_has_left_waits_no_more(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str
) -> None:
    async with AsyncExitStack() as stack:
        front, client, demand, _ = await stack.enter_async_context(
            asleep(etcd_server, nats_server, namespace, "--start-queue-size", "1")
        )
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        leaving = await stack.enter_async_context(client_of(front))
        left = asyncio.create_task(leaving.post("/v1/completions", json=SHORT))
        await demand.show(SIM, lambda pool: pool.waiting == 1)
        for path, request in (
            ("/v1/completions", SHORT),
            ("/v1/responses", {"model": "sim", "input": "others", "max_output_tokens": 2, "background": True}),
        ):
            refused = await client.post(path, json=request)
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "33")
            assert refused.json()["error"]["message"].endswith("1 requests wait for its first instance, and no more may")
        left.cancel()
        await asyncio.wait([left])
        await demand.show(SIM, lambda pool: pool.waiting == 0)
        next_one = tasks.create_task(client.post("/v1/completions", json=SHORT))
        await demand.show(SIM, lambda pool: pool.waiting == 1)
        await stack.enter_async_context(worker(etcd_server, nats_server, namespace, *MODELS))
        assert (await next_one).status_code == 200
        last = await demand.show(SIM, lambda pool: pool.totals.placed == 1)
        assert last.totals.refused == 3


async def test_a_record_that_is_wrong_does_no_harm(etcd_server: EtcdServer, nats_server: NatsServer, namespace: str) -> None:
    async with asleep(etcd_server, nats_server, namespace) as (front, client, _, etcd):
        await etcd.put(pool_standby_key(namespace, ECHO), b"nonsense")
        await front.logged("is left out")
        assert [model["id"] for model in (await client.get("/v1/models")).json()["data"]] == ["sim"]
