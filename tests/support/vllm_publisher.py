"""A publisher of KV events over ZMQ that speaks as vLLM's does: numbered batches, and a socket that replays them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from dynamo.common.generation import pack_tokens
from dynamo.common.kv.hashes import sequence_hashes
from dynamo.worker.kv.vllm_subscriber import KvSource

SIZE = 4
END = b"\xff" * 8


def batch(*events: dict[str, object]) -> bytes:
    return msgspec.msgpack.encode([0.0, [*events], 0])


def stored(first: int, count: int = 1) -> dict[str, object]:
    """So many blocks, whose engine hashes and tokens count up from `first`."""
    tokens = list(range(first, first + count * SIZE))
    hashes = [first + number for number in range(count)]
    return {"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": None, "token_ids": tokens, "block_size": SIZE}


def removed(*hashes: int) -> dict[str, object]:
    return {"type": "BlockRemoved", "block_hashes": [*hashes]}


def block(first: int) -> int:
    return sequence_hashes(pack_tokens(range(first, first + SIZE)), SIZE)[0]


class VllmPublisher:
    """Keeps all batches for replay, except those that the test drops."""

    def __init__(self, folder: Path, context: zmq.asyncio.Context) -> None:
        self.source = KvSource(0, f"ipc://{folder}/events", f"ipc://{folder}/replay")
        self._context = context
        self._bind()
        self.kept: list[tuple[int, bytes]] = []
        self.requested: list[int] = []
        self._next = 0

    def _bind(self) -> None:
        self._events = self._context.socket(zmq.XPUB)
        self._replay = self._context.socket(zmq.ROUTER)
        for socket in (self._events, self._replay):
            socket.linger = 0
        self._events.bind(self.source.events)
        self._replay.bind(str(self.source.replay))

    async def serve_replays(self) -> None:
        while True:
            client, _, number = await self._replay.recv_multipart()
            first = int.from_bytes(number, "big")
            self.requested.append(first)
            for number_, payload in self.kept:
                if number_ >= first:
                    await self._replay.send_multipart([client, b"", b"", number_.to_bytes(8, "big"), payload])
            await self._replay.send_multipart([client, b"", b"", END, b""])

    async def publish(self, payload: bytes, *, lost: bool = False, kept: bool = True) -> None:
        number, self._next = self._next, self._next + 1
        if kept:
            self.kept.append((number, payload))
        if not lost:
            await self._events.send_multipart([b"", number.to_bytes(8, "big"), payload])

    async def publish_parts(self, *parts: bytes) -> None:
        """Send a message that is no batch."""
        await self._events.send_multipart(parts)

    async def followed(self) -> None:
        """Return when a reader has subscribed: it does not get what is published before."""
        async with asyncio.timeout(120):
            await self._events.recv()

    def restart(self) -> None:
        """Count from 0 again, on new connections and with nothing to replay."""
        self.close()
        self._bind()
        self.kept.clear()
        self._next = 0

    def close(self) -> None:
        self._events.close()
        self._replay.close()
