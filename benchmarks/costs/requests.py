"""Requests of clients, one at a time or many at once, to a frontend with one worker."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from benchmarks.costs.deployment import Fleet, Loop, Plan, open_fleet
from benchmarks.costs.recording import Recorder
from benchmarks.grpc_client import GrpcConnection, request_headers
from benchmarks.grpc_client import message as grpc_message
from benchmarks.http_client import HttpConnection
from benchmarks.kserve import SERVICE, tensor_body, text_request
from dynamo.worker.config import RepositoryOptions
from dynamo.worker.engine.echo import EchoTensors
from dynamo.worker.engine.sim.engine import SimEngine
from dynamo.worker.process.engine_factory import make_repository, sim_config

TOKENS = 128
AFTER_S = 0.004
"""What follows a response within this time belongs to it."""
LEAST = 8
"""Requests in a round, of few clients one after the other: what only some of them do counts by its share."""
_WORDS = ("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school")
_PROMPT = " ".join(random.Random(1).choices(_WORDS, k=100))
PHASE_S = 15.0
"""The clients of a request connect at a multiple of it, so that beats meet them alike however long the fleet takes to start."""
_REPOSITORY = Path(__file__).parents[1] / "repository"


class Request(Protocol):
    """A request that clients send, each on a connection of its own."""

    async def clients(self, fleet: Fleet, number: int) -> Sequence[Callable[[], Awaitable[None]]]:
        """Return functions that send one request and raise RuntimeError unless its response is right."""
        ...


@dataclass(frozen=True, slots=True)
class Http:
    path: str
    body: Mapping[str, Any]
    events: int = 0
    """Events that its response has at least; 0: it is no stream."""
    binary: bytes = b""
    """What follows the JSON, by KServe's extension for binary data."""

    def encoded(self) -> bytes:
        text = json.dumps(self.body).encode()
        length = f"inference-header-content-length: {len(text)}\r\n" if self.binary else ""
        head = f"POST {self.path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n{length}"
        return f"{head}content-length: {len(text) + len(self.binary)}\r\n\r\n".encode() + text + self.binary

    async def clients(self, fleet: Fleet, number: int) -> Sequence[Callable[[], Awaitable[None]]]:
        request, connections = self.encoded(), [HttpConnection(TOKENS) for _ in range(number)]
        for connection in connections:
            fleet.loop.dial(fleet.frontend.http_port, connection)

        async def send(connection: HttpConnection) -> None:
            response = connection.send(request)
            await response.done
            if response.status != 200 or response.events < self.events:
                raise RuntimeError(f"{self.path}: {response.status}, {response.events} events, {response.error}")

        return [_bound(send, connection) for connection in connections]


@dataclass(frozen=True, slots=True)
class Grpc:
    method: str
    body: bytes
    messages: int = 1

    async def clients(self, fleet: Fleet, number: int) -> Sequence[Callable[[], Awaitable[None]]]:
        headers, connections = request_headers(SERVICE + self.method, "localhost"), [GrpcConnection() for _ in range(number)]
        assert fleet.frontend.grpc_port is not None
        for connection in connections:
            fleet.loop.dial(fleet.frontend.grpc_port, connection)

        async def send(connection: GrpcConnection) -> None:
            reply = connection.call(headers, self.body)
            await reply.done
            if reply.status or reply.messages < self.messages:
                raise RuntimeError(f"{self.method}: {reply.status} {reply.detail}, {reply.messages} messages")

        return [_bound(send, connection) for connection in connections]


def _bound(send: Callable[[Any], Awaitable[None]], connection: object) -> Callable[[], Awaitable[None]]:
    return lambda: send(connection)


