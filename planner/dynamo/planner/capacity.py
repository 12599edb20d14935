"""How many instances a demand needs, by formula.

A request takes `w = b·computed + O·(c + d·K)` seconds of one engine: its prompt's tokens that are not cached, and its output,
`O` tokens, while it holds `K` KV blocks. `a`, `c`, `b`, `d` are the base, sequence, token and block of the engine's steps,
learned from its load reports. With `n` instances and `Λ` requests per second, each has the share `ρ = Λ·w/n` of its time taken
by work that grows with the requests, and `a` per step on top, so a step lasts `a/(1 − ρ)`. Little's law says how many requests
run at once.

    time between tokens    a/(1 − ρ) reaches its goal
    time to first token    the prompt itself, S, and what waits before it reach the goal for the wanted share of the requests
    room                   the requests that run fit into the KV blocks, and are no more than the engine runs at once

The wait is that of a queue with `n` servers (Erlang's formula), as routing sends a prompt to the instance that computes it
soonest. It decays with `2(n − ΛS)/((1 + v)S)`, where `v` is the squared coefficient of variation of the prompts' times.
"""

from __future__ import annotations

import math

import msgspec

from dynamo.common.model_card import Role
from dynamo.planner.pools import Engine, Goals

_MOST_TAKEN = 0.85
"""The share of an engine's time that work may take where no goal bounds it more."""
_MOST_BLOCKS = 0.9
"""The share of the KV blocks that running requests may hold: lengths vary."""
_FEW = 1e-6
_PARTS = 20
"""The requests are divided into so many equal parts, to try how many of these can be served in time."""


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """What arrives, as rates and means."""

    requests_per_s: float
    computed_tokens: float = 0.0
    """Prompt tokens of a request that an instance has to compute."""
    prompt_tokens: float = 0.0
    """All of them."""
    output_tokens: float = 0.0
    variation: float = 1.0
    """The squared coefficient of variation of the computed tokens; 0: all the same, 1: exponential."""
    backlog_tokens: float = 0.0
    """Prompt tokens that wait to be computed beyond what steady traffic has waiting, per second in which they are to be gone."""


def tokens_of(role: Role, computed: float, output: float) -> tuple[float, float]:
    """Return what an instance of a role does for a request: the prompt tokens that it computes, and the tokens it generates."""
    match role:
        case Role.PREFILL:
            return computed, 1.0
        case Role.DECODE:
            return 0.0, output
        case Role.AGGREGATED:
            return computed, output


class Size(msgspec.Struct, frozen=True, kw_only=True):
    """How many instances a demand needs, and what asks for them."""

    instances: int
    engine_seconds: float
    """Work per second, in seconds of one engine."""
    bound: str
    """What would be missed with one less: `work`, `itl`, `ttft`, `blocks` or `sequences`."""
    reachable: str = ""
    """Why no number of instances reaches a goal; empty: it can be reached."""


def engine_seconds(demand: Demand, engine: Engine) -> float:
    """Return the seconds of one engine that a request takes, which is `w`."""
    times = engine.times
    return times.token * demand.computed_tokens + demand.output_tokens * (times.sequence + times.block * _blocks(demand, engine))


def alone_s(tokens: float, engine: Engine) -> float:
    """Return the time to first token of a prompt of so many computed tokens on an idle instance."""
    steps = math.ceil(tokens / engine.max_batched_tokens) if engine.max_batched_tokens else 1
    return tokens * engine.times.token + max(steps, 1) * engine.times.base


def unreachable(demand: Demand, engine: Engine, goals: Goals) -> str:
    """Return why no number of instances reaches a goal for a mean request, with what one can do; empty: they can."""
    times = engine.times
    single_s = times.base + times.sequence + times.block * _blocks(demand, engine)
    if goals.itl_s is not None and demand.output_tokens > 1.0 and single_s > goals.itl_s:
        return (
            f"a single request gets a token every {single_s * 1e3:.3g} ms, and the goal is {goals.itl_s * 1e3:.3g} ms: "
            "set a longer goal, or use faster engines (more GPUs for each)"
        )
    first_s = alone_s(demand.computed_tokens, engine)
    if goals.ttft_s is not None and first_s > goals.ttft_s:
        return (
            f"a mean prompt with {demand.computed_tokens:.0f} tokens not cached takes {first_s:.3g} s on an idle instance, "
            f"and the goal is {goals.ttft_s:.3g} s: set a longer goal, or use faster engines (more GPUs for each)"
        )
    return ""


def size(demand: Demand, engine: Engine, goals: Goals, most: int, *, headroom: float = 1.0) -> Size:
    """Return the least number of instances, at most `most` + 1, that reaches the goals.

    `headroom` ≥ 1 makes all times longer: by how much observed times exceed predicted ones.
    """
    work = demand.requests_per_s * engine_seconds(demand, engine) * headroom
    work += demand.backlog_tokens * engine.times.token * headroom
    reachable = unreachable(demand, engine, goals)
    if demand.requests_per_s <= 0.0 and work <= 0.0:
        return Size(instances=0, engine_seconds=0.0, bound="work")
    least = max(1, math.ceil(work / _MOST_TAKEN))
    bound = "work"
    for instances in range(least, most + 1):
        missed = _missed(instances, demand, engine, goals, headroom)
        if not missed:
            return Size(instances=instances, engine_seconds=work, bound=bound, reachable=reachable)
        bound = missed
    return Size(instances=max(least, most + 1), engine_seconds=work, bound=bound, reachable=reachable)


