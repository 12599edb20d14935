"""A planner before real frontends and workers, whose requests it decides by; the test starts and ends the workers."""

from __future__ import annotations

import asyncio
from itertools import count

import httpx2

from dynamo.common.process.background import running
from dynamo.common.scaling.pool import Pool
from dynamo.common.scaling.targets import decode_targets, targets_key
from tests.support.processes import frontend, planner, worker
from tests.support.servers import EtcdServer, NatsServer, etcdctl
from tests.support.waiting import WAIT_S

FAST = ("--interval", "0.5", "--lease-ttl-s", "1", "--cool-up", "0")
"""Rounds and leases as short as a test likes."""


async def until_written(etcd: EtcdServer, namespace: str, instances: int) -> None:
    """Return when the target of sim in etcd is so many instances."""
    async with asyncio.timeout(WAIT_S):
        while True:
            text = await asyncio.to_thread(etcdctl, etcd.endpoint, "get", "--print-value-only", targets_key(namespace))
            targets = decode_targets(text.strip().encode()).targets if text.strip() else ()
            if any(target.pool == Pool("sim") and target.instances == instances for target in targets):
                return
            await asyncio.sleep(0.05)


async def test_a_fleet_is_scaled_by_what_its_frontends_report_and_by_the_steps_of_its_engines(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str
) -> None:
    where = (etcd_server.endpoint, nats_server.url, namespace)
    async with (
        worker(etcd_server, nats_server, namespace, "--model", "sim"),
        frontend(*where) as front,
        planner(*where, *FAST, "--ttft-ms", "3000", "--max-instances", "50") as planning,
        httpx2.AsyncClient(base_url=f"http://127.0.0.1:{front.http_port}", timeout=WAIT_S) as client,
    ):
        await front.serves("sim")
        await planning.shows(lambda shown: shown["is_leader"] and shown["pools"] and not shown["holding"])
        async with running(_requests(client), "requests"):
            shown = await planning.shows(lambda shown: shown["pools"][0]["target"] > 1 and shown["pools"][0]["observations"])
        [pool] = shown["pools"]
        assert (pool["by"], pool["instances"]) == ("formula", 1)
        assert pool["engine_seconds"] > 0


async def _requests(client: httpx2.AsyncClient) -> None:
    """Send four requests a second, each of which takes an engine about half a second, until cancelled."""
    async with asyncio.TaskGroup() as tasks:
        for number in count():
            body = {"model": "sim", "prompt": f"{number} " + "words that differ " * 200, "max_tokens": 20}
            tasks.create_task(client.post("/v1/completions", json=body))
            await asyncio.sleep(0.25)


async def test_a_model_goes_to_zero_and_comes_back_for_a_request_that_waits(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str
) -> None:
    where = (etcd_server.endpoint, nats_server.url, namespace)
    async with (
        frontend(*where) as front,
        planner(*where, *FAST, "--idle-timeout", "2", "--cool-down", "0") as planning,
        httpx2.AsyncClient(base_url=f"http://127.0.0.1:{front.http_port}", timeout=WAIT_S) as client,
    ):
        body = {"model": "sim", "prompt": "Hello", "max_tokens": 4}
        async with worker(etcd_server, nats_server, namespace, "--model", "sim"):
            await front.serves("sim")
            assert (await client.post("/v1/completions", json=body)).status_code == 200
            await until_written(etcd_server, namespace, 0)
        assert (await planning.explain())["pools"][0]["by"] == "idle"
        await planning.shows(lambda shown: not shown["pools"][0]["instances"])
        listed = (await client.get("/v1/models")).json()["data"]
        assert [(model["id"], model["ready"]) for model in listed] == [("sim", False)]
        waiting = asyncio.create_task(client.post("/v1/completions", json=body))
        await until_written(etcd_server, namespace, 1)
        assert not waiting.done()
        async with worker(etcd_server, nats_server, namespace, "--model", "sim"):
            response = await waiting
        assert (response.status_code, response.json()["usage"]["completion_tokens"]) == (200, 4)
        made = (await planning.explain())["decisions"]
        assert [(decision["before"], decision["instances"], decision["by"]) for decision in made][-1:] == [(1, 0, "idle")]
        assert (0, 1, "waiting") in [(decision["before"], decision["instances"], decision["by"]) for decision in made]
