"""What is said about a decision to those who ask."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Mapping, Sequence

import msgspec

MAX_SHOWN = 16
"""Candidates in an explanation."""
_MAX_DECISIONS = 4
"""Decisions that one call is told about: retries, migrations and further prompts make several."""


def shown(costs: Sequence[float], chosen: int) -> list[int]:
    """Positions of the candidates that an explanation shows: the cheapest, and the chosen one; cheapest first."""
    order = heapq.nsmallest(MAX_SHOWN, range(len(costs)), key=costs.__getitem__)
    if chosen not in order:
        order[-1] = chosen
    return order


class DecisionRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One decision, as callers and readers of the log see it."""

    request_id: str
    model: str
    at: float
    """Unix time, seconds."""
    instance: str
    """In hex, like those of the candidates."""
    reason: str
    overlap_blocks: int = 0
    cost: float = 0.0
    instances: int
    """How many there were to choose from; the candidates are some of them."""
    candidates: Sequence[Mapping[str, float | int | str]] = ()


class Explanation:
    """Collects the last decisions made for one call."""

    __slots__ = ("_decisions",)

    def __init__(self) -> None:
        self._decisions: deque[DecisionRecord] = deque(maxlen=_MAX_DECISIONS)

    def add(self, decision: DecisionRecord) -> None:
        self._decisions.append(decision)

    def to_json(self) -> bytes:
        """An array in the order of the decisions, fit for a header; only the last one has candidates. Empty: there was none."""
        if not self._decisions:
            return b""
        *earlier, last = self._decisions
        return msgspec.json.encode([*(msgspec.structs.replace(decision, candidates=()) for decision in earlier), last])
