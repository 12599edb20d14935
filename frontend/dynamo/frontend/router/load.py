"""The load of each instance, as one frontend sees it.

Each instance reports its load, which includes the requests of all frontends. A report reflects a decision only some milliseconds
later, and many more decisions are made in between. So a frontend *books* the requests that it sends:

    load = last report + bookings that it does not reflect yet        while an instance reports
    load = all bookings that are not finished                         before its first report, or when reports stop

A report names the requests accepted since the one before the last; it reflects their bookings. With replica sync a frontend also
books the bookings that its siblings publish.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

import msgspec

from dynamo.common.discovery import Instance
from dynamo.common.errors import Overloaded
from dynamo.common.kv.events import LoadReport, request_key
from dynamo.common.kv.hashes import pack_hashes, unpack_hashes
from dynamo.common.names import InstanceId
from dynamo.frontend.router.prefixes import PrefixCounts
from dynamo.frontend.router.thinning import covered, kept
from dynamo.frontend.router.thresholds import Thresholds

OnSiblingBooking = Callable[[InstanceId, Sequence[int], float], None]


class Step(IntEnum):
    """The event of a booking."""

    BOOKED = 0
    FIRST_TOKEN = 1
    FINISHED = 2
    ALIVE = 3
    """No change: the frontend is alive, and `blocks` holds the keys of its open bookings."""


class BookingEvent(msgspec.Struct, frozen=True, array_like=True):
    """A change of one booking, published to the other frontends."""

    origin: str
    step: Step
    key: int = 0
    """`request_key` of the request."""
    instance: int = 0
    prefill_tokens: int = 0
    blocks: bytes = b""
    """Sequence hashes of the prompt's full blocks, packed."""
    extra_blocks: int = 0


@dataclass(slots=True, eq=False)
class _Booking:
    load: InstanceLoad
    key: int
    prefill_tokens: int
    blocks: int
    """Full blocks of the prompt."""
    nodes: Sequence[int]
    """The kept blocks of the prompt, see `thinning.py`."""
    new_blocks: int
    """Full blocks that no earlier booking on the instance held."""
    extra_blocks: int
    booked_at: float
    prefilling: bool = True


class Load(msgspec.Struct, frozen=True, gc=False):
    """The load of one instance at one time."""

    requests: int
    prefill_tokens: int
    decode_blocks: int
    usage: float
    """Share of the KV blocks in use, 0 to 1; 0 if the number of blocks is unknown."""


class InstanceLoad:
    """The row of one instance in a LoadTable. `LoadTable.read` takes lists of rows."""

    __slots__ = (
        *("active", "active_blocks", "booked", "booked_extra_blocks", "booked_prefill_tokens", "booked_requests", "report"),
        *(
            "estimated",
            "reported_at",
            "reports",
            "total_blocks",
            "unreflected",
            "unreflected_blocks",
            "unreflected_prefill_tokens",
        ),
    )

    def __init__(self) -> None:
        self.active = PrefixCounts()
        """The prompts of the bookings."""
        self.active_blocks = 0
        """The distinct blocks of `active`: shared prefixes count once, long ones to within 15 blocks."""
        self.booked_requests = 0
        self.booked_prefill_tokens = 0
        self.booked_extra_blocks = 0
        self.report: LoadReport | None = None
        """The last report, or the sum of the last ones of all models if the instance serves several."""
        self.reports: dict[str, LoadReport] = {}
        """The last report of each model."""
        self.reported_at = -math.inf
        self.unreflected: dict[_Booking, None] = {}
        self.unreflected_prefill_tokens = 0
        self.unreflected_blocks = 0
        self.total_blocks = 0
        """0: unknown."""
        self.estimated: Load | None = None
        """The last report plus the bookings that it does not reflect; None: `estimate` has to compute it."""
        self.booked: Load | None = None
        """The load of all bookings; None: `add_up_bookings` has to compute it."""

    def estimate(self) -> Load:
        report = self.report
        if report is None:
            return self.booked or self.add_up_bookings()
        blocks = report.active_blocks + self.unreflected_blocks
        requests = report.waiting + report.running + len(self.unreflected)
        tokens = report.queued_prefill_tokens + self.unreflected_prefill_tokens
        self.estimated = load = Load(requests, tokens, blocks, self._usage(blocks))
        return load

    def add_up_bookings(self) -> Load:
        blocks = self.active_blocks + self.booked_extra_blocks
        self.booked = load = Load(self.booked_requests, self.booked_prefill_tokens, blocks, self._usage(blocks))
        return load

    def _usage(self, blocks: int) -> float:
        return min(blocks / self.total_blocks, 1.0) if self.total_blocks else 0.0


def is_busy(load: Load, thresholds: Thresholds) -> bool:
    """Return whether the instance of this load is busy."""
    usage, tokens = thresholds.active_decode_blocks, thresholds.active_prefill_tokens
    return (usage is not None and load.usage > usage) or (tokens is not None and load.prefill_tokens > tokens)


