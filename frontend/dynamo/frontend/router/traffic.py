"""How often requests arrive, as of now."""

from __future__ import annotations

import math

_MEMORY_S = 10.0


class ArrivalRate:
    """Arrivals per second over about the last ten seconds."""

    __slots__ = ("_at", "_per_s")

    def __init__(self) -> None:
        self._per_s = 0.0
        self._at = 0.0

    def arrive(self, now: float) -> float:
        """Return the rate before an arrival, and count it."""
        rate = self._per_s * math.exp((self._at - now) / _MEMORY_S)
        self._per_s = rate + 1.0 / _MEMORY_S
        self._at = now
        return rate
