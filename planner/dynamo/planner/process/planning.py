"""The rounds: look at all pools, decide for each, write the targets, have them carried out.

Only the leader decides. It begins with what the last leader decided, with what there is where that is more, and takes nothing
away before it has seen demand for as long as demand has to be lower first. Where it is not known what arrives, targets stay.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress

from msgspec.structs import replace

from dynamo.common.errors import DynamoError
from dynamo.common.scaling.demand import DemandReport
from dynamo.common.scaling.pool import Pool
from dynamo.common.scaling.targets import PoolTarget, Targets
from dynamo.planner.config import PlannerConfig
from dynamo.planner.decide import PoolPlanner
from dynamo.planner.executors.base import Executor, ExecutorFailed
from dynamo.planner.observe.bus import FleetBus
from dynamo.planner.observe.fleet import PoolWatch
from dynamo.planner.pools import Bounds, Decision, PoolView
from dynamo.planner.process.leader import Leadership
from dynamo.planner.process.standby import StandbyRecords
from dynamo.planner.process.state import DecisionMade, History, PlannerState, PoolState, initial_state, pool_state
from dynamo.planner.process.targets_key import TargetsKey
from dynamo.planner.schedule import least_at

log = logging.getLogger(__name__)

MAX_LEAVE = 1000
"""Instances that a target names as those to leave."""
_RECENTLY_S = 30.0
"""A model without a least number of instances has one of each role for so long after a request."""


MakeDecider = Callable[[Pool, Bounds], PoolPlanner]
"""Makes the decider of a pool of these bounds."""
Unreachable = Callable[[PoolView], str]
"""Returns why no number of instances reaches the goals, and what one can do; empty: they can be reached."""
WithinBudget = Callable[[Sequence[Decision], Mapping[Pool, PoolView]], Sequence[Decision]]
"""Returns the decisions for all pools, so that their instances together are within what there is."""


class Planning:
    """The rounds of one planner process, named `name`. `executor`: None where programs follow the key."""

    def __init__(
        self,
        config: PlannerConfig,
        name: str,
        *,
        watch: PoolWatch,
        bus: FleetBus,
        leadership: Leadership,
        key: TargetsKey,
        standby: StandbyRecords,
        executor: Executor | None,
        executor_name: str,
        make_decider: MakeDecider,
        within_budget: WithinBudget,
        unreachable: Unreachable,
        unix_time: Callable[[], float] = time.time,
    ) -> None:
        self._config = config
        self._name = name
        self._watch = watch
        self._bus = bus
        self._leadership = leadership
        self._key = key
        self._standby = standby
        self._executor = executor
        self._make_decider = make_decider
        self._within_budget = within_budget
        self._unreachable = unreachable
        self._unix_time = unix_time
        self._loop = asyncio.get_running_loop()
        self._is_urgent = asyncio.Event()
        """Requests wait for a pool that is to have no instance: the next round is due now."""
        bus.on_demand(self._look_for_waiting)
        self._term = 0
        """The term of which this is the state that follows; 0: this planner has not been the leader."""
        self._deciders: dict[Pool, PoolPlanner] = {}
        self._targets: dict[Pool, PoolTarget] = {}
        """What is in the key, or would be without a dry run."""
        self._lower_after: dict[Pool, float] = {}
        """When the demand for each pool has been seen for long enough in this term to take instances away."""
        self._requested_at: dict[str, float] = {}
        """When each model last had requests."""
        self._warnings: dict[Pool, str] = {}
        self._history = History()
        self._said_holding = ""
        self._said_error = ""
        self._looked_at = self._loop.time()
        self._on_round: list[Callable[[PlannerState], None]] = []
        self._on_change: list[Callable[[DecisionMade], None]] = []
        self.state = initial_state(config, name, executor_name)
        """What the last round found."""

    def __repr__(self) -> str:
        return f"<Planning of {len(self._targets)} pools, {self._leadership}>"

    def on_round(self, callback: Callable[[PlannerState], None]) -> None:
        """Call `callback` with what each round found."""
        self._on_round.append(callback)

    def on_change(self, callback: Callable[[DecisionMade], None]) -> None:
        """Call `callback` with each change of a target."""
        self._on_change.append(callback)

    async def run(self) -> None:
        """Do a round at each interval, and at once when requests wait for a pool that is to have no instance, until cancelled."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._config.interval_s):
                    await self._is_urgent.wait()
            self._is_urgent.clear()
            await self.round()

    def _look_for_waiting(self, report: DemandReport) -> None:
        for demand in report.pools:
            if demand.waiting and (target := self._targets.get(demand.pool)) is not None and not target.instances:
                self._is_urgent.set()

    async def round(self) -> None:
        """Look, decide, carry out."""
        now = self._loop.time()
        views = self._watch.views(self._bus.demand.take(now), now - self._looked_at)
        self._looked_at = now
        self._note_requests(views, now)
        if not self._leadership.is_leader:
            for pool, view in views.items():  # so that a forecast outlives its leader
                self._decider(pool).observe(view)
            self._show(self._state("", [self._seen(view) for view in views.values()], ""))
            return
        term = self._leadership.term
        try:
            if term != self._term:
                await self._take_over(views)
                self._term = term
                views = self._watch.views({}, 0.0) | views  # with pools that only the last leader knew
                self._note_requests(views, now)
            holding = self._bus.why_unknown()
            decisions = self._decide(views, holding, now)
            states = [pool_state(views[each.pool], each, self._warn(views[each.pool])) for each in decisions]
            error = await self._carry_out(decisions, views, term)
        except DynamoError as failure:
            holding, states, error = f"etcd fails: {failure}", list(self.state.pools), ""
        self._say(holding, error)
        self._show(self._state(holding, states, error))

    # Taking over

    async def _take_over(self, views: Mapping[Pool, PoolView]) -> None:
        """Begin with what the last leader decided, and with what there is. Raises EtcdUnavailable."""
        written = await self._key.read()
        if not self._config.dry_run:
            await self._standby.take_over()
        current = await self._current({*views, *(target.pool for target in written.targets)})
        self._targets = {target.pool: target for target in written.targets}
        self._lower_after = {}
        for pool in {*self._targets, *views}:
            self._watch.remember(pool)
            before = self._targets.get(pool)
            there = len(views[pool].instances) if pool in views else 0
            most = self._config.bounds.bounds_of(pool.model).most
            # What the key says beyond the bounds and what there is may be a slip or worse, and would be started.
            wanted = 0 if before is None else min(before.instances, max(most, there))
            number = max(wanted, current.get(pool, there if before is None else 0))
            self._targets[pool] = replace(before or PoolTarget(pool=pool, instances=0), instances=number)
            if number > most:
                when_s = self._config.bounds.cool_down_s
                log.warning("%s has %d instances, and may have %d: the others are taken away in %g s", pool, number, most, when_s)
        listed = ", ".join(f"{pool} {target.instances}" for pool, target in sorted(self._targets.items()))
        log.info("beginning with the targets of '%s': %s", written.planner or "no planner", listed or "none")

    async def _current(self, pools: Collection[Pool]) -> Mapping[Pool, int]:
        """Return how many instances the platform is told to have, as far as it says so."""
        if self._executor is None:
            return {}
        try:
            return await self._executor.current(pools) or {}
        except ExecutorFailed as failure:
            log.warning("the platform does not say how many instances it is told to have: %s", failure)
            return {}

    # Deciding

    def _decide(self, views: Mapping[Pool, PoolView], holding: str, now: float) -> list[Decision]:
        decisions = [self._decide_one(view, holding, now) for view in views.values()]
        shared = self._within_budget(decisions, views)
        return [self._kept(one, each, views, holding, now) for one, each in zip(decisions, shared, strict=True)]

    def _kept(self, decision: Decision, shared: Decision, views: Mapping[Pool, PoolView], holding: str, now: float) -> Decision:
        """Return a decision as the budget has it, which takes nothing away before demand has been seen for long enough."""
        if not holding and now >= self._lower_after[decision.pool]:
            return shared
        before = self._before(views[decision.pool])
        return replace(shared, instances=max(shared.instances, min(decision.instances, before)))

    def _decide_one(self, view: PoolView, holding: str, now: float) -> Decision:
        pool, bounds = view.pool, self._config.bounds.bounds_of(view.pool.model)
        before = self._before(view)
        least, by = self._least(pool, now)
        decider = self._decider(pool)
        if pool not in self._lower_after:
            decider.begin(before)
            self._lower_after[pool] = now + bounds.cool_down_s
        if holding:
            number = max(before, least)
            kept = f"{holding}: {before} stay" if number == before else f"{holding}; {by} asks for {least}"
            return Decision(pool=pool, instances=number, by="hold" if number == before else by, reason=kept)
        decision = decider.decide(view, least=least)
        if decision.instances < before and now < self._lower_after[pool]:
            reason = f"{decision.reason}; {before} stay: this planner has not seen demand for {bounds.cool_down_s:g} s"
            decision = replace(decision, instances=before, by="takeover", reason=reason)
        if not before and decision.instances and view.waiting:
            return replace(decision, by="waiting", reason=f"{view.waiting} requests wait and there is no instance")
        if not least and self._is_idle(pool.model, now):
            idle_s = self._config.bounds.idle_timeout_s
            return replace(decision, instances=0, by="idle", reason=f"no request came for {idle_s:g} s")
        return decision

    def _decider(self, pool: Pool) -> PoolPlanner:
        decider = self._deciders.get(pool)
        if decider is None:
            decider = self._deciders[pool] = self._make_decider(pool, self._config.bounds.bounds_of(pool.model))
        return decider

    def _before(self, view: PoolView) -> int:
        """Return the target of a pool; for one that has none yet, how many instances there are."""
        target = self._targets.get(view.pool)
        return len(view.instances) if target is None else target.instances

    def _least(self, pool: Pool, now: float) -> tuple[int, str]:
        """Return the least number of instances of a pool now, and which rule says so."""
        config = self._config.bounds
        bounds = config.bounds_of(pool.model)
        scheduled = min(least_at(config.schedules, self._unix_time(), pool.model), bounds.most)
        least = config.least_of(pool.model)
        if not least or config.idle_timeout_s:
            # Prefill and decode instances are of use together, whichever of them requests wait for.
            recently_s = config.idle_timeout_s or _RECENTLY_S
            least = max(least, 1) if now - self._requested_at[pool.model] < recently_s else 0
        return (scheduled, "schedule") if scheduled > least else (least, "bounds")

    def _is_idle(self, model: str, now: float) -> bool:
        idle_s = self._config.bounds.idle_timeout_s
        return bool(idle_s) and now - self._requested_at[model] >= idle_s

    def _note_requests(self, views: Mapping[Pool, PoolView], now: float) -> None:
        for view in views.values():
            busy = view.arrivals.requests or view.waiting or any(each.requests for each in view.instances)
            if busy or (view.instances and view.pool.model not in self._requested_at):
                self._requested_at[view.pool.model] = now
            self._requested_at.setdefault(view.pool.model, -math.inf)

    def _warn(self, view: PoolView) -> str:
        """Return why the goals of a pool cannot be reached; log it if that is new."""
        before = self._warnings.get(view.pool, "")
        if not view.arrivals.requests or not view.engine.observations:
            return before
        warning = self._unreachable(view)
        if bool(warning) != bool(before):
            if warning:
                log.warning("%s cannot reach its goals with any number of instances: %s", view.pool, warning)
            else:
                log.info("%s can reach its goals again", view.pool)
        self._warnings[view.pool] = warning
        return warning

    # Carrying out

    async def _carry_out(self, decisions: Sequence[Decision], views: Mapping[Pool, PoolView], term: int) -> str:
        """Write the targets, and have them carried out. Return why that failed; empty: it did not. Raises EtcdUnavailable."""
        if not self._leadership.is_leader or self._leadership.term != term:
            return "this planner is not the leader any more"
        targets = {each.pool: self._target(each, len(views[each.pool].instances)) for each in decisions}
        new = self._targets | targets
        if not self._config.dry_run:
            ordered = tuple(new[pool] for pool in sorted(new))
            if not await self._key.write(Targets(planner=self._name, targets=ordered)):
                self._term = 0  # begin anew with what is there
                return "another process has changed the targets"
            if not self._leadership.is_leader or self._leadership.term != term:
                return "this planner is not the leader any more"
        self._log_changes(decisions, views)
        self._targets = new
        for decision in decisions:
            self._watch.want(decision.pool, decision.instances)
        if self._config.dry_run:
            return ""
        for pool in await self._standby.keep():
            self._targets.pop(pool, None)
            self._deciders.pop(pool, None)
            self._lower_after.pop(pool, None)
        if self._executor is None:
            return ""
        try:
            await self._executor.carry_out(decisions)
        except ExecutorFailed as failure:
            return str(failure)
        return ""

    def _target(self, decision: Decision, there: int) -> PoolTarget:
        """Return what the key is to say: what it says already, unless the number or who is to leave has changed."""
        before = self._targets.get(decision.pool)
        leave = decision.leave[:MAX_LEAVE] if decision.instances < there else ()
        if before is not None and before.instances == decision.instances and before.reason and set(leave) <= set(before.leave):
            return before
        return PoolTarget(
            pool=decision.pool,
            instances=decision.instances,
            leave=leave,
            reason=f"{decision.by}: {decision.reason}",
            decided_at=self._unix_time(),
        )

    def _log_changes(self, decisions: Sequence[Decision], views: Mapping[Pool, PoolView]) -> None:
        would = "would be" if self._config.dry_run else "is"
        for decision in decisions:
            before = self._before(views[decision.pool])
            if decision.instances != before:
                made = self._history.add(decision, before, self._unix_time())
                log.info(
                    "%s %s scaled from %d to %d by %s: %s", decision.pool, would, before, made.instances, made.by, made.reason
                )
                for callback in self._on_change:
                    callback(made)

    def _say(self, holding: str, error: str) -> None:
        """Log what has changed since the last round."""
        if holding != self._said_holding:
            if holding:
                log.warning("targets are left as they are: %s", holding)
            else:
                log.info("targets are decided again")
            self._said_holding = holding
        if error != self._said_error:
            if error:
                log.warning("the targets are not carried out; retrying: %s", error)
            else:
                log.info("the targets are carried out again")
            self._said_error = error

    # What is shown

    def _seen(self, view: PoolView) -> PoolState:
        """Return what a planner that is not the leader shows of a pool."""
        return pool_state(view, Decision(pool=view.pool, instances=len(view.instances), by="standby"), "")

    def _state(self, holding: str, pools: Sequence[PoolState], error: str) -> PlannerState:
        return replace(
            self.state,
            is_leader=self._leadership.is_leader,
            holding=holding,
            executor_error=error,
            pools=tuple(pools),
            decisions=self._history.newest_first(),
        )

    def _show(self, state: PlannerState) -> None:
        self.state = state
        for callback in self._on_round:
            callback(state)
