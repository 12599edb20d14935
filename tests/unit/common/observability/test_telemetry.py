"""What a scrape shows after some requests."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.parser import text_string_to_metric_families

from dynamo.common.errors import Cancelled, Code, InvalidRequest, Overloaded
from dynamo.common.model_card import LlmInfo, ModelCard, ModelKind
from dynamo.common.observability.tally import Tally
from dynamo.common.observability.telemetry import SECONDS, LinkMetrics, RuntimeMetrics, SharedMemoryMetrics, make_registry, render
from dynamo.common.process.background import running
from dynamo.frontend.metrics import FrontendMetrics, RequestTimer, RequestType
from dynamo.frontend.port_metrics import GrpcServerMetrics
from tests.support.waiting import expiring

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
    request = RequestTimer(frontend.for_model("m"), "completions", RequestType.STREAM, clock=clock)
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
    assert read("dynamo_frontend_inter_token_latency_seconds_bucket", model="m", le="0.005") == 0
    assert read("dynamo_frontend_inter_token_latency_seconds_bucket", model="m", le="0.02") == 4
    assert read("dynamo_frontend_request_duration_seconds_sum", model="m") == pytest.approx(0.29)
    assert read("dynamo_frontend_output_tokens_total", model="m") == 5
    assert read("dynamo_frontend_cached_tokens_sum", model="m") == 8
    assert read("dynamo_frontend_inflight_requests", model="m") == 0
    labels = {"model": "m", "endpoint": "completions", "request_type": "stream", "status": "success", "error_type": ""}
    assert read("dynamo_frontend_requests_total", **labels) == 1


def test_a_failed_request_counts_under_its_kind_of_error(frontend: FrontendMetrics, read: Read) -> None:
    RequestTimer(frontend.for_model("m"), "tensor", RequestType.UNARY).finish(Overloaded("full"))
    labels = {"model": "m", "endpoint": "tensor", "request_type": "unary", "status": "error", "error_type": "overload"}
    assert read("dynamo_frontend_requests_total", **labels) == 1
    assert read("dynamo_frontend_queued_requests", model="m") == 0


def test_a_refused_request_counts_by_its_reason(frontend: FrontendMetrics, read: Read) -> None:
    RequestTimer(frontend.for_model("m"), "tensor", RequestType.UNARY).finish(Overloaded("full"))
    frontend.refused("completions", InvalidRequest("no JSON"))
    assert read("dynamo_frontend_model_rejection_total", model="m", reason="overload") == 1
    assert read("dynamo_frontend_model_rejection_total", model="unknown_model", reason="validation") == 1
    labels = {"model": "unknown_model", "endpoint": "completions", "request_type": "unary"}
    assert read("dynamo_frontend_requests_total", **labels, status="error", error_type="validation") == 1


def test_a_scrape_describes_a_model(frontend: FrontendMetrics, read: Read) -> None:
    llm = LlmInfo(context_length=4096, tokenizer="", total_blocks=100, block_size=16, max_num_seqs=8)
    frontend.describe(ModelCard(name="m", kind=ModelKind.LLM, llm=llm), instances=3, migration_limit=2)
    assert read("dynamo_frontend_model_context_length", model="m") == 4096
    assert read("dynamo_frontend_model_total_kv_blocks", model="m") == 100
    assert read("dynamo_frontend_model_kv_cache_block_size", model="m") == 16
    assert read("dynamo_frontend_model_max_num_seqs", model="m") == 8
    assert read("dynamo_frontend_model_migration_limit", model="m") == 2
    assert read("dynamo_frontend_model_instances", model="m") == 3
    frontend.forget("m")
    assert read("dynamo_frontend_model_instances", model="m") == 0


def test_a_client_that_left_is_counted(frontend: FrontendMetrics, read: Read) -> None:
    RequestTimer(frontend.for_model("m"), "tensor", RequestType.UNARY).finish(Cancelled())
    assert read("dynamo_frontend_disconnected_clients") == 1
    assert read("dynamo_frontend_model_cancellation_total", model="m", endpoint="tensor", request_type="unary") == 1


def test_names_that_clients_choose_cannot_make_labels_without_end(registry: CollectorRegistry, read: Read) -> None:
    frontend = FrontendMetrics(registry, max_models=3)
    for number in range(50):
        RequestTimer(frontend.for_model(f"m{number}"), "tensor", RequestType.UNARY).finish()
    labels = {"endpoint": "tensor", "request_type": "unary", "status": "success", "error_type": ""}
    assert read("dynamo_frontend_requests_total", model="m2", **labels) == 1
    assert read("dynamo_frontend_requests_total", model="other", **labels) == 47
    assert read("dynamo_frontend_requests_total", model="m3", **labels) is None


def test_every_error_code_has_a_kind(frontend: FrontendMetrics) -> None:
    for code in Code:
        frontend.for_model("m").add_outcome("tensor", RequestType.UNARY, code)


def test_a_scrape_includes_pending_increments(registry: CollectorRegistry, read: Read) -> None:
    tally = Tally(registry)
    counter = Counter("counted", "c", registry=registry)
    gauge = Gauge("gauged", "g", registry=registry)
    amount, level = tally.amount(counter), tally.amount(gauge)
    amount.value += 2
    level.value -= 1
    assert (read("counted_total"), read("gauged")) == (2, -1)
    assert (read("counted_total"), read("gauged")) == (2, -1)
    amount.value += 1
    assert read("counted_total") == 3


def test_pending_observations_equal_immediate_ones(registry: CollectorRegistry, read: Read) -> None:
    tally = Tally(registry)
    single = Histogram("single", "s", registry=registry, buckets=SECONDS)
    waited = Histogram("waited", "w", registry=registry, buckets=SECONDS)
    spread = tally.spread(waited)
    values = [0.0005, 0.004, 0.004, 0.01, 2.5, 700.0]
    for value in values:
        single.observe(value)
        spread.observe(value)
    counts = [0] * (len(SECONDS) + 1)
    counts[0] = 3
    spread.add(counts, 0.0015)
    for _ in range(3):
        single.observe(0.0005)
    assert read("waited_sum") == read("single_sum")
    for bound in (*SECONDS, float("inf")):
        le = "+Inf" if bound == float("inf") else str(float(bound))
        assert read("waited_bucket", le=le) == read("single_bucket", le=le) is not None


def test_a_histogram_has_no_series_for_a_model_without_observations(registry: CollectorRegistry, read: Read) -> None:
    tally = Tally(registry)
    histogram = Histogram("h", "h", ("model",), registry=registry, buckets=SECONDS)
    used, unused = tally.spread(histogram, "used"), tally.spread(histogram, "unused")
    used.observe(0.5)
    assert read("h_count", model="used") == 1 and read("h_count", model="unused") is None
    unused.observe(0.5)
    assert read("h_count", model="unused") == 1


def test_a_long_stream_shows_its_gaps_before_it_ends(frontend: FrontendMetrics, read: Read) -> None:
    clock = Clock()
    request = RequestTimer(frontend.for_model("m"), "completions", RequestType.STREAM, clock=clock)
    for _ in range(300):
        clock.now += 0.01
        request.tokens(1)
    assert read("dynamo_frontend_inter_token_latency_seconds_count", model="m") == 256
    request.finish()
    assert read("dynamo_frontend_inter_token_latency_seconds_count", model="m") == 299


def test_grpc_methods_are_counted_under_the_usual_names(registry: CollectorRegistry, read: Read) -> None:
    method = GrpcServerMetrics(registry).for_method("inference.GRPCInferenceService", "ModelInfer", "unary")
    method.started.value += 1
    method.received.value += 1
    method.sent.value += 1
    method.handled("OK", 0.002)
    labels = {
        "grpc_type": "unary",
        "grpc_service": "inference.GRPCInferenceService",
        "grpc_method": "ModelInfer",
    }
    assert read("grpc_server_started_total", **labels) == 1
    assert read("grpc_server_handled_total", **labels, grpc_code="OK") == 1
    assert read("grpc_server_handling_seconds_bucket", **labels, le="0.002") == 1


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
        from dynamo.frontend.metrics import FrontendMetrics, RequestTimer, RequestType
        metrics = FrontendMetrics(CollectorRegistry())
        request = RequestTimer(metrics.for_model("m"), "tensor", RequestType.STREAM)
        request.tokens(1); request.tokens(3)
        request.finish()
        metrics.tally.flush()
    """
    for _ in range(2):
        subprocess.run(
            [sys.executable, "-c", textwrap.dedent(program)],
            env={"PROMETHEUS_MULTIPROC_DIR": str(tmp_path), "PYTHONPATH": ":".join(sys.path)},
            check=True,
            timeout=120,
        )
    text = render(CollectorRegistry(), str(tmp_path))[0].decode()
    assert 'dynamo_frontend_output_tokens_total{model="m"} 8.0' in text
    assert 'dynamo_frontend_inter_token_latency_seconds_count{model="m"} 6.0' in text
    assert "process_resident_memory_bytes" not in text, "memory of processes that have ended"


