"""What a scrape shows after some requests, and how traces travel."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.parser import text_string_to_metric_families

from dynamo.common.errors import Code
from dynamo.common.names import Endpoint, InstanceId
from dynamo.common.telemetry import (
    SECONDS,
    FrontendMetrics,
    GrpcServerMetrics,
    RequestType,
    RuntimeMetrics,
    TraceContext,
    WorkerMetrics,
    make_registry,
    observe_many,
    render,
)

Read = Callable[..., float | None]


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def frontend(registry: CollectorRegistry) -> FrontendMetrics:
    return FrontendMetrics(registry)


@pytest.fixture
def read(registry: CollectorRegistry) -> Read:
    return lambda name, **labels: registry.get_sample_value(name, labels)


def test_a_streamed_request_is_measured_from_arrival_to_end(frontend: FrontendMetrics, read: Read) -> None:
    clock = Clock()
    request = frontend.for_model("m").start("completions", RequestType.STREAM, clock)
    assert read("dynamo_frontend_inflight_requests", model="m") == 1
    assert read("dynamo_frontend_queued_requests", model="m") == 1
    clock.now += 0.25
    request.tokens(1)
    assert read("dynamo_frontend_queued_requests", model="m") == 0
    clock.now += 0.04
    request.tokens(4)
    request.finish(input_tokens=10, cached_tokens=8)
    assert read("dynamo_frontend_time_to_first_token_seconds_sum", model="m") == pytest.approx(0.25)
    assert read("dynamo_frontend_inter_token_latency_seconds_count", model="m") == 4
    assert read("dynamo_frontend_inter_token_latency_seconds_sum", model="m") == pytest.approx(0.04)
    assert read("dynamo_frontend_inter_token_latency_seconds_bucket", model="m", le="0.0075") == 0
    assert read("dynamo_frontend_inter_token_latency_seconds_bucket", model="m", le="0.015") == 4
    assert read("dynamo_frontend_request_duration_seconds_sum", model="m") == pytest.approx(0.29)
    assert read("dynamo_frontend_output_tokens_total", model="m") == 5
    assert read("dynamo_frontend_cached_tokens_sum", model="m") == 8
    assert read("dynamo_frontend_inflight_requests", model="m") == 0
    labels = {"model": "m", "endpoint": "completions", "request_type": "stream", "status": "success", "error_type": ""}
    assert read("dynamo_frontend_requests_total", **labels) == 1


def test_a_failed_request_counts_under_its_kind_of_error(frontend: FrontendMetrics, read: Read) -> None:
    frontend.for_model("m").start("tensor", RequestType.UNARY).finish(Code.OVERLOADED)
    labels = {"model": "m", "endpoint": "tensor", "request_type": "unary", "status": "error", "error_type": "overload"}
    assert read("dynamo_frontend_requests_total", **labels) == 1
    assert read("dynamo_frontend_queued_requests", model="m") == 0


def test_a_client_that_left_is_counted(frontend: FrontendMetrics, read: Read) -> None:
    frontend.for_model("m").start("tensor", RequestType.UNARY).finish(Code.CANCELLED)
    assert read("dynamo_frontend_disconnected_clients") == 1
    assert read("dynamo_frontend_model_cancellation_total", model="m", endpoint="tensor", request_type="unary") == 1


def test_names_that_clients_choose_cannot_make_labels_without_end(registry: CollectorRegistry, read: Read) -> None:
    frontend = FrontendMetrics(registry, max_models=3)
    for number in range(50):
        frontend.for_model(f"m{number}").start("tensor", RequestType.UNARY).finish()
    labels = {"endpoint": "tensor", "request_type": "unary", "status": "success", "error_type": ""}
    assert read("dynamo_frontend_requests_total", model="m2", **labels) == 1
    assert read("dynamo_frontend_requests_total", model="other", **labels) == 47
    assert read("dynamo_frontend_requests_total", model="m3", **labels) is None


def test_every_error_code_has_a_kind(frontend: FrontendMetrics) -> None:
    for code in Code:
        frontend.for_model("m").start("tensor", RequestType.UNARY).finish(code)


def test_observations_added_in_bulk_equal_single_ones(registry: CollectorRegistry, read: Read) -> None:
    single = Histogram("single", "s", registry=registry, buckets=SECONDS)
    bulk = Histogram("bulk", "b", registry=registry, buckets=SECONDS)
    values = [0.0005, 0.004, 0.004, 2.5, 700.0]
    counts = [0] * (len(SECONDS) + 1)
    for value in values:
        single.observe(value)
        counts[next((i for i, bound in enumerate(SECONDS) if value <= bound), len(SECONDS))] += 1
    observe_many(bulk, counts, sum(values))
    assert read("bulk_sum") == read("single_sum")
    for bound in (*SECONDS, float("inf")):
        le = "+Inf" if bound == float("inf") else str(float(bound))
        assert read("bulk_bucket", le=le) == read("single_bucket", le=le) is not None


def test_a_long_stream_shows_its_gaps_before_it_ends(frontend: FrontendMetrics, read: Read) -> None:
    clock = Clock()
    request = frontend.for_model("m").start("completions", RequestType.STREAM, clock)
    for _ in range(300):
        clock.now += 0.01
        request.tokens(1)
    assert read("dynamo_frontend_inter_token_latency_seconds_count", model="m") == 256
    request.finish()
    assert read("dynamo_frontend_inter_token_latency_seconds_count", model="m") == 299


def test_grpc_methods_are_counted_under_the_usual_names(registry: CollectorRegistry, read: Read) -> None:
    method = GrpcServerMetrics(registry).for_method("inference.GRPCInferenceService", "ModelInfer", "unary")
    method.started()
    method.received()
    method.sent()
    method.handled("OK", 0.002)
    labels = {
        "grpc_type": "unary",
        "grpc_service": "inference.GRPCInferenceService",
        "grpc_method": "ModelInfer",
    }
    assert read("grpc_server_started_total", **labels) == 1
    assert read("grpc_server_handled_total", **labels, grpc_code="OK") == 1
    assert read("grpc_server_handling_seconds_bucket", **labels, le="0.002") == 1


def test_a_worker_counts_its_requests_bytes_and_failures(registry: CollectorRegistry, read: Read) -> None:
    model = WorkerMetrics(registry, Endpoint(), InstanceId(0xAB)).for_model("m")
    labels = {
        "dynamo_namespace": "dynamo",
        "dynamo_component": "backend",
        "dynamo_endpoint": "generate",
        "worker_id": "ab",
    }
    model.started(100)
    assert read("dynamo_component_inflight_requests", **labels, model="m") == 1
    model.finished(0.5, 50, Code.INTERNAL)
    assert read("dynamo_component_inflight_requests", **labels, model="m") == 0
    assert read("dynamo_component_request_bytes_total", **labels, model="m") == 100
    assert read("dynamo_component_errors_total", **labels, model="m", error_type="internal") == 1
    assert read("dynamo_component_uptime_seconds", **labels) is not None


def test_a_scrape_is_text_that_prometheus_reads() -> None:
    registry = make_registry()
    RuntimeMetrics(registry, role="frontend", version="1").nats_connected.set(1)
    text, content_type = render(registry)
    assert content_type.startswith("text/plain")
    names = {family.name for family in text_string_to_metric_families(text.decode())}
    assert {"dynamo_runtime_nats_connected", "dynamo_runtime_info", "process_cpu_seconds"} <= names


def test_the_scrape_of_several_processes_is_their_sum(tmp_path: Path) -> None:
    program = """
        import sys
        from prometheus_client import CollectorRegistry
        from dynamo.common.telemetry import FrontendMetrics, RequestType
        request = FrontendMetrics(CollectorRegistry()).for_model("m").start("tensor", RequestType.STREAM)
        request.tokens(1); request.tokens(3)
        request.finish()
    """
    for _ in range(2):
        subprocess.run(
            [sys.executable, "-c", textwrap.dedent(program)],
            env={"PROMETHEUS_MULTIPROC_DIR": str(tmp_path), "PYTHONPATH": ":".join(sys.path)},
            check=True,
            timeout=60,
        )
    text = render(CollectorRegistry(), str(tmp_path))[0].decode()
    assert 'dynamo_frontend_output_tokens_total{model="m"} 8.0' in text
    assert 'dynamo_frontend_inter_token_latency_seconds_count{model="m"} 6.0' in text


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
