"""How many requests arrive, and how many prompt tokens they bring, as of now.

A frontend counts what it places. What others place it learns from the instances: their reports say how many prompt tokens they
have accepted, from whomever. Thus each frontend knows the traffic of the fleet and its own share of it, however unevenly requests
are spread over frontends, whether or not these share bookings.
"""

from __future__ import annotations

import math

from dynamo.common.names import InstanceId

_MEMORY_S = 10.0
_SHORTEST_S = 1.0
"""Before that, too little has been counted to tell a rate."""


class Traffic:
    """Rates over about the last ten seconds."""

    __slots__ = ("_at", "requests_per_s", "tokens_per_s")

    def __init__(self) -> None:
        self.requests_per_s = 0.0
        self.tokens_per_s = 0.0
        """Prompt tokens that instances have to compute for these."""
        self._at = 0.0

    def pass_time(self, now: float) -> float:
        """Bring the rates up to date. Return what part of them is left."""
        decay = math.exp((self._at - now) / _MEMORY_S)
        self.requests_per_s *= decay
        self.tokens_per_s *= decay
        self._at = now
        return decay

    def add(self, tokens: float) -> None:
        """Count a request that was placed now."""
        self.requests_per_s += 1.0 / _MEMORY_S
        self.tokens_per_s += tokens / _MEMORY_S


class FleetTraffic(Traffic):
    """What this frontend places, and what instances accept from all of them."""

    __slots__ = ("_began_at", "_reported", "accepted_per_s", "queued")

    def __init__(self) -> None:
        super().__init__()
        self.accepted_per_s = 0.0
        """Prompt tokens that instances have accepted."""
        self._reported: dict[InstanceId, tuple[int, int]] = {}
        """Tokens that each instance has computed since it started, and those that it has still to compute, by its last report."""
        self.queued = 0
        """The sum of the latter."""
        self._began_at: float | None = None

    def pass_time(self, now: float) -> float:
        if self._began_at is None:
            self._began_at = now
        decay = super().pass_time(now)
        self.accepted_per_s *= decay
        return decay

    def report(self, instance: InstanceId, computed: int, queued: int, now: float) -> None:
        """Count what an instance has accepted since its last report. Of its first one, it is not known how long that took.

        `computed`: prompt tokens since it started; `queued`: those that it has still to compute.
        """
        self.pass_time(now)
        before = self._reported.get(instance)
        self.remove_instance(instance)
        self._reported[instance] = (computed, queued)
        self.queued += queued
        if before is not None and computed >= before[0]:  # else it has started anew
            self.accepted_per_s += (computed - before[0] + queued - before[1]) / _MEMORY_S

    def remove_instance(self, instance: InstanceId) -> None:
        self.queued -= self._reported.pop(instance, (0, 0))[1]

    @property
    def counted_share(self) -> float:
        """The share of a steady rate that has been counted since the beginning: all of it, but for the first seconds."""
        counted_s = 0.0 if self._began_at is None else self._at - self._began_at
        return 1.0 - math.exp(-max(counted_s, _SHORTEST_S) / _MEMORY_S)

    def of_fleet(self, frontends: int, unreported: float = 0.0) -> tuple[float, float]:
        """Return how many requests all frontends place per second, and how many tokens instances have to compute for them.

        `frontends`: how many share their bookings; where instances do not report, they are taken to have equal shares.
        `unreported`: tokens that were placed after the last reports.
        """
        requests, tokens = self.requests_per_s, self.tokens_per_s
        if not self._reported:
            return requests * frontends, tokens * frontends
        accepted = self.accepted_per_s + unreported / _MEMORY_S
        if accepted <= tokens:
            return requests, tokens
        return requests * accepted / tokens if tokens else 0.0, accepted
