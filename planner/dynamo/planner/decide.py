"""How many instances one pool is to have, decided anew at each interval. The number is absolute.

    needed    the formula (`capacity.py`) for what is forecast (`forecast.py`) until a new instance could serve, corrected by the
              last what-if
    target    raised to it soon; lowered to the most that was needed lately, so that noise changes nothing
    bounds    least and most, and what a schedule says

Before an engine's steps have been learned, and for models without tokens, requests in flight decide.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import msgspec

from dynamo.common.model_card import Role
from dynamo.common.scaling.pool import Pool
from dynamo.planner.capacity import Demand, Size, missed_share, size, tokens_of
from dynamo.planner.forecast import Forecast
from dynamo.planner.pools import Bounds, Decision, Engine, Goals, PoolView

_MEAN_OF_S = 120.0
"""A mean request is that of so long."""
_URGENT = 1.25
"""A target below the need by this factor is raised at once."""
_SMALL = 0.04
"""A target above the need by less than this share stays."""
_IN_FLIGHT = 8.0
"""Requests per instance where an engine does not say how many it runs at once; half of them, where it does."""
_SHORTEST_DRAIN_S = 30.0
_LATE_STARTS = 3.0
"""An instance that has not come after so many times the usual start is not counted on."""
_MOST_HEADROOM = 2.0


class WhatIfResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a replay of the last arrivals says."""

    ratio: float
    """Instances that reached the goals over those that the formula takes."""
    goodput_share: float
    """The share of requests that reached the goals with that many."""
    reachable_share: float = 1.0
    """The share that reached them with far more; 1: that many were enough."""


class WhatIf(Protocol):
    """Tries other numbers of instances on the last arrivals."""

    def observe(self, view: PoolView) -> None:
        """Keep the arrivals of a view."""
        ...

    def advise(self, view: PoolView, engine: Engine, goals: Goals, forecast_per_s: float, size: Size) -> WhatIfResult | None:
        """Return what the last try says; None: there was none that is still valid."""
        ...


