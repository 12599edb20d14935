"""Whether instances are busy, by their load."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dynamo.common.errors import Overloaded
from dynamo.common.names import InstanceId
from dynamo.frontend.router.loads.instance_load import Load
from dynamo.frontend.router.loads.thresholds import Thresholds


def is_busy(load: Load, thresholds: Thresholds) -> bool:
    """Return whether the instance of this load is busy."""
    usage, tokens = thresholds.active_decode_blocks, thresholds.active_prefill_tokens
    return (usage is not None and load.usage > usage) or (tokens is not None and load.prefill_tokens > tokens)


def busy(loads: Sequence[Load], thresholds: Thresholds) -> list[bool] | None:
    """Return for each load whether its instance is busy; None if there is no threshold."""
    usage, tokens = thresholds.active_decode_blocks, thresholds.active_prefill_tokens
    if usage is None and tokens is None:
        return None
    most_usage, most_tokens = math.inf if usage is None else usage, math.inf if tokens is None else tokens
    return [load.usage > most_usage or load.prefill_tokens > most_tokens for load in loads]


def pinned_busy(instance: InstanceId, model: str) -> Overloaded:
    return Overloaded(f"instance {instance:x} of model '{model}' is busy", retry_after_s=1.0)


def all_busy(model: str) -> Overloaded:
    return Overloaded(f"all instances of model '{model}' are busy", retry_after_s=1.0)
