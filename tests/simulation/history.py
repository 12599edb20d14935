"""One history: a fleet, requests and faults for a while, quiet at the end, and what must hold.

Invariants:

1. A request ends exactly once, and not long after its deadline.
2. No response is wrong, short or doubled.
3. A request does not fail if its frontend and some instance were well long enough inside its deadline to serve it.
4. When all is quiet, nothing is left: no open stream, no credit lent, no region lent or read, no arena of a dead process, no
   booking, no load, no bytes of a request, no task that was not there at the start; and nothing of a process that ended in order.
5. When all is quiet, requests are served, and routers know exactly what instances have cached, which is
   nothing for those that are gone.

For what frontends keep, see `kept`.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import random
import secrets
import sys
import time
import warnings
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from contextvars import Context
from dataclasses import dataclass
from random import Random
from typing import Any, TypeVar, cast
from unittest import mock

from nats.js import object_store

from dynamo.common.errors import Unavailable
from dynamo.common.etcd import client as etcd_client
from dynamo.common.kv.tiers import Tier
from dynamo.common.messaging.jetstream import records
from dynamo.common.observability import telemetry
from dynamo.frontend.api.openai.batches import runner
from dynamo.frontend.config import RouterMode
from dynamo.frontend.preprocess.offload import Offload
from dynamo.worker import serve
from dynamo.worker.engine.sim import engine as sim_engine
from tests.simulation import observers
from tests.simulation.clients import Attempt, Outcome, run_request
from tests.simulation.clock import Process, SimulatedLoop
from tests.simulation.etcd_server import SimulatedEtcd, SimulatedTransport
from tests.simulation.faults import AIMED, ALL, BURSTS, FAULTS, STORED, Trouble
from tests.simulation.hosts import Hosts, open_hosts
from tests.simulation.kept import Kept
from tests.simulation.milestones import Reached
from tests.simulation.nats_server import SimulatedNats
from tests.simulation.network import Network
from tests.simulation.process import LANGUAGE_MODELS, MAX_PAYLOAD, MODELS, SimulatedFrontend, SimulatedWorker
from tests.simulation.stores import LIMITED

T = TypeVar("T")
Member = TypeVar("Member", SimulatedFrontend, SimulatedWorker)

RECOVERY_S = 12.0
"""After its trouble is over a process may need this long until it is of use again."""
WELL_S = 9.5
"""A fleet that is well for this long answers any request of a history, even one that was first sent to an instance that hangs."""
LATE_S = 2.0
"""A request may end this long after its deadline, since clocks of timers are coarse and frontends may be busy."""
STORE_CLIENTS = 2
OVERDUE_S = 60.0
"""A request that has not ended this long after its deadline never will."""
QUEUED_S = 15.0
"""A request may wait so long in a queue of a fleet that is well."""
AIM_S = 2.0
"""For so long a fault waits for its moment."""
QUIET_S = 60.0
HOSTILE = ("raise", "header")
"""Kinds of requests that may fail."""


@dataclass
class Plan:
    """How large a history is. Drawn from the seed unless given."""

    seconds: float = 40.0
    workers: int = 3
    frontends: int = 2
    faults: int = 5
    clients: int = 5
    is_aimed: bool = False
    """Faults strike in chosen phases of requests, too, and while others last."""
    queue: bool = False
    """Requests wait in frontends while all instances are busy, and there are bursts of them."""
    stores: bool = False
    """Clients have keys, some with limits, and use files, batches and responses in the background."""


@dataclass
class Result:
    """What became of a history."""

    seed: int
    violations: list[str]
    events: list[str]
    outcomes: dict[str, int]
    virtual_s: float
    milestones: dict[str, int]
    """How often the history came to each."""

    @property
    def is_good(self) -> bool:
        return not self.violations


class History:
    """A running history. Made and run by `run_history`."""

    def __init__(
        self, seed: int, loop: SimulatedLoop, plan: Plan, faults: Sequence[tuple[float, Callable[[Any], Any]]], hosts: Hosts
    ) -> None:
        self.seed = seed
        self.rng = Random(seed)
        self.hosts = hosts
        self.loop = loop
        self.plan = plan
        self.events: list[str] = []
        self.violations: list[str] = []
        self.reached = Reached()
        self.network = Network(loop, Random(seed + 1))
        self.network.keeps_half_open = plan.is_aimed
        self.nats = SimulatedNats(
            self.network,
            Random(seed + 2),
            max_payload=MAX_PAYLOAD,
            max_pending=512 * 1024,
            event=self.event,
            reached=self.reached,
        )
        self.etcd = SimulatedEtcd(loop, Random(seed + 3), reached=self.reached)
        self.network.servers["127.0.0.1", 4222] = self.nats
        self.workers: list[SimulatedWorker] = []
        self.frontends: list[SimulatedFrontend] = []
        self.leaving: list[SimulatedWorker] = []
        self.attempts: list[Attempt] = []
        self.kept = Kept(self)
        self.troubles: list[Trouble] = []
        self.instances: dict[str, tuple[float, float]] = {}
        """When each worker was registered with room to spare, and when it was gone."""
        self._buried: list[SimulatedFrontend | SimulatedWorker] = []
        """Kept to the end: were their coroutines collected earlier, their `finally` would run."""
        self._faults = faults
        self._mode = self.rng.choice([RouterMode.ROUND_ROBIN, RouterMode.LEAST_LOADED, RouterMode.KV])
        self._numbers = {"worker": 0, "frontend": 0}

    @property
    def members(self) -> list[SimulatedFrontend | SimulatedWorker]:
        """The frontends and workers that were not told to end."""
        return [*self.frontends, *self.workers]

    @property
    def frontends_started(self) -> int:
        return self._numbers["frontend"]

    # What faults use

    def event(self, text: str) -> None:
        self.events.append(f"{self.loop.time():8.3f}  {text}")

    def pick(self, members: Sequence[Member]) -> Member | None:
        """One that serves and is not paused, as long as it is not the last."""
        able = [member for member in members if not member.process.is_paused]
        return self.rng.choice(able) if len(able) > 1 else None

    def pick_process(self) -> Process:
        return self.rng.choice([member.process for member in self.members])

    def pick_frontend(self) -> SimulatedFrontend | None:
        able = [frontend for frontend in self.frontends if frontend.is_in_service]
        return self.rng.choice(able) if able else None

    async def hostile(self, frontend: SimulatedFrontend, kind: str) -> None:
        """Send a request that need not succeed, and must not hurt others."""
        self.event(f"hostile request ({kind}) at {frontend.process.name}")
        now = self.loop.time()
        model = "raising" if kind == "raise" else "echo"
        attempt = Attempt(len(self.attempts), kind, frontend, now, now + 10.0, 2 * MAX_PAYLOAD, model)
        self.attempts.append(attempt)
        await self._send(attempt, Random(self.rng.getrandbits(32)))

    async def companion(self, frontend: SimulatedFrontend, phase: str) -> None:
        """Send a request that will be in a phase for a while."""
        now, rng = self.loop.time(), Random(self.rng.getrandbits(32))
        number, deadline = len(self.attempts), now + 30.0
        match phase:
            case "upload":
                attempt = Attempt(number, "infer", frontend, now, deadline, 300_000)
            case "credit":
                attempt = Attempt(number, "stream", frontend, now, deadline, 60_000, "repeater", 20, pause_s=0.5)
            case "endless":
                attempt = Attempt(number, phase, frontend, now, now + 60.0, 400, "repeater", 10_000, leave_after_s=60.0)
            case _:
                attempt = Attempt(number, "generate", frontend, now, deadline, 100, rng.choice(list(LANGUAGE_MODELS)))
        self.attempts.append(attempt)
        await self._send(attempt, rng)

    async def worker_in(self, phase: str, request_id: str = "") -> SimulatedWorker | None:
        """Return a worker as soon as it has a request in a phase; None if that takes long."""
        until = self.loop.time() + AIM_S
        while self.loop.time() < until:
            if (worker := observers.worker_in(phase, self.workers, request_id)) is not None:
                return worker
            await asyncio.sleep(0.001)
        return None

    async def keeper(self, kind: str) -> SimulatedFrontend | None:
        """Return a frontend as soon as it carries out a batch, or generates a response; None if that takes long."""
        until = self.loop.time() + AIM_S
        while self.loop.time() < until:
            if busy := [frontend for frontend in self.frontends if observers.keeps(frontend, kind)]:
                return self.rng.choice(busy)
            await asyncio.sleep(0.02)
        return None

    async def burst(self, frontend: SimulatedFrontend, count: int) -> None:
        """Request more of the slow language model at a time than it can do."""
        self.event(f"{count} requests at once at {frontend.process.name}")
        now = self.loop.time()
        async with asyncio.TaskGroup() as tasks:
            for _ in range(count):
                size, timeout_s = self.rng.choice([40, 100]), self.rng.choice([0.3, 1.0, 4.0, 30.0])
                attempt = Attempt(len(self.attempts), "generate", frontend, now, now + timeout_s, size, "small")
                if self.rng.random() < 0.2:
                    attempt.leave_after_s = self.rng.uniform(0.1, 2.0)
                self.attempts.append(attempt)
                tasks.create_task(self._send(attempt, Random(self.rng.getrandbits(32))))

    def start_worker(self) -> None:
        self._numbers["worker"] += 1
        worker = SimulatedWorker(f"worker-{self._numbers['worker']}", self.hosts.place())
        self.workers.append(worker)
        self.instances[worker.process.name] = (self.loop.time(), float("inf"))
        self.event(f"{worker.process.name} starts")
        self._starts(worker.process.name)

    def start_frontend(self) -> None:
        self._numbers["frontend"] += 1
        number = self._numbers["frontend"]
        frontend = SimulatedFrontend(
            f"frontend-{number}",
            self._mode,
            self.seed + number,
            self.hosts.place(),
            has_queue=self.plan.queue,
            has_stores=self.plan.stores,
        )
        self.frontends.append(frontend)
        self.event(f"{frontend.process.name} starts")
        self._starts(frontend.process.name)

    def kill(self, member: SimulatedWorker | SimulatedFrontend) -> None:
        """As SIGKILL."""
        self.event(f"{member.process.name} is killed")
        now = self.loop.time()
        observers.killed(self.reached, member, drains=bool(self.leaving), has_etcd=self.etcd.is_up)
        self.troubles.append(Trouble(member.process.name, now, float("inf"), "killed"))
        member.process.kill()
        self.network.process_died(member.process)
        self.etcd.process_died(member.process)
        self._gone(member)
        self._buried.append(member)
        for attempt in self.attempts:
            if attempt.frontend is member and attempt.outcome is Outcome.OPEN:
                attempt.end(Outcome.LOST, now)

    def retire(self, worker: SimulatedWorker) -> None:
        """As SIGTERM."""
        observers.terminated(self.reached, worker)
        self._gone(worker)
        self.leaving.append(worker)
        worker.terminate()

    async def ended(self, worker: SimulatedWorker, within_s: float) -> None:
        done, _ = await asyncio.wait([worker.main], timeout=within_s)
        if not done:
            self.violations.append(f"{worker.process.name} did not end within {within_s} s of SIGTERM")
        else:
            self._check_ended(worker)
        worker.process.kill()
        self.network.process_died(worker.process)
        self.leaving.remove(worker)
        self._buried.append(worker)

    def _check_ended(self, member: SimulatedWorker | SimulatedFrontend) -> None:
        if error := member.main.exception():
            self.violations.append(f"{member.process.name} ended with {error!r}")
        elif left := [task.get_name() for task in member.process.tasks if task is not member.main]:
            self.violations.append(f"{member.process.name} ended and left tasks: {left}")

    async def leave(self, frontend: SimulatedFrontend) -> None:
        """As SIGTERM: get no more requests, end those that are open, and end."""
        name = frontend.process.name
        self.event(f"{name} leaves")
        self._gone(frontend)
        async with asyncio.TaskGroup() as tasks:
            for attempt in self.attempts:
                if attempt.frontend is frontend:
                    tasks.create_task(attempt.over.wait())
        frontend.terminate()
        done, _ = await asyncio.wait([frontend.main], timeout=30.0)
        if not done:
            self.violations.append(f"{name} did not end within 30 s of SIGTERM")
        else:
            self._check_ended(frontend)
        frontend.process.kill()
        self.network.process_died(frontend.process)
        self.etcd.process_died(frontend.process)
        self._buried.append(frontend)

    async def sleeping(self, worker: SimulatedWorker, seconds: float) -> None:
        """Let the engines of a worker sleep for a while."""
        assert worker.worker is not None
        sleeper = worker.worker.sleeper
        observers.falls_asleep(self.reached, worker)
        with self.troubling(worker.process.name, f"asleep for {seconds:.1f} s"):
            await self._do(worker, sleeper.sleep())
            await asyncio.sleep(seconds)
            if worker.process.is_alive:
                await self._do(worker, sleeper.wake())

    async def _do(self, worker: SimulatedWorker, work: Coroutine[Any, Any, None]) -> None:
        """Do `work` in a worker's process, which may refuse it while etcd is away or while it leaves, and may die."""
        task = worker.process.context.copy().run(self.loop.create_task, work)
        while not task.done() and worker.process.is_alive:
            await asyncio.wait([task], timeout=1.0)
        if task.done() and (error := task.exception()) is not None and not isinstance(error, Unavailable):
            self.violations.append(f"{worker.process.name} failed at {work}: {error!r}")

    async def within(self, frontend: SimulatedFrontend, work: Coroutine[Any, Any, T]) -> T | None:
        """Do `work` in a frontend's process; None if that dies. Raises the error of it."""
        task = frontend.process.context.copy().run(self.loop.create_task, work)
        while not task.done() and frontend.process.is_alive:
            await asyncio.wait([task], timeout=1.0)
        return task.result() if task.done() else None

    async def pausing(self, member: SimulatedWorker | SimulatedFrontend, seconds: float) -> None:
        """As SIGSTOP and SIGCONT."""
        observers.paused(self.reached, member)
        with self.troubling(member.process.name, f"paused for {seconds} s"):
            member.process.pause()
            await asyncio.sleep(seconds)
            member.process.resume()

    @contextmanager
    def troubling(self, who: str, what: str, *, lossy: bool = False, forever: bool = False) -> Iterator[None]:
        """`who` may be of no use during the body, nor for a while after it."""
        trouble = Trouble(who, self.loop.time(), float("inf"), what, lossy)
        self.troubles.append(trouble)
        self.event(f"{who}: {what}")
        try:
            yield
        finally:
            if not forever:
                trouble.end_s = self.loop.time()
                self.event(f"{who}: {what} (over)")

    def _gone(self, member: SimulatedWorker | SimulatedFrontend) -> None:
        if isinstance(member, SimulatedWorker):
            self.workers.remove(member)
            begin, _ = self.instances[member.process.name]
            self.instances[member.process.name] = (begin, self.loop.time())
        else:
            self.frontends.remove(member)

    def _starts(self, name: str) -> None:
        now = self.loop.time()
        self.reached("started-without-etcd", not self.etcd.is_up)
        self.reached("started-without-nats", not self.nats.is_up)
        self.troubles.append(Trouble(name, now, now, "starts"))

    # The run

    async def run(self) -> None:
        for _ in range(self.plan.workers):
            self.start_worker()
        for _ in range(self.plan.frontends):
            self.start_frontend()
        await self._until_ready()
        self.troubles.clear()
        baseline = self._leftovers()
        end = self.loop.time() + self.plan.seconds
        async with asyncio.TaskGroup() as tasks:
            for number in range(self.plan.clients):
                tasks.create_task(self._client(Random(self.seed * 1000 + number), end))
            if self.plan.stores:
                for number in range(STORE_CLIENTS):
                    tasks.create_task(self.kept.client(Random(self.seed * 1000 + 500 + number), end))
            for _ in range(self.plan.faults):
                tasks.create_task(self._fault(self.loop.time() + self.rng.uniform(0.0, self.plan.seconds)))
        self.event("faults are over")
        await self._settle()
        await self._check_quiet(baseline)
        for attempt in self.attempts:
            self._check(attempt)

    async def _until_ready(self) -> None:
        async with asyncio.timeout(60):
            while not all(self._is_ready(frontend) for frontend in self.frontends):
                await asyncio.sleep(0.05)

    def _is_ready(self, frontend: SimulatedFrontend) -> bool:
        plane = frontend.plane
        return plane is not None and all(
            plane.model_ready(model) and len(plane.models.instances(model)) == len(self.workers) for model in MODELS
        )

    async def _fault(self, begin_s: float) -> None:
        await asyncio.sleep(begin_s - self.loop.time())
        weights = [weight for weight, _ in self._faults]
        _, fault = self.rng.choices(self._faults, weights)[0]
        await cast(Awaitable[None], fault(self))

    async def _client(self, rng: Random, end: float) -> None:
        while self.loop.time() < end:
            await asyncio.sleep(rng.expovariate(1 / 0.5))
            able = [frontend for frontend in self.frontends if frontend.is_in_service]
            if not able:
                continue
            await self._request(rng, rng.choice(able), rng.choice([2.0, 10.0, 30.0, 30.0]))

    async def _request(self, rng: Random, frontend: SimulatedFrontend, timeout_s: float) -> Attempt:
        now = self.loop.time()
        attempt = self._drawn(rng, frontend, now, now + timeout_s)
        if attempt.kind == "endless" or rng.random() < 0.1:
            attempt.leave_after_s = rng.choice([0.0, 0.002, 0.05, 1.0])
        if self.plan.stores:
            attempt.account = rng.choice(["", "alice", LIMITED])
        if attempt.kind != "infer" and rng.random() < 0.15:
            attempt.pause_s = rng.choice([0.05, 0.5])
        self.attempts.append(attempt)
        await self._send(attempt, Random(rng.getrandbits(32)))
        return attempt

    def _drawn(self, rng: Random, frontend: SimulatedFrontend, now: float, deadline: float) -> Attempt:
        """A request of any kind."""
        number, kind = (
            len(self.attempts),
            rng.choice(["infer"] * 4 + ["stream"] * 2 + ["generate"] * 4 + ["decoupled", "endless"]),
        )
        if kind == "generate":
            model = rng.choice(list(LANGUAGE_MODELS))
            return Attempt(number, kind, frontend, now, deadline, rng.choice([1, 10, 40, 100]), model)
        size = rng.choice([4, 400, 9_000, 60_000, 300_000])
        if kind == "decoupled":
            return Attempt(number, "stream", frontend, now, deadline, size, "repeater", rng.choice([0, 2, 5, 20]))
        if kind == "endless":  # and the client leaves
            return Attempt(number, kind, frontend, now, now + 1.0, 400, "repeater", 10_000)
        return Attempt(number, kind, frontend, now, deadline, size)

    async def _send(self, attempt: Attempt, rng: Random) -> None:
        """Run a request to its end, or until it is long overdue."""
        process = attempt.frontend.process
        task = process.context.copy().run(self.loop.create_task, run_request(attempt, rng))
        task.add_done_callback(lambda task: attempt.over.set(), context=Context())
        while not attempt.over.is_set() and (self.loop.time() < attempt.deadline_s + OVERDUE_S or process.is_paused):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await attempt.over.wait()
        if task.done() and not task.cancelled() and (error := task.exception()) is not None:
            self.violations.append(f"{attempt} ended with {error!r}")

    async def _settle(self) -> None:
        """Let the fleet come to rest: nothing is wrong, nothing is asked."""
        await asyncio.sleep(QUIET_S)

    def _leftovers(self) -> dict[str, dict[str, int]]:
        """What each process holds, as numbers that do not change while it is idle."""
        return {member.process.name: {"tasks": len(member.process.tasks)} for member in self.members}

    async def _check_quiet(self, baseline: dict[str, dict[str, int]]) -> None:
        for frontend in self.frontends:
            if not self._is_ready(frontend):
                self.violations.append(f"{frontend.process.name} is not ready after {QUIET_S} s of quiet")
                continue
            name, client = frontend.process.name, frontend.client
            if client.open_streams:
                self.violations.append(f"{name} has {client.open_streams} open streams when idle")
            if lent := client.credits.lent_bytes:
                self.violations.append(f"{name} has lent {lent} bytes of credit when idle")
            if unacknowledged := client.unacknowledged_bytes:
                self.violations.append(f"{name} has {unacknowledged} unacknowledged bytes when idle")
            if len(frontend.loads):
                self.violations.append(f"{name} has {len(frontend.loads)} bookings when idle")
            instances = [instance for model in LANGUAGE_MODELS for instance in frontend.directory.instances(model)]
            if busy := [load for load in frontend.loads.read(frontend.loads.rows(instances), self.loop.time()) if load.requests]:
                self.violations.append(f"{name} sees {len(busy)} loaded instances when idle")
        for worker in self.workers:
            assert worker.worker is not None
            requests = worker.worker.requests
            if requests.open_requests:
                self.violations.append(f"{worker.process.name} has {requests.open_requests} open requests when idle")
            if lent := requests.uploads.lent_bytes:
                self.violations.append(f"{worker.process.name} has lent {lent} bytes when idle")
            if requests.held_bytes:
                self.violations.append(f"{worker.process.name} holds {requests.held_bytes} bytes of requests when idle")
        self._check_memory()
        for name, numbers in self._leftovers().items():
            before = baseline.get(name)
            if before is not None and numbers["tasks"] > before["tasks"] + 1:
                self.violations.append(f"{name} has {numbers['tasks']} tasks when idle; it began with {before['tasks']}")
        await self._check_service()
        if self.plan.stores:
            await self.kept.check()

    def _check_memory(self) -> None:
        """No body is in shared memory any more, and no arena without its process."""
        live = set()
        for member in self.members:
            if member.memory is None:
                continue
            name = member.process.name
            live.add(member.memory.token.partition(":")[0])
            if lent := len(member.memory.arena):
                self.violations.append(f"{name} has lent {lent} regions when idle")
            if held := member.memory.held_regions:
                self.violations.append(f"{name} reads {held} regions when idle")
        if stale := self.hosts.files() - live:
            self.violations.append(f"arenas without a process are left: {sorted(stale)}")

    async def _check_service(self) -> None:
        """When all is well every request is answered, and the index is exact afterwards."""
        rng = Random(self.seed + 7)
        for frontend in self.frontends:
            if frontend.plane is None:
                continue
            for _ in range(6):
                attempt = await self._request(rng, frontend, 20.0)
                is_limited = attempt.account == LIMITED and attempt.error.startswith("RateLimited")
                if attempt.outcome not in (Outcome.RIGHT, Outcome.CANCELLED) and not is_limited:
                    self.violations.append(f"a request fails when all is quiet: {attempt}")
        await asyncio.sleep(5.0)
        workers = [member for member in (*self._buried, *self.workers) if isinstance(member, SimulatedWorker)]
        for frontend in self.frontends:
            for worker in workers:
                for model in LANGUAGE_MODELS:
                    self._check_index(frontend, worker, model)

    def _check_index(self, frontend: SimulatedFrontend, worker: SimulatedWorker, model: str) -> None:
        """The router knows exactly the blocks of a worker on every tier, which are none when it is gone."""
        if frontend.kv is None or worker.worker is None:
            return
        for tier in Tier:
            held = frontend.kv.index(model).held(worker.worker.instance, tier)
            cached = set(worker.engines[model].kv.held(tier)) if worker in self.workers else set()
            if held != cached:
                self.violations.append(
                    f"{frontend.process.name} knows {len(held & cached)} of {len(cached)} blocks of {model} on the tier {tier} "
                    f"at {worker.process.name}, and {len(held - cached)} that it has not"
                )

    def summarize(self, seen: observers.Observers) -> None:
        """Note what only the end of a history shows."""
        seen.ended(self.attempts)
        for member in [*self.members, *self._buried]:
            observers.memory_used(self.reached, member)

    # Judging requests

    def _check(self, attempt: Attempt) -> None:
        if attempt.outcome is Outcome.OPEN:
            self.violations.append(f"never ended: {attempt}")
        elif attempt.ends != 1:
            self.violations.append(f"ended {attempt.ends} times: {attempt}")
        elif attempt.outcome is Outcome.WRONG:
            self.violations.append(f"wrong: {attempt}")
        elif attempt.outcome is not Outcome.LOST and attempt.ended_s > attempt.deadline_s + self._lateness(attempt):
            self.violations.append(f"late: {attempt}")
        elif attempt.account == LIMITED and attempt.error.startswith("RateLimited"):
            return
        elif self.plan.queue and attempt.error.startswith("Overloaded"):
            return  # it says so: the queue was full
        elif attempt.outcome is Outcome.FAILED and attempt.kind not in HOSTILE and self._could_succeed(attempt):
            self.violations.append(f"failed though it could be answered: {attempt}")

    def was_well_since(self, begin_s: float) -> bool:
        """Return whether nothing was in trouble from then on, nor shortly before."""
        return not any(trouble.end_s + RECOVERY_S >= begin_s for trouble in self.troubles)

    def _lateness(self, attempt: Attempt) -> float:
        name = attempt.frontend.process.name
        paused = [t for t in self.troubles if t.who == name and t.what.startswith("paused") and t.end_s > attempt.deadline_s]
        return LATE_S + max((t.end_s - attempt.deadline_s for t in paused), default=0.0)

    def _could_succeed(self, attempt: Attempt) -> bool:
        """Whether frontend and some instance were well for long enough, and what may fail a request did not happen to it."""
        begin, end = attempt.begun_s, attempt.deadline_s
        during = [t for t in self.troubles if t.begin_s <= attempt.ended_s and t.end_s + RECOVERY_S >= begin]
        deaths = sum(t.who in self.instances for t in during)
        if deaths > 1 or any(t.is_lossy for t in during):
            return False
        if during and attempt.is_started and attempt.responses > 1:
            return False  # the rest of a decoupled stream cannot be had from another instance
        frontend = [t for t in self.troubles if t.who in (ALL, attempt.frontend.process.name)]
        needed_s = WELL_S + attempt.own_s + QUEUED_S * self.plan.queue
        return any(
            _free_s(begin, end, [*frontend, *(t for t in self.troubles if t.who == name)], born, died) >= needed_s
            for name, (born, died) in self.instances.items()
        )


