"""Lower bounds by weekday and time of day, such as `mon-fri 08:00-18:00 Europe/Berlin 4`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from dynamo.common.scaling.targets import MAX_INSTANCES

DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
EXAMPLE = "mon-fri 08:00-18:00 Europe/Berlin 4"
_MINUTES = 24 * 60
_TIME = re.compile(r"(\d\d):(\d\d)")


@dataclass(frozen=True, slots=True)
class Schedule:
    """At least `instances` from `begin` to `end`, in minutes after midnight, on each day that it names.

    One that ends before it begins lasts until the next day, whichever that is. Where clocks are put forward or back, what the
    clock on the wall shows counts.
    """

    days: frozenset[int]
    """0 is Monday."""
    begin: int
    end: int
    zone: ZoneInfo
    instances: int
    model: str = ""
    """Empty: each model."""

    def is_on(self, unix_time: float) -> bool:
        """Return whether it counts at that moment."""
        now = datetime.fromtimestamp(unix_time, UTC).astimezone(self.zone)
        minute = 60 * now.hour + now.minute
        if self.begin < self.end:
            return now.weekday() in self.days and self.begin <= minute < self.end
        yesterday = (now - timedelta(days=1)).weekday()
        return (now.weekday() in self.days and minute >= self.begin) or (yesterday in self.days and minute < self.end)

    def __str__(self) -> str:
        name = f"{self.model}=" if self.model else ""
        days = ",".join(DAYS[day] for day in sorted(self.days))
        return f"{name}{days} {_clock(self.begin)}-{_clock(self.end)} {self.zone.key} {self.instances}"


def least_at(schedules: Iterable[Schedule], unix_time: float, model: str) -> int:
    """Return the least number of instances of a model that the schedules ask for at that moment; 0: none does."""
    asked = (each.instances for each in schedules if each.model in ("", model) and each.is_on(unix_time))
    return max(asked, default=0)


def parse_schedule(text: str) -> Schedule:
    """Read `[MODEL=]DAYS FROM-TO ZONE INSTANCES`. Raises ValueError with the end of a sentence."""
    model, equals, rest = text.rpartition("=")
    words = rest.split()
    if len(words) != 4 or (equals and not model.strip()):
        raise ValueError(f"is not a schedule such as '{EXAMPLE}' or 'MODEL={EXAMPLE}'")
    days, times, zone, instances = words
    begin, dash, end = times.partition("-")
    if not dash:
        raise ValueError(f"names the time {times!r}, which is not of the form 08:00-18:00")
    if not instances.isdecimal() or int(instances) > MAX_INSTANCES:
        raise ValueError(f"asks for {instances!r} instances; there may be 0 to {MAX_INSTANCES}")
    first, last = _parse_minute(begin), _parse_minute(end)
    if first in (last, _MINUTES):
        raise ValueError(f"names the time {times!r}, which is empty; the whole day is 00:00-24:00")
    return Schedule(_parse_days(days), first, last, _parse_zone(zone), int(instances), model.strip())


def _parse_days(text: str) -> frozenset[int]:
    days: set[int] = set()
    for part in text.lower().split(","):
        first, dash, last = part.partition("-")
        if first not in DAYS or (dash and last not in DAYS):
            raise ValueError(f"names the day {part!r}; there are {', '.join(DAYS)}, as in mon-fri or sat,sun")
        begin, end = DAYS.index(first), DAYS.index(last if dash else first)
        days.update((begin + step) % 7 for step in range((end - begin) % 7 + 1))
    return frozenset(days)


def _parse_minute(text: str) -> int:
    match = _TIME.fullmatch(text)
    minute = 60 * int(match[1]) + int(match[2]) if match else -1
    if match is None or int(match[2]) > 59 or minute > _MINUTES:
        raise ValueError(f"names the time {text!r}, which is not between 00:00 and 24:00")
    return minute


def _parse_zone(text: str) -> ZoneInfo:
    try:
        return ZoneInfo(text)
    except (ZoneInfoNotFoundError, ValueError, OSError):  # OSError: the name of a folder of zones
        raise ValueError(f"names the time zone {text!r}, which is not known here; Europe/Berlin and UTC are examples") from None


def _clock(minute: int) -> str:
    return f"{minute // 60:02}:{minute % 60:02}"
