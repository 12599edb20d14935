"""How long instances take to fetch cached blocks from tiers slower than their GPU's memory, learned from times to first token.

    time to first token = (1 + share) · predicted without fetching + offset + Σ price of tier · blocks fetched from it

Each first token of a model whose instances have such tiers is one observation of this equation, also if nothing was fetched:
those show by how much predictions are off anyway. In overload that is a share of a long wait, beside which fetching takes next to
nothing: without a term of its own, that error would be the price. The prices, none below zero, are fitted by least squares, as
step times are (`step_model.py`): errors are relative to the time to first token, a large one counts only in part, and what
observations do not determine stays near a typical price, a share of the time to compute a block.

Where fetching is dearer than computing, a block is worth nothing: it counts as one that is computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dynamo.common.kv.tiers import SLOW_TIERS, Tier
from dynamo.frontend.router.fetch import TierFetch

_TYPICAL = {Tier.CPU: 0.05, Tier.DISK: 0.4, Tier.SHARED: 0.5}
"""Prices before the first observation, as shares of the time to compute a block: those of PCIe at 20 GB/s, and of a disk and a
network at 2 GB/s, for a model of 8 billion parameters on one GPU."""
_MOST = 20.0
"""The highest price, as a multiple of the time to compute a block."""
_SCALE = 0.2
"""What counts as a large difference from a typical price, as a share of the time to compute a block."""
_ERROR_SCALES = (5e-3, 0.2)
"""What counts as a large error of a prediction without fetching: in seconds, and as a share of it."""
_RIDGE = 0.02
"""Weight of what is typical against an observation."""
_DECAY = 0.99
_HUBER = 0.5


class FetchModel:
    """Learns the prices of the tiers of one model's engines. Not for several threads."""

    def __init__(self, fixed: Mapping[Tier, float] | None = None) -> None:
        """`fixed`: seconds per block of tiers whose prices are not learned."""
        self._fixed = dict(fixed or {})
        self._learned: dict[Tier, float] = {}
        """Seconds per block, of the tiers that have been fetched from."""
        self._errors = [0.0, 0.0]
        """By how much predictions without fetching are off: in seconds, and as a share of them."""
        self.observations = 0
        size = len(self._errors) + len(SLOW_TIERS)
        self._gram = [[0.0] * size for _ in range(size)]
        self._moments = [0.0] * size

    def __repr__(self) -> str:
        return f"<FetchModel learned={self._learned}, observations={self.observations}>"

    def price_s(self, tier: Tier, block_s: float) -> float:
        """Return the seconds to fetch a block. `block_s`: the time to compute one."""
        fixed = self._fixed.get(tier)
        if fixed is not None:
            return fixed
        learned = self._learned.get(tier)
        return block_s * _TYPICAL[tier] if learned is None else learned

    def fetch(self, hits: Sequence[tuple[Tier, int]], block_s: float) -> TierFetch:
        fetched, seconds, assumed_s = 0, 0.0, 0.0
        for tier, blocks in hits:
            price_s = self.price_s(tier, block_s)
            if price_s < block_s:
                fetched += blocks
                seconds += blocks * price_s
                assumed_s += blocks * price_s
            else:
                assumed_s += blocks * block_s
        return TierFetch(tuple(hits), fetched, seconds, assumed_s)

    def learn(self, fetch: TierFetch, predicted_s: float, seconds: float, block_s: float) -> None:
        """Learn from the time to a first token. `fetch`: what was to be fetched for it, perhaps nothing."""
        blocks = dict(fetch.hits)
        without_s = predicted_s - fetch.assumed_s
        scale = max(predicted_s, seconds)
        if scale <= 0.0:
            return
        self.observations += 1
        row = [1.0 / scale, without_s / scale, *(blocks.get(tier, 0) / scale for tier in SLOW_TIERS)]
        target = (seconds - without_s) / scale
        current = [*self._errors, *(self.price_s(tier, block_s) for tier in SLOW_TIERS)]
        error = abs(target - sum([value * price for value, price in zip(row, current, strict=True)]))
        weight = 1.0 if error <= _HUBER else _HUBER / error
        gram, moments = self._gram, self._moments
        for i, value in enumerate(row):
            weighted = weight * value
            moments[i] = _DECAY * moments[i] + weighted * target
            gram[i] = [_DECAY * old + weighted * other for old, other in zip(gram[i], row, strict=True)]
        self._fit(current, block_s)

    def _fit(self, values: list[float], block_s: float) -> None:
        """Improve the errors and the prices by coordinate descent. Each call goes on where the last one ended."""
        first = len(self._errors)
        for _ in range(2):
            for i, row in enumerate(self._gram):
                typical = block_s * _TYPICAL[SLOW_TIERS[i - first]] if i >= first else 0.0
                ridge = _RIDGE / (_SCALE * block_s if i >= first else _ERROR_SCALES[i]) ** 2
                others = sum([value * each for value, each in zip(row, values, strict=True)]) - row[i] * values[i]
                best = (self._moments[i] - others + ridge * typical) / (row[i] + ridge)
                values[i] = min(max(best, 0.0), _MOST * block_s) if i >= first else best
        self._errors = values[:first]
        for i, tier in enumerate(SLOW_TIERS, first):
            if self._gram[i][i] > 0.0:
                self._learned[tier] = values[i]
