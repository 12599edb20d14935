"""What a scrape of a worker shows after some requests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import msgspec
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from dynamo.common.errors import Code, EngineError
from dynamo.common.generation import Delta, GenerateRequest, Stop, Summary, pack_tokens, request_encoder
from dynamo.common.kv.events import KvState
from dynamo.common.kv.tiers import Tier
from dynamo.common.model_card import LlmInfo, ModelCard, ModelKind, TensorSpec
from dynamo.common.names import Endpoint, InstanceId
from dynamo.common.tensors.request import TensorRequest
from dynamo.protos.inference_pb2 import ModelInferRequest
from dynamo.protos.model_config_pb2 import ModelConfig
from dynamo.worker.engine.base import Context, Engine, EngineLoad, RequestTimings, TensorEngine, TensorResponse, TierTotals
from dynamo.worker.engine.echo import EchoTensors
from dynamo.worker.observability.metrics import WorkerMetrics
from dynamo.worker.observability.statistics import VersionStatistics
from dynamo.worker.observability.triton_metrics import MetricsConfig, TritonMetrics
from dynamo.worker.repository.models.response_cache import Lookups, ResponseCache
from dynamo.worker.serve import ServedModel, Service
from tests.support.incoming import FakeIncoming

LABELS = {
    "dynamo_namespace": "dynamo",
    "dynamo_component": "backend",
    "dynamo_endpoint": "generate",
    "worker_id": "ab",
    "model": "m",
}
SUCCESS = {"version": "1", "status": "success"}
TENSORS = (TensorSpec(name="X", datatype="FP32", shape=(-1, 2)),)

Read = Callable[..., float | None]


class Busy:
    """A language model that reports a load."""

    async def start(self) -> ModelCard:
        return ModelCard(name="m", kind=ModelKind.LLM, llm=LlmInfo(context_length=100, tokenizer=""))

    async def generate(self, request: GenerateRequest, context: Context) -> AsyncIterator[Delta | Summary]:
        yield Delta(tokens=(1, 2))
        yield Summary(prompt_tokens=8, output_tokens=2, cached_tokens=6, queue_ms=4.0, prefill_ms=40.0)

    def load(self) -> EngineLoad:
        return EngineLoad(waiting=2, running=3, active_blocks=30, total_blocks=120, queued_prefill_tokens=700)

    async def close(self) -> None:
        return


class Broken(EchoTensors):
    async def infer(self, request: TensorRequest, context: Context) -> AsyncIterator[TensorResponse]:
        raise EngineError("out of memory")
        yield TensorResponse()

    async def respond(self, request: TensorRequest, context: Context) -> TensorResponse:
        raise EngineError("out of memory")


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def read(registry: CollectorRegistry) -> Read:
    return lambda name, **labels: registry.get_sample_value(f"dynamo_component_{name}", {**LABELS, **labels})


def service(registry: CollectorRegistry, engine: Engine | TensorEngine, card: ModelCard) -> Service:
    return Service([ServedModel.of(card, engine)], WorkerMetrics(registry, Endpoint(), InstanceId(0xAB)))


def tensor_card() -> ModelCard:
    return ModelCard(name="m", kind=ModelKind.TENSOR, inputs=TENSORS, outputs=TENSORS)


def infer_request() -> bytes:
    request = ModelInferRequest(model_name="m")
    request.inputs.add(name="X", datatype="FP32", shape=[1, 2])
    request.raw_input_contents.append(b"\0" * 8)
    return request.SerializeToString()


async def test_a_tensor_request_counts_with_its_bytes(registry: CollectorRegistry, read: Read) -> None:
    body = infer_request()
    incoming = FakeIncoming(body)
    await service(registry, EchoTensors(), tensor_card()).infer(incoming)
    assert incoming.final is not None
    assert read("requests_total", **SUCCESS) == 1
    assert read("requests_total", version="1", status="error") == 0, "shown before the first, for its rate"
    assert read("queue_seconds_count") == 1
    assert read("inflight_requests") == 0
    assert read("request_bytes_total") == len(body)
    assert read("response_bytes_total") == len(incoming.final)
    assert read("request_duration_seconds_count", **SUCCESS) == 1


async def test_a_failed_request_counts_under_its_kind_of_error(registry: CollectorRegistry, read: Read) -> None:
    with pytest.raises(EngineError):
        await service(registry, Broken(), tensor_card()).infer(FakeIncoming(infer_request()))
    assert read("errors_total", error_type="internal") == 1
    assert read("requests_total", version="1", status="error") == 1
    assert read("queue_seconds_count") is None, "it is of requests that succeeded"
    assert read("inflight_requests") == 0


async def test_a_generation_records_its_tokens_and_the_time_of_its_phases(registry: CollectorRegistry, read: Read) -> None:
    engine = Busy()
    served = service(registry, engine, await engine.start())
    request = GenerateRequest(model="m", prompt=pack_tokens(range(8)), stop=Stop(max_tokens=2))
    await served.generate(FakeIncoming(request_encoder.encode(request)))
    assert read("prompt_tokens_total") == 8
    assert read("cached_tokens_total") == 6
    assert read("output_tokens_total") == 2
    assert read("kv_cache_hit_rate") == 0.75
    assert read("queue_seconds_sum") == pytest.approx(0.004)
    assert read("prefill_seconds_sum") == pytest.approx(0.04)
    sent = read("response_bytes_total")
    assert sent is not None and sent > 0


async def test_a_scrape_reads_the_load_of_the_engine(registry: CollectorRegistry, read: Read) -> None:
    engine = Busy()
    service(registry, engine, await engine.start())
    assert (read("waiting_requests"), read("running_requests")) == (2, 3)
    assert read("queued_prefill_tokens") == 700
    assert (read("active_blocks"), read("total_blocks")) == (30, 120)
    assert read("gpu_cache_usage_percent") == 0.25


class Caching(Busy):
    """A language model whose cache is known."""

    def __init__(self) -> None:
        self.kv = KvState()

    def on_step(self, callback: Callable[[], None]) -> None:
        """It makes no steps."""


async def test_a_scrape_shows_the_blocks_on_unknown_media(registry: CollectorRegistry, read: Read) -> None:
    engine = Caching()
    service(registry, engine, await engine.start())
    assert read("kv_unknown_medium_blocks_total") == 0
    for expected in (3, 6):
        engine.kv.count_unknown(3)
        assert read("kv_unknown_medium_blocks_total") == expected


class Tiered(Busy):
    """A language model with a cache in the host's memory."""

    def __init__(self) -> None:
        self.cpu = TierTotals()

    def tiers(self) -> dict[Tier, TierTotals]:
        return {Tier.GPU: TierTotals(hits=7), Tier.CPU: self.cpu}


