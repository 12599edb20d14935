"""The cost of an instance in KV blocks, weighed by two settings: `--router-cost weights`.

    prefill = (prompt tokens still to be computed on the instance + tokens of this prompt) / block size
    cost    = prefill_load_scale · (prefill − overlap_score_weight · overlap)
            + active decode blocks
            + kv_full_penalty · prompt blocks · k / (1 − k)        k: share of the instance's KV blocks in use, above half

Where the defaults come from. A block to prefill costs an instance far more time than a block that a running request holds:
about 16 times as much with the timing of `engine/sim/timing.py`, at any block size. A cached block that is passed over costs its
prefill now, room in another cache, and the same again at the next turn of the conversation: hence a weight above 1. (The prefill
term may become negative then. It must not be cut off at 0, or the queue of an instance that has much of a prompt would not
count.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dynamo.frontend.config import KvRouterOptions
from dynamo.frontend.router.cost.prompts import Prompt
from dynamo.frontend.router.loads.instance_load import Load

_KV_FULL_FROM = 0.5
_KV_FULL_LIMIT = 0.99
"""Upper bound of k: above it, instances differ by their other terms."""


def weighted_costs(config: KvRouterOptions, prompt: Prompt, loads: Sequence[Load], overlaps: Mapping[int, int]) -> list[float]:
    """Return the cost of each candidate; `overlaps` are in blocks by position."""
    if not prompt.block_size:
        return [float(load.requests) for load in loads]
    scale = config.prefill_load_scale / prompt.block_size
    prefill = prompt.tokens * scale
    if config.track_active_blocks:
        penalty = config.kv_full_penalty * prompt.blocks
        costs = [
            prefill
            + load.prefill_tokens * scale
            + load.decode_blocks
            + (penalty * _fullness(load.usage) if load.usage > _KV_FULL_FROM else 0.0)
            for load in loads
        ]
    else:
        costs = [prefill + load.prefill_tokens * scale for load in loads]
    saved = config.prefill_load_scale * config.overlap_score_weight
    for position, overlap in overlaps.items():
        costs[position] -= overlap * saved
    return costs


def _fullness(usage: float) -> float:
    usage = min(usage, _KV_FULL_LIMIT)
    return usage / (1.0 - usage)