def missed_share(instances: int, demand: Demand, engine: Engine, goals: Goals, headroom: float = 1.0) -> float:
    """Return the share of the requests that is expected to miss the goals, if those beyond what fits are refused at once."""
    if not instances or unreachable(demand, engine, goals):
        return 1.0
    good = 0.0
    for part in range(_PARTS, 0, -1):
        served = part / _PARTS
        if served <= good:
            break
        taken = msgspec.structs.replace(demand, requests_per_s=served * demand.requests_per_s, backlog_tokens=0.0)
        good = max(good, served * (1.0 - _late(instances, taken, engine, goals, headroom)))
    return 1.0 - good


def _late(instances: int, demand: Demand, engine: Engine, goals: Goals, headroom: float) -> float:
    """Return the share of the requests that miss the goals if none is refused; 1 where there is too much work."""
    bound = _missed(instances, demand, engine, msgspec.structs.replace(goals, ttft_s=None), headroom)
    if bound:
        return 1.0
    return 0.0 if goals.ttft_s is None else _late_share(instances, demand, engine, goals.ttft_s, headroom)


def _missed(instances: int, demand: Demand, engine: Engine, goals: Goals, headroom: float) -> str:
    """Return what so many instances would miss; empty if nothing."""
    times = engine.times
    rate = demand.requests_per_s / instances
    blocks = _blocks(demand, engine)
    base, decode = times.base * headroom, (times.sequence + times.block * blocks) * headroom
    taken = _taken(instances, demand, engine, headroom)
    if taken >= _MOST_TAKEN:
        return "work"
    step_s = base / (1.0 - taken)
    running = rate * demand.output_tokens * step_s
    single_s = base + decode
    if goals.itl_s is not None and max(step_s, single_s) > max(goals.itl_s, single_s * (1.0 + _FEW)):
        return "itl"
    if engine.total_blocks and running * blocks > _MOST_BLOCKS * engine.total_blocks:
        return "blocks"
    if engine.max_num_seqs and running > engine.max_num_seqs:
        return "sequences"
    if goals.ttft_s is not None and _late_share(instances, demand, engine, goals.ttft_s, headroom) > 1.0 - goals.share:
        return "ttft"
    return ""


def _taken(instances: int, demand: Demand, engine: Engine, headroom: float) -> float:
    """Return the share of its time that work takes of each instance."""
    work = demand.requests_per_s * engine_seconds(demand, engine) + demand.backlog_tokens * engine.times.token
    return work * headroom / instances


def _late_share(instances: int, demand: Demand, engine: Engine, goal_s: float, headroom: float) -> float:
    """Return the share of prompts whose first token would come after the goal. There is time for all work."""
    if demand.computed_tokens <= 0.0:
        return 0.0
    times, rate = engine.times, demand.requests_per_s / instances
    taken = _taken(instances, demand, engine, headroom)
    step_s = times.base * headroom / (1.0 - taken)
    decode = (times.sequence + times.block * _blocks(demand, engine)) * headroom
    busy_step_s = times.base * headroom + decode * rate * demand.output_tokens * step_s
    budget = engine.max_batched_tokens or demand.computed_tokens
    steps = max(1.0, math.ceil(demand.computed_tokens / budget))
    prompt_s = demand.computed_tokens * engine.times.token * headroom + steps * busy_step_s
    backlog = demand.backlog_tokens * engine.times.token * headroom
    offered = demand.requests_per_s * prompt_s + backlog
    if offered >= instances:
        return 1.0
    # Of a prompt that cannot be in time even alone, the wait is bounded instead: by the time of the prompt.
    wait_s = goal_s - prompt_s - step_s / 2.0 if alone_s(demand.computed_tokens, engine) <= goal_s else prompt_s
    if wait_s <= 0.0:
        return 1.0
    decay = 2.0 * (instances - offered) / ((1.0 + demand.variation) * prompt_s)
    return waiting_share(instances, offered) * math.exp(-decay * wait_s)


def waiting_share(servers: int, offered: float) -> float:
    """Return the share of requests that find all servers busy, by Erlang's formula; `offered` < `servers`, in servers."""
    blocked = 1.0
    for number in range(1, servers + 1):
        blocked = offered * blocked / (number + offered * blocked)
    return blocked / (1.0 - offered / servers * (1.0 - blocked))


def _blocks(demand: Demand, engine: Engine) -> float:
    """Return how many KV blocks a request holds on average while it decodes."""
    if not engine.block_size:
        return 0.0
    return (demand.prompt_tokens + demand.output_tokens / 2.0) / engine.block_size