async def test_a_scrape_shows_what_each_tier_of_the_cache_did(registry: CollectorRegistry, read: Read) -> None:
    engine = Tiered()
    service(registry, engine, await engine.start())
    assert read("kv_tier_hit_blocks_total", tier="gpu") == 7
    assert read("kv_tier_hit_blocks_total", tier="cpu") == 0, "it is shown before it did anything, so that rates are right"
    for expected in (1, 2):
        engine.cpu += TierTotals(1, 2, 30, 40, 5, 6)
        assert read("kv_tier_hit_blocks_total", tier="cpu") == expected
        assert read("kv_tier_miss_blocks_total", tier="cpu") == 2 * expected
        assert read("kv_tier_bytes_total", tier="cpu", operation="read") == 30 * expected
        assert read("kv_tier_bytes_total", tier="cpu", operation="write") == 40 * expected
        assert read("kv_tier_failures_total", tier="cpu", operation="read") == 5 * expected
        assert read("kv_tier_failures_total", tier="cpu", operation="write") == 6 * expected


async def test_an_engine_without_tiers_shows_none(registry: CollectorRegistry, read: Read) -> None:
    engine = Busy()
    service(registry, engine, await engine.start())
    assert read("kv_tier_hit_blocks_total", tier="gpu") is None


async def test_a_tensor_model_shows_no_cache(registry: CollectorRegistry, read: Read) -> None:
    service(registry, EchoTensors(), tensor_card())
    assert read("total_blocks") is None
    assert read("prompt_tokens_total") is None


