"""Opens requests at instances, and keeps what all requests of a process are dispatched with."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from dynamo.common.discovery import Instance
from dynamo.common.messaging.buffers import Body, Buffer
from dynamo.common.messaging.nats.connection import Connection
from dynamo.common.messaging.request_plane.client import RequestClient
from dynamo.common.names import InstanceId
from dynamo.common.scaling.pool import Pool
from dynamo.frontend.config import ServingOptions
from dynamo.frontend.fleet.directory import Directory
from dynamo.frontend.router.base import Router
from dynamo.frontend.router.demand import DemandTable, WaitingRequests
from dynamo.frontend.serving.call import Call, Work
from dynamo.frontend.serving.dispatch.booking import Booker
from dynamo.frontend.serving.dispatch.candidates import Candidates
from dynamo.frontend.serving.dispatch.circuits import Circuits, OnCircuit
from dynamo.frontend.serving.dispatch.dispatched_stream import DispatchedStream
from dynamo.frontend.serving.dispatch.parts import DispatchParts
from dynamo.frontend.serving.dispatch.prefix_reuse import PrefixReuse
from dynamo.frontend.serving.dispatch.retry import (
    Attempts,
    RetryBudgets,
    RetryPolicy,
    Suspects,
)
from dynamo.frontend.serving.queue.admission import AdmissionQueue
from dynamo.frontend.serving.queue.fair_share import FairShares
from dynamo.frontend.serving.queue.starting import NoStandby, StartQueue


class Dispatcher:
    """Opens requests at instances. Made once per process, inside its event loop."""

    def __init__(
        self,
        directory: Directory,
        client: RequestClient,
        link: Connection,
        router: Router,
        settings: ServingOptions | None = None,
        queue: AdmissionQueue | None = None,
        demand: DemandTable | None = None,
        starts: StartQueue | None = None,
        on_circuit: OnCircuit = lambda model, count, opened: None,
    ) -> None:
        """`demand`: where `router` counts the requests that it places; those that get no instance are counted here."""
        settings = settings or ServingOptions()
        retry, clock = settings.retry, asyncio.get_running_loop().time
        self.circuits = Circuits(settings.circuit, directory.instances, clock, on_circuit)
        """Which instances fail too many requests."""
        self._client = client
        self.router = router
        self._timeout_s = settings.request_timeout_s
        self._clock = clock
        self._shared = DispatchParts(
            candidates=Candidates(directory, self.circuits, retry.refusal_pause_s, clock),
            booker=Booker(router, client, self.circuits, None if queue is None else queue.poke),
            queue=queue,
            link=link,
            reconnect_grace_s=retry.reconnect_grace_s,
            policy=RetryPolicy(retry),
            budgets=RetryBudgets(retry, clock()),
            suspects=Suspects(),
            demand=demand or DemandTable(),
            starts=starts or StartQueue(directory, NoStandby(), settings.start),
            clock=clock,
        )
        self.reuse = PrefixReuse(clock)
        """How much of the prompts was cached at each instance."""

    @property
    def candidates(self) -> Candidates:
        return self._shared.candidates

    @property
    def fair_shares(self) -> FairShares | None:
        """The fair shares of keys whose requests wait in queues; None without a queue."""
        return None if self._shared.queue is None else self._shared.queue.fair_shares

    def waiting(self) -> Mapping[Pool, WaitingRequests]:
        """Return how many requests wait for the instances of each pool."""
        queue = self._shared.queue
        waiting = dict(self._shared.starts.waiting_requests())
        for pool, requests in ({} if queue is None else queue.waiting_requests()).items():
            waiting[pool] = waiting.get(pool, WaitingRequests(0)) + requests
        return waiting

    def passed_over(self, name: str) -> None:
        """Count a request that another model serves, because this one has no instance yet. Its tokens are not known."""
        pool = self._shared.starts.pool_named(name)
        if pool is not None and not self._shared.candidates.able_to_serve(name):
            self._shared.demand.of(pool.model, pool.role).refused += 1

    async def missing_tokens(self, work: Work, candidates: Sequence[Instance]) -> int | None:
        """Return the fewest tokens of the prompt that one of `candidates` has not cached, as the router has it; None: unknown."""
        return await self._shared.booker.missing_tokens(work, candidates)

    def leave_out(self, instance: InstanceId) -> None:
        """Send the instance no requests until `take_back`, unless there is no other."""
        self._shared.candidates.leave_out(instance)

    def take_back(self, instance: InstanceId) -> None:
        """End `leave_out`."""
        self._shared.candidates.take_back(instance)

    def stream(self, work: Work, call: Call) -> DispatchedStream:
        """A request with any number of responses. An instance is picked when they are read.

        Raises EngineError for a schema or grammar that instances died of.
        """
        if work.fingerprint:
            self._shared.suspects.check(work.fingerprint, self._clock())
        work.carried = call.progress.carried
        deadline = call.deadline if self._timeout_s is None else self.deadline(call)
        return DispatchedStream(self._shared, work, call, deadline, Attempts())

    async def query(self, instance: Instance, verb: str, body: Body, deadline: float) -> Buffer:
        """Query one instance about itself: not routed, not booked, not repeated. Raises DynamoError."""
        return await self.query_at(instance.id, instance.subject, verb, body, deadline)

    async def query_at(self, instance: InstanceId, subject: str, verb: str, body: Body, deadline: float) -> Buffer:
        """Query an instance that need not serve a model."""
        stream = self._client.open(instance, subject, verb, body, deadline=deadline)
        try:
            return await stream.result()
        finally:
            stream.cancel()

    def deadline(self, call: Call) -> float | None:
        """Return the call's deadline, or else the default one, counted from now."""
        if call.deadline is not None or self._timeout_s is None:
            return call.deadline
        return self._clock() + self._timeout_s

    def removed(self, instance: InstanceId) -> None:
        """An instance deregistered."""
        self._shared.candidates.removed(instance)
        self.circuits.removed(instance)
        self.reuse.forget(instance)
        self.router.removed(instance)
