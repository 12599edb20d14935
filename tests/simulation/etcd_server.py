"""etcd as our client sees it: a store with revisions, leases, watches and compaction, at the level of its messages.

What the real server does is checked by the same tests (`test_contracts`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from random import Random
from typing import Any

from dynamo.common.etcd.errors import EtcdUnavailable, from_text
from dynamo.common.options import EtcdOptions
from dynamo.protos import etcd_pb2 as pb
from tests.simulation.clock import Process, SimulatedLoop, current_process

_END = object()
_CLUSTER_ID = 0xC1


class SimulatedEtcd:
    """The store, and who may reach it."""

    def __init__(self, loop: SimulatedLoop, rng: Random, *, reached: Callable[[str], None] = lambda milestone: None) -> None:
        self.loop = loop
        self.reached = reached
        self.is_up = True
        self.is_hung = False
        self._rng = rng
        self._cut: set[Process] = set()
        self.readers: set[Process] = set()
        """Processes that have had a watch."""
        self._streams: dict[SimulatedStream, None] = {}
        self._begin_anew(_CLUSTER_ID)

    def _begin_anew(self, cluster_id: int) -> None:
        self.cluster_id = cluster_id
        self.revision = 1
        self.compacted = 0
        self.keys: dict[bytes, pb.KeyValue] = {}
        self.history: list[tuple[int, list[pb.Event]]] = []
        self.leases: dict[int, tuple[float, float]] = {}
        """Time to live and end, both in seconds."""
        self.owners: dict[int, Process | None] = {}
        """Who was granted each lease."""

    # Faults

    def stop(self) -> None:
        self.is_up = False
        self._break(lambda stream: True)

    def start(self, *, lose_data: bool = False) -> None:
        """Come back, after another stop if it is up. Leases begin anew, as after a restart of the real one."""
        self.stop()
        self.is_up = True
        if lose_data:
            self._begin_anew(self.cluster_id + 1)
        now = self.loop.time()
        self.leases = {lease: (ttl, now + ttl) for lease, (ttl, _) in self.leases.items()}
        for lease in self.leases:
            self._watch_lease(lease)

    def cut_off(self, process: Process) -> None:
        """A partition between etcd and one process: streams fall silent, calls run into their timeout."""
        self._cut.add(process)

    def let_in(self, process: Process) -> None:
        self._cut.discard(process)
        self._break(lambda stream: stream.process is process)

    def lose_quorum(self) -> None:
        """Take no requests, while the leases that cannot be renewed go on."""
        self.is_hung = True

    def regain_quorum(self, *, compacted: bool) -> None:
        """Take requests again, and end leases that are over. `compacted`: clients that were connected have to list again."""
        self.is_hung = False
        for lease, (_, end) in list(self.leases.items()):
            if end <= self.loop.time():
                self._end_lease(lease)
            else:  # its time may have been looked at meanwhile, when it was renewed already
                self._watch_lease(lease)
        if compacted:
            self.compact()
        self._break(lambda stream: True)

    def compact(self) -> None:
        """Forget how the present state came about."""
        self.compacted = self.revision
        self.history.clear()

    def process_died(self, process: Process) -> None:
        for stream in [stream for stream in self._streams if stream.process is process]:
            self._streams.pop(stream, None)

    def _break(self, which: Callable[[SimulatedStream], bool]) -> None:
        for stream in [stream for stream in self._streams if which(stream)]:
            self._streams.pop(stream, None)
            stream.put(EtcdUnavailable("etcd at simulated: the stream has ended"))

    # What transports need

    def reaches(self, process: Process | None) -> bool:
        return process not in self._cut

    async def delay(self) -> None:
        await asyncio.sleep(0.0003 + self._rng.random() * 0.001)

    def respond(self, request: Any) -> Any:
        """The response to a unary call. Raises as the client library would."""
        header = pb.ResponseHeader(cluster_id=self.cluster_id, revision=self.revision)
        if isinstance(request, pb.RangeRequest):
            if request.revision and request.revision < self.compacted:
                raise from_text("etcdserver: mvcc: required revision has been compacted", "simulated")
            kvs = [self.keys[key] for key in sorted(self.keys) if _within(key, request.key, request.range_end)]
            return pb.RangeResponse(header=header, kvs=kvs, count=len(kvs))
        if isinstance(request, pb.PutRequest):
            if request.lease and request.lease not in self.leases:
                raise from_text("etcdserver: requested lease not found", "simulated")
            self._put(request.key, request.value, request.lease)
            return pb.PutResponse(header=pb.ResponseHeader(cluster_id=self.cluster_id, revision=self.revision))
        if isinstance(request, pb.DeleteRangeRequest):
            gone = [key for key in sorted(self.keys) if _within(key, request.key, request.range_end)]
            self._delete(gone)
            return pb.DeleteRangeResponse(header=header, deleted=len(gone))
        if isinstance(request, pb.TxnRequest):
            return self._transact(request)
        if isinstance(request, pb.LeaseGrantRequest):
            lease = self._rng.getrandbits(62) + 1
            self.leases[lease] = (request.TTL, self.loop.time() + request.TTL)
            self.owners[lease] = current_process()
            self._watch_lease(lease)
            return pb.LeaseGrantResponse(header=header, ID=lease, TTL=request.TTL)
        if isinstance(request, pb.LeaseRevokeRequest):
            if request.ID not in self.leases:
                raise from_text("etcdserver: requested lease not found", "simulated")
            self._end_lease(request.ID)
            return pb.LeaseRevokeResponse(header=header)
        raise NotImplementedError(type(request).__name__)

    def _transact(self, request: pb.TxnRequest) -> pb.TxnResponse:
        """Do one thing or another, by the revisions at which keys changed last."""
        for compare in request.compare:
            if (compare.target, compare.result) != (pb.Compare.MOD, pb.Compare.EQUAL):
                raise NotImplementedError(str(compare))
        revisions = [self.keys[each.key].mod_revision if each.key in self.keys else 0 for each in request.compare]
        succeeded = revisions == [each.mod_revision for each in request.compare]
        responses = []
        for operation in request.success if succeeded else request.failure:
            kind = operation.WhichOneof("request")
            assert kind is not None
            response = self.respond(getattr(operation, kind))
            responses.append(pb.ResponseOp(**{kind.replace("request", "response"): response}))
        header = pb.ResponseHeader(cluster_id=self.cluster_id, revision=self.revision)
        return pb.TxnResponse(header=header, succeeded=succeeded, responses=responses)

    def renew(self, lease: int) -> pb.LeaseKeepAliveResponse:
        header = pb.ResponseHeader(cluster_id=self.cluster_id, revision=self.revision)
        if lease not in self.leases:
            return pb.LeaseKeepAliveResponse(header=header, ID=lease, TTL=0)
        ttl, _ = self.leases[lease]
        self.leases[lease] = (ttl, self.loop.time() + ttl)
        return pb.LeaseKeepAliveResponse(header=header, ID=lease, TTL=int(ttl))

    def watch(self, stream: SimulatedStream, create: pb.WatchCreateRequest) -> None:
        header = pb.ResponseHeader(cluster_id=self.cluster_id, revision=self.revision)
        stream.put(pb.WatchResponse(header=header, created=True))
        if create.start_revision and create.start_revision <= self.compacted:
            self.reached("watch-compacted")
            stream.put(pb.WatchResponse(header=header, canceled=True, compact_revision=self.compacted))
            return
        stream.watched = (create.key, create.range_end)
        if stream.process is not None:
            self.readers.add(stream.process)
        for revision, events in self.history:
            if revision >= create.start_revision:
                self._notify(stream, revision, events)

    # Inside

    def _put(self, key: bytes, value: bytes, lease: int) -> None:
        self.revision += 1
        before = self.keys.get(key)
        kv = pb.KeyValue(
            key=key,
            value=value,
            mod_revision=self.revision,
            create_revision=before.create_revision if before else self.revision,
            version=before.version + 1 if before else 1,
            lease=lease,
        )
        self.keys[key] = kv
        self._changed([pb.Event(type=pb.Event.PUT, kv=kv)])

    def _delete(self, keys: list[bytes]) -> None:
        if keys:
            self.revision += 1
            for key in keys:
                del self.keys[key]
            self._changed([pb.Event(type=pb.Event.DELETE, kv=pb.KeyValue(key=key, mod_revision=self.revision)) for key in keys])

    def _changed(self, events: list[pb.Event]) -> None:
        self.history.append((self.revision, events))
        for stream in list(self._streams):
            if stream.watched is not None:
                self._notify(stream, self.revision, events)

    def _notify(self, stream: SimulatedStream, revision: int, events: list[pb.Event]) -> None:
        assert stream.watched is not None
        wanted = [event for event in events if _within(event.kv.key, *stream.watched)]
        if wanted and self.reaches(stream.process):
            header = pb.ResponseHeader(cluster_id=self.cluster_id, revision=revision)
            stream.put(pb.WatchResponse(header=header, events=wanted))

    def _watch_lease(self, lease: int) -> None:
        _, end = self.leases[lease]
        self.loop.call_at(end, self._check_lease, lease, context=_outside())

    def _check_lease(self, lease: int) -> None:
        if lease not in self.leases:
            return
        _, end = self.leases[lease]
        if not self.is_up or self.is_hung:
            return  # time stands still; `start` watches it again. Without quorum none ends before there is one
        if end > self.loop.time():
            self.loop.call_at(end, self._check_lease, lease, context=_outside())
        else:
            owner = self.owners.get(lease)
            self.reached("lease-expired-alive" if owner is not None and owner.is_alive else "lease-expired-dead")
            if self._unwatched():
                self.reached("lease-expired-unwatched")
            self._end_lease(lease)

    def _unwatched(self) -> bool:
        """Return whether some process that watches learns nothing now."""
        readers = {stream.process for stream in self._streams if stream.watched is not None}
        return any(each not in readers or not self.reaches(each) for each in self.readers if each.is_alive)

    def _end_lease(self, lease: int) -> None:
        del self.leases[lease]
        self._delete([key for key in sorted(self.keys) if self.keys[key].lease == lease])

    def open_stream(self, stream: SimulatedStream) -> None:
        self._streams[stream] = None

    def close_stream(self, stream: SimulatedStream) -> None:
        self._streams.pop(stream, None)


class SimulatedStream:
    """A bidirectional call: lease renewal or watch."""

    endpoint = "simulated"

    def __init__(self, etcd: SimulatedEtcd, process: Process | None) -> None:
        self.process = process
        self.watched: tuple[bytes, bytes] | None = None
        self._etcd = etcd
        self._queue: asyncio.Queue[Any] = asyncio.Queue()
        self._arrival = 0.0

    def put(self, response: Any) -> None:
        """Send a response, in order, after a latency."""
        loop = self._etcd.loop
        self._arrival = max(self._arrival, loop.time() + 0.0005)
        context = None if self.process is None else self.process.context
        loop.call_at(self._arrival, self._queue.put_nowait, response, context=context)

    async def write(self, request: Any) -> None:
        etcd = self._etcd
        await etcd.delay()
        while etcd.is_hung or not etcd.reaches(self.process):
            await asyncio.sleep(0.1)
        if not etcd.is_up:
            raise EtcdUnavailable("etcd at simulated cannot be reached")
        if isinstance(request, pb.LeaseKeepAliveRequest):
            self.put(etcd.renew(request.ID))
        else:
            etcd.watch(self, request.create_request)

    async def read(self) -> Any:
        response = await self._queue.get()
        if isinstance(response, Exception):
            raise response
        return response


class SimulatedTransport:
    """In the place of `dynamo.common.etcd.transport.Transport`: the same calls, to the simulated store."""

    def __init__(self, config: EtcdOptions, etcd: SimulatedEtcd) -> None:
        self.config = config
        self._etcd = etcd

    @property
    def endpoint(self) -> str | None:
        return "simulated" if self._etcd.is_up else None

    async def close(self) -> None:
        """Nothing to close."""

    def forget_login(self) -> None:
        """There is no login."""

    async def unary(self, method: Any, request: Any) -> Any:
        etcd, process = self._etcd, current_process()
        try:
            async with asyncio.timeout(self.config.timeout_s):
                while True:
                    await etcd.delay()
                    if etcd.is_up and not etcd.is_hung and etcd.reaches(process):
                        response = etcd.respond(request)
                        await etcd.delay()
                        return response
                    await asyncio.sleep(0.1)
        except TimeoutError:
            raise EtcdUnavailable("etcd at simulated did not answer in time") from None

    @asynccontextmanager
    async def stream(self, method: Any) -> AsyncIterator[SimulatedStream]:
        etcd, process = self._etcd, current_process()
        await etcd.delay()
        if not etcd.is_up or etcd.is_hung or not etcd.reaches(process):
            await asyncio.sleep(min(2.0, self.config.connect_timeout_s))
            raise EtcdUnavailable("etcd at simulated cannot be reached")
        stream = SimulatedStream(etcd, process)
        etcd.open_stream(stream)
        try:
            yield stream
        finally:
            etcd.close_stream(stream)


def _within(key: bytes, start: bytes, end: bytes) -> bool:
    """Whether a key lies in the interval of a request, as etcd writes intervals."""
    if not end:
        return key == start
    return key >= start and (end == b"\0" or key < end)


def _outside() -> Any:
    from contextvars import Context

    return Context()