def completion(model: str, tokens: int, *, stream: bool) -> Http:
    body = {"model": model, "prompt": _PROMPT, "max_tokens": tokens, "ignore_eos": True, "stream": stream}
    return Http("/v1/completions", body, tokens // 2 if stream else 0)


def _chat_with_tools() -> Http:
    properties = {name: {"type": "string"} for name in ("city", "unit")}
    tools = [
        {
            "type": "function",
            "function": {"name": name, "description": _PROMPT[:80], "parameters": {"type": "object", "properties": properties}},
        }
        for name in ("weather", "forecast")
    ]
    call = 'weather({"city": "Oslo", "unit": "celsius"})'
    messages = [{"role": "user", "content": f"{_PROMPT} {call}"}]
    return Http("/v1/chat/completions", {"model": "tools", "messages": messages, "tools": tools, "stream": True}, 3)


def _anthropic() -> Http:
    messages = [{"role": "user", "content": _PROMPT}]
    return Http("/v1/messages", {"model": "paced", "messages": messages, "max_tokens": TOKENS, "stream": True}, TOKENS // 2)


def _rest(floats: int, *, binary: bool) -> Http:
    tensor: dict[str, Any] = {"name": "INPUT0", "datatype": "FP32", "shape": [floats]}
    if not binary:
        return Http("/v2/models/tensor/infer", {"inputs": [tensor | {"data": [0.5] * floats}]})
    data = np.full(floats, 0.5, np.float32).tobytes()
    body = {
        "inputs": [tensor | {"parameters": {"binary_data_size": len(data)}}],
        "parameters": {"binary_data_output": True},
    }
    return Http("/v2/models/tensor/infer", body, binary=data)


def _kserve_text() -> Grpc:
    request = text_request("paced", _PROMPT.encode())
    request.parameters["max_tokens"].int64_param = TOKENS
    request.parameters["ignore_eos"].bool_param = True
    return Grpc("ModelStreamInfer", grpc_message(request.SerializeToString()), TOKENS // 2)


def _requests() -> Iterator[tuple[str, Request, int]]:
    """Yield name, request and the number of clients that send it at the same time."""
    for clients in (1, 16, 64):
        yield f"tensor of 64 B, gRPC, c{clients}", Grpc("ModelInfer", tensor_body("tensor", (16,))), clients
    for clients in (1, 16):
        yield f"tensor of 64 KiB, gRPC, c{clients}", Grpc("ModelInfer", tensor_body("tensor", (16_384,))), clients
    yield "tensor of 64 B, REST, JSON, c1", _rest(16, binary=False), 1
    yield "tensor of 64 B, REST, binary, c1", _rest(16, binary=True), 1
    for binary in (False, True):
        yield f"tensor of 64 KiB, REST, {'binary' if binary else 'JSON'}, c1", _rest(16_384, binary=binary), 1
    for clients in (1, 16):
        yield f"Python model, 64 B, gRPC, c{clients}", Grpc("ModelInfer", tensor_body("echo", (16,))), clients
    for clients in (1, 64):
        yield f"completion of 1 token, c{clients}", completion("sim", 1, stream=False), clients
    for model in ("sim", "paced"):
        for clients in (1, 16, 64):
            yield f"stream of {TOKENS} tokens, {model}, c{clients}", completion(model, TOKENS, stream=True), clients
    yield "chat stream with tools, paced, c16", _chat_with_tools(), 16
    yield f"KServe text stream of {TOKENS} tokens, paced, c16", _kserve_text(), 16
    yield f"Anthropic stream of {TOKENS} tokens, paced, c16", _anthropic(), 16


def _sim(name: str, settings: str) -> Callable[[], SimEngine]:
    return lambda: SimEngine(sim_config(settings, name, None, None))


Part = Callable[[Loop, Recorder], Awaitable[None]]


def request_parts() -> Iterator[Part]:
    """Yield what counts each of the requests, on a loop and with a fleet of its own: none depends on those before it."""
    for name, request, number in _requests():
        yield partial(_count, name, request, number)


async def _count(name: str, request: Request, number: int, loop: Loop, recorder: Recorder) -> None:
    """Count a request against a frontend with a worker, in the modes that are the defaults."""
    if not recorder.wants(name):
        return
    engines = (
        *(_sim("sim", "speedup=0"), _sim("paced", "speedup=1"), _sim("tools", "speedup=1,calls=1")),
        lambda: EchoTensors(name="tensor"),
        lambda: make_repository(RepositoryOptions(repositories=(str(_REPOSITORY),)), (), 0.0),
    )
    async with open_fleet(loop, recorder.count, Plan(engines, ("sim", "paced", "tools", "tensor", "echo"))) as fleet:
        await asyncio.sleep(-loop.time() % PHASE_S)
        clients = await request.clients(fleet, number)
        rows = max(1, LEAST // number)

        async def once() -> None:
            for _ in range(rows):
                await asyncio.gather(*(client() for client in clients))
                await asyncio.sleep(AFTER_S)

        await recorder.record(name, once, times=rows * number)
