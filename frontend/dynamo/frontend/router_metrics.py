"""What the router decided, as metrics."""

from __future__ import annotations

from dynamo.common.telemetry import FrontendMetrics
from dynamo.frontend.router.base import Choice, RouteRequest

_TOKEN_BYTES = 4


class RouterMetrics:
    """The observer of a `MeasuredRouter`."""

    def __init__(self, metrics: FrontendMetrics) -> None:
        self._metrics = metrics

    def picked(self, request: RouteRequest, choice: Choice, seconds: float) -> None:
        model = self._metrics.for_model(request.model)
        model.decided(choice.reason, seconds)
        if request.prompt and not request.is_prefilled and (llm := choice.instance.card.llm) is not None:
            tokens = len(request.prompt) / _TOKEN_BYTES
            model.overlapped(choice.overlap_blocks, min(1.0, choice.overlap_blocks * llm.block_size / tokens))

    def refused(self, request: RouteRequest) -> None:
        """Counted as the request's failure."""
