"""A metric: prompt tokens sent to instances, by model, counted by a router around the one that chooses."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter

from dynamo.common.discovery import Instance
from dynamo.common.kv.hashes import TOKEN_BYTES
from dynamo.common.observability.tally import Amount, Tally
from dynamo.frontend.router.base import Router, RouteRequest, RouterWrapper, RoutingDecision


class PromptMetrics:
    """`dynamo_frontend_routed_prompt_tokens_total`, one child per model, looked up once."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._tally = Tally(registry)
        self._tokens = Counter(
            "dynamo_frontend_routed_prompt_tokens", "Prompt tokens sent to instances.", ("model",), registry=registry
        )
        self._models: dict[str, Amount] = {}

    def tokens(self, model: str) -> Amount:
        """Return what to add to for a model that is served; clients must not be able to make labels up."""
        amount = self._models.get(model)
        if amount is None:
            amount = self._models[model] = self._tally.amount(self._tokens.labels(model))
        return amount


class CountingRouter(RouterWrapper):
    """Counts what the inner router sends where."""

    def __init__(self, inner: Router, metrics: PromptMetrics) -> None:
        super().__init__(inner)
        self._metrics = metrics

    def pick(self, request: RouteRequest, candidates: Sequence[Instance], *, explain: bool = False) -> RoutingDecision:
        decision = self.inner.pick(request, candidates, explain=explain)
        self._metrics.tokens(request.model).value += len(request.prompt) // TOKEN_BYTES
        return decision
