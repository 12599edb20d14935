"""The simulated servers and the real ones pass the same tests, so that a history means what it seems to mean."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock
from urllib.parse import urlsplit

import pytest

from dynamo.common.errors import Unavailable
from dynamo.common.etcd import Etcd, Events, LeaseLost, Reset, connect_etcd
from dynamo.common.etcd import client as etcd_client
from dynamo.common.messaging.jetstream.records import RecordStore
from dynamo.common.messaging.jetstream.store import FileStore
from dynamo.common.messaging.nats.connection import Connection, connect_nats
from dynamo.common.options import EtcdOptions, NatsOptions
from tests.simulation.clock import Process, SimulatedLoop
from tests.simulation.etcd_server import SimulatedEtcd, SimulatedTransport
from tests.simulation.nats_server import SimulatedNats
from tests.simulation.network import Network
from tests.support.servers import EtcdServer, NatsServer, etcdctl
from tests.support.waiting import WAIT_S

CONNECT = b'CONNECT {"verbose":false,"pedantic":false,"headers":true,"no_responders":true}\r\n'


class Wire(asyncio.Protocol):
    """A client of nats-server that sends what it is told and reads what comes."""

    def __init__(self) -> None:
        self.received = b""
        self.is_over = False
        self._news = asyncio.Event()
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self.received += data
        self._news.set()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_over = True
        self._news.set()

    def send(self, data: bytes) -> None:
        self._transport.write(data)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition():
                self._news.clear()
                await self._news.wait()

    async def round_trip(self) -> bytes:
        """Return what came since the last time, and before the response to a PING that is sent now."""
        self.send(b"PING\r\n")
        await self.until(lambda: self.received.endswith(b"PONG\r\n"))
        received, self.received = self.received, b""
        return received.removesuffix(b"PONG\r\n")

    def close(self) -> None:
        self._transport.close()


class World:
    """The servers of one test."""

    def __init__(self, nats: tuple[str, int], etcd: str, compact: Callable[[int], None]) -> None:
        self._nats = nats
        self._etcd = etcd
        self.compact = compact
        self.prefix = f"/contract/{secrets.token_hex(4)}/"

    @asynccontextmanager
    async def wire(self) -> AsyncIterator[Wire]:
        """A client that has introduced itself."""
        _, wire = await asyncio.get_running_loop().create_connection(Wire, *self._nats)
        await wire.until(lambda: wire.received.endswith(b"\r\n"))
        assert wire.received.startswith(b"INFO {")
        wire.send(CONNECT)
        await wire.round_trip()
        try:
            yield wire
        finally:
            wire.close()

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        """A connection as frontends have it, for JetStream."""
        host, port = self._nats
        async with connect_nats(NatsOptions(servers=(f"nats://{host}:{port}",)), "contract") as nats:
            yield nats

    @asynccontextmanager
    async def records(self, **options: Any) -> AsyncIterator[RecordStore]:
        async with self.connection() as nats:
            bucket = f"contract-{secrets.token_hex(4)}"
            yield RecordStore(nats, bucket, **{"ttl_s": 3600.0, "max_bytes": 64 << 20, **options})

    @asynccontextmanager
    async def etcd(self) -> AsyncIterator[Etcd]:
        async with connect_etcd(EtcdOptions(endpoints=(self._etcd,))) as etcd:
            yield etcd


Contract = Callable[[World], Awaitable[None]]


async def a_message_reaches_each_matching_subscription_in_order(world: World) -> None:
    async with world.wire() as sender, world.wire() as reader:
        reader.send(b"SUB c.one 1\r\nSUB c.* 2\r\nSUB c.> 3\r\nSUB other 4\r\nSUB c 5\r\n")
        await reader.round_trip()
        sender.send(b"PUB c.one 3\r\nabc\r\nPUB c.one back 0\r\n\r\n")
        await sender.round_trip()
        received = await reader.round_trip()
    for sid in (b"1", b"2", b"3"):
        first, second = b"MSG c.one %s 3\r\nabc\r\n" % sid, b"MSG c.one %s back 0\r\n\r\n" % sid
        assert received.find(first) < received.find(second) and first in received
    assert received.count(b"MSG ") == 6


async def a_wildcard_stands_for_a_whole_token_and_a_tail_for_at_least_one(world: World) -> None:
    async with world.wire() as client:
        client.send(b"SUB a.*.c 1\r\nSUB a.> 2\r\nPUB a.b.c 0\r\n\r\nPUB a.b.c.d 0\r\n\r\nPUB a 0\r\n\r\n")
        received = await client.round_trip()
    assert sorted(received.replace(b"\r\n\r\n", b"\r\n").split(b"\r\n")) == [
        b"",
        b"MSG a.b.c 1 0",
        b"MSG a.b.c 2 0",
        b"MSG a.b.c.d 2 0",
    ]


async def no_subscriber_is_said_at_the_reply_subject(world: World) -> None:
    async with world.wire() as client:
        client.send(b"SUB inbox.> 7\r\nPUB nothing.here inbox.1 2\r\nhi\r\n")
        received = await client.round_trip()
    assert received.startswith(b"HMSG inbox.1 7 ") and b"NATS/1.0 503" in received


async def a_message_without_reply_subject_is_lost_silently_without_a_subscriber(world: World) -> None:
    async with world.wire() as client:
        client.send(b"SUB > 1\r\nUNSUB 1\r\nPUB nothing.here 2\r\nhi\r\n")
        assert await client.round_trip() == b""


async def headers_are_handed_on(world: World) -> None:
    header = b"NATS/1.0\r\nA: b\r\n\r\n"
    async with world.wire() as client:
        client.send(b"SUB h 1\r\nHPUB h %d %d\r\n%sxy\r\n" % (len(header), len(header) + 2, header))
        assert await client.round_trip() == b"HMSG h 1 %d %d\r\n%sxy\r\n" % (len(header), len(header) + 2, header)


async def nothing_arrives_after_unsubscribing(world: World) -> None:
    async with world.wire() as client:
        client.send(b"SUB s 1\r\nPUB s 1\r\na\r\nUNSUB 1\r\nPUB s 1\r\nb\r\n")
        assert await client.round_trip() == b"MSG s 1 1\r\na\r\n"


async def a_payload_that_is_too_large_ends_the_connection(world: World) -> None:
    async with world.wire() as client:
        client.send(b"PUB s 100000000\r\n")
        await client.until(lambda: client.is_over)
        assert client.received.endswith(b"-ERR 'Maximum Payload Violation'\r\n")


async def an_unknown_command_ends_the_connection(world: World) -> None:
    async with world.wire() as client:
        client.send(b"NONSENSE\r\n")
        await client.until(lambda: client.is_over)
        assert b"-ERR 'Unknown Protocol Operation'\r\n" in client.received


async def each_change_has_a_revision_of_its_own(world: World) -> None:
    async with world.etcd() as etcd:
        first = await etcd.put(world.prefix + "a", b"1")
        second = await etcd.put(world.prefix + "b", b"2")
        third = await etcd.put(world.prefix + "a", b"3")
        listing = await etcd.range(world.prefix, prefix=True)
        assert first < second < third <= listing.revision
        assert [(kv.key, kv.value, kv.mod_revision) for kv in listing.kvs] == [
            (world.prefix + "a", b"3", third),
            (world.prefix + "b", b"2", second),
        ]
        assert await etcd.delete(world.prefix, prefix=True) == 2
        assert await etcd.delete(world.prefix, prefix=True) == 0
        assert (await etcd.range(world.prefix, prefix=True)).kvs == ()


async def a_key_needs_a_lease_that_exists(world: World) -> None:
    async with world.etcd() as etcd:
        with pytest.raises(LeaseLost):
            await etcd.put(world.prefix + "a", b"1", lease=12345)


async def keys_of_a_lease_go_with_it_in_one_revision(world: World) -> None:
    async with world.etcd() as etcd:
        held = asyncio.Event()
        async with aclosing(etcd.watch(world.prefix)) as changes:
            assert isinstance(await anext(changes), Reset)
            async with etcd.session(5, on_held=lambda lease: held.set()) as session:
                await held.wait()
                for name in ("a", "b"):
                    await etcd.put(world.prefix + name, b"1", lease=session.lease)
            events: list[tuple[str, int]] = []
            async with asyncio.timeout(WAIT_S):
                while len(events) < 4:
                    batch = await anext(changes)
                    assert isinstance(batch, Events)
                    events += [(type(event).__name__, batch.revision) for event in batch.events]
        assert [kind for kind, _ in events] == ["Put", "Put", "Deleted", "Deleted"]
        assert events[2][1] == events[3][1]


async def a_watch_begins_at_the_revision_that_it_names(world: World) -> None:
    async with world.etcd() as etcd:
        await etcd.put(world.prefix + "a", b"1")
        start = await etcd.put(world.prefix + "a", b"2")
        await etcd.put(world.prefix + "b", b"3")
        async with aclosing(etcd.watch(world.prefix, start)) as changes:
            values: list[bytes] = []
            async with asyncio.timeout(WAIT_S):
                while len(values) < 2:
                    batch = await anext(changes)
                    assert isinstance(batch, Events)
                    values += [event.kv.value for event in batch.events if hasattr(event, "kv")]
        assert values == [b"2", b"3"]


async def a_watch_from_a_compacted_revision_lists_again(world: World) -> None:
    async with world.etcd() as etcd:
        start = await etcd.put(world.prefix + "a", b"1")
        await etcd.put(world.prefix + "a", b"2")
        last = await etcd.put(world.prefix + "a", b"3")
        world.compact(last)
        async with aclosing(etcd.watch(world.prefix, start)) as changes:
            first = await anext(changes)
        assert isinstance(first, Reset)
        assert [kv.value for kv in first.kvs] == [b"3"]


async def a_key_is_replaced_only_as_it_was_read(world: World) -> None:
    async with world.etcd() as etcd:
        key = world.prefix + "a"
        assert await etcd.replace(key, b"1", mod_revision=0)
        assert not await etcd.replace(key, b"2", mod_revision=0)
        assert await etcd.replace(key, b"1", mod_revision=0), "a repeated attempt is no failure"
        revision = (await etcd.range(key)).kvs[0].mod_revision
        assert await etcd.replace(key, b"2", mod_revision=revision)
        assert not await etcd.remove(key, mod_revision=revision)
        assert await etcd.remove(key, mod_revision=(await etcd.range(key)).kvs[0].mod_revision)
        assert await etcd.remove(key, mod_revision=1), "it is gone"


async def a_record_is_read_as_it_was_written_last(world: World) -> None:
    async with world.records() as records:
        assert await records.get("a") is None
        first = await records.put("a", b"1")
        second = await records.put("a", b"")
        assert first is not None and second is not None and second > first
        record = await records.get("a")
        assert record is not None and (record.value, record.revision) == (b"", second)
        await records.delete("a")
        await records.delete("a")
        assert await records.get("a") is None


async def a_record_is_replaced_only_as_it_was_read(world: World) -> None:
    async with world.records() as records:
        first = await records.put("a", b"1", last=0)
        assert first is not None
        assert await records.put("a", b"2", last=0) is None
        second = await records.put("a", b"2", last=first)
        assert second is not None
        assert await records.put("a", b"3", last=first) is None
        await records.delete("a")
        assert await records.put("a", b"4", last=second) is None
        assert await records.put("a", b"5", last=0) is not None, "a deleted record is none"


async def a_large_record_is_read_as_it_was_written_last(world: World) -> None:
    first, second = secrets.token_bytes(700_000), secrets.token_bytes(300_000)
    async with world.records() as records:
        for value in (first, second, b"small", first):
            await records.put("a", value)
            record = await records.get("a")
            assert record is not None and record.value == value
        await records.delete("a")
        assert await records.get("a") is None


async def records_are_listed_by_patterns(world: World) -> None:
    async with world.records() as records:
        assert await records.keys(">") == []
        for key in ("x.b", "x.a", "x.a.deep", "y.a"):
            await records.put(key, key.encode())
        await records.put("x.gone", b"1")
        await records.delete("x.gone")
        assert await records.keys("x.*") == ["x.a", "x.b"]
        assert await records.keys("x.>") == ["x.a", "x.a.deep", "x.b"]
        assert await records.values("y.*") == {"y.a": b"y.a"}
        assert await records.values("nothing.*") == {}


async def what_has_changed_under_a_pattern_is_read_alone(world: World) -> None:
    async with world.records() as records:
        nothing = await records.changes("x.*", None)
        assert (nothing.records, nothing.is_whole) == ({}, True)
        for key in ("x.a", "x.b", "y.a"):
            await records.put(key, key.encode())
        first = await records.changes("x.*", nothing.position)
        assert {key: record and record.value for key, record in first.records.items()} == {"x.a": b"x.a", "x.b": b"x.b"}
        await records.put("y.a", b"elsewhere")
        unchanged = await records.changes("x.*", first.position)
        assert (unchanged.records, unchanged.is_whole, unchanged.position) == ({}, False, first.position)
        await records.put("x.c", b"1")
        await records.put("x.c", b"2")
        await records.delete("x.a")
        second = await records.changes("x.*", unchanged.position)
        assert {key: record and record.value for key, record in second.records.items()} == {"x.c": b"2", "x.a": None}
        assert not second.is_whole
        whole = await records.changes("x.*", None)
        assert whole.is_whole and whole.position == second.position
        assert {key for key, record in whole.records.items() if record is not None} == {"x.b", "x.c"}
    async with world.records() as others:
        assert (await others.changes("x.*", second.position)).is_whole, "a position of another bucket is none"


def ordered_consumers() -> list[asyncio.Task[Any]]:
    """Return the tasks with which nats-py keeps the subscriptions of listings, and of objects that it reads."""
    return [task for task in asyncio.all_tasks() if "_JSI" in getattr(task.get_coro(), "__qualname__", "")]


async def cancelled_at_each_step(read: Callable[[int], Coroutine[Any, Any, object]]) -> None:
    """Begin to read again and again, cancel that a bit later each time, and return when nothing is left of it."""
    for step in range(20):
        reading = asyncio.create_task(read(step))
        await asyncio.wait({reading}, timeout=step * 0.0005)
        reading.cancel()
        await asyncio.wait({reading})
    async with asyncio.timeout(WAIT_S):
        while ordered_consumers():
            await asyncio.sleep(0.05)


async def a_listing_that_is_cancelled_leaves_no_consumer(world: World) -> None:
    async with world.records() as records:
        await records.put("a", b"1")
        await cancelled_at_each_step(lambda step: records.keys(">"))
        assert await records.keys(">") == ["a"]


async def a_large_record_that_is_not_read_to_its_end_leaves_no_consumer(world: World) -> None:
    value = secrets.token_bytes(1_000_000)
    async with world.records() as records:
        await records.put("a", value)
        await cancelled_at_each_step(lambda step: records.get("a"))
        record = await records.get("a")
        assert record is not None and record.value == value


async def a_file_that_is_not_fetched_to_its_end_leaves_no_consumer(world: World) -> None:
    data = secrets.token_bytes(1_000_000)
    async with world.connection() as nats:
        with TemporaryDirectory() as folder:
            key = await FileStore(nats, Path(folder) / "own").put(data)
            await cancelled_at_each_step(lambda step: FileStore(nats, Path(folder) / str(step)).get(key))
            assert await FileStore(nats, Path(folder) / "last").get(key) == data


async def a_bucket_takes_no_more_than_its_bytes(world: World) -> None:
    async with world.records(max_bytes=4096) as records:
        await records.put("a", bytes(3000))
        with pytest.raises(Unavailable, match="maximum bytes exceeded"):
            await records.put("b", bytes(3000))
        await records.delete("a")
        assert await records.put("b", bytes(3000)) is not None


async def a_file_is_fetched_as_it_was_put(world: World) -> None:
    data = secrets.token_bytes(300_000)
    async with world.connection() as nats:
        with TemporaryDirectory() as folder:
            store = FileStore(nats, Path(folder))
            key = await store.put(data)
            assert await store.put(data) == key
            assert await store.get(key) == data
            with pytest.raises(Unavailable, match="is not in the store"):
                await store.get("0" * 64)
            assert await store.missing([key, "0" * 64]) == {"0" * 64}


CONTRACTS: list[Contract] = [
    a_message_reaches_each_matching_subscription_in_order,
    a_wildcard_stands_for_a_whole_token_and_a_tail_for_at_least_one,
    no_subscriber_is_said_at_the_reply_subject,
    a_message_without_reply_subject_is_lost_silently_without_a_subscriber,
    headers_are_handed_on,
    nothing_arrives_after_unsubscribing,
    a_payload_that_is_too_large_ends_the_connection,
    an_unknown_command_ends_the_connection,
    each_change_has_a_revision_of_its_own,
    a_key_needs_a_lease_that_exists,
    keys_of_a_lease_go_with_it_in_one_revision,
    a_watch_begins_at_the_revision_that_it_names,
    a_watch_from_a_compacted_revision_lists_again,
    a_key_is_replaced_only_as_it_was_read,
    a_record_is_read_as_it_was_written_last,
    a_record_is_replaced_only_as_it_was_read,
    a_large_record_is_read_as_it_was_written_last,
    records_are_listed_by_patterns,
    what_has_changed_under_a_pattern_is_read_alone,
    a_listing_that_is_cancelled_leaves_no_consumer,
    a_large_record_that_is_not_read_to_its_end_leaves_no_consumer,
    a_file_that_is_not_fetched_to_its_end_leaves_no_consumer,
    a_bucket_takes_no_more_than_its_bytes,
    a_file_is_fetched_as_it_was_put,
]

contracts = pytest.mark.parametrize("contract", CONTRACTS, ids=lambda contract: contract.__name__)


@contracts
async def test_the_real_servers_keep_the_contract(contract: Contract, nats_server: NatsServer, etcd_server: EtcdServer) -> None:
    address = urlsplit(nats_server.url)
    assert address.hostname and address.port

    def compact(revision: int) -> None:
        etcdctl(etcd_server.endpoint, "compact", str(revision), "--physical")

    await contract(World((address.hostname, address.port), etcd_server.endpoint, compact))


@contracts
def test_the_simulated_servers_keep_the_contract(contract: Contract) -> None:
    loop = SimulatedLoop()
    network = Network(loop, Random(1))
    network.servers["127.0.0.1", 4222] = SimulatedNats(network, Random(2))
    etcd = SimulatedEtcd(loop, Random(3))

    def make_transport(config: Any) -> SimulatedTransport:
        return SimulatedTransport(config, etcd)

    async def run() -> None:
        world = World(("127.0.0.1", 4222), "http://127.0.0.1:2379", lambda revision: etcd.compact())
        with mock.patch.object(etcd_client, "Transport", make_transport):
            await Process("test").start(contract(world))  # type: ignore[arg-type]

    try:
        loop.run_until_complete(run())
    finally:
        loop.close()
