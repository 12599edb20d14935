"""Registrations and directories through a real etcd that fails in every way we know."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from dynamo.common.discovery import Instance
from dynamo.common.errors import InvalidRequest
from dynamo.common.etcd import Etcd, Events, KeyValue, Listing, Reset, connect_etcd
from dynamo.common.model_card import ModelCard, ModelKind, TensorSpec
from dynamo.common.names import Endpoint, InstanceId, new_instance_id
from dynamo.common.options import EtcdOptions
from dynamo.common.process.ports import free_ports
from dynamo.frontend.fleet.directory import Directory, open_directory
from dynamo.worker.process.registration import Registration, registered
from tests.support.proxy import start_proxy
from tests.support.servers import EtcdServer, etcdctl, start_etcd
from tests.support.waiting import WAIT_S, expiring

TTL_S = 5.0
"""A third of it passes between two signs of life, which a busy machine still gives in time."""


def config_for(endpoint: str) -> EtcdOptions:
    return EtcdOptions(endpoints=(endpoint,), max_backoff_s=0.2, connect_timeout_s=0.5)


def instance(namespace: str, model: str = "adder", number: int | None = None) -> Instance:
    endpoint = Endpoint(namespace)
    number_id = new_instance_id() if number is None else InstanceId(number)
    inputs = (TensorSpec(name="x", datatype="FP32", shape=(4,)),)
    return Instance(
        id=number_id,
        endpoint=endpoint,
        subject=endpoint.rpc_subject(number_id),
        card=ModelCard(name=model, kind=ModelKind.TENSOR, inputs=inputs),
        started_at=time.time(),
    )


async def until(directory: Directory, condition: Callable[[], object]) -> None:
    """Waits until a change of the directory has made `condition` true."""
    changed = asyncio.Event()
    directory.on_change(changed.set)
    async with asyncio.timeout(WAIT_S):
        await directory.ready.wait()
        while not condition():
            await changed.wait()
            changed.clear()


async def until_registered(registration: Registration) -> None:
    async with asyncio.timeout(WAIT_S):
        await registration.registered.wait()


async def until_put_after(etcd: Etcd, key: str, revision: int) -> KeyValue:
    """Return the key as soon as it was put again."""
    async with asyncio.timeout(WAIT_S):
        while True:
            for kv in (await etcd.range(key)).kvs:
                if kv.mod_revision > revision:
                    return kv
            await asyncio.sleep(0.01)


async def poll(condition: Callable[[], object]) -> None:
    """For states that are not announced."""
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.01)


def ids(directory: Directory, model: str = "adder") -> list[int]:
    return [instance.id for instance in directory.instances(model)]


@pytest.fixture
async def etcd(etcd_server: EtcdServer) -> AsyncIterator[Etcd]:
    async with connect_etcd(config_for(etcd_server.endpoint)) as etcd:
        yield etcd


@asynccontextmanager
async def own_etcd(folder: Path) -> AsyncIterator[tuple[EtcdServer, Etcd]]:
    async with start_etcd(folder) as server, connect_etcd(config_for(server.endpoint)) as etcd:
        yield server, etcd


async def test_an_instance_is_seen_while_it_is_registered(etcd: Etcd, namespace: str) -> None:
    one = instance(namespace)
    news: list[tuple[Sequence[Instance], Sequence[Instance]]] = []
    async with open_directory(etcd, namespace) as directory:
        directory.on_registrations(lambda added, removed: news.append((added, removed)))
        await until(directory, lambda: True)
        assert directory.instances("adder") == ()
        assert directory.card("adder") is None
        async with registered(etcd, [one], ttl_s=600):
            await until(directory, lambda: directory.instances("adder"))
            assert directory.instances("adder") == (one,)
            assert directory.models() == ["adder"]
            assert directory.cards() == {"adder": one.card}
            assert not directory.stale
        # The lease has most of its time left, so it is the deregistration that is seen here.
        async with asyncio.timeout(120):
            await until(directory, lambda: not directory.instances("adder"))
    assert news == [((one,), ()), ((), (one,))]


async def test_what_is_registered_is_readable_json_under_the_agreed_key(
    etcd: Etcd, etcd_server: EtcdServer, namespace: str
) -> None:
    one = instance(namespace, "a.b/c")
    async with registered(etcd, [one]) as registration:
        await until_registered(registration)
        key = f"/dynamo/v1/{namespace}/backend/generate/a%2Eb%2Fc/{one.id:x}"
        assert f'"subject":"{one.subject}"' in etcdctl(etcd_server.endpoint, "get", key)


async def test_a_directory_sees_its_namespace_or_all(etcd: Etcd, namespace: str) -> None:
    other = f"{namespace}-other"
    async with (
        open_directory(etcd, namespace) as own,
        open_directory(etcd, None) as everything,
        registered(etcd, [instance(namespace, number=1)]),
        registered(etcd, [instance(other, number=2)]),
    ):
        await until(everything, lambda: {1, 2} <= set(ids(everything)))
        await until(own, lambda: ids(own))
        assert ids(own) == [1]


async def test_models_come_and_go_at_run_time(etcd: Etcd, namespace: str) -> None:
    adder, other = instance(namespace, number=1), instance(namespace, "other", number=1)
    async with open_directory(etcd, namespace) as directory, registered(etcd, [adder]) as registration:
        assert await registration.update([adder, other])
        await until(directory, lambda: directory.models() == ["adder", "other"])
        assert await registration.update([other])
        await until(directory, lambda: directory.models() == ["other"])
        assert await registration.update([])
        await until(directory, lambda: directory.models() == [])
        with pytest.raises(InvalidRequest, match="two registrations"):
            await registration.update([adder, adder])


async def test_an_instance_that_died_is_gone_with_its_lease(etcd_server: EtcdServer, etcd: Etcd, namespace: str) -> None:
    async with (
        open_directory(etcd, namespace) as directory,
        start_proxy(etcd_server.port) as proxy,
        connect_etcd(config_for(f"127.0.0.1:{proxy.port}")) as worker_etcd,
        registered(worker_etcd, [instance(namespace)], ttl_s=TTL_S) as registration,
    ):
        await until(directory, lambda: directory.instances("adder"))
        await proxy.refuse()
        await until(directory, lambda: not directory.instances("adder"))
        # And alive after all: the same instance again, under a new lease.
        await poll(lambda: not registration.registered.is_set())
        proxy.heal()
        await until(directory, lambda: directory.instances("adder"))


async def test_a_revoked_lease_is_replaced_and_the_instance_stays(etcd: Etcd, etcd_server: EtcdServer, namespace: str) -> None:
    one = instance(namespace)
    news: list[tuple[Sequence[Instance], Sequence[Instance]]] = []
    async with open_directory(etcd, namespace) as directory, registered(etcd, [one], ttl_s=TTL_S):
        directory.on_registrations(lambda added, removed: news.append((added, removed)))
        await until(directory, lambda: directory.instances("adder"))
        (kv,) = (await etcd.range(one.key)).kvs
        etcdctl(etcd_server.endpoint, "lease", "revoke", f"{kv.lease:x}")
        again = await until_put_after(etcd, one.key, kv.mod_revision)
        assert again.lease != kv.lease
        other = instance(namespace)
        async with registered(etcd, [other]):
            await until(directory, lambda: len(directory.instances("adder")) == 2)
            assert news == [((one,), ()), ((other,), ())]


async def test_a_registration_deleted_by_hand_comes_back(etcd: Etcd, etcd_server: EtcdServer, namespace: str) -> None:
    one = instance(namespace)
    async with (
        open_directory(etcd, namespace) as directory,
        registered(etcd, [one], check_s=0.2) as registration,
    ):
        await until_registered(registration)
        await until(directory, lambda: directory.instances("adder"))
        (kv,) = (await etcd.range(one.key)).kvs
        etcdctl(etcd_server.endpoint, "del", "--prefix", f"/dynamo/v1/{namespace}/")
        await until_put_after(etcd, one.key, kv.mod_revision)
        assert list(directory.instances("adder")) == [one]


async def test_everything_may_start_before_etcd(tmp_path: Path, namespace: str) -> None:
    (port,) = free_ports(1)
    async with (
        connect_etcd(config_for(f"127.0.0.1:{port}")) as etcd,
        open_directory(etcd, namespace) as directory,
        registered(etcd, [instance(namespace, number=1)], ttl_s=TTL_S) as registration,
    ):
        assert directory.stale
        assert not directory.ready.is_set()
        assert directory.instances("adder") == ()
        assert not await registration.update([instance(namespace, number=1)], timeout_s=expiring(0.1))
        async with start_etcd(tmp_path, port=port):
            await until(directory, lambda: ids(directory) == [1])
            await poll(lambda: not directory.stale)


@pytest.mark.slow  # an outage
async def test_an_outage_of_etcd_changes_nothing_and_all_join_when_it_is_back(tmp_path: Path, namespace: str) -> None:
    """It lasts longer than the lease, and a worker and a frontend start meanwhile."""
    news: list[tuple[Sequence[Instance], Sequence[Instance]]] = []
    async with (
        own_etcd(tmp_path) as (server, etcd),
        AsyncExitStack() as late,
        open_directory(etcd, namespace) as directory,
        registered(etcd, [instance(namespace, number=1)], ttl_s=TTL_S) as registration,
    ):
        await until(directory, lambda: ids(directory) == [1])
        await until_registered(registration)
        directory.on_registrations(lambda added, removed: news.append((added, removed)))
        server.kill()
        await poll(lambda: directory.stale and not registration.registered.is_set())
        late_etcd = await late.enter_async_context(connect_etcd(config_for(server.endpoint)))
        newcomer = await late.enter_async_context(open_directory(late_etcd, namespace))
        await late.enter_async_context(registered(late_etcd, [instance(namespace, number=2)], ttl_s=TTL_S))
        assert ids(directory) == [1]
        await server.restart()
        await until(directory, lambda: ids(directory) == [1, 2])
        await until(newcomer, lambda: ids(newcomer) == [1, 2])
        await poll(lambda: not directory.stale)
        await until_registered(registration)
        assert [removed for _, removed in news] == [()]


@pytest.mark.slow  # an outage
async def test_what_ended_during_an_outage_of_the_frontends_link_is_gone_afterwards(
    etcd_server: EtcdServer, etcd: Etcd, namespace: str
) -> None:
    async with (
        start_proxy(etcd_server.port) as proxy,
        connect_etcd(config_for(f"127.0.0.1:{proxy.port}")) as frontend_etcd,
        open_directory(frontend_etcd, namespace) as directory,
    ):
        async with registered(etcd, [instance(namespace, number=1)]):
            await until(directory, lambda: ids(directory) == [1])
            await proxy.refuse()
        async with registered(etcd, [instance(namespace, number=2)]) as registration:
            await until_registered(registration)
            assert ids(directory) == [1]
            proxy.heal()
            await until(directory, lambda: ids(directory) == [2])


@pytest.mark.slow  # an outage
async def test_when_etcd_lost_its_data_the_view_is_kept_until_the_workers_are_back(tmp_path: Path, namespace: str) -> None:
    news: list[tuple[Sequence[Instance], Sequence[Instance]]] = []
    async with (
        own_etcd(tmp_path) as (server, etcd),
        start_proxy(server.port) as link,
        connect_etcd(config_for(f"127.0.0.1:{link.port}")) as worker_etcd,
        open_directory(etcd, namespace) as directory,
        registered(worker_etcd, [instance(namespace, number=1)], ttl_s=TTL_S) as living,
    ):
        async with registered(etcd, [instance(namespace, number=2)], ttl_s=TTL_S):
            await until(directory, lambda: ids(directory) == [1, 2])
            await until_registered(living)
            directory.on_registrations(lambda added, removed: news.append((added, removed)))
            server.kill()
            shutil.rmtree(tmp_path / "data")
            await poll(lambda: directory.stale)
        await link.refuse()
        await server.restart()
        await poll(lambda: not directory.stale)
        assert ids(directory) == [1, 2]
        link.heal()
        await until(directory, lambda: ids(directory) == [1])
        assert living.registered.is_set()
        assert [[i.id for i in removed] for _, removed in news] == [[2]]


async def test_a_reconcile_finds_what_the_watch_missed(etcd: Etcd, namespace: str) -> None:
    """A watch that is deaf stands for etcd's known ways to lose events."""

    class Deaf(Etcd):
        def __init__(self) -> None: ...

        async def range(self, key: str, *, prefix: bool = False, revision: int = 0) -> Listing:
            return await etcd.range(key, prefix=prefix, revision=revision)

        def watch(
            self,
            prefix: str,
            start_revision: int = 0,
            on_connected: Callable[[bool], None] = lambda connected: None,
        ) -> AsyncGenerator[Events | Reset, None]:
            async def first_batch_only() -> AsyncGenerator[Events | Reset, None]:
                changes = etcd.watch(prefix, start_revision, on_connected)
                yield await anext(changes)
                await changes.aclose()
                await asyncio.Event().wait()

            return first_batch_only()

    deaf = Deaf()
    async with open_directory(deaf, namespace, reconcile_s=0.1) as directory:
        await until(directory, lambda: True)
        async with registered(etcd, [instance(namespace, number=1)]):
            await until(directory, lambda: ids(directory) == [1])
        await until(directory, lambda: ids(directory) == [])


