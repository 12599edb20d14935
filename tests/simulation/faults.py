"""What can break. Each fault is drawn from the seed, begins, ends, and says whom it troubles meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dynamo.common.names import Endpoint, InstanceId
from tests.simulation.process import NAMESPACE

if TYPE_CHECKING:
    from tests.simulation.history import History

_EVENTS_READ_PER_S = 50_000.0
"""Bytes that a frontend reads that has no time for events."""
ALL = "*"
"""Everybody is troubled."""


@dataclass
class Trouble:
    """A time in which some process, or all, may not be able to do its work."""

    who: str
    begin_s: float
    end_s: float
    what: str
    is_lossy: bool = False
    """Single messages may have been lost."""


async def worker_killed(h: History) -> None:
    worker = h.pick(h.workers)
    if worker is None:
        return
    h.kill(worker)
    await asyncio.sleep(h.rng.uniform(0.1, 6.0))
    h.start_worker()


async def worker_terminated(h: History) -> None:
    worker = h.pick(h.workers)
    if worker is None:
        return
    with h.troubling(worker.process.name, "SIGTERM", forever=True):
        h.retire(worker)
        await h.ended(worker, 30.0)
    h.start_worker()


async def worker_paused(h: History) -> None:
    worker = h.pick(h.workers)
    if worker is not None:
        await h.pausing(worker, h.rng.choice([0.2, 1.0, 4.0, 9.0, 20.0]))


async def worker_asleep(h: History) -> None:
    worker = h.pick(h.workers)
    if worker is not None and worker.worker is not None:
        await h.sleeping(worker, h.rng.uniform(0.5, 6.0))


async def frontend_killed(h: History) -> None:
    frontend = h.pick(h.frontends)
    if frontend is None:
        return
    h.kill(frontend)
    await asyncio.sleep(h.rng.uniform(0.1, 3.0))
    h.start_frontend()


async def frontend_terminated(h: History) -> None:
    frontend = h.pick(h.frontends)
    if frontend is None:
        return
    h.start_frontend()
    await h.leave(frontend)


async def frontend_paused(h: History) -> None:
    frontend = h.pick(h.frontends)
    if frontend is not None:
        await h.pausing(frontend, h.rng.choice([0.2, 1.0, 4.0, 12.0]))


async def nats_restarted(h: History) -> None:
    with h.troubling(ALL, "NATS is down"):
        h.nats.stop()
        await asyncio.sleep(h.rng.choice([0.0, 0.3, 2.0, 8.0]))
        h.nats.start()


async def nats_hung(h: History) -> None:
    with h.troubling(ALL, "NATS hangs"):
        h.nats.hang()
        await asyncio.sleep(h.rng.choice([0.5, 3.0, 8.0, 14.0]))
        h.nats.go_on()


async def link_reset(h: History) -> None:
    process = h.pick_process()
    with h.troubling(process.name, "its link is reset"):
        h.network.reset(process)


async def link_held(h: History) -> None:
    process = h.pick_process()
    with h.troubling(process.name, "its link is blackholed"):
        h.network.hold(process)
        await asyncio.sleep(h.rng.choice([0.5, 2.0, 6.0, 12.0, 25.0]))
        h.network.release(process)


async def link_narrow(h: History) -> None:
    process = h.pick_process()
    with h.troubling(process.name, "its link is narrow"):
        h.network.narrow(process, h.rng.choice([20_000.0, 200_000.0]))
        await asyncio.sleep(h.rng.uniform(2.0, 8.0))
        h.network.narrow(process, None)


async def network_slow(h: History) -> None:
    with h.troubling(ALL, "the network is slow"):
        h.network.slow_s = h.rng.choice([0.02, 0.3, 1.5])
        await asyncio.sleep(h.rng.uniform(2.0, 8.0))
        h.network.slow_s = 0.0


async def messages_lost(h: History) -> None:
    with h.troubling(ALL, "messages get lost", lossy=True):
        h.nats.loss = h.rng.choice([0.01, 0.05, 0.3])
        await asyncio.sleep(h.rng.uniform(1.0, 6.0))
        h.nats.loss = 0.0


async def events_flooded(h: History) -> None:
    """More events than a connection holds are published. nats-server may close those of subscribers; no request may notice."""
    endpoint, absent = Endpoint(namespace=NAMESPACE), InstanceId(0xF100D)
    subject = h.rng.choice([endpoint.kv_subject(absent), endpoint.load_subject(absent), endpoint.bookings_subject()])
    count = h.rng.choice([50, 800])
    h.event(f"{subject} is flooded by {count} KiB at a time")
    for _ in range(h.rng.randint(1, 5)):
        for _ in range(count):
            h.nats.publish(None, subject.encode(), b"", 0, bytes(1024))
        await asyncio.sleep(h.rng.uniform(0.05, 1.0))


async def events_too_many(h: History) -> None:
    """More events come than a frontend has time for. It may do without them for a while; no request may notice."""
    frontend, absent = h.pick_frontend(), InstanceId(0xF100D)
    reader = None if frontend is None else h.nats.client_named(f"{frontend.process.name} events")
    if reader is None:
        return
    subject = Endpoint(namespace=NAMESPACE).load_subject(absent)
    h.event(f"{reader.name}: more come than can be read")
    reader.throttle(_EVENTS_READ_PER_S)
    for _ in range(h.rng.choice([5, 15, 40])):
        for _ in range(20):
            h.nats.publish(None, subject.encode(), b"", 0, bytes(1024))
        await asyncio.sleep(0.1)
    reader.throttle(None)


async def etcd_restarted(h: History) -> None:
    lose = h.rng.random() < 0.3
    with h.troubling(ALL if lose else "", "etcd loses its data" if lose else "etcd is down"):
        h.etcd.stop()
        await asyncio.sleep(h.rng.choice([0.1, 4.0, 15.0]))
        h.etcd.start(lose_data=lose)


async def etcd_compacted(h: History) -> None:
    h.event("etcd is compacted")
    h.etcd.compact()


async def etcd_cut_off(h: History) -> None:
    process = h.pick_process()
    with h.troubling(process.name, "it is cut off from etcd"):
        h.etcd.cut_off(process)
        await asyncio.sleep(h.rng.choice([1.0, 8.0, 20.0]))
        h.etcd.let_in(process)


async def arena_cleaned_up(h: History) -> None:
    """The file of a live process's arena is removed: processes that have it open go on, all others use messages."""
    member = h.rng.choice(h.members)
    if member.memory is not None and h.hosts.remove_name(member.memory.token):
        h.event(f"{member.process.name}: the file of its arena is removed")


async def hostile_request(h: History) -> None:
    """A request whose header or error text exceeds what a NATS message may hold."""
    frontend = h.pick_frontend()
    if frontend is not None:
        await h.hostile(frontend, h.rng.choice(["raise", "header"]))


FAULTS: tuple[tuple[float, Callable[[History], object]], ...] = (
    (3.0, worker_killed),
    (2.0, worker_terminated),
    (2.0, worker_paused),
    (1.5, worker_asleep),
    (1.5, frontend_killed),
    (0.5, frontend_terminated),
    (1.0, frontend_paused),
    (2.0, nats_restarted),
    (1.0, nats_hung),
    (1.5, link_reset),
    (1.5, link_held),
    (1.0, link_narrow),
    (1.0, network_slow),
    (1.5, messages_lost),
    (1.0, events_flooded),
    (1.0, events_too_many),
    (1.0, etcd_restarted),
    (0.5, etcd_compacted),
    (1.0, etcd_cut_off),
    (1.0, arena_cleaned_up),
    (1.5, hostile_request),
)
"""With how often each is drawn."""
