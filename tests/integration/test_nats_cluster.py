"""What is kept in JetStream, in a cluster of three nats-servers."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from nats.js.errors import Error as JetStreamError

from dynamo.common.errors import Unavailable
from dynamo.common.messaging.jetstream.kv_stream import KvStream
from dynamo.common.messaging.jetstream.store import FileStore
from dynamo.common.messaging.nats.connection import Connection, connect_nats
from dynamo.common.options import NatsOptions
from tests.support.servers import start_nats_cluster


@pytest.mark.slow  # three servers, one of which is killed
async def test_files_and_the_record_of_kv_events_outlive_one_server_of_a_cluster(tmp_path: Path) -> None:
    async with start_nats_cluster(tmp_path) as cluster, AsyncExitStack() as stack:
        servers = cluster.servers
        urls = tuple(server.url for server in servers)
        writer = await stack.enter_async_context(connect_nats(NatsOptions(servers=urls), "writer"))
        async with asyncio.timeout(120):
            key = await _put(FileStore(writer, tmp_path / "cache"), b"a tokenizer")
            await KvStream(writer).ensure()
        assert await _replicas(writer, "OBJ_dynamo-models") == 3
        assert await _replicas(writer, "dynamo-kv") == 3
        servers[0].kill()
        reader = await stack.enter_async_context(connect_nats(NatsOptions(servers=urls[1:]), "reader"))
        async with asyncio.timeout(120):
            while True:
                try:
                    assert await FileStore(reader, tmp_path / "other cache").get(key) == b"a tokenizer"
                    break
                except Unavailable:  # a new leader is being elected
                    await asyncio.sleep(0.1)


async def _put(store: FileStore, data: bytes) -> str:
    while True:
        try:
            return await store.put(data)
        except Unavailable:  # the cluster has no leader yet
            await asyncio.sleep(0.1)


async def _replicas(connection: Connection, stream: str) -> int:
    try:
        return (await connection.client.jetstream().stream_info(stream)).config.num_replicas or 1
    except JetStreamError:
        return 0
