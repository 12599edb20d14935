"""The parts of a request's time at a worker, as children of its span. Engines report durations, in this order."""

from __future__ import annotations

import time

from dynamo.common.generation import Summary
from dynamo.common.observability.tracing import Span
from dynamo.worker.engine.base import RequestTimings


def end_generation(span: Span, summary: Summary) -> None:
    """Add queue, prefill and decode as children of `span` and end it."""
    ended = time.time_ns()
    queued = min(span.started_ns + int(summary.queue_ms * 1e6), ended)
    prefilled = min(queued + int(summary.prefill_ms * 1e6), ended)
    span.child("queue", span.started_ns, queued)
    span.child(
        "prefill",
        queued,
        prefilled,
        {"dynamo.prompt_tokens": summary.prompt_tokens, "dynamo.cached_tokens": summary.cached_tokens},
    )
    span.child("decode", prefilled, ended, {"dynamo.output_tokens": summary.output_tokens})
    span.end()


def end_inference(span: Span, timings: RequestTimings) -> None:
    """Add queue, input, inference and output, those that took any time, as children of `span` and end it."""
    ended = time.time_ns()
    position = span.started_ns
    input_ns = timings.queue_ns + timings.input_ns
    infer_ns = timings.infer_ns or max(0, ended - position - input_ns - timings.output_ns)
    parts = (("queue", timings.queue_ns), ("input", timings.input_ns), ("infer", infer_ns), ("output", timings.output_ns))
    for name, duration_ns in parts:
        if duration_ns:
            span.child(name, position, min(position + duration_ns, ended))
            position = min(position + duration_ns, ended)
    span.end()
