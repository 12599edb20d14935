"""A replay in which a planner decides how many workers there are, as time goes on.

It sees what a planner sees: arrivals as frontends count them, load reports, the workers that serve. What it decides is carried
out as by a platform: a new worker serves after its start-up time, one that is to end completes what it has. Each costs from the
decision until it has ended.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from dynamo.common.kv.events import LoadReport
from dynamo.common.kv.hashes import TOKEN_BYTES, pack_hashes
from dynamo.common.names import InstanceId
from dynamo.common.scaling.demand import ArrivalSample, thin_hashes
from dynamo.common.scaling.pool import Pool
from dynamo.frontend.router.cost.step_model import StepModel
from dynamo.local.replay.config import ReplayConfig, ReplayMode
from dynamo.local.replay.figures import Figures
from dynamo.local.replay.fleet import MODEL, Arrival, Replay, router_options
from dynamo.local.replay.trace import Row
from dynamo.planner.decide import PoolPlanner
from dynamo.planner.observe.cache_worth import CacheWorth
from dynamo.planner.pools import Arrivals, Bounds, Decision, Engine, Goals, InstanceView, PoolView
from dynamo.planner.whatif.advisor import Advisor
from dynamo.planner.whatif.fleet import without_goals


class Scaler(Protocol):
    """Decides how many instances a pool is to have: a planner, or a rule that it is compared with."""

    def decide(self, view: PoolView, ttft_s: Sequence[float]) -> Decision:
        """Return how many there are to be. `ttft_s`: of the requests that were completed since the last call."""
        ...


class PlannerScaler:
    """The planner, which needs no times to first token."""

    def __init__(self, planner: PoolPlanner) -> None:
        self._planner = planner

    def decide(self, view: PoolView, ttft_s: Sequence[float]) -> Decision:
        return self._planner.decide(view)


@dataclass(slots=True)
class Course:
    """What happened, interval by interval."""

    seconds: array[float] = field(default_factory=lambda: array("d"))
    arrivals_per_s: array[float] = field(default_factory=lambda: array("d"))
    wanted: array[float] = field(default_factory=lambda: array("d"))
    serving: array[float] = field(default_factory=lambda: array("d"))
    ttft_s: array[float] = field(default_factory=lambda: array("d"))
    """The mean of the requests that were completed in the interval; NaN if there were none."""
    good_share: array[float] = field(default_factory=lambda: array("d"))
    paid: array[float] = field(default_factory=lambda: array("d"))
    """Workers that cost: those that start, serve, or complete their last requests."""
    events: int = 0
    """How often the number of wanted instances changed."""
    instance_s: float = 0.0
    """What all instances cost, from the decision until the end of each."""
    by: dict[str, int] = field(default_factory=dict)
    """How often each rule decided."""
    arrived_s: array[float] = field(default_factory=lambda: array("d"))
    """When each request arrived, in the order in which they ended or were refused."""
    reached: array[int] = field(default_factory=lambda: array("b"))
    """1 for each of these that reached the goals, 0 for each other."""

    def longest_loss_s(self, share: float, window_s: float = 10.0) -> float:
        """Return the longest time in which no whole window of arrivals had such a share of requests within the goals.

        Windows without arrivals are skipped.
        """
        counts: dict[int, list[int]] = {}
        for at, reached in zip(self.arrived_s, self.reached, strict=True):
            count = counts.setdefault(int(at / window_s), [0, 0])
            count[0] += 1
            count[1] += reached
        longest = lost = 0
        for _, (requests, good) in sorted(counts.items()):
            lost = lost + 1 if good < share * requests else 0
            longest = max(longest, lost)
        return longest * window_s


def planner_of(config: ReplayConfig, mode: ReplayMode) -> Scaler:
    """Return a planner with the goals and bounds of a replay, whose what-ifs route as the replay does in this mode."""
    planning = config.planning
    bounds = Bounds(least=planning.min_instances, most=planning.max_instances, startup_s=planning.startup_s)
    goals = Goals(ttft_s=config.ttft_goal_s, itl_s=config.itl_goal_s, share=planning.goodput_share)
    routing = without_goals(router_options(config.router, mode))
    advisor = Advisor(routing, cpu_share=planning.whatif_cpu) if planning.whatif_cpu else None
    return PlannerScaler(PoolPlanner(Pool(MODEL), goals, bounds, interval_s=planning.interval_s, what_if=advisor))


class PlannedFleet:
    """Follows a replay, and has its number of workers decided."""

    def __init__(self, config: ReplayConfig, scaler: Scaler) -> None:
        self.course = Course()
        self.replay: Replay | None = None
        self._config = config
        self._scaler = scaler
        self._interval_s = config.planning.interval_s
        self._startup_s = config.planning.startup_s
        self._steps = StepModel()
        self._wanted = config.workers
        self._starting = 0
        """Workers whose start-up goes on."""
        self._cancelled = 0
        """How many of these are not wanted any more, and end when they are there."""
        self._leaving = 0
        self._arrivals = [0.0, 0.0, 0.0, 0.0]
        """Requests, prompt tokens, tokens to compute, refused."""
        self._samples: list[tuple[float, ArrivalSample]] = []
        """When each arrived, and what."""
        self._saved: Counter[InstanceId] = Counter()
        self._worth = CacheWorth()
        self._ended: list[tuple[float, bool]] = []

    def run(self, rows: Sequence[Row], mode: ReplayMode) -> Figures:
        self.replay = replay = Replay(rows, mode, self._config, observer=self)
        replay.at(self._interval_s, self._tick)
        figures = replay.run()
        figures.instance_s, figures.scaling_events = self.course.instance_s, self.course.events
        return figures

    # What the replay tells

    def placed(self, arrival: Arrival, instance: InstanceId, cached_tokens: int) -> None:
        self._count(arrival, len(arrival.request.prompt) // TOKEN_BYTES - cached_tokens)
        self._saved[instance] += cached_tokens

    def refused(self, arrival: Arrival) -> None:
        missing = arrival.missing_tokens() if self.replay is not None and self.replay.instances else None
        tokens = len(arrival.request.prompt) // TOKEN_BYTES
        self._count(arrival, tokens if missing is None else missing)
        self._arrivals[3] += 1
        self._end(arrival, float("nan"), is_good=False)

    def reported(self, instance: InstanceId, report: LoadReport) -> None:
        assert self.replay is not None
        self._steps.report(instance, report.totals, self.replay.now)

    def ended(self, arrival: Arrival, ttft_s: float, *, is_good: bool) -> None:
        self._end(arrival, ttft_s, is_good=is_good)

    def _end(self, arrival: Arrival, ttft_s: float, *, is_good: bool) -> None:
        self._ended.append((ttft_s, is_good))
        self.course.arrived_s.append(arrival.arrived_at)
        self.course.reached.append(is_good)

    def left(self, instance: InstanceId) -> None:
        self._leaving -= 1
        self._steps.remove_instance(instance)

    def _count(self, arrival: Arrival, computed_tokens: int) -> None:
        request, totals = arrival.request, self._arrivals
        tokens = len(request.prompt) // TOKEN_BYTES
        totals[0] += 1
        totals[1] += tokens
        totals[2] += computed_tokens
        assert self.replay is not None and request.hashes is not None
        every, hashes = thin_hashes(request.hashes.values)
        sample = ArrivalSample(
            age_s=0.0,
            weight=1.0,
            prompt_tokens=tokens,
            priority=request.priority,
            tokens_per_hash=every * self._config.block_size,
            hashes=pack_hashes(hashes),
        )
        self._samples.append((arrival.arrived_at, sample))

    # What the planner sees, and what becomes of its decisions

    def _tick(self) -> None:
        replay = self.replay
        assert replay is not None
        view = self._view(replay)
        times = [ttft_s for ttft_s, _ in self._ended if not math.isnan(ttft_s)]
        decision = self._scaler.decide(view, times)
        self._note(replay, view, decision, times)
        self._carry_out(replay, decision)
        replay.at(replay.now + self._interval_s, self._tick)

    def _view(self, replay: Replay) -> PoolView:
        config = self._config
        ids = [instance.id for instance in replay.instances]
        self._worth.add(self._saved, self._interval_s, ids)
        self._saved.clear()
        instances = []
        for id in ids:
            requests, queued = replay.requests_of(id)
            worth_s = self._worth.tokens_per_s(id) * self._steps.times.token
            instances.append(InstanceView(id=id, requests=requests, queued_tokens=queued, cache_worth_s=worth_s))
        requests_, prompt, computed, refused = self._arrivals
        samples, self._samples, self._arrivals = self._samples, [], [0.0, 0.0, 0.0, 0.0]
        return PoolView(
            pool=Pool(MODEL),
            now=replay.now,
            arrivals=Arrivals(
                seconds=self._interval_s, requests=requests_, prompt_tokens=prompt, computed_tokens=computed, refused=refused
            ),
            engine=Engine(
                times=self._steps.times,
                observations=self._steps.observations,
                block_size=config.block_size,
                total_blocks=config.blocks,
                max_num_seqs=config.max_num_seqs,
                max_batched_tokens=config.max_batched_tokens,
            ),
            instances=instances,
            waiting=replay.waiting,
            waiting_tokens=replay.waiting_tokens,
            samples=[msgspec.structs.replace(sample, age_s=replay.now - at) for at, sample in samples],
        )

    def _note(self, replay: Replay, view: PoolView, decision: Decision, times: Sequence[float]) -> None:
        course = self.course
        course.seconds.append(replay.now)
        course.arrivals_per_s.append(view.arrivals.requests / self._interval_s)
        course.wanted.append(decision.instances)
        course.serving.append(len(replay.instances))
        course.ttft_s.append(sum(times) / len(times) if times else float("nan"))
        course.good_share.append(sum(good for _, good in self._ended) / len(self._ended) if self._ended else float("nan"))
        self._ended.clear()
        course.events += decision.instances != self._wanted
        course.by[decision.by] = course.by.get(decision.by, 0) + 1
        # Workers on their way and those that complete their last requests are paid for, too.
        course.paid.append(len(replay.instances) + self._starting + self._leaving)
        course.instance_s += self._interval_s * course.paid[-1]

    def _carry_out(self, replay: Replay, decision: Decision) -> None:
        self._wanted = decision.instances
        there = len(replay.instances) + self._starting - self._cancelled
        for _ in range(decision.instances - there):
            if self._cancelled:
                self._cancelled -= 1
            else:
                self._starting += 1
                replay.at(replay.now + self._startup_s, self._started)
        less = there - decision.instances
        if less > 0:
            cancelled = min(less, self._starting - self._cancelled)
            self._cancelled += cancelled
            for instance in decision.leave[: less - cancelled]:
                self._leaving += 1
                replay.end_worker(instance)

    def _started(self) -> None:
        assert self.replay is not None
        self._starting -= 1
        if self._cancelled:
            self._cancelled -= 1
        else:
            self.replay.add_worker()