def _free_s(begin: float, end: float, troubles: Sequence[Trouble], born: float, died: float) -> float:
    """Return the longest time in [begin, end] without any of `troubles` and inside a life."""
    begin, end = max(begin, born), min(end, died)
    longest, position = 0.0, begin
    for trouble in sorted(troubles, key=lambda trouble: trouble.begin_s):
        if trouble.begin_s < end:
            longest = max(longest, trouble.begin_s - position)
            position = max(position, trouble.end_s + RECOVERY_S)
    return max(longest, end - position)


def run_history(
    seed: int,
    plan: Plan | None = None,
    faults: Sequence[tuple[float, Callable[[Any], Any]]] | None = None,
    *,
    plain: bool = False,
    collect: bool = True,
) -> Result:
    """Run one history to its end.

    `plain`: one of those that there were before milestones. What a seed stands for there does not change any more.

    Without `collect`, what the dead processes of the history leave in cycles stays in memory: for a process that ends soon.
    """
    hook, sys.unraisablehook = sys.unraisablehook, lambda unraisable: None
    if not os.environ.get("SIMULATION_LOGS"):
        logging.disable(logging.CRITICAL)
    gc.disable()  # when it runs depends on more than the seed
    gc.freeze()  # what was there before need not be searched after each history
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            result = _run(seed, plan or _drawn_plan(seed, plain=plain), faults)
            if collect:
                gc.collect()  # coroutines of dead processes; what they say when they are collected means nothing
    finally:
        if collect:
            gc.unfreeze()
            gc.enable()
        logging.disable(logging.NOTSET)
        sys.unraisablehook = hook
    return result


