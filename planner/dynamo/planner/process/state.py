"""What a planner shows of itself: its view, its targets, the last decisions."""

from __future__ import annotations

from collections import deque

import msgspec

from dynamo.common.model_card import Role
from dynamo.common.scaling.pool import Pool
from dynamo.planner.config import PlannerConfig
from dynamo.planner.pools import Decision, Goals, PoolView

MAX_DECISIONS = 100


class DecisionMade(msgspec.Struct, frozen=True, kw_only=True):
    """One change of a target."""

    at: float
    """Unix time, seconds."""
    model: str
    role: Role
    before: int
    instances: int
    by: str
    reason: str


class PoolState(msgspec.Struct, frozen=True, kw_only=True):
    """One pool, as the planner saw it at its last look."""

    model: str
    role: Role
    target: int
    """Instances that it is to have."""
    instances: int
    """Instances that serve."""
    missing: int = 0
    """Instances that were wanted so long ago that they will hardly come."""
    needed: int = 0
    """Instances that the forecast needs, before bounds."""
    arrivals_per_s: float = 0.0
    forecast_per_s: float = 0.0
    engine_seconds: float = 0.0
    """The work that is forecast, in seconds of one engine for each second."""
    refused_per_s: float = 0.0
    waiting: int = 0
    goodput_share: float | None = None
    """The share of requests that is expected to reach the goals; null: no what-if has said."""
    ttft_ratio: float = 0.0
    """The observed time to first token over the predicted one; 0: not known."""
    startup_s: float = 0.0
    """From the decision that wants an instance until it serves, as seen lately; 0: not yet."""
    observations: int = 0
    """Load reports from which the engine's steps were learned."""
    by: str = ""
    reason: str = ""
    warning: str = ""
    """Why no number of instances reaches the goals, and what one can do."""

    @property
    def pool(self) -> Pool:
        return Pool(self.model, self.role)


class PlannerState(msgspec.Struct, frozen=True, kw_only=True):
    """All that a planner shows."""

    planner: str
    namespace: str
    is_leader: bool
    dry_run: bool
    executor: str
    interval_s: float
    holding: str = ""
    """Why targets are left as they are; empty: they are decided."""
    executor_error: str = ""
    """Why the last targets could not be carried out; empty: they were."""
    goals: Goals = Goals()
    pools: tuple[PoolState, ...] = ()
    decisions: tuple[DecisionMade, ...] = ()
    """The last changes of targets, the newest first."""


def initial_state(config: PlannerConfig, name: str, executor: str) -> PlannerState:
    """Return what a planner shows before its first round."""
    return PlannerState(
        planner=name,
        namespace=config.namespace,
        is_leader=False,
        dry_run=config.dry_run,
        executor=executor,
        interval_s=config.interval_s,
        goals=config.goals_of_requests,
    )


class History:
    """The last changes of targets."""

    def __init__(self) -> None:
        self._made: deque[DecisionMade] = deque(maxlen=MAX_DECISIONS)

    def add(self, decision: Decision, before: int, unix_time: float) -> DecisionMade:
        made = DecisionMade(
            at=unix_time,
            model=decision.pool.model,
            role=decision.pool.role,
            before=before,
            instances=decision.instances,
            by=decision.by,
            reason=decision.reason,
        )
        self._made.appendleft(made)
        return made

    def newest_first(self) -> tuple[DecisionMade, ...]:
        return tuple(self._made)


def pool_state(view: PoolView, decision: Decision, warning: str) -> PoolState:
    """Return what is shown of a pool."""
    seconds = view.arrivals.seconds
    return PoolState(
        model=view.pool.model,
        role=view.pool.role,
        target=decision.instances,
        instances=len(view.instances),
        missing=decision.missing,
        needed=decision.needed,
        arrivals_per_s=decision.arrivals_per_s,
        forecast_per_s=decision.forecast_per_s,
        engine_seconds=decision.engine_seconds,
        refused_per_s=view.arrivals.refused / seconds if seconds > 0.0 else 0.0,
        waiting=view.waiting,
        goodput_share=decision.goodput_share,
        ttft_ratio=view.ttft_ratio,
        startup_s=view.startup_s,
        observations=view.engine.observations,
        by=decision.by,
        reason=decision.reason,
        warning=warning,
    )
