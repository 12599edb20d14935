"""As many workers as the targets in etcd want: what a planner has decided is carried out on this machine.

A worker that is to end gets SIGTERM: it leaves the fleet, finishes what it has, and ends; so no request fails. Targets that do
not change, as without a planner, change nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence

from dynamo.common.discovery import Instance
from dynamo.common.errors import DynamoError
from dynamo.common.etcd import Etcd
from dynamo.common.etcd.document import DocumentType, EtcdDocument
from dynamo.common.process.background import Tasks, running, running_tasks
from dynamo.common.scaling.pool import Pool
from dynamo.common.scaling.processes import in_order_of_leaving, processes_for
from dynamo.common.scaling.targets import PoolTarget, Targets, decode_targets, encode_targets, targets_key
from dynamo.local.supervisor import Report
from dynamo.local.view import read_instances
from dynamo.local.workers import Workers

log = logging.getLogger(__name__)

TARGETS: DocumentType[Targets] = DocumentType("targets", Targets(), encode_targets, decode_targets)
_LOOK_AGAIN_S = 5.0
"""Without a change: models may have been registered since, for which there was a target already."""


class TargetFollower:
    """Adds and ends workers until there are as many as the targets of their pools want: as those of the pool that wants most."""

    RETRY_S = 1.0
    """When etcd could not be read."""

    def __init__(self, etcd: Etcd, namespace: str, workers: Workers, report: Report) -> None:
        self._etcd = etcd
        self._namespace = namespace
        self._workers = workers
        self._report = report
        self._per_worker: dict[Pool, int] = {}
        """How many instances of each pool a worker has; kept when none is left, since a target may want one again."""
        self._changed = asyncio.Event()
        self._targets = EtcdDocument(etcd, targets_key(namespace), TARGETS, on_change=lambda targets: self._changed.set())

    async def run(self) -> None:
        """Follow the targets until cancelled. Workers that are ending then go on to do so."""
        async with running(self._targets.follow(), "targets"), running_tasks() as ending:
            while True:
                self._changed.clear()
                pause_s = _LOOK_AGAIN_S
                try:
                    await self._carry_out(self._targets.value, ending)
                except DynamoError as error:
                    log.warning("the targets cannot be carried out, which is tried again: %s", error)
                    pause_s = self.RETRY_S
                try:
                    async with asyncio.timeout(pause_s):
                        await self._changed.wait()
                except TimeoutError:
                    continue

    async def _carry_out(self, targets: Targets, ending: Tasks) -> None:
        registrations = await read_instances(self._etcd, self._namespace)
        serving = self._workers.serving(registrations)
        self._learn(instance for instances in serving.values() for instance in instances)
        own = [target for target in targets.targets if target.pool in self._per_worker]
        if not own:
            return
        most = max(own, key=self._workers_for)
        wanted, names = self._workers_for(most), self._workers.names
        for _ in range(wanted - len(names)):
            if (name := self._workers.add()) is None:
                log.warning("%d workers are wanted for %s; there are as many as there may be", wanted, most.pool)
                break
            self._report(f"{name} starts: {why(most)}")
        for name in workers_to_end(len(names) - wanted, names, serving, own):
            self._report(f"{name} leaves: {why(most)}")
            ending.start(self._workers.end(name), f"end of {name}")

    def _learn(self, instances: Iterable[Instance]) -> None:
        for instance in instances:
            self._per_worker[Pool.of(instance.card)] = instance.process_instances

    def _workers_for(self, target: PoolTarget) -> int:
        return processes_for(target.instances, self._per_worker[target.pool])


def why(target: PoolTarget) -> str:
    """Return what a target wants, in words."""
    return f"{target.pool} is to have {target.instances} instance(s)" + (f", {target.reason}" if target.reason else "")


def workers_to_end(
    excess: int, names: Sequence[str], serving: Mapping[str, Sequence[Instance]], targets: Sequence[PoolTarget]
) -> list[str]:
    """Return the workers to end: first those that do not serve yet, then as the targets say, then those that started last."""
    processes = {instance.id: name for name, instances in serving.items() for instance in instances}
    starting = [name for name in reversed(names) if name not in serving]
    leaving = in_order_of_leaving([instance for target in targets for instance in target.leave], processes)
    order = dict.fromkeys([*starting, *(name for name in leaving if name in names), *reversed(names)])
    return list(order)[: max(0, excess)]
