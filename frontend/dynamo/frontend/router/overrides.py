"""Router settings that a single request may change, and which values they may have.

Every protocol checks them here before anything else is done, so a value out of range is refused in every router mode, also in
those that do not look at it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from dynamo.common.errors import InvalidRequest

MAX_WEIGHT = 1000.0
MAX_TEMPERATURE = 100.0
_SAME_AS = {"overlap_score_credit": "overlap_score_weight"}
"""A setting of two names."""
LIMITS: Mapping[str, float] = {
    "overlap_score_weight": MAX_WEIGHT,
    "overlap_score_credit": MAX_WEIGHT,
    "prefill_load_scale": MAX_WEIGHT,
    "router_temperature": MAX_TEMPERATURE,
}
"""The largest value of each; the least is 0."""


def read_overrides(given: Mapping[str, float]) -> dict[str, float]:
    """The settings, each under its first name. Raises InvalidRequest for values out of range and contradictions."""
    found: dict[str, float] = {}
    for name, value in given.items():
        limit = LIMITS.get(name)
        if limit is None:
            raise InvalidRequest(f"there is no router setting '{name[:80]}' that a request may change", param=name[:80])
        if not math.isfinite(value) or not 0.0 <= value <= limit:
            raise InvalidRequest(f"'{name}' is {value:g}; it must be at least 0 and at most {limit:g}", param=name)
        first_name = _SAME_AS.get(name, name)
        if found.setdefault(first_name, value) != value:
            raise InvalidRequest(f"'{name}' and '{first_name}' are one setting; send one of them", param=name)
    return found
