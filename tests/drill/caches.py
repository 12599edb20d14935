"""What a frontend that lives through the drill knows of the workers' caches, beside what the workers say of themselves.

The frontend is in this process, so that its index can be read, and reaches its servers through links of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from dynamo.common.discovery import Instance
from dynamo.common.kv.events import KvQuery, KvSnapshot, message_encoder, snapshot_decoder
from dynamo.common.kv.tiers import Tier
from dynamo.common.messaging.nats.connection import connect_nats
from dynamo.common.messaging.request_plane.client import open_client
from dynamo.common.names import InstanceId
from dynamo.common.options import EtcdOptions, LogOptions, NatsOptions
from dynamo.frontend.app import Frontend, serve_frontend
from dynamo.frontend.config import FrontendConfig, HttpOptions, RouterMode, RouterOptions
from dynamo.frontend.router.base import RouterWrapper
from dynamo.frontend.router.cache.index import PrefixIndex
from dynamo.frontend.router.kv import KvRouter
from tests.drill.backends import Backends, Links

MODEL = "tiered"
SETTINGS = "sim:blocks=64,speedup=4,cpu_blocks=48,disk_blocks=96,shared_blocks=300,failing_reads=0.05"
_QUERY_S = 5.0


@dataclass(frozen=True)
class Caches:
    """What workers have in their caches, and a frontend knows of it."""

    blocks: dict[Tier, int] = field(default_factory=dict)
    """What all workers have on each tier."""
    differences: Sequence[str] = ()

    def __str__(self) -> str:
        return ", ".join(f"{blocks} {tier}" for tier, blocks in self.blocks.items())


class ObservedCaches:
    """The caches of all instances of the model with tiers."""

    def __init__(self, frontend: Frontend, backends: Backends, namespace: str) -> None:
        self._frontend = frontend
        self._backends = backends
        self._namespace = namespace
        self._seen: set[InstanceId] = set()

    async def compare(self, workers: int) -> Caches:
        """Compare what so many workers say of themselves with what the frontend knows."""
        instances = self._frontend.plane.models.instances(MODEL)
        if len(instances) != workers:
            return Caches(differences=[f"a frontend knows {len(instances)} instances of {workers}"])
        gone = self._seen - {instance.id for instance in instances}
        self._seen.update(instance.id for instance in instances)
        sizes, differences, index = dict.fromkeys(Tier, 0), list[str](), self._index()
        accounts = await self._accounts(instances)
        for instance, account in accounts.items():
            for tier, blocks in _blocks(account):
                known = index.held(instance, tier)
                sizes[tier] += len(blocks)
                if known != blocks:
                    differences.append(
                        f"a frontend knows {len(known & blocks)} of {len(blocks)} blocks on the tier {tier} of {instance:x}, and "
                        f"{len(known - blocks)} that are not there"
                    )
        held = [each for each in gone if any(index.held(each, tier) for tier in Tier)]
        differences += [f"a frontend knows blocks of {each:x}, which is gone" for each in held]
        return Caches(sizes, differences)

    def _index(self) -> PrefixIndex:
        router = self._frontend.plane.router
        while isinstance(router, RouterWrapper):
            router = router.inner
        assert isinstance(router, KvRouter)
        return router.index(MODEL)

    async def _accounts(self, instances: Sequence[Instance]) -> dict[InstanceId, KvSnapshot]:
        """Return what each instance says that it has."""
        body, deadline = message_encoder.encode(KvQuery(MODEL)), asyncio.get_running_loop().time() + _QUERY_S
        servers = NatsOptions(servers=tuple(server.url for server in self._backends.nats))
        async with connect_nats(servers, "drill") as nats, open_client(nats, self._namespace) as client:
            streams = [client.open(each.id, each.subject, "snapshot", body, deadline=deadline) for each in instances]
            answers = [snapshot_decoder.decode(await stream.result()) for stream in streams]
        return {instance.id: answer for instance, answer in zip(instances, answers, strict=True)}


def _blocks(account: KvSnapshot) -> Iterator[tuple[Tier, set[int]]]:
    by_tier = {change.tier: set(change.stored_hashes) for change in account.tiers}
    for tier in Tier:
        yield tier, set(account.hashes) if tier is Tier.GPU else by_tier.get(tier, set())


@asynccontextmanager
async def observed_caches(backends: Backends, links: Links, namespace: str) -> AsyncIterator[ObservedCaches]:
    """Have a frontend follow the caches for the body."""
    config = FrontendConfig(
        namespace=namespace,
        router=RouterOptions(mode=RouterMode.KV),
        http=HttpOptions(port=0),
        log=LogOptions(),
        etcd=EtcdOptions(endpoints=tuple(links.endpoint.split(","))),
        nats=NatsOptions(servers=tuple(links.url.split(","))),
    )
    async with serve_frontend(config) as frontend:
        yield ObservedCaches(frontend, backends, namespace)
