"""The status port of a worker process, from before its models are loaded until it has drained."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import httpx2
from prometheus_client.parser import text_string_to_metric_families

from dynamo.common.process.interpreter import interpreter
from dynamo.common.process.ports import free_ports
from tests.support.processes import frontend, worker
from tests.support.servers import EtcdServer, NatsServer


async def health(http: httpx2.AsyncClient) -> tuple[int, dict[str, Any]]:
    response = await http.get("/health")
    return response.status_code, response.json()


async def becomes(http: httpx2.AsyncClient, status: int, within_s: float = 120) -> dict[str, Any]:
    """Return the body of /health once it has this status."""
    async with asyncio.timeout(within_s):
        while True:
            try:
                code, body = await health(http)
            except httpx2.TransportError:
                code, body = 0, {}
            if code == status:
                return body
            await asyncio.sleep(0.02)


async def test_a_worker_is_ready_from_registration_until_it_drains(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str
) -> None:
    [port] = free_ports(1)
    async with (
        httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=120) as http,
        worker(etcd_server, nats_server, namespace, "--model", "echo", "--status-port", str(port)) as backend,
        frontend(etcd_server.endpoint, nats_server.url, namespace) as front,
    ):
        body = await becomes(http, 200)
        assert (body["status"], body["state"], body["models"]) == ("ready", "ready", ["echo"])
        assert body["endpoints"] == {"generate": "ready"}
        assert body["python"] == interpreter()
        assert (await http.get("/live")).status_code == 200
        assert (await http.get("/elsewhere")).status_code == 404
        assert (await http.post("/health")).status_code == 405

        await front.serves("echo")
        async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{front.http_port}", timeout=120) as client:
            tensor = {"name": "INPUT0", "datatype": "FP32", "shape": [1], "data": [1.0]}
            slow_request = {"inputs": [tensor], "parameters": {"delay_ms": 8000}}
            pending = asyncio.create_task(client.post("/v2/models/echo/infer", json=slow_request))
            await _metric(http, "dynamo_component_inflight_requests", 1)
            backend.terminate()
            body = await becomes(http, 503)
            assert (body["status"], body["state"]) == ("notready", "draining")
            assert (await http.get("/live")).status_code == 200
            assert (await pending).status_code == 200
        assert await backend.ended() == 0


async def test_a_worker_that_waits_for_nats_lives_but_is_not_ready(etcd_server: EtcdServer, namespace: str) -> None:
    nowhere, port = free_ports(2)
    absent = cast(NatsServer, SimpleNamespace(url=f"nats://127.0.0.1:{nowhere}"))
    async with (
        httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=120) as http,
        worker(etcd_server, absent, namespace, "--model", "echo", "--status-port", str(port)),
    ):
        body = await becomes(http, 503)
        assert (body["state"], body["nats"]) == ("starting", "disconnected")
        assert (await http.get("/live")).status_code == 200


async def test_without_the_flag_there_is_no_port(etcd_server: EtcdServer, nats_server: NatsServer, namespace: str) -> None:
    async with worker(etcd_server, nats_server, namespace, "--model", "echo") as backend:
        await backend.logged("serving echo")
        assert not any("status on" in line for line in backend.lines)


async def _metric(http: httpx2.AsyncClient, name: str, value: float, within_s: float = 120) -> None:
    async with asyncio.timeout(within_s):
        while True:
            text = (await http.get("/metrics")).text
            for family in text_string_to_metric_families(text):
                if any(sample.name == name and sample.value == value for sample in family.samples):
                    return
            await asyncio.sleep(0.02)
