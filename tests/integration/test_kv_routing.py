"""KV-aware routing over a real etcd and nats-server: simulated engines, their publishers, and a frontend that follows them."""

from __future__ import annotations

import time
from contextlib import AsyncExitStack
from dataclasses import replace

from dynamo.common.generation import Stop
from dynamo.common.kv.events import KvMessage, KvUpdate, message_encoder
from dynamo.common.messaging.nats.connection import connect_nats
from dynamo.common.names import Endpoint
from dynamo.common.options import NatsOptions
from dynamo.frontend.preprocess.text import TextRequest
from dynamo.frontend.security.accounts import ANONYMOUS, KeyAccount
from dynamo.frontend.security.keys import ApiKey
from dynamo.frontend.serving.call import Call
from tests.support.plane import generate
from tests.support.servers import EtcdServer, NatsServer
from tests.support.sim_fleet import KV, prompt, sim_fleet
from tests.support.waiting import until


async def test_a_prompt_goes_where_its_prefix_lies(etcd_server: EtcdServer, nats_server: NatsServer, namespace: str) -> None:
    async with sim_fleet(etcd_server, nats_server, namespace, routing=KV) as f:
        first = [await f.generate(prompt(number)) for number in range(6)]
        assert all(overlap == 0 for _, overlap, _ in first)
        await until(f.is_exact)
        for number, (instance, _, _) in enumerate(first):
            again, overlap, summary = await f.generate(prompt(number))
            assert again == instance
            assert overlap > 10
            assert summary.cached_tokens >= 16 * overlap


async def test_a_key_neither_uses_nor_notices_what_is_cached_for_another(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str
) -> None:
    alice, bob = (KeyAccount(ApiKey(name=name, salt=b"", digest=b"")) for name in ("alice", "bob"))
    async with sim_fleet(etcd_server, nats_server, namespace, routing=KV) as f:
        first, _, _ = await f.generate(prompt(1), account=alice)
        await until(f.is_exact)
        again, overlap, summary = await f.generate(prompt(1), account=alice)
        assert again == first
        assert overlap > 10
        assert summary.cached_tokens >= 16 * overlap
        for account in (bob, ANONYMOUS):
            _, overlap, summary = await f.generate(prompt(1), account=account)
            assert (overlap, summary.cached_tokens) == (0, 0)
        await until(f.is_exact)


async def test_lost_repeated_and_stale_updates_are_made_up_for(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str
) -> None:
    async with sim_fleet(etcd_server, nats_server, namespace, routing=KV, workers=1) as f:
        (instance,) = f.engines
        await f.generate(prompt(1))
        await until(f.is_exact)
        # Updates that no frontend hears of, until the next one shows the hole.
        f.engines[instance].kv.store([1, 2, 3])
        assert f.engines[instance].kv.take_update() is not None
        await f.generate(prompt(2))
        await until(f.is_exact)
        # A repeated one changes nothing; one from far ahead makes the frontend ask.
        subject = Endpoint(namespace=namespace).kv_subject(instance)
        async with connect_nats(NatsOptions(servers=(nats_server.url,)), "other") as connection:
            for number in (0, 0, 900):
                connection.publish_nowait(subject, message_encoder.encode(KvMessage("sim", KvUpdate(number))))
            connection.publish_nowait(subject, b"\xc1 not a message")
            await connection.client.flush()
        await f.generate(prompt(3))
        f.engines[instance].kv.store([4])  # the last one is lost: the load report tells that there was one
        f.engines[instance].kv.take_update()
        await until(f.is_exact)


async def test_a_frontend_that_starts_late_learns_everything(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str
) -> None:
    async with sim_fleet(etcd_server, nats_server, namespace, routing=KV, frontends=2) as f:
        instance, _, _ = await f.generate(prompt(1), frontend=0)
        await until(lambda: f.is_exact(0) and f.is_exact(1))
        again, overlap, _ = await f.generate(prompt(1), frontend=1)
        assert again == instance
        assert overlap > 10


async def test_an_instance_that_left_is_forgotten(etcd_server: EtcdServer, nats_server: NatsServer, namespace: str) -> None:
    async with AsyncExitStack() as leaving, sim_fleet(etcd_server, nats_server, namespace, routing=KV, workers=1) as f:
        worker = await leaving.enter_async_context(f.worker())
        await until(lambda: len(f.frontends[0].plane.models.instances("sim")) == 2)
        placed = [(await f.generate(prompt(number)))[0] for number in range(8)]
        assert worker.instance in placed
        index = f.router().index("sim")
        await until(lambda: bool(index.held(worker.instance)))
        await leaving.aclose()
        await until(lambda: not index.held(worker.instance))
        assert {(await f.generate(prompt(number)))[0] for number in range(8)} == {f.workers[0].instance}


async def test_bookings_are_shared_between_frontends(etcd_server: EtcdServer, nats_server: NatsServer, namespace: str) -> None:
    async with sim_fleet(etcd_server, nats_server, namespace, routing=replace(KV, replica_sync=True), frontends=2) as f:
        other = f.router(1).loads
        request = TextRequest(model="sim", prompt=prompt(1), stop=Stop(max_tokens=20_000, ignore_eos=True))
        async with generate(f.frontends[0].plane, request, Call(account=ANONYMOUS, request_id="long")) as generation:
            await generation.read()
            await until(lambda: len(other) == 1)
        await until(lambda: len(other) == 0)


async def test_without_replica_sync_a_frontend_knows_the_others_requests_from_reports_only(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str
) -> None:
    async with sim_fleet(etcd_server, nats_server, namespace, routing=KV, frontends=2) as f:
        other = f.router(1).loads
        rows = other.rows(f.frontends[1].plane.models.instances("sim"))
        request = TextRequest(model="sim", prompt=prompt(1), stop=Stop(max_tokens=20_000, ignore_eos=True))
        async with generate(f.frontends[0].plane, request, Call(account=ANONYMOUS, request_id="long")) as generation:
            await generation.read()
            await until(lambda: sum(load.requests for load in other.read(rows, time.monotonic())) == 1)
            assert len(other) == 0  # a booking would have come before the report