def test_names_that_loads_choose_cannot_make_labels_without_end(registry: CollectorRegistry, read: Read) -> None:
    worker = WorkerMetrics(registry, Endpoint(), InstanceId(0xAB), max_models=3)
    for number in range(50):
        for _ in range(2):  # the second time it is known
            model = worker.for_model(f"m{number}")
            model.started(10)
            model.succeeded("1", 0.1, 20, 0.0)
    assert read("requests_total", model="m2", **SUCCESS) == 2
    assert read("requests_total", model="other", **SUCCESS) == 94
    assert read("requests_total", model="m3", **SUCCESS) is None


def test_versions_that_loads_choose_cannot_make_labels_without_end(registry: CollectorRegistry, read: Read) -> None:
    model = WorkerMetrics(registry, Endpoint(), InstanceId(0xAB)).for_model("m")
    for number in range(50):
        for _ in range(2):
            model.started(10)
            model.succeeded(str(number), 0.1, 20, 0.0)
    assert read("requests_total", version="15", status="success") == 2
    assert read("requests_total", version="16", status="success") is None
    assert read("requests_total", version="other", status="success") == 68


def test_language_models_that_share_a_label_add_up(registry: CollectorRegistry, read: Read) -> None:
    worker = WorkerMetrics(registry, Endpoint(), InstanceId(0xAB), max_models=0)
    summary = Summary(prompt_tokens=8, output_tokens=2, cached_tokens=6, queue_ms=4.0, prefill_ms=40.0)
    for name in ("a", "b"):
        model = worker.for_model(name)
        model.follow(Busy())
        model.succeeded("1", 0.1, 20, 0.0, summary)
    worker.for_model("a").succeeded("1", 0.1, 20, 0.0, summary)
    assert read("output_tokens_total", model="other") == 6


async def test_statistics_are_shown_under_triton_s_names(registry: CollectorRegistry) -> None:
    served = service(registry, EchoTensors(), tensor_card())
    registry.register(TritonMetrics(served.version_statistics))
    await served.infer(FakeIncoming(infer_request()))
    [version] = served.version_statistics()
    for code in (Code.INTERNAL, Code.INTERNAL, Code.OVERLOADED, Code.INVALID_REQUEST):
        version.failed(5_000, RequestTimings(), code)
    version.cancelled(5_000, 0, RequestTimings())

    def shown(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"nv_inference_{name}", {"model": "m", "version": "1", **labels})

    assert (shown("request_success"), shown("count"), shown("exec_count")) == (1, 1, 1)
    reasons = ("BACKEND", "REJECTED", "OTHER", "CANCELED")
    assert [shown("request_failure", reason=reason) for reason in reasons] == [2, 1, 1, 1]
    inference = version.inference()
    assert shown("request_duration_us") == inference.success.ns // 1000
    assert shown("queue_duration_us") == inference.queue.ns // 1000
    assert shown("compute_infer_duration_us") == inference.compute_infer.ns // 1000


def test_the_tags_of_a_configuration_are_labels_of_its_model_s_metrics() -> None:
    config = ModelConfig(name="m", metric_tags={"team": "red", "cost": 'a"b'})
    card = msgspec.structs.replace(tensor_card(), model_config=config.SerializeToString())
    [version] = ServedModel.of(card, EchoTensors()).statistics.values()
    version.keep_latencies()
    version.succeeded(1_000_000, RequestTimings())
    registry = CollectorRegistry()
    registry.register(TritonMetrics(lambda: [version, VersionStatistics("n", "1")], MetricsConfig.of(["summary_latencies=true"])))
    cache = ResponseCache(1000)
    cache.for_model("m", config.metric_tags).lookups["1"] = Lookups(hits=3)
    registry.register(cache)
    page = generate_latest(registry).decode().splitlines()
    tagged = r'_cost="a\"b",_team="red",model="m"'
    assert f'nv_inference_count{{{tagged},version="1"}} 1.0' in page
    assert f'nv_inference_request_failure{{{tagged},reason="OTHER",version="1"}} 0.0' in page
    assert f'nv_inference_request_summary_us_count{{{tagged},version="1"}} 1.0' in page
    assert 'nv_inference_count{model="n",version="1"} 0.0' in page
    assert r'nv_cache_num_hits_per_model{_cost="a\"b",_team="red",model="m",version="1"} 3.0' in page


