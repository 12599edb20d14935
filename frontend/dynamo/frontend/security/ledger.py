"""What the keys have used, by day, key and model, as far as this process served it."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime

import msgspec

MAX_ROWS = 10_000
"""Rows of one day, at most. Requests of further keys and models count together, as those of key and model `OTHER`."""
MAX_DAYS = 31
"""Days that are kept while they cannot be saved, at most."""
OTHER = "other"
_DAY_S = 86_400


class UsageCounts(msgspec.Struct):
    """Amounts of requests that have ended and that the limits of their key admitted."""

    requests: int = 0
    errors: int = 0
    """Requests that ended with an error; `requests` counts them too."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that were cached; `prompt_tokens` counts them too."""
    completion_tokens: int = 0
    media: int = 0
    """Images and the like."""

    def add(self, other: UsageCounts) -> None:
        self.requests += other.requests
        self.errors += other.errors
        self.prompt_tokens += other.prompt_tokens
        self.cached_tokens += other.cached_tokens
        self.completion_tokens += other.completion_tokens
        self.media += other.media


class Row(UsageCounts, kw_only=True):
    """What a key used of a model on a day."""

    day: str
    """In UTC, such as 2026-11-22."""
    key: str
    model: str


class Ledger:
    """The rows of the days that are not over, or not saved."""

    def __init__(
        self,
        clock: Callable[[], float] = time.time,
        counted: Callable[[str, str, UsageCounts], None] = lambda key, model, usage: None,
    ) -> None:
        """`counted` is called with everything that is added."""
        self.unsaved: dict[str, None] = {}
        """Days that have changed, the oldest first."""
        self._clock = clock
        self._counted = counted
        self._days: dict[str, dict[tuple[str, str], UsageCounts]] = {}
        self._today = ""
        self._today_until = 0.0

    @property
    def row_count(self) -> int:
        return sum(map(len, self._days.values()))

    def add(self, key: str, model: str, usage: UsageCounts) -> None:
        self._counted(key, model, usage)
        day = self.today()
        rows = self._days.get(day)
        if rows is None:
            rows = self._days[day] = {}
            if len(self._days) > MAX_DAYS:
                self.forget(min(self._days))
        self.unsaved[day] = None
        row = rows.get((key, model))
        if row is None:
            if len(rows) >= MAX_ROWS:
                key = model = OTHER
            row = rows.setdefault((key, model), UsageCounts())
        row.add(usage)

    def today(self) -> str:
        now = self._clock()
        if not self._today_until - _DAY_S <= now < self._today_until:
            self._today_until = (now // _DAY_S + 1) * _DAY_S
            self._today = datetime.fromtimestamp(now, UTC).date().isoformat()
        return self._today

    def rows(self, day: str) -> list[Row]:
        rows = self._days.get(day, {})
        return [Row(day=day, key=key, model=model, **msgspec.structs.asdict(usage)) for (key, model), usage in rows.items()]

    def forget(self, day: str) -> None:
        self._days.pop(day, None)
        self.unsaved.pop(day, None)
