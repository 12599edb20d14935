"""Streams of every protocol whose worker is killed in the middle, and prompts that one worker computes and another answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import httpx2
import pytest

from tests.support.fleet import connect, text_request
from tests.support.processes import FrontendProcess, frontend, worker
from tests.support.servers import EtcdServer, NatsServer

TOKENS = 60
PROMPT = "Once upon a time"
SETTINGS: dict[str, Any] = {"model": "sim", "stream": True, "seed": 7, "temperature": 1}
MESSAGES = [{"role": "user", "content": PROMPT}]


@dataclass(frozen=True)
class StreamedRequest:
    path: str
    body: dict[str, Any]
    text: Callable[[dict[str, Any]], str]


def _choice(event: dict[str, Any]) -> dict[str, Any]:
    choices: list[dict[str, Any]] = event["choices"]
    return choices[0] if choices else {}


def of_two(index: int) -> StreamedRequest:
    """One of two choices."""
    body = {**SETTINGS, "prompt": PROMPT, "max_tokens": TOKENS, "ignore_eos": True, "n": 2}
    return StreamedRequest(
        "/v1/completions", body, lambda event: "".join(each["text"] for each in event["choices"] if each["index"] == index)
    )


REQUESTS = {
    "completions": StreamedRequest(
        "/v1/completions",
        {**SETTINGS, "prompt": PROMPT, "max_tokens": TOKENS, "ignore_eos": True},
        lambda event: _choice(event).get("text", ""),
    ),
    "chat": StreamedRequest(
        "/v1/chat/completions",
        {**SETTINGS, "messages": MESSAGES, "max_tokens": TOKENS, "ignore_eos": True},
        lambda event: _choice(event).get("delta", {}).get("content") or "",
    ),
    "first of two choices": of_two(0),
    "second of two choices": of_two(1),
    "responses": StreamedRequest(
        "/v1/responses",
        {"model": "sim", "stream": True, "temperature": 1, "input": PROMPT, "max_output_tokens": TOKENS},
        lambda event: event["delta"] if event["type"] == "response.output_text.delta" else "",
    ),
    "messages": StreamedRequest(
        "/v1/messages",
        {"model": "sim", "stream": True, "temperature": 1, "messages": MESSAGES, "max_tokens": TOKENS},
        lambda event: event["delta"]["text"] if event["type"] == "content_block_delta" else "",
    ),
    "kserve rest": StreamedRequest(
        "/v2/models/sim/generate_stream",
        {"text_input": PROMPT, "parameters": {"max_tokens": TOKENS, "ignore_eos": True, "seed": 7}},
        lambda event: event.get("text_output", ""),
    ),
}


@dataclass
class Received:
    """What a client of one protocol has read."""

    text: str = ""
    pieces: int = 0
    error: str = ""

    async def read(self, front: FrontendProcess, request: StreamedRequest) -> None:
        async with (
            httpx2.AsyncClient(base_url=f"http://127.0.0.1:{front.http_port}", timeout=120) as client,
            client.stream("POST", request.path, json=request.body) as response,
        ):
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    if event.get("error"):
                        self.error = str(event["error"])
                        continue
                    piece = request.text(event)
                    self.text += piece
                    self.pieces += bool(piece)


async def read_grpc(front: FrontendProcess, received: Received) -> None:
    async with connect(front.grpc_target) as client:
        async for message in client.stream([text_request(PROMPT, TOKENS, model="sim")]):
            received.error = received.error or message.error_message
            for output, raw in zip(message.infer_response.outputs, message.infer_response.raw_output_contents, strict=False):
                if output.name == "text_output":
                    received.text += raw[4:].decode()
                    received.pieces += 1


async def through_all_protocols(front: FrontendProcess, tasks: asyncio.TaskGroup) -> dict[str, Received]:
    """What comes of a request through each protocol; it has all been read when `tasks` are done."""
    received = {name: Received() for name in (*REQUESTS, "kserve grpc")}
    for name, request in REQUESTS.items():
        tasks.create_task(received[name].read(front, request))
    tasks.create_task(read_grpc(front, received["kserve grpc"]))
    return received


async def under_way(received: dict[str, Received]) -> None:
    async with asyncio.timeout(120):
        while min(one.pieces for one in received.values()) < 3:
            await asyncio.sleep(0.02)


def texts(received: dict[str, Received]) -> dict[str, str]:
    assert {name: one.error for name, one in received.items() if one.error} == {}
    return {name: one.text for name, one in received.items()}


SLOW, QUICK = ("--model", "sim:speedup=0.02"), ("--model", "sim:speedup=5")
"""Streams of the slow worker last longer than the quick one needs to start, on a busy machine too."""


@pytest.mark.slow
async def test_a_stream_of_any_protocol_goes_on_elsewhere_without_a_seam_when_its_worker_is_killed(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str
) -> None:
    async with (
        worker(etcd_server, nats_server, namespace, *SLOW) as first,
        frontend(etcd_server.endpoint, nats_server.url, namespace) as front,
        frontend(etcd_server.endpoint, nats_server.url, namespace, "--migration-limit", "0") as rigid,
        AsyncExitStack() as later,
    ):
        await front.serves("sim")
        await rigid.serves("sim")
        async with asyncio.TaskGroup() as tasks:
            moved = await through_all_protocols(front, tasks)
            failed = Received()
            tasks.create_task(failed.read(rigid, REQUESTS["completions"]))
            await under_way({**moved, "rigid": failed})
            second = await later.enter_async_context(worker(etcd_server, nats_server, namespace, *QUICK))
            await second.logged("registered")
            first.process.kill()
        async with asyncio.TaskGroup() as tasks:
            undisturbed = await through_all_protocols(front, tasks)
        assert all(len(text) > TOKENS / 4 for text in texts(undisturbed).values())
        assert texts(moved) == texts(undisturbed)
        assert moved["first of two choices"].text != moved["second of two choices"].text
        assert failed.error
        assert undisturbed["completions"].text.startswith(
            failed.text
        )  # what it got was right, and it was notified that the rest is missing
        assert len(failed.text) < len(undisturbed["completions"].text)


async def test_prompts_computed_apart_give_the_same_answers_through_every_protocol(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str
) -> None:
    prefill, decode = ("--model", "sim:speedup=5,role=prefill"), ("--model", "sim:speedup=5,role=decode")
    flags = ("--status-port", "0")
    async with (
        worker(etcd_server, nats_server, namespace, *prefill, *flags) as computing,
        worker(etcd_server, nats_server, namespace, *decode, *flags),
        frontend(etcd_server.endpoint, nats_server.url, namespace, "--router-mode", "kv") as front,
        frontend(etcd_server.endpoint, nats_server.url, namespace, "--enforce-disagg") as strict,
    ):
        await front.serves("sim")
        await strict.serves("sim")
        async with asyncio.TaskGroup() as tasks:
            apart = await through_all_protocols(front, tasks)
        assert all(len(text) > TOKENS / 4 for text in texts(apart).values())
        async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{front.http_port}", timeout=120) as client:
            explained = {"x-dynamo-explain": "true"}
            body = {"model": "sim", "prompt": "A prompt that no instance has cached", "max_tokens": 4}
            response = await client.post("/v1/completions", json=body, headers=explained)
            decisions = json.loads(response.headers["x-dynamo-explain"])
            assert len({decision["instance"] for decision in decisions}) == 2  # one computed, another one answered
            strictly = await client.post(f"http://127.0.0.1:{strict.http_port}/v1/completions", json=body)
            assert strictly.json()["choices"][0]["text"] == response.json()["choices"][0]["text"]

            computing.process.kill()
            await computing.process.wait()
            async with asyncio.TaskGroup() as tasks:
                alone = await through_all_protocols(front, tasks)
            assert texts(alone) == texts(apart)
            refused = await client.post(f"http://127.0.0.1:{strict.http_port}/v1/completions", json=body)
            assert refused.status_code == 503
            assert "no prefill instance is serving model 'sim'" in refused.json()["error"]["message"] or (
                "is gone" in refused.json()["error"]["message"]
            )
