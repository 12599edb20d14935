"""What nats-server has acknowledged is on its disk, and a disk that takes nothing holds no request up."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest

from dynamo.common.errors import Unavailable
from dynamo.common.messaging.jetstream import key_values
from dynamo.common.messaging.jetstream.key_values import DamagedRecord
from dynamo.common.messaging.jetstream.records import RecordStore, open_records
from dynamo.common.messaging.nats.connection import connect_nats
from dynamo.common.options import NatsOptions
from dynamo.common.process.ports import free_ports
from tests.support.servers import NatsServer, start_nats
from tests.support.waiting import until

DEPLOY = Path(__file__).parents[2] / "deploy"
JETSTREAM = re.compile(r"^jetstream \{.*?^\}", re.DOTALL | re.MULTILINE)
SHIPPED = sorted(path for path in DEPLOY.rglob("*") if path.is_file() and "jetstream {" in path.read_text(errors="replace"))


async def syncs_always(server: NatsServer, monitor: int) -> bool:
    """Return what a nats-server says of itself."""
    async with httpx2.AsyncClient() as client:
        config = (await client.get(f"http://127.0.0.1:{monitor}/jsz?config=true")).json()["config"]
    return config.get("sync_always", False) is True


def test_the_configurations_of_the_deployment_are_found() -> None:
    assert [path.name for path in SHIPPED] == ["nats.conf", "nats.conf"]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: str(path.relative_to(DEPLOY)))
async def test_every_nats_server_that_is_shipped_syncs_what_it_acknowledges(path: Path, tmp_path: Path) -> None:
    [block] = JETSTREAM.findall(path.read_text())
    [monitor] = free_ports(1)
    config = f'http: "127.0.0.1:{monitor}"\n' + block.replace("/var/lib/nats", str(tmp_path / "store"))
    async with start_nats(tmp_path, jetstream=False, config=config) as server:
        assert await syncs_always(server, monitor)


@pytest.mark.parametrize("fsync", [True, False])
async def test_the_nats_server_of_dynamo_local_and_of_tests_syncs_unless_told_otherwise(tmp_path: Path, fsync: bool) -> None:
    [monitor] = free_ports(1)
    config = f'http: "127.0.0.1:{monitor}"'
    starting = start_nats(tmp_path, config=config) if fsync else start_nats(tmp_path, config=config, fsync=False)
    async with starting as server:
        assert await syncs_always(server, monitor) is fsync


async def test_the_age_of_a_record_is_told_by_the_clock_of_nats_server(
    nats_server: NatsServer, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        connect_nats(NatsOptions(servers=(nats_server.url,)), "test") as nats,
        open_records(nats, namespace, ttl_s=600, max_bytes=1 << 20) as records,
    ):
        await records.put("a", b"a record")
        monkeypatch.setattr(time, "time", lambda: 0.0)  # the clock of this host
        record = await records.get("a")
        assert record is not None
        ages = [await records.age_s(record.written_at) for _ in range(2)]
        assert sorted(ages) == ages and abs(ages[0]) < 600


async def test_a_record_that_is_renewed_is_as_it_was_and_writes_nothing_large_again(
    nats_server: NatsServer, namespace: str
) -> None:
    async with (
        connect_nats(NatsOptions(servers=(nats_server.url,)), "test") as nats,
        open_records(nats, namespace, ttl_s=600, max_bytes=1 << 20) as records,
    ):
        value = b"x" * 100_000
        written = await records.put("a", value, last=0, inline_bytes=1000)
        assert written is not None
        before = await records.get("a")
        objects = await nats.client.jetstream().stream_info(f"OBJ_{namespace}-large")
        revision = await records.renew("a", written)
        after = await records.get("a")
        assert before is not None and after is not None and revision is not None
        assert (after.value, after.revision) == (value, revision)
        assert revision > written and after.written_at > before.written_at
        assert await nats.client.jetstream().stream_info(f"OBJ_{namespace}-large") == objects
        assert await records.renew("a", written) is None, "it has another revision"
        await records.delete("a")
        assert await records.renew("a", revision) is None
        assert await records.renew("b", 1) is None


async def test_a_bucket_that_was_made_anew_is_listed_whole(nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its revisions begin anew, and may have passed those up to which the former one was read."""
    monkeypatch.setattr(key_values, "CLOCK_S", -1.0)  # so that it is read each time which bucket there is
    async with connect_nats(NatsOptions(servers=(nats_server.url,)), "test") as nats:
        records = RecordStore(nats, "made-anew", ttl_s=3600, max_bytes=1 << 20)
        await records.put("x.former", b"1")
        former = await records.changes("x.*", None)
        unchanged = await records.changes("x.*", former.position)
        assert (unchanged.is_whole, unchanged.position) == (False, former.position)
        jetstream = nats.client.jetstream()
        await jetstream.delete_key_value("made-anew")
        await jetstream.create_key_value(bucket="made-anew")
        for key in ("x.a", "x.b", "x.c"):
            await records.put(key, b"1")
        anew = await records.changes("x.*", former.position)
    assert (sorted(anew.records), anew.is_whole) == (["x.a", "x.b", "x.c"], True)