def test_versions_past_the_cap_share_a_label() -> None:
    versions = [VersionStatistics(f"m{number}", "1") for number in range(5)]
    for version in versions:
        version.succeeded(1_000_000, RequestTimings())
    registry = CollectorRegistry()
    registry.register(TritonMetrics(lambda: versions, max_versions=2))
    counts = {
        labels: registry.get_sample_value("nv_inference_count", dict(zip(("model", "version"), labels, strict=True)))
        for labels in (("m0", "1"), ("m1", "1"), ("m2", "1"), ("other", "other"))
    }
    assert counts == {("m0", "1"): 1, ("m1", "1"): 1, ("m2", "1"): None, ("other", "other"): 3}


def summaries(config: MetricsConfig, *totals_us: float) -> str:
    version = VersionStatistics("m", "1")
    version.keep_latencies()
    for total_us in totals_us:
        version.succeeded(int(total_us * 1000), RequestTimings(queue_ns=1000))
    registry = CollectorRegistry()
    registry.register(TritonMetrics(lambda: [version], config))
    return generate_latest(registry).decode()


def test_summaries_are_shown_on_request_with_the_quantiles_that_are_wanted() -> None:
    config = MetricsConfig.of(["summary_latencies=true", "summary_quantiles=0.5:0.05,0.99:0.001"])
    page = summaries(config, *range(1, 101))
    assert "# TYPE nv_inference_request_summary_us summary\n" in page
    values = dict(line.rsplit(" ", 1) for line in page.splitlines() if line.startswith("nv_inference_request_summary_us"))
    assert values == {
        'nv_inference_request_summary_us_count{model="m",version="1"}': "100.0",
        'nv_inference_request_summary_us_sum{model="m",version="1"}': "5050.0",
        'nv_inference_request_summary_us{model="m",quantile="0.5",version="1"}': "50.0",
        'nv_inference_request_summary_us{model="m",quantile="0.99",version="1"}': "99.0",
    }
    assert 'nv_inference_queue_summary_us{model="m",quantile="0.5",version="1"} 1.0' in page
    assert 'quantile="0.5",version="1"} NaN' in summaries(config)


def test_counters_of_latencies_are_left_out_on_request() -> None:
    page = summaries(MetricsConfig.of(["counter_latencies=false"]), 1.0)
    assert "duration_us" not in page
    assert "summary" not in page
    assert "nv_inference_request_success{" in page


@pytest.mark.parametrize("setting", ["summary_latencies=yes", "quantiles=1", "summary_quantiles=0.5", "summary_quantiles=2:0.1"])
def test_a_setting_that_does_not_exist_or_fit_is_named(setting: str) -> None:
    with pytest.raises(ValueError, match=setting.split("=", maxsplit=1)[0]):
        MetricsConfig.of([setting])


def test_a_warm_up_is_an_execution_and_no_inference() -> None:
    statistics = VersionStatistics("m", "1")
    statistics.warmed_up(900, RequestTimings(rows=4))
    statistics.warmed_up(900, RequestTimings(rows=1, execution_rows=2, batched=True, infer_ns=5))
    message = statistics.to_message()
    assert (message.execution_count, message.inference_count, message.inference_stats.success.count) == (2, 0, 0)
    assert [batch.batch_size for batch in message.batch_stats] == [2, 4]
