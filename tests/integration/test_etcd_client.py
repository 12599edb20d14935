"""The etcd client against a real etcd that is stopped, killed, wiped, compacted, hidden and secured."""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from pathlib import Path

import pytest
import trustme

from dynamo.common.errors import Forbidden, Unauthenticated
from dynamo.common.etcd import (
    Compacted,
    Etcd,
    EtcdUnavailable,
    Events,
    LeaseLost,
    Put,
    Reset,
    connect_etcd,
)
from dynamo.common.options import EtcdOptions
from dynamo.common.process.ports import free_ports
from tests.support.proxy import start_proxy
from tests.support.servers import EtcdServer, ServerTls, etcdctl, start_etcd
from tests.support.waiting import WAIT_S, expiring, until

LEASE_S = 5.0
"""A third of it passes between two signs of life, which a busy machine still gives in time."""


def config_for(*endpoints: str, **settings: object) -> EtcdOptions:
    """Short pauses, so that recoveries take tenths of seconds."""
    fast: dict[str, object] = {"max_backoff_s": 0.2, "connect_timeout_s": 1.0, **settings}
    return EtcdOptions(endpoints=endpoints, **fast)  # type: ignore[arg-type]


@pytest.fixture
async def etcd(etcd_server: EtcdServer) -> AsyncIterator[Etcd]:
    async with connect_etcd(config_for(etcd_server.endpoint)) as etcd:
        yield etcd


class Recorder:
    """Reads a watch in the background; a test waits for what it wants to see."""

    def __init__(self) -> None:
        self.batches: list[Events | Reset] = []
        self.connected: list[bool] = []
        self._news = asyncio.Condition()

    async def read(self, etcd: Etcd, prefix: str, start_revision: int) -> None:
        async with aclosing(etcd.watch(prefix, start_revision, self._on_connected)) as batches:
            async for batch in batches:
                self.batches.append(batch)
                await self._notify()

    def _on_connected(self, connected: bool) -> None:
        self.connected.append(connected)
        self._task = asyncio.ensure_future(self._notify())

    async def _notify(self) -> None:
        async with self._news:
            self._news.notify_all()

    @property
    def changes(self) -> list[tuple[str, bytes | None]]:
        """Keys and their new values, None for deleted, of all events so far."""
        events = [event for batch in self.batches if isinstance(batch, Events) for event in batch.events]
        return [(e.kv.key, e.kv.value) if isinstance(e, Put) else (e.key, None) for e in events]

    @property
    def resets(self) -> list[Reset]:
        return [batch for batch in self.batches if isinstance(batch, Reset)]

    async def until(self, condition: object) -> None:
        assert callable(condition)
        async with asyncio.timeout(WAIT_S), self._news:
            await self._news.wait_for(condition)


@asynccontextmanager
async def watching(etcd: Etcd, prefix: str, start_revision: int = 0) -> AsyncIterator[Recorder]:
    """A watch that is connected when the body begins."""
    recorder = Recorder()
    task = asyncio.create_task(recorder.read(etcd, prefix, start_revision))
    try:
        await recorder.until(lambda: task.done() or recorder.connected[-1:] == [True])
        yield recorder
    finally:
        task.cancel()
        await asyncio.wait([task])


async def test_keys_are_put_read_and_deleted(etcd: Etcd, etcd_server: EtcdServer, namespace: str) -> None:
    first = await etcd.put(f"/{namespace}/a", b"1")
    await etcd.put(f"/{namespace}/b", b"\x00\xff")
    assert etcdctl(etcd_server.endpoint, "get", f"/{namespace}/a", "--print-value-only") == "1\n"
    listing = await etcd.range(f"/{namespace}/", prefix=True)
    assert [(kv.key, kv.value) for kv in listing.kvs] == [(f"/{namespace}/a", b"1"), (f"/{namespace}/b", b"\x00\xff")]
    assert listing.kvs[0].mod_revision == first < listing.revision
    past = await etcd.range(f"/{namespace}/", prefix=True, revision=first)
    assert [kv.key for kv in past.kvs] == [f"/{namespace}/a"]
    assert await etcd.delete(f"/{namespace}/", prefix=True) == 2
    assert (await etcd.range(f"/{namespace}/a")).kvs == ()


