"""What routers report, counted in `dynamo_frontend_router_*`."""

from __future__ import annotations

from collections.abc import Sequence

from dynamo.common.kv.hashes import TOKEN_BYTES
from dynamo.common.kv.tiers import Tier
from dynamo.frontend.metrics import FrontendMetrics
from dynamo.frontend.router.base import RouteRequest, RoutingDecision
from dynamo.frontend.router.fetch import TierCount, TierFetch


class _TierMetrics:
    """The children of one tier of a model's caches, bound once."""

    __slots__ = ("blocks", "found")

    def __init__(self, all_models: FrontendMetrics, model: str, tier: str) -> None:
        self.blocks = all_models.tally.amount(all_models.tier_blocks.labels(model, tier))
        self.found = all_models.tally.spread(all_models.tier_found, model, tier)


class RouterMetrics:
    """The observer of a `MeasuredRouter`."""

    def __init__(self, metrics: FrontendMetrics) -> None:
        self._metrics = metrics
        self._tiers: dict[tuple[str, str], _TierMetrics] = {}
        """By label of the model and tier."""

    def picked(self, request: RouteRequest, decision: RoutingDecision, seconds: float) -> None:
        overlap: tuple[int, float] | None = None
        if request.prompt and not request.is_prefilled and (llm := decision.instance.card.llm) is not None:
            tokens, blocks = len(request.prompt) / TOKEN_BYTES, decision.overlap_blocks
            overlap = blocks, min(1.0, blocks * llm.block_size / tokens)
            if decision.fetch is not None:
                self._count_tiers(request, decision, decision.fetch, llm.block_size)
        self._metrics.for_model(request.model).decided(decision.reason, seconds, overlap)

    def _count_tiers(self, request: RouteRequest, decision: RoutingDecision, fetch: TierFetch, block_size: int) -> None:
        left = len(request.prompt) // TOKEN_BYTES // block_size
        for tier, blocks in ((Tier.GPU, decision.overlap_blocks), *fetch.hits):
            self._tier(request.model, tier.value).blocks.value += blocks
            left -= blocks
        self._tier(request.model, "none").blocks.value += max(left, 0)

    def found_cached(self, model: str, counts: Sequence[TierCount]) -> None:
        for count in counts:
            if count.counted:
                self._tier(model, count.tier.value).found.observe(count.found / count.counted)

    def _tier(self, model: str, tier: str) -> _TierMetrics:
        label = self._metrics.for_model(model).label
        metrics = self._tiers.get((label, tier))
        if metrics is None:
            metrics = self._tiers[label, tier] = _TierMetrics(self._metrics, label, tier)
        return metrics

    def predicted(self, model: str, predicted_s: float, seconds: float) -> None:
        self._metrics.for_model(model).predicted(predicted_s, seconds)

    def left_out(self, model: str, blocks: int) -> None:
        """Count blocks that an instance published beyond what is kept of it."""
        metrics = self._metrics
        metrics.left_out_blocks.labels(metrics.for_model(model).label).inc(blocks)

    def refused(self, request: RouteRequest) -> None:
        """Counted as the request's failure."""
