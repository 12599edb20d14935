"""What can break. Each fault is drawn from the seed, begins, ends, and says whom it troubles meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from dynamo.common.names import Endpoint, InstanceId
from tests.simulation.observers import PHASES, etcd_starts, nats_stops
from tests.simulation.process import NAMESPACE, SimulatedFrontend, SimulatedWorker

if TYPE_CHECKING:
    from tests.simulation.history import History

_EVENTS_READ_PER_S = 50_000.0
"""Bytes that a frontend reads that has no time for events."""
ALL = "*"
"""All processes are troubled."""


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
    if worker is not None:
        await _kill(h, worker)


async def _kill(h: History, worker: SimulatedWorker) -> None:
    h.kill(worker)
    await _replace(h)


async def _replace(h: History) -> None:
    await asyncio.sleep(h.rng.uniform(0.1, 6.0))
    h.start_worker()


async def worker_terminated(h: History) -> None:
    worker = h.pick(h.workers)
    if worker is not None:
        await _terminate(h, worker)


async def _terminate(h: History, worker: SimulatedWorker) -> None:
    with h.troubling(worker.process.name, "SIGTERM", forever=True):
        h.retire(worker)
        await h.ended(worker, 30.0)
    h.start_worker()


async def worker_paused(h: History) -> None:
    worker = h.pick(h.workers)
    if worker is not None:
        await _pause(h, worker)


async def _pause(h: History, worker: SimulatedWorker) -> None:
    await h.pausing(worker, h.rng.choice([0.2, 1.0, 4.0, 9.0, 20.0]))


async def worker_asleep(h: History) -> None:
    worker = h.pick(h.workers)
    if worker is not None:
        await _sleep(h, worker)


async def _sleep(h: History, worker: SimulatedWorker) -> None:
    if worker.worker is not None:
        await h.sleeping(worker, h.rng.uniform(0.5, 6.0))


async def frontend_killed(h: History) -> None:
    frontend = h.pick(h.frontends)
    if frontend is not None:
        await _kill_frontend(h, frontend)


async def _kill_frontend(h: History, frontend: SimulatedFrontend) -> None:
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
        nats_stops(h.reached, [*h.workers, *h.leaving])
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
        etcd_starts(h.reached, h.workers)
        h.etcd.start(lose_data=lose)


async def etcd_without_quorum(h: History) -> None:
    """Leases expire while they cannot be renewed; processes that come back may find them gone before they are granted again."""
    h.event("etcd has no quorum")
    h.etcd.lose_quorum()
    await asyncio.sleep(h.rng.choice([2.0, 8.0, 15.0, 30.0]))
    h.etcd.regain_quorum(compacted=h.rng.random() < 0.5)
    h.event("etcd has a quorum again")


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


async def requests_burst(h: History) -> None:
    frontend = h.pick_frontend()
    if frontend is not None:
        await h.burst(frontend, h.rng.choice([6, 16, 30]))


async def burst_struck(h: History) -> None:
    """A process dies while requests are queued."""
    frontend, strikes_frontend = h.pick_frontend(), h.rng.random() < 0.6
    if frontend is None:
        return
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(h.burst(frontend, h.rng.choice([16, 30])))
        await asyncio.sleep(h.rng.uniform(0.05, 1.0))
        if not strikes_frontend:
            tasks.create_task(worker_killed(h))
        elif frontend in h.frontends and len(h.frontends) > 1:
            tasks.create_task(_kill_frontend(h, frontend))


async def bursts_at_all(h: History) -> None:
    """Requests wait at several frontends at once."""
    async with asyncio.TaskGroup() as tasks:
        for frontend in h.frontends:
            if frontend.is_in_service:
                tasks.create_task(h.burst(frontend, 12))


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
    (1.0, etcd_without_quorum),
    (0.5, etcd_compacted),
    (1.0, etcd_cut_off),
    (1.0, arena_cleaned_up),
    (1.5, hostile_request),
)
"""With how often each is drawn."""
# Aimed faults


async def _restart_nats(h: History, worker: SimulatedWorker) -> None:
    await nats_restarted(h)


async def _reset(h: History, worker: SimulatedWorker) -> None:
    with h.troubling(worker.process.name, "its link is reset"):
        h.network.reset(worker.process)


_STRIKES = (_kill, _kill, _kill, _terminate, _pause, _sleep, _restart_nats, _restart_nats, _reset)


async def struck_in_phase(h: History) -> None:
    """A worker is struck while it has a request in a certain phase."""
    phase, strike, frontend = h.rng.choice(list(PHASES)), h.rng.choice(_STRIKES), h.pick_frontend()
    if frontend is None:
        return
    async with asyncio.TaskGroup() as tasks:
        if phase == "upload":
            tasks.create_task(_narrow(h, frontend))
        for _ in range(3):
            tasks.create_task(h.companion(frontend, phase))
        worker = await h.worker_in(phase)
        if worker is not None and len(h.workers) > 1:
            await strike(h, worker)


async def _narrow(h: History, frontend: SimulatedFrontend) -> None:
    """Let uploads take a while, so that they can be struck."""
    with h.troubling(frontend.process.name, "its link is narrow"):
        h.network.narrow(frontend.process, 200_000.0)
        await asyncio.sleep(2.0)
        h.network.narrow(frontend.process, None)


async def request_hunted(h: History) -> None:
    """Each worker that a request comes to is killed."""
    phase, frontend = h.rng.choice(["before-first", "after-first"]), h.pick_frontend()
    if frontend is None:
        return
    id_ = f"r{len(h.attempts)}"
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(h.companion(frontend, phase))
        for _ in range(3):
            worker = await h.worker_in(phase, id_)
            if worker is None or len(h.workers) < 2:
                break
            h.kill(worker)
            tasks.create_task(_replace(h))


async def frontend_struck(h: History) -> None:
    """A frontend is killed or stopped while it has requests at workers."""
    frontend = h.pick(h.frontends)
    if frontend is None or not frontend.is_in_service:
        return
    phase, is_killed = h.rng.choice(["before-first", "after-first", "credit", "upload"]), h.rng.random() < 0.6
    async with asyncio.TaskGroup() as tasks:
        for _ in range(4):
            tasks.create_task(h.companion(frontend, phase))
        await asyncio.sleep(h.rng.uniform(0.0, 0.3))
        if frontend not in h.frontends or len(h.frontends) < 2:
            return
        await (_kill_frontend(h, frontend) if is_killed else h.pausing(frontend, h.rng.choice([1.0, 4.0, 12.0])))


async def frontend_unheard(h: History) -> None:
    """Workers hear nothing of a frontend for so long that they give up its requests."""
    frontend = h.pick(h.frontends)
    if frontend is None or not frontend.is_in_service:
        return
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(h.companion(frontend, "endless"))
        await asyncio.sleep(0.2)
        with h.troubling(frontend.process.name, "its link is blackholed"):
            h.network.hold(frontend.process)
            await asyncio.sleep(35.0)
            h.network.release(frontend.process)


async def fleet_killed(h: History) -> None:
    """All workers die together."""
    for worker in list(h.workers):
        h.kill(worker)
    await asyncio.sleep(h.rng.choice([0.1, 1.0, 7.0]))
    for _ in range(h.plan.workers):
        h.start_worker()


async def worker_killed_beside_drain(h: History) -> None:
    async with asyncio.TaskGroup() as tasks:
        if (frontend := h.pick_frontend()) is not None:
            for _ in range(3):
                tasks.create_task(h.companion(frontend, "credit"))
        await asyncio.sleep(0.2)
        tasks.create_task(worker_terminated(h))
        await asyncio.sleep(h.rng.uniform(0.0, 1.0))
        if h.leaving:
            tasks.create_task(worker_killed(h))


async def without_etcd(h: History) -> None:
    """Processes start and die while etcd is away."""
    lose = h.rng.random() < 0.3
    what = h.rng.choice([worker_killed, frontend_killed, worker_terminated])
    with h.troubling(ALL, "etcd loses its data" if lose else "etcd is down"):
        async with asyncio.TaskGroup() as tasks:
            h.etcd.stop()
            await asyncio.sleep(h.rng.uniform(0.1, 1.0))
            tasks.create_task(_do(what, h))
            await asyncio.sleep(h.rng.choice([2.0, 8.0, 14.0]))
            etcd_starts(h.reached, h.workers)
            h.etcd.start(lose_data=lose)


async def without_nats(h: History) -> None:
    """Processes start and die while NATS is away."""
    what = h.rng.choice([worker_killed, frontend_killed])
    with h.troubling(ALL, "NATS is down"):
        async with asyncio.TaskGroup() as tasks:
            nats_stops(h.reached, [*h.workers, *h.leaving])
            h.nats.stop()
            tasks.create_task(_do(what, h))
            await asyncio.sleep(h.rng.choice([1.0, 7.0]))
            h.nats.start()


async def _do(what: Callable[[History], Awaitable[None]], h: History) -> None:
    await what(h)


async def unwatched(h: History) -> None:
    """A lease ends, and what etcd knew before is compacted, while a frontend cannot watch."""
    frontend = h.pick_frontend()
    if frontend is None:
        return
    with h.troubling(frontend.process.name, "it is cut off from etcd"):
        h.etcd.cut_off(frontend.process)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(worker_killed(h))
            await asyncio.sleep(h.rng.choice([2.0, 13.0]))
            if h.rng.random() < 0.7:
                h.etcd.compact()
        h.etcd.let_in(frontend.process)


async def lease_expired(h: History) -> None:
    """A worker that works cannot reach etcd until its lease is over, and a little longer."""
    worker = h.pick(h.workers)
    if worker is None:
        return
    with h.troubling(worker.process.name, "it is cut off from etcd"):
        h.etcd.cut_off(worker.process)
        await asyncio.sleep(h.rng.uniform(8.0, 13.0))
        h.etcd.let_in(worker.process)


async def keeper_struck(h: History) -> None:
    """A frontend is struck while it carries out a batch, or generates a response in the background."""
    kind, strike = h.rng.choice(["batch", "response"]), h.rng.choice(["killed", "killed", "killed", "paused", "cut off", "held"])
    async with asyncio.TaskGroup() as tasks:
        for _ in range(3):
            tasks.create_task(h.kept.use(kind, Random(h.rng.getrandbits(32))))
        frontend = await h.keeper(kind)
        if frontend is not None and len(h.frontends) > 1:
            await _strike_frontend(h, frontend, strike)


async def _strike_frontend(h: History, frontend: SimulatedFrontend, strike: str) -> None:
    process = frontend.process
    match strike:
        case "killed":
            await _kill_frontend(h, frontend)
        case "paused":
            await h.pausing(frontend, h.rng.choice([4.0, 14.0]))
        case "cut off":
            with h.troubling(process.name, "it is cut off from etcd"):
                h.etcd.cut_off(process)
                await asyncio.sleep(h.rng.uniform(8.0, 16.0))
                h.etcd.let_in(process)
        case _:
            with h.troubling(process.name, "its link is blackholed"):
                h.network.hold(process)
                await asyncio.sleep(h.rng.choice([3.0, 16.0]))
                h.network.release(process)


async def store_full(h: History) -> None:
    """JetStream takes no messages for a while."""
    with h.troubling("JetStream", "it is full"):
        h.nats.jetstream.is_full = True
        await asyncio.sleep(h.rng.choice([1.0, 6.0, 20.0]))
        h.nats.jetstream.is_full = False


AIMED: tuple[tuple[float, Callable[[History], object]], ...] = (
    (9.0, struck_in_phase),
    (2.0, request_hunted),
    (3.0, frontend_struck),
    (0.7, frontend_unheard),
    (1.0, fleet_killed),
    (2.0, worker_killed_beside_drain),
    (2.0, without_etcd),
    (1.0, without_nats),
    (2.0, unwatched),
    (1.5, lease_expired),
)
"""Faults that strike at a moment that they have waited for or brought about."""
BURSTS: tuple[tuple[float, Callable[[History], object]], ...] = (
    (6.0, requests_burst),
    (5.0, burst_struck),
    (4.0, bursts_at_all),
)
"""Drawn as well where requests may wait."""

STORED: tuple[tuple[float, Callable[[History], object]], ...] = (
    (8.0, keeper_struck),
    (2.0, store_full),
)
"""Drawn as well where clients use what frontends keep."""