async def test_several_keys_are_set_together_or_not_at_all(etcd: Etcd, namespace: str) -> None:
    first, second = f"/{namespace}/a", f"/{namespace}/b"
    values = {first: b"1", second: b"2"}
    assert await etcd.replace_together(values, key=first, mod_revision=0)
    kvs = (await etcd.range(f"/{namespace}/", prefix=True)).kvs
    assert {kv.key: kv.value for kv in kvs} == values and len({kv.mod_revision for kv in kvs}) == 1
    assert await etcd.replace_together(values, key=first, mod_revision=0), "a repeated attempt is no failure"
    assert not await etcd.replace_together({first: b"1", second: b"3"}, key=first, mod_revision=0)
    assert (await etcd.range(second)).kvs[0].value == b"2"


async def test_a_lease_that_is_not_there_cannot_hold_a_key(etcd: Etcd, namespace: str) -> None:
    with pytest.raises(LeaseLost):
        await etcd.put(f"/{namespace}/a", b"", lease=12345)


async def test_a_watch_first_lists_and_then_tells_changes_in_their_order(etcd: Etcd, namespace: str) -> None:
    prefix = f"/{namespace}/"
    await etcd.put(prefix + "old", b"0")
    async with watching(etcd, prefix) as seen:
        expected: list[tuple[str, bytes | None]] = []
        for number in range(50):
            await etcd.put(prefix + str(number % 3), b"%d" % number)
            expected.append((prefix + str(number % 3), b"%d" % number))
        await etcd.delete(prefix + "old")
        await seen.until(lambda: len(seen.changes) == 51)
        assert [kv.key for kv in seen.resets[0].kvs] == [prefix + "old"]
        assert seen.changes == [*expected, (prefix + "old", None)]
        revisions = [batch.revision for batch in seen.batches]
        assert revisions == sorted(set(revisions))


async def test_a_watch_may_begin_in_the_past(etcd: Etcd, namespace: str) -> None:
    prefix = f"/{namespace}/"
    first = await etcd.put(prefix + "a", b"1")
    await etcd.put(prefix + "a", b"2")
    async with watching(etcd, prefix, first) as seen:
        await seen.until(lambda: len(seen.changes) == 2)
        assert seen.changes == [(prefix + "a", b"1"), (prefix + "a", b"2")]
        assert seen.resets == []


async def test_what_changed_while_a_watch_was_cut_off_is_told_when_it_is_back(
    etcd: Etcd, etcd_server: EtcdServer, namespace: str
) -> None:
    prefix = f"/{namespace}/"
    async with (
        start_proxy(etcd_server.port) as proxy,
        connect_etcd(config_for(f"127.0.0.1:{proxy.port}")) as through,
        watching(through, prefix) as seen,
    ):
        await etcd.put(prefix + "a", b"1")
        await seen.until(lambda: len(seen.changes) == 1)
        await proxy.refuse()
        await seen.until(lambda: seen.connected[-1] is False)
        for value in (b"2", b"3"):
            await etcd.put(prefix + "a", value)
        await etcd.delete(prefix + "a")
        proxy.heal()
        await seen.until(lambda: len(seen.changes) == 4)
        assert [value for _, value in seen.changes] == [b"1", b"2", b"3", None]
        assert len(seen.resets) == 1  # resumed, not listed again


