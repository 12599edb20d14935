"""Counts what the steps of an engine do, for its load reports."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo.common.kv.events import StepTotals


@dataclass(slots=True, kw_only=True)
class StepCounter:
    """The running sums of a StepTotals."""

    steps: int = 0
    seconds: float = 0.0
    prefill_tokens: int = 0
    sequences: int = 0
    blocks: int = 0
    finished: int = 0
    generated: int = 0

    @property
    def totals(self) -> StepTotals:
        return StepTotals(
            self.steps, self.seconds, self.prefill_tokens, self.sequences, self.blocks, self.finished, self.generated
        )
