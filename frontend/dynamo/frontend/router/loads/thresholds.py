"""From which load on an instance is busy: as configured, and as set for single models while requests run."""

from __future__ import annotations

from collections.abc import Mapping

from dynamo.common.names import MAX_NAME_CHARS
from dynamo.frontend.config import Thresholds

__all__ = ["NEVER_BUSY", "ThresholdTable", "Thresholds"]

NEVER_BUSY = Thresholds()
_MAX_MODELS = 4096
"""Models with changed thresholds, at most; beyond, the oldest change is forgotten: any frontend could invent models."""


class ThresholdTable:
    """The configured thresholds, and those that were set for single models since.

    Each change carries the time at which it was made; of two, the later one stays, in whatever order they arrive.
    """

    def __init__(self, configured: Thresholds = NEVER_BUSY) -> None:
        self.configured = configured
        self._changed: dict[str, tuple[int, Thresholds]] = {}

    def of(self, model: str) -> Thresholds:
        changed = self._changed.get(model)
        return self.configured if changed is None else changed[1]

    def set(self, model: str, thresholds: Thresholds, changed_at_ms: int) -> bool:
        """`changed_at_ms`: Unix time. Whether this is news."""
        if self.changed_at_ms(model) >= changed_at_ms or len(model) > MAX_NAME_CHARS:
            return False
        self._changed.pop(model, None)  # the one that changed last comes last
        if len(self._changed) >= _MAX_MODELS:
            del self._changed[next(iter(self._changed))]
        self._changed[model] = (changed_at_ms, thresholds)
        return True

    def changed_at_ms(self, model: str) -> int:
        """When the model's thresholds were set last; 0: never."""
        changed = self._changed.get(model)
        return 0 if changed is None else changed[0]

    def changes(self) -> Mapping[str, tuple[int, Thresholds]]:
        """What was set, by model: when, and to what."""
        return self._changed