def busy(loads: Sequence[Load], thresholds: Thresholds) -> list[bool] | None:
    """Return for each load whether its instance is busy; None if there is no threshold."""
    usage, tokens = thresholds.active_decode_blocks, thresholds.active_prefill_tokens
    if usage is None and tokens is None:
        return None
    most_usage, most_tokens = math.inf if usage is None else usage, math.inf if tokens is None else tokens
    return [load.usage > most_usage or load.prefill_tokens > most_tokens for load in loads]


def all_busy(model: str, retry_after_s: float = 1.0) -> Overloaded:
    return Overloaded(f"all instances of model '{model}' are busy", retry_after_s=retry_after_s)


class LoadTable:
    """The load of every instance. A change takes about two microseconds, reading all loads some 40 nanoseconds per instance.

    `origin` names this frontend to its siblings; `on_booking` is called with every change of its own bookings. `now` is in
    seconds of a monotonic clock.
    """

    def __init__(
        self,
        origin: str = "",
        on_booking: Callable[[BookingEvent], None] | None = None,
        *,
        report_ttl_s: float = 3.0,
        settle_s: float = 1.0,
        sibling_ttl_s: float = 5.0,
    ) -> None:
        self.origin = origin
        self.epoch = 0
        """Changes whenever an instance is added, removed, or gets another row."""
        self._on_sibling_booking: list[OnSiblingBooking] = []
        self._on_booking = on_booking
        self._report_ttl_s = report_ttl_s
        self._settle_s = settle_s
        self._sibling_ttl_s = sibling_ttl_s
        self._loads: dict[InstanceId, InstanceLoad] = {}
        self._own: dict[str, _Booking] = {}
        """By request id."""
        self._others: dict[tuple[str, int], _Booking] = {}
        """Siblings' bookings by origin and request key."""
        self._siblings: dict[str, float] = {}
        """When the last event of each sibling arrived."""
        self._fresh_until = -math.inf
        """Until then, the reports of all `_fresh_rows` are younger than the report TTL."""
        self._fresh_rows: Sequence[InstanceLoad] = ()

    def __len__(self) -> int:
        """Return how many bookings are not finished, siblings' included."""
        return len(self._own) + len(self._others)

    def __repr__(self) -> str:
        return f"<LoadTable instances={len(self._loads)} bookings={len(self._own)} siblings={len(self._siblings)}>"

    def on_sibling_booking(self, callback: OnSiblingBooking) -> None:
        """Call `callback(instance, blocks, now)` for every booking of a sibling; `blocks` is empty unless prompts are shared."""
        self._on_sibling_booking.append(callback)

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
        key = request_key(booking_id)
        if booking_id in self._own:
            self._release(self._own[booking_id])
        self._own[booking_id] = self._add(key, instance, now, prefill_tokens, blocks, extra_blocks)
        if self._on_booking is not None:
            packed = pack_hashes(blocks)
            event = BookingEvent(self.origin, Step.BOOKED, key, instance, prefill_tokens, packed, extra_blocks)
            self._on_booking(event)

    def first_token(self, booking_id: str) -> None:
        """Record that the prompt is computed. Does nothing if there is no such booking."""
        booking = self._own.get(booking_id)
        if booking is not None and booking.prefilling:
            self._end_prefill(booking)
            if self._on_booking is not None:
                self._on_booking(BookingEvent(self.origin, Step.FIRST_TOKEN, booking.key))

    def finished(self, booking_id: str) -> None:
        """Release a booking. Does nothing if there is none, as after the instance was removed."""
        booking = self._own.pop(booking_id, None)
        if booking is not None:
            self._release(booking)
            if self._on_booking is not None:
                self._on_booking(BookingEvent(self.origin, Step.FINISHED, booking.key))

    # Reports, and bookings of siblings

    def report(self, instance: InstanceId, report: LoadReport, now: float, model: str = "") -> None:
        """Apply the load report of one model of an instance. The reports of its other models stay."""
        load = self._load(instance)
        load.reports[model] = report
        load.report = total = _total(load.reports)
        load.reported_at = now
        if total.total_blocks:
            load.total_blocks = total.total_blocks
        if load.unreflected:
            accepted = frozenset(unpack_hashes(report.accepted))
            settled = now - self._settle_s
            for booking in list(load.unreflected):
                # A request that no report names was lost on the way, or the engine does not name requests.
                if booking.key in accepted or booking.booked_at <= settled:
                    self._reflect(booking)
        load.estimated = load.booked = None

    def remove_report(self, instance: InstanceId, model: str) -> None:
        """Forget the last report of a model that the instance serves no more."""
        load = self._loads.get(instance)
        if load is not None and load.reports.pop(model, None) is not None:
            load.report = _total(load.reports) if load.reports else None
            load.estimated = None

    def apply(self, event: BookingEvent, now: float) -> None:
        """Apply a sibling's event. The frontend's own events, which the bus sends back, are ignored."""
        if event.origin == self.origin:
            return
        self._siblings[event.origin] = now
        match event.step:
            case Step.BOOKED:
                blocks = list(dict.fromkeys(unpack_hashes(event.blocks)))  # a block counts once, whatever others send
                instance = InstanceId(event.instance)
                if (event.origin, event.key) in self._others:
                    self._release(self._others[event.origin, event.key])
                booking = self._add(event.key, instance, now, event.prefill_tokens, blocks, event.extra_blocks)
                self._others[event.origin, event.key] = booking
                for callback in self._on_sibling_booking:
                    callback(instance, blocks, now)
            case Step.FIRST_TOKEN:
                existing = self._others.get((event.origin, event.key))
                if existing is not None and existing.prefilling:
                    self._end_prefill(existing)
            case Step.FINISHED:
                existing = self._others.pop((event.origin, event.key), None)
                if existing is not None:
                    self._release(existing)
            case Step.ALIVE:
                self._keep_open(event.origin, frozenset(unpack_hashes(event.blocks)))

    def alive(self) -> BookingEvent:
        """Return the event that tells siblings which bookings are open. It makes up for events that were lost."""
        return BookingEvent(self.origin, Step.ALIVE, blocks=pack_hashes([booking.key for booking in self._own.values()]))

    def expire_siblings(self, now: float) -> None:
        """Release the bookings of siblings from which no event came for `sibling_ttl_s`."""
        for origin in [origin for origin, seen_at in self._siblings.items() if seen_at < now - self._sibling_ttl_s]:
            del self._siblings[origin]
            for key in [key for key in self._others if key[0] == origin]:
                self._release(self._others.pop(key))

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
        self._own = {key: booking for key, booking in self._own.items() if booking.load is not load}
        self._others = {key: booking for key, booking in self._others.items() if booking.load is not load}
        self.epoch += 1

    # Reading

    def rows(self, instances: Sequence[Instance]) -> list[InstanceLoad]:
        """Return the rows of instances for `read`. They are valid until `epoch` changes."""
        rows: list[InstanceLoad] = []
        for instance in instances:
            rows.append(self._load(instance.id))
            if instance.card.llm is not None:
                self.set_total_blocks(instance.id, instance.card.llm.total_blocks)
        return rows

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

    def read_one(self, row: InstanceLoad, now: float) -> Load:
        """Return the load of one instance."""
        if row.reported_at < now - self._report_ttl_s:
            return row.booked or row.add_up_bookings()
        return row.estimated or row.estimate()

    def _keep_open(self, origin: str, keys: frozenset[int]) -> None:
        """Release the bookings of a sibling that are not open any more: their last event was lost."""
        for other in [other for other in self._others if other[0] == origin and other[1] not in keys]:
            self._release(self._others.pop(other))

    def _load(self, instance: InstanceId) -> InstanceLoad:
        load = self._loads.get(instance)
        if load is None:
            load = self._loads[instance] = InstanceLoad()
            self.epoch += 1
        return load

    def _add(
        self, key: int, instance: InstanceId, now: float, prefill_tokens: int, blocks: Sequence[int], extra_blocks: int
    ) -> _Booking:
        load = self._load(instance)
        nodes = kept(blocks)
        new_blocks = len(blocks) - covered(load.active.take(nodes))
        booking = _Booking(load, key, prefill_tokens, len(blocks), nodes, new_blocks, extra_blocks, now)
        load.active_blocks += new_blocks
        load.booked_requests += 1
        load.booked_prefill_tokens += prefill_tokens
        load.booked_extra_blocks += extra_blocks
        load.unreflected[booking] = None
        load.unreflected_prefill_tokens += prefill_tokens
        load.unreflected_blocks += new_blocks + extra_blocks
        load.estimated = load.booked = None
        return booking

    @staticmethod
    def _end_prefill(booking: _Booking) -> None:
        load = booking.load
        booking.prefilling = False
        load.booked_prefill_tokens -= booking.prefill_tokens
        if booking in load.unreflected:
            load.unreflected_prefill_tokens -= booking.prefill_tokens
        load.estimated = load.booked = None

    def _release(self, booking: _Booking) -> None:
        load = booking.load
        if booking.prefilling:
            self._end_prefill(booking)
        # Blocks at the end of a prompt that are not kept count once per booking.
        load.active_blocks -= booking.blocks - covered(load.active.give_back(booking.nodes))
        load.booked_requests -= 1
        load.booked_extra_blocks -= booking.extra_blocks
        if booking in load.unreflected:
            self._reflect(booking)
        load.estimated = load.booked = None

    @staticmethod
    def _reflect(booking: _Booking) -> None:
        """Stop adding the booking to the last report, which reflects it."""
        load = booking.load
        del load.unreflected[booking]
        if booking.prefilling:
            load.unreflected_prefill_tokens -= booking.prefill_tokens
        load.unreflected_blocks -= booking.new_blocks + booking.extra_blocks


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
