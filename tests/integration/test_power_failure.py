"""The power goes: what a frontend was told is stored is there again, as far as nats-server syncs what it acknowledges."""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from dynamo.common.errors import DynamoError, Unavailable
from dynamo.common.messaging.jetstream.records import INLINE_BYTES, open_records
from dynamo.common.messaging.nats.connection import connect_nats
from dynamo.common.options import NatsOptions
from dynamo.common.process.work import hold_nothing
from dynamo.frontend.api.openai.batches.batch import Batches
from dynamo.frontend.api.openai.batches.files import Files
from dynamo.frontend.api.openai.store.events import ResponseObject
from dynamo.frontend.api.openai.store.owned import Storage
from dynamo.frontend.api.openai.store.stored import StoredResponses, new_response_id
from dynamo.frontend.fleet.peers.response_changes import ResponseChanges
from dynamo.frontend.metrics import FrontendMetrics
from tests.support.power import stop_between_calls, traced
from tests.support.servers import NatsServer, start_nats, start_nats_cluster
from tests.support.waiting import WAIT_S, until

ACKNOWLEDGED = 150
"""Writes before the power goes."""
SIZES = (100, 5_000, INLINE_BYTES + 1)
OWNER = "team"


@dataclass
class Stores:
    """The stores of a frontend."""

    responses: StoredResponses
    files: Files
    batches: Batches

    async def write(self, kind: str, size: int) -> tuple[str, str, object]:
        """Store something; return what it is when that is acknowledged."""
        content = random.Random(size).randbytes(size).hex()
        match kind:
            case "response":
                text = {"content": content}
                response = ResponseObject(
                    id=new_response_id(), created_at=1, model="m", reasoning={}, text=text, status="completed"
                )
                await self.responses.save(OWNER, response, [{"id": "msg_1", "type": "message", "content": content}], last=0)
                return kind, response.id, content
            case "file":
                return kind, (await self.files.create(OWNER, "lines.jsonl", "batch", content.encode())).id, content.encode()
            case _:
                batch = await self.batches.create(OWNER, "/v1/chat/completions", "file-1", {"content": content[:500]})
                return kind, batch.id, batch

    async def read(self, kind: str, id: str) -> object:
        match kind:
            case "response":
                [item] = await self.responses.items(OWNER, id)
                response = await self.responses.read(OWNER, id)
                return item["content"] if response["text"] == {"content": item["content"]} else response
            case "file":
                file = await self.files.read(OWNER, id)
                content = await self.files.content(OWNER, id, hold_nothing)
                return content if file.bytes == len(content) else file
            case _:
                return await self.batches.read(OWNER, id)


@asynccontextmanager
async def stores_of(server: NatsServer) -> AsyncIterator[Stores]:
    async with (
        connect_nats(NatsOptions(servers=(server.url,)), "test") as nats,
        open_records(nats, "dynamo-responses", ttl_s=6000, max_bytes=1 << 30) as responses,
        open_records(nats, "dynamo-batches", ttl_s=6000, max_bytes=1 << 30) as batches,
    ):
        await until(lambda: responses.is_ready and batches.is_ready)
        changes = ResponseChanges(nats, "ns")
        metrics = FrontendMetrics(CollectorRegistry())
        kept = Storage(batches, "ns")
        yield Stores(StoredResponses(Storage(responses, "ns"), changes, metrics), Files(kept), Batches(kept))


async def written_until_the_power_goes(servers: Sequence[NatsServer], folder: Path) -> list[tuple[str, str, object]]:
    """Return what was acknowledged. The stores of the servers, which have ended, are then as they were on disk."""
    acknowledged: list[tuple[str, str, object]] = []
    async with AsyncExitStack() as stack:
        traces = [
            await stack.enter_async_context(traced(server.pid, store_of(server), folder / f"{number}.log"))
            for number, server in enumerate(servers)
        ]
        async with stores_of(servers[0]) as stores:

            async def write(kind: str) -> None:
                for size in SIZES * ACKNOWLEDGED:
                    written = await stores.write(kind, size)
                    acknowledged.append(written)

            writing = [asyncio.create_task(write(kind)) for kind in ("response", "response", "file", "batch")]
            await until(lambda: len(acknowledged) >= ACKNOWLEDGED or any(task.done() for task in writing))
            await asyncio.gather(*(stop_between_calls(server.pid) for server in servers))
            for server in servers:
                server.kill()
            for task in writing:
                task.cancel()
            results = await asyncio.gather(*writing, return_exceptions=True)
            assert all(isinstance(result, asyncio.CancelledError | DynamoError) for result in results), results
        for server, trace in zip(servers, traces, strict=True):
            await server.exited()
            disk = await trace.disk()
            store = store_of(server)
            seen = {str(path): path.read_bytes() for path in store.rglob("*") if path.is_file()}
            assert disk.seen() == seen, "the trace is not what the process did"
            shutil.rmtree(store)
            disk.write_synced(store)
    return acknowledged


def store_of(server: NatsServer) -> Path:
    return server.log_file.parent / "jetstream"


async def lost(acknowledged: list[tuple[str, str, object]], read: Callable[[str, str], Awaitable[Any]]) -> list[str]:
    """Return the ids of what is not there, or is not what was written."""
    missing = []
    for kind, id, content in acknowledged:
        try:
            if await read_when_available(read, kind, id) != content:
                missing.append(id)
        except DynamoError:
            missing.append(id)
    return missing


async def read_when_available(read: Callable[[str, str], Awaitable[Any]], kind: str, id: str) -> object:
    """Return a record. A cluster that has just begun answers late on a busy machine, which loses nothing."""
    async with asyncio.timeout(WAIT_S):
        while True:
            try:
                return await read(kind, id)
            except Unavailable:
                await asyncio.sleep(0.1)


@pytest.mark.slow
@pytest.mark.parametrize("fsync", [True, False])
async def test_what_was_acknowledged_outlives_the_power_as_far_as_nats_server_syncs_it(tmp_path: Path, fsync: bool) -> None:
    """Without fsync nats-server syncs every two minutes: then this test finds what is lost."""
    async with start_nats(tmp_path / "nats", fsync=fsync) as server:
        acknowledged = await written_until_the_power_goes([server], tmp_path)
        assert {kind for kind, *_ in acknowledged} == {"response", "file", "batch"}
        await server.start()
        async with stores_of(server) as stores:
            missing = await lost(acknowledged, stores.read)
    print(f"{len(missing)} of {len(acknowledged)} acknowledged records are lost {'with' if fsync else 'without'} fsync")
    assert bool(missing) is not fsync, missing


@pytest.mark.slow
async def test_what_was_acknowledged_outlives_the_power_of_a_cluster_and_the_disk_of_one_server(tmp_path: Path) -> None:
    async with start_nats_cluster(tmp_path) as cluster:
        await cluster.find_leader()
        acknowledged = await written_until_the_power_goes(cluster.servers, tmp_path)
        lost_disk, *others = cluster.servers
        shutil.rmtree(store_of(lost_disk))
        await asyncio.gather(*(server.start() for server in others))
        async with stores_of(others[0]) as stores:
            missing = await lost(acknowledged, stores.read)
    print(f"{len(missing)} of {len(acknowledged)} acknowledged records are lost by a cluster")
    assert not missing