async def test_a_watch_resumes_after_etcd_was_killed_and_started_again(tmp_path: Path) -> None:
    async with (
        start_etcd(tmp_path, fsync=True) as server,
        connect_etcd(config_for(server.endpoint)) as etcd,
        watching(etcd, "/k") as seen,
    ):
        await etcd.put("/k", b"before")
        await seen.until(lambda: seen.changes == [("/k", b"before")])
        server.kill()
        await seen.until(lambda: seen.connected[-1] is False)
        await server.restart()
        etcdctl(server.endpoint, "put", "/k", "after")
        await seen.until(lambda: len(seen.changes) == 2)
        assert seen.changes[1] == ("/k", b"after")
        assert len(seen.resets) == 1


async def test_a_watch_lists_again_when_what_it_missed_was_compacted(tmp_path: Path) -> None:
    async with (
        start_etcd(tmp_path) as server,
        start_proxy(server.port) as proxy,
        connect_etcd(config_for(f"127.0.0.1:{proxy.port}")) as etcd,
        connect_etcd(config_for(server.endpoint)) as direct,
        watching(etcd, "/k") as seen,
    ):
        await proxy.refuse()
        await seen.until(lambda: seen.connected[-1] is False)
        await direct.put("/k1", b"1")
        await direct.put("/k2", b"2")
        await direct.delete("/k1")
        revision = await direct.put("/other", b"")
        etcdctl(server.endpoint, "compact", str(revision), "--physical")
        with pytest.raises(Compacted):
            await direct.range("/k1", revision=2)
        proxy.heal()
        await seen.until(lambda: len(seen.resets) == 2)
        assert [kv.key for kv in seen.resets[1].kvs] == ["/k2"]
        assert not seen.resets[1].history_lost
        await direct.put("/k3", b"3")
        await seen.until(lambda: seen.changes == [("/k3", b"3")])


async def test_a_watch_notices_that_etcd_began_anew(tmp_path: Path) -> None:
    """Otherwise it would wait in silence until the new store has reached the revision of the old one."""
    async with (
        start_etcd(tmp_path) as server,
        connect_etcd(config_for(server.endpoint)) as etcd,
    ):
        for _ in range(20):
            await etcd.put("/k", b"old")
        async with watching(etcd, "/k") as seen:
            server.kill()
            shutil.rmtree(tmp_path / "data")
            await server.restart()
            await seen.until(lambda: len(seen.resets) == 2)
            assert seen.resets[1].kvs == ()
            assert seen.resets[1].history_lost
            await etcd.put("/k", b"new")
            await seen.until(lambda: seen.changes == [("/k", b"new")])


async def test_a_half_open_connection_is_noticed(tmp_path: Path) -> None:
    async with (
        start_etcd(tmp_path) as server,
        start_proxy(server.port) as proxy,
        connect_etcd(config_for(f"127.0.0.1:{proxy.port}", keepalive_s=0.3)) as etcd,
        watching(etcd, "/k") as seen,
    ):
        proxy.blackhole()
        await seen.until(lambda: seen.connected[-1] is False)
        await proxy.cut()
        proxy.heal()
        etcdctl(server.endpoint, "put", "/k", "1")
        await seen.until(lambda: seen.changes == [("/k", b"1")])


async def test_a_call_waits_for_etcd_inside_its_timeout(tmp_path: Path) -> None:
    async with start_etcd(tmp_path) as server, connect_etcd(config_for(server.endpoint)) as etcd:
        await etcd.put("/k", b"1")
        await server.stop()
        call = asyncio.create_task(etcd.range("/k"))
        await server.start()
        assert [kv.value for kv in (await call).kvs] == [b"1"]


async def test_without_etcd_a_call_fails_in_its_timeout_and_says_why() -> None:
    (port,) = free_ports(1)
    config = config_for(f"127.0.0.1:{port}", timeout_s=expiring(1.0), connect_timeout_s=0.3)
    async with asyncio.timeout(120), connect_etcd(config) as etcd:
        with pytest.raises(EtcdUnavailable, match="refused"):
            await etcd.range("/k")


