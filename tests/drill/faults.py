"""The faults of a drill: what is done to the fleet, and for how long it cannot answer."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from tests.drill.fleet import DrilledFleet
from tests.support.servers import EtcdServer, NatsServer


@dataclass(frozen=True)
class Fault:
    """One fault. Requests may take its `seconds` longer, and two more."""

    name: str
    act: Callable[[DrilledFleet], Awaitable[None]]
    seconds: float = 0.0
    may_fail: str = ""
    """Which requests may fail: those that a frontend which died had taken. Empty: none."""


async def worker_killed(fleet: DrilledFleet) -> None:
    await fleet.workers[0].killed()
    await fleet.replace_worker(0)


async def worker_terminated(fleet: DrilledFleet) -> None:
    fleet.workers[0].process.terminate()
    await fleet.workers[0].process.ended()
    await fleet.replace_worker(0)


async def two_workers_killed(fleet: DrilledFleet) -> None:
    for worker in fleet.workers[:2]:
        worker.kill()
    for number in (0, 1):
        await fleet.replace_worker(number)


def worker_paused(seconds: float) -> Callable[[DrilledFleet], Awaitable[None]]:
    async def act(fleet: DrilledFleet) -> None:
        fleet.pause(fleet.workers[0].pid)
        await asyncio.sleep(seconds)
        fleet.resume(fleet.workers[0].pid)

    return act


async def frontend_killed(fleet: DrilledFleet) -> None:
    fleet.frontends[0].process.process.kill()
    await fleet.frontends[0].process.ended()
    await fleet.replace_frontend(0)


async def frontend_terminated(fleet: DrilledFleet) -> None:
    fleet.frontends[0].process.terminate()
    await fleet.frontends[0].process.ended()
    await fleet.replace_frontend(0)


def frontend_paused(seconds: float) -> Callable[[DrilledFleet], Awaitable[None]]:
    async def act(fleet: DrilledFleet) -> None:
        pid = fleet.frontends[0].process.process.pid
        fleet.pause(pid)
        await asyncio.sleep(seconds)
        fleet.resume(pid)

    return act


def nats_down(seconds: float, how: signal.Signals) -> Callable[[DrilledFleet], Awaitable[None]]:
    return lambda fleet: _server_down(fleet.real_nats, seconds, how)


def etcd_down(seconds: float, how: signal.Signals) -> Callable[[DrilledFleet], Awaitable[None]]:
    return lambda fleet: _server_down(fleet.etcd, seconds, how)


async def _server_down(server: EtcdServer | NatsServer, seconds: float, how: signal.Signals) -> None:
    os.kill(server.pid, how)
    await asyncio.sleep(seconds)
    if how is signal.SIGSTOP:
        os.kill(server.pid, signal.SIGCONT)
    else:
        await server.restart()


def link_blackholed(of_frontend: bool, seconds: float) -> Callable[[DrilledFleet], Awaitable[None]]:
    async def act(fleet: DrilledFleet) -> None:
        proxy = fleet.proxy_of(fleet.frontends[0].process if of_frontend else fleet.workers[0].process)
        proxy.blackhole()
        await asyncio.sleep(seconds)
        proxy.heal()

    return act


def link_cut(of_frontend: bool) -> Callable[[DrilledFleet], Awaitable[None]]:
    async def act(fleet: DrilledFleet) -> None:
        await fleet.proxy_of(fleet.frontends[0].process if of_frontend else fleet.workers[0].process).cut()

    return act


def link_slow(delay_s: float, seconds: float) -> Callable[[DrilledFleet], Awaitable[None]]:
    async def act(fleet: DrilledFleet) -> None:
        proxy = fleet.proxy_of(fleet.workers[0].process)
        proxy.delay_s = delay_s
        await asyncio.sleep(seconds)
        proxy.heal()

    return act


async def nothing(fleet: DrilledFleet) -> None:
    await asyncio.sleep(5.0)


DETECT_S = 8.0
"""Until a silent instance is given up: probed after 2 s, given up 5 s later, looked at twice a second."""

FAULTS = [
    Fault("nothing, for comparison", nothing),
    Fault("SIGKILL of a worker", worker_killed),
    Fault("SIGKILL of two of three workers", two_workers_killed),
    Fault("SIGTERM of a worker", worker_terminated),
    Fault("SIGSTOP of a worker, 20 s", worker_paused(20.0), DETECT_S),
    Fault("SIGKILL of a frontend", frontend_killed, may_fail="requests that it had taken"),
    Fault("SIGTERM of a frontend", frontend_terminated),
    Fault("SIGSTOP of a frontend, 5 s", frontend_paused(5.0), 5.0),
    Fault("SIGKILL of nats-server, back after 3 s", nats_down(3.0, signal.SIGKILL), 3.0),
    Fault("SIGSTOP of nats-server, 12 s", nats_down(12.0, signal.SIGSTOP), 12.0),
    Fault("SIGKILL of etcd, back after 15 s", etcd_down(15.0, signal.SIGKILL)),
    Fault("SIGSTOP of etcd, 15 s", etcd_down(15.0, signal.SIGSTOP)),
    Fault("link of a worker cut", link_cut(of_frontend=False)),
    Fault("link of a frontend cut", link_cut(of_frontend=True)),
    Fault("link of a worker blackholed, 12 s", link_blackholed(False, 12.0), DETECT_S),
    Fault("link of a frontend blackholed, 12 s", link_blackholed(True, 12.0), 12.0),
    Fault("link of a worker 0.3 s slow, 8 s", link_slow(0.3, 8.0), 1.0),
]
