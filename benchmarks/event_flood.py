"""A fleet in one process that publishes KV events and load reports at a given rate, for `benchmarks.events`.

    python -m benchmarks.event_flood INSTANCES MESSAGES_PER_S SECONDS

Its instances are registered and respond to queries about their caches, so that a frontend follows them. Says `ready` on the
standard output, publishes when it gets a line on the standard input, says how many messages nats-server took a second, and stays
until the input ends.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
from contextlib import AsyncExitStack

import uvloop

from dynamo.common.discovery import Instance
from dynamo.common.etcd import connect_etcd
from dynamo.common.kv.events import KvMessage, KvSnapshot, KvUpdate, LoadMessage, LoadReport, message_encoder
from dynamo.common.messaging.nats.connection import Connection, connect_nats
from dynamo.common.messaging.request_plane.incoming import Handler, Incoming
from dynamo.common.messaging.request_plane.server import serve_requests
from dynamo.common.model_card import LlmInfo, ModelCard, ModelKind
from dynamo.common.names import Endpoint, new_instance_id
from dynamo.common.options import EtcdOptions, NatsOptions
from dynamo.worker.process.registration import Registration

MODEL = "flooded"
ENDPOINT = Endpoint(component="flood")
CARD = ModelCard(
    name=MODEL, kind=ModelKind.LLM, llm=LlmInfo(context_length=1 << 20, tokenizer="", block_size=16, total_blocks=1 << 20)
)
_TICK_S = 0.01
_UPDATE_BYTES = 4 * 8
"""Four blocks come and the four before them go with each update."""


class FloodingInstance:
    """Publishes an update and a load report in turn."""

    def __init__(self) -> None:
        self.id = new_instance_id()
        self._number = -1
        self._blocks = b""
        self._kv_subject, self._load_subject = ENDPOINT.kv_subject(self.id), ENDPOINT.load_subject(self.id)

    @property
    def registration(self) -> Instance:
        return Instance(id=self.id, endpoint=ENDPOINT, subject=ENDPOINT.rpc_subject(self.id), card=CARD, started_at=0.0)

    @property
    def handlers(self) -> dict[str, Handler]:
        return {"snapshot": self._snapshot, "events_since": self._events_since}

    def publish(self, nats: Connection) -> None:
        """Publish two messages."""
        self._number += 1
        before, self._blocks = self._blocks, secrets.token_bytes(_UPDATE_BYTES)
        update = KvMessage(MODEL, KvUpdate(self._number, self._blocks, before))
        nats.publish_soon(self._kv_subject, message_encoder.encode(update))
        report = LoadMessage(MODEL, LoadReport(running=1, kv_number=self._number))
        nats.publish_soon(self._load_subject, message_encoder.encode(report))

    async def _snapshot(self, incoming: Incoming) -> None:
        incoming.end(message_encoder.encode(KvSnapshot(self._number, self._blocks)))

    async def _events_since(self, incoming: Incoming) -> None:
        incoming.end(message_encoder.encode(None))


async def flood(nats: Connection, instances: list[FloodingInstance], per_s: float, seconds: float) -> float:
    """Return how many messages nats-server took a second. That falls short of `per_s` where the two cannot keep it."""
    loop = asyncio.get_running_loop()
    begun_at, published, position = loop.time(), 0, 0
    while (elapsed := loop.time() - begun_at) < seconds:
        while published < elapsed * per_s and loop.time() - begun_at < seconds:
            for _ in range(100):
                instances[position].publish(nats)
                position = (position + 1) % len(instances)
            published += 200
            await asyncio.sleep(0)
        await nats.ping()
        await asyncio.sleep(_TICK_S)
    return published / (loop.time() - begun_at)


async def main(count: int, per_s: float, seconds: float) -> None:
    loop = asyncio.get_running_loop()
    instances = [FloodingInstance() for _ in range(count)]
    async with AsyncExitStack() as stack:
        nats = await stack.enter_async_context(connect_nats(NatsOptions(servers=(os.environ["DYN_NATS_SERVERS"],)), "flood"))
        etcd = await stack.enter_async_context(connect_etcd(EtcdOptions(endpoints=(os.environ["DYN_ETCD_ENDPOINTS"],))))
        for instance in instances:
            await stack.enter_async_context(serve_requests(nats, ENDPOINT, instance.id, instance.handlers))
        registration = Registration(etcd, [instance.registration for instance in instances])
        await stack.enter_async_context(registration.kept())
        await registration.registered.wait()
        print("ready", flush=True)
        await loop.run_in_executor(None, sys.stdin.readline)
        print(await flood(nats, instances, per_s, seconds), flush=True)
        await loop.run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])))
