"""The load of one instance: what it reported last, and what was booked since."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import msgspec

from dynamo.common.kv.events import LoadReport
from dynamo.common.names import InstanceId
from dynamo.frontend.router.cache.prefixes import PrefixCounts
from dynamo.frontend.router.loads.shared_bookings import InstanceBookings


@dataclass(slots=True, eq=False)
class InstanceBooking:
    load: InstanceLoad
    id: str
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
    queued_since: float = math.inf
    """When `prefill_tokens` was true: since then the instance has computed some of them. Infinity: not known."""


class InstanceLoad:
    """The row of one instance in a LoadTable. `LoadTable.read` takes lists of rows."""

    __slots__ = (
        *("active", "active_blocks", "booked", "booked_extra_blocks", "booked_prefill_tokens", "bookings", "report"),
        *(
            "engine",
            "estimated",
            "instance",
            "is_new",
            "prefilled_at",
            "recent",
            "reported_at",
            "reports",
            "shared",
            "shared_by",
            "total_blocks",
            "unreflected",
            "unreflected_blocks",
            "unreflected_prefill_tokens",
        ),
    )

    def __init__(self, instance: InstanceId) -> None:
        self.instance = instance
        self.engine = ""
        """The engine and its role: instances of one model that have both in common take equally long for a step."""
        self.bookings: dict[str, InstanceBooking] = {}
        """This frontend's, by request id."""
        self.shared_by: dict[str, InstanceBookings] = {}
        """The bookings of peer frontends, by their origins."""
        self.shared = _NO_BOOKINGS
        """The sum of these."""
        self.active = PrefixCounts()
        """The prompts of the bookings."""
        self.active_blocks = 0
        """The distinct blocks of `active`: shared prefixes count once, long ones to within 15 blocks."""
        self.booked_prefill_tokens = 0
        self.booked_extra_blocks = 0
        self.report: LoadReport | None = None
        """The last report, or the sum of the last ones of all models if the instance serves several."""
        self.reports: dict[str, LoadReport] = {}
        """The last report of each model."""
        self.reported_at = -math.inf
        self.prefilled_at = -math.inf
        """When the prompt of a booking was last computed."""
        self.recent = -math.inf
        """How many of this frontend's bookings the instance got recently, see `_risen`."""
        self.is_new = True
        """It has not been among the candidates for a request."""
        self.unreflected: dict[InstanceBooking, None] = {}
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
        shared = self.shared
        blocks = report.active_blocks + self.unreflected_blocks + shared.unreflected_blocks
        requests = report.waiting + report.running + len(self.unreflected) + shared.unreflected_requests
        tokens = report.queued_prefill_tokens + self.unreflected_prefill_tokens + shared.unreflected_prefill_tokens
        since = self.reported_at if report.queued_prefill_tokens else self._prefilling_since(self.unreflected)
        if self.booked_prefill_tokens + shared.prefill_tokens < tokens and self._all_are_booked(report):
            # Engines count prompts that wait as a whole, although some of their blocks are cached or will be.
            booked = self.booked or self.add_up_bookings()
            tokens, since = booked.prefill_tokens, booked.queued_since
        self.estimated = load = Load(requests, tokens, blocks, self._usage(blocks), since)
        return load

    def add_up_bookings(self) -> Load:
        shared = self.shared
        blocks = self.active_blocks + self.booked_extra_blocks + shared.blocks
        requests, tokens = len(self.bookings) + shared.requests, self.booked_prefill_tokens + shared.prefill_tokens
        since = self._prefilling_since(self.bookings.values())
        self.booked = load = Load(requests, tokens, blocks, self._usage(blocks), since)
        return load

    def own_bookings(self) -> InstanceBookings:
        """Return the sums of this frontend's bookings."""
        return InstanceBookings(
            self.instance,
            len(self.bookings),
            self.booked_prefill_tokens,
            self.active_blocks + self.booked_extra_blocks,
            len(self.unreflected),
            self.unreflected_prefill_tokens,
            self.unreflected_blocks,
        )

    def share(self, origin: str, bookings: InstanceBookings | None) -> None:
        """Replace the bookings of a peer frontend; None: it has none."""
        if bookings is None:
            self.shared_by.pop(origin, None)
        else:
            self.shared_by[origin] = bookings
        self.shared = _sum_bookings(self.shared_by.values()) if self.shared_by else _NO_BOOKINGS
        self.estimated = self.booked = None

    def _all_are_booked(self, report: LoadReport) -> bool:
        """Return whether each request that the report counts is one of the known bookings."""
        own = len(self.bookings) - len(self.unreflected)
        peers = self.shared.requests - self.shared.unreflected_requests
        return 0 < report.waiting + report.running <= own + peers

    def _prefilling_since(self, bookings: Iterable[InstanceBooking]) -> float:
        """Return since when the instance computes the first of the prompts that are not computed; infinity if all are."""
        for booking in bookings:
            if booking.prefilling:
                return max(booking.booked_at, self.prefilled_at)
        return math.inf

    def _usage(self, blocks: int) -> float:
        return min(blocks / self.total_blocks, 1.0) if self.total_blocks else 0.0


_NO_BOOKINGS = InstanceBookings(0, 0, 0, 0, 0, 0, 0)


def _sum_bookings(parts: Collection[InstanceBookings]) -> InstanceBookings:
    """Return the bookings of several frontends on one instance."""
    if len(parts) == 1:
        return next(iter(parts))
    return InstanceBookings(
        0,
        sum(part.requests for part in parts),
        sum(part.prefill_tokens for part in parts),
        sum(part.blocks for part in parts),
        sum(part.unreflected_requests for part in parts),
        sum(part.unreflected_prefill_tokens for part in parts),
        sum(part.unreflected_blocks for part in parts),
    )
