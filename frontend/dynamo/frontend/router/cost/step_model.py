"""How long the steps of a model's engines take, learned from their load reports.

    step seconds = base + token · prefill tokens + sequence · decoding sequences + block · KV blocks in use

A report carries sums over all steps of an engine, so the difference of two reports is one observation of this equation. The
coefficients are fitted by least squares over about the last two hundred observations, never below zero. What keeps a few strange
observations from spoiling them:

- errors are relative to the longer one of the observed and the predicted time, hence at most 1;
- of an error above a quarter, only a quarter counts (Huber's loss), but as long as errors are large, earlier observations are
  forgotten faster: the engine may have changed;
- what the observations do not determine stays near a typical engine's, made as much slower or faster as this one is on the whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from dynamo.common.kv.events import NO_STEPS, StepTotals
from dynamo.common.names import InstanceId

_TYPICAL = (6e-3, 0.125e-3, 0.35e-3, 0.0)
"""A mid-sized model on one GPU, see `engine/sim/timing.py`. Used before the first report."""
_SCALES = (6e-3, 0.125e-3, 0.35e-3, 1e-6)
"""What counts as a large difference from the typical coefficients."""
_RIDGE = 0.02
"""Weight of the typical coefficients against an observation."""
_DECAY = 0.995
_DECAY_IF_WRONG = 0.9
_WRONG = 0.5
_HUBER = 0.25
_SHORTEST_S = 1e-9
"""No step is shorter; with less, squares of the pace would be zero."""
_LEARN_EVERY_S = 0.02
_LEARN_ALL = 64
"""So many observations are used before they are thinned out to one per `_LEARN_EVERY_S`."""
_TYPICAL_OUTPUT_TOKENS = 200.0
_TYPICAL_REQUESTS = 4.0
"""Weight of the typical output against a finished request."""
_OUTPUT_DECAY = 0.998


class StepTimes(msgspec.Struct, frozen=True, gc=False):
    """The coefficients of the equation, in seconds, and the mean output of a request, in tokens."""

    base: float
    token: float
    sequence: float
    block: float
    output_tokens: float

    def window_s(self, steps: int, prefill_tokens: int, sequences: int, blocks: int) -> float:
        """Return the duration of so many steps, which computed so much in all."""
        return self.base * steps + self.token * prefill_tokens + self.sequence * sequences + self.block * blocks

    def step_s(self, sequences: float, blocks: float) -> float:
        """Return the duration of a step that computes no prompt."""
        return self.base + self.sequence * sequences + self.block * blocks


class StepModel:
    """Learns the StepTimes of one model. Not for several threads."""

    def __init__(self) -> None:
        self.times = StepTimes(*_TYPICAL, _TYPICAL_OUTPUT_TOKENS)
        self.observations = 0
        self._gram = [[0.0] * 4 for _ in range(4)]
        self._moments = [0.0] * 4
        self._log_pace = 0.0
        """How much slower than the typical engine these are."""
        self._seen: dict[InstanceId, StepTotals] = {}
        self._learn_at = -math.inf
        self._finished = _TYPICAL_REQUESTS
        self._generated = _TYPICAL_REQUESTS * _TYPICAL_OUTPUT_TOKENS

    def __repr__(self) -> str:
        return f"<StepModel {self.times}, observations={self.observations}>"

    def report(self, instance: InstanceId, totals: StepTotals, now: float) -> bool:
        """Learn from a load report. Return whether `times` has changed."""
        if now < self._learn_at:
            return False
        before = self._seen.get(instance, NO_STEPS)
        window = totals - before
        if window.steps <= 0 or window.seconds < _SHORTEST_S * window.steps:
            return False
        self._seen[instance] = totals
        if window.steps == totals.steps:
            return False  # the first report of this engine that this frontend gets: its steps may be from long ago
        if self.observations >= _LEARN_ALL:
            self._learn_at = now + _LEARN_EVERY_S
        self._learn(window)
        return True

    def remove_instance(self, instance: InstanceId) -> None:
        self._seen.pop(instance, None)

    def _learn(self, window: StepTotals) -> None:
        self.observations += 1
        work = (window.steps, max(window.prefill_tokens, 0), max(window.sequences, 0), max(window.blocks, 0))
        predicted = self.times.window_s(*work)
        scale = max(predicted, window.seconds)
        error = abs(predicted - window.seconds) / scale
        weight = 1.0 if error <= _HUBER else _HUBER / error
        decay = _DECAY if error <= _WRONG else _DECAY_IF_WRONG
        self._learn_pace(window.seconds, work, decay)
        row = [each / scale for each in work]
        target = window.seconds / scale
        gram, moments = self._gram, self._moments
        for i, value in enumerate(row):
            weighted = weight * value
            moments[i] = decay * moments[i] + weighted * target
            gram[i] = [decay * old + weighted * other for old, other in zip(gram[i], row, strict=True)]
        coefficients = [self.times.base, self.times.token, self.times.sequence, self.times.block]
        self._descend(coefficients)
        self._learn_output(window)
        base, token, sequence, block = coefficients
        self.times = StepTimes(base, token, sequence, block, self._generated / self._finished)

    def _learn_pace(self, seconds: float, work: Sequence[float], decay: float) -> None:
        ratio = seconds / _product(_TYPICAL, work)
        step = max(1.0 / self.observations, 1.0 - decay)
        self._log_pace += step * (math.log(ratio) - self._log_pace)

    def _descend(self, coefficients: list[float]) -> None:
        """Improve the coefficients in place by coordinate descent. Each call goes on where the last one ended: two rounds do."""
        pace = math.exp(self._log_pace)
        for _ in range(2):
            for i, row in enumerate(self._gram):
                ridge = _RIDGE / (pace * _SCALES[i]) ** 2
                others = _product(row, coefficients) - row[i] * coefficients[i]
                best = (self._moments[i] - others + ridge * pace * _TYPICAL[i]) / (row[i] + ridge)
                coefficients[i] = max(0.0, best)

    def _learn_output(self, window: StepTotals) -> None:
        if window.finished > 0:
            decay = _OUTPUT_DECAY**window.finished
            self._finished = decay * self._finished + window.finished
            self._generated = decay * self._generated + max(window.generated, 0)


def _product(one: Sequence[float], other: Sequence[float]) -> float:
    return one[0] * other[0] + one[1] * other[1] + one[2] * other[2] + one[3] * other[3]