async def test_the_lag_of_the_event_loop_is_measured_while_something_blocks_it() -> None:
    registry = CollectorRegistry()
    metrics = LinkMetrics(registry, "dynamo_frontend")

    def late(bound: str) -> float:
        name = "dynamo_frontend_event_loop_lag_seconds"
        total = registry.get_sample_value(f"{name}_count") or 0
        return total - (registry.get_sample_value(f"{name}_bucket", {"le": bound}) or 0)

    async with running(metrics.measure_lag(), "lag"):
        await asyncio.sleep(0)  # the first timer is set
        time.sleep(expiring(0.2))  # noqa: ASYNC251  # blocks the loop on purpose
        async with asyncio.timeout(120):
            while not late("0.1"):
                await asyncio.sleep(0)
        assert late("0.1") == 1


async def test_the_link_to_nats_is_shown_with_its_age_streams_and_credit() -> None:
    class Nats:
        last_read_at = 10.0

        def __init__(self) -> None:
            self.callbacks: list[Callable[[], None]] = []

        def on_reconnect(self, callback: Callable[[], None]) -> None:
            self.callbacks.append(callback)

    registry, nats = CollectorRegistry(), Nats()
    metrics = LinkMetrics(registry, "dynamo_component", {"worker_id": "1f"})
    metrics.follow("requests", nats)
    for callback in nats.callbacks * 2:
        callback()
    metrics.show(12.5, open_streams=3, free_credit_bytes=1024)
    of_process = {"worker_id": "1f"}
    of_connection = {**of_process, "connection": "requests"}
    values = {
        name: registry.get_sample_value(f"dynamo_component_{name}", labels)
        for name, labels in (
            ("nats_silence_seconds", of_connection),
            ("nats_reconnects_total", of_connection),
            ("open_streams", of_process),
            ("free_credit_bytes", of_process),
        )
    }
    assert values == {"nats_silence_seconds": 2.5, "nats_reconnects_total": 2, "open_streams": 3, "free_credit_bytes": 1024}


@dataclass
class Memory:
    bytes: dict[str, int]
    fallbacks: dict[str, int]
    used_bytes: int = 7
    capacity_bytes: int = 9


@pytest.mark.parametrize("labels", [{}, {"worker_id": "1"}])
def test_shared_memory_is_shown_as_it_is_and_what_was_shown_is_not_added_again(
    registry: CollectorRegistry, read: Read, labels: dict[str, str]
) -> None:
    metrics = SharedMemoryMetrics(registry, "x", labels)
    metrics.show(None)
    memory = Memory({"lent": 5}, {"full": 1})
    for _ in range(3):
        metrics.show(memory)
    memory.bytes["lent"] += 10
    memory.fallbacks["refused"] = 2
    metrics.show(memory)
    assert read("x_shared_memory_bytes_total", direction="lent", **labels) == 15
    assert read("x_shared_memory_fallbacks_total", reason="full", **labels) == 1
    assert read("x_shared_memory_fallbacks_total", reason="refused", **labels) == 2
    assert read("x_shared_memory_used_bytes", **labels) == 7
    assert read("x_shared_memory_capacity_bytes", **labels) == 9
