"""Router settings that a single request may override, and their ranges.

Every protocol checks them here first, so that a value out of range is refused in every router mode, used or not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from dynamo.common.errors import InvalidRequest

MAX_WEIGHT = 1000.0
MAX_TEMPERATURE = 100.0
MAX_GOAL_S = 86_400.0
_SAME_AS = {"overlap_score_credit": "overlap_score_weight"}
"""Aliases of settings."""
LIMITS: Mapping[str, float] = {
    "overlap_score_weight": MAX_WEIGHT,
    "overlap_score_credit": MAX_WEIGHT,
    "prefill_load_scale": MAX_WEIGHT,
    "router_temperature": MAX_TEMPERATURE,
    "ttft_goal": MAX_GOAL_S,
    "itl_goal": MAX_GOAL_S,
}
"""The maximum of each setting; the minimum is 0."""


def read_overrides(values: Mapping[str, float]) -> dict[str, float]:
    """Return the settings with aliases resolved. Raises InvalidRequest for values out of range and contradictions."""
    overrides: dict[str, float] = {}
    for name, value in values.items():
        limit = LIMITS.get(name)
        if limit is None:
            raise InvalidRequest(f"there is no router setting '{name[:80]}' that a request may change", param=name[:80])
        if not math.isfinite(value) or not 0.0 <= value <= limit:
            raise InvalidRequest(f"'{name}' is {value:g}; it must be at least 0 and at most {limit:g}", param=name)
        first_name = _SAME_AS.get(name, name)
        if overrides.setdefault(first_name, value) != value:
            raise InvalidRequest(f"'{name}' and '{first_name}' are one setting; send one of them", param=name)
    return overrides
