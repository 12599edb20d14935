"""KV events on record in a real nats-server: workers that record them, and frontends that begin with what is recorded."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from nats.js.api import ObjectInfo
from nats.js.object_store import ObjectStore

from dynamo.common.kv.events import read_message
from dynamo.common.messaging.jetstream import kv_stream
from dynamo.common.messaging.jetstream.kv_stream import STREAM, KvStream
from dynamo.common.messaging.nats.connection import connect_nats
from dynamo.common.names import Endpoint, InstanceId, instance_of
from dynamo.common.options import NatsOptions
from tests.support.servers import EtcdServer, NatsServer, start_nats
from tests.support.sim_fleet import KV, SimFleet, prompt
from tests.support.waiting import WAIT_S, until


@asynccontextmanager
async def recording(etcd: EtcdServer, nats: NatsServer, namespace: str, workers: int = 2) -> AsyncIterator[SimFleet]:
    """Workers that record their KV events."""
    fleet = SimFleet(etcd, nats, namespace, durable=True, routing=KV)
    async with AsyncExitStack() as stack:
        for _ in range(workers):
            await stack.enter_async_context(fleet.worker())
        yield fleet


@asynccontextmanager
async def record_of(nats: NatsServer) -> AsyncIterator[KvStream]:
    async with connect_nats(NatsOptions(servers=(nats.url,)), "test") as connection:
        yield KvStream(connection)


async def all_is_recorded(record: KvStream, fleet: SimFleet, within_s: float = 120) -> None:
    """Returns once the last update of every engine is on record."""
    subject = Endpoint(namespace=fleet.namespace).kv_subject()
    async with asyncio.timeout(within_s):
        while True:
            last: dict[InstanceId, int] = {}
            async for batch in record.since(subject, 0):
                last |= {instance_of(source): read_message(payload).update.number for _, source, payload in batch}
            if last == {instance: engine.kv.number for instance, engine in fleet.engines.items()}:
                return
            await asyncio.sleep(0.02)


async def test_a_frontend_is_exact_from_the_record_without_responses_of_workers(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str
) -> None:
    async with recording(etcd_server, nats_server, namespace) as f, record_of(nats_server) as record:
        async with f.frontend():
            placed = [(await f.generate(prompt(number)))[0] for number in range(8)]
        await all_is_recorded(record, f)
        f.refuse_recovery()
        async with f.frontend():
            await until(f.is_exact)
            for number, instance in enumerate(placed):
                again, overlap, _ = await f.generate(prompt(number))
                assert again == instance
                assert overlap > 10
            await until(f.is_exact)


async def test_snapshots_keep_the_record_short_and_frontends_exact(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str
) -> None:
    subject = Endpoint(namespace=namespace).kv_subject()
    async with (
        recording(etcd_server, nats_server, namespace) as f,
        record_of(nats_server) as record,
        f.frontend(snapshot_threshold=20),
        f.frontend(snapshot_threshold=20),
    ):
        number = 0
        while await record.load(subject.removesuffix(".*")) is None:
            await f.generate(prompt(number))
            number += 1
            assert number < 200
        async with asyncio.timeout(120):
            while await record.count(subject) >= 20:
                await asyncio.sleep(0.02)
        f.refuse_recovery()
        async with f.frontend(snapshot_threshold=1000) as late:
            await until(lambda: f.is_exact(late))


async def test_a_snapshot_that_is_replaced_while_it_is_read_is_read_again(
    nats_server: NatsServer, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_stream, "LOAD_S", 0.5)
    get_info = ObjectStore.get_info
    async with record_of(nats_server) as record:
        await record.save(namespace, b"old")

        async def get_info_too_early(self: ObjectStore, name: str, show_deleted: bool | None = False) -> ObjectInfo:
            info = await get_info(self, name, show_deleted)
            monkeypatch.setattr(ObjectStore, "get_info", get_info)
            await record.save(namespace, b"new")
            return info

        monkeypatch.setattr(ObjectStore, "get_info", get_info_too_early)
        assert await record.load(namespace) == b"new"


async def test_a_higher_snapshot_threshold_leaves_the_record_longer(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str
) -> None:
    subject = Endpoint(namespace=namespace).kv_subject()
    async with recording(etcd_server, nats_server, namespace, workers=1) as f, record_of(nats_server) as record:
        (engine,) = f.engines.values()
        async with f.frontend(snapshot_threshold=1000):
            number = 0
            while engine.kv.number < 60:
                await f.generate(prompt(number))
                number += 1
            await all_is_recorded(record, f)
            await until(f.is_exact)  # so it has heard of them all
            assert await record.count(subject) >= 60
            assert await record.load(subject.removesuffix(".*")) is None
        async with f.frontend(snapshot_threshold=20), asyncio.timeout(120):
            while await record.count(subject) >= 20:
                await asyncio.sleep(0.02)
            assert await record.load(subject.removesuffix(".*")) is not None


async def test_reset_states_forgets_what_is_on_record(etcd_server: EtcdServer, nats_server: NatsServer, namespace: str) -> None:
    subject = Endpoint(namespace=namespace).kv_subject()
    async with recording(etcd_server, nats_server, namespace, workers=1) as f, record_of(nats_server) as record:
        async with f.frontend(snapshot_threshold=3):
            while await record.load(subject.removesuffix(".*")) is None:
                await f.generate(prompt(1))
                await f.generate(prompt(2))
        async with f.frontend(reset_states=True):
            async with asyncio.timeout(WAIT_S):
                while await record.load(subject.removesuffix(".*")) is not None:
                    await asyncio.sleep(0.02)
            assert await record.count(subject) == 0
            await until(f.is_exact)  # by asking


async def test_without_jetstream_frontends_request_snapshots_and_both_sides_warn(
    etcd_server: EtcdServer, tmp_path: Path, namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        async with AsyncExitStack() as stack:
            nats = await stack.enter_async_context(start_nats(tmp_path / "nats"))
            f = await stack.enter_async_context(recording(etcd_server, nats, namespace))
            async with f.frontend(), record_of(nats) as record:
                await f.generate(prompt(1))
                await all_is_recorded(record, f)
            await nats.stop()
            await stack.enter_async_context(start_nats(tmp_path / "other", port=nats.port, jetstream=False))
            async with f.frontend():
                await until(f.is_exact)
                assert (await f.generate(prompt(1)))[1] > 10
                await f.generate(prompt(2))
                await until(f.is_exact)
                await until(lambda: "KV events are not recorded until JetStream is there" in caplog.text)
    assert "cannot be used; requesting snapshots from the instances" in caplog.text


async def test_a_record_lost_with_its_server_is_made_up_for_and_begun_anew(
    etcd_server: EtcdServer, tmp_path: Path, namespace: str
) -> None:
    async with start_nats(tmp_path / "nats") as nats, recording(etcd_server, nats, namespace) as f:
        async with record_of(nats) as record:
            async with f.frontend():
                await f.generate(prompt(1))
                await all_is_recorded(record, f)
                nats.kill()
                shutil.rmtree(tmp_path / "nats" / "jetstream")
                await nats.restart()
                await until(lambda: len(f.frontends[0].plane.models.instances("sim")) == 2)
                for number in range(2, 8):  # every worker gets one and misses its receipt
                    await f.generate(prompt(number))
                await until(f.is_exact)
                async with f.frontend() as late:
                    await until(lambda: f.is_exact(late))
            await all_is_recorded(record, f, within_s=120)
        f.refuse_recovery()
        async with f.frontend():
            await until(f.is_exact)


async def test_a_stream_of_other_bounds_is_left_alone(tmp_path: Path) -> None:
    async with start_nats(tmp_path / "nats") as nats, connect_nats(NatsOptions(servers=(nats.url,)), "test") as connection:
        stream, context = KvStream(connection), connection.client.jetstream()
        made = await stream.ensure()
        info = await context.stream_info(STREAM)
        assert info.config.max_bytes is not None
        assert 0 < info.config.max_bytes < 2**30
        info.config.max_bytes = 1 << 20
        await context.update_stream(info.config)
        assert await stream.ensure() == made
        assert (await context.stream_info(STREAM)).config.max_bytes == 1 << 20


async def test_the_oldest_events_go_when_the_record_is_full(tmp_path: Path) -> None:
    async with start_nats(tmp_path / "nats") as nats, connect_nats(NatsOptions(servers=(nats.url,)), "test") as connection:
        stream, context = KvStream(connection), connection.client.jetstream()
        await stream.ensure()
        info = await context.stream_info(STREAM)
        info.config.max_bytes = 1 << 20
        await context.update_stream(info.config)
        recorded: asyncio.Queue[str] = asyncio.Queue()
        async with stream.receipts(recorded.put_nowait) as receipts, asyncio.timeout(120):
            for number in range(40):
                connection.publish_nowait("dynamo.a.b.kv.1", bytes(1 << 16), f"{receipts}.{number}")
                assert await recorded.get() == str(number)
        assert (await context.stream_info(STREAM)).state.bytes <= 1 << 20
        left = [number async for batch in stream.since("dynamo.a.b.kv.*", 0) for number, _, _ in batch]
        assert left == list(range(left[0], 41))
        assert 2 <= left[0] <= 30
        later = [number async for batch in stream.since("dynamo.a.b.kv.*", 38) for number, _, _ in batch]
        assert later == [39, 40]
        # From a record that was lost, with a number that this one has not come to.
        assert [number async for batch in stream.since("dynamo.a.b.kv.*", 5000) for number, _, _ in batch] == left


@pytest.mark.parametrize("durable", [False, True])
async def test_a_frontend_restarted_under_load_becomes_exact(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str, durable: bool
) -> None:
    f = SimFleet(etcd_server, nats_server, namespace, durable=durable, routing=KV)
    async with AsyncExitStack() as stack:
        for _ in range(4):
            await stack.enter_async_context(f.worker())
        first = await stack.enter_async_context(f.frontend())

        async def load(client: int) -> None:
            for number in range(10**6):
                await f.generate(prompt(number * 4 + client), first)
                await asyncio.sleep(0.01)  # there are moments at which nothing is on its way

        async with asyncio.TaskGroup() as clients:
            load_tasks = [clients.create_task(load(client)) for client in range(4)]
            await until(lambda: all(len(engine.kv) > 150 for engine in f.engines.values()))
            for _ in range(2):
                async with f.frontend() as restarted:
                    await until(lambda frontend=restarted: f.is_exact(frontend), within_s=120)  # type: ignore[misc]
            for task in load_tasks:
                task.cancel()
