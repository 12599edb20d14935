"""The faults of a drill: what is done to the fleet, and for how long it cannot respond."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass

from tests.drill import clients, engines
from tests.drill.backends import Links
from tests.drill.fleet import DrilledFleet
from tests.support.proxy import Proxy
from tests.support.servers import EtcdServer, NatsServer

Act = Callable[[DrilledFleet], Coroutine[None, None, None]]
Server = EtcdServer | NatsServer


@dataclass(frozen=True)
class Fault:
    """One fault. Requests may take its `seconds` longer, and two more."""

    name: str
    act: Act
    seconds: float = 0.0
    is_clustered: bool = False
    """Whether etcd and NATS are clusters of three."""
    worker_flags: Sequence[str] = ()
    may_fail: str = ""
    """The end of the error of requests that no instance can serve. Empty: there are none."""
    more_files: int = 0
    """Files that may be open afterwards besides."""


# --- processes -------------------------------------------------------------------------------------------------------


def workers_end(how: signal.Signals, count: int = 1) -> Act:
    async def act(fleet: DrilledFleet) -> None:
        for worker in fleet.workers[:count]:
            os.kill(worker.pid, how)
        for number in range(count):
            await fleet.workers[number].process.ended()
            await fleet.replace_worker(number)

    return act


def frontend_ends(how: signal.Signals) -> Act:
    async def act(fleet: DrilledFleet) -> None:
        os.kill(fleet.frontends[0].process.process.pid, how)
        await fleet.frontends[0].process.ended()
        await fleet.replace_frontend(0)

    return act


def worker_paused(seconds: float) -> Act:
    return lambda fleet: _paused(fleet, fleet.workers[0].pid, seconds)


def frontend_paused(seconds: float) -> Act:
    return lambda fleet: _paused(fleet, fleet.frontends[0].process.process.pid, seconds)


async def _paused(fleet: DrilledFleet, pid: int, seconds: float) -> None:
    fleet.pause(pid)
    await asyncio.sleep(seconds)
    fleet.resume(pid)


def at_once(*acts: Act) -> Act:
    async def act(fleet: DrilledFleet) -> None:
        async with asyncio.TaskGroup() as tasks:
            for each in acts:
                tasks.create_task(each(fleet))

    return act


# --- servers ---------------------------------------------------------------------------------------------------------


def nats_away(seconds: float, how: signal.Signals) -> Act:
    return lambda fleet: _away(fleet.backends.nats[0], seconds, how)


def etcd_away(seconds: float, how: signal.Signals) -> Act:
    return lambda fleet: _away(fleet.backends.etcd[0], seconds, how)


def nats_leader_away(seconds: float, how: signal.Signals) -> Act:
    async def act(fleet: DrilledFleet) -> None:
        await _away(await fleet.backends.nats_leader(), seconds, how)

    return act


def etcd_leader_away(seconds: float, how: signal.Signals) -> Act:
    async def act(fleet: DrilledFleet) -> None:
        await _away(await fleet.backends.etcd_leader(), seconds, how)

    return act


def etcd_without_quorum(seconds: float) -> Act:
    """Pause two of three members."""

    async def act(fleet: DrilledFleet) -> None:
        await asyncio.gather(*(_away(server, seconds, signal.SIGSTOP) for server in fleet.backends.etcd[:2]))

    return act


async def nats_rolled(fleet: DrilledFleet) -> None:
    await _rolled(fleet.backends.nats)


async def etcd_rolled(fleet: DrilledFleet) -> None:
    await _rolled(fleet.backends.etcd)


async def _away(server: Server, seconds: float, how: signal.Signals) -> None:
    os.kill(server.pid, how)
    await asyncio.sleep(seconds)
    if how is signal.SIGSTOP:
        os.kill(server.pid, signal.SIGCONT)
    else:
        await server.restart()


async def _rolled(servers: Sequence[Server]) -> None:
    for server in servers:
        await server.restart()
        await asyncio.sleep(3.0)  # as an upgrade waits until the cluster is whole


# --- links -----------------------------------------------------------------------------------------------------------

Which = Callable[[DrilledFleet], Sequence[Proxy]]


def nats_link_of_a_worker(fleet: DrilledFleet) -> Sequence[Proxy]:
    return _worker_links(fleet).nats


def nats_link_of_a_frontend(fleet: DrilledFleet) -> Sequence[Proxy]:
    """Return the links to NATS of a frontend, and of the one whose knowledge of caches is compared."""
    assert fleet.observing is not None
    return (*_frontend_links(fleet).nats, *fleet.observing.nats)


def etcd_links(fleet: DrilledFleet) -> Sequence[Proxy]:
    """Return the links to etcd of a worker and of a frontend, together."""
    return (*_worker_links(fleet).etcd, *_frontend_links(fleet).etcd)


def _worker_links(fleet: DrilledFleet) -> Links:
    return fleet.links_of(fleet.workers[0].process)


def _frontend_links(fleet: DrilledFleet) -> Links:
    return fleet.links_of(fleet.frontends[0].process)


def cut(which: Which) -> Act:
    async def act(fleet: DrilledFleet) -> None:
        for proxy in which(fleet):
            await proxy.cut()

    return act


def cut_repeatedly(which: Which, seconds: float) -> Act:
    async def act(fleet: DrilledFleet) -> None:
        async with asyncio.TaskGroup() as tasks:
            for proxy in which(fleet):
                tasks.create_task(_cut_repeatedly(proxy, seconds))

    return act


async def _cut_repeatedly(proxy: Proxy, seconds: float) -> None:
    for _ in range(int(seconds)):
        await proxy.cut()
        await asyncio.sleep(1.0)


def blackholed(which: Which, seconds: float) -> Act:
    return lambda fleet: _changed(which(fleet), Proxy.blackhole, seconds)


def slow(which: Which, delay_s: float, seconds: float) -> Act:
    def change(proxy: Proxy) -> None:
        proxy.delay_s = delay_s

    return lambda fleet: _changed(which(fleet), change, seconds)


def narrow(which: Which, bytes_per_s: float, seconds: float) -> Act:
    def change(proxy: Proxy) -> None:
        proxy.bytes_per_s = bytes_per_s

    return lambda fleet: _changed(which(fleet), change, seconds)


async def _changed(proxies: Sequence[Proxy], change: Callable[[Proxy], None], seconds: float) -> None:
    try:
        for proxy in proxies:
            change(proxy)
        await asyncio.sleep(seconds)
    finally:
        for proxy in proxies:
            proxy.heal()


async def nothing(fleet: DrilledFleet) -> None:
    await asyncio.sleep(5.0)


DETECT_S = 7.0
"""Until a silent instance is given up: probed after 1.25 s, given up 5 s later, looked at three times a second."""
KILL, TERM, STOP = signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP

FAULTS = [
    Fault("nothing, for comparison", nothing),
    Fault("SIGKILL of a worker", workers_end(KILL)),
    Fault("SIGKILL of two of three workers", workers_end(KILL, 2)),
    Fault("SIGTERM of a worker", workers_end(TERM)),
    Fault("SIGTERM of two of three workers", workers_end(TERM, 2)),
    Fault("SIGSTOP of a worker, 20 s", worker_paused(20.0), DETECT_S),
    Fault("SIGKILL of a frontend", frontend_ends(KILL)),
    Fault("SIGTERM of a frontend", frontend_ends(TERM)),
    Fault("SIGSTOP of a frontend, 5 s", frontend_paused(5.0), 5.0),
    Fault("SIGKILL of a worker and a frontend", at_once(workers_end(KILL), frontend_ends(KILL))),
    Fault("SIGTERM of a worker and a frontend", at_once(workers_end(TERM), frontend_ends(TERM))),
    # Servers that are alone.
    Fault("SIGKILL of nats-server, back after 3 s", nats_away(3.0, KILL), 3.0),
    Fault("SIGTERM of nats-server, back after 3 s", nats_away(3.0, TERM), 3.0),
    Fault("SIGSTOP of nats-server, 12 s", nats_away(12.0, STOP), 12.0),
    Fault("SIGKILL of etcd, back after 15 s", etcd_away(15.0, KILL)),
    Fault("SIGTERM of etcd, back after 5 s", etcd_away(5.0, TERM)),
    Fault("SIGSTOP of etcd, 15 s", etcd_away(15.0, STOP)),
    Fault("SIGKILL of a worker and nats-server, back after 3 s", at_once(workers_end(KILL), nats_away(3.0, KILL)), 3.0),
    Fault("SIGKILL of a worker and etcd, back after 5 s", at_once(workers_end(KILL), etcd_away(5.0, KILL))),
    Fault("SIGKILL of etcd and nats-server, back after 3 s", at_once(etcd_away(3.0, KILL), nats_away(3.0, KILL)), 3.0),
    # Servers in clusters of three.
    Fault("SIGKILL of a nats-server of three, back after 5 s", nats_away(5.0, KILL), is_clustered=True),
    Fault("SIGKILL of the leading nats-server of three, back after 5 s", nats_leader_away(5.0, KILL), is_clustered=True),
    Fault("SIGTERM of the leading nats-server of three, back after 5 s", nats_leader_away(5.0, TERM), is_clustered=True),
    Fault("SIGSTOP of a nats-server of three, 12 s", nats_away(12.0, STOP), DETECT_S, is_clustered=True),
    Fault("rolling restart of three nats-servers", nats_rolled, is_clustered=True),
    Fault("SIGKILL of an etcd of three, back after 5 s", etcd_away(5.0, KILL), is_clustered=True),
    Fault("SIGKILL of the leading etcd of three, back after 5 s", etcd_leader_away(5.0, KILL), is_clustered=True),
    Fault("SIGTERM of the leading etcd of three, back after 5 s", etcd_leader_away(5.0, TERM), is_clustered=True),
    Fault("SIGSTOP of the leading etcd of three, 15 s", etcd_leader_away(15.0, STOP), is_clustered=True),
    # A process whose streams are not together again when it is counted has two connections to etcd.
    Fault("SIGSTOP of two etcds of three, 15 s", etcd_without_quorum(15.0), is_clustered=True, more_files=10),
    Fault("rolling restart of three etcds", etcd_rolled, is_clustered=True),
    Fault(
        "SIGKILL of a worker and a nats-server of three, back after 5 s",
        at_once(workers_end(KILL), nats_away(5.0, KILL)),
        is_clustered=True,
    ),
    # Links.
    Fault("NATS link of a worker cut", cut(nats_link_of_a_worker)),
    Fault("NATS link of a frontend cut", cut(nats_link_of_a_frontend)),
    Fault("NATS link of a worker cut each second, 8 s", cut_repeatedly(nats_link_of_a_worker, 8.0), 1.0),
    Fault("NATS link of a frontend cut each second, 8 s", cut_repeatedly(nats_link_of_a_frontend, 8.0), 1.0),
    Fault("NATS link of a worker blackholed, 12 s", blackholed(nats_link_of_a_worker, 12.0), DETECT_S),
    Fault("NATS link of a frontend blackholed, 12 s", blackholed(nats_link_of_a_frontend, 12.0), 12.0),
    Fault("NATS link of a worker 0.3 s slow, 8 s", slow(nats_link_of_a_worker, 0.3, 8.0), 1.0),
    Fault("NATS link of a frontend 0.3 s slow, 8 s", slow(nats_link_of_a_frontend, 0.3, 8.0), 1.0),
    Fault("NATS link of a worker narrowed to 60 kB/s, 8 s", narrow(nats_link_of_a_worker, 60e3, 8.0), 8.0),
    Fault("NATS link of a frontend narrowed to 60 kB/s, 8 s", narrow(nats_link_of_a_frontend, 60e3, 8.0), 8.0),
    Fault("etcd links of a worker and a frontend cut each second, 8 s", cut_repeatedly(etcd_links, 8.0)),
    Fault("etcd links of a worker and a frontend blackholed, 20 s", blackholed(etcd_links, 20.0)),
    Fault("etcd links of a worker and a frontend 1 s slow, 12 s", slow(etcd_links, 1.0, 12.0)),
    Fault("etcd links of a worker and a frontend narrowed to 1 kB/s, 12 s", narrow(etcd_links, 1e3, 12.0)),
    # Clients.
    Fault("clients that leave in the middle of 50 streams", clients.leave),
    Fault("clients that do not read 10 streams, 8 s", clients.stall),
    Fault(
        "clients that flood workers of 64 requests each with 400 at once, 6 s",
        clients.flood,
        clients.DELAY_S,
        worker_flags=("--max-open-requests", "64"),
        may_fail="takes no more",
    ),
    # Engines.
    Fault("a model that raises", engines.raises),
    Fault("a model whose threads hang, 6 s", engines.hangs),
    Fault(
        "a request that ends the process of its worker",
        engines.ends,
        may_fail="2 instances died while they held this request, so it is not sent to another one",
    ),
]
