"""Which numbers of instances are tried on the last arrivals, when, and what follows from it.

The arrivals are those that frontends describe in their reports, sped up or slowed down to the rate that is forecast. From the
number that the formula gives, corrected as the last time, the search goes down while the goals are held, or up until they are.
What it finds is kept as a ratio to the formula, which goes on with it between two searches. Caches begin with what older
arrivals would have left there.

Of a disaggregated model, each pool is tried alone: prefill instances compute the prompts and generate one token, decode instances
get the prompts computed when they arrive.

A search takes seconds of CPU at a high rate. The next one begins when the time since has brought its share down to `cpu_share`.
It may run in another thread, so that decisions go on meanwhile with what the last one found.
"""

from __future__ import annotations

import math
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import TypeAlias

import msgspec

from dynamo.common.model_card import Role
from dynamo.common.scaling.demand import ArrivalSample
from dynamo.frontend.config import RouterMode, RouterOptions
from dynamo.planner.capacity import Size
from dynamo.planner.decide import WhatIfResult
from dynamo.planner.pools import Engine, Goals, PoolView
from dynamo.planner.whatif.fleet import WhatIfFleet, WhatIfRequest
from dynamo.planner.whatif.strides import at_one_stride

_PLAYED = 1500
"""Arrivals that are played at most."""
_KEPT = 4500
"""Arrivals that are kept; those that are not played fill the caches."""
_PLAYED_S = 900.0
"""No older arrival is played."""
_OLDEST_S = 3600.0
_FEWEST = 50
"""With fewer arrivals to play, chance would decide."""
_LONGEST_PROMPT = 1 << 20
"""Tokens; a longer prompt is played as one of so many: each step of an engine takes time here, too."""
_SHORTEST_S = 15.0
"""A shorter time shows no queues."""
_WARM_SHARE = 0.2
"""The share of the time whose requests do not count: the fleet begins idle."""
_STEP = 0.06
"""By which share of the instances the search goes on, at least by one."""
_PART_S = 20.0
"""How arrivals are bunched within so long is kept; between such parts, they are made even."""
_MOST_TRIES = 6
_VALID_S = 180.0
_EVERY_S = 20.0
"""Not sooner, whatever a search takes."""
_LEAST_RATIO, _MOST_RATIO = 0.5, 3.0
_FEWEST_INSTANCES = 2
_ALSO_MISSED = 1.0 / 3.0
"""Where more requests miss the goals with any number of instances than may, so much of what may is to miss them besides."""

_Samples: TypeAlias = Sequence[tuple[float, ArrivalSample]]
"""When each arrived, and what."""


