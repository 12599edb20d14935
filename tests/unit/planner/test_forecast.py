"""Forecasts of rates, on rates that are known."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from dynamo.planner.forecast import Forecast

INTERVAL_S = 5.0
HORIZON_S = 65.0


def swinging(at_s: float) -> float:
    return 12.5 - 11.5 * math.cos(2 * math.pi * at_s / 1200.0)


def stepping(at_s: float) -> float:
    return 2.0 if at_s % 1800.0 < 900.0 else 20.0


def steady(at_s: float) -> float:
    return 10.0


def too_low_and_too_high(rate: Callable[[float], float], seconds: float, *, last_value: bool = False) -> tuple[float, float]:
    """Return by how much forecasts of the coming peak were too low and too high on average, in the second half."""
    rng = np.random.default_rng(1)
    forecast = Forecast(HORIZON_S, INTERVAL_S)
    low: list[float] = []
    high: list[float] = []
    for number in range(int(seconds / INTERVAL_S)):
        now = number * INTERVAL_S
        forecast.add(now, float(rng.poisson(rate(now) * INTERVAL_S)) / INTERVAL_S)
        if now < seconds / 2:
            continue
        coming = max(rate(now + ahead) for ahead in np.arange(0.0, HORIZON_S + 1.0, INTERVAL_S))
        error = (forecast.rate if last_value else forecast.peak()) - coming
        low.append(max(0.0, -error))
        high.append(max(0.0, error))
    return sum(low) / len(low), sum(high) / len(high)


@pytest.mark.parametrize("rate", [swinging, stepping])
def test_a_forecast_is_less_often_too_low_than_the_last_value(rate: Callable[[float], float]) -> None:
    low, high = too_low_and_too_high(rate, 7200.0)
    last_low, _ = too_low_and_too_high(rate, 7200.0, last_value=True)
    assert low < last_low / 3
    assert high < 2.0


def test_a_steady_rate_is_forecast_with_little_on_top() -> None:
    low, high = too_low_and_too_high(steady, 3600.0)
    assert low < 0.3
    assert high < 1.0


def test_a_season_is_found_and_used() -> None:
    forecast = Forecast(HORIZON_S, INTERVAL_S)
    for number in range(1440):
        forecast.add(number * INTERVAL_S, swinging(number * INTERVAL_S))
    assert forecast.season_s == pytest.approx(1200.0, rel=0.02)
    assert forecast.by == "season"


def test_noise_has_no_season() -> None:
    rng = np.random.default_rng(2)
    forecast = Forecast(HORIZON_S, INTERVAL_S)
    for number in range(1440):
        forecast.add(number * INTERVAL_S, float(rng.poisson(50)) / 5)
    assert forecast.season_s is None


def test_before_the_first_value_nothing_is_expected() -> None:
    assert Forecast(HORIZON_S, INTERVAL_S).peak() == 0.0


def test_a_rate_that_falls_is_never_forecast_below_zero() -> None:
    forecast = Forecast(HORIZON_S, INTERVAL_S)
    for number in range(40):
        forecast.add(number * INTERVAL_S, max(0.0, 10.0 - number))
        assert forecast.peak() >= 0.0
