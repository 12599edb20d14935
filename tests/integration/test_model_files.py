"""The files of models in the object store, and their cache on disk."""

from __future__ import annotations

import asyncio
import json
from base64 import urlsafe_b64encode
from hashlib import sha256
from pathlib import Path

import pytest
from nats.js.api import ObjectInfo
from nats.js.errors import APIError, DigestMismatchError

from dynamo.common.errors import Unavailable
from dynamo.common.messaging.jetstream.objects import ObjectWrite, meta_subject, read_object
from dynamo.common.messaging.jetstream.store import BUCKET, FileStore, file_key
from dynamo.common.messaging.nats.connection import connect_nats
from dynamo.common.options import NatsOptions
from dynamo.common.process.background import running
from dynamo.worker.engine.echo import EchoTokens
from dynamo.worker.process.model_files import ModelFiles
from dynamo.worker.serve import ServedModel
from tests.support.servers import NatsServer, start_nats


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
        await nats.client.jetstream().purge_stream(f"OBJ_{BUCKET}")
        await store.fetch(key)
        assert await store.get(key) == b"a tokenizer to fetch"
        with pytest.raises(Unavailable, match="not in the store"):
            await store.fetch(file_key(b"another one"))


async def test_a_file_whose_storing_failed_is_continued_and_not_stored_twice(tmp_path: Path) -> None:
    """What has been stored is never purged, so a store that fails each time must not fill the disk."""
    pieces = [bytes([number]) * (128 << 10) for number in range(4)]
    data = b"".join(pieces)
    async with start_nats(tmp_path / "nats") as server, connect_nats(NatsOptions(servers=(server.url,)), "test") as nats:
        store = FileStore(nats, tmp_path / "cache")
        await store.ensure()
        stream = nats.client.jetstream()
        config = (await stream.stream_info(f"OBJ_{BUCKET}")).config
        for limit in (1, 2, 2, 3):  # messages
            await stream.update_stream(config, max_msgs=limit)
            with pytest.raises(Unavailable, match="maximum messages exceeded"):
                await store.put(data)
        await stream.update_stream(config, max_msgs=-1)
        key = await store.put(data)
        assert await store.get(key) == data
        assert (await stream.stream_info(f"OBJ_{BUCKET}")).state.messages == len(pieces) + 1


async def test_a_piece_whose_confirmation_was_lost_is_not_stored_twice(tmp_path: Path) -> None:
    data = b"a" * (128 << 10) + b"b"
    async with start_nats(tmp_path / "nats") as server, connect_nats(NatsOptions(servers=(server.url,)), "test") as nats:
        store = FileStore(nats, tmp_path / "cache")
        await store.ensure()
        write = ObjectWrite(BUCKET, file_key(data))
        stream = nats.client.jetstream()
        await stream.publish(write.subject, data[: 128 << 10])  # as `run` does, but for what it notes afterwards
        await write.run(nats, data)
        assert await store.get(file_key(data)) == data


async def test_no_message_may_delete_the_files_of_others(tmp_path: Path) -> None:
    async with start_nats(tmp_path / "nats") as server, connect_nats(NatsOptions(servers=(server.url,)), "test") as nats:
        store = FileStore(nats, tmp_path / "cache")
        key = await store.put(b"tokenizer")
        with pytest.raises(APIError, match="rollup not permitted"):
            await nats.client.jetstream().publish(f"$O.{BUCKET}.M.x", b"", headers={"Nats-Rollup": "all"})
        assert await store.missing([key]) == set()


async def test_files_of_models_leave_room_for_what_else_is_stored(tmp_path: Path) -> None:
    """A login of a worker may write as many files as it likes."""
    async with start_nats(tmp_path / "nats") as server, connect_nats(NatsOptions(servers=(server.url,)), "test") as nats:
        store = FileStore(nats, tmp_path / "cache")
        key = await store.put(b"tokenizer")
        stream = nats.client.jetstream()
        config = (await stream.stream_info(f"OBJ_{BUCKET}")).config
        assert config.max_bytes == 2 << 30
        await stream.update_stream(config, max_bytes=300_000)
        with pytest.raises(Unavailable, match="maximum bytes exceeded"):
            await store.put(bytes(400_000))
        assert await store.get(key) == b"tokenizer"


