"""How long instances take from the decision that wants them until they serve."""

from __future__ import annotations

import pytest

from dynamo.planner.observe.startup import LONGEST_S, MAX_WANTED, StartupTimes


def test_it_is_the_time_from_the_decision_until_the_instance_registers() -> None:
    times = StartupTimes()
    assert times.typical_s == 0.0
    times.want(2, 1, 100.0)
    times.want(2, 1, 105.0)  # the same decision, a round later
    times.came(142.0)
    assert times.typical_s == 42.0


def test_instances_come_in_the_order_in_which_they_were_wanted() -> None:
    times = StartupTimes()
    times.want(1, 0, 0.0)
    times.want(2, 0, 20.0)
    times.came(30.0)
    times.came(60.0)
    assert times.typical_s == pytest.approx((30.0 + 40.0) / 2)


def test_one_that_was_not_wanted_teaches_nothing() -> None:
    times = StartupTimes()
    times.came(30.0)
    assert times.typical_s == 0.0


def test_one_that_is_not_wanted_any_more_is_not_waited_for() -> None:
    times = StartupTimes()
    times.want(3, 1, 0.0)
    times.want(1, 1, 10.0)
    times.came(50.0)
    assert times.typical_s == 0.0


def test_one_that_came_after_an_hour_waited_for_something_else() -> None:
    times = StartupTimes()
    times.want(1, 0, 0.0)
    times.came(LONGEST_S + 1.0)
    assert times.typical_s == 0.0


def test_a_single_slow_start_does_not_change_what_is_typical() -> None:
    times = StartupTimes()
    for number, took_s in enumerate((30.0, 900.0, 32.0)):
        times.want(1, 0, 1000.0 * number)
        times.came(1000.0 * number + took_s)
    assert times.typical_s == 32.0


def test_how_many_are_waited_for_is_bounded() -> None:
    times = StartupTimes()
    times.want(10 * MAX_WANTED, 0, 0.0)
    assert f"{MAX_WANTED} starting" in repr(times)
