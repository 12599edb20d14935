"""The files of models in the object store, and their cache on disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynamo.common.errors import Unavailable
from dynamo.common.messaging.connection import connect_nats
from dynamo.common.messaging.store import BUCKET, FileStore, file_key
from dynamo.common.options import NatsOptions
from tests.support.servers import NatsServer


async def test_a_file_is_served_though_it_cannot_be_cached_on_disk(
    nats_server: NatsServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    async with connect_nats(NatsOptions(servers=(nats_server.url,)), "test") as nats:
        store = FileStore(nats, tmp_path / "file" / "cache")
        key = await store.put(b"tokenizer")
        assert await store.get(key) == b"tokenizer"
        assert await store.get(key) == b"tokenizer"
    assert "cannot be cached" in caplog.text


async def test_a_file_that_was_fetched_is_read_without_the_store(nats_server: NatsServer, tmp_path: Path) -> None:
    async with connect_nats(NatsOptions(servers=(nats_server.url,)), "test") as nats:
        store = FileStore(nats, tmp_path)
        key = await store.put(b"a tokenizer to fetch")
        await store.fetch(key)
        await (await nats.client.jetstream().object_store(BUCKET)).delete(key)
        await store.fetch(key)
        assert await store.get(key) == b"a tokenizer to fetch"
        with pytest.raises(Unavailable, match="not in the store"):
            await store.fetch(file_key(b"another one"))