def described(data: bytes, **wrong: object) -> bytes:
    digest = f"SHA-256={urlsafe_b64encode(sha256(data).digest()).decode()}"
    said = {"name": file_key(data), "bucket": BUCKET, "nuid": "others", "size": len(data), "chunks": 1, "digest": digest} | wrong
    return json.dumps(said).encode()


TOKENIZER = b"a tokenizer that others describe"


@pytest.mark.parametrize(
    "lie",
    [
        described(TOKENIZER),
        described(TOKENIZER, digest="SHA-256=x"),
        described(TOKENIZER, digest=5),
        described(TOKENIZER, deleted=True),
        described(TOKENIZER, size="1"),
        described(TOKENIZER, size=2**62, chunks=2**40),
        described(TOKENIZER, nuid="*"),
        b"{",
        b"[]",
        b"[" * 100_000,
    ],
)
async def test_a_file_is_found_whatever_else_is_said_about_it(tmp_path: Path, lie: bytes) -> None:
    """A worker's login may write descriptions of any file, before and after the worker that has it."""
    async with start_nats(tmp_path / "nats") as server, connect_nats(NatsOptions(servers=(server.url,)), "test") as nats:
        store = FileStore(nats, tmp_path / "cache")
        await store.ensure()
        stream, subject = nats.client.jetstream(), meta_subject(BUCKET, file_key(TOKENIZER))
        await stream.publish(f"$O.{BUCKET}.C.others", b"other content")
        for _ in range(3):
            await stream.publish(subject, lie)
        with pytest.raises(Unavailable, match="not in the store"):
            await store.get(file_key(TOKENIZER))
        key = await store.put(TOKENIZER)
        for _ in range(3):
            await stream.publish(subject, lie)
        before = (await stream.stream_info(f"OBJ_{BUCKET}")).state.messages
        assert await store.put(TOKENIZER) == key
        assert (await stream.stream_info(f"OBJ_{BUCKET}")).state.messages == before
        assert await store.get(key) == TOKENIZER


async def test_no_more_is_read_of_a_file_than_it_is_said_to_have(tmp_path: Path) -> None:
    async with start_nats(tmp_path / "nats") as server, connect_nats(NatsOptions(servers=(server.url,)), "test") as nats:
        await FileStore(nats, tmp_path / "cache").ensure()
        await nats.client.jetstream().publish(f"$O.{BUCKET}.C.others", b"x" * 1000)
        info = ObjectInfo(name="x", bucket=BUCKET, nuid="others", size=999, chunks=1, digest="SHA-256=")
        with pytest.raises(DigestMismatchError):
            await read_object(nats, info)


@pytest.mark.parametrize("loss", ["purge_stream", "delete_stream"])
async def test_a_worker_stores_files_again_that_are_lost_while_nats_goes_on(tmp_path: Path, loss: str) -> None:
    async with start_nats(tmp_path / "nats") as server, connect_nats(NatsOptions(servers=(server.url,)), "test") as nats:
        engine = EchoTokens("words")
        model = ServedModel.of(await engine.start(), engine, engine.files())
        files = ModelFiles([model], nats, check_s=0.01)
        assert await files.store([model]) == []
        keys = [file_key(data) for data in model.files]
        reader = FileStore(nats, tmp_path / "cache")
        assert await reader.missing(keys) == set()
        await getattr(nats.client.jetstream(), loss)(f"OBJ_{BUCKET}")
        assert await reader.missing(keys) == set(keys)

        async def nothing_new() -> None:
            pass

        async with running(files.keep_stored(lambda: [model], nothing_new), "model files"):
            async with asyncio.timeout(120):
                while await reader.missing(keys):
                    await asyncio.sleep(0.01)
        for key in keys:
            await reader.get(key)
