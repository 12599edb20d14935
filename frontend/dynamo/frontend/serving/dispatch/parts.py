"""What all requests of a process are dispatched with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dynamo.common.errors import DynamoError, InstanceGone
from dynamo.common.messaging.nats.connection import Connection
from dynamo.common.scaling.pool import Pool
from dynamo.frontend.router.demand import DemandTable
from dynamo.frontend.serving.call import Call, Work
from dynamo.frontend.serving.dispatch.booking import Booker
from dynamo.frontend.serving.dispatch.candidates import Candidates
from dynamo.frontend.serving.dispatch.retry import RetryBudgets, RetryPolicy, Suspects
from dynamo.frontend.serving.queue.admission import AdmissionQueue
from dynamo.frontend.serving.queue.starting import StartQueue


@dataclass(frozen=True, slots=True)
class DispatchParts:
    """What all requests of a process are dispatched with."""

    candidates: Candidates
    booker: Booker
    queue: AdmissionQueue | None
    link: Connection
    reconnect_grace_s: float
    policy: RetryPolicy
    budgets: RetryBudgets
    suspects: Suspects
    demand: DemandTable
    starts: StartQueue
    clock: Callable[[], float]

    def starting(self, work: Work, call: Call) -> Pool | None:
        """Return the pool whose first instance is to start for work that no instance can do now; None: nothing starts.

        Instances of the pool that cannot do it, such as those with another tokenizer, are no reason to wait.
        """
        if work.pinned is not None or call.is_copy:
            return None
        pool = self.starts.pool(work.name or work.model, work.model, work.role)
        return pool if pool is not None and not self.candidates.are_others(work) else None

    def is_disturbed(self, now: float) -> bool:
        """Return whether our own connection is away or silent, or came back so recently that those of the instances may not."""
        link = self.link
        return not link.is_connected or link.is_silent or now - link.reconnected_at < self.reconnect_grace_s

    def may_come_back(self, error: DynamoError, now: float) -> bool:
        """Return whether the instance that failed with `error` is probably well: see `retry`."""
        if self.is_disturbed(now):
            return True
        is_young = now - self.link.opened_at < self.reconnect_grace_s
        return is_young and isinstance(error, InstanceGone) and not error.has_responded
