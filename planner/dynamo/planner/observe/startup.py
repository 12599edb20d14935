"""How long instances take from the decision that wants them until they serve."""

from __future__ import annotations

from collections import deque
from statistics import median

_KEPT = 5
MAX_WANTED = 64
"""Instances that are waited for, at most; of more, the last ones teach nothing."""
LONGEST_S = 3600.0
"""An instance that comes later than that was not started by the decision, or waited for space in the cluster."""


class StartupTimes:
    """The startup times of one pool's instances."""

    def __init__(self) -> None:
        self._wanted: deque[float] = deque()
        """When each instance that is not there yet was wanted first, oldest first."""
        self._seen: deque[float] = deque(maxlen=_KEPT)

    def __repr__(self) -> str:
        return f"<StartupTimes {self.typical_s:.1f} s, {len(self._wanted)} starting>"

    @property
    def typical_s(self) -> float:
        """The median of the last ones; 0: none has been seen."""
        return median(self._seen) if self._seen else 0.0

    def remember(self, typical_s: float) -> None:
        """Take over what an earlier process has seen, unless this one has seen some itself."""
        if typical_s > 0.0 and not self._seen:
            self._seen.append(typical_s)

    def want(self, instances: int, present: int, now: float) -> None:
        """So many instances are wanted, and so many are there."""
        missing = min(max(0, instances - present), MAX_WANTED)
        while len(self._wanted) > missing:
            self._wanted.pop()  # those that were wanted last are not needed any more
        while len(self._wanted) < missing:
            self._wanted.append(now)

    def came(self, now: float) -> None:
        """An instance registered."""
        if self._wanted:
            took_s = now - self._wanted.popleft()
            if took_s <= LONGEST_S:
                self._seen.append(took_s)
