"""etcd and NATS away, hung or killed under load: requests wait until they are back; none runs too late or without a caller."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Sequence
from pathlib import Path

import grpc
import grpc.aio
import pytest

from dynamo.common.messaging.nats.connection import connect_nats
from dynamo.common.messaging.request_plane.client import open_client
from dynamo.common.messaging.request_plane.incoming import Incoming
from dynamo.common.messaging.request_plane.server import serve_requests
from dynamo.common.names import Endpoint, new_instance_id
from dynamo.common.options import NatsOptions
from dynamo.frontend.fleet.directory import ABSENT_S
from tests.support.fleet import Fleet, FleetWorker, Text, echo_request, text_request
from tests.support.processes import At
from tests.support.proxy import start_proxy
from tests.support.servers import EtcdServer, NatsServer, etcdctl, start_etcd, start_etcd_cluster, start_nats
from tests.support.waiting import WAIT_S, expiring

pytestmark = pytest.mark.slow

SIM = ("--model", "sim:blocks=4000,speedup=1,seed=3")


@pytest.mark.parametrize("how", ["stopped", "killed", "hung"])
async def test_nats_away_for_two_seconds_fails_no_request_that_has_time_and_all_that_have_not(
    etcd_server: EtcdServer, tmp_path: Path, namespace: str, how: str
) -> None:
    async with start_nats(tmp_path) as nats, Fleet(etcd_server, nats, namespace, ("--model", "echo", *SIM)) as fleet:
        await fleet.start(workers=2)
        async with fleet.frontends[0].client() as client:
            story = text_request("a long story", 150)
            expected = (await client.text(story)).text
            text = Text()
            async with client.load(8) as load, asyncio.TaskGroup() as tasks:
                tasks.create_task(client.text(story, text))
                await text.at_least(3)
                await load.completed(100)
                if how == "stopped":
                    await nats.stop()
                elif how == "killed":
                    os.kill(nats.pid, signal.SIGKILL)
                else:
                    os.kill(nats.pid, signal.SIGSTOP)
                hasty = [tasks.create_task(fails(client.infer(echo_request(model="echo"), expiring(0.3)))) for _ in range(10)]
                await asyncio.sleep(expiring(2.0))  # the outage itself
                _, waiting = await asyncio.wait(hasty, timeout=WAIT_S)
                assert not waiting
                if how == "hung":
                    os.kill(nats.pid, signal.SIGCONT)
                else:
                    await nats.restart()
                await load.completed(100)
            assert {task.result() for task in hasty} == {grpc.StatusCode.DEADLINE_EXCEEDED}
            assert load.failures == []
            assert text.text == expected
            assert text.reason == "length"
            ran = [(await fleet.statistics(worker)).inference_count for worker in fleet.workers]
        # What was being served when the connection broke ran again elsewhere; what had waited for the connection ran once. What a
        # nats-server that hangs has in its sockets is delivered when it goes on, and may run before it is known to be cancelled.
        assert load.count <= sum(ran) <= load.count + (len(hasty) if how == "hung" else 8)


async def fails(request: Awaitable[object]) -> grpc.StatusCode:
    try:
        await request
    except grpc.aio.AioRpcError as error:
        return error.code()
    raise AssertionError("it got a response")


async def test_what_is_sent_after_the_socket_broke_and_before_that_is_noticed_is_not_lost(
    nats_server: NatsServer, namespace: str
) -> None:
    async def handle(incoming: Incoming) -> None:
        incoming.end(bytes(incoming.body))

    endpoint, instance = Endpoint(namespace), new_instance_id()
    config = NatsOptions(servers=(nats_server.url,))
    async with (
        connect_nats(config, "worker") as theirs,
        connect_nats(config, "frontend") as ours,
        serve_requests(theirs, endpoint, instance, {"echo": handle}),
        open_client(ours, namespace) as client,
        asyncio.timeout(120),
    ):
        ours.abort()
        stream = client.open(instance, endpoint.rpc_subject(instance), "echo", b"hello")
        assert bytes(await stream.result()) == b"hello"


async def test_etcd_away_for_longer_than_a_lease_while_workers_die_leave_and_join(
    nats_server: NatsServer, tmp_path: Path, namespace: str
) -> None:
    model = ("--model", "echo", "--lease-ttl-s", "2")
    async with start_etcd(tmp_path) as etcd, Fleet(etcd, nats_server, namespace, model) as fleet:
        await fleet.start(workers=3)
        [front] = fleet.frontends
        dying, leaving, staying = fleet.workers
        async with front.client() as client:
            async with client.load(4) as load:
                await etcd.stop()
                end_of_outage = asyncio.create_task(asyncio.sleep(expiring(5)))
                await load.completed(100)
                await dying.killed()
                await load.completed(100)
                leaving.process.terminate()
                assert await leaving.process.ended() == 0
                await load.completed(100)
                joining = await fleet.add_worker()
                late_front = await fleet.add_frontend()
                await joining.serving()
                await late_front.process.logged("waiting for etcd")
                status, health = await front.process.health()
                assert (status, health["etcd"]) == (200, "stale")
                await end_of_outage
                await load.completed(100)
                await etcd.restart()
                await asyncio.gather(front.sees(joining, staying), late_front.sees(joining, staying))
                await load.completed(100)
            assert load.failures == []
            async with late_front.client() as other:
                await asyncio.gather(*(other.infer(echo_request()) for _ in range(10)))
                for worker in (joining, staying):
                    assert (await other.infer(echo_request(), x_dynamo_instance=worker.instance)).id == "1"


async def test_a_pause_of_everything_that_outlasts_the_leases_fails_no_request(tmp_path: Path, namespace: str) -> None:
    model = ("--model", "echo", *SIM, "--lease-ttl-s", "2")
    async with (
        start_etcd(tmp_path / "etcd") as etcd,
        start_nats(tmp_path / "nats") as nats,
        Fleet(etcd, nats, namespace, model) as fleet,
    ):
        await fleet.start(workers=1)
        [front], [only] = fleet.frontends, fleet.workers
        text = Text()
        async with front.client() as client:
            async with client.load(4) as load, asyncio.TaskGroup() as tasks:
                tasks.create_task(client.text(text_request("a long story", 150), text))
                await text.at_least(3)
                await load.completed(100)
                everything = [etcd.pid, nats.pid, only.pid, front.process.process.pid]
                for pid in everything:
                    fleet.pause(pid)
                await asyncio.sleep(expiring(4.0))  # twice the life of a lease
                for pid in everything:
                    fleet.resume(pid)
                await only.process.logged("a new one is granted")
                await load.completed(100)
            assert load.failures == []
            assert text.reason == "length"


async def test_workers_whose_leases_expire_while_they_are_cut_off_from_etcd_serve_on_until_they_die(
    nats_server: NatsServer, tmp_path: Path, namespace: str
) -> None:
    model = ("--model", "echo", "--lease-ttl-s", "2")
    async with (
        start_etcd(tmp_path) as etcd,
        start_proxy(etcd.port) as link,
        Fleet(At(f"http://127.0.0.1:{link.port}"), nats_server, namespace, model) as cut_off,
        Fleet(etcd, nats_server, namespace) as fleet,
    ):
        await cut_off.start(workers=2, frontends=0)
        workers, front = cut_off.workers, await fleet.add_frontend()
        await front.sees(*workers)
        async with front.client() as client:
            async with client.load(4) as load:
                await load.completed(100)
                await link.refuse()
                await until_gone(etcd, workers)
                await asyncio.sleep(expiring(2.5 * ABSENT_S))
                await load.completed(100)
                await front.sees(*workers)
                dying, staying = workers
                await dying.killed()
                await front.sees(staying)
                link.heal()
                await staying.process.logged("a new one is granted")
                await load.completed(100)
            assert load.failures == []


async def until_gone(etcd: EtcdServer, workers: Sequence[FleetWorker]) -> None:
    """Return when etcd has no registration of these workers."""
    instances = [worker.instance for worker in workers]

    async with asyncio.timeout(120):
        while True:
            keys = await asyncio.to_thread(etcdctl, etcd.endpoint, "get", "/dynamo/v1/", "--prefix", "--keys-only")
            if not any(instance in keys for instance in instances):
                return


async def test_etcd_without_quorum_for_longer_than_a_lease_fails_no_request(
    nats_server: NatsServer, tmp_path: Path, namespace: str
) -> None:
    async with start_etcd_cluster(tmp_path) as etcd:
        members = At(",".join(server.endpoint for server in etcd.servers))
        async with Fleet(members, nats_server, namespace, ("--model", "echo", "--lease-ttl-s", "2")) as fleet:
            await fleet.start(workers=2)
            [front], workers = fleet.frontends, fleet.workers
            async with front.client() as client:
                async with client.load(4) as load:
                    for _ in range(2):
                        leader = await etcd.find_leader()
                        others = [server for server in etcd.servers if server is not leader]
                        for server in (leader, others[0]):
                            os.kill(server.pid, signal.SIGSTOP)
                        await asyncio.sleep(expiring(5.0))  # without quorum, for twice the life of a lease
                        for server in (leader, others[0]):
                            os.kill(server.pid, signal.SIGCONT)
                        await asyncio.wait_for(etcd.find_leader(), 120)
                        await asyncio.sleep(expiring(1.5 * ABSENT_S))
                        await load.completed(100)
                        await front.sees(*workers)
                assert load.failures == []
