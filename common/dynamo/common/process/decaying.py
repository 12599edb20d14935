"""A counter that forgets, exponentially."""

from __future__ import annotations

import math


class DecayingCounter:
    """An amount; what was added `memory_s` seconds ago counts for 1/e."""

    __slots__ = ("_amount", "_memory_s", "_since")

    def __init__(self, memory_s: float, amount: float = 0.0, now: float = 0.0) -> None:
        self._memory_s = memory_s
        self._amount = amount
        self._since = now

    def at(self, now: float) -> float:
        return self._amount * math.exp((self._since - now) / self._memory_s)

    def add(self, amount: float, now: float) -> None:
        self._amount, self._since = self.at(now) + amount, now
