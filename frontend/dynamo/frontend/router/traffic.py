"""How many requests arrive, and how many prompt tokens they bring, as of now."""

from __future__ import annotations

import math

_MEMORY_S = 10.0


class Traffic:
    """Rates over about the last ten seconds."""

    __slots__ = ("_at", "requests_per_s", "tokens_per_s")

    def __init__(self) -> None:
        self.requests_per_s = 0.0
        self.tokens_per_s = 0.0
        """Prompt tokens that instances have to compute."""
        self._at = 0.0

    def pass_time(self, now: float) -> None:
        """Bring the rates up to date."""
        decay = math.exp((self._at - now) / _MEMORY_S)
        self.requests_per_s *= decay
        self.tokens_per_s *= decay
        self._at = now

    def add(self, tokens: float) -> None:
        """Count a request that was placed now."""
        self.requests_per_s += 1.0 / _MEMORY_S
        self.tokens_per_s += tokens / _MEMORY_S
