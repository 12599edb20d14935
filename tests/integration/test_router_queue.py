"""Requests in the queue of a real frontend while its only worker is busy."""

from __future__ import annotations

import asyncio
import re

import httpx2

from tests.support.processes import FrontendProcess, frontend, worker
from tests.support.servers import EtcdServer, NatsServer

QUEUE = ("--router-mode", "kv", "--active-decode-blocks-threshold", "0.01", "--router-queue-size", "1")
BUSY = {"model": "sim", "prompt": "some words that fill blocks, " * 20, "max_tokens": 8_000, "ignore_eos": True, "stream": True}
IN_BACKGROUND = {"model": "sim", "input": "others", "max_output_tokens": 2, "background": True}
SHORT = {"model": "sim", "prompt": "others", "max_tokens": 2}


async def waiting(client: httpx2.AsyncClient) -> int:
    gauge = re.search(r'^dynamo_frontend_router_queue_requests\{model="sim"\} (\S+)$', (await client.get("/metrics")).text, re.M)
    return int(float(gauge[1])) if gauge else 0


def client_of(front: FrontendProcess) -> httpx2.AsyncClient:
    return httpx2.AsyncClient(base_url=f"http://127.0.0.1:{front.http_port}", timeout=120)


async def test_one_waits_until_there_is_room_and_one_more_is_told_to_come_back(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str
) -> None:
    async with (
        worker(etcd_server, nats_server, namespace, "--model", "sim:blocks=1000,speedup=0.5"),
        frontend(etcd_server.endpoint, nats_server.url, namespace, *QUEUE) as front,
        client_of(front) as client,
        asyncio.TaskGroup() as tasks,
    ):
        await front.serves("sim")
        async with client.stream("POST", "/v1/completions", json=BUSY) as response:
            lines = response.aiter_lines()  # kept: a dropped iterator ends the request
            await anext(lines)
            in_line = tasks.create_task(client.post("/v1/completions", json=SHORT))
            async with asyncio.timeout(120):
                while await waiting(client) != 1:
                    await asyncio.sleep(0.02)
            for path, request in (("/v1/completions", SHORT), ("/v1/responses", IN_BACKGROUND)):
                refused = await client.post(path, json=request)
                assert refused.status_code == 503
                assert int(refused.headers["retry-after"]) >= 1
                assert refused.json()["error"]["message"] == "the queue for model 'sim' is full: 1 waiting"
            assert not in_line.done()
        assert (await in_line).status_code == 200  # the long one was left: there is room
        assert await waiting(client) == 0