async def test_a_mark_ends_by_itself_by_mark_up_and_by_registering_again(
    etcd: Etcd, etcd_server: EtcdServer, namespace: str
) -> None:
    one = instance(namespace, number=1)
    async with open_directory(etcd, namespace) as directory, registered(etcd, [one]):
        await until(directory, lambda: ids(directory) == [1])
        directory.mark_down(one.id, 0.5)
        await until(directory, lambda: ids(directory) == [])
        assert list(directory.registered()) == [one]
        await until(directory, lambda: ids(directory) == [1])
        directory.mark_down(one.id, 60)
        await until(directory, lambda: ids(directory) == [])
        directory.mark_up(one.id)
        await until(directory, lambda: ids(directory) == [1])
        directory.mark_down(one.id, 60)
        await until(directory, lambda: ids(directory) == [])
        (kv,) = (await etcd.range(one.key)).kvs
        await etcd.put(one.key, kv.value, lease=kv.lease)
        await until(directory, lambda: ids(directory) == [1])


async def test_strange_registrations_do_not_disturb(etcd: Etcd, namespace: str) -> None:
    prefix = f"/dynamo/v1/{namespace}"
    async with open_directory(etcd, namespace) as directory:
        await etcd.put(f"{prefix}/backend/generate/adder/1", b"\xff not json")
        await etcd.put(f"{prefix}/\udcff", b"{}")
        async with registered(etcd, [instance(namespace, number=2)]):
            await until(directory, lambda: ids(directory) == [2])
    await etcd.delete(f"{prefix}/", prefix=True)