async def test_a_byte_that_changes_on_the_disk_makes_its_record_an_error_and_no_other_one(tmp_path: Path) -> None:
    async with (
        start_nats(tmp_path) as server,
        connect_nats(NatsOptions(servers=(server.url,)), "test") as nats,
        open_records(nats, "records", ttl_s=600, max_bytes=1 << 30) as records,
    ):
        for name in ("ns.a", "ns.b", "ns.c"):
            await records.put(name, f"the record {name}".encode())
        await server.stop()
        [block] = (tmp_path / "jetstream").glob("**/KV_records/msgs/*.blk")
        block.write_bytes(block.read_bytes().replace(b"the record ns.b", b"the record ns.B"))
        await server.start()
        await until(lambda: nats.is_connected)
        with pytest.raises(DamagedRecord, match=r"the record ns.b in the bucket records is damaged"):
            await records.get("ns.b")
        assert [(await records.get(name)) is not None for name in ("ns.a", "ns.c", "ns.d")] == [True, True, False]
        with pytest.raises(Unavailable):  # nats-server cannot replace what it cannot read
            await records.put("ns.b", b"anew")
        await until(lambda: records.is_ready)
        await records.put("ns.d", b"another one")


async def test_a_damaged_record_hides_no_other_one_of_a_list(
    nats_server: NatsServer, namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        connect_nats(NatsOptions(servers=(nats_server.url,)), "test") as nats,
        open_records(nats, namespace, ttl_s=600, max_bytes=1 << 20) as records,
    ):
        for name in ("ns.a", "ns.b"):
            await records.put(name, b"a record")
        await nats.client.jetstream().publish(f"$KV.{namespace}.ns.b", b"=a recorc", headers={"Dynamo-Digest": "0" * 32})
        assert await records.values("ns.*") == {"ns.a": b"a record"}
        assert "the record ns.b in the bucket" in caplog.text
        with pytest.raises(DamagedRecord):
            await records.get("ns.b")
        await records.delete("ns.b")
        assert await records.keys("ns.*") == ["ns.a"]


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """Return a file system of 24 MiB."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("file systems cannot be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


async def failures_of(records: RecordStore, count: int) -> list[str]:
    """Return why each of some writes failed."""
    failures = []
    for number in range(count):
        with pytest.raises(Unavailable) as failure:
            await records.put(f"a.{number}", bytes(100_000))
        failures.append(str(failure.value))
    return failures


@pytest.mark.slow
async def test_a_full_disk_holds_up_one_write_and_is_used_again_when_nats_server_writes(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        store = f'jetstream {{ store_dir: "{disk}/jetstream", max_file_store: 8GB, sync_interval: always }}'
        async with (
            start_nats(tmp_path / "nats", jetstream=False, config=store) as server,
            connect_nats(NatsOptions(servers=(server.url,)), "test") as nats,
            open_records(nats, "records", ttl_s=600, max_bytes=1 << 30) as records,
        ):
            await until(lambda: records.is_ready)
            await records.put("a", b"before")
            ballast = disk / "ballast"
            with ballast.open("wb") as file:
                free = os.statvfs(disk)
                os.posix_fallocate(file.fileno(), 0, free.f_bavail * free.f_frsize)
            first, *others = await failures_of(records, 12)
            assert "cannot be written" in first  # this one has waited
            assert set(others) == {"the bucket records in JetStream takes no writes now"}
            record = await records.get("a")
            assert record is not None and record.value == b"before"
            ballast.unlink()
            await server.restart()  # it does not write again by itself
            await until(lambda: records.is_ready)
            assert await records.put("b", bytes(100_000), last=0) is not None


async def test_a_record_that_several_delete_at_once_is_deleted_by_one_of_them(nats_server: NatsServer, namespace: str) -> None:
    async with (
        connect_nats(NatsOptions(servers=(nats_server.url,)), "test") as connection,
        open_records(connection, namespace, ttl_s=60, max_bytes=1 << 20) as records,
    ):
        await until(lambda: records.is_ready)
        for _ in range(2):  # a key of which a record was deleted before is like any other
            await records.put("a", b"x")
            assert sorted(await asyncio.gather(*(records.delete("a") for _ in range(8)))) == [False] * 7 + [True]
            assert await records.get("a") is None
        assert not await records.delete("a")


async def test_a_large_record_whose_writing_is_cancelled_leaves_nothing(nats_server: NatsServer, namespace: str) -> None:
    async with (
        connect_nats(NatsOptions(servers=(nats_server.url,)), "test") as nats,
        open_records(nats, namespace, ttl_s=600, max_bytes=64 << 20) as records,
    ):
        await until(lambda: records.is_ready)
        stream = nats.client.jetstream()
        writing = asyncio.ensure_future(records.put("ns.a", b"x" * (8 << 20)))
        while not (await stream.stream_info(f"OBJ_{namespace}-large")).state.messages:
            pass
        writing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await writing
        assert await records.get("ns.a") is None
        assert (await stream.stream_info(f"OBJ_{namespace}-large")).state.bytes < 64 << 10