class PoolPlanner:
    """Decides for one pool. Not for several threads.

    One that stands by only observes, so that what it has seen is there when it decides.
    """

    def __init__(
        self,
        pool: Pool,
        goals: Goals,
        bounds: Bounds,
        *,
        interval_s: float,
        what_if: WhatIf | None = None,
        tells_misses: bool = False,
    ) -> None:
        """`interval_s`: how often `decide` or `observe` is called, about; `tells_misses`: for a budget of several pools."""
        self.pool = pool
        self.goals = goals
        self.bounds = bounds
        self._what_if = what_if
        self._tells_misses = tells_misses
        self._interval_s = interval_s
        self._target: int | None = None
        self._changed_at = -math.inf
        self._forecast = Forecast(bounds.startup_s + interval_s, interval_s)
        self._mean = _MeanRequest()
        self._needed: deque[tuple[float, int]] = deque()
        """When how many were needed, within the cooling time."""
        self._wanted: deque[tuple[float, int]] = deque()
        """When the target was raised, to what."""
        self._last_request_at: float | None = None
        self._begun_at: float | None = None

    def __repr__(self) -> str:
        return f"<PoolPlanner of {self.pool}, target {self._target}, {self._forecast!r}>"

    def begin(self, target: int) -> None:
        """Decide from now on, of a pool that was to have `target` instances."""
        self._target, self._begun_at, self._changed_at = target, None, -math.inf
        self._needed.clear()
        self._wanted.clear()

    def observe(self, view: PoolView) -> None:
        """Take note of what arrived, at each interval."""
        now, arrivals = view.now, view.arrivals
        if self._last_request_at is None or arrivals.requests or view.waiting or any(each.requests for each in view.instances):
            self._last_request_at = now
        if arrivals.seconds > 0.0:
            self._forecast.horizon_s = self._startup_s(view) + self._interval_s
            self._forecast.add(now, arrivals.requests / arrivals.seconds)
            self._mean.add(view)
        if self._what_if is not None:
            self._what_if.observe(view)

    def decide(self, view: PoolView, *, least: int = 0) -> Decision:
        """Observe, and return how many instances the pool is to have from now on. `least`: what a schedule says."""
        now = view.now
        self.observe(view)
        if self._begun_at is None:
            self._begun_at = now
        if self._target is None:
            self._target = len(view.instances)
        peak = self._forecast.peak()
        needed, by, reason, sized, goodput = self._need(view, peak)
        least = max(least, self.bounds.least)
        if needed == 0 and least == 0:
            needed = self._idle(view, now)
        self._note_need(now, needed)
        wanted = self._with_pauses(now, needed)
        bounded = min(max(wanted, least), self.bounds.most)
        if bounded != wanted:
            by, reason = "bounds", f"{reason}; {bounded} by the bounds {least} to {self.bounds.most}"
        if bounded != self._target:
            self._changed_at = now
            if bounded > self._target:
                self._wanted.append((now, bounded))
            self._target = bounded
        return Decision(
            pool=self.pool,
            instances=bounded,
            leave=tuple(each.id for each in sorted(view.instances, key=lambda each: (each.cache_worth_s, each.requests))),
            by=by,
            reason=reason,
            arrivals_per_s=self._forecast.rate,
            forecast_per_s=peak,
            engine_seconds=sized.engine_seconds if sized is not None else 0.0,
            needed=needed,
            missing=self._missing(view),
            misses_per_s=self._misses(view, peak, needed, sized) if self._tells_misses else (),
            goodput_share=goodput,
        )

    def _need(self, view: PoolView, peak: float) -> tuple[int, str, str, Size | None, float | None]:
        """Return the instances that are needed, which rule says so, why, the formula's result, and the goodput expected."""
        if not view.engine.observations or not self._mean.has_tokens:
            needed, reason = self._by_load(view)
            return needed, "load", reason, None, None
        demand = self._demand(view, peak)
        sized = size(demand, view.engine, self.goals, self.bounds.most, headroom=self._headroom(view))
        if not sized.instances:
            return (1 if view.waiting else 0), "formula", "no requests are expected", sized, None
        reason = (
            f"{peak:.3g} requests/s are expected ({self._forecast.by}), {self._forecast.rate:.3g}/s arrive; "
            f"{sized.engine_seconds:.3g} engine-seconds per second, bound by {sized.bound}"
        )
        if sized.reachable:
            reason = f"{reason}; {sized.reachable}"
        result = None if self._what_if is None else self._what_if.advise(view, view.engine, self.goals, peak, sized)
        if result is None:
            return sized.instances, "formula", reason, sized, None
        if result.reachable_share < self.goals.share:
            reason = f"{reason}; with any number, {result.reachable_share:.0%} of the requests reach the goals"
        least = max(1, math.ceil(sized.engine_seconds))
        return max(least, math.ceil(sized.instances * result.ratio - 1e-9)), "what-if", reason, sized, result.goodput_share

    def _misses(self, view: PoolView, peak: float, needed: int, sized: Size | None) -> Sequence[float]:
        """Return how many requests per second miss the goals with up to `needed` instances.

        Where a what-if has corrected the formula, it is right for as many times as many instances.
        """
        if sized is None or not sized.instances:
            return [peak * (1.0 - number / needed) for number in range(needed + 1)] if needed else ()
        demand = self._demand(view, peak)
        headroom = self._headroom(view)
        most = min(sized.instances, self.bounds.most)
        shares = [missed_share(number, demand, view.engine, self.goals, headroom) for number in range(most + 1)]
        places = [min(number * sized.instances / needed, most) for number in range(needed + 1)]
        return [peak * _between(shares, place) for place in places]

    def _demand(self, view: PoolView, peak: float) -> Demand:
        mean, role = self._mean, self.pool.role
        computed, output = tokens_of(role, mean.computed_tokens, mean.output_tokens or view.engine.times.output_tokens)
        queued = view.waiting_tokens + sum(each.queued_tokens for each in view.instances)
        usual = len(view.instances) * computed
        drain_s = max(_SHORTEST_DRAIN_S, self._startup_s(view))
        return Demand(
            requests_per_s=peak,
            computed_tokens=computed,
            prompt_tokens=mean.prompt_tokens,
            output_tokens=output,
            variation=mean.variation,
            backlog_tokens=max(0.0, queued - usual) / drain_s if role is not Role.DECODE else 0.0,
        )

    def _headroom(self, view: PoolView) -> float:
        return min(max(view.ttft_ratio, 1.0), _MOST_HEADROOM)

    def _startup_s(self, view: PoolView) -> float:
        return view.startup_s or self.bounds.startup_s

    def _by_load(self, view: PoolView) -> tuple[int, str]:
        in_flight = view.waiting + sum(each.requests for each in view.instances)
        each = view.engine.max_num_seqs / 2.0 or _IN_FLIGHT
        needed = math.ceil(in_flight / each)
        return needed, f"{in_flight} requests are in flight, {each:.3g} for each instance; no steps of its engine are known"

    def _idle(self, view: PoolView, now: float) -> int:
        """Return 0 if the last instance may end, or if there is none; else 1."""
        assert self._last_request_at is not None
        idle_s = self.bounds.idle_s
        is_over = bool(idle_s) and now - self._last_request_at >= idle_s
        return 0 if is_over or not (view.instances or self._target) else 1

    def _note_need(self, now: float, needed: int) -> None:
        self._needed.append((now, needed))
        while self._needed[0][0] < now - self.bounds.cool_down_s:
            self._needed.popleft()

    def _with_pauses(self, now: float, needed: int) -> int:
        """Return the target with which the number changes neither too often nor for nothing."""
        target = self._target
        assert target is not None
        has_cooled = now - self._changed_at >= self.bounds.cool_up_s
        if needed > target:
            return needed if has_cooled or needed >= _URGENT * target else target
        most = max(number for _, number in self._needed)
        is_small = target - most < max(1.0, _SMALL * target)
        assert self._begun_at is not None
        has_seen = now - self._begun_at >= self.bounds.cool_down_s  # a new planner does not know what was needed before
        return most if has_seen and has_cooled and not is_small else target

    def _missing(self, view: PoolView) -> int:
        """Return how many instances have been wanted for so long that they will hardly come."""
        latest_s = _LATE_STARTS * self._startup_s(view)
        wanted = [number for at, number in self._wanted if view.now - at >= latest_s]
        while len(self._wanted) > 1 and view.now - self._wanted[1][0] >= latest_s:
            self._wanted.popleft()
        assert self._target is not None
        return max(0, min(wanted[-1], self._target) - len(view.instances)) if wanted else 0


