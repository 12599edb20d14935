"""The weights and the tuned constants of the KV router's cost in seconds.

The formula is in `cost.latency`. Each weight is 1: the benchmark `router_ablation` sets one after the other to 0, and shows which
loads are worse without its term. Decision 17 has the record, and the benchmark that guards each constant.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CostTerms:
    first_token: float = 1.0
    """Weight of the time to first token of the request itself."""
    queue: float = 1.0
    """Weight of the prompts that wait on an instance."""
    prefill_step: float = 1.0
    """Weight of the step that computes the end of the prompt."""
    decoding: float = 1.0
    """Weight of the request's own decoding."""
    delayed: float = 1.0
    """Weight of what its prefill delays the requests there."""
    arriving: float = 1.0
    """Weight of what its prefill delays requests that come meanwhile."""
    evicted: float = 1.0
    """Weight of what its placement evicts and has computed again."""
    running_step: float = 0.5
    """How much of a step a prompt waits for where requests run and no prompt waits."""
    shared_steps: float = 1.5
    """Steps by which the first token comes later where prompts wait: predicted, and no part of the cost."""
    batch_tokens: int = 8192
    """Tokens of waiting prompts, at most, that have been computed since the last report: engines report after each step."""
    levelled: float = 1.5
    """An excess of so many times the fleet's mean of requests lasts as long as a request; a smaller one, for that part of it."""
    quiet_steps: float = 0.015
    """While a smaller share of steps computes prompts, these do not show in the 99th percentile of the time between tokens."""
    quiet_prefilling: float = 0.4
    """Above this share of their time that instances compute prompts, caches decide how late tokens are."""
    crowding_weight: float = 80.0
    """How much more than otherwise the decoding that one more request slows down counts while few steps compute prompts."""
    crowding_tokens: int = 32_768
    """It counts at most like computing so many tokens: a longer prefix is worth going where it is cached."""
    passes_queues: bool = True
    """Whether a request passes a queue by where another instance has as much of its prompt."""
    spread_share: float = 0.25
    """The share of what a request would have cost less elsewhere that is credited to its prefix on idle instances. Below 1: other
    prefixes' requests would have taken the place on the cheaper one."""
    most_further: float = 4.0
    """Blocks that have to be computed again for each that is computed, at most."""
    miss_weight: float = 10.0
    """Seconds that a second beyond a latency goal costs."""


COST_TERMS = CostTerms()
