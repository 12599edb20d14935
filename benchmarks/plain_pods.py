"""Simulated engine pods for a gateway, which take no time, and the worker that registers them: `python -m benchmarks.plain_pods`.

    python -m benchmarks.plain_pods COUNT TOKENIZER ADDRESSES

Each pod is an HTTP server on a port of its own, whose responses are streams of one token. They are registered as language models
with the tokenizer in a file, and with blocks, so that prompts are tokenized and hashed. The addresses are written to a file.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import cast

import msgspec
import uvloop

from dynamo.common.config import load
from dynamo.common.model_card import HttpEndpoint, ModelCard
from dynamo.worker.app import serve_fleet
from dynamo.worker.config import WorkerConfig
from dynamo.worker.engine.sim.engine import SimEngine
from dynamo.worker.process.engine_factory import sim_config

MODEL = "sim"
_EVENTS = (
    b'data: {"id": "pod", "choices": [{"index": 0, "text": "w", "finish_reason": "length"}]}\n\n'
    b'data: {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens":1}}\n\ndata: [DONE]\n\n'
)
_RESPONSE = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: %d\r\n\r\n%b" % (len(_EVENTS), _EVENTS)


class PodEngine(SimEngine):
    """An engine whose requests go to an HTTP server. Without a tokenizer's file, each byte of a prompt is a token."""

    def __init__(self, address: str, tokenizer: str = "") -> None:
        settings = "speedup=0,block_size=16,blocks=65536" + (f",tokenizer={tokenizer}" if tokenizer else "")
        super().__init__(sim_config(settings, MODEL, None, 1_000_000))
        self._address = address

    async def start(self) -> ModelCard:
        card = await super().start()
        return msgspec.structs.replace(card, http=HttpEndpoint(address=self._address, model=MODEL))


class PodConnection(asyncio.Protocol):
    """One connection: a response for each request, when its body is complete."""

    def __init__(self) -> None:
        self._received = bytearray()
        self._searched = 0
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance

    def data_received(self, data: bytes) -> None:
        received = self._received
        received += data
        while (end := received.find(b"\r\n\r\n", self._searched)) >= 0:
            head = bytes(received[:end]).lower()
            if b"transfer-encoding: chunked" in head:
                complete = received.find(b"\r\n0\r\n\r\n", end) + 7
                if complete < 7:
                    return
            else:
                length = head.partition(b"content-length:")[2].split(b"\r\n", 1)[0]
                complete = end + 4 + int(length or b"0")
                if len(received) < complete:
                    return
            del received[:complete]
            self._transport.write(_RESPONSE)


async def main(count: int, tokenizer: str, addresses: str) -> None:
    loop = asyncio.get_running_loop()
    servers = [await loop.create_server(PodConnection, "127.0.0.1", 0) for _ in range(count)]
    listed = [f"127.0.0.1:{server.sockets[0].getsockname()[1]}" for server in servers]
    await asyncio.to_thread(Path(addresses).write_text, "\n".join(listed))
    config = load(WorkerConfig, (), os.environ, program="dynamo-worker")
    await serve_fleet([PodEngine(address, tokenizer) for address in listed], config)


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]), sys.argv[2], sys.argv[3]))