def _between(values: Sequence[float], place: float) -> float:
    """Return the value at a place between two positions."""
    before = int(place)
    after = min(before + 1, len(values) - 1)
    return values[before] + (place - before) * (values[after] - values[before])


class _MeanRequest:
    """The mean request of the last minutes, and how much the prompts vary."""

    def __init__(self) -> None:
        self._requests = 0.0
        self._prompt = 0.0
        self._computed = 0.0
        self._samples = 0.0
        self._sampled = 0.0
        self._squares = 0.0
        self._told = 0.0
        """Requests of which frontends expect so many tokens, in samples."""
        self._expected = 0.0

    @property
    def has_tokens(self) -> bool:
        return self._prompt > 0.0

    @property
    def prompt_tokens(self) -> float:
        return self._prompt / self._requests if self._requests else 0.0

    @property
    def computed_tokens(self) -> float:
        return self._computed / self._requests if self._requests else 0.0

    @property
    def output_tokens(self) -> float:
        """What frontends expect of the requests that arrived, who know their keys and sessions; 0: they do not say."""
        return self._expected / self._told if self._told else 0.0

    @property
    def variation(self) -> float:
        """The squared coefficient of variation of the prompts' lengths."""
        if not self._sampled:
            return 1.0
        mean = self._sampled / self._samples
        return max(0.0, self._squares / self._samples / mean**2 - 1.0)

    def add(self, view: PoolView) -> None:
        arrivals = view.arrivals
        kept = math.exp(-arrivals.seconds / _MEAN_OF_S)
        if arrivals.requests or self._requests > 1.0:  # without requests, the last ones stay the best guess
            self._requests = kept * self._requests + arrivals.requests
            self._prompt = kept * self._prompt + arrivals.prompt_tokens
            self._computed = kept * self._computed + arrivals.computed_tokens
        if not view.samples:
            return
        self._samples *= kept
        self._sampled *= kept
        self._squares *= kept
        self._told *= kept
        self._expected *= kept
        for sample in view.samples:
            self._samples += sample.weight
            self._sampled += sample.weight * sample.prompt_tokens
            self._squares += sample.weight * sample.prompt_tokens**2
            if sample.expected_output:
                self._told += sample.weight
                self._expected += sample.weight * sample.expected_output
