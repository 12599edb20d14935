"""Pods to which an endpoint picker sends nothing, as the frontend's own routing does. Real Envoy, etcd and nats-server."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import httpx2
import pytest

from tests.integration.test_endpoint_picker import Gateway, client, completion, gateway
from tests.support.pod import serve_pod
from tests.support.processes import worker
from tests.support.servers import EtcdServer, NatsServer
from tests.support.waiting import WAIT_S


async def places(http: httpx2.AsyncClient, requests: int) -> Counter[str]:
    """Return how many requests each pod has served. All succeed."""
    responses = [await http.post("/v1/completions", json=completion()) for _ in range(requests)]
    assert {response.status_code for response in responses} == {200}
    return Counter(response.json()["pod"] for response in responses)


async def left_out(gate: Gateway, count: int) -> None:
    """Return when canaries leave so many instances out."""
    async with asyncio.timeout(WAIT_S):
        while await gate.metric("instances_left_out") != count:
            await asyncio.sleep(0.02)


@pytest.mark.slow  # faults that take their time
async def test_a_pod_that_fails_half_of_its_requests_is_open_and_one_that_hangs_is_left_out(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str, tmp_path: Path
) -> None:
    flags = ("--circuit-open-time", "60", "--canary-wait", "0.5", "--canary-timeout", "1")
    async with (
        gateway(etcd_server, nats_server, namespace, tmp_path, *flags, pods=3) as gate,
        gate.envoy() as envoy,
        client(envoy) as http,
    ):
        gate.pods[0].fails_every = 2
        statuses = Counter([(await http.post("/v1/completions", json=completion())).status_code for _ in range(60)])
        assert statuses == {200: 55, 500: 5}, "--circuit-min-failures"
        assert await gate.metric("circuits_open", model="far") == 1
        gate.pods[0].fails_every = 0
        assert set(await places(http, 10)) == {"pod-1", "pod-2"}
        async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{gate.front.http_port}", timeout=WAIT_S) as console:
            [model] = [each for each in (await console.get("/console/fleet")).json()["models"] if each["name"] == "far"]
        assert [each["circuit"] for each in model["instances"] if "circuit" in each] == ["open"]

        gate.pods[1].hangs = True
        await left_out(gate, 1)
        assert set(await places(http, 10)) == {"pod-2"}
        gate.pods[1].hangs = False
        await left_out(gate, 0)
        assert set(await places(http, 10)) == {"pod-1", "pod-2"}


async def test_a_half_open_pod_is_tried_by_single_requests_and_gets_its_share_again(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str, tmp_path: Path
) -> None:
    async with (
        gateway(etcd_server, nats_server, namespace, tmp_path, "--circuit-open-time", "0.2", pods=2) as gate,
        gate.envoy() as envoy,
        client(envoy) as http,
    ):
        gate.pods[0].status = 500
        async with asyncio.timeout(WAIT_S):
            while await gate.metric("circuits_opened_total", model="far") < 2:  # its first probe has failed
                await http.post("/v1/completions", json=completion())
        gate.pods[0].status = 200
        async with asyncio.timeout(WAIT_S):
            while await gate.metric("circuits_open", model="far"):
                await http.post("/v1/completions", json=completion())
        assert await places(http, 10) == {"pod-0": 5, "pod-1": 5}


async def test_a_pod_whose_worker_drains_gets_no_requests_and_those_that_run_are_left_alone(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str, tmp_path: Path
) -> None:
    async with (
        gateway(etcd_server, nats_server, namespace, tmp_path, pods=1) as gate,
        serve_pod("leaving", tmp_path / "model", step_s=0.05) as pod,
        gate.envoy() as envoy,
        client(envoy) as http,
    ):
        watched = ("--url", pod.url, "--served-model-name", "far", "near")
        async with worker(etcd_server, nats_server, namespace, *watched) as leaving:
            async with asyncio.timeout(WAIT_S):
                while "leaving" not in await places(http, 1):
                    pass
            running = [asyncio.create_task(http.post("/v1/completions", json=completion(tokens=40))) for _ in range(4)]
            leaving.terminate()
            assert await leaving.ended() == 0
            async with asyncio.timeout(WAIT_S):  # the frontend sees in etcd that it has left
                while await gate.metric("model_instances", model="far") > 1:
                    await asyncio.sleep(0.02)
            assert await places(http, 10) == {"pod-0": 10}
            assert {response.status_code for response in await asyncio.gather(*running)} == {200}
