"""How a history learns that it came to a milestone: by looking at calls of the real code, and at its state when a fault begins.

The real code has no hooks for this. Methods are wrapped while a history runs, none of them one that is called for each token or
frame. A method that is renamed fails here, and one that is no longer called shows as a milestone that is never reached.
"""

from __future__ import annotations

import asyncio
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any
from unittest import mock
from weakref import WeakSet

from dynamo.common.errors import DeadlineExceeded, DynamoError, InstanceGone, ShuttingDown
from dynamo.common.etcd import Events, Put, Reset
from dynamo.common.etcd.lease import LeaseSession
from dynamo.common.etcd.leases import Leases
from dynamo.common.messaging.jetstream import records
from dynamo.common.messaging.jetstream.records import RecordStore
from dynamo.common.messaging.nats.socket_transport import SocketTransport
from dynamo.common.messaging.request_plane.client import RequestClient
from dynamo.common.messaging.request_plane.incoming import Incoming
from dynamo.common.messaging.request_plane.request_stream import RequestStream
from dynamo.common.messaging.request_plane.server import RequestServer
from dynamo.common.names import InstanceId
from dynamo.common.options import NatsOptions
from dynamo.common.shared_memory.arena import Arena
from dynamo.frontend.api.openai.batches.batch import Batches
from dynamo.frontend.api.openai.batches.runner import BatchRunner
from dynamo.frontend.api.openai.store.stored import StoredResponses
from dynamo.frontend.fleet.directory import Directory
from dynamo.frontend.fleet.kv.feed import KvFeed
from dynamo.frontend.fleet.kv.follow import Follower
from dynamo.frontend.fleet.peers.usage import UsageStore
from dynamo.frontend.metrics import ModelMetrics
from dynamo.frontend.router.loads.table import LoadTable
from dynamo.frontend.security.sharing import Shares
from dynamo.frontend.serving.dispatch.dispatched_stream import DispatchedStream
from dynamo.frontend.serving.queue.admission import QueuePosition
from dynamo.frontend.serving.queue.fair_share import QueueShare
from tests.simulation.clients import Attempt, Outcome
from tests.simulation.milestones import Reached
from tests.simulation.process import SimulatedFrontend, SimulatedWorker

_RETRIES = {"died": "retried-after-death", "lost": "retried-after-loss", "link": "retried-after-link"}
"""By the reasons of `retry`; the others are refusals."""
_QUEUE = {"full": "queue-full", "late": "queue-late", "expired": "queue-expired"}
_SILENT_S = NatsOptions().silence_s
_SILENT = "does not respond any more"
_FORGOTTEN = "does not know the request any more"


@contextmanager
def observed(reached: Reached) -> Iterator[Observers]:
    """Note what the code of frontends and workers comes to while the body runs."""
    with ExitStack() as stack:
        yield Observers(reached, stack)


