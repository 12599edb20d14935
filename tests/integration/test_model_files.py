"""The files of models in the object store, and their cache on disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynamo.common.messaging.connection import connect_nats
from dynamo.common.messaging.store import FileStore
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
