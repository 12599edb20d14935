"""How long a simulated step takes.

One step computes some prompt tokens and one token for each decoding sequence:

    step_ms = base_ms + prefill_tokens · ms_per_prefill_token + decoding · ms_per_decoding

The three numbers may be fitted to measured steps of a real engine, given as a CSV table with the columns `prefill_tokens`,
`decoding` and `step_ms`.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dynamo.common.errors import InvalidRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class TimingModel:
    """Durations of steps. The default is a mid-sized model on one GPU: 8,000 prompt tokens/s alone, 60 for each of 30."""

    base_ms: float = 6.0
    ms_per_prefill_token: float = 0.125
    ms_per_decoding: float = 0.35
    speedup: float = 1.0
    """Divides the durations; 0: steps take no time."""

    def step_s(self, prefill_tokens: int, decoding: int) -> float:
        if not self.speedup:
            return 0.0
        step_ms = self.base_ms + prefill_tokens * self.ms_per_prefill_token + decoding * self.ms_per_decoding
        return step_ms / 1e3 / self.speedup

    @classmethod
    def fit(cls, steps: Iterable[tuple[float, float, float]], speedup: float = 1.0) -> TimingModel:
        """Fit to measured (prefill tokens, decoding sequences, step ms). Raises InvalidRequest for fewer than three steps."""
        table = np.array(list(steps), dtype=np.float64)
        if table.ndim != 2 or len(table) < 3:
            raise InvalidRequest("a timing table needs at least three steps")
        terms = np.column_stack([np.ones(len(table)), table[:, 0], table[:, 1]])
        # Weighted by duration: a step of 10 ms that is off by 1 ms counts as much as one of 100 ms that is off by 10 ms.
        weights = 1.0 / np.maximum(table[:, 2], 1e-3)
        fitted, *_ = np.linalg.lstsq(terms * weights[:, None], table[:, 2] * weights, rcond=None)
        base, prefill, decoding = (max(0.0, float(value)) for value in fitted)
        return cls(base_ms=base, ms_per_prefill_token=prefill, ms_per_decoding=decoding, speedup=speedup)

    @classmethod
    def load(cls, path: Path, speedup: float = 1.0) -> TimingModel:
        """Fit to a CSV file of measured steps. Raises InvalidRequest naming the mistake."""
        try:
            with path.open(newline="") as file:
                rows = list(csv.DictReader(file))
            steps = [(float(row["prefill_tokens"]), float(row["decoding"]), float(row["step_ms"])) for row in rows]
        except OSError as error:
            raise InvalidRequest(f"timing table {path} cannot be read: {error.strerror}") from error
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidRequest(f"timing table {path}: {error} is missing or no number") from error
        return cls.fit(steps, speedup)
