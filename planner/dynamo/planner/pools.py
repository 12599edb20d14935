"""What a planner sees of a pool at one moment, what it is to reach, and what it decides."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from dynamo.common.names import InstanceId
from dynamo.common.scaling.demand import ArrivalSample
from dynamo.common.scaling.pool import Pool
from dynamo.frontend.router.cost.step_model import StepTimes


class Goals(msgspec.Struct, frozen=True, kw_only=True):
    """What requests are to get."""

    ttft_s: float | None = None
    itl_s: float | None = None
    """The mean time between the tokens of a request."""
    share: float = 0.95
    """The share of requests that are to reach both."""


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """How many instances a pool may have, and how fast that may change."""

    least: int = 1
    most: int = 8
    startup_s: float = 60.0
    """From the decision until a new instance serves. Used until it has been seen."""
    cool_up_s: float = 30.0
    """After the number has changed, it is raised by less than a quarter only so much later."""
    cool_down_s: float = 120.0
    """It is lowered to the most that was needed in the last so many seconds."""
    idle_s: float = 0.0
    """With `least` = 0: the last instance ends when there was no request for so long; 0: it never does."""


class Engine(msgspec.Struct, frozen=True, kw_only=True):
    """What one instance of a pool can do."""

    times: StepTimes
    observations: int = 0
    """How many load reports the times were learned from; 0: they are those of a typical engine."""
    block_size: int = 0
    """Tokens in a KV block; 0: unknown."""
    total_blocks: int = 0
    """0: unknown."""
    max_num_seqs: int = 0
    """Sequences that run at once; 0: unknown."""
    max_batched_tokens: int = 0
    """Tokens of one step; 0: unknown."""


class InstanceView(msgspec.Struct, frozen=True, kw_only=True):
    """One instance that serves."""

    id: InstanceId
    requests: int = 0
    """Running and waiting there."""
    queued_tokens: int = 0
    """Prompt tokens that it has accepted and not computed."""
    cache_worth_s: float = 0.0
    """Seconds of an engine that its cache saves each second."""


class Arrivals(msgspec.Struct, frozen=True, kw_only=True):
    """What arrived in one interval, from all frontends."""

    seconds: float
    requests: float = 0.0
    """Requests, waiting and refused ones included."""
    prompt_tokens: float = 0.0
    computed_tokens: float = 0.0
    """The part of these that instances had or would have had to compute."""
    refused: float = 0.0


class PoolView(msgspec.Struct, frozen=True, kw_only=True):
    """A pool at one moment."""

    pool: Pool
    now: float
    """Seconds on a clock that never goes back."""
    arrivals: Arrivals
    """Since the last view."""
    engine: Engine
    instances: Sequence[InstanceView] = ()
    """The instances that serve."""
    waiting: int = 0
    """Requests that wait for an instance."""
    waiting_tokens: int = 0
    ttft_ratio: float = 0.0
    """The observed time to first token over the predicted one; 0: not known."""
    samples: Sequence[ArrivalSample] = ()
    """Arrivals since the last view."""
    startup_s: float = 0.0
    """From the decision that wants an instance until it serves, as seen lately; 0: not yet, and `Bounds.startup_s` counts."""


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """How many instances a pool is to have, and why."""

    pool: Pool
    instances: int
    leave: tuple[InstanceId, ...] = ()
    """Which to end first, the most dispensable first."""
    by: str = ""
    """Which rule: `formula`, `what-if`, `load`, `bounds`, `budget`, `schedule`."""
    reason: str = ""
    arrivals_per_s: float = 0.0
    """Requests."""
    forecast_per_s: float = 0.0
    """The most requests per second that are expected until a new instance could serve."""
    engine_seconds: float = 0.0
    """The work that is forecast, in seconds of one engine for each second."""
    needed: int = 0
    """Instances that the forecast needs, before bounds."""
    missing: int = 0
    """Instances that were wanted so long ago that they will hardly come: capacity that is not there."""
    misses_per_s: Sequence[float] = ()
    """Requests per second that are expected to miss the goals with 0, 1, 2, … instances, up to `needed`; empty: not known."""
    goodput_share: float | None = None
    """The share of requests that the last what-if expects to reach the goals with this many instances; None: there was none."""