def _drawn_plan(seed: int, *, plain: bool) -> Plan:
    rng, more = Random(seed), Random(seed + 9)
    plan = Plan(
        workers=rng.randint(2, 4), frontends=rng.randint(1, 3), faults=rng.randint(1, 6), seconds=rng.choice([12.0, 25.0])
    )
    if not plain:
        plan.is_aimed = True
        plan.faults += more.randint(0, 3)
        plan.queue = more.random() < 0.5
        plan.stores = more.random() < 0.5
    return plan


def _run(seed: int, plan: Plan, faults: Sequence[tuple[float, Callable[[Any], Any]]] | None) -> Result:
    if faults is None:
        faults = (*FAULTS, *(AIMED if plan.is_aimed else ()), *(BURSTS if plan.queue else ()), *(STORED if plan.stores else ()))
    loop = SimulatedLoop()
    with (
        open_hosts(Random(seed + 8)) as hosts,
        _deterministic(seed, loop, history := History(seed, loop, plan, faults, hosts)),
        observers.observed(history.reached) as seen,
    ):
        asyncio.set_event_loop(loop)
        try:
            loop.run_until_complete(asyncio.wait_for(history.run(), 3600))
        except Exception as error:
            history.violations.append(f"the history broke off: {error!r}")
        outcomes: dict[str, int] = {}
        for attempt in history.attempts:
            outcomes[attempt.outcome.value] = outcomes.get(attempt.outcome.value, 0) + 1
        history.summarize(seen)
        result = Result(seed, history.violations, history.events, outcomes, loop.time(), dict(history.reached.counts))
        _bury(loop, history)
    return result


