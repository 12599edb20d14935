"""Caches beyond the GPU over a real etcd and nats-server: what simulated engines keep there, and what a frontend knows of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from dynamo.common.kv.tiers import Tier
from dynamo.common.names import InstanceId
from dynamo.worker.engine.sim.engine import SimEngine
from dynamo.worker.process.engine_factory import sim_config
from tests.support.servers import EtcdServer, NatsServer
from tests.support.sim_fleet import KV, TIERED_SIM, SimFleet, prompt
from tests.support.waiting import until


@asynccontextmanager
async def tiered(
    etcd: EtcdServer, nats: NatsServer, namespace: str, *, workers: int = 1, durable: bool = False
) -> AsyncIterator[SimFleet]:
    """A fleet of engines with tiers, and a frontend."""
    fleet = SimFleet(
        etcd, nats, namespace, durable=durable, routing=KV, make=lambda: SimEngine(sim_config(TIERED_SIM, "sim", None, None))
    )
    async with AsyncExitStack() as stack:
        for _ in range(workers):
            await stack.enter_async_context(fleet.worker())
        await stack.enter_async_context(fleet.frontend())
        yield fleet


def sizes(fleet: SimFleet) -> dict[Tier, int]:
    """Return how many blocks the frontend knows on each tier."""
    index = fleet.router().index("sim")
    return {tier: sum(len(index.held(instance, tier)) for instance in fleet.engines) for tier in Tier}


async def test_a_frontend_knows_what_each_tier_holds(etcd_server: EtcdServer, nats_server: NatsServer, namespace: str) -> None:
    async with tiered(etcd_server, nats_server, namespace) as f:
        for number in range(8):
            await f.generate(prompt(number))
        await until(f.is_exact)
        held = sizes(f)
        assert 0 < held[Tier.GPU] <= 50
        assert held[Tier.CPU] == 60, "it is full, and what it dropped is known, too"
        assert held[Tier.DISK] > 0, "what the memory dropped"
        assert held[Tier.SHARED] >= 8 * 17, "all that was computed"
        _, _, summary = await f.generate(prompt(0))
        assert summary.cached_tokens > 16 * 10, "it came back from the store"


async def test_lost_updates_of_every_tier_are_made_up_for(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str
) -> None:
    async with tiered(etcd_server, nats_server, namespace) as f:
        (engine,) = f.engines.values()
        for number in range(4):
            await f.generate(prompt(number))
        await until(f.is_exact)
        for tier in Tier:
            gone = list(engine.kv.held(tier))[:3]
            engine.kv.remove(gone, tier=tier)
            engine.kv.store([1, 2, 3], tier=tier)
        assert engine.kv.take_update() is not None, "no frontend hears of it until the next one shows the hole"
        await f.generate(prompt(9))
        await until(f.is_exact)


async def test_a_frontend_that_starts_late_learns_every_tier(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str
) -> None:
    async with tiered(etcd_server, nats_server, namespace, workers=2) as f:
        for number in range(8):
            await f.generate(prompt(number))
        async with f.frontend() as late:
            await until(lambda: f.is_exact(late))


async def test_a_late_frontend_learns_every_tier_from_the_record_alone(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str
) -> None:
    async with tiered(etcd_server, nats_server, namespace, workers=2, durable=True) as f:
        for number in range(8):
            await f.generate(prompt(number))
        await until(f.is_exact)
        async with f.frontend() as late:
            await until(lambda: f.is_exact(late))
            assert sizes(f)[Tier.CPU] > 0


async def test_an_instance_that_leaves_is_forgotten_on_every_tier_and_one_that_comes_begins_empty(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str
) -> None:
    async with tiered(etcd_server, nats_server, namespace) as f:
        index = f.router().index("sim")

        def held(instance: InstanceId) -> int:
            return sum(len(index.held(instance, tier)) for tier in Tier)

        async with f.worker() as worker:
            await until(lambda: len(f.frontends[0].plane.models.instances("sim")) == 2)
            await asyncio.gather(*(f.generate(prompt(number)) for number in range(12)))
            await until(f.is_exact)
            assert held(worker.instance)
        await until(lambda: not held(worker.instance))
        async with f.worker() as another:
            await until(lambda: len(f.frontends[0].plane.models.instances("sim")) == 2)
            assert not held(another.instance)
            for number in range(12, 18):
                await f.generate(prompt(number))
            await until(f.is_exact)
