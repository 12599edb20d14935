"""The load of each instance, as one frontend sees it.

Each instance reports its load, which includes the requests of all frontends. A report reflects a decision only some milliseconds
later, and many more decisions are made in between. So a frontend *books* the requests that it sends:

    load = last report + bookings that it does not reflect yet        while an instance reports
    load = all bookings that are not finished                         before its first report, or when reports stop

A report names the requests accepted since the one before the last; it reflects their bookings. With replica sync a frontend also
counts the sums of bookings that its peer frontends publish (`shared_bookings.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

from dynamo.common.discovery import Instance
from dynamo.common.kv.events import LoadReport, request_key
from dynamo.common.kv.hashes import pack_hashes, unpack_hashes
from dynamo.common.names import InstanceId
from dynamo.frontend.router.cache.thinning import SPARSE, covered, kept
from dynamo.frontend.router.loads.instance_load import InstanceBooking, InstanceLoad, Load
from dynamo.frontend.router.loads.shared_bookings import LAST_ID, MAX_WAIT_S, InstanceBookings, SharedBookings, SharedPrompt

OnPeerPrompt = Callable[[InstanceId, Sequence[int], float], object]
OnReport = Callable[["InstanceLoad", str, LoadReport, float], None]
_MAX_PEERS = 256
"""A further one takes the place of the least active: any client of NATS could invent frontends."""
_ACTIVITY_S = 5.0
"""A message counts half for the activity of a peer frontend after this time."""
_RECENT_S = 60.0
"""A booking counts half for how many an instance got recently after this time."""


@dataclass(slots=True)
class _Peer:
    """Another frontend."""

    seen_at: float
    """When its last message arrived."""
    loads: dict[InstanceLoad, None]
    """The rows on which it has bookings."""
    activity: float = -math.inf
    """How many messages came recently, see `_risen`."""

    def message_came(self, now: float) -> None:
        self.activity = _risen(self.activity, now, _ACTIVITY_S)
        self.seen_at = now


def _risen(activity: float, now: float, half_life_s: float) -> float:
    """Return the activity after one more event; -inf: before the first one.

    It is the binary logarithm of the number of events, each of which counts twice as much as one `half_life_s` before it. So
    activities of any age can be compared as they are.
    """
    weight = now / half_life_s
    return weight + math.log2(1.0 + math.exp2(activity - weight))


class LoadTable:
    """The load of every instance. A change takes about two microseconds, reading all loads some 40 nanoseconds per instance.

    `origin` names this frontend to its peers. `now` is in seconds of a monotonic clock.
    """

    def __init__(self, origin: str = "", *, report_ttl_s: float = 3.0, settle_s: float = 1.0, peer_ttl_s: float = 5.0) -> None:
        self.origin = origin
        self.epoch = 0
        """Changes whenever an instance is added, removed, or gets another row."""
        self._on_report: list[OnReport] = []
        self._on_peer_prompt: list[OnPeerPrompt] = []
        self._on_unshared: Callable[[], None] | None = None
        self._report_ttl_s = report_ttl_s
        self._settle_s = settle_s
        self._peer_ttl_s = peer_ttl_s
        self._loads: dict[InstanceId, InstanceLoad] = {}
        self._own: dict[str, InstanceBooking] = {}
        """By request id."""
        self._peers: dict[str, _Peer] = {}
        """By origin."""
        self._unshared: dict[InstanceLoad, None] = {}
        """Rows whose own bookings have changed since `take_unshared`."""
        self._unshared_prompts: dict[SharedPrompt, None] = {}
        self._fresh_until = -math.inf
        """Until then, the reports of all `_fresh_rows` are younger than the report TTL."""
        self._fresh_rows: Sequence[InstanceLoad] = ()

    def __len__(self) -> int:
        """Return how many bookings are not finished, peer frontends' included."""
        return len(self._own) + sum(load.shared.requests for load in self._loads.values())

    @property
    def frontends(self) -> int:
        """How many frontends share their bookings, this one included."""
        return 1 + len(self._peers)

    def __repr__(self) -> str:
        return f"<LoadTable instances={len(self._loads)} bookings={len(self._own)} peers={len(self._peers)}>"

    # Own bookings

    def book(
        self,
        booking_id: str,
        instance: InstanceId,
        now: float,
        *,
        prefill_tokens: int,
        blocks: Sequence[int] = (),
        extra_blocks: int = 0,
    ) -> None:
        """Book a request on `instance`. An earlier booking of the same id is released.

        `prefill_tokens`: tokens of the prompt that have to be computed. `blocks`: its full blocks, which other requests may
        share. `extra_blocks`: blocks that no other request shares.
        """
        if booking_id in self._own:
            self._release(self._own[booking_id])
        load = self._load(instance)
        nodes = kept(blocks)
        new_blocks = len(blocks) - covered(load.active.take(nodes))
        key = request_key(booking_id)
        booking = InstanceBooking(load, booking_id, key, prefill_tokens, len(blocks), nodes, new_blocks, extra_blocks, now)
        self._own[booking_id] = load.bookings[booking_id] = booking
        load.active_blocks += new_blocks
        load.booked_prefill_tokens += prefill_tokens
        load.booked_extra_blocks += extra_blocks
        load.unreflected[booking] = None
        load.unreflected_prefill_tokens += prefill_tokens
        load.unreflected_blocks += new_blocks + extra_blocks
        load.recent = _risen(load.recent, now, _RECENT_S)
        self._changed(load)

    def first_token(self, booking_id: str, now: float) -> None:
        """Record that the prompt is computed. Does nothing if there is no such booking."""
        booking = self._own.get(booking_id)
        if booking is not None and booking.prefilling:
            booking.load.prefilled_at = now
            self._end_prefill(booking)
            self._changed(booking.load)

    def finished(self, booking_id: str) -> None:
        """Release a booking. Does nothing if there is none, as after the instance was removed."""
        booking = self._own.pop(booking_id, None)
        if booking is not None:
            self._release(booking)

    # Reports

    def on_report(self, callback: OnReport) -> None:
        """Call `callback(row, model, report, now)` with every load report."""
        self._on_report.append(callback)

    def report(self, instance: InstanceId, report: LoadReport, now: float, model: str = "") -> None:
        """Apply the load report of one model of an instance. The reports of its other models stay."""
        load = self._load(instance)
        load.reports[model] = report
        load.report = total = _total(load.reports)
        load.reported_at = now
        if total.total_blocks:
            load.total_blocks = total.total_blocks
        load.estimated = load.booked = None
        if load.unreflected:
            accepted = frozenset(unpack_hashes(report.accepted))
            settled = now - self._settle_s
            for booking in list(load.unreflected):
                # A request that no report names was lost on the way, or the engine does not name requests.
                if booking.key in accepted or booking.booked_at <= settled:
                    self._reflect(booking)
                    self._changed(load)
        for callback in self._on_report:
            callback(load, model, report, now)

    def remove_report(self, instance: InstanceId, model: str) -> None:
        """Forget the last report of a model that the instance serves no more."""
        load = self._loads.get(instance)
        if load is not None and load.reports.pop(model, None) is not None:
            load.report = _total(load.reports) if load.reports else None
            load.estimated = None

    # Bookings of peer frontends

    def on_peer_prompt(self, callback: OnPeerPrompt) -> None:
        """Call `callback(instance, blocks, computed_at)` for every prompt that a peer frontend has sent to an instance.

        `blocks`: the kept ones; `computed_at`: when the instance is expected to have computed them.
        """
        self._on_peer_prompt.append(callback)

    def on_unshared(self, callback: Callable[[], None]) -> None:
        """Collect what peer frontends must know. Call `callback`, synchronously, at the first change after `take_unshared`."""
        self._on_unshared = callback

    def share_prompt(self, instance: InstanceId, blocks: Sequence[int], wait_s: float) -> None:
        """Have `take_unshared` return a prompt that was sent to an instance, if bookings are shared.

        `wait_s`: until the instance has computed it; whole seconds of it are shared, at most MAX_WAIT_S.
        """
        if self._on_unshared is not None:
            self._notify_unshared(self._on_unshared)
            self._unshared_prompts[
                SharedPrompt(instance, pack_hashes(SPARSE.kept(blocks)), int(min(max(wait_s, 0.0), MAX_WAIT_S)))
            ] = None

    def take_unshared(self, most: int) -> list[SharedBookings]:
        """Return what has changed since the last call, in messages of `most` instances and prompts each."""
        rows = [load.own_bookings() for load in self._unshared if self._loads.get(load.instance) is load]
        prompts = list(self._unshared_prompts)
        self._unshared.clear()
        self._unshared_prompts.clear()
        return [
            *(SharedBookings(self.origin, rows[start : start + most]) for start in range(0, len(rows), most)),
            *(SharedBookings(self.origin, prompts=prompts[start : start + most]) for start in range(0, len(prompts), most)),
        ]

    def all_own_bookings(self, most: int) -> list[SharedBookings]:
        """Return all bookings of this frontend, in at least one message, of `most` instances each."""
        rows = sorted((load.own_bookings() for load in self._loads.values() if load.bookings), key=attrgetter("instance"))
        messages = []
        first = 0
        for start in range(0, max(len(rows), 1), most):
            part = rows[start : start + most]
            last = part[-1].instance if start + most < len(rows) else LAST_ID
            messages.append(SharedBookings(self.origin, part, first=first, last=last))
            first = last + 1
        return messages

    def apply(self, message: SharedBookings, now: float, is_registered: Callable[[InstanceId], bool]) -> None:
        """Apply a message of a peer frontend, but no bookings on instances that are not registered: clients could invent them."""
        peer = self._peers.get(message.origin)
        if peer is None:
            if len(self._peers) >= _MAX_PEERS:
                self._forget_peer(min(self._peers.items(), key=_activity_of)[0])
            peer = self._peers[message.origin] = _Peer(now, {})
        peer.message_came(now)
        if message.first <= message.last:
            listed = {bookings.instance for bookings in message.instances}
            for load in list(peer.loads):
                if message.first <= load.instance <= message.last and load.instance not in listed:
                    self._set_shared(peer, message.origin, load, None)
        for bookings in message.instances:
            instance = InstanceId(bookings.instance)
            row = self._loads.get(instance)
            if row is None and is_registered(instance):
                row = self._load(instance)
            if row is not None:
                self._set_shared(peer, message.origin, row, bookings if bookings.requests else None)
        for prompt in message.prompts:
            instance = InstanceId(prompt.instance)
            if is_registered(instance):
                blocks = list(dict.fromkeys(unpack_hashes(prompt.blocks)))  # a block counts once, whatever others send
                for callback in self._on_peer_prompt:
                    callback(instance, blocks, now + prompt.wait_s)

    def expire_peers(self, now: float) -> None:
        """Release the bookings of peer frontends from which no message came for `peer_ttl_s`."""
        for origin, peer in list(self._peers.items()):
            if peer.seen_at < now - self._peer_ttl_s:
                self._forget_peer(origin)

    def _forget_peer(self, origin: str) -> None:
        """Release the bookings of a peer frontend."""
        peer = self._peers.pop(origin)
        for load in list(peer.loads):
            self._set_shared(peer, origin, load, None)

    # Instances

    def set_total_blocks(self, instance: InstanceId, blocks: int) -> None:
        """Set how many KV blocks an instance has, by its card. Its load reports override it."""
        load = self._load(instance)
        if not load.total_blocks:
            load.total_blocks = blocks
            load.estimated = load.booked = None

    def remove_instance(self, instance: InstanceId) -> None:
        load = self._loads.pop(instance, None)
        if load is None:
            return
        for booking_id in load.bookings:
            del self._own[booking_id]
        for origin in load.shared_by:
            self._peers[origin].loads.pop(load, None)
        self.epoch += 1

    # Reading

    def rows(self, instances: Sequence[Instance]) -> list[InstanceLoad]:
        """Return the rows of instances for `read`. They are valid until `epoch` changes."""
        loads = self._loads
        rows = [loads.get(instance.id) or self._load(instance.id) for instance in instances]
        for row, instance in zip(rows, instances, strict=True):
            if not row.engine:
                row.engine = f"{instance.card.backend} {instance.card.role.value}"
            if not row.total_blocks and instance.card.llm is not None:
                self.set_total_blocks(instance.id, instance.card.llm.total_blocks)
        new = [row for row in rows if row.is_new]
        if new:
            self._level(new)
        return rows

    def _level(self, new: Sequence[InstanceLoad]) -> None:
        """Take instances that are new to have got as many requests as any of their engine.

        What is new, maybe again and again because each request ends it, is not owed what others got before.
        """
        most: dict[str, float] = {}
        for row in self._loads.values():
            most[row.engine] = max(most.get(row.engine, -math.inf), row.recent)
        for row in new:
            row.is_new = False
            row.recent = most[row.engine]

    def engine_of(self, instance: InstanceId) -> str:
        """Return the engine and the role of an instance; empty before it was a candidate for a request."""
        load = self._loads.get(instance)
        return load.engine if load is not None else ""

    def read(self, rows: Sequence[InstanceLoad], now: float) -> list[Load]:
        """Return the loads of the instances of `rows`, in that order."""
        if rows is not self._fresh_rows or now > self._fresh_until:
            cutoff = now - self._report_ttl_s
            oldest = min((load.reported_at for load in rows), default=now)
            if oldest < cutoff:
                return [
                    load.booked or load.add_up_bookings() if load.reported_at < cutoff else load.estimated or load.estimate()
                    for load in rows
                ]
            # Reports are only replaced by younger ones: no need to look again before the oldest one expires.
            self._fresh_rows, self._fresh_until = rows, oldest + self._report_ttl_s
        return [load.estimated or load.estimate() for load in rows]

    def load_of(self, instance: InstanceId, now: float) -> Load:
        """Return the load of one instance, whether or not `rows` was called with it."""
        return self.read_one(self._load(instance), now)

    def read_one(self, row: InstanceLoad, now: float) -> Load:
        """Return the load of one instance."""
        if row.reported_at < now - self._report_ttl_s:
            return row.booked or row.add_up_bookings()
        return row.estimated or row.estimate()

    def _load(self, instance: InstanceId) -> InstanceLoad:
        load = self._loads.get(instance)
        if load is None:
            load = self._loads[instance] = InstanceLoad(instance)
            self.epoch += 1
        return load

    def _changed(self, load: InstanceLoad) -> None:
        """Own bookings on an instance have changed."""
        load.estimated = load.booked = None
        if self._on_unshared is not None:
            self._notify_unshared(self._on_unshared)
            self._unshared[load] = None

    def _notify_unshared(self, callback: Callable[[], None]) -> None:
        if not self._unshared and not self._unshared_prompts:
            callback()

    @staticmethod
    def _set_shared(peer: _Peer, origin: str, load: InstanceLoad, bookings: InstanceBookings | None) -> None:
        if load.shared_by.get(origin) == bookings:
            return
        load.share(origin, bookings)
        if bookings is None:
            peer.loads.pop(load, None)
        else:
            peer.loads[load] = None

    @staticmethod
    def _end_prefill(booking: InstanceBooking) -> None:
        load = booking.load
        booking.prefilling = False
        load.booked_prefill_tokens -= booking.prefill_tokens
        if booking in load.unreflected:
            load.unreflected_prefill_tokens -= booking.prefill_tokens

    def _release(self, booking: InstanceBooking) -> None:
        load = booking.load
        if booking.prefilling:
            self._end_prefill(booking)
        # Blocks at the end of a prompt that are not kept count once per booking.
        load.active_blocks -= booking.blocks - covered(load.active.give_back(booking.nodes))
        load.bookings.pop(booking.id, None)
        load.booked_extra_blocks -= booking.extra_blocks
        if booking in load.unreflected:
            self._reflect(booking)
        self._changed(load)

    @staticmethod
    def _reflect(booking: InstanceBooking) -> None:
        """Stop adding the booking to the last report, which reflects it."""
        load = booking.load
        del load.unreflected[booking]
        if booking.prefilling:
            load.unreflected_prefill_tokens -= booking.prefill_tokens
        load.unreflected_blocks -= booking.new_blocks + booking.extra_blocks


def _activity_of(peer: tuple[str, _Peer]) -> float:
    return peer[1].activity


def _total(by_model: Mapping[str, LoadReport]) -> LoadReport:
    """Return the load of all models of one instance, which share its processors."""
    reports = by_model.values()
    if len(reports) == 1:
        return next(iter(reports))
    return LoadReport(
        waiting=sum(report.waiting for report in reports),
        running=sum(report.running for report in reports),
        active_blocks=sum(report.active_blocks for report in reports),
        total_blocks=sum(report.total_blocks for report in reports),
        queued_prefill_tokens=sum(report.queued_prefill_tokens for report in reports),
        step_ms=max(report.step_ms for report in reports),
    )
