"""Canaries with real processes: an idle worker freezes, and no request finds out."""

from __future__ import annotations

import asyncio
import os
import signal

import httpx2

from tests.support.processes import frontend, worker
from tests.support.servers import EtcdServer, NatsServer

LEFT_OUT = 'dynamo_frontend_instances_left_out{model="sim"}'


async def left_out(http: httpx2.AsyncClient, count: int, within_s: float = 120) -> None:
    """Returns when so many instances are left out."""
    async with asyncio.timeout(within_s):
        while f"{LEFT_OUT} {count:.1f}" not in (await http.get("/metrics")).text:
            await asyncio.sleep(0.02)


async def test_no_request_meets_an_idle_instance_that_froze(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str
) -> None:
    flags = ("--canary-wait", "0.5", "--canary-timeout", "2")
    async with (
        worker(etcd_server, nats_server, namespace, "--model", "sim") as frozen,
        worker(etcd_server, nats_server, namespace, "--model", "sim") as other,
        frontend(etcd_server.endpoint, nats_server.url, namespace, *flags) as front,
        httpx2.AsyncClient(base_url=f"http://127.0.0.1:{front.http_port}", timeout=120) as http,
    ):
        for process in (frozen, other):
            await process.logged("serving sim")
        await front.serves("sim")
        await left_out(http, 0)
        os.kill(frozen.process.pid, signal.SIGSTOP)
        try:
            await left_out(http, 1)
            for _ in range(6):
                response = await http.post("/v1/completions", json={"model": "sim", "prompt": "Hi", "max_tokens": 2})
                assert response.status_code == 200
            assert 'dynamo_frontend_retries_total{model="sim"} 0.0' in (await http.get("/metrics")).text
        finally:
            os.kill(frozen.process.pid, signal.SIGCONT)
        await left_out(http, 0)
        await front.logged("is left out")
        await front.logged("gets requests again")