async def test_dead_and_silent_endpoints_do_not_matter_while_one_is_alive(etcd_server: EtcdServer, namespace: str) -> None:
    (dead,) = free_ports(1)
    async with start_proxy(etcd_server.port) as silent:
        silent.blackhole()
        endpoints = (f"127.0.0.1:{dead}", f"127.0.0.1:{silent.port}", f"localhost:{etcd_server.port}")
        async with connect_etcd(config_for(*endpoints, timeout_s=WAIT_S)) as etcd:
            await etcd.put(f"/{namespace}", b"1")
            assert etcd.endpoint == endpoints[2]


async def test_calls_and_watches_move_to_another_endpoint(etcd: Etcd, etcd_server: EtcdServer, namespace: str) -> None:
    async with start_proxy(etcd_server.port) as one, start_proxy(etcd_server.port) as other:
        proxies = {f"127.0.0.1:{proxy.port}": proxy for proxy in (one, other)}
        async with (
            connect_etcd(config_for(*proxies, keepalive_s=0.3)) as through,
            watching(through, f"/{namespace}") as seen,
        ):
            for number, break_it in enumerate(("refuse", "blackhole"), start=1):
                first = through.endpoint
                assert first is not None
                if break_it == "refuse":
                    await proxies[first].refuse()
                else:
                    proxies[first].blackhole()
                await through.put(f"/{namespace}", break_it.encode())
                assert through.endpoint not in (None, first)
                await seen.until(lambda n=number: len(seen.changes) == n)
                await proxies[first].cut()
                proxies[first].heal()


async def test_streams_that_outlive_a_failed_call_follow_to_the_connection_that_replaced_theirs(
    etcd_server: EtcdServer, namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR, "dynamo.common.etcd")  # records that are kept would keep errors, and these the connections
    prefix, held = f"/{namespace}/", Held()
    async with (
        start_proxy(etcd_server.port) as proxy,
        connect_etcd(config_for(f"127.0.0.1:{proxy.port}", keepalive_s=4.0, timeout_s=expiring(2.0))) as through,
        watching(through, prefix) as first,
        watching(through, prefix) as second,
        through.session(10, held.on_held),
    ):
        await held.until(lambda: held.leases)
        proxy.blackhole()
        with pytest.raises(EtcdUnavailable):
            await through.range(prefix)
        proxy.heal()
        await through.put(f"{prefix}a", b"")
        assert proxy.open_connections > 1
        await until(lambda: proxy.open_connections == 1)
        await through.put(f"{prefix}b", b"")
        for seen in (first, second):
            await seen.until(lambda seen=seen: [key for key, _ in seen.changes] == [f"{prefix}a", f"{prefix}b"])
        assert len(held.leases) == 1


class Held:
    """What a session told its owner."""

    def __init__(self) -> None:
        self.leases: list[int] = []
        self.losses = 0
        self._news = asyncio.Event()

    def on_held(self, lease: int) -> None:
        self.leases.append(lease)
        self._news.set()

    def on_lost(self) -> None:
        self.losses += 1
        self._news.set()

    async def until(self, condition: object) -> None:
        assert callable(condition)
        async with asyncio.timeout(WAIT_S):
            while not condition():
                self._news.clear()
                await self._news.wait()


async def test_a_lease_is_kept_alive_past_its_time_and_revoked_at_the_end(tmp_path: Path) -> None:
    held = Held()
    async with start_etcd(tmp_path) as server, connect_etcd(config_for(server.endpoint)) as etcd:
        async with etcd.session(LEASE_S, held.on_held, held.on_lost) as session:
            await held.until(lambda: held.leases)
            await etcd.put("/k", b"1", lease=session.lease)
            async with watching(etcd, "/k") as seen:
                with pytest.raises(TimeoutError):  # the time that is watched is the point here
                    async with asyncio.timeout(expiring(LEASE_S + 2)):
                        await held.until(lambda: held.losses)
                assert seen.changes == []
        assert (await etcd.range("/k")).kvs == ()
        assert "found 0 leases" in etcdctl(server.endpoint, "lease", "list")
    assert held.leases == [held.leases[0]]


