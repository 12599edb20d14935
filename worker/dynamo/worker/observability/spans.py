"""The phases of a request's time at a worker, as children of its span."""

from __future__ import annotations

import time
from collections.abc import Mapping

from dynamo.common.errors import Code
from dynamo.common.generation import Summary
from dynamo.common.observability.tracing import Attributes, Span
from dynamo.worker.engine.base import RequestTimings
from dynamo.worker.observability.request_record import RequestSink, phases_of


class RequestSpan(RequestSink):
    """The span of a request while it is served."""

    def __init__(self, span: Span) -> None:
        self._span = span

    def end(self, timings: RequestTimings, summary: Summary | None, error: Code | None) -> None:
        """End the span. If the request succeeded, its phases are children: those that took time, and all of a generation."""
        span, started_ns = self._span, self._span.started_ns
        if error is None:
            attributes = {} if summary is None else _attributes(summary)
            for phase in phases_of(timings, time.time_ns() - started_ns, summary):
                if phase.end_ns > phase.start_ns or summary is not None:
                    span.child(phase.name, started_ns + phase.start_ns, started_ns + phase.end_ns, attributes.get(phase.name))
        span.end(error)


def _attributes(summary: Summary) -> Mapping[str, Attributes]:
    """Return attributes by phase."""
    return {
        "prefill": {"dynamo.prompt_tokens": summary.prompt_tokens, "dynamo.cached_tokens": summary.cached_tokens},
        "decode": {"dynamo.output_tokens": summary.output_tokens},
    }
