"""A server that speaks what the remote engine uses of `vllm serve`, as its sources of August 2026 have it (`entrypoints/openai`).

GET /health and /v1/models (`max_model_len`, `root`); POST /v1/completions with `stream`, `return_token_ids` and
`return_tokens_as_token_ids`.
A simulated engine generates. A request whose connection ends is aborted. `max_tokens` is 16 by default, and logprobs end at 20.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dynamo.common.errors import InvalidRequest
from dynamo.common.generation import Delta, GenerateRequest, Sampling, Stop, Summary, pack_tokens
from dynamo.worker.engine.base import Context
from dynamo.worker.engine.sim.engine import SimEngine

MAX_LOGPROBS = 20


@dataclass
class VllmServer:
    engine: SimEngine
    folder: Path
    model: str = "served"
    context_length: int = 512
    port: int = 0
    is_ready: bool = True
    is_dead: bool = False
    """Its engine process has died: completions fail, and /health has status 503."""
    refusals: list[tuple[int, str]] = field(default_factory=list)
    """Status and message of the next responses to completions."""
    lost_after: int | None = None
    """Events after which connections are lost; None: never."""
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[bytes] = field(default_factory=list)
    """The head of each request for a completion."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Serve on a free port at first, then always on the same. At the end all connections are lost."""
        writers: set[asyncio.StreamWriter] = set()

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writers.add(writer)
            try:
                with suppress(ConnectionError, asyncio.IncompleteReadError):
                    await self._respond(reader, writer)
            finally:
                writers.discard(writer)
                writer.close()

        server = await asyncio.start_server(connected, "127.0.0.1", self.port)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield
        finally:
            server.close()
            for writer in [*writers]:
                writer.transport.abort()
            await server.wait_closed()

    async def _respond(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next((int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), 0)
        body = await reader.readexactly(length)
        match head.split(b" ")[:2]:
            case [b"GET", b"/health"]:
                await _send(writer, 503 if self.is_dead else 200, {})
            case [b"POST", b"/v1/completions"] if self.is_dead:
                await _send(writer, 500, {"error": {"message": "EngineCore encountered an issue", "code": 500}})
            case [b"GET", b"/v1/models"] if self.is_ready:
                await _send(writer, 200, self._models())
            case [b"POST", b"/v1/completions"] if self.refusals:
                status, message = self.refusals.pop(0)
                await _send(writer, status, {"error": {"message": message, "type": "error", "param": None, "code": status}})
            case [b"POST", b"/v1/completions"]:
                self.headers.append(head)
                self.requests.append(json.loads(body))
                generating = asyncio.create_task(self._complete(self.requests[-1], writer))
                leaving = asyncio.create_task(reader.read())
                await asyncio.wait({generating, leaving}, return_when=asyncio.FIRST_COMPLETED)
                for task in (generating, leaving):
                    task.cancel()
                await asyncio.gather(generating, leaving, return_exceptions=True)
            case _:
                await _send(writer, 404 if self.is_ready else 503, {"detail": "Not Found"})

    def _models(self) -> dict[str, Any]:
        listed = {"id": self.model, "object": "model", "created": 1, "owned_by": "vllm", "root": str(self.folder), "parent": None}
        return {"object": "list", "data": [{**listed, "max_model_len": self.context_length, "permission": []}]}

    async def _complete(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if (body.get("logprobs") or 0) > MAX_LOGPROBS:
            await _send(writer, 400, {"error": {"message": f"logprobs above {MAX_LOGPROBS}", "code": 400}})
            return
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        sent = 0
        async with aclosing(self.engine.generate(_to_request(body), Context("served"))) as items:  # type: ignore[type-var]
            try:
                async for item in items:
                    if sent == self.lost_after:
                        writer.transport.abort()
                        return
                    await _send_event(writer, _usage(item) if isinstance(item, Summary) else _chunk(item, body))
                    sent += 1
            except InvalidRequest as error:
                await _send_event(writer, {"error": {"message": str(error), "type": "BadRequestError", "code": 400}})
        await _send_chunk(writer, b"data: [DONE]\n\n")
        await _send_chunk(writer, b"")


def _to_request(body: dict[str, Any]) -> GenerateRequest:
    biases = body.get("logit_bias")
    return GenerateRequest(
        model="served",
        prompt=pack_tokens(body["prompt"]),
        sampling=Sampling(
            temperature=body.get("temperature"),
            seed=body.get("seed"),
            logit_bias=biases and {int(token): bias for token, bias in biases.items()},
        ),
        stop=Stop(
            max_tokens=body.get("max_tokens", 16),
            min_tokens=body.get("min_tokens", 0),
            token_ids=tuple(body.get("stop_token_ids", ())),
            ignore_eos=body.get("ignore_eos", False),
        ),
        n=body.get("n", 1),
        logprobs=body.get("logprobs"),
        cache_salt=body.get("cache_salt", ""),
    )


def _chunk(delta: Delta, body: dict[str, Any]) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": delta.index, "text": "", "logprobs": None, "finish_reason": delta.finish_reason}
    choice["stop_reason"] = delta.stop_token if delta.stop_token in body.get("stop_token_ids", ()) else None
    if body.get("return_token_ids"):
        choice["token_ids"] = [*delta.tokens, *([] if delta.stop_token is None else [delta.stop_token])]
    if delta.logprobs is not None:
        choice["logprobs"] = {
            "text_offset": [0] * len(delta.tokens),
            "token_logprobs": [position[0][1] for position in delta.logprobs],
            "tokens": [f"token_id:{token}" for token in delta.tokens],
            # The chosen token is one of the likeliest, if it is the likeliest.
            "top_logprobs": [
                {f"token_id:{token}": value for token, value in position[: max(body["logprobs"], 1)]}
                for position in delta.logprobs
            ],
        }
    return {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "served", "choices": [choice]}


def _usage(summary: Summary) -> dict[str, Any]:
    usage = {
        "prompt_tokens": summary.prompt_tokens,
        "completion_tokens": summary.output_tokens,
        "prompt_tokens_details": {"cached_tokens": summary.cached_tokens},
    }
    return {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "served", "choices": [], "usage": usage}


async def _send(writer: asyncio.StreamWriter, status: int, body: dict[str, Any]) -> None:
    data = json.dumps(body).encode()
    writer.write(b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % (status, len(data)) + data)
    await writer.drain()


async def _send_event(writer: asyncio.StreamWriter, event: dict[str, Any]) -> None:
    await _send_chunk(writer, b"data: " + json.dumps(event).encode() + b"\n\n")


async def _send_chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(b"%x\r\n%b\r\n" % (len(data), data))
    await writer.drain()


@asynccontextmanager
async def serve_vllm(engine: SimEngine, folder: Path, context_length: int = 512) -> AsyncIterator[VllmServer]:
    """Serve `engine`, whose tokenizer and template are written to `folder`."""
    await engine.start()
    tokenizer, template = engine.files()
    (folder / "tokenizer.json").write_bytes(tokenizer)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template.decode()}))
    server = VllmServer(engine, folder, context_length=context_length)
    try:
        async with server.serving():
            yield server
    finally:
        await engine.close()