async def test_a_lease_that_was_revoked_is_granted_again(tmp_path: Path) -> None:
    held = Held()
    async with (
        start_etcd(tmp_path) as server,
        connect_etcd(config_for(server.endpoint)) as etcd,
        etcd.session(LEASE_S, held.on_held, held.on_lost) as session,
    ):
        await held.until(lambda: held.leases)
        etcdctl(server.endpoint, "lease", "revoke", f"{session.lease:x}")
        await held.until(lambda: len(held.leases) == 2)
        assert held.losses == 1
        assert held.leases[0] != held.leases[1] == session.lease


async def test_a_lease_outlives_a_restart_of_etcd(tmp_path: Path) -> None:
    held = Held()
    async with (
        start_etcd(tmp_path, fsync=True) as server,
        connect_etcd(config_for(server.endpoint)) as etcd,
        etcd.session(LEASE_S, held.on_held, held.on_lost) as session,
    ):
        await held.until(lambda: held.leases)
        await etcd.put("/k", b"1", lease=session.lease)
        server.kill()
        await held.until(lambda: held.losses == 1)  # the whole of its time has passed in silence
        assert not session.is_held
        await server.restart()
        await held.until(lambda: len(held.leases) == 2)
        assert held.leases[0] == held.leases[1]
        assert [kv.lease for kv in (await etcd.range("/k")).kvs] == [session.lease]


async def test_a_lease_is_granted_when_etcd_comes_late(tmp_path: Path) -> None:
    held = Held()
    (port,) = free_ports(1)
    config = config_for(f"127.0.0.1:{port}", timeout_s=expiring(0.5), connect_timeout_s=0.3)
    async with connect_etcd(config) as etcd, etcd.session(LEASE_S, held.on_held, held.on_lost) as session:
        assert session.lease == 0
        async with start_etcd(tmp_path, port=port):
            await held.until(lambda: held.leases)


async def test_closing_a_session_without_etcd_does_not_hang(tmp_path: Path) -> None:
    held = Held()
    async with (
        start_etcd(tmp_path) as server,
        connect_etcd(config_for(server.endpoint)) as etcd,
        asyncio.timeout(WAIT_S),
        etcd.session(10.0, held.on_held, held.on_lost),
    ):
        await held.until(lambda: held.leases)
        server.kill()


@contextmanager
def with_auth(server: EtcdServer) -> Iterator[str]:
    """root and `dynamo`, who may touch /dynamo/ only. Yields the server's endpoint."""
    for command in (
        "user add root:rootpass",
        "user grant-role root root",
        "role add dynamo",
        "role grant-permission dynamo --prefix=true readwrite /dynamo/",
        "user add dynamo:sesame",
        "user grant-role dynamo dynamo",
        "auth enable",
    ):
        etcdctl(server.endpoint, *command.split())
    yield server.endpoint


async def test_a_login_is_renewed_when_its_token_has_expired(tmp_path: Path) -> None:
    flags = ("--auth-token-ttl", "1")
    async with start_etcd(tmp_path, extra_flags=flags) as server:
        with with_auth(server) as endpoint:
            held = Held()
            async with (
                connect_etcd(config_for(endpoint, user="dynamo", password="sesame")) as etcd,
                etcd.session(LEASE_S, held.on_held, held.on_lost) as session,
            ):
                await held.until(lambda: held.leases)
                await etcd.put("/dynamo/k", b"1", lease=session.lease)
                # The token's time begins anew with each use, so for a while nothing but the clock may run.
                await asyncio.to_thread(_until_token_expired, server)
                assert len((await etcd.range("/dynamo/", prefix=True)).kvs) == 1
                async with watching(etcd, "/dynamo/") as seen:
                    await asyncio.to_thread(_until_token_expired, server)
                    await etcd.put("/dynamo/k", b"2", lease=session.lease)
                    await seen.until(lambda: len(seen.changes) == 1)
                with pytest.raises(Forbidden):
                    await etcd.put("/elsewhere", b"")
                with pytest.raises(Forbidden):
                    async with aclosing(etcd.watch("/elsewhere", 1)) as batches:
                        await anext(batches)
                assert held.losses == 0


