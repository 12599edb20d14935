"""Trace context as it travels."""

from __future__ import annotations

import pytest

from dynamo.common.tracing import TraceContext

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_a_trace_goes_on_in_a_child_span() -> None:
    parent = TraceContext.parse(PARENT, "vendor=1")
    assert parent is not None and parent.traceparent == PARENT and parent.sampled
    child = parent.child()
    assert child.trace_id == parent.trace_id and child.span_id != parent.span_id and child.state == "vendor=1"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331",
        "ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "00-00000000000000000000000000000000-b7ad6b7169203331-01",
        "00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01",
        PARENT + "-more",
        "x" * 10_000,
    ],
)
def test_a_broken_traceparent_is_ignored(text: str) -> None:
    assert TraceContext.parse(text) is None


def test_a_later_version_of_the_header_is_read_as_far_as_known() -> None:
    assert TraceContext.parse("01" + PARENT[2:] + "-more") is not None


def test_a_new_trace_is_valid() -> None:
    assert TraceContext.parse(TraceContext.new(sampled=True).traceparent) is not None
