"""Engine servers that a worker takes from a file, behind a real Envoy: they come and go while requests flow."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path

import httpx2
import pytest
import yaml

from dynamo.common.process.ports import free_ports
from tests.integration.test_endpoint_picker import client, completion
from tests.support.envoy import start_envoy
from tests.support.pod import Pod, serve_pod
from tests.support.processes import frontend, worker
from tests.support.servers import EtcdServer, NatsServer
from tests.support.waiting import WAIT_S


@pytest.mark.slow  # servers that come and go under load
async def test_servers_are_added_and_removed_while_requests_flow_and_none_fails(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str, tmp_path: Path
) -> None:
    file = tmp_path / "servers.yaml"

    def write(*pods: Pod) -> None:
        entries = [{"name": pod.name, "address": "127.0.0.1", "port": str(pod.port)} for pod in pods]
        (tmp_path / "new").write_text(yaml.safe_dump({"endpoints": entries}))
        (tmp_path / "new").rename(file)

    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        pods = [await enter(serve_pod(f"pod-{number}", tmp_path / "model", step_s=0.01)) for number in range(3)]
        write(pods[0])
        flags = ("--url-file", str(file), "--model-name", "far")
        worked = await enter(worker(etcd_server, nats_server, namespace, *flags))
        [port] = free_ports(1)
        picker = ("--endpoint-picker", "--endpoint-picker-port", str(port), "--router-mode", "least-loaded")
        front = await enter(frontend(etcd_server.endpoint, nats_server.url, namespace, *picker))
        await front.serves("far")
        http = await enter(client(await enter(start_envoy(tmp_path / "envoy", port))))

        served: Counter[str] = Counter()
        latest: dict[str, int] = {}
        """The number of the last request that each pod has served."""
        failed: list[str] = []
        has_ended = False

        async def load() -> None:
            while not has_ended:
                response: httpx2.Response = await http.post("/v1/completions", json=completion(tokens=5))
                if response.status_code != 200:
                    failed.append(f"{response.status_code}: {response.text}")
                    continue
                served[response.json()["pod"]] += 1
                latest[response.json()["pod"]] = served.total()

        async def only(*wanted: str) -> None:
            """Return when these pods serve, and no other one has for a while."""
            since = served.total()
            async with asyncio.timeout(WAIT_S):
                while not failed and {pod for pod, number in latest.items() if number > served.total() - 100} != set(wanted):
                    await asyncio.sleep(0.01)
                while not failed and served.total() < since + 200:
                    await asyncio.sleep(0.01)

        loads = [asyncio.create_task(load()) for _ in range(4)]
        await only("pod-0")
        write(*pods)
        await only("pod-0", "pod-1", "pod-2")
        file.write_text("endpoints: [{address: 127.0.0.1, port: ")
        await worked.logged("changed and cannot be used, so the old one stays")
        write(pods[1], pods[2])
        await only("pod-1", "pod-2")
        await pods[0].kill()
        write(pods[2])
        await only("pod-2")
        has_ended = True
        await asyncio.gather(*loads)
        assert not failed
