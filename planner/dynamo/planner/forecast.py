"""What a rate will be some time ahead.

Several forecasts go on beside each other: that the rate stays, that its trend of a minute or several goes on, and that it
repeats a season, if there is one. Each is compared with what came, and the one that was best lately is used. Too low a forecast
costs four times as much as one that is too high by the same amount: requests miss their goals, instead of an instance that
idles.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

_SMOOTH_S = 30.0
"""Arrivals are random: a rate is the mean of so long."""
_TREND_S = (60.0, 120.0, 240.0)
"""A line through few values follows soon and is noisy."""
_KEPT_S = 2 * 86_400.0
_TOO_LOW = 4.0
_SHORTEST_SEASON_S = 300.0
_LOOK_FOR_SEASON_S = 60.0
_SEASON_BINS = 512
"""The history is thinned out to so many values before its season is looked for."""
_SEASONAL = 0.5
"""The least correlation of the history with itself one season later."""
_MEMORY = 0.99
"""What remains of a past error, per comparison."""
_MARGIN_SHARE = 0.7
"""The share of recent forecasts that were lower than what came by the margin at most."""
_RECENT = 120
_FIRST_COMPARED = 6

_Series = NDArray[np.float64]


class _Candidate:
    """One way to forecast, and how good it was."""

    def __init__(self, name: str, forecast: Callable[[float], float | None]) -> None:
        self.name = name
        self.forecast = forecast
        """From seconds ahead to the rate; None: it has no forecast."""
        self.pending: deque[tuple[float, float]] = deque()
        """Until when, and what was forecast for then."""
        self.loss = 0.0
        self.weight = 0.0
        self.errors: deque[float] = deque(maxlen=_RECENT)
        """What came, less what was forecast."""

    @property
    def mean_loss(self) -> float:
        return self.loss / self.weight if self.weight else 0.0

    def compare(self, now: float, rate: float) -> None:
        """Compare the forecasts for now with the rate that came."""
        while self.pending and self.pending[0][0] <= now:
            error = rate - self.pending.popleft()[1]
            self.loss = _MEMORY * self.loss + (_TOO_LOW * error if error > 0.0 else -error)
            self.weight = _MEMORY * self.weight + 1.0
            self.errors.append(error)

    def margin(self) -> float:
        """Return by how much most recent forecasts were too low at most; never below 0."""
        if len(self.errors) < _FIRST_COMPARED:
            return 0.0
        return max(0.0, float(np.quantile(np.array(self.errors), _MARGIN_SHARE)))


class Forecast:
    """Forecasts one rate. Values are to come at about equal intervals; not for several threads."""

    def __init__(self, horizon_s: float, interval_s: float) -> None:
        """`horizon_s`: how far ahead, `interval_s`: how often `add` is called."""
        self.horizon_s = horizon_s
        self._interval_s = interval_s
        self._smooth = max(1, round(_SMOOTH_S / interval_s))
        self._values: deque[float] = deque(maxlen=int(_KEPT_S / interval_s))
        self._rates: deque[float] = deque(maxlen=int(_KEPT_S / interval_s))
        """The same, smoothed."""
        self.season_s: float | None = None
        """After how long the rate repeats itself; None: it does not."""
        self._looked_at = 0.0
        self._candidates = (
            *(_Candidate(f"trend of {window_s:g} s", partial(self._trend, window_s)) for window_s in _TREND_S),
            _Candidate("level", self._level),
            _Candidate("season", self._seasonal),
        )
        self._best = self._candidates[0]

    def __repr__(self) -> str:
        return f"<Forecast by {self.by}, {self.rate:.3g}/s now, season {self.season_s} s>"

    @property
    def rate(self) -> float:
        """The rate now."""
        return self._rates[-1] if self._rates else 0.0

    @property
    def by(self) -> str:
        """The name of the forecast that is used."""
        return self._best.name

    def add(self, now: float, rate: float) -> None:
        """Take note of the mean rate since the last call."""
        self._values.append(rate)
        recent = [self._values[-1 - back] for back in range(min(self._smooth, len(self._values)))]
        self._rates.append(sum(recent) / len(recent))
        if now - self._looked_at >= _LOOK_FOR_SEASON_S:
            self._looked_at = now
            self.season_s = self._find_season()
        known: list[_Candidate] = []
        for candidate in self._candidates:
            candidate.compare(now, self.rate)
            ahead = candidate.forecast(self.horizon_s)
            if ahead is None:
                continue
            candidate.pending.append((now + self.horizon_s, ahead))
            if len(candidate.errors) >= _FIRST_COMPARED:
                known.append(candidate)
        self._best = min(known, key=lambda each: each.mean_loss, default=self._candidates[0])

    def peak(self) -> float:
        """Return the most that the rate is expected to be between now and the horizon."""
        if not self._rates:
            return 0.0
        steps = [self.horizon_s * part / 4.0 for part in range(5)]
        ahead = [value for value in map(self._best.forecast, steps) if value is not None]
        return max(0.0, self.rate, *ahead) + self._best.margin()

    def _level(self, ahead_s: float) -> float | None:
        return self.rate

    def _trend(self, window_s: float, ahead_s: float) -> float | None:
        """The line through the values of the last `window_s`."""
        count = min(len(self._values), round(window_s / self._interval_s))
        if count < self._smooth:
            return self.rate
        values = np.array([self._values[-count + number] for number in range(count)])
        times = np.arange(count) - (count - 1)
        slope, end = np.polyfit(times, values, 1)
        return max(0.0, float(end + slope * ahead_s / self._interval_s))

    def _seasonal(self, ahead_s: float) -> float | None:
        """What came one season ago, made as much more or less as the rate is now."""
        if self.season_s is None:
            return None
        season = round(self.season_s / self._interval_s)
        ahead = min(round(ahead_s / self._interval_s), season)
        if season >= len(self._rates):
            return None
        # A smoothed rate lies half the smoothing behind.
        then, before = self._rates[-1 - season], self._rates[-1 - season + ahead]
        ratio = min(2.0, max(0.5, self.rate / then)) if then > 0.0 else 1.0
        return before * ratio

    def _find_season(self) -> float | None:
        """Return the time after which the history repeats itself; None if it does not, or not twice yet."""
        stride = max(1, len(self._rates) // _SEASON_BINS)
        rates: _Series = np.array(self._rates)[::-1][::stride]
        if len(rates) * stride * self._interval_s < 2.0 * _SHORTEST_SEASON_S:
            return None
        centred = rates - rates.mean()
        power = float(centred @ centred)
        if power <= 0.0:
            return None
        count = len(centred)
        spectrum = np.fft.rfft(centred, 2 * count)
        overlap = np.fft.irfft(spectrum * np.conj(spectrum))[:count]
        lags = np.arange(count)
        correlation = overlap / power * count / np.maximum(count - lags, 1)
        first = max(2, int(_SHORTEST_SEASON_S / self._interval_s / stride))
        last = count // 2
        if last <= first:
            return None
        best = first + int(np.argmax(correlation[first : last + 1]))
        is_peak = (
            first < best < last and correlation[best] >= correlation[best - 1] and correlation[best] >= correlation[best + 1]
        )
        return best * stride * self._interval_s if is_peak and correlation[best] >= _SEASONAL else None
