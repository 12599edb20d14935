"""One of three workers fails every second request of a model: which requests fail, and what operators see of it."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx2

from tests.support.processes import frontend, worker
from tests.support.servers import EtcdServer, NatsServer
from tests.support.waiting import WAIT_S

MODEL = """
import itertools
from dynamo.worker.engine.python import Tensor

class {name}:
    inputs = {{"x": Tensor("FP32", [-1])}}
    outputs = {{"y": Tensor("FP32", [-1])}}
    requests = itertools.count()

    def infer(self, x):
        if next(self.requests) % {every} == 0:
            raise RuntimeError("broken")
        return {{"y": x}}
"""
NEVER = 10**9
REQUEST = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [1.0]}]}


async def shown(http: httpx2.AsyncClient) -> list[dict[str, Any]]:
    """Return the instances that the console shows."""
    [model] = (await http.get("/console/fleet")).json()["models"]
    instances: list[dict[str, Any]] = model["instances"]
    return instances


async def test_an_instance_that_fails_half_of_its_requests_gets_none_and_operators_see_it(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str, tmp_path: Path
) -> None:
    (tmp_path / "half.py").write_text(MODEL.format(name="Half", every=2))
    (tmp_path / "well.py").write_text(MODEL.format(name="Well", every=NEVER).replace("next(self.requests)", "1"))
    async with AsyncExitStack() as stack:
        where = etcd_server, nats_server, namespace
        for model in ("half.py:Half", "well.py:Well", "well.py:Well"):
            await stack.enter_async_context(worker(*where, "--model", f"{tmp_path}/{model}", "--model-name", "m"))
        options = ("--circuit-open-time", "0.5")
        front = await stack.enter_async_context(frontend(etcd_server.endpoint, nats_server.url, namespace, *options))
        http = httpx2.AsyncClient(base_url=f"http://127.0.0.1:{front.http_port}", timeout=WAIT_S)
        await stack.enter_async_context(http)
        await front.serves("m")
        async with asyncio.timeout(WAIT_S):
            while len(await shown(http)) < 3:
                await asyncio.sleep(0.02)

        statuses = [(await http.post("/v2/models/m/infer", json=REQUEST)).status_code for _ in range(60)]
        assert statuses.count(500) == 5, "--circuit-min-failures"
        assert set(statuses[-20:]) == {200}
        [circuit] = [each["circuit"] for each in await shown(http) if "circuit" in each]
        assert circuit in ("open", "half_open")
        metrics = (await http.get("/metrics")).text
        assert 'dynamo_frontend_circuits_open{model="m"} 1.0' in metrics
        await front.logged("too many requests failed")

        explained = await http.post("/v2/models/m/infer", json=REQUEST, headers={"x-dynamo-explain": "true"})
        assert '"open_circuits":1' in explained.headers["x-dynamo-explain"]
        [broken] = [each["id"] for each in await shown(http) if "circuit" in each]
        named = [
            (await http.post("/v2/models/m/infer", json=REQUEST, headers={"x-dynamo-instance": broken})).status_code
            for _ in range(4)
        ]
        assert sorted(named) == [200, 200, 500, 500]

        opened = 0.0
        while opened < 3:  # its probes fail, and no client notices
            assert (await http.post("/v2/models/m/infer", json=REQUEST)).status_code == 200
            text = (await http.get("/metrics")).text
            opened = float(text.partition('dynamo_frontend_circuits_opened_total{model="m"} ')[2].split()[0])
