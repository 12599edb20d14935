"""Lower bounds by weekday and time of day."""

from __future__ import annotations

from datetime import datetime
from zoneinfo import ZoneInfo

import pytest

from dynamo.planner.schedule import least_at, parse_schedule

BERLIN = ZoneInfo("Europe/Berlin")


def at(text: str, zone: ZoneInfo = BERLIN) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=zone).timestamp()


@pytest.mark.parametrize(
    ("when", "instances"),
    [
        ("2026-11-27T08:00", 4),  # a Friday
        ("2026-11-27T17:59", 4),
        ("2026-11-27T18:00", 0),
        ("2026-11-27T07:59", 0),
        ("2026-11-28T12:00", 0),  # a Saturday
    ],
)
def test_a_schedule_counts_on_its_days_from_its_begin_until_before_its_end(when: str, instances: int) -> None:
    schedule = parse_schedule("mon-fri 08:00-18:00 Europe/Berlin 4")
    assert least_at([schedule], at(when), "chat") == instances


def test_the_clock_of_its_zone_counts_in_summer_and_in_winter() -> None:
    schedule = parse_schedule("mon-sun 08:00-09:00 Europe/Berlin 4")
    utc = ZoneInfo("UTC")
    assert least_at([schedule], at("2026-07-01T06:30", utc), "chat") == 4
    assert least_at([schedule], at("2026-07-01T07:30", utc), "chat") == 0
    assert least_at([schedule], at("2026-12-01T07:30", utc), "chat") == 4


@pytest.mark.parametrize(
    ("when", "instances"),
    [("2026-11-27T23:00", 3), ("2026-11-28T05:59", 3), ("2026-11-28T06:00", 0), ("2026-11-28T23:00", 0), ("2026-11-27T05:00", 0)],
)
def test_a_schedule_over_midnight_belongs_to_the_day_on_which_it_begins(when: str, instances: int) -> None:
    assert least_at([parse_schedule("fri 22:00-06:00 Europe/Berlin 3")], at(when), "chat") == instances


def test_days_may_go_over_the_end_of_the_week_and_be_listed() -> None:
    assert parse_schedule("sat-mon,wed 00:00-24:00 UTC 1").days == {5, 6, 0, 2}


def test_the_largest_of_several_schedules_counts_and_others_models_do_not() -> None:
    schedules = [parse_schedule(f"{model}mon-sun 00:00-24:00 UTC {number}") for model, number in (("", 2), ("a=", 5), ("b=", 9))]
    assert least_at(schedules, 0.0, "a") == 5
    assert least_at(schedules, 0.0, "c") == 2


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("mon-fri 08:00-18:00 4", "is not a schedule such as"),
        ("=mon 08:00-18:00 UTC 4", "is not a schedule such as"),
        ("mon-fry 08:00-18:00 UTC 4", "names the day 'mon-fry'"),
        ("mon 08:00 UTC 4", "names the time '08:00'"),
        ("mon 08:00-24:01 UTC 4", "names the time '24:01'"),
        ("mon 08:60-24:00 UTC 4", "names the time '08:60'"),
        ("mon 08:00-08:00 UTC 4", "which is empty"),
        ("mon 08:00-18:00 Europe/Berlyn 4", "names the time zone 'Europe/Berlyn'"),
        ("mon 08:00-18:00 ../../etc/passwd 4", "names the time zone"),
        ("mon 08:00-18:00 Europe 4", "names the time zone 'Europe'"),
        ("mon 08:00-18:00 UTC -4", "asks for '-4' instances"),
        ("mon 08:00-18:00 UTC 9999999", "asks for '9999999' instances"),
    ],
)
def test_a_text_that_is_no_schedule_is_refused_with_the_part_that_is_wrong(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_schedule(text)


def test_a_schedule_is_written_as_it_is_read() -> None:
    text = "chat=mon,tue 08:00-18:30 Europe/Berlin 4"
    assert str(parse_schedule(text)) == text