class Observers:
    """The observers of one history; use `observed`."""

    def __init__(self, reached: Reached, stack: ExitStack) -> None:
        self._reached = reached
        self._stack = stack
        self._over: dict[tuple[str, int], str] = {}
        """Streams that ended here before their response came, with the milestone that a late response is."""
        self._recovered: Counter[str] = Counter()
        """How often each request failed at an instance, by its id."""
        self._moves: Counter[str] = Counter()
        self._holders: WeakSet[LeaseSession] = WeakSet()
        """Sessions that have had a lease."""
        self._carried: dict[str, bytes] = {}
        """Who carried out each batch last."""
        self._watch_requests()
        self._watch_dispatch()
        self._watch_discovery()
        self._watch_routing()
        self._watch_memory()
        self._watch_stores()

    def _before(self, owner: type, name: str, look: Callable[..., None]) -> None:
        """Call `look` before a method, with what that is called with."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def wrapped(*args: Any, **more: Any) -> Any:
            look(*args, **more)
            return original(*args, **more)

        self._stack.enter_context(mock.patch.object(owner, name, wrapped))

    def _after(self, owner: type, name: str, look: Callable[..., None]) -> None:
        """Call `look` after a method, with its result and what it was called with."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def wrapped(*args: Any, **more: Any) -> Any:
            result = original(*args, **more)
            look(result, *args, **more)
            return result

        self._stack.enter_context(mock.patch.object(owner, name, wrapped))

    def _awaited(self, owner: type | ModuleType, name: str, look: Callable[..., None]) -> None:
        """Call `look` after a method or function that is a coroutine, with its result and what it was called with."""
        original = getattr(owner, name)

        @functools.wraps(original)
        async def wrapped(*args: Any, **more: Any) -> Any:
            result = await original(*args, **more)
            look(result, *args, **more)
            return result

        self._stack.enter_context(mock.patch.object(owner, name, wrapped))

    def _failing(self, owner: type, name: str, milestone: str) -> None:
        """Note that a method, which is a coroutine, raised an error of ours."""
        original = getattr(owner, name)

        @functools.wraps(original)
        async def wrapped(*args: Any, **more: Any) -> Any:
            try:
                return await original(*args, **more)
            except DynamoError:
                self._reached(milestone)
                raise

        self._stack.enter_context(mock.patch.object(owner, name, wrapped))

    def _reach(self, name: str) -> Callable[..., None]:
        return lambda *args, **more: self._reached(name)

    # Requests

    def _watch_requests(self) -> None:
        self._before(RequestStream, "_on_gap", self._reach("response-lost"))
        self._before(RequestStream, "expire", functools.partial(self._ends, "response-after-deadline"))
        self._before(RequestStream, "cancel", functools.partial(self._ends, "response-after-cancel"))
        self._before(RequestStream, "fail", self._stream_fails)
        self._after(RequestStream, "on_blocked", self._blocked)
        self._before(RequestClient, "_check", self._checks)
        self._before(RequestClient, "_fail_streams", self._gives_up)
        self._before(RequestClient, "on_sign_of_life", self._awaits_sign)
        self._before(Incoming, "_lose", self._reach("request-lost"))
        self._before(Incoming, "fail", self._request_fails)
        self._before(RequestServer, "stop_all", lambda server: self._reached("drain-timed-out", server.open_requests > 0))
        self._before(RequestServer, "_drop", self._drops)
        self._before(SocketTransport, "abort", self._aborts)

    def _ends(self, late: str, stream: RequestStream) -> None:
        if not stream._over and stream.batch >= 0:
            self._over[stream._client.prefix, stream.id] = late

    def _stream_fails(self, stream: RequestStream, error: DynamoError) -> None:
        if not stream._over and isinstance(error, InstanceGone):
            self._reached("request-forgotten", _FORGOTTEN in str(error))
            self._reached("instance-unreached", not error.was_held and not error.is_alive)

    def _blocked(self, result: None, stream: RequestStream, granted: int, seq: int, needed: int) -> None:
        self._reached("credit-queued", stream in stream._client.credits.on_demand._waiting)

    def _checks(self, client: RequestClient, peer: Any, interval_s: float) -> None:
        for id_ in peer.unknown:
            if (late := self._over.pop((client.prefix, id_), None)) is not None:
                self._reached(late)

    def _awaits_sign(self, client: RequestClient, callback: object) -> None:
        client._on_sign_of_life.append(self._reach("instance-returned"))

    def _gives_up(self, client: RequestClient, peer: Any, why: str, unsent_since: int | None = None) -> None:
        if peer.streams:
            self._reached("instance-silent" if why == _SILENT else "instance-absent")

    def _request_fails(self, request: Incoming, error: DynamoError) -> None:
        self._reached("drain-refused", isinstance(error, ShuttingDown) and not request._seq)
        self._reached("deadline-at-worker", isinstance(error, DeadlineExceeded))

    def _drops(self, server: RequestServer, address: str, peer: Any) -> None:
        if peer.requests:
            self._reached("caller-silent" if peer.silent_s > server.limits.caller_gone_after_s else "caller-absent")

    def _aborts(self, transport: SocketTransport) -> None:
        now = asyncio.get_running_loop().time()
        self._reached("link-silent", not transport.lost.is_set() and now - transport.last_read_at > _SILENT_S)

    # Dispatch

    def _watch_dispatch(self) -> None:
        self._before(
            ModelMetrics, "recovered", lambda metrics, reason: self._reached(_RETRIES.get(reason, "retried-after-refusal"))
        )
        self._before(ModelMetrics, "migrated", self._reach("moved"))
        self._before(ModelMetrics, "queue_refused", self._queue_refused)
        self._before(DispatchedStream, "_recover", self._recovers)
        self._before(DispatchedStream, "move", self._moves_on)
        self._before(Directory, "mark_down", self._reach("marked-down"))
        self._before(QueuePosition, "__exit__", self._leaves_queue)
        self._after(QueueShare, "holds_back", lambda holds, *args: self._reached("queue-held-back", holds))

    def _queue_refused(self, metrics: ModelMetrics, reason: str) -> None:
        if (name := _QUEUE.get(reason)) is not None:
            self._reached(name)

    def _recovers(self, stream: DispatchedStream, error: DynamoError, *, is_delivered: bool) -> None:
        self._recovered[stream._call.request_id] += 1
        self._reached("retried-twice", stream._attempts.number == 1)

    def _moves_on(self, stream: DispatchedStream, error: DynamoError, work: object) -> None:
        self._moves[stream._call.request_id] += 1

    def _leaves_queue(
        self, place: QueuePosition, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        self._reached("queue-left", isinstance(error, asyncio.CancelledError))
        self._reached("queue-waited", kind is None and place._turn is not None)

    # Discovery

    def _watch_discovery(self) -> None:
        self._before(LeaseSession, "_in_doubt", self._reach("lease-in-doubt"))
        self._before(LeaseSession, "_grant", lambda session: self._reached("lease-lost", session in self._holders))
        self._before(LeaseSession, "_renewed", lambda session, sent, ttl_s: self._holders.add(session))
        self._before(Directory, "_reset", lambda directory, reset: self._reached("history-lost", reset.history_lost))
        self._before(Directory, "_missed", lambda directory, keys: self._reached("registration-awaited", len(set(keys))))
        self._before(Directory, "_remove", lambda directory, keys, *_: self._reached("registration-dropped", len(set(keys))))
        self._before(Directory, "_take", self._returned)

    def _returned(self, directory: Directory, change: Reset | Events) -> None:
        kvs = change.kvs if isinstance(change, Reset) else [event.kv for event in change.events if isinstance(event, Put)]
        self._reached("registration-returned", sum(kv.key in directory._absent for kv in kvs))

    # Routing

    def _watch_routing(self) -> None:
        self._before(Follower, "recovered", lambda follower, updates: self._reached("gap-repaired", len(updates)))
        self._before(Follower, "snapshot", self._takes_snapshot)
        self._failing(KvFeed, "_query_missed", "resync-unanswered")
        self._before(KvFeed, "suspend", self._suspends)
        self._before(KvFeed, "resume", self._reach("events-resumed"))
        self._before(LoadTable, "_forget_peer", self._forgets_peer)
        self._before(LoadTable, "remove_instance", self._removes_instance)

    def _takes_snapshot(self, follower: Follower, snapshot: Any) -> None:
        if follower.number is not None:
            self._reached("snapshot-stale" if snapshot.number < follower.number else "gap-snapshot")

    def _suspends(self, feed: KvFeed) -> None:
        self._reached("events-dropped")
        self._reached("events-dropped-in-resync", any(source.resync is not None for source in feed._sources.values()))

    def _forgets_peer(self, loads: LoadTable, origin: str) -> None:
        self._reached("peer-forgotten")
        self._reached("killed-with-bookings", len(loads._peers[origin].loads))

    def _removes_instance(self, loads: LoadTable, instance: InstanceId) -> None:
        load = loads._loads.get(instance)
        self._reached("removed-with-bookings", 0 if load is None else len(load.bookings))

    # Shared memory

    def _watch_memory(self) -> None:
        self._before(Arena, "_revoke", lambda arena, region: self._reached("region-revoked", not region.is_revoked))
        self._before(RequestStream, "on_far", lambda stream: self._reached("body-sent-again", bool(stream._lent)))

    # Stores

    def _watch_stores(self) -> None:
        self._failing(RecordStore, "get", "store-refused")
        self._failing(RecordStore, "put", "store-refused")
        self._awaited(RecordStore, "put", lambda revision, *args, **more: self._reached("record-contested", revision is None))
        self._awaited(records, "read_object", self._reach("record-large"))
        self._awaited(Leases, "take", self._takes_lease)
        self._awaited(Batches, "put_segment", lambda is_kept, *args: self._reached("segment-contested", not is_kept))
        self._failing(BatchRunner, "_worked_on", "batch-stopped")
        self._failing(StoredResponses, "save", "response-delayed")
        self._failing(UsageStore, "save", "ledger-delayed")
        self._after(Shares, "_refresh", lambda nothing, shares, now: self._reached("limit-isolated", shares.is_isolated))

    def _takes_lease(self, is_ours: bool, leases: Leases, name: str) -> None:
        if not is_ours:
            self._reached("batch-contested")
        elif self._carried.setdefault(name, leases._holder) != leases._holder:
            self._reached("batch-taken-over")
            self._carried[name] = leases._holder

    # What ended

    def ended(self, attempts: Iterable[Attempt]) -> None:
        """Look at the requests of a history when it is over."""
        for attempt in attempts:
            id_ = f"r{attempt.number}"
            if attempt.outcome is Outcome.RIGHT:
                self._reached("retried-to-success", self._recovered[id_] and not self._moves[id_])
                self._reached("moved-to-success", min(self._moves[id_], 1))
            elif attempt.outcome is Outcome.CANCELLED:
                self._reached("left-after-first" if attempt.is_started else "left-before-first")
            elif attempt.outcome is Outcome.FAILED:
                self._reached("blamed", "died while they held" in attempt.error)
                self._reached("no-instance", attempt.error.startswith("NoInstances"))
                if attempt.error.startswith("DeadlineExceeded"):
                    self._reached("deadline-after-first" if attempt.is_started else "deadline-before-first")
            self._reached("moved-twice", self._moves[id_] > 1)


# What is so when a fault begins


def _requests(worker: SimulatedWorker) -> list[Incoming]:
    if worker.worker is None:
        return []
    return [request for peer in worker.worker.requests._peers.values() for request in peer.requests.values()]


def _waits_for_credit(request: Incoming) -> bool:
    return bool(request._outgoing)


PHASES: Mapping[str, Callable[[Incoming], bool]] = {
    "upload": lambda request: not request.is_whole,
    "before-first": lambda request: request.is_whole and not request._seq,
    "after-first": lambda request: request._seq > 0,
    "credit": _waits_for_credit,
}
"""Where a request can be at its worker."""


def worker_in(phase: str, workers: Iterable[SimulatedWorker], request_id: str = "") -> SimulatedWorker | None:
    """Return a worker that has a request in a phase, or that one request."""
    for worker in workers:
        for request in _requests(worker):
            if request_id in ("", request.request_id) and PHASES[phase](request):
                return worker
    return None


def keeps(frontend: SimulatedFrontend, kind: str) -> int:
    """Return how many batches, or responses in the background, a frontend works on."""
    stores = frontend.stores
    return 0 if stores is None else len(stores.runner._running if kind == "batch" else stores.background._tasks)


def killed(reached: Reached, member: SimulatedFrontend | SimulatedWorker, *, drains: bool, has_etcd: bool) -> None:
    """A process is about to be killed; `drains`: while another worker drains."""
    if isinstance(member, SimulatedWorker):
        requests = _requests(member)
        for phase, is_in in PHASES.items():
            reached(f"killed-{phase}", sum(map(is_in, requests)))
        reached("killed-in-drain", drains)
        reached("killed-without-etcd", not has_etcd)
    elif member.plane is not None:
        reached("frontend-killed-open", member.client.open_streams)
        queue = member.plane._dispatcher._shared.queue
        if (stores := member.stores) is not None:
            reached("killed-with-batch", len(stores.runner._running))
            reached("killed-with-response", len(stores.background._tasks))
        reached("queue-killed", 0 if queue is None else sum(map(len, queue._queues.values())))
    if member.memory is not None:
        reached("owner-killed", len(member.memory.arena))
        reached("reader-killed", member.memory.held_regions)


def terminated(reached: Reached, worker: SimulatedWorker) -> None:
    reached("terminated-open", len(_requests(worker)))


def falls_asleep(reached: Reached, worker: SimulatedWorker) -> None:
    reached("asleep-open", len(_requests(worker)))


def paused(reached: Reached, member: SimulatedFrontend | SimulatedWorker) -> None:
    if isinstance(member, SimulatedWorker):
        reached("paused-open", len(_requests(member)))
    if member.memory is not None:
        reached("reader-paused", len(member.memory.arena) + member.memory.held_regions)


def nats_stops(reached: Reached, workers: Iterable[SimulatedWorker]) -> None:
    for worker in workers:
        reached("nats-down-in-credit", sum(map(_waits_for_credit, _requests(worker))))
        reached("nats-down-in-upload", 0 if worker.worker is None else len(worker.worker.requests.uploads._waiting))


def etcd_starts(reached: Reached, workers: Iterable[SimulatedWorker]) -> None:
    for worker in workers:
        reached("registered-late", worker.worker is not None and not worker.worker.registration.registered.is_set())


def memory_used(reached: Reached, member: SimulatedFrontend | SimulatedWorker) -> None:
    """Look at what a process counted of its shared memory, when it is over."""
    if (memory := member.memory) is not None:
        who = "worker" if isinstance(member, SimulatedWorker) else "frontend"
        reached(f"lent-by-{who}", memory.bytes["lent"] > 0)
        for reason, name in (("full", "arena-full"), ("unreachable", "arena-unreachable"), ("refused", "region-refused")):
            reached(name, memory.fallbacks[reason])