async def test_a_listener_that_fails_does_not_keep_the_news_from_others(
    etcd: Etcd, namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    def fails() -> None:
        raise ValueError("no")

    async with open_directory(etcd, namespace) as directory:
        directory.on_change(fails)
        async with registered(etcd, [instance(namespace, number=1)]):
            await until(directory, lambda: ids(directory) == [1])
    assert "a subscriber of the directory failed" in caplog.text


async def test_two_directories_converge_while_everything_breaks(tmp_path: Path, namespace: str) -> None:
    """Workers come and go while links are cut and etcd is killed; at the end both views are etcd's own."""
    async with (
        start_etcd(tmp_path) as server,
        start_proxy(server.port) as left_link,
        start_proxy(server.port) as right_link,
        start_proxy(server.port) as worker_link,
        connect_etcd(config_for(f"127.0.0.1:{left_link.port}")) as left_etcd,
        connect_etcd(config_for(f"127.0.0.1:{right_link.port}")) as right_etcd,
        connect_etcd(config_for(f"127.0.0.1:{worker_link.port}")) as worker_etcd,
        open_directory(left_etcd, namespace, reconcile_s=0.5) as left,
        open_directory(right_etcd, namespace) as right,
        AsyncExitStack() as workers,
    ):
        await until(left, lambda: True)
        await until(right, lambda: True)
        for number in range(6):
            one = instance(namespace, number=number + 1)
            if number % 2:
                await workers.enter_async_context(registered(worker_etcd, [one], ttl_s=TTL_S))
            else:
                async with registered(worker_etcd, [one], ttl_s=TTL_S) as registration:
                    await until_registered(registration)
            await (left_link, right_link, worker_link)[number % 3].cut()
            if number == 3:
                server.kill()
                await server.restart()
        for directory in (left, right):
            await until(directory, lambda directory=directory: ids(directory) == [2, 4, 6])  # type: ignore[misc]
            await poll(lambda directory=directory: not directory.stale)  # type: ignore[misc]
        keys = etcdctl(server.endpoint, "get", "--prefix", "/dynamo/", "--keys-only").split()
        assert keys == [i.key for i in left.instances("adder")] == [i.key for i in right.instances("adder")]