def _bury(loop: SimulatedLoop, history: History) -> None:
    """Drop what is left: processes that were never asked to end may not clean up any more."""
    for member in [*history.members, *history.leaving]:
        member.process.kill()
    loop.set_exception_handler(lambda loop, context: None)  # tasks that are destroyed while they are pending
    asyncio.set_event_loop(None)
    loop.close()


async def _run_at_once(offload: Offload, function: Callable[..., Any], *args: Any, **more: Any) -> Any:
    return function(*args, **more)  # threads have no place in virtual time


@contextmanager
def _deterministic(seed: int, loop: SimulatedLoop, history: History) -> Iterator[None]:
    """Clocks and random numbers of the whole process come from the history."""
    rng = Random(seed + 4)
    random.seed(seed + 5)
    epoch = 1_800_000_000.0
    with contextlib.ExitStack() as stack:
        for target, name, value in (
            (time, "monotonic", loop.time),
            (time, "time", lambda: epoch + loop.time()),
            (time, "perf_counter", loop.time),
            (secrets, "token_hex", lambda size=16: rng.randbytes(size).hex()),
            (secrets, "token_bytes", rng.randbytes),
            (secrets, "randbits", rng.getrandbits),
            (os, "getpid", lambda: 1),  # a part of tokens
            (sim_engine, "perf_counter", loop.time),
            (serve, "perf_counter_ns", lambda: int(loop.time() * 1e9)),
            (records, "INLINE_BYTES", 1024),
            (object_store, "OBJ_DEFAULT_CHUNK_SIZE", 8192),  # nats-server takes messages of 64 KiB here
            (runner, "SEGMENT_LINES", 2),
            (Offload, "run", _run_at_once),
            (telemetry, "LAG_PERIOD_S", 10.0),  # a simulated loop never lags, and timers cost real time
            (etcd_client, "Transport", lambda config: SimulatedTransport(config, history.etcd)),
        ):
            stack.enter_context(mock.patch.object(target, name, value))
        yield
