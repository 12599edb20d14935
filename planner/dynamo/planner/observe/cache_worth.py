"""What the caches of instances save: prompt tokens per second that need not be computed.

A cache is worth what requests of the last minutes found there. One that is full of prefixes without requests is worth nothing.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from dynamo.common.names import InstanceId

_MEMORY_S = 300.0


class CacheWorth:
    """Rates over about the last five minutes."""

    def __init__(self) -> None:
        self._rates: dict[InstanceId, float] = {}

    def __repr__(self) -> str:
        return f"<CacheWorth of {len(self._rates)} instances>"

    def add(self, saved: Mapping[InstanceId, int], seconds: float, instances: Collection[InstanceId]) -> None:
        """Take note of what was cached of the requests of the last `seconds`, in tokens. `instances`: those that are there."""
        kept = math.exp(-seconds / _MEMORY_S)
        rates = {instance: kept * rate for instance, rate in self._rates.items() if instance in instances}
        for instance, tokens in saved.items():
            if instance in instances:
                rates[instance] = rates.get(instance, 0.0) + tokens / _MEMORY_S
        self._rates = rates

    def tokens_per_s(self, instance: InstanceId) -> float:
        return self._rates.get(instance, 0.0)
