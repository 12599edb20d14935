"""LoRA adapters at run time: two frontends, and workers with simulated engines. Real etcd and nats-server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2

from dynamo.common.names import Endpoint
from dynamo.common.options import EtcdOptions, LogOptions, NatsOptions
from dynamo.frontend.app import Frontend, serve_frontend
from dynamo.frontend.config import FrontendConfig, HttpOptions, RouterMode, RouterOptions
from dynamo.worker.app import Worker, open_worker
from dynamo.worker.config import AdapterOptions, WorkerConfig
from dynamo.worker.engine.sim.engine import SimEngine
from dynamo.worker.process.engine_factory import sim_config
from tests.support.servers import EtcdServer, NatsServer
from tests.support.waiting import WAIT_S, until


@dataclass
class Fleet:
    folder: Path
    links: dict[str, Any]
    stack: AsyncExitStack
    namespace: str
    frontends: list[Frontend] = field(default_factory=list)
    http: list[httpx2.AsyncClient] = field(default_factory=list)

    async def add_worker(self, root: Path | None = None, speedup: float = 0) -> Worker:
        engine = SimEngine(sim_config("adapters=2,block_size=16,blocks=4000", "base", None, None, None, speedup))
        adapters = AdapterOptions(allow=True, path_roots=(root or self.folder,))
        config = WorkerConfig(endpoint=Endpoint(namespace=self.namespace), adapters=adapters, **self.links)
        return await self.stack.enter_async_context(open_worker(engine, config))

    def adapter(self, name: str, **settings: object) -> str:
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        (folder / "adapter_config.json").write_text(json.dumps({"r": 8, **settings}))
        return str(folder)

    async def post(self, path: str, body: dict[str, object], frontend: int = 0) -> httpx2.Response:
        return await self.http[frontend].post(path, json=body)

    async def load(self, name: str, path: str, **fields: object) -> httpx2.Response:
        return await self.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path, **fields})

    async def unload(self, name: str) -> httpx2.Response:
        return await self.post("/v1/unload_lora_adapter", {"lora_name": name})

    async def models(self, frontend: int = 1) -> dict[str, dict[str, Any]]:
        return {model["id"]: model for model in (await self.http[frontend].get("/v1/models")).json()["data"]}

    async def completion(self, model: str, prompt: str = "Hello") -> tuple[str, int]:
        """The text, and the tokens of the prompt that were in the cache."""
        body = {"model": model, "prompt": prompt, "max_tokens": 8, "ignore_eos": True}
        response = await self.post("/v1/completions", body, frontend=1)
        assert response.status_code == 200, response.text
        completion = response.json()
        return completion["choices"][0]["text"], completion["usage"]["prompt_tokens_details"]["cached_tokens"]

    async def text(self, model: str, prompt: str = "Hello") -> str:
        return (await self.completion(model, prompt))[0]

    async def index(self) -> dict[str, dict[str, str]]:
        return {entry["name"]: entry for entry in (await self.http[1].post("/v2/repository/index")).json()}


@asynccontextmanager
async def fleet_of(etcd: EtcdServer, nats: NatsServer, namespace: str, folder: Path) -> AsyncIterator[Fleet]:
    links: dict[str, Any] = {
        "etcd": EtcdOptions(endpoints=(etcd.endpoint,)),
        "nats": NatsOptions(servers=(nats.url,)),
        "log": LogOptions(),
    }
    folder.mkdir()
    async with AsyncExitStack() as stack:
        fleet = Fleet(folder, links, stack, namespace)
        for _ in range(2):
            config = FrontendConfig(
                namespace=namespace,
                http=HttpOptions(port=0),
                router=RouterOptions(mode=RouterMode.KV),
                **links,
            )
            frontend = await stack.enter_async_context(serve_frontend(config))
            fleet.frontends.append(frontend)
            client = httpx2.AsyncClient(base_url=f"http://127.0.0.1:{frontend.http_port}", timeout=120)
            fleet.http.append(await stack.enter_async_context(client))
        yield fleet


async def served_by(fleet: Fleet, name: str, instances: int) -> None:
    """Wait until the second frontend sees so many instances with a name, ready to be used."""
    plane = fleet.frontends[1].plane
    await until(lambda: len(plane.models.instances(name)) == instances and (not instances or plane.model_ready(name)))


async def test_an_adapter_is_a_model_of_every_instance_until_it_is_unloaded(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str, tmp_path: Path
) -> None:
    async with fleet_of(etcd_server, nats_server, namespace, tmp_path / "adapters") as fleet:
        await fleet.add_worker()
        await fleet.add_worker()
        for number in range(2):
            plane = fleet.frontends[number].plane
            await until(lambda plane=plane: len(plane.models.instances("base")) == 2 and plane.model_ready("base"))  # type: ignore[misc]
        sql = fleet.adapter("sql")
        loaded = await fleet.load("sql", sql)
        assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'sql' added successfully.")
        await served_by(fleet, "sql", 2)
        model = (await fleet.models())["sql"]
        assert (model["parent"], model["root"], model["ready"]) == ("base", sql, True)
        prompt = "x" * 64
        (base, _), (by_sql, cached) = await fleet.completion("base", prompt), await fleet.completion("sql", prompt)
        assert base != by_sql
        assert cached == 0
        async with asyncio.timeout(WAIT_S):  # the frontend's index is told of what the instance has cached after the response
            while (third := await fleet.completion("sql", prompt)) != (by_sql, 48):
                assert third == (by_sql, 0)

        again = await fleet.load("sql", sql)
        assert again.status_code == 400
        assert again.json()["error"] == {
            "message": "The lora adapter 'sql' has already been loaded. If you want to load the adapter in place, set "
            "'load_inplace' to True.",
            "type": "InvalidUserInput",
            "param": None,
            "code": 400,
        }
        fleet.adapter("sql", lora_alpha=2)
        assert (await fleet.load("sql", sql, load_inplace=True)).status_code == 200
        assert await fleet.text("sql", prompt) not in (base, by_sql)

        # One that starts later has it too, and one that cannot read it says so.
        await fleet.add_worker()
        await served_by(fleet, "sql", 3)
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir()
        await fleet.add_worker(elsewhere)
        await until(lambda: len(fleet.frontends[0].plane.models.instances("base")) == 4)
        partly = await fleet.load("chat", fleet.adapter("chat"))
        assert (partly.status_code, partly.json()["error"]["type"]) == (403, "PermissionDeniedError")
        assert "is served by 3 of 4 instances" in partly.json()["error"]["message"]
        await served_by(fleet, "chat", 3)
        entry = (await fleet.index())["chat"]
        assert entry["state"] == "READY"
        assert "not below a --lora-path-root" in entry["reason"]
        assert {await fleet.text("chat") for _ in range(4)} == {await fleet.text("chat")}

        full = await fleet.load("third", fleet.adapter("third"))
        assert (full.status_code, full.json()["error"]["type"]) == (400, "BadRequestError")
        assert "holds 2 LoRA adapters, of at most 2" in full.json()["error"]["message"]
        assert "third" not in await fleet.models()
        missing = await fleet.load("none", str(fleet.folder / "none"), load_inplace=True)
        assert missing.status_code == 400
        assert (await fleet.unload("chat")).status_code == 200
        missing = await fleet.load("none", str(fleet.folder / "none"))
        assert missing.status_code == 404
        assert missing.json()["error"]["message"] == f"Loading lora none failed: No adapter found for {fleet.folder}/none"
        assert (await fleet.unload("none")).status_code == 404

        # Over KServe, with the same parameters.
        body = {"parameters": {"lora_path": fleet.adapter("kserve")}}
        refused = await fleet.post("/v2/repository/models/kserve/load", body)
        assert refused.status_code == 403
        assert "3 of 4" in refused.text
        await served_by(fleet, "kserve", 3)
        assert (await fleet.post("/v2/repository/models/kserve/unload", {})).status_code == 200
        await served_by(fleet, "kserve", 0)


async def test_requests_that_run_end_before_their_adapter_is_unloaded(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str, tmp_path: Path
) -> None:
    async with fleet_of(etcd_server, nats_server, namespace, tmp_path / "adapters") as fleet:
        await fleet.add_worker(speedup=1)
        plane = fleet.frontends[0].plane
        await until(lambda: plane.model_ready("base"))
        assert (await fleet.load("sql", fleet.adapter("sql"))).status_code == 200
        await served_by(fleet, "sql", 1)
        body = {"model": "sql", "prompt": "Hello", "max_tokens": 60, "ignore_eos": True, "stream": True}
        async with fleet.http[0].stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.aiter_lines()
            await anext(lines)
            assert (await fleet.unload("sql")).status_code == 200
            assert (await fleet.post("/v1/completions", body)).status_code == 404
            rest = [line async for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        async with asyncio.timeout(120):
            assert (await fleet.load("sql", fleet.adapter("sql", r=4))).status_code == 200
