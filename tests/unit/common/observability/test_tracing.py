"""Trace context as it travels."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from dynamo.common.config import ConfigError, load
from dynamo.common.logs import trace_id
from dynamo.common.observability.tracing import TraceContext, context_of
from dynamo.worker.config import WorkerConfig

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_a_context_is_written_as_it_was_read() -> None:
    read = TraceContext.parse(PARENT, "vendor=1")
    assert read is not None and read.traceparent == PARENT and read.sampled and read.state == "vendor=1"
    unsampled = TraceContext.parse(PARENT[:-1] + "0")
    assert unsampled is not None and not unsampled.sampled


async def test_only_a_valid_context_gets_into_the_log() -> None:
    assert context_of({"traceparent": 'x" injected'}) is None
    assert trace_id.get() == ""
    found = context_of({"traceparent": PARENT})
    assert found is not None and trace_id.get() == found.trace_id


def test_without_a_collector_nothing_is_traced_and_nothing_imported() -> None:
    program = """
        import asyncio, sys
        from dynamo.common.options import TraceOptions
        from dynamo.common.observability.tracing import open_tracing

        async def main():
            async with open_tracing(TraceOptions(), "test") as tracing:
                assert tracing is None

        asyncio.run(main())
        assert not any(name.startswith("opentelemetry") for name in sys.modules)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, timeout=120)


def test_an_endpoint_must_be_a_url() -> None:
    with pytest.raises(ConfigError, match="must begin with http"):
        load(WorkerConfig, ["--otlp-endpoint", "collector:4317"], {}, program="w")


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


def test_a_later_version_of_the_header_is_read_as_far_as_specified() -> None:
    assert TraceContext.parse("01" + PARENT[2:] + "-more") is not None
