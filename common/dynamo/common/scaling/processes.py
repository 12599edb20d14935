"""Which processes have the instances of a pool, and which of them are to end.

Programs that start and end workers count processes: children, or pods. One may have several instances, as with `--num-workers`
or with an engine that has data-parallel ranks, and all of them end with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median_high

from dynamo.common.discovery import Instance
from dynamo.common.names import InstanceId
from dynamo.common.scaling.pool import Pool


def instances_per_process(registrations: Iterable[Instance], pool: Pool) -> int:
    """Return how many instances a process of the pool has: what most instances say, as processes may differ during a rollout.

    The median, the higher one of two: one instance that says too much must not have all other processes ended. 1 if none is
    registered.
    """
    said = [entry.process_instances for entry in registrations if Pool.of(entry.card) == pool]
    return median_high(said) if said else 1


def processes_for(instances: int, per_process: int) -> int:
    """Return how many processes have at least so many instances."""
    return -(-instances // max(1, per_process))


def processes_of(registrations: Iterable[Instance]) -> dict[InstanceId, str]:
    """Return the name of the process that has each instance, without those whose process has no name."""
    return {entry.id: entry.process for entry in registrations if entry.process}


def in_order_of_leaving(leave: Sequence[InstanceId], processes: Mapping[InstanceId, str]) -> list[str]:
    """Return the processes that have the instances of `leave`, the one to end first at the beginning.

    A process ends with all its instances, so those come first of which more are to leave, then those whose first one comes first.
    """
    counts: dict[str, int] = {}  # in the order of `leave`
    for instance in leave:
        if name := processes.get(instance):
            counts[name] = counts.get(name, 0) + 1
    return sorted(counts, key=lambda name: -counts[name])