def _until_token_expired(server: EtcdServer) -> None:
    """etcd logs it at debug level only; its clock is what has to pass."""
    deadline = time.monotonic() + 2.5
    while time.monotonic() < deadline:
        time.sleep(0.1)


async def test_a_watch_reconnects_with_an_expired_token(tmp_path: Path) -> None:
    async with start_etcd(tmp_path, extra_flags=("--auth-token-ttl", "1")) as server:
        with with_auth(server):
            async with (
                start_proxy(server.port) as proxy,
                connect_etcd(config_for(f"127.0.0.1:{proxy.port}", user="dynamo", password="sesame")) as etcd,
                connect_etcd(config_for(server.endpoint, user="root", password="rootpass")) as root,
                watching(etcd, "/dynamo/") as seen,
            ):
                await proxy.refuse()
                await asyncio.to_thread(_until_token_expired, server)
                proxy.heal()
                await root.put("/dynamo/k", b"1")
                await seen.until(lambda: seen.changes == [("/dynamo/k", b"1")])


async def test_a_wrong_password_is_reported_without_showing_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with start_etcd(tmp_path) as server:
        with with_auth(server) as endpoint:
            async with connect_etcd(config_for(endpoint, user="dynamo", password="swordfish")) as etcd:
                with pytest.raises(Unauthenticated, match="invalid user ID or password") as error:
                    await etcd.range("/dynamo/k")
            async with connect_etcd(config_for(endpoint)) as etcd:
                with pytest.raises(Unauthenticated):
                    await etcd.range("/dynamo/k")
    assert "swordfish" not in repr(error.value) + str(error.value) + caplog.text


async def test_a_user_is_not_minded_where_etcd_asks_for_none(etcd_server: EtcdServer, namespace: str) -> None:
    async with connect_etcd(config_for(etcd_server.endpoint, user="u", password="p")) as etcd:
        await etcd.put(f"/{namespace}", b"1")


async def test_mutual_tls(tmp_path: Path) -> None:
    ca, stranger = trustme.CA(), trustme.CA()
    server_cert, client_cert = ca.issue_cert("localhost", "127.0.0.1"), ca.issue_cert("worker@example")
    files = {name: tmp_path / f"{name}.pem" for name in ("ca", "stranger", "cert", "key", "client_cert", "client_key")}
    ca.cert_pem.write_to_path(files["ca"])
    stranger.cert_pem.write_to_path(files["stranger"])
    for cert, chain, key in ((server_cert, "cert", "key"), (client_cert, "client_cert", "client_key")):
        cert.private_key_pem.write_to_path(files[key])
        for pem in cert.cert_chain_pems:
            pem.write_to_path(files[chain], append=True)
    tls = ServerTls(files["cert"], files["key"], files["ca"])
    own = {"tls_cert_file": str(files["client_cert"]), "tls_key_file": str(files["client_key"])}
    async with start_etcd(tmp_path / "etcd", tls=tls) as server:
        for host in ("localhost", "127.0.0.1"):
            config = config_for(f"https://{host}:{server.port}", tls_ca_file=str(files["ca"]), **own)
            async with connect_etcd(config) as etcd:
                await etcd.put("/k", b"1")
        wrong = {"timeout_s": 1.0, "connect_timeout_s": 0.5}
        for settings in (
            {"tls_ca_file": str(files["stranger"]), **own},
            {"tls_ca_file": str(files["ca"])},
            {"tls_ca_file": str(files["ca"]), "server_name": "elsewhere.example", **own},
        ):
            async with connect_etcd(config_for(server.endpoint, **settings, **wrong)) as etcd:
                with pytest.raises(EtcdUnavailable):
                    await etcd.range("/k")
