"""Workers beside engine servers that run already: our own frontend as the server, and servers that die under load."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx2
import pytest
from openai import AsyncOpenAI, BadRequestError

from dynamo.worker.engine.echo import CHAT_TEMPLATE, byte_tokenizer
from dynamo.worker.engine.sim.engine import SimEngine
from dynamo.worker.engines import sim_config
from tests.support.processes import FrontendProcess, frontend, worker
from tests.support.servers import EtcdServer, NatsServer
from tests.support.vllm_server import serve_vllm
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(120)


def client(front: FrontendProcess) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"http://127.0.0.1:{front.http_port}/v1", api_key="none", max_retries=0)


def model_folder(folder: Path) -> Path:
    (folder / "tokenizer.json").write_bytes(byte_tokenizer())
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT_TEMPLATE}))
    return folder


async def inflight(front: FrontendProcess) -> float:
    """Requests that a frontend has open."""
    async with httpx2.AsyncClient() as http:
        text = (await http.get(f"http://127.0.0.1:{front.http_port}/metrics")).text
    return sum(
        float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith("dynamo_frontend_inflight_requests{")
    )


async def test_a_fleet_behind_another_frontend_responds_as_that_one(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str, tmp_path: Path
) -> None:
    inner = f"{namespace}-inner"
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        await enter(worker(etcd_server, nats_server, inner, "--model", "sim:speedup=2"))
        server = await enter(frontend(etcd_server.endpoint, nats_server.url, inner))
        remote = ("--engine", "remote", "--url", f"http://127.0.0.1:{server.http_port}", "--model-name", "far")
        await server.serves("sim")
        await enter(worker(etcd_server, nats_server, namespace, *remote, "--tokenizer", str(model_folder(tmp_path))))
        front = await enter(frontend(etcd_server.endpoint, nats_server.url, namespace))
        await front.serves("far")
        near, far = await enter(client(server)), await enter(client(front))

        settings: Any = {"prompt": "once upon a time", "max_tokens": 24, "temperature": 0.0, "logprobs": 3}
        expected = await near.completions.create(model="sim", **settings)
        whole = await far.completions.create(model="far", **settings)
        assert whole.choices[0].text == expected.choices[0].text
        assert whole.choices[0].logprobs == expected.choices[0].logprobs
        assert whole.usage is not None and whole.usage.completion_tokens == 24
        stream = await far.completions.create(model="far", stream=True, **settings)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == expected.choices[0].text

        messages: Any = [{"role": "user", "content": "Hi"}]
        chat: Any = {"messages": messages, "max_tokens": 12, "temperature": 0.0}
        theirs = await near.chat.completions.create(model="sim", **chat)
        ours = await far.chat.completions.create(model="far", **chat)
        assert ours.choices[0].message.content == theirs.choices[0].message.content

        with pytest.raises(BadRequestError, match="logit_bias is not supported by the sim engine"):
            await far.completions.create(model="far", prompt="a", max_tokens=4, logit_bias={"97": 5})

        long = await far.completions.create(
            model="far", prompt="a", max_tokens=4000, stream=True, extra_body={"ignore_eos": True}
        )
        await anext(aiter(long))
        assert await inflight(server) == 1
        await long.close()
        async with asyncio.timeout(20):
            while await inflight(server):
                await asyncio.sleep(0.01)


async def test_streams_of_a_lost_server_go_on_at_another_and_it_serves_again_when_it_is_back(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str, tmp_path: Path
) -> None:
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        servers = []
        for name in ("a", "b"):
            folder = tmp_path / name
            folder.mkdir()
            engine = SimEngine(sim_config("speedup=2,seed=3", "sim", 8, 4096))
            servers.append(await enter(serve_vllm(engine, folder, 4096)))
        urls = [flag for server in servers for flag in ("--url", server.url)]
        await enter(worker(etcd_server, nats_server, namespace, *urls))
        front = await enter(frontend(etcd_server.endpoint, nats_server.url, namespace))
        await front.serves("served")
        ours = await enter(client(front))
        settings: Any = {"model": "served", "prompt": "once", "max_tokens": 60, "extra_body": {"ignore_eos": True}}
        whole = (await ours.completions.create(**settings)).choices[0].text

        for server in servers:  # whichever has the stream loses it, and the other one finishes
            server.lost_after = 20
            other = next(candidate for candidate in servers if candidate is not server)
            other.lost_after = None
            begun = len(server.requests)
            while len(server.requests) == begun:
                stream = await ours.completions.create(stream=True, **settings)
                assert "".join([chunk.choices[0].text async for chunk in stream]) == whole
            server.lost_after = None

        first, second = servers
        begun = len(first.requests), len(second.requests)
        for _ in range(4):  # both serve again
            assert (await ours.completions.create(**settings)).choices[0].text == whole
        await until(lambda: len(first.requests) > begun[0] and len(second.requests) > begun[1])
