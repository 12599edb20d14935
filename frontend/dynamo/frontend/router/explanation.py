"""The explanation of a routing decision, as clients and the decision log see it."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Mapping, Sequence

import msgspec

MAX_SHOWN = 16
"""Candidates in an explanation."""
_MAX_DECISIONS = 4
"""Decisions in the explanation of one call: retries, migrations and further prompts make several."""


def shown(costs: Sequence[float], chosen: int) -> list[int]:
    """Return the positions of the candidates that an explanation shows: the cheapest and the chosen one, cheapest first."""
    order = heapq.nsmallest(MAX_SHOWN, range(len(costs)), key=costs.__getitem__)
    if chosen not in order:
        order[-1] = chosen
    return order


class DecisionRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One routing decision. A wire format: clients and the console parse it."""

    request_id: str
    model: str
    at: float
    """Unix time, seconds."""
    instance: str
    """The instance id in hex."""
    reason: str
    overlap_blocks: int
    cost: float
    tiers: Mapping[str, int] = {}
    """Blocks of the prompt on tiers slower than the instance's GPU, by tier."""
    ttft_ms: float | None = None
    """The predicted time to first token."""
    instances: int
    """The number of candidates; `candidates` lists some of them."""
    candidates: Sequence[Mapping[str, float | int | str]] = ()
    open_circuits: int = 0
    """Instances that were no candidates since they fail too many requests."""


class Explanation:
    """Collects the last decisions made for one call."""

    __slots__ = ("_decisions",)

    def __init__(self) -> None:
        self._decisions: deque[DecisionRecord] = deque(maxlen=_MAX_DECISIONS)

    def add(self, decision: DecisionRecord) -> None:
        self._decisions.append(decision)

    def to_json(self) -> bytes:
        """Return the decisions as a JSON array, oldest first, fit for a header; empty bytes if there was none.

        Only the last decision keeps its candidates.
        """
        if not self._decisions:
            return b""
        *earlier, last = self._decisions
        return msgspec.json.encode([*(msgspec.structs.replace(decision, candidates=()) for decision in earlier), last])
