"""The comparison of a replay, drawn. Needs matplotlib, which `pip install 'dynamo-serving[plot]'` brings."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator
from numpy.typing import NDArray

from dynamo.local.replay.config import ReplayConfig
from dynamo.local.replay.figures import Figures, Summary
from dynamo.local.replay.planned import Course

_CURVE_POINTS = 400


def draw(results: Mapping[str, tuple[Figures, Summary]], path: Path) -> None:
    """Six panels, one colour per mode. Raises ValueError for a format that is not known, OSError."""
    figure = Figure(figsize=(13, 7.5), layout="constrained")
    panels = figure.subplots(2, 3)
    colours = {mode: f"C{number}" for number, mode in enumerate(results)}
    summaries = {mode: summary for mode, (_, summary) in results.items()}
    _bars(
        panels[0, 0],
        "Prompt blocks found in the cache, %",
        {mode: each.block_hit_rate * 100 for mode, each in summaries.items()},
        colours,
    )
    _shares(panels[0, 1], "Time to first token", {mode: figures.ttft_s for mode, (figures, _) in results.items()}, colours)
    _shares(panels[0, 2], "Time between tokens", {mode: figures.itl_s for mode, (figures, _) in results.items()}, colours)
    _bars(
        panels[1, 0],
        "Load imbalance: most / mean prompt tokens",
        {mode: each.imbalance for mode, each in summaries.items()},
        colours,
    )
    _bars(panels[1, 1], "Rejected requests, %", {mode: each.rejected_share * 100 for mode, each in summaries.items()}, colours)
    _bars(
        panels[1, 2], "Goodput (line: offered), requests/s", {mode: each.goodput_rps for mode, each in summaries.items()}, colours
    )
    for position, each in enumerate(summaries.values()):
        panels[1, 2].plot([position - 0.4, position + 0.4], [each.offered_rps] * 2, color="grey", linestyle=":")
    panels[1, 2].set_ylim(top=1.15 * max(1.0, *(each.offered_rps for each in summaries.values())))
    figure.savefig(path, dpi=110)


def draw_rates(summaries: Sequence[Mapping[str, Summary]], path: Path) -> None:
    """Goodput over the rate of requests, one curve per mode. `summaries`: by mode, one for each rate. Raises as `draw`."""
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for mode in summaries[0]:
        results = [each[mode] for each in summaries]
        offered = [each.requests_per_s for each in results]
        axes.plot(offered, [each.goodput_rps for each in results], marker="o", label=mode)
    axes.plot(offered, offered, linestyle=":", color="grey", label="all requests")
    axes.set(xlabel="requests per second", ylabel="completed within the goals, per second")
    axes.set_ylim(0.0, 1.25 * max(1.0, *(each.goodput_rps for by_mode in summaries for each in by_mode.values())))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=9)
    figure.savefig(path, dpi=110)


def draw_courses(courses: Mapping[str, Course], config: ReplayConfig, path: Path) -> None:
    """Arrivals, workers, time to first token and cost as time goes on, one curve per mode. Raises as `draw`."""
    figure = Figure(figsize=(11, 9), layout="constrained")
    arrivals, workers, ttft, cost = figure.subplots(4, 1, sharex=True)
    step_h = config.planning.interval_s / 3600.0
    for number, (mode, course) in enumerate(courses.items()):
        hours = np.array(course.seconds) / 3600.0
        if not number:
            arrivals.plot(hours, _smooth(course.arrivals_per_s), color="grey")
        workers.step(hours, np.array(course.serving), where="post", label=f"{mode}: serving", color=f"C{number}")
        workers.step(hours, np.array(course.wanted), where="post", label=f"{mode}: wanted", color=f"C{number}", alpha=0.35)
        ttft.plot(hours, _smooth(course.ttft_s), label=mode, color=f"C{number}")
        cost.plot(hours, np.cumsum(np.array(course.paid)) * step_h, label=mode, color=f"C{number}")
    ttft.axhline(config.ttft_goal_s, color="grey", linestyle=":", label="goal")
    arrivals.set_ylabel("arrivals, requests/s")
    workers.set_ylabel("workers")
    ttft.set_ylabel("TTFT, mean of a minute, s")
    cost.set(ylabel="instance hours", xlabel="hours")
    for axes in (arrivals, workers, ttft, cost):
        axes.set_ylim(bottom=0.0)
        axes.grid(alpha=0.3)
    for axes in (workers, ttft):
        axes.legend(fontsize=9)
    figure.savefig(path, dpi=110)


def _smooth(values: array[float], count: int = 12) -> NDArray[np.float64]:
    """Return the mean of each value and those before it, `count` in all; values that are not known are left out."""
    known = np.array(values, dtype=np.float64)
    weights = np.ones(count)
    present = ~np.isnan(known)
    sums = np.convolve(np.where(present, known, 0.0), weights)[: len(known)]
    numbers = np.convolve(present.astype(np.float64), weights)[: len(known)]
    means: NDArray[np.float64] = np.divide(sums, numbers, out=np.full(len(known), np.nan), where=numbers > 0)
    return means


def _bars(axes: Axes, title: str, values: Mapping[str, float], colours: Mapping[str, str]) -> None:
    bars = axes.bar(list(values), list(values.values()), color=[colours[mode] for mode in values])
    axes.bar_label(bars, fmt="%.3g", padding=2)
    axes.set_title(title, fontsize=11)
    axes.set_ylim(0.0, max(1.0, *values.values()) * 1.15)
    axes.tick_params(axis="x", rotation=20)


def _shares(axes: Axes, title: str, values: Mapping[str, array[float]], colours: Mapping[str, str]) -> None:
    """For each time, the share of observations that took no longer."""
    shares = np.linspace(0, 100, _CURVE_POINTS)
    for mode, observed in values.items():
        if observed:
            axes.plot(np.percentile(np.array(observed, dtype=np.float64), shares) * 1e3, shares, color=colours[mode], label=mode)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("ms")
    axes.set_ylabel("% of them within")
    axes.set_title(title, fontsize=11)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=9)