class Advisor:
    """Tries numbers of instances for one pool. Not for several threads, but for the searches that it starts."""

    def __init__(
        self,
        options: RouterOptions | None = None,
        role: Role = Role.AGGREGATED,
        *,
        cpu_share: float = 0.1,
        sharers: Callable[[], int] = lambda: 1,
        start: Callable[[Callable[[], None]], None] = lambda search: search(),
        cpu_clock: Callable[[], float] = time.thread_time,
        seed: int = 0,
    ) -> None:
        """`options`: of the router that frontends use, without goals; `role`: what the instances of the pool do.

        `cpu_clock`: the CPU time of the calling thread.

        `start`: runs a search, or has it run by another thread.
        `sharers`: among how many advisors the share is divided now.
        """
        self._options = RouterOptions(mode=RouterMode.KV) if options is None else options
        self._role = role
        self._cpu_share = cpu_share
        self._sharers = sharers
        self._start = start
        self._cpu_clock = cpu_clock
        self._seed = seed
        self._samples: deque[tuple[float, ArrivalSample]] = deque(maxlen=_KEPT)
        """When each arrived, and what."""
        self._result: WhatIfResult | None = None
        self._ratio = 1.0
        self._found_at = -math.inf
        self._next_at = -math.inf
        self._is_searching = False
        self.searches = 0
        self.cpu_s = 0.0
        """What all searches took."""

    def __repr__(self) -> str:
        return (
            f"<Advisor, {len(self._samples)} arrivals, ratio {self._ratio:.2f}, {self.searches} searches in {self.cpu_s:.1f} s>"
        )

    def advise(self, view: PoolView, engine: Engine, goals: Goals, forecast_per_s: float, size: Size) -> WhatIfResult | None:
        """Return what the last search found; search anew if it is time. None: there is nothing valid."""
        if view.now >= self._next_at and self._cpu_share > 0.0 and size.instances and not self._is_searching:
            self._is_searching = True
            self._start(partial(self._search, tuple(self._samples), view.now, engine, goals, forecast_per_s, size))
        return self._result if view.now - self._found_at <= _VALID_S else None

    def _search(self, samples: _Samples, now: float, engine: Engine, goals: Goals, forecast_per_s: float, size: Size) -> None:
        """Search, and keep what is found."""
        begin = self._cpu_clock()
        try:
            result = self._found(samples, now, engine, goals, forecast_per_s, size)
        finally:
            took_s = self._cpu_clock() - begin
            self._next_at = now + max(_EVERY_S, took_s * self._sharers() / self._cpu_share)
            self.cpu_s += took_s
            self._is_searching = False
        if result is not None:
            self.searches += 1
            self._result, self._found_at, self._ratio = result, now, result.ratio

    def observe(self, view: PoolView) -> None:
        """Keep the arrivals that a view describes, and forget those that are too old."""
        arrived = sorted(((view.now - sample.age_s, sample) for sample in view.samples), key=lambda each: each[0])
        self._samples.extend(arrived)
        while self._samples and self._samples[0][0] < view.now - _OLDEST_S:
            self._samples.popleft()

    def _found(
        self, samples: _Samples, now: float, engine: Engine, goals: Goals, forecast_per_s: float, size: Size
    ) -> WhatIfResult | None:
        """Return the least number of instances that holds the goals, as a ratio to the formula's; None: too little is known."""
        played = [each for each in samples[-_PLAYED:] if each[0] > now - _PLAYED_S]
        if len(played) < _FEWEST or forecast_per_s <= 0.0:
            return None
        # How many requests each of them stands for: so much smaller is the fleet that they are played on.
        each = sum(sample.weight for _, sample in played) / len(played)
        seconds = len(played) * each / forecast_per_s
        if seconds < _SHORTEST_S or size.instances / each < _FEWEST_INSTANCES:
            return None
        requests = self._requests(samples, engine, seconds * len(samples) / len(played))
        play_from = requests[-len(played)].at
        begun = {request.hashes[0] for request in requests[-len(played) :] if request.hashes}
        if not any(request.hashes and request.hashes[0] in begun for request in requests[: -len(played)]):
            requests = requests[-len(played) :]  # nothing of these would be found in the caches
        count_from = play_from + _WARM_SHARE * seconds
        # Between tokens a request is with another instance, where one of these has only computed its prompt.
        counted = msgspec.structs.replace(goals, itl_s=None) if self._role is Role.PREFILL else goals
        least = max(_FEWEST_INSTANCES, math.ceil(size.engine_seconds / each))

        def goodput(instances: int) -> float:
            fleet = WhatIfFleet(instances, engine, self._options, self._seed)
            return fleet.run(requests, counted, count_from, play_from).share

        first = max(least, round(size.instances * self._ratio / each))
        found, share, reachable = _least_good(first, least, goals.share, goodput)
        ratio = min(max(found * each / size.instances, _LEAST_RATIO), _MOST_RATIO)
        return WhatIfResult(ratio=ratio, goodput_share=share, reachable_share=reachable)

    def _requests(self, samples: _Samples, engine: Engine, seconds: float) -> list[WhatIfRequest]:
        """Return the arrivals, spread over so many seconds, with outputs of random lengths, the same at each call."""
        rng = random.Random(self._seed)
        mean = max(1.0, engine.times.output_tokens)
        requests: list[WhatIfRequest] = []
        times = levelled([at for at, _ in samples], seconds)
        per_hash, hashes = at_one_stride([sample for _, sample in samples])
        is_prefilled = self._role is Role.DECODE
        for at, (_, sample), told in zip(times, samples, hashes, strict=True):
            output = 1 + int(rng.expovariate(1.0 / (sample.expected_output or mean)))
            limit = 1 if self._role is Role.PREFILL else sample.max_output
            requests.append(
                WhatIfRequest(
                    at=at,
                    prompt_tokens=min(max(1, sample.prompt_tokens), _LONGEST_PROMPT),
                    output_tokens=min(output, limit) if limit else output,
                    max_output=limit,
                    priority=sample.priority,
                    tokens_per_hash=per_hash if told and not is_prefilled else 0,
                    hashes=() if is_prefilled else told,
                    is_prefilled=is_prefilled,
                )
            )
        return requests


def levelled(times: Sequence[float], seconds: float) -> list[float]:
    """Return times spread over so many seconds, at the same rate in each part of the history, bunched as they are within it.

    Otherwise the end of a rise would come at a rate far above the one that is forecast.
    """
    begin, lasted_s = times[0], times[-1] - times[0]
    counts = [0] * max(1, round(lasted_s / _PART_S))
    length_s = lasted_s / len(counts) or 1.0
    numbers = [min(int((at - begin) / length_s), len(counts) - 1) for at in times]
    for number in numbers:
        counts[number] += 1
    before = [0, *accumulate(counts)]
    each_s = seconds / len(times)
    return [
        each_s * (before[number] + ((at - begin) / length_s - number) * counts[number])
        for at, number in zip(times, numbers, strict=True)
    ]


def _least_good(first: int, least: int, share: float, goodput: Callable[[int], float]) -> tuple[int, float, float]:
    """Return the least number that holds the share, as far as the tries go, its share, and the most that any number would have.

    Begins with `first`. Some requests reach the goals with no number of instances, such as prompts that take longer to compute
    than the goal: where these alone are too many, hardly any others are to miss them. Otherwise each search would ask for more.
    """
    number, got, reachable = first, goodput(first), 1.0
    tries = _MOST_TRIES - 1
    if got < share:
        tries -= 1
        reachable = max(got, goodput(2 * first))
        if reachable < share:
            share = reachable * (1.0 - _ALSO_MISSED * (1.0 - share))
    step = max(1, round(_STEP * first))
    for _ in range(tries):
        if got >= share:
            if number <= least:
                break
            fewer = max(least, number - step)
            got_there = goodput(fewer)
            if got_there < share:
                break
        else:
            fewer = number + step
            got_there = goodput(fewer)
            if got_there >= share:
                return fewer, got_there, reachable
        number, got = fewer, got_there
    return number, got, reachable
