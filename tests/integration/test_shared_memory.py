"""Bodies by reference between real processes: contents, separate folders, kills, and what is left."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.arenas import memory_folder
from tests.support.fleet import Fleet, FleetFrontend, echo_request
from tests.support.servers import EtcdServer, NatsServer

pytestmark = pytest.mark.slow

BYTES = "dynamo_frontend_shared_memory_bytes_total"
FALLBACKS = "dynamo_frontend_shared_memory_fallbacks_total"
USED = "dynamo_frontend_shared_memory_used_bytes"
KIB, MIB = 2**10, 2**20


@pytest.fixture
def folders() -> Iterator[tuple[Path, Path]]:
    """Two that are not the same, as of two containers."""
    with ExitStack() as stack:
        yield stack.enter_context(memory_folder()), stack.enter_context(memory_folder())


def body(size: int) -> bytes:
    return random.Random(size).randbytes(size)


async def shows(front: FleetFrontend, name: str, value: float, **labels: str) -> None:
    """Return when a metric, which follows once a second, has a value."""
    async with asyncio.timeout(120):
        while await front.metric(name, **labels) != value:
            await asyncio.sleep(0.05)


async def holds(folder: Path, arenas: int) -> None:
    """Return when a folder has so many files."""
    async with asyncio.timeout(120):
        while len(list(folder.iterdir())) != arenas:
            await asyncio.sleep(0.05)


async def test_bodies_of_all_sizes_arrive_unchanged_between_two_frontends_and_three_workers(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str, folders: tuple[Path, Path]
) -> None:
    folder, elsewhere = folders
    sizes = [4, 1000, 32 * KIB - 200, 32 * KIB, 64 * KIB, 600 * KIB, MIB, 5 * MIB, 60 * MIB]
    async with Fleet(etcd_server, nats_server, namespace) as fleet:
        for place in (folder, folder, elsewhere):
            await fleet.add_worker("--shared-memory-dir", str(place))
        for _ in range(2):
            await fleet.add_frontend("--shared-memory-dir", str(folder))
        for worker in fleet.workers:
            await worker.serving()
        large = sum(size for size in sizes if size >= 32 * KIB)
        for front in fleet.frontends:
            await front.sees(*fleet.workers)
            async with front.client() as client:
                for size in sizes:
                    for worker in fleet.workers:
                        response = await client.infer(echo_request(body(size)), x_dynamo_instance=worker.instance)
                        assert response.raw_output_contents == [body(size)]
            assert await front.metric(FALLBACKS, reason="unreachable") == 1
            for direction in ("lent", "taken"):
                count = await front.metric(BYTES, direction=direction)
                assert 2 * large <= count < 2 * large + 100_000, "of two workers"
            await shows(front, USED, 0)


async def test_processes_that_are_killed_fail_no_request_and_leave_no_file(
    etcd_server: EtcdServer, nats_server: NatsServer, namespace: str, folders: tuple[Path, Path]
) -> None:
    folder, _ = folders
    place = ("--shared-memory-dir", str(folder))
    async with Fleet(etcd_server, nats_server, namespace) as fleet:
        for _ in range(2):
            await fleet.add_worker(*place)
        front = await fleet.add_frontend(*place)
        for worker in fleet.workers:
            await worker.serving()
        await front.sees(*fleet.workers)
        alive = list(fleet.workers)
        bodies = [body(size) for size in (4, 100 * KIB, 600 * KIB, 3 * MIB)]
        async with front.client() as client, client.load(8, lambda number: echo_request(bodies[number % 4])) as load:
            for _ in range(2):
                await load.completed(random.Random(namespace).randrange(20, 60))
                await alive.pop(0).killed()
                alive.append(await fleet.add_worker(*place))
                await alive[-1].serving()
                await front.sees(*alive)
            await load.completed(20)
        assert load.failures == []
        await shows(front, USED, 0)
        await holds(folder, 3)  # of two workers and a frontend
        front.process.process.kill()
        await front.process.ended()
        await holds(folder, 2)
        await alive[0].killed()
        await alive[1].killed()
        assert len(list(folder.iterdir())) == 2, "no process is left to remove them"
        await (await fleet.add_worker(*place)).serving()
        assert len(list(folder.iterdir())) == 1
